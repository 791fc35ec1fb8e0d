"""Number formats of the machine, as numpy arrays: conversions that numpy lacks and arithmetic rounded once.

Registers hold bits. A function here takes and returns arrays of the numpy type with the same bits (float32, float16,
uint32 ...); bf16 and the 8-bit floats have no numpy type and travel as unsigned integers. Rounding is to nearest,
ties to even, unless a name says otherwise.
"""

import numpy as np

_HALF_ULP = np.uint64(0x10000000)
_BELOW_F32 = np.uint64(0x1FFFFFFF)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """The low 16 bits of each element, read as bf16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """uint32 with the bf16 nearest to x in its low half; a NaN becomes the quiet NaN 0x7FC0 with its sign kept."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (u >> np.uint32(16)) | np.uint32(0x7FC0), rounded)


def f32_to_f16_toward_zero(x: np.ndarray) -> np.ndarray:
    """float16 of the largest magnitude that does not exceed |x|; finite values never become infinite."""
    h = x.astype(np.float16)
    too_large = np.abs(h.astype(np.float32)) > np.abs(x)
    return np.where(too_large, np.nextafter(h, np.float16(0)), h)


def flush_subnormal(x: np.ndarray) -> np.ndarray:
    """x with subnormal float32 values replaced by zeros of the same sign."""
    small = np.abs(x) < _SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once.

    The product of two float32 is exact in float64; only their sum rounds there. Rounding that sum again to float32
    goes wrong only where the float64 lies exactly between two float32 although the true sum does not: there it is
    moved one step towards the true sum (round to odd).
    """
    p = np.multiply(a, b, dtype=np.float64)
    s = p + c
    s = np.asarray(s)
    halfway = (s.view(np.uint64) & _BELOW_F32) == _HALF_ULP
    if halfway.any():
        c = np.asarray(c, np.float64)
        t = s - p
        lost = (p - (s - t)) + (c - t)
        s = np.where(halfway & (lost != 0), np.nextafter(s, np.where(lost > 0, np.inf, -np.inf)), s)
    return s.astype(np.float32)


def fma_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float16, rounded once: float64 holds every such sum that float16 can tell from its neighbours."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float16)


def float_to_int(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """int64 of x cut towards zero, saturated to [low, high]; NaN becomes 0."""
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=high, neginf=low)
    return np.clip(wide, low, high).astype(np.int64)


def _fp8_values(exponent_bits: int, bias: int, specials: str) -> np.ndarray:
    """The 256 values of an 8-bit float. specials: "ieee" (inf and NaN at the top exponent), "fn" (only the all-ones
    code is NaN, no inf), "fnuz" (only the code of negative zero is NaN)."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)) * sign
    if specials == "ieee":
        top = exponent == 2**exponent_bits - 1
        values = np.where(top, np.where(fraction == 0, sign * np.inf, np.nan), values)
    elif specials == "fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[0x80] = np.nan
    return values.astype(np.float32)


#: OCP formats of gfx950 and gfx12, and the formats without negative zero of gfx942.
FP8_VALUES = {
    "fp8": _fp8_values(4, 7, "fn"),
    "bf8": _fp8_values(5, 15, "ieee"),
    "fp8_fnuz": _fp8_values(4, 8, "fnuz"),
    "bf8_fnuz": _fp8_values(5, 16, "fnuz"),
}


def fp8_to_f32(codes: np.ndarray, kind: str) -> np.ndarray:
    """The low 8 bits of each element, read as the 8-bit float `kind` (a key of FP8_VALUES)."""
    return FP8_VALUES[kind][codes.astype(np.uint32) & np.uint32(0xFF)]


def f32_to_fp8(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """uint32 codes of the 8-bit floats nearest to x.

    A magnitude that rounds beyond the largest finite value becomes that value with `saturate` (the mode bit
    FP16_OVFL), else infinity where the format has one, else NaN. Infinite inputs go the same way.
    """
    fnuz = kind.endswith("fnuz")
    positive = FP8_VALUES[kind][:128].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    # One step beyond the largest value stands for overflow, so that rounding decides it like any other tie.
    steps = np.append(finite, 2 * finite[-1] - finite[-2])
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), steps[-1])
    above = np.clip(np.searchsorted(steps, magnitude), 1, len(steps) - 1)
    down, up = magnitude - steps[above - 1], steps[above] - magnitude
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    nan = 0x80 if fnuz else 0x7F
    beyond = len(finite) - 1 if saturate else 0x7C if kind == "bf8" else nan
    code = np.where(code == len(finite), beyond, code)
    code = np.where(np.isnan(x), nan, code)
    # Formats without negative zero keep no sign on zero and NaN.
    signed = np.signbit(x) & ((code != 0) & (code != nan) if fnuz else True)
    return (code | np.where(signed, 0x80, 0)).astype(np.uint32)
