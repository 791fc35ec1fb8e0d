"""Vector instructions with lane masks: comparisons, selections, carries; and division."""

import math
import operator

import numpy as np
import pytest
from emulator_harness import (
    ALL,
    GFX9,
    RDNA,
    Case,
    assembles,
    check_mask,
    run_lines,
)


def nan_in(a, b):
    return isinstance(a, float) and (math.isnan(a) or math.isnan(b))


RELATIONS = {
    "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lg": lambda a, b: a < b or a > b, "ne": operator.ne, "o": lambda a, b: not nan_in(a, b), "u": nan_in,
    "neq": operator.ne, "nge": lambda a, b: not a >= b, "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
    "nlt": lambda a, b: not a < b, "nlg": lambda a, b: not (a < b or a > b),
    "f": lambda a, b: False, "t": lambda a, b: True, "tru": lambda a, b: True,
}  # fmt: skip
FLOAT_RELATIONS = ("lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt")
INTEGER_RELATIONS = ("lt", "eq", "le", "gt", "ne", "ge")


def _compares():
    for kind in ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"):
        relations = FLOAT_RELATIONS if kind[0] == "f" else INTEGER_RELATIONS
        for relation in relations:
            sources = {"64": "v[0:1], v[2:3]", "32": "v0, v2", "16": "v0, v2"}[kind[1:]]
            half = "v0.l, v2.l" if kind[1:] == "16" else sources
            yield Case(f"v_cmp_{relation}_{kind} s[4:5], {sources}", GFX9, "u32", f"{kind} {kind}", RELATIONS[relation])
            yield Case(f"v_cmp_{relation}_{kind} s4, {half}", RDNA, "u32", f"{kind} {kind}", RELATIONS[relation])
    for relation, kind in (("f", "f32"), ("tru", "f32"), ("f", "i32"), ("t", "u32")):
        yield Case(f"v_cmp_{relation}_{kind} s[4:5], v0, v2", GFX9, "u32", f"{kind} {kind}", RELATIONS[relation])


def class_of(bits, exponent_bits, fraction_bits):
    """Number of the class, from the bits: signalling NaN, quiet NaN, -inf, -normal, -subnormal, -0, +0, ..., +inf."""
    fraction = bits & (2**fraction_bits - 1)
    exponent = bits >> fraction_bits & (2**exponent_bits - 1)
    if exponent == 2**exponent_bits - 1 and fraction:
        return fraction >> (fraction_bits - 1)
    size = (
        ("zero", "subnormal")[fraction > 0] if exponent == 0 else "normal" if exponent < 2**exponent_bits - 1 else "inf"
    )
    order = ("inf", "normal", "subnormal", "zero")
    negative = bits >> (exponent_bits + fraction_bits) & 1
    return 2 + order.index(size) if negative else 9 - order.index(size)


def _classes():
    # Masks are drawn like any integer; only their low ten bits count.
    f32 = lambda x, m: m >> class_of(x, 8, 23) & 1  # noqa: E731
    f16 = lambda x, m: m >> class_of(x, 5, 10) & 1  # noqa: E731
    yield Case("v_cmp_class_f32 s[4:5], v0, v2", GFX9, "u32", "u32 u32", f32)
    yield Case("v_cmp_class_f32 s4, v0, v2", RDNA, "u32", "u32 u32", f32)
    yield Case("v_cmp_class_f16 s[4:5], v0, v2", GFX9, "u32", "u16 u32", f16)
    yield Case("v_cmp_class_f16 s4, v0.l, v2.l", RDNA, "u32", "u16 u16", f16)


@pytest.mark.parametrize("case", [*_compares(), *_classes()], ids=str)
def test_mask_definition(case):
    for arch in case.archs:
        assembles(case.line, arch)
        check_mask(case, arch)


def test_class_tells_signalling_from_quiet_nan():
    w = run_lines(
        ["v_cmp_class_f32 s[4:5], v0, 1", "v_cmp_class_f32 s[6:7], v0, 2"],
        "gfx942",
        [(0, np.where(np.arange(64) % 2, 0x7FC00000, 0x7F800001))],
    )
    assert w.sgprs[0, 4] == 0x55555555 and w.sgprs[0, 6] == 0xAAAAAAAA


@pytest.mark.parametrize("arch", ALL)
def test_cmpx_writes_exec(arch):
    lanes = 64 if arch in GFX9 else 32
    line = "v_cmpx_lt_u32_e64 s[4:5], v0, v2" if arch in GFX9 else "v_cmpx_lt_u32_e64 v0, v2"
    assembles(line, arch)
    lane = np.arange(lanes)
    w = run_lines([line], arch, [(0, lane), (2, 10)], [(4, 7), (126, 0xFFFFFFFC)])
    assert w.sgprs[0, 126] == 0b1111111100
    assert w.sgprs[0, 4] == (0b1111111100 if arch in GFX9 else 7)
    np.testing.assert_array_equal(w.active[0], (lane >= 2) & (lane < 10))


OLD = 0xA5A5A5A5
CASES = [
    Case("v_cndmask_b32_e64 v6, v0, v2, s[8:9]", GFX9, "u32", "u32 u32", lambda a, b: a),
    Case("v_cndmask_b32_e64 v6, v0, -|v2|, s[10:11]", GFX9, "u32", "u32 u32", lambda a, b: b | 2**31),
    Case("v_cndmask_b32_e64 v6, -v0, v2, s8", RDNA, "u32", "u32 u32", lambda a, b: a ^ 2**31),
    Case("v_cndmask_b16 v6.h, v0.l, v2.l, s10", RDNA, "u32", "u16 u16", lambda a, b: b << 16 | 0xA5A5),
    Case("v_cndmask_b16 v6.l, v0.l, v2.l, s8", RDNA, "u16", "u16 u16", lambda a, b: a),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_select(case):
    lanes = {a: 64 if a in GFX9 else 32 for a in case.archs}
    for arch in case.archs:
        assembles(case.line, arch)
        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 2**32, (2, lanes[arch]), np.uint64).astype(np.uint32)
        w = run_lines([case.line], arch, [(0, a), (2, b), (6, OLD)], [(8, 0), (9, 0), (10, 2**32 - 1), (11, 2**32 - 1)])
        width = int(case.sources.split()[0][1:])
        want = [case.expected(int(x) % 2**width, int(y) % 2**width) for x, y in zip(a, b, strict=True)]
        got = [int(x) % 2 ** int(case.result[1:]) for x in w.vgpr_u32[6][0]]
        assert got == [x % 2 ** int(case.result[1:]) for x in want]


def test_select_takes_vcc_where_no_mask_is_named():
    lane = np.arange(32)
    w = run_lines(
        ["v_dual_cndmask_b32 v6, v0, v2 :: v_dual_mov_b32 v1, v2"], "gfx1151", [(0, 1), (2, 2)], [(106, 0xF0)]
    )
    np.testing.assert_array_equal(w.vgpr_u32[6][0], np.where((lane >= 4) & (lane < 8), 2, 1))


CARRIES = [
    ("v_add_co_u32_e64 v6, s[4:5], v0, v2", "v_add_co_u32 v6, s4, v0, v2", lambda a, b, c: a + b),
    ("v_sub_co_u32_e64 v6, s[4:5], v0, v2", "v_sub_co_u32 v6, s4, v0, v2", lambda a, b, c: a - b),
    ("v_subrev_co_u32_e64 v6, s[4:5], v0, v2", "v_subrev_co_u32 v6, s4, v0, v2", lambda a, b, c: b - a),
    ("v_addc_co_u32_e64 v6, s[4:5], v0, v2, s[8:9]", "v_add_co_ci_u32_e64 v6, s4, v0, v2, s8",
     lambda a, b, c: a + b + c),
    ("v_subb_co_u32_e64 v6, s[4:5], v0, v2, s[8:9]", "v_sub_co_ci_u32_e64 v6, s4, v0, v2, s8",
     lambda a, b, c: a - b - c),
    ("v_subbrev_co_u32_e64 v6, s[4:5], v0, v2, s[8:9]", "v_subrev_co_ci_u32_e64 v6, s4, v0, v2, s8",
     lambda a, b, c: b - a - c),
]  # fmt: skip


@pytest.mark.parametrize("gfx9, rdna, formula", CARRIES)
def test_carry_chain(gfx9, rdna, formula):
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, 2**31, 2**32 - 1, 2**32 - 2], np.uint64)
    for arch in ALL:
        line, lanes = (gfx9, 64) if arch in GFX9 else (rdna, 32)
        assembles(line, arch)
        a, b = (rng.choice(np.concatenate([edges, rng.integers(0, 2**32, 5, np.uint64)]), lanes) for _ in range(2))
        w = run_lines([line], arch, [(0, a), (2, b)], [(8, 0x33CC55AA), (9, 0x12345678)])
        carry = np.unpackbits(np.array([0x33CC55AA, 0x12345678], "<u4").view(np.uint8), bitorder="little")[:lanes]
        exact = [formula(int(x), int(y), int(c)) for x, y, c in zip(a, b, carry, strict=True)]
        assert w.vgpr_u32[6][0].tolist() == [x % 2**32 for x in exact]
        assert w.read_mask(4)[0].tolist() == [not 0 <= x < 2**32 for x in exact]


def test_null_swallows_a_carry():
    line = "v_add_co_ci_u32_e64 v6, null, v0, v2, s8"
    assembles(line, "gfx1151")
    w = run_lines([line, "v_add_co_u32 v7, null, v0, v2"], "gfx1151", [(0, 2**32 - 1), (2, 1)], [(8, 1)])
    assert w.vgpr_u32[6][0, :2].tolist() == [1, 0] and not w.vgpr_u32[7].any()
    # Its number belongs to no other register.
    assert w.sgprs[0, 125] == 0 and w.sgprs[0, 126] == 2**32 - 1


def test_mad64_carry_is_bit_64():
    w = run_lines(
        ["v_mad_u64_u32 v[6:7], s[4:5], v0, v1, v[2:3]", "v_mad_i64_i32 v[8:9], s[6:7], v0, v1, v[2:3]"],
        "gfx942",
        [(0, np.where(np.arange(64) % 2, 2**32 - 1, 1)), (1, 2**32 - 1), (2, 2**32 - 1), (3, 2**32 - 1)],
    )
    # Unsigned: odd lanes (2**32 - 1)**2 + 2**64 - 1 carries, even lanes 2**32 - 1 + 2**64 - 1 too.
    assert w.sgprs[0, 4] == 2**32 - 1
    # Signed: odd lanes 1 - 1 = 0, even lanes -1 - 1 = -2, whose bit 64 is the sign.
    assert w.sgprs[0, 6] == 0x55555555
    assert w.vgpr_u32[8][0, :2].tolist() == [2**32 - 2, 0]


def divide(a, b, arch="gfx942"):
    """The division macro of the compiler."""
    mask, vcc = ("s[2:3]", "vcc") if arch in GFX9 else ("s2", "vcc_lo")
    lines = [
        f"v_div_scale_f32 v4, {mask}, v1, v1, v0",
        f"v_div_scale_f32 v5, {vcc}, v0, v1, v0",
        "v_rcp_f32_e32 v6, v4",
        "v_fma_f32 v7, -v4, v6, 1.0",
        "v_fmac_f32_e32 v6, v7, v6",
        "v_mul_f32_e32 v8, v5, v6",
        "v_fma_f32 v9, -v4, v8, v5",
        "v_fmac_f32_e32 v8, v9, v6",
        "v_fma_f32 v10, -v4, v8, v5",
        "v_div_fmas_f32 v11, v10, v6, v8",
        "v_div_fixup_f32 v12, v11, v1, v0",
    ]
    for line in lines:
        assembles(line, arch)
    lanes = 64 if arch in GFX9 else 32
    waves = len(a) // lanes
    as_bits = lambda x: x.astype(np.float32).view(np.uint32).reshape(waves, lanes)  # noqa: E731
    w = run_lines(lines, arch, [(0, as_bits(a)), (1, as_bits(b))], waves=waves)
    return w.vgpr_f32[12].reshape(-1)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
@pytest.mark.parametrize("low, high", [(-1, 1), (-40, 40), (-126, 127), (-149, -100), (90, 127)])
def test_division_macro_rounds_correctly(arch, low, high):
    rng = np.random.default_rng(2)
    draw = lambda: (rng.uniform(1, 2, 512) * rng.choice([-1, 1], 512) * 2.0 ** rng.integers(low, high, 512)).astype(  # noqa: E731
        np.float32
    )
    a, b = draw(), draw()
    with np.errstate(all="ignore"):
        want = a / b
    got = divide(a, b, arch)
    # The macro is correctly rounded for normal results.
    normal = np.abs(want) >= 2.0**-126
    np.testing.assert_array_equal(got[normal], want[normal])
    np.testing.assert_allclose(got[~normal], want[~normal], rtol=0, atol=2.0**-149)


def test_division_macro_special_values():
    special = np.array([0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 3e38], np.float32)
    a, b = (x.reshape(-1) for x in np.meshgrid(special, special))
    with np.errstate(all="ignore"):
        want = a / b
    got = divide(a, b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.parametrize(
    "value, denominator, numerator, scaled, mask",
    [
        # 0 in either place: NaN.
        (1.0, 0.0, 1.0, math.nan, False),
        # The quotient nears the largest float: only the denominator is scaled up.
        (2.0**-60, 2.0**-60, 2.0**60, 2.0**4, True),
        (2.0**60, 2.0**-60, 2.0**60, 2.0**60, True),
        # A subnormal denominator.
        (2.0**-140, 2.0**-140, 2.0**-100, 2.0**-76, False),
        # The reciprocal of the denominator would be subnormal.
        (2.0**127, 2.0**127, 2.0**120, 2.0**63, False),
        # ... and the quotient too.
        (2.0**127, 2.0**127, 2.0**-10, 2.0**63, True),
        (2.0**-10, 2.0**127, 2.0**-10, 2.0**-10, True),
        # Only the quotient would be: the numerator is scaled up.
        (2.0**-100, 2.0**60, 2.0**-100, 2.0**-36, True),
        (2.0**60, 2.0**60, 2.0**-100, 2.0**60, True),
        # A tiny numerator.
        (2.0**-110, 1.0, 2.0**-110, 2.0**-46, False),
        (2.0**-126, 1.0, 2.0**-126, 2.0**-62, True),
        # Nothing to do.
        (3.0, 3.0, 7.0, 3.0, False),
    ],
)
def test_div_scale_cases(value, denominator, numerator, scaled, mask):
    bits = [np.float32(x).view(np.uint32) for x in (value, denominator, numerator)]
    w = run_lines(["v_div_scale_f32 v6, s[4:5], v0, v1, v2"], "gfx942", list(enumerate(bits)))
    np.testing.assert_equal(float(w.vgpr_f32[6][0, 0]), scaled)
    assert w.read_mask(4).all() == mask


def test_div_fmas_undoes_the_scaling():
    one, half = np.float32(1).view(np.uint32), np.float32(0.5).view(np.uint32)
    four = np.float32(4).view(np.uint32)
    w = run_lines(
        ["v_div_fmas_f32 v6, v0, v0, v1", "v_div_fmas_f32 v7, v0, v0, v2"],
        "gfx942",
        [(0, one), (1, half), (2, four)],
        [(106, 1), (107, 0)],
    )
    # Down by 2**64 with a third source below 2, up from there on; untouched where VCC is 0.
    assert w.vgpr_f32[6][0, :2].tolist() == [1.5 * 2.0**-64, 1.5]
    assert w.vgpr_f32[7][0, :2].tolist() == [5 * 2.0**64, 5.0]
