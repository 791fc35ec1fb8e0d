"""Vector instructions on integers and bits, each against its definition in AMD's documents in exact integers."""

import pytest
from emulator_formulas import M32, clamp, cls, clz, ctz, field, middle, perm, signed
from emulator_harness import ALL, CDNA4, GFX9, GFX12, RDNA, Case, assembles, check_vector

from amdgpu.emulator.vector_int import CLEARS_HIGH_HALF, INTEGER


def both(name, sources, result, formula, archs=ALL, encoding="v6, v0, v2"):
    return Case(f"{name} {encoding}", archs, result, sources, formula)


THREE = "v6, v0, v2, v4"
CASES = [
    both("v_mov_b32_e32", "u32", "u32", lambda a: a, encoding="v6, v0"),
    both("v_mov_b64_e32", "u64", "u64", lambda a: a, GFX9, "v[6:7], v[0:1]"),
    both("v_not_b32_e32", "u32", "u32", lambda a: ~a, encoding="v6, v0"),
    both("v_bfrev_b32_e32", "u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2), encoding="v6, v0"),
    both("v_ffbh_u32_e32", "u32", "u32", clz, GFX9, "v6, v0"),
    both("v_clz_i32_u32_e32", "u32", "u32", clz, RDNA, "v6, v0"),
    both("v_ffbl_b32_e32", "u32", "u32", ctz, GFX9, "v6, v0"),
    both("v_ctz_i32_b32_e32", "u32", "u32", ctz, RDNA, "v6, v0"),
    both("v_ffbh_i32_e32", "i32", "u32", cls, GFX9, "v6, v0"),
    both("v_cls_i32_e32", "i32", "u32", cls, RDNA, "v6, v0"),
    both("v_and_b32_e32", "u32 u32", "u32", lambda a, b: a & b),
    both("v_or_b32_e32", "u32 u32", "u32", lambda a, b: a | b),
    both("v_xor_b32_e32", "u32 u32", "u32", lambda a, b: a ^ b),
    both("v_xnor_b32_e32", "u32 u32", "u32", lambda a, b: ~(a ^ b)),
    both("v_and_or_b32", "u32 u32 u32", "u32", lambda a, b, c: (a & b) | c, encoding=THREE),
    both("v_or3_b32", "u32 u32 u32", "u32", lambda a, b, c: a | b | c, encoding=THREE),
    both("v_xor3_b32", "u32 u32 u32", "u32", lambda a, b, c: a ^ b ^ c, RDNA, THREE),
    both("v_bfi_b32", "u32 u32 u32", "u32", lambda a, b, c: c ^ (a & (b ^ c)), encoding=THREE),
    both("v_bfe_u32", "u32 u32 u32", "u32", field, encoding=THREE),
    both("v_bfe_i32", "u32 u32 u32", "u32", lambda a, b, c: field(a, b, c, True), encoding=THREE),
    both("v_bfm_b32", "u32 u32", "u32", lambda a, b: (2 ** (a & 31) - 1) << (b & 31)),
    both("v_bcnt_u32_b32", "u32 u32", "u32", lambda a, b: a.bit_count() + b),
    both("v_perm_b32", "u32 u32 u32", "u32", perm, encoding=THREE),
    both("v_alignbit_b32", "u32 u32 u32", "u32", lambda a, b, c: ((a << 32) | b) >> (c & 31), GFX9, THREE),
    both("v_alignbyte_b32", "u32 u32 u32", "u32", lambda a, b, c: ((a << 32) | b) >> 8 * (c & 3), GFX9, THREE),
    both("v_alignbit_b32", "u32 u32 u16", "u32", lambda a, b, c: ((a << 32) | b) >> (c & 31), RDNA, "v6, v0, v2, v4.l"),
    both(
        "v_alignbyte_b32",
        "u32 u32 u16",
        "u32",
        lambda a, b, c: ((a << 32) | b) >> 8 * (c & 3),
        RDNA,
        "v6, v0, v2, v4.l",
    ),
    both("v_add_u32_e32", "u32 u32", "u32", lambda a, b: a + b, GFX9),
    both("v_sub_u32_e32", "u32 u32", "u32", lambda a, b: a - b, GFX9),
    both("v_subrev_u32_e32", "u32 u32", "u32", lambda a, b: b - a, GFX9),
    both("v_add_nc_u32_e32", "u32 u32", "u32", lambda a, b: a + b, RDNA),
    both("v_sub_nc_u32_e32", "u32 u32", "u32", lambda a, b: a - b, RDNA),
    both("v_subrev_nc_u32_e32", "u32 u32", "u32", lambda a, b: b - a, RDNA),
    both("v_add_i32", "i32 i32", "u32", lambda a, b: a + b, GFX9),
    both("v_sub_i32", "i32 i32", "u32", lambda a, b: a - b, GFX9),
    both("v_add_nc_i32", "i32 i32", "u32", lambda a, b: a + b, RDNA),
    both("v_sub_nc_i32", "i32 i32", "u32", lambda a, b: a - b, RDNA),
    both("v_add3_u32", "u32 u32 u32", "u32", lambda a, b, c: a + b + c, encoding=THREE),
    both("v_xad_u32", "u32 u32 u32", "u32", lambda a, b, c: (a ^ b) + c, encoding=THREE),
    both("v_lshl_add_u32", "u32 u32 u32", "u32", lambda a, b, c: (a << (b & 31)) + c, encoding=THREE),
    both("v_add_lshl_u32", "u32 u32 u32", "u32", lambda a, b, c: (a + b) << (c & 31), encoding=THREE),
    both("v_lshl_or_b32", "u32 u32 u32", "u32", lambda a, b, c: (a << (b & 31)) | c, encoding=THREE),
    both(
        "v_lshl_add_u64",
        "u64 u32 u64",
        "u64",
        lambda a, b, c: (a << (b & 7 if b & 7 < 5 else 0)) + c,
        GFX9,
        "v[6:7], v[0:1], v2, v[4:5]",
    ),
    both("v_lshlrev_b32_e32", "u32 u32", "u32", lambda a, b: b << (a & 31)),
    both("v_lshrrev_b32_e32", "u32 u32", "u32", lambda a, b: b >> (a & 31)),
    both("v_ashrrev_i32_e32", "u32 i32", "u32", lambda a, b: b >> (a & 31)),
    both("v_lshlrev_b64", "u32 u64", "u64", lambda a, b: b << (a & 63), ALL, "v[6:7], v0, v[2:3]"),
    both("v_lshrrev_b64", "u32 u64", "u64", lambda a, b: b >> (a & 63), ALL, "v[6:7], v0, v[2:3]"),
    both("v_ashrrev_i64", "u32 i64", "u64", lambda a, b: b >> (a & 63), ALL, "v[6:7], v0, v[2:3]"),
    both("v_mul_lo_u32", "u32 u32", "u32", lambda a, b: a * b),
    both("v_mul_hi_u32", "u32 u32", "u32", lambda a, b: (a * b) >> 32),
    both("v_mul_hi_i32", "i32 i32", "u32", lambda a, b: (a * b) >> 32),
    both("v_mul_u32_u24_e32", "u32 u32", "u32", lambda a, b: a % 2**24 * (b % 2**24)),
    both("v_mul_i32_i24_e32", "u32 u32", "u32", lambda a, b: signed(a, 24) * signed(b, 24)),
    both("v_mul_hi_u32_u24_e32", "u32 u32", "u32", lambda a, b: (a % 2**24 * (b % 2**24)) >> 32),
    both("v_mul_hi_i32_i24_e32", "u32 u32", "u32", lambda a, b: (signed(a, 24) * signed(b, 24)) >> 32),
    both("v_mad_u32_u24", "u32 u32 u32", "u32", lambda a, b, c: a % 2**24 * (b % 2**24) + c, encoding=THREE),
    both("v_mad_i32_i24", "u32 u32 u32", "u32", lambda a, b, c: signed(a, 24) * signed(b, 24) + c, encoding=THREE),
    both("v_mad_u32_u16", "u16 u16 u32", "u32", lambda a, b, c: a * b + c, GFX9, THREE),
    both("v_mad_i32_i16", "i16 i16 i32", "u32", lambda a, b, c: a * b + c, GFX9, THREE),
    both("v_mad_u32_u16", "u16 u16 u32", "u32", lambda a, b, c: a * b + c, RDNA, "v6, v0.l, v2.l, v4"),
    both("v_mad_i32_i16", "i16 i16 i32", "u32", lambda a, b, c: a * b + c, RDNA, "v6, v0.l, v2.l, v4"),
    # Clamp saturates integers to their type.
    both("v_add_u32_e64", "u32 u32", "u32", lambda a, b: min(a + b, M32), GFX9, "v6, v0, v2 clamp"),
    both("v_sub_u32_e64", "u32 u32", "u32", lambda a, b: max(a - b, 0), GFX9, "v6, v0, v2 clamp"),
    both("v_subrev_u32_e64", "u32 u32", "u32", lambda a, b: max(b - a, 0), GFX9, "v6, v0, v2 clamp"),
    both("v_add_nc_u32_e64", "u32 u32", "u32", lambda a, b: min(a + b, M32), RDNA, "v6, v0, v2 clamp"),
    both("v_sub_nc_u32_e64", "u32 u32", "u32", lambda a, b: max(a - b, 0), RDNA, "v6, v0, v2 clamp"),
    both("v_subrev_nc_u32_e64", "u32 u32", "u32", lambda a, b: max(b - a, 0), RDNA, "v6, v0, v2 clamp"),
    both("v_add_i32", "i32 i32", "u32", lambda a, b: clamp(a + b, -(2**31), 2**31 - 1), GFX9, "v6, v0, v2 clamp"),
    both("v_sub_nc_i32", "i32 i32", "u32", lambda a, b: clamp(a - b, -(2**31), 2**31 - 1), RDNA, "v6, v0, v2 clamp"),
]
for _kind, _archs in (("i32", ALL), ("u32", ALL)):
    CASES += [
        both(f"v_min_{_kind}_e32", f"{_kind} {_kind}", "u32", min, _archs),
        both(f"v_max_{_kind}_e32", f"{_kind} {_kind}", "u32", max, _archs),
        both(f"v_min3_{_kind}", f"{_kind} {_kind} {_kind}", "u32", min, _archs, THREE),
        both(f"v_max3_{_kind}", f"{_kind} {_kind} {_kind}", "u32", max, _archs, THREE),
        both(f"v_med3_{_kind}", f"{_kind} {_kind} {_kind}", "u32", middle, _archs, THREE),
        both(f"v_minmax_{_kind}", f"{_kind} {_kind} {_kind}", "u32", lambda a, b, c: max(min(a, b), c), RDNA, THREE),
        both(f"v_maxmin_{_kind}", f"{_kind} {_kind} {_kind}", "u32", lambda a, b, c: min(max(a, b), c), RDNA, THREE),
    ]

#: 16-bit opcodes: name on gfx9, name on gfx11 and gfx12 ("" where there is none), sources, formula.
SIXTEEN = [
    ("v_add_u16_e32", "v_add_nc_u16", "u16 u16", lambda a, b: a + b),
    ("v_sub_u16_e32", "v_sub_nc_u16", "u16 u16", lambda a, b: a - b),
    ("v_subrev_u16_e32", "", "u16 u16", lambda a, b: b - a),
    ("v_add_i16", "v_add_nc_i16", "i16 i16", lambda a, b: a + b),
    ("v_sub_i16", "v_sub_nc_i16", "i16 i16", lambda a, b: a - b),
    ("v_mul_lo_u16_e32", "v_mul_lo_u16", "u16 u16", lambda a, b: a * b),
    ("v_lshlrev_b16_e32", "v_lshlrev_b16", "u16 u16", lambda a, b: b << (a & 15)),
    ("v_lshrrev_b16_e32", "v_lshrrev_b16", "u16 u16", lambda a, b: b >> (a & 15)),
    ("v_ashrrev_i16_e32", "v_ashrrev_i16", "u16 i16", lambda a, b: b >> (a & 15)),
    ("v_min_u16_e32", "v_min_u16", "u16 u16", min),
    ("v_max_u16_e32", "v_max_u16", "u16 u16", max),
    ("v_min_i16_e32", "v_min_i16", "i16 i16", min),
    ("v_max_i16_e32", "v_max_i16", "i16 i16", max),
    ("v_mad_u16", "v_mad_u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    ("v_mad_i16", "v_mad_i16", "i16 i16 i16", lambda a, b, c: a * b + c),
    ("v_min3_u16", "v_min3_u16", "u16 u16 u16", min),
    ("v_max3_u16", "v_max3_u16", "u16 u16 u16", max),
    ("v_med3_u16", "v_med3_u16", "u16 u16 u16", middle),
    ("v_min3_i16", "v_min3_i16", "i16 i16 i16", min),
    ("v_max3_i16", "v_max3_i16", "i16 i16 i16", max),
    ("v_med3_i16", "v_med3_i16", "i16 i16 i16", middle),
    ("", "v_and_b16", "u16 u16", lambda a, b: a & b),
    ("", "v_or_b16", "u16 u16", lambda a, b: a | b),
    ("", "v_xor_b16", "u16 u16", lambda a, b: a ^ b),
    ("", "v_not_b16_e32", "u16", lambda a: ~a),
    ("", "v_mov_b16_e32", "u16", lambda a: a),
]


def _sixteen():
    """The 16-bit result is checked as part of the whole register: the rest is cleared or kept."""
    kept = 0xA5A50000
    for gfx9, rdna, sources, formula in SIXTEEN:
        count = len(sources.split())
        if gfx9:
            clears = gfx9.removeprefix("v_").removesuffix("_e32") in CLEARS_HIGH_HALF
            rest = 0 if clears else kept
            registers = ", ".join(["v6", "v0", "v2", "v4"][: count + 1])
            yield both(gfx9, sources, "u32", lambda *x, f=formula, r=rest: f(*x) % 2**16 | r, GFX9, registers)
        if rdna:
            low = ", ".join(["v6.l", "v0.l", "v2.l", "v4.l"][: count + 1])
            yield both(rdna, sources, "u32", lambda *x, f=formula: f(*x) % 2**16 | kept, RDNA, low)
            high = ", ".join(["v6.h", "v0.l", "v2.l", "v4.l"][: count + 1])
            yield both(rdna, sources, "u32", lambda *x, f=formula: f(*x) % 2**16 << 16 | 0xA5A5, RDNA, high)


CASES += _sixteen()
CASES += [
    both("v_add_nc_u16", "u16 u16", "u16", lambda a, b: min(a + b, 65535), RDNA, "v6.l, v0.l, v2.l clamp"),
    both("v_sub_u16_e64", "u16 u16", "u32", lambda a, b: max(a - b, 0), GFX9, "v6, v0, v2 clamp"),
    both("v_add_i16", "i16 i16", "u16", lambda a, b: clamp(a + b, -32768, 32767), GFX9, "v6, v0, v2 clamp"),
    both("v_mad_u16", "u16 u16 u16", "u16", lambda a, b, c: min(a * b + c, 65535), GFX9, THREE + " clamp"),
    both("v_mad_i16", "i16 i16 i16", "u16", lambda a, b, c: clamp(a * b + c, -32768, 32767), GFX9, THREE + " clamp"),
]


def table(a, b, c, bits):
    return sum(((bits >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1))) & 1) << i for i in range(32))


for _bits in (0x36, 0xEC, 0x96, 0x01, 0xF0):
    CASES += [
        both("v_bitop3_b32", "u32 u32 u32", "u32", lambda a, b, c, t=_bits: table(a, b, c, t), CDNA4,
             f"{THREE} bitop3:{_bits:#x}"),
        both("v_bitop3_b16", "u16 u16 u16", "u32",
             lambda a, b, c, t=_bits: table(a, b, c, t) % 2**16 | 0xA5A50000, CDNA4, f"{THREE} bitop3:{_bits:#x}"),
    ]  # fmt: skip
CASES += [
    # 64-bit sums with a carry out (here into a dead register).
    both("v_mad_u64_u32", "u32 u32 u64", "u64", lambda a, b, c: a * b + c, GFX9, "v[6:7], s[0:1], v0, v2, v[4:5]"),
    both("v_mad_i64_i32", "i32 i32 i64", "u64", lambda a, b, c: a * b + c, GFX9, "v[6:7], s[0:1], v0, v2, v[4:5]"),
    both("v_mad_u64_u32", "u32 u32 u64", "u64", lambda a, b, c: a * b + c, RDNA, "v[6:7], null, v0, v2, v[4:5]"),
    both("v_mad_co_u64_u32", "u32 u32 u64", "u64", lambda a, b, c: a * b + c, GFX12, "v[6:7], null, v0, v2, v[4:5]"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case):
    for arch in case.archs:
        assembles(case.line, arch)
        check_vector(case, arch)


def test_every_opcode_has_a_case():
    names = {c.name.removeprefix("v_").removesuffix("_e32").removesuffix("_e64") for c in CASES}
    # Moves between register files are in test_emulator_lanes.
    elsewhere = {"accvgpr_read_b32", "accvgpr_write_b32", "accvgpr_mov_b32"}
    assert set(INTEGER) - names - elsewhere == set()
