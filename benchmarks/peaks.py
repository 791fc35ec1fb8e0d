"""What a device could do at best, and the share of it that a measured time reaches.

    roofline time = max(flops / peak flops, bytes / peak bytes)      share = roofline time / measured time

Peaks are those of the vendors' data sheets (dense, without sparsity), which no program reaches: on an H200 a
large bf16 product runs at about 0.8 of its peak and a large copy at about 0.9.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peak rates of a device.

    Attributes:
      name: part of jax's `device_kind` that identifies it.
      half_tflops: TFLOP/s of 16-bit products (bf16, fp16) in the matrix units.
      single_tflops: TFLOP/s of fp32 arithmetic outside the matrix units' reduced-precision modes.
      terabytes: TB/s of device memory.
      source: where the figures stand.
    """

    name: str
    half_tflops: float
    single_tflops: float
    terabytes: float
    source: str


PEAKS = (
    Peaks("H200", 989.5, 67.0, 4.8, "NVIDIA H200 data sheet (SXM; its 1979 bf16 TFLOPS are with sparsity)"),
    Peaks("H100", 989.5, 67.0, 3.35, "NVIDIA H100 data sheet (SXM)"),
    Peaks("MI300X", 1307.4, 163.4, 5.3, "AMD Instinct MI300X data sheet"),
    Peaks("MI325X", 1307.4, 163.4, 6.0, "AMD Instinct MI325X data sheet"),
    Peaks("MI355X", 2516.6, 157.3, 8.0, "AMD Instinct MI355X data sheet"),
)


def peaks_of(device_kind: str) -> Peaks | None:
    """The row whose name is part of jax's `device_kind` ("NVIDIA H200"); None for any other device."""
    return next((row for row in PEAKS if row.name in device_kind), None)


def roofline_share(peaks: Peaks | None, dtype: str, flops: float, moved_bytes: float, seconds: float) -> float | None:
    """Roofline time over measured time, in [0, 1] if the counts are right; None where no peaks are known."""
    if peaks is None:
        return None
    tflops = peaks.single_tflops if dtype == "float32" else peaks.half_tflops
    return max(flops / (tflops * 1e12), moved_bytes / (peaks.terabytes * 1e12)) / seconds
