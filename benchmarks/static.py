"""What the tuning rows of AMD chips compile to: evidence that stands beside the timings, and is none."""

import dataclasses
from collections.abc import Callable, Sequence

from amdgpu import arch, isa, shipped
from benchmarks.table import number, table
from gated_delta import Config, chunk_gated_delta_rule, tuning

HEADER = (
    "AMD row of gated_delta",
    "dtype",
    "VGPRs",
    "spilled",
    "LDS B",
    "workgroups/CU",
    "scan loop: per matrix instruction",
    "",
)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The passes of a prefill with one tuning row, at the sizes of a Qwen3-Next layer.

    Attributes:
      architecture, dtype, config: the row, and the dtype that it was compiled for.
      kernels: names of the passes. vgprs, spilled, lds_bytes, workgroups_per_cu: of each of them.
      scan_ratio: instructions for one matrix instruction in the scan's loop over the chunks; None: it has none.
      faults: of all passes; see `isa.KernelReport.faults`.
      note: what these figures are.
    """

    architecture: str
    dtype: str
    config: Config
    kernels: tuple[str, ...]
    vgprs: tuple[int, ...]
    spilled: tuple[int, ...]
    lds_bytes: tuple[int, ...]
    workgroups_per_cu: tuple[float, ...]
    scan_ratio: float | None
    faults: tuple[str, ...]
    note: str


def gated_delta(on_step: Callable[[str], None] = lambda text: None) -> list[Evidence]:
    """Compile the prefill with every row for AMD chips: a few seconds each that Triton has not seen before.

    Raises:
      ImportError: triton is not installed; the message names the extra.
    """
    rows = {(row.architecture, row.itemsize) for row in tuning.ROWS}
    found = []
    for work in shipped.works("gated_delta", arch.KNOWN):
        dtype = work.keywords["v"].dtype
        if work.fn is chunk_gated_delta_rule and (work.arch, dtype.itemsize) in rows:
            on_step(f"{work.arch} {dtype.name}")
            found.append(_evidence(work, isa.compile_for(work.fn, *work.shapes, arch=work.arch, **work.keywords)))
    return found


def _evidence(work: shipped.Work, reports: Sequence[isa.KernelReport]) -> Evidence:
    loops = [loop for report in reports if report.name == "gated_delta_scan" for loop in report.loops]
    scan = max(loops, key=lambda loop: loop.counts["matrix"], default=None)
    return Evidence(
        architecture=work.arch,
        dtype=work.keywords["v"].dtype.name,
        config=work.keywords["config"],
        kernels=tuple(report.name for report in reports),
        vgprs=tuple(report.vgprs for report in reports),
        spilled=tuple(report.spilled_vgprs + report.spilled_sgprs for report in reports),
        lds_bytes=tuple(report.lds_bytes for report in reports),
        workgroups_per_cu=tuple(report.occupancy.workgroups_per_cu for report in reports),
        scan_ratio=None if scan is None else scan.instructions_per_matrix,
        faults=tuple(f"{report.name}: {fault}" for report in reports for fault in report.faults),
        note=f"static, compiled for {work.arch}, not a timing",
    )


def as_text(found: Sequence[Evidence]) -> str:
    """A line for each row and dtype; where it has several figures, those of the passes in the order of launches."""
    rows = [
        [
            f"{one.architecture}, {_cut(one.config)}",
            one.dtype,
            _each(one.vgprs),
            _each(one.spilled),
            _each(one.lds_bytes),
            _each(one.workgroups_per_cu),
            f"{number(one.scan_ratio)} instructions",
            one.note,
        ]
        for one in found
    ]
    faults = [f"FAULT: {one.architecture} {one.dtype}, {fault}" for one in found for fault in one.faults]
    passes = ", ".join(dict.fromkeys(name for one in found for name in one.kernels))
    return "\n".join([table(HEADER, rows), *faults, f"figures in this order: {passes}"])


def _cut(config: Config) -> str:
    return f"C {config.chunk_size}, splits {config.dv_splits}, warps {config.num_warps}"


def _each(values: Sequence[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)
