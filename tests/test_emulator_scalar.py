"""Scalar instructions, each against its definition in exact integers, with the SCC it sets or keeps."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator_formulas import ADD, FMA, MUL, SUB, cls, clz, ctz, maxnum, minnum, rounded, saturate, signed
from emulator_harness import (
    ALL,
    GFX9,
    GFX11,
    GFX12,
    RDNA,
    SAMPLES,
    Case,
    assembles,
    check_bits,
    expected_bits,
    inputs,
    run_lines,
    to_python,
)

from amdgpu.emulator.scalar import SAVEEXEC, SCALAR

RDNA35 = ("gfx1151", "gfx1201")
KEEP = None


def case(line, sources, result, formula, scc=KEEP, archs=ALL):
    """scc: formula of the sources, "nonzero" of the result, or None where it must stay."""
    return Case(line, archs, result, sources, formula), scc


def overflow(f):
    return lambda a, b: not -(2**31) <= f(a, b) < 2**31


def field(width, sign):
    def f(a, b):
        offset, size = b & (width - 1), min((b >> 16) & 0x7F, width)
        x = (a >> offset) & (2**size - 1)
        return signed(x, size) if sign and size else x

    return f


def sum_and_difference(new, old):
    """Names of gfx12 and of the others."""
    yield case(f"s_{old}_u32 s6, s0, s2", "u32 u32", "u32", lambda a, b: a + b if "add" in old else a - b,
               lambda a, b: a + b > 2**32 - 1 if "add" in old else b > a, GFX9 + GFX11)  # fmt: skip
    yield case(f"s_{new}_u32 s6, s0, s2", "u32 u32", "u32", lambda a, b: a + b if "add" in old else a - b,
               lambda a, b: a + b > 2**32 - 1 if "add" in old else b > a, GFX12)  # fmt: skip
    f = (lambda a, b: a + b) if "add" in old else (lambda a, b: a - b)
    yield case(f"s_{old}_i32 s6, s0, s2", "i32 i32", "u32", f, overflow(f), GFX9 + GFX11)
    yield case(f"s_{new}_i32 s6, s0, s2", "i32 i32", "u32", f, overflow(f), GFX12)


K = float(np.float32(-1.7))
OLD = 0xA5A5A5A5
OLD_F32, OLD_F16 = float(np.uint32(OLD).view(np.float32)), float(np.uint16(0xA5A5).view(np.float16))
CASES = [
    *sum_and_difference("add_co", "add"),
    *sum_and_difference("sub_co", "sub"),
    case("s_add_nc_u64 s[6:7], s[0:1], s[2:3]", "u64 u64", "u64", lambda a, b: a + b, KEEP, GFX12),
    case("s_sub_nc_u64 s[6:7], s[0:1], s[2:3]", "u64 u64", "u64", lambda a, b: a - b, KEEP, GFX12),
    case("s_mul_u64 s[6:7], s[0:1], s[2:3]", "u64 u64", "u64", lambda a, b: a * b, KEEP, GFX12),
    case("s_mul_i32 s6, s0, s2", "i32 i32", "u32", lambda a, b: a * b),
    case("s_mul_hi_u32 s6, s0, s2", "u32 u32", "u32", lambda a, b: a * b >> 32),
    case("s_mul_hi_i32 s6, s0, s2", "i32 i32", "u32", lambda a, b: a * b >> 32),
    case("s_min_i32 s6, s0, s2", "i32 i32", "u32", min, lambda a, b: a <= b),
    case("s_max_i32 s6, s0, s2", "i32 i32", "u32", max, lambda a, b: a >= b),
    case("s_min_u32 s6, s0, s2", "u32 u32", "u32", min, lambda a, b: a <= b),
    case("s_max_u32 s6, s0, s2", "u32 u32", "u32", max, lambda a, b: a >= b),
    case("s_absdiff_i32 s6, s0, s2", "i32 i32", "u32", lambda a, b: abs(signed(a - b, 32)), "nonzero"),
    case("s_pack_ll_b32_b16 s6, s0, s2", "u32 u32", "u32", lambda a, b: a % 2**16 | b % 2**16 << 16),
    case("s_pack_lh_b32_b16 s6, s0, s2", "u32 u32", "u32", lambda a, b: a % 2**16 | b >> 16 << 16),
    case("s_pack_hl_b32_b16 s6, s0, s2", "u32 u32", "u32", lambda a, b: a >> 16 | b % 2**16 << 16, KEEP, RDNA),
    case("s_pack_hh_b32_b16 s6, s0, s2", "u32 u32", "u32", lambda a, b: a >> 16 | b >> 16 << 16),
    case("s_abs_i32 s6, s0", "i32", "u32", abs, "nonzero"),
    case("s_sext_i32_i8 s6, s0", "u32", "u32", lambda a: signed(a, 8)),
    case("s_sext_i32_i16 s6, s0", "u32", "u32", lambda a: signed(a, 16)),
    case("s_flbit_i32 s6, s0", "i32", "u32", cls, KEEP, GFX9),
    case("s_cls_i32 s6, s0", "i32", "u32", cls, KEEP, RDNA),
    case("s_mov_b32 s6, s0", "u32", "u32", lambda a: a),
    case("s_mov_b64 s[6:7], s[0:1]", "u64", "u64", lambda a: a),
    case("s_movk_i32 s6, 0x8001", "", "u32", lambda: -0x7FFF),
    case("s_mulk_i32 s6, 0xfffd", "", "u32", lambda: OLD * -3),
    case("s_addk_i32 s6, 0xfffd", "", "u32", lambda: OLD - 3, lambda: False, GFX9 + GFX11),
    case("s_addk_co_i32 s6, 0xfffd", "", "u32", lambda: OLD - 3, lambda: False, GFX12),
    case("s_add_f32 s6, s0, s2", "f32 f32", "f32", ADD, KEEP, RDNA35),
    case("s_sub_f32 s6, s0, s2", "f32 f32", "f32", SUB, KEEP, RDNA35),
    case("s_mul_f32 s6, s0, s2", "f32 f32", "f32", MUL, KEEP, RDNA35),
    case("s_min_f32 s6, s0, s2", "f32 f32", "f32", minnum, KEEP, ("gfx1151",)),
    case("s_max_f32 s6, s0, s2", "f32 f32", "f32", maxnum, KEEP, ("gfx1151",)),
    case("s_min_num_f32 s6, s0, s2", "f32 f32", "f32", minnum, KEEP, GFX12),
    case("s_max_num_f32 s6, s0, s2", "f32 f32", "f32", maxnum, KEEP, GFX12),
    case("s_fmac_f32 s6, s0, s2", "f32 f32", "f32", lambda a, b: FMA(a, b, OLD_F32), KEEP, RDNA35),
    case("s_fmaak_f32 s6, s0, s2, 0xbfd9999a", "f32 f32", "f32", lambda a, b: FMA(a, b, K), KEEP, RDNA35),
    case("s_fmamk_f32 s6, s0, 0xbfd9999a, s2", "f32 f32", "f32", lambda a, b: FMA(a, K, b), KEEP, RDNA35),
    case("s_add_f16 s6, s0, s2", "f16 f16", "f16", ADD, KEEP, RDNA35),
    case("s_sub_f16 s6, s0, s2", "f16 f16", "f16", SUB, KEEP, RDNA35),
    case("s_mul_f16 s6, s0, s2", "f16 f16", "f16", MUL, KEEP, RDNA35),
    case("s_min_f16 s6, s0, s2", "f16 f16", "f16", minnum, KEEP, ("gfx1151",)),
    case("s_max_f16 s6, s0, s2", "f16 f16", "f16", maxnum, KEEP, ("gfx1151",)),
    case("s_min_num_f16 s6, s0, s2", "f16 f16", "f16", minnum, KEEP, GFX12),
    case("s_max_num_f16 s6, s0, s2", "f16 f16", "f16", maxnum, KEEP, GFX12),
    case("s_fmac_f16 s6, s0, s2", "f16 f16", "f16", lambda a, b: FMA(a, b, OLD_F16), KEEP, RDNA35),
    case("s_rndne_f32 s6, s0", "f32", "f32", rounded(round), KEEP, RDNA35),
    case("s_floor_f32 s6, s0", "f32", "f32", rounded(math.floor), KEEP, RDNA35),
    case("s_ceil_f32 s6, s0", "f32", "f32", rounded(math.ceil), KEEP, RDNA35),
    case("s_trunc_f32 s6, s0", "f32", "f32", rounded(math.trunc), KEEP, RDNA35),
    case("s_cvt_f32_i32 s6, s0", "i32", "f32", lambda a: Fraction(a), KEEP, RDNA35),
    case("s_cvt_f32_u32 s6, s0", "u32", "f32", lambda a: Fraction(a), KEEP, RDNA35),
    case("s_cvt_i32_f32 s6, s0", "f32", "u32", lambda a: saturate(a, -(2**31), 2**31 - 1), KEEP, RDNA35),
    case("s_cvt_u32_f32 s6, s0", "f32", "u32", lambda a: saturate(a, 0, 2**32 - 1), KEEP, RDNA35),
    case("s_cvt_f32_f16 s6, s0", "f16", "f32", lambda a: a, KEEP, RDNA35),
    case("s_cvt_f16_f32 s6, s0", "f32", "f16", lambda a: a, KEEP, RDNA35),
    case("s_flbit_i32_b32 s6, s0", "u32", "u32", clz, KEEP, GFX9),
    case("s_clz_i32_u32 s6, s0", "u32", "u32", clz, KEEP, RDNA),
    case("s_flbit_i32_b64 s6, s[0:1]", "u64", "u32", lambda a: 64 - a.bit_length() if a else -1, KEEP, GFX9),
    case("s_clz_i32_u64 s6, s[0:1]", "u64", "u32", lambda a: 64 - a.bit_length() if a else -1, KEEP, RDNA),
    case("s_ff1_i32_b32 s6, s0", "u32", "u32", ctz, KEEP, GFX9),
    case("s_ctz_i32_b32 s6, s0", "u32", "u32", ctz, KEEP, RDNA),
    case("s_ff1_i32_b64 s6, s[0:1]", "u64", "u32", ctz, KEEP, GFX9),
    case("s_ctz_i32_b64 s6, s[0:1]", "u64", "u32", ctz, KEEP, RDNA),
    case("s_bfm_b64 s[6:7], s0, s2", "u32 u32", "u64", lambda a, b: (2 ** (a & 63) - 1) << (b & 63)),
    case("s_bfm_b32 s6, s0, s2", "u32 u32", "u32", lambda a, b: (2 ** (a & 31) - 1) << (b & 31)),
]
for _n in (1, 2, 3, 4):
    CASES.append(
        case(f"s_lshl{_n}_add_u32 s6, s0, s2", "u32 u32", "u32", lambda a, b, n=_n: (a << n) + b,
             lambda a, b, n=_n: (a << n) + b > 2**32 - 1)
    )  # fmt: skip
for _w in (32, 64):
    _a, _b, _d = ("s0", "s2", "s6") if _w == 32 else ("s[0:1]", "s[2:3]", "s[6:7]")
    _u, _i, _m = f"u{_w}", f"i{_w}", _w - 1
    CASES += [
        case(f"s_and_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a & b, "nonzero"),
        case(f"s_or_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a | b, "nonzero"),
        case(f"s_xor_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a ^ b, "nonzero"),
        case(f"s_nand_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: ~(a & b), "nonzero"),
        case(f"s_nor_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: ~(a | b), "nonzero"),
        case(f"s_xnor_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: ~(a ^ b), "nonzero"),
        case(f"s_andn2_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a & ~b, "nonzero", GFX9),
        case(f"s_orn2_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a | ~b, "nonzero", GFX9),
        case(f"s_and_not1_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a & ~b, "nonzero", RDNA),
        case(f"s_or_not1_b{_w} {_d}, {_a}, {_b}", f"{_u} {_u}", _u, lambda a, b: a | ~b, "nonzero", RDNA),
        case(f"s_not_b{_w} {_d}, {_a}", _u, _u, lambda a: ~a, "nonzero"),
        case(f"s_lshl_b{_w} {_d}, {_a}, s2", f"{_u} u32", _u, lambda a, b, m=_m: a << (b & m), "nonzero"),
        case(f"s_lshr_b{_w} {_d}, {_a}, s2", f"{_u} u32", _u, lambda a, b, m=_m: a >> (b & m), "nonzero"),
        case(f"s_ashr_i{_w} {_d}, {_a}, s2", f"{_i} u32", _u, lambda a, b, m=_m: a >> (b & m), "nonzero"),
        case(f"s_bfe_u{_w} {_d}, {_a}, s2", f"{_u} u32", _u, field(_w, False), "nonzero"),
        case(f"s_bfe_i{_w} {_d}, {_a}, s2", f"{_u} u32", _u, field(_w, True), "nonzero"),
        case(f"s_brev_b{_w} {_d}, {_a}", _u, _u, lambda a, w=_w: int(f"{a:0{w}b}"[::-1], 2)),
        case(f"s_bcnt0_i32_b{_w} s6, {_a}", _u, "u32", lambda a, w=_w: w - a.bit_count(), "nonzero"),
        case(f"s_bcnt1_i32_b{_w} s6, {_a}", _u, "u32", lambda a: a.bit_count(), "nonzero"),
        case(f"s_bitcmp0_b{_w} {_a}, s2", f"{_u} u32", "", None, lambda a, b, m=_m: not a >> (b & m) & 1),
        case(f"s_bitcmp1_b{_w} {_a}, s2", f"{_u} u32", "", None, lambda a, b, m=_m: a >> (b & m) & 1),
    ]
for _kind, _relations in (("i32", 6), ("u32", 6), ("u64", 2)):
    _names = ["eq", "lg", "gt", "ge", "lt", "le"][:_relations]
    _functions = {
        "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
        "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    }  # fmt: skip
    _registers = "s[0:1], s[2:3]" if _kind == "u64" else "s0, s2"
    CASES += [case(f"s_cmp_{n}_{_kind} {_registers}", f"{_kind} {_kind}", "", None, _functions[n]) for n in _names]
    if _kind != "u64":
        CASES += [
            case(f"s_cmpk_{n}_{_kind} s0, {k:#x}", _kind, "", None,
                 lambda a, f=_functions[n], value=value: f(a, value), GFX9 + GFX11)
            for n in _names
            for k, value in ((0x7FFF, 0x7FFF), (0xFFFE, -2 if _kind == "i32" else 0xFFFE))
        ]  # fmt: skip
for _name, _function in {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "neq": lambda a, b: a != b, "lg": lambda a, b: a > b or a < b,
    "u": lambda a, b: math.isnan(a) or math.isnan(b), "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "nge": lambda a, b: not a >= b, "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b, "nlt": lambda a, b: not a < b,
}.items():  # fmt: skip
    CASES += [
        case(f"s_cmp_{_name}_f32 s0, s2", "f32 f32", "", None, _function, RDNA35),
        case(f"s_cmp_{_name}_f16 s0, s2", "f16 f16", "", None, _function, RDNA35),
    ]


@pytest.mark.parametrize("case, scc", CASES, ids=lambda x: str(x) if isinstance(x, Case) else "")
@pytest.mark.parametrize("old_scc", [0, 1])
def test_definition(case, scc, old_scc):
    """One wave a sample: every wave has scalars of its own."""
    kinds = case.sources.split()
    bits = inputs(kinds)
    columns = [to_python(b, k) for b, k in zip(bits, kinds, strict=True)]
    sgprs = [(6, OLD), (7, OLD)]
    for i, b in enumerate(bits):
        # The other half of a 16-bit source must not matter.
        low = b | np.uint32(0x5A5A0000) if b.dtype == np.uint16 else b & b.dtype.type(0xFFFFFFFF)
        sgprs.append((2 * i, low))
        if b.dtype == np.uint64:
            sgprs.append((2 * i + 1, b >> np.uint64(32)))
    samples = SAMPLES if kinds else 1
    for arch in case.archs:
        assembles(case.line, arch)
        w = run_lines([f"s_cmp_lg_u32 {old_scc}, 0", case.line], arch, [], sgprs, waves=samples)
        rows = columns or [[0]]
        if case.expected is not None:
            want = expected_bits(case, columns) if columns else [case.expected() % 2 ** int(case.result[1:])]
            wide = w.sgprs[:, 6].astype(np.uint64) | (w.sgprs[:, 7].astype(np.uint64) << np.uint64(32))
            got = [int(x) % 2 ** int(case.result[1:]) for x in wide]
            check_bits(case, arch, got, want, rows)
        flags = w.scc[:, 0].tolist()
        if scc is KEEP:
            assert all(f == bool(old_scc) for f in flags)
        elif scc == "nonzero":
            assert flags == [x != 0 for x in got]
        else:
            arguments = zip(*columns, strict=True) if columns else [()]
            assert flags == [bool(scc(*a)) for a in arguments]


def test_every_opcode_has_a_case():
    names = {c.name.removeprefix("s_") for c, _ in CASES}
    assert set(SCALAR) - names == set()


@pytest.mark.parametrize("arch", ALL)
def test_carry_chain(arch):
    """A 96-bit sum and difference."""
    add, addc = ("s_add_u32", "s_addc_u32") if arch in GFX9 + GFX11 else ("s_add_co_u32", "s_add_co_ci_u32")
    sub, subb = ("s_sub_u32", "s_subb_u32") if arch in GFX9 + GFX11 else ("s_sub_co_u32", "s_sub_co_ci_u32")
    lines = [f"{add} s6, s0, s3", f"{addc} s7, s1, s4", f"{addc} s8, s2, s5",
             f"{sub} s9, s0, s3", f"{subb} s10, s1, s4", f"{subb} s11, s2, s5"]  # fmt: skip
    for line in lines:
        assembles(line, arch)
    rng = np.random.default_rng(0)
    words = rng.choice([0, 1, 2**31, 2**32 - 1, 2**32 - 2, 12345], (64, 6)).astype(np.uint32)
    w = run_lines(lines, arch, [], [(i, words[:, i]) for i in range(6)], waves=64)
    whole = lambda x: sum(int(v) << 32 * i for i, v in enumerate(x))  # noqa: E731
    for i, row in enumerate(words):
        a, b = whole(row[:3]), whole(row[3:])
        assert whole(w.sgprs[i, 6:9]) == (a + b) % 2**96
        assert whole(w.sgprs[i, 9:12]) == (a - b) % 2**96
        assert w.scc[i, 0] == (a < b)


def test_addk_overflow():
    w = run_lines(["s_addk_i32 s0, 0x7fff"], "gfx942", [], [(0, np.array([2**31 - 1, 5], np.uint32))], waves=2)
    assert w.sgprs[:, 0].tolist() == [2**31 + 0x7FFE, 0x8004]
    assert w.scc[:, 0].tolist() == [True, False]


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("scc", [0, 1])
def test_select_and_conditional_move(arch, scc):
    lines = [f"s_cmp_lg_u32 {scc}, 0", "s_cselect_b32 s6, s0, s2", "s_cselect_b64 s[8:9], s[0:1], -1",
             "s_cmov_b32 s3, s0", "s_cmov_b64 s[4:5], s[0:1]"]  # fmt: skip
    for line in lines:
        assembles(line, arch)
    w = run_lines(lines, arch, [], [(0, 10), (1, 11), (2, 12), (3, 13), (4, 14), (5, 15)])
    s = w.sgprs[0].tolist()
    assert (s[6], s[8], s[9]) == ((10, 10, 11) if scc else (12, 2**32 - 1, 2**32 - 1))
    assert (s[3], s[4], s[5]) == ((10, 10, 11) if scc else (13, 14, 15))


def test_cmovk():
    w = run_lines(["s_cmp_lg_u32 1, 0", "s_cmovk_i32 s0, 0xffff", "s_cmp_lg_u32 0, 0", "s_cmovk_i32 s1, 0xffff"],
                  "gfx942", [], [(0, 1), (1, 1)])  # fmt: skip
    assert w.sgprs[0, :2].tolist() == [2**32 - 1, 1]


def test_bitset():
    lines = ["s_bitset1_b32 s0, s2", "s_bitset0_b32 s1, s2", "s_bitset1_b64 s[4:5], s3", "s_bitset0_b64 s[6:7], s3"]
    for line in lines:
        assembles(line, "gfx942")
    values = [(0, 0), (1, 2**32 - 1), (2, 37), (3, 64 + 35), (4, 0), (5, 0), (6, 2**32 - 1), (7, 2**32 - 1)]
    w = run_lines(lines, "gfx942", [], values)
    assert w.sgprs[0, [0, 1, 4, 5, 6, 7]].tolist() == [32, 2**32 - 33, 0, 8, 2**32 - 1, 2**32 - 9]


FORMULAS = {
    "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e, "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e), "xnor": lambda s, e: ~(s ^ e), "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e, "andn1": lambda s, e: ~s & e, "orn1": lambda s, e: ~s | e,
}  # fmt: skip
NEW_NAMES = {"andn2": "and_not1", "orn2": "or_not1", "andn1": "and_not0", "orn1": "or_not0"}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("arch", ALL)
def test_saveexec(name, arch):
    """The old EXEC goes to the destination, the new one is the formula of the source and the old one."""
    width = 64 if arch in GFX9 else 32
    opcode = name if arch in GFX9 else NEW_NAMES.get(name, name)
    line = f"s_{opcode}_saveexec_b{width} " + ("s[0:1], s[2:3]" if width == 64 else "s0, s2")
    assembles(line, arch)
    for source, old in ((0x0F0F00FF12345678, 0xFF00FF00F0F0FFFF), (0, 0), (2**64 - 1, 2**64 - 1)):
        source, old = source % 2**width, old % 2**width
        halves = [(2, source % 2**32), (3, source >> 32), (126, old % 2**32), (127, old >> 32)]
        w = run_lines([line], arch, [], halves)
        whole = lambda n: sum(int(w.sgprs[0, n + i]) << 32 * i for i in range(width // 32))  # noqa: B023, E731
        new = FORMULAS[name](source, old) % 2**width
        assert (whole(0), whole(126), w.scc[0, 0]) == (old, new, new != 0)
        assert w.active[0].tolist() == [bool(new >> i & 1) for i in range(width)]


def test_every_saveexec_has_a_case():
    assert set(SAVEEXEC) == set(FORMULAS) | set(NEW_NAMES.values())


def test_null_reads_zero_and_swallows_writes():
    w = run_lines(["s_mov_b32 null, s0", "s_add_u32 s1, null, s0"], "gfx1151", [], [(0, 7)])
    assert w.sgprs[0, 1] == 7
