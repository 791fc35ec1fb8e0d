"""Packed and mixed-precision vector instructions and conversions of 8-bit floats."""

import math
import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulator_formulas import ADD, FMA, MUL, exactly, maximum, maxnum, minimum, minnum
from emulator_harness import (
    ALL,
    CDNA4,
    GFX9,
    GFX11,
    GFX12,
    RDNA,
    Case,
    assembles,
    check_vector,
    run_lines,
)

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.packed import PACKED

OLD = 0xA5A5A5A5


def halves(x, kind):
    """(low, high) of a 32-bit register as Python numbers."""
    dtype = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}[kind]
    return np.array([x], np.uint32).view(dtype).tolist()


def packed(kind, formula, sources=None):
    """Formula of a whole register from that of one half."""
    dtype = {"f16": np.float16, "u16": np.uint16, "i16": np.int16}[kind]

    def f(*x):
        parts = list(zip(*[halves(v, k) for v, k in zip(x, sources or [kind] * len(x), strict=True)], strict=True))
        results = [formula(*p) for p in parts]
        if kind == "f16":
            from emulator_harness import round_to

            bits = [round_to(r, "f16") for r in results]
        else:
            bits = [int(np.array(int(r) % 2**16, np.uint16).astype(dtype).view(np.uint16)) for r in results]
        return bits[0] | bits[1] << 16

    return f


def clamp(x, low, high):
    return max(low, min(high, x))


def pk(line, kind, count, formula, archs=ALL, sources=None):
    return Case(
        line, archs, "u32", " ".join(["u32"] * count), packed(kind, formula, sources), 0, "f16" if kind == "f16" else ""
    )


PACKED_CASES = [
    pk("v_pk_add_f16 v6, v0, v2", "f16", 2, ADD),
    pk("v_pk_mul_f16 v6, v0, v2", "f16", 2, MUL),
    pk("v_pk_fma_f16 v6, v0, v2, v4", "f16", 3, FMA),
    pk("v_pk_max_f16 v6, v0, v2", "f16", 2, maxnum, GFX9 + GFX11),
    pk("v_pk_min_f16 v6, v0, v2", "f16", 2, minnum, GFX9 + GFX11),
    pk("v_pk_max_num_f16 v6, v0, v2", "f16", 2, maxnum, GFX12),
    pk("v_pk_min_num_f16 v6, v0, v2", "f16", 2, minnum, GFX12),
    pk("v_pk_maximum_f16 v6, v0, v2", "f16", 2, maximum, GFX12),
    pk("v_pk_minimum_f16 v6, v0, v2", "f16", 2, minimum, GFX12),
    pk("v_pk_maximum3_f16 v6, v0, v2, v4", "f16", 3, lambda a, b, c: maximum(maximum(a, b), c), CDNA4),
    pk("v_pk_minimum3_f16 v6, v0, v2, v4", "f16", 3, lambda a, b, c: minimum(minimum(a, b), c), CDNA4),
    pk("v_pk_add_f16 v6, v0, v2 neg_lo:[0,1] neg_hi:[0,1]", "f16", 2, exactly(lambda a, b: a - b)),
    pk("v_pk_add_f16 v6, v0, v2 clamp", "f16", 2,
       lambda a, b: 0.0 if math.isnan(r := a + b) else clamp(Fraction(a) + Fraction(b), 0, 1)
       if math.isfinite(r) and r > 0 else (1.0 if r > 0 else 0.0)),
    pk("v_pk_add_u16 v6, v0, v2", "u16", 2, operator.add),
    pk("v_pk_sub_u16 v6, v0, v2", "u16", 2, operator.sub),
    pk("v_pk_add_i16 v6, v0, v2", "i16", 2, operator.add),
    pk("v_pk_sub_i16 v6, v0, v2", "i16", 2, operator.sub),
    pk("v_pk_max_u16 v6, v0, v2", "u16", 2, max),
    pk("v_pk_min_u16 v6, v0, v2", "u16", 2, min),
    pk("v_pk_max_i16 v6, v0, v2", "i16", 2, max),
    pk("v_pk_min_i16 v6, v0, v2", "i16", 2, min),
    pk("v_pk_mul_lo_u16 v6, v0, v2", "u16", 2, operator.mul),
    pk("v_pk_mad_u16 v6, v0, v2, v4", "u16", 3, lambda a, b, c: a * b + c),
    pk("v_pk_mad_i16 v6, v0, v2, v4", "i16", 3, lambda a, b, c: a * b + c),
    pk("v_pk_lshlrev_b16 v6, v0, v2", "u16", 2, lambda a, b: b << (a & 15)),
    pk("v_pk_lshrrev_b16 v6, v0, v2", "u16", 2, lambda a, b: b >> (a & 15)),
    pk("v_pk_ashrrev_i16 v6, v0, v2", "i16", 2, lambda a, b: b >> (a & 15), ALL, ["u16", "i16"]),
    pk("v_pk_sub_u16 v6, v0, v2 clamp", "u16", 2, lambda a, b: max(a - b, 0)),
    pk("v_pk_add_u16 v6, v0, v2 clamp", "u16", 2, lambda a, b: min(a + b, 65535)),
    pk("v_pk_add_i16 v6, v0, v2 clamp", "i16", 2, lambda a, b: clamp(a + b, -32768, 32767)),
    # The low result from the high half of the first source, the high result from the low half of the second.
    Case("v_pk_add_u16 v6, v0, v2 op_sel:[1,0] op_sel_hi:[1,0]", ALL, "u32", "u32 u32",
         lambda a, b: ((a >> 16) + b) % 2**16 | ((a >> 16) + b) % 2**16 << 16),
    # An integer constant is 32 bits wide: 3 has an empty high half, -1 a full one.
    Case("v_pk_add_u16 v6, v0, 3", ALL, "u32", "u32", lambda a: (a + 3) % 2**16 | a & 0xFFFF0000),
    Case("v_pk_add_u16 v6, v0, 3 op_sel_hi:[1,0]", ALL, "u32", "u32",
         lambda a: (a + 3) % 2**16 | ((a >> 16) + 3) % 2**16 << 16),
    Case("v_pk_add_u16 v6, v0, -1", ALL, "u32", "u32", lambda a: (a - 1) % 2**16 | ((a >> 16) - 1) % 2**16 << 16),
    Case("v_fma_mix_f32 v6, v0, v2, v4", ALL, "f32", "f32 f32 f32", FMA),
    Case("v_fma_mix_f32 v6, v0, v2, v4 op_sel_hi:[1,0,1]", ALL, "f32", "f16 f32 f16", FMA),
    Case("v_fma_mix_f32 v6, -v0, |v2|, v4 op_sel_hi:[1,0,0]", ALL, "f32", "f16 f32 f32",
         lambda a, b, c: FMA(-a, abs(b), c)),
]  # fmt: skip


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_definition(case):
    for arch in case.archs:
        assembles(case.line, arch)
        check_vector(case, arch)


def test_every_packed_opcode_has_a_case():
    names = {c.name.removeprefix("v_") for c in PACKED_CASES} | {"pk_add_f32", "pk_mul_f32", "pk_fma_f32"}
    assert set(PACKED) - names == set()


@pytest.mark.parametrize("arch", GFX9)
def test_packed_f32(arch):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, 64)).astype(np.float32)
    lines = [
        "v_pk_add_f32 v[6:7], v[0:1], v[2:3]",
        "v_pk_mul_f32 v[8:9], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]",
        "v_pk_fma_f32 v[10:11], v[0:1], v[2:3], v[4:5] op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[0,0,1]",
        "v_pk_mul_f32 v[12:13], v[0:1], s[2:3] op_sel_hi:[1,0]",
        "v_pk_add_f32 v[14:15], v[0:1], 1.0 op_sel_hi:[1,0]",
        "v_pk_mov_b32 v[16:17], v[0:1], v[2:3] op_sel:[1,0]",
        # The destination is a source of the other half.
        "v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]",
    ]
    for line in lines:
        assembles(line, arch)
    w = run_lines(lines, arch, [(i, r.view(np.uint32)) for i, r in enumerate(x)],
                  [(2, np.float32(3).view(np.uint32)), (3, np.float32(5).view(np.uint32))])  # fmt: skip
    f = w.vgpr_f32
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(f[6][0], x[0] + x[2])
    np.testing.assert_array_equal(f[7][0], x[1] + x[3])
    np.testing.assert_array_equal(f[8][0], x[1] * x[2])
    np.testing.assert_array_equal(f[9][0], x[0] * x[3])
    np.testing.assert_allclose(f[10][0], -wide[0] * wide[2] + wide[4], rtol=1e-7)
    np.testing.assert_allclose(f[11][0], wide[1] * wide[2] - wide[5], rtol=1e-7)
    np.testing.assert_array_equal(f[12][0], x[0] * 3)
    np.testing.assert_array_equal(f[13][0], x[1] * 3)
    np.testing.assert_array_equal(f[14][0], x[0] + 1)
    np.testing.assert_array_equal(f[16][0], x[1])
    np.testing.assert_array_equal(f[17][0], x[2])
    np.testing.assert_array_equal(f[0][0], x[1])
    np.testing.assert_array_equal(f[1][0], x[0])


def test_high_half_of_a_constant_is_refused_in_packed_f32():
    with pytest.raises(EmulatorError, match="high half of a constant"):
        assemble(["v_pk_add_f32 v[0:1], v[0:1], 1.0", "s_endpgm"], "gfx942")


@pytest.mark.parametrize("arch", ALL)
def test_mixed_precision_halves(arch):
    lines = [
        "v_fma_mixlo_f16 v6, v0, v1, neg(0)",
        "v_fma_mixhi_f16 v6, v2, v1, v1 op_sel:[1,0,0] op_sel_hi:[1,0,0]",
    ]
    for line in lines:
        assembles(line, arch)
    h = np.array([1.5, -2.25], np.float16).view(np.uint32)[0]
    w = run_lines(lines, arch, [(0, np.float32(3).view(np.uint32)), (1, np.float32(0.5).view(np.uint32)), (2, h)])
    assert w.vgpr_f16[6][0][0, 0] == 1.5
    assert w.vgpr_f16[6][1][0, 0] == -2.25 * 0.5 + 0.5


def dot2(a, b, c):
    x, y = halves(a, "f16"), halves(b, "f16")
    if not all(map(math.isfinite, (*x, *y, c))):
        return x[0] * y[0] + x[1] * y[1] + c
    return sum(Fraction(p) * Fraction(q) for p, q in zip(x, y, strict=True)) + Fraction(c) or 0.0


DOTS = [
    Case("v_dot2_f32_f16 v6, v0, v2, v4", ALL, "f32", "u32 u32 f32", dot2, 1),
    Case("v_dot2c_f32_f16 v6, v0, v2", GFX9, "f32", "u32 u32",
         lambda a, b: dot2(a, b, float(np.uint32(OLD).view(np.float32))), 1),
]  # fmt: skip


@pytest.mark.parametrize("case", DOTS, ids=str)
def test_dot2(case):
    for arch in case.archs:
        assembles(case.line, arch)
        check_vector(case, arch)


FP8 = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz, ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn, ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
    ("gfx1201", "fp8"): ml_dtypes.float8_e4m3fn, ("gfx1201", "bf8"): ml_dtypes.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("arch, kind", FP8)
def test_every_fp8_value_converts_to_float(arch, kind):
    lanes = 64 if arch in GFX9 else 32
    codes = np.arange(256, dtype=np.uint8).reshape(-1, lanes * 4)
    lines = [f"v_cvt_pk_f32_{kind} v[6:7], v0"]
    if arch in GFX9:
        lines += [
            f"v_cvt_pk_f32_{kind}_sdwa v[8:9], v0 src0_sel:WORD_1",
            f"v_cvt_f32_{kind}_sdwa v10, v0 src0_sel:BYTE_3",
        ]
    else:
        lines += [f"v_cvt_pk_f32_{kind} v[8:9], v0.h", f"v_cvt_f32_{kind} v10, v0 byte_sel:3"]
        lines[0] = f"v_cvt_pk_f32_{kind} v[6:7], v0.l"
    for line in lines:
        assembles(line, arch)
    w = run_lines(lines, arch, [(0, codes.view(np.uint32))], waves=len(codes))
    want = codes.view(FP8[arch, kind]).astype(np.float32).reshape(len(codes), lanes, 4)
    for register, byte in ((6, 0), (7, 1), (8, 2), (9, 3), (10, 3)):
        np.testing.assert_array_equal(w.vgpr_f32[register], want[..., byte])


@pytest.mark.parametrize("arch, kind", FP8)
@pytest.mark.parametrize("saturate", [False, True])
def test_float_converts_to_nearest_fp8(arch, kind, saturate):
    lanes, dtype = 64 if arch in GFX9 else 32, FP8[arch, kind]
    line = f"v_cvt_pk_{kind}_f32 v6, v0, v1"
    high = f"v_cvt_pk_{kind}_f32 v6, v1, v0 op_sel:[0,0,1]"
    if arch in RDNA:
        line, high = f"v_cvt_pk_{kind}_f32 v6.l, v0, v1", f"v_cvt_pk_{kind}_f32 v6.h, v1, v0"
    for text in (line, high):
        assembles(text, arch)
    largest = float(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(4)
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, ties, ties * np.float32(1.0001), rng.standard_normal(512).astype(np.float32) * 10,
                        [0.0, -0.0, np.nan, 1.5 * largest, -2 * largest, np.inf, -np.inf]])  # fmt: skip
    x = np.resize(x, (16, lanes)).astype(np.float32)
    y = np.roll(x, 7)
    register = "HW_REG_WAVE_MODE" if arch == "gfx1201" else "HW_REG_MODE"
    mode = [f"s_setreg_imm32_b32 hwreg({register}, 23, 1), 1"] if saturate else []
    w = run_lines([*mode, line, high], arch, [(0, x.view(np.uint32)), (1, y.view(np.uint32)), (6, OLD)], waves=16)
    with np.errstate(all="ignore"):
        want = [(np.clip(v, -largest, largest) if saturate else v).astype(dtype) for v in (x, y)]
    got = np.ascontiguousarray(w.vgpr_u32[6]).view(np.uint8).reshape(16, lanes, 4).view(dtype)
    for byte, v in enumerate((want[0], want[1], want[1], want[0])):
        a, b = got[..., byte].astype(np.float32), v.astype(np.float32)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a)[~np.isnan(b)], np.signbit(b)[~np.isnan(b)])


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_scaled_fp8_conversions(kind):
    """gfx950: a power of two comes with the conversion."""
    dtype = FP8["gfx950", kind]
    lines = [
        f"v_cvt_scalef32_pk_{kind}_f32 v6, v0, v1, v2",
        f"v_cvt_scalef32_pk_{kind}_f32 v6, v1, v0, v2 op_sel:[0,0,0,1]",
        f"v_cvt_scalef32_pk_f32_{kind} v[8:9], v6, v2",
        f"v_cvt_scalef32_pk_f16_{kind} v10, v6, v2 op_sel:[1,0,0]",
        f"v_cvt_scalef32_pk_bf16_{kind} v11, v6, 1.0",
    ]
    for line in lines:
        assembles(line, "gfx950")
    x = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)
    scale = np.float32(4)
    w = run_lines(lines, "gfx950", [(0, x[0].view(np.uint32)), (1, x[1].view(np.uint32)), (2, scale.view(np.uint32))])
    q = (x / scale).astype(dtype)
    got = np.ascontiguousarray(w.vgpr_u32[6]).view(np.uint8).reshape(64, 4)
    np.testing.assert_array_equal(got[:, :2].T, q.view(np.uint8))
    np.testing.assert_array_equal(got[:, 2:].T, q.view(np.uint8)[::-1])
    back = q.astype(np.float32)
    np.testing.assert_array_equal(w.vgpr_f32[8][0], back[0] * scale)
    np.testing.assert_array_equal(w.vgpr_f32[9][0], back[1] * scale)
    np.testing.assert_array_equal(w.vgpr_f16[10][0][0], (back[1] * scale).astype(np.float16))
    np.testing.assert_array_equal(w.vgpr_f16[10][1][0], (back[0] * scale).astype(np.float16))
    np.testing.assert_array_equal(w.vgpr_u16[11][0][0], back[0].astype(ml_dtypes.bfloat16).view(np.uint16))
