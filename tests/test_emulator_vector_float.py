"""Vector instructions on floats and conversions, each against its definition in exact fractions, rounded once."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator_formulas import (
    ADD,
    FMA,
    MUL,
    SUB,
    exponent,
    flushed,
    fract,
    ldexp,
    mantissa,
    maximum,
    maxnum,
    median,
    minimum,
    minnum,
    mul_zero,
    rounded,
    saturate,
    turns,
    wide,
)
from emulator_harness import ALL, CDNA4, GFX9, GFX11, GFX12, RDNA, Case, assembles, check_vector

from amdgpu.emulator.vector_convert import CONVERT
from amdgpu.emulator.vector_float import FLOAT

INF = math.inf
# The destination before the instruction runs, for those that read it.
OLD_F32 = float(np.uint32(0xA5A5A5A5).view(np.float32))
OLD_F16 = float(np.uint16(0xA5A5).view(np.float16))


def case(line, sources, result, formula, archs=ALL, ulps=0, packed=""):
    return Case(line, archs, result, sources, formula, ulps, packed)


K = float(np.float32(-1.7))
CASES = [
    case("v_exp_f32_e32 v6, v0", "f32", "f32", flushed(np.exp2), ulps=1),
    case("v_log_f32_e32 v6, v0", "f32", "f32", flushed(np.log2), ulps=1),
    case("v_rcp_f32_e32 v6, v0", "f32", "f32", flushed(lambda a: 1 / a), ulps=1),
    case("v_rcp_iflag_f32_e32 v6, v0", "f32", "f32", flushed(lambda a: 1 / a), ulps=1),
    case("v_rsq_f32_e32 v6, v0", "f32", "f32", flushed(lambda a: 1 / np.sqrt(a)), ulps=1),
    case("v_sqrt_f32_e32 v6, v0", "f32", "f32", flushed(np.sqrt), ulps=1),
    case("v_mul_legacy_f32 v6, v0, v2", "f32 f32", "f32", mul_zero, GFX9),
    case("v_mul_dx9_zero_f32 v6, v0, v2", "f32 f32", "f32", mul_zero, RDNA),
    case("v_fmaak_f32 v6, v0, v2, 0xbfd9999a", "f32 f32", "f32", lambda a, b: FMA(a, b, K)),
    case("v_fmamk_f32 v6, v0, 0xbfd9999a, v2", "f32 f32", "f32", lambda a, b: FMA(a, K, b)),
    case("v_fmac_f32_e32 v6, v0, v2", "f32 f32", "f32", lambda a, b: FMA(a, b, OLD_F32)),
    case("v_fmaak_f16 v6.l, v0.l, v2.l, 0xbe66", "f16 f16", "f16", lambda a, b: FMA(a, b, -1.599609375), RDNA),
    case("v_fmamk_f16 v6.l, v0.l, 0xbe66, v2.l", "f16 f16", "f16", lambda a, b: FMA(a, -1.599609375, b), RDNA),
    case("v_fmac_f16_e32 v6.l, v0.l, v2.l", "f16 f16", "f16", lambda a, b: FMA(a, b, OLD_F16), RDNA),
    case("v_frexp_exp_i32_f32_e32 v6, v0", "f32", "u32", exponent),
    case("v_frexp_exp_i16_f16_e32 v6, v0", "f16", "u32", lambda a: exponent(a) % 2**16, GFX9),
    case("v_frexp_exp_i16_f16_e32 v6.l, v0.l", "f16", "u16", exponent, RDNA),
    case("v_frexp_exp_i32_f64_e32 v6, v[0:1]", "f64", "u32", exponent),
    case("v_frexp_mant_f64_e32 v[6:7], v[0:1]", "f64", "f64", mantissa),
    case("v_ldexp_f32 v6, v0, v2", "f32 i32", "f32", ldexp),
    case("v_ldexp_f16_e32 v6.l, v0.l, v2.l", "f16 i16", "f16", ldexp, RDNA),
    case("v_ldexp_f64 v[6:7], v[0:1], v2", "f64 i32", "f64", ldexp, GFX9 + GFX11),
    case("v_add_f64 v[6:7], v[0:1], v[2:3]", "f64 f64", "f64", ADD, GFX9 + GFX11),
    case("v_mul_f64 v[6:7], v[0:1], v[2:3]", "f64 f64", "f64", MUL, GFX9 + GFX11),
    case("v_add_f32_e64 v6, v0, v2 clamp", "f32 f32", "f32", lambda a, b: _clamp(ADD(a, b))),
    case("v_add_f32_e64 v6, -v0, |v2|", "f32 f32", "f32", lambda a, b: ADD(-a, abs(b))),
    case("v_mul_f32_e64 v6, -|v0|, v2", "f32 f32", "f32", lambda a, b: MUL(-abs(a), b)),
    case("v_fma_f32 v6, v0, -v2, |v4|", "f32 f32 f32", "f32", lambda a, b, c: FMA(a, -b, abs(c))),
    case("v_fma_f32 v6, v0, 0.5, v2", "f32 f32", "f32", lambda a, b: FMA(a, 0.5, b)),
    case("v_mul_f32_e32 v6, 0x3fb8aa3b, v0", "f32", "f32", lambda a: MUL(float(np.float32(1.44269502)), a)),
    # An integer constant is the bits of a float, not its value.
    case("v_add_f32_e32 v6, 64, v0", "f32", "f32", lambda a: ADD(64 * 2.0**-149, a)),
    case("v_max_f32_e64 v6, v0, v2 clamp", "f32 f32", "f32", lambda a, b: _clamp(maxnum(a, b)), GFX9 + GFX11),
]


def _clamp(x):
    return 0.0 if isinstance(x, float) and math.isnan(x) else max(0.0, min(1.0, x)) if x > 0 else 0.0


UNARY = [
    ("rndne", rounded(round)),
    ("floor", rounded(math.floor)),
    ("ceil", rounded(math.ceil)),
    ("trunc", rounded(math.trunc)),
    ("frexp_mant", mantissa),
]
for _name, _formula in UNARY:
    CASES += [
        case(f"v_{_name}_f32_e32 v6, v0", "f32", "f32", _formula),
        case(f"v_{_name}_f16_e32 v6, v0", "f16", "f16", _formula, GFX9),
        case(f"v_{_name}_f16_e32 v6.l, v0.l", "f16", "f16", _formula, RDNA),
    ]
for _name, _formula in (("sin", turns(math.sin)), ("cos", turns(math.cos))):
    CASES += [
        case(f"v_{_name}_f32_e32 v6, v0", "f32", "f32", _formula, ulps=1),
        case(f"v_{_name}_f16_e32 v6, v0", "f16", "f16", _formula, GFX9, ulps=1),
        case(f"v_{_name}_f16_e32 v6.l, v0.l", "f16", "f16", _formula, RDNA, ulps=1),
    ]
CASES += [
    case("v_fract_f32_e32 v6, v0", "f32", "f32", lambda a: fract(a, 1 - 2.0**-24)),
    case("v_fract_f16_e32 v6, v0", "f16", "f16", lambda a: fract(a, 1 - 2.0**-11), GFX9),
    case("v_fract_f16_e32 v6.l, v0.l", "f16", "f16", lambda a: fract(a, 1 - 2.0**-11), RDNA),
]
for _name, _function in (
    ("exp", np.exp2), ("log", np.log2), ("rcp", lambda a: 1 / a), ("rsq", lambda a: 1 / np.sqrt(a)), ("sqrt", np.sqrt)
):  # fmt: skip
    CASES += [
        case(f"v_{_name}_f16_e32 v6, v0", "f16", "f16", wide(_function), GFX9, ulps=1),
        case(f"v_{_name}_f16_e32 v6.l, v0.l", "f16", "f16", wide(_function), RDNA, ulps=1),
    ]
#: name on gfx9 and gfx11, name on gfx12 ("" where there is none), sources, formula.
BINARY = [
    ("add", "add", 2, ADD),
    ("sub", "sub", 2, SUB),
    ("subrev", "subrev", 2, lambda a, b: SUB(b, a)),
    ("mul", "mul", 2, MUL),
    ("max", "max_num", 2, maxnum),
    ("min", "min_num", 2, minnum),
    ("fma", "fma", 3, FMA),
    ("max3", "max3_num", 3, lambda a, b, c: maxnum(maxnum(a, b), c)),
    ("min3", "min3_num", 3, lambda a, b, c: minnum(minnum(a, b), c)),
    ("med3", "med3_num", 3, median),
    ("", "maximum", 2, maximum),
    ("", "minimum", 2, minimum),
    ("", "maximum3", 3, lambda a, b, c: maximum(maximum(a, b), c)),
    ("", "minimum3", 3, lambda a, b, c: minimum(minimum(a, b), c)),
    ("", "maximumminimum", 3, lambda a, b, c: minimum(maximum(a, b), c)),
    ("", "minimummaximum", 3, lambda a, b, c: maximum(minimum(a, b), c)),
    ("", "maxmin_num", 3, lambda a, b, c: minnum(maxnum(a, b), c)),
    ("", "minmax_num", 3, lambda a, b, c: maxnum(minnum(a, b), c)),
]
for _old, _new, _count, _formula in BINARY:
    _registers = ", ".join(["v6", "v0", "v2", "v4"][: _count + 1])
    _halves = ", ".join(["v6.l", "v0.l", "v2.l", "v4.l"][: _count + 1])
    _f32, _f16 = " ".join(["f32"] * _count), " ".join(["f16"] * _count)
    if _old:
        CASES += [
            case(f"v_{_old}_f32 {_registers}", _f32, "f32", _formula, GFX9 + GFX11),
            case(f"v_{_old}_f16 {_registers}", _f16, "f16", _formula, GFX9),
            case(f"v_{_old}_f16 {_halves}", _f16, "f16", _formula, GFX11),
        ]
    CASES += [
        case(f"v_{_new}_f32 {_registers}", _f32, "f32", _formula, GFX12),
        case(f"v_{_new}_f16 {_halves}", _f16, "f16", _formula, GFX12),
    ]
for _name, _formula in (
    ("maxmin", lambda a, b, c: minnum(maxnum(a, b), c)),
    ("minmax", lambda a, b, c: maxnum(minnum(a, b), c)),
):
    CASES += [
        case(f"v_{_name}_f32 v6, v0, v2, v4", "f32 f32 f32", "f32", _formula, GFX11),
        case(f"v_{_name}_f16 v6.l, v0.l, v2.l, v4.l", "f16 f16 f16", "f16", _formula, GFX11),
    ]
CASES += [
    case("v_maximum3_f32 v6, v0, v2, v4", "f32 f32 f32", "f32", lambda a, b, c: maximum(maximum(a, b), c), CDNA4),
    case("v_minimum3_f32 v6, v0, v2, v4", "f32 f32 f32", "f32", lambda a, b, c: minimum(minimum(a, b), c), CDNA4),
]


def half_bits(x):
    with np.errstate(over="ignore"):
        return int(np.float16(x).view(np.uint16))


def toward_zero(x):
    h = np.float16(x) if abs(x) < 65520 or not math.isfinite(x) else np.float16(math.copysign(65504, x))
    if math.isfinite(x) and abs(float(h)) > abs(x):
        h = np.nextafter(h, np.float16(0))
    return int(h.view(np.uint16))


def bf16_bits(x):
    """Nearest of the float32 whose low half is empty."""
    if math.isnan(x):
        return 0x7FC0 if math.copysign(1, x) > 0 else 0xFFC0
    if not math.isfinite(x) or x == 0:
        return int(np.float32(x).view(np.uint32)) >> 16
    step = Fraction(2) ** max(math.frexp(x)[1] - 8, -133)
    with np.errstate(over="ignore"):
        nearest = np.float32(float(round(Fraction(x) / step) * step))
    return int(np.float32(math.copysign(nearest, x)).view(np.uint32)) >> 16


I32, U32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
I16, U16 = (-32768, 32767), (0, 65535)
CASES += [
    case("v_cvt_f32_i32_e32 v6, v0", "i32", "f32", lambda a: a),
    case("v_cvt_f32_u32_e32 v6, v0", "u32", "f32", lambda a: a),
    case("v_cvt_i32_f32_e32 v6, v0", "f32", "u32", lambda a: saturate(a, *I32)),
    case("v_cvt_u32_f32_e32 v6, v0", "f32", "u32", lambda a: saturate(a, *U32)),
    case("v_cvt_f16_f32_e32 v6, v0", "f32", "f16", lambda a: a, GFX9),
    case("v_cvt_f16_f32_e32 v6.l, v0", "f32", "f16", lambda a: a, RDNA),
    case("v_cvt_f32_f16_e32 v6, v0", "f16", "f32", lambda a: a, GFX9),
    case("v_cvt_f32_f16_e32 v6, v0.l", "f16", "f32", lambda a: a, RDNA),
    case("v_cvt_f32_bf16_e32 v6, v0", "u16", "u32", lambda a: a << 16, CDNA4),
    case("v_cvt_f64_f32_e32 v[6:7], v0", "f32", "f64", lambda a: a),
    case("v_cvt_f32_f64_e32 v6, v[0:1]", "f64", "f32", lambda a: a),
    case("v_cvt_f64_i32_e32 v[6:7], v0", "i32", "f64", lambda a: a),
    case("v_cvt_f64_u32_e32 v[6:7], v0", "u32", "f64", lambda a: a),
    case("v_cvt_i32_f64_e32 v6, v[0:1]", "f64", "u32", lambda a: saturate(a, *I32)),
    case("v_cvt_u32_f64_e32 v6, v[0:1]", "f64", "u32", lambda a: saturate(a, *U32)),
    case("v_cvt_f16_u16_e32 v6, v0", "u16", "f16", lambda a: a, GFX9),
    case("v_cvt_f16_i16_e32 v6, v0", "i16", "f16", lambda a: a, GFX9),
    case("v_cvt_u16_f16_e32 v6, v0", "f16", "u16", lambda a: saturate(a, *U16), GFX9),
    case("v_cvt_i16_f16_e32 v6, v0", "f16", "u16", lambda a: saturate(a, *I16), GFX9),
    case("v_cvt_f16_u16_e32 v6.l, v0.l", "u16", "f16", lambda a: a, RDNA),
    case("v_cvt_f16_i16_e32 v6.l, v0.l", "i16", "f16", lambda a: a, RDNA),
    case("v_cvt_u16_f16_e32 v6.l, v0.l", "f16", "u16", lambda a: saturate(a, *U16), RDNA),
    case("v_cvt_i16_f16_e32 v6.l, v0.l", "f16", "u16", lambda a: saturate(a, *I16), RDNA),
    case("v_cvt_u32_u16_e32 v6, v0.l", "u16", "u32", lambda a: a, RDNA),
    case("v_cvt_i32_i16_e32 v6, v0.l", "i16", "u32", lambda a: a, RDNA),
    case("v_cvt_rpi_i32_f32_e32 v6, v0", "f32", "u32", lambda a: _nearest(a), GFX9),
    case("v_cvt_flr_i32_f32_e32 v6, v0", "f32", "u32", lambda a: _floor(a), GFX9),
    case("v_cvt_nearest_i32_f32_e32 v6, v0", "f32", "u32", lambda a: _nearest(a), RDNA),
    case("v_cvt_floor_i32_f32_e32 v6, v0", "f32", "u32", lambda a: _floor(a), RDNA),
    case("v_pack_b32_f16 v6, v0, v2", "u16 u16", "u32", lambda a, b: a | b << 16, GFX9),
    case("v_pack_b32_f16 v6, v0.l, v2.l", "u16 u16", "u32", lambda a, b: a | b << 16, RDNA),
    case("v_pack_b32_f16 v6, v0, v2 op_sel:[1,0,0]", "u16 u16", "u32", lambda a, b: 0x5A5A | b << 16, GFX9),
    case("v_cvt_pk_f16_f32 v6, v0, v2", "f32 f32", "u32", lambda a, b: half_bits(a) | half_bits(b) << 16, CDNA4,
         packed="f16"),
    case("v_cvt_pkrtz_f16_f32 v6, v0, v2", "f32 f32", "u32", lambda a, b: toward_zero(a) | toward_zero(b) << 16,
         GFX9, packed="f16"),
    case("v_cvt_pk_rtz_f16_f32 v6, v0, v2", "f32 f32", "u32", lambda a, b: toward_zero(a) | toward_zero(b) << 16,
         RDNA, packed="f16"),
    case("v_cvt_pk_bf16_f32 v6, v0, v2", "f32 f32", "u32", lambda a, b: bf16_bits(a) | bf16_bits(b) << 16, CDNA4,
         packed="bf16"),
    case("v_cvt_pk_i16_f32 v6, v0, v2", "f32 f32", "u32",
         lambda a, b: saturate(a, *I16) % 2**16 | saturate(b, *I16) % 2**16 << 16, RDNA),
    case("v_cvt_pk_u16_f32 v6, v0, v2", "f32 f32", "u32", lambda a, b: saturate(a, *U16) | saturate(b, *U16) << 16,
         RDNA),
    case("v_cvt_pk_i16_i32 v6, v0, v2", "i32 i32", "u32",
         lambda a, b: saturate(a, *I16) % 2**16 | saturate(b, *I16) % 2**16 << 16),
    case("v_cvt_pk_u16_u32 v6, v0, v2", "u32 u32", "u32", lambda a, b: min(a, 65535) | min(b, 65535) << 16),
]  # fmt: skip
CASES += [case(f"v_cvt_f32_ubyte{_i}_e32 v6, v0", "u32", "f32", lambda a, i=_i: (a >> 8 * i) & 255) for _i in range(4)]


def _nearest(a):
    return saturate(math.floor(Fraction(a) + Fraction(1, 2)) if math.isfinite(a) else a, *I32)


def _floor(a):
    return saturate(math.floor(a) if math.isfinite(a) else a, *I32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case):
    for arch in case.archs:
        assembles(case.line, arch)
        check_vector(case, arch)


def test_every_opcode_has_a_case():
    names = {c.name.removeprefix("v_").removesuffix("_e32").removesuffix("_e64") for c in CASES}
    assert (set(FLOAT) | set(CONVERT)) - names == set()
