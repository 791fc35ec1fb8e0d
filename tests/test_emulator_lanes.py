"""Moves between lanes and registers, against their definitions lane by lane."""

import numpy as np
import pytest
from emulator_harness import ALL, CDNA4, GFX9, RDNA, assembles, run_lines

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.lanes import DPP_CONTROLS, LANES
from amdgpu.emulator.target import LANES as WAVE

OLD = 0xA5A5A5A5
RNG = np.random.default_rng(0)
DATA = RNG.integers(0, 2**32, 64, np.uint64).astype(np.uint32)


def row_source(f):
    """A control that moves within rows of 16: f(column) is the column read, or None for none."""
    return lambda i, lanes: None if (c := f(i % 16)) is None else i - i % 16 + c


#: Control, architectures, lane -> lane that it reads (None: there is none).
DPP = [
    ("quad_perm:[3,1,0,2]", ALL, lambda i, n: i - i % 4 + (3, 1, 0, 2)[i % 4]),
    ("row_shl:1", ALL, row_source(lambda c: c + 1 if c + 1 < 16 else None)),
    ("row_shl:7", ALL, row_source(lambda c: c + 7 if c + 7 < 16 else None)),
    ("row_shr:1", ALL, row_source(lambda c: c - 1 if c >= 1 else None)),
    ("row_shr:8", ALL, row_source(lambda c: c - 8 if c >= 8 else None)),
    ("row_ror:4", ALL, row_source(lambda c: (c - 4) % 16)),
    ("row_mirror", ALL, row_source(lambda c: 15 - c)),
    ("row_half_mirror", ALL, row_source(lambda c: c // 8 * 8 + 7 - c % 8)),
    ("row_newbcast:5", GFX9, row_source(lambda c: 5)),
    ("row_share:5", RDNA, row_source(lambda c: 5)),
    ("row_xmask:6", RDNA, row_source(lambda c: c ^ 6)),
    ("row_bcast:15", GFX9, lambda i, n: i // 16 * 16 - 1 if i >= 16 else None),
    ("row_bcast:31", GFX9, lambda i, n: 31 if i >= 32 else None),
    ("wave_shl:1", GFX9, lambda i, n: i + 1 if i + 1 < n else None),
    ("wave_shr:1", GFX9, lambda i, n: i - 1 if i else None),
    ("wave_rol:1", GFX9, lambda i, n: (i + 1) % n),
    ("wave_ror:1", GFX9, lambda i, n: (i - 1) % n),
]
EXECS = (2**64 - 1, 0xF0F0FFFF12345678)


def active_lanes(mask, lanes):
    return [bool(mask >> i & 1) for i in range(lanes)]


def exec_sgprs(mask):
    return [(126, mask % 2**32), (127, mask >> 32)]


@pytest.mark.parametrize("control, archs, source", DPP, ids=[d[0] for d in DPP])
@pytest.mark.parametrize("masks", ["row_mask:0xf bank_mask:0xf", "row_mask:0xa bank_mask:0x3"])
@pytest.mark.parametrize("zero_fill", [False, True])
def test_dpp_move(control, archs, source, masks, zero_fill):
    text = f"v_mov_b32_dpp v6, v0 {control} {masks}" + (" bound_ctrl:1" if zero_fill else "")
    rows, banks = (int(m.split(":")[1], 16) for m in masks.split())
    for arch in archs:
        # Not printed where the bit is clear.
        assembles(text, arch)
        lanes = WAVE[arch]
        for mask in EXECS:
            w = run_lines([text], arch, [(0, DATA[:lanes]), (6, OLD)], exec_sgprs(mask))
            on = active_lanes(mask, lanes)
            for i in range(lanes):
                s = source(i, lanes)
                selected = rows >> (i // 16) & 1 and banks >> (i // 4 % 4) & 1
                if not (on[i] and selected):
                    want = OLD
                elif s is None or not on[s]:
                    want = 0 if zero_fill else OLD
                else:
                    want = int(DATA[s])
                assert w.vgpr_u32[6][0, i] == want, (arch, text, i)


@pytest.mark.parametrize("arch", RDNA)
def test_dpp8_and_fetch_of_inactive_lanes(arch):
    line = "v_mov_b32_dpp v6, v0 dpp8:[7,0,1,2,3,4,5,6]"
    fetch = "v_mov_b32_dpp v7, v0 dpp8:[7,0,1,2,3,4,5,6] fi:1"
    for text in (line, fetch):
        assembles(text, arch)
    mask = 0x0F0FF0F7
    w = run_lines([line, fetch], arch, [(0, DATA[:32]), (6, OLD), (7, OLD)], exec_sgprs(mask))
    on = active_lanes(mask, 32)
    for i in range(32):
        s = i - i % 8 + (i - 1) % 8
        assert w.vgpr_u32[6][0, i] == ((int(DATA[s]) if on[s] else 0) if on[i] else OLD)
        assert w.vgpr_u32[7][0, i] == (int(DATA[s]) if on[i] else OLD)


@pytest.mark.parametrize("arch", ALL)
def test_dpp_applies_to_the_first_source_only(arch):
    line = "v_add_f32_dpp v6, -v0, |v1| row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    assembles(line, arch)
    lanes = WAVE[arch]
    a, b = RNG.standard_normal((2, lanes)).astype(np.float32)
    w = run_lines([line], arch, [(0, a.view(np.uint32)), (1, b.view(np.uint32))])
    moved = np.where(np.arange(lanes) % 16 == 0, np.float32(0), np.roll(a, 1))
    np.testing.assert_array_equal(w.vgpr_f32[6][0], -moved + np.abs(b))


def test_dpp_compare():
    line = "v_cmp_gt_u32_e64_dpp s4, v0, v1 row_xmask:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    assembles(line, "gfx1151")
    w = run_lines([line], "gfx1151", [(0, DATA[:32]), (1, 2**31)])
    np.testing.assert_array_equal(w.read_mask(4)[0], DATA[np.arange(32) ^ 1] > 2**31)
    bad = "v_cmp_gt_u32_e64_dpp s4, v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf"
    with pytest.raises(EmulatorError, match="disabled lanes"):
        assemble([bad, "s_endpgm"], "gfx1151")


def test_every_dpp_control_has_a_case():
    assert set(DPP_CONTROLS) == {d[0].split(":")[0] for d in DPP} | {"dpp8"}


@pytest.mark.parametrize("arch", ALL)
def test_lane_reads_and_writes(arch):
    lines = [
        "v_readfirstlane_b32 s4, v0",
        "v_readlane_b32 s5, v0, 5",
        "v_readlane_b32 s6, v0, s0",
        "v_writelane_b32 v1, s1, 3",
        "s_mov_b32 exec_lo, 0",
        "s_mov_b32 exec_hi, 0",
        "v_readfirstlane_b32 s7, v0",
    ]
    for line in lines:
        assembles(line, arch)
    lanes = WAVE[arch]
    # The first wave's lowest active lane is 2, the second one's 9; writelane writes the inactive lane 3.
    data = np.stack([DATA[:lanes], DATA[:lanes][::-1]])
    execs = np.array([0xFFFFFFF4, 0xFFFFFE00], np.uint32)
    w = run_lines(lines, arch, [(0, data), (1, OLD)], [(0, lanes + 7), (1, 99), (126, execs)], waves=2)
    assert w.sgprs[:, 4].tolist() == [data[0, 2], data[1, 9]]
    assert w.sgprs[:, 5].tolist() == data[:, 5].tolist()
    assert w.sgprs[:, 6].tolist() == data[:, 7].tolist()
    assert w.sgprs[:, 7].tolist() == data[:, 0].tolist()
    assert (w.vgpr_u32[1][0] == np.where(np.arange(lanes) == 3, 99, OLD)).all()


@pytest.mark.parametrize("opcode, flip", [("v_permlane16_b32", 0), ("v_permlanex16_b32", 16)])
@pytest.mark.parametrize("fetch, zero", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("arch", RDNA)
def test_permlane16(opcode, flip, fetch, zero, arch):
    line = f"{opcode} v6, v0, s0, s1 op_sel:[{fetch},{zero}]"
    assembles(line, arch)
    selectors = 0xFEDCBA9812345670
    mask = 0xF0F7FF31
    w = run_lines([line], arch, [(0, DATA[:32]), (6, OLD)], [(0, selectors % 2**32), (1, selectors >> 32), (126, mask)])
    on = active_lanes(mask, 32)
    for i in range(32):
        s = (i ^ flip) // 16 * 16 + (selectors >> 4 * (i % 16) & 15)
        want = int(DATA[s]) if on[s] or fetch else 0 if zero else OLD
        assert w.vgpr_u32[6][0, i] == (want if on[i] else OLD)


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swap(size):
    """gfx950: odd rows of the first register change places with even rows of the second."""
    line = f"v_permlane{size}_swap_b32 v0, v1"
    assembles(line, CDNA4[0])
    a, b = DATA, DATA[::-1].copy()
    w = run_lines([line], "gfx950", [(0, a), (1, b)])
    for i in range(64):
        odd = i // size % 2
        assert w.vgpr_u32[0][0, i] == (b[i - size] if odd else a[i])
        assert w.vgpr_u32[1][0, i] == (b[i] if odd else a[i + size])


@pytest.mark.parametrize("arch", ALL)
def test_swap_registers(arch):
    assembles("v_swap_b32 v0, v1", arch)
    lanes = WAVE[arch]
    w = run_lines(["v_swap_b32 v0, v1"], arch, [(0, 1), (1, 2)], exec_sgprs(0x5))
    on = np.isin(np.arange(lanes), [0, 2])
    np.testing.assert_array_equal(w.vgpr_u32[0][0], np.where(on, 2, 1))
    np.testing.assert_array_equal(w.vgpr_u32[1][0], np.where(on, 1, 2))


@pytest.mark.parametrize("arch", ALL)
def test_mbcnt_numbers_the_set_bits(arch):
    lines = ["v_mbcnt_lo_u32_b32 v6, s0, v1", "v_mbcnt_hi_u32_b32 v7, s1, v6"]
    for line in lines:
        assembles(line, arch)
    mask = 0xDEADBEEF12345678
    w = run_lines(lines, arch, [(1, 10)], [(0, mask % 2**32), (1, mask >> 32)])
    lanes = WAVE[arch]
    assert w.vgpr_u32[7][0].tolist() == [10 + (mask & (2**i - 1)).bit_count() for i in range(lanes)]


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("mask", EXECS)
def test_ds_permutes(arch, mask):
    lines = ["ds_bpermute_b32 v6, v0, v1 offset:4", "ds_permute_b32 v7, v2, v1"]
    for line in lines:
        assembles(line, arch)
    lanes = WAVE[arch]
    source = RNG.integers(0, 2 * lanes, lanes)
    target = RNG.permutation(lanes)
    on = active_lanes(mask, lanes)
    w = run_lines(lines, arch, [(0, source * 4 + 2), (1, DATA[:lanes]), (2, target * 4), (6, OLD), (7, OLD)],
                  exec_sgprs(mask))  # fmt: skip
    pushed = {int(t): int(d) for t, d, o in zip(target, DATA, on, strict=False) if o}
    for i in range(lanes):
        s = int(source[i] + 1) % lanes
        assert w.vgpr_u32[6][0, i] == ((int(DATA[s]) if on[s] else 0) if on[i] else OLD)
        assert w.vgpr_u32[7][0, i] == (pushed.get(i, 0) if on[i] else OLD)


#: offset as text, lane within a group of 32 -> lane that it reads.
SWIZZLES = [
    ("0x041f", lambda i: i ^ 1),
    ("0x7c00", lambda i: 31),
    ("0x0018", lambda i: i & 24),
    ("0x80b1", lambda i: i // 4 * 4 + (1, 0, 3, 2)[i % 4]),
    ("swizzle(SWAP,16)", lambda i: i ^ 16),
    ("swizzle(REVERSE,8)", lambda i: i // 8 * 8 + 7 - i % 8),
    ("swizzle(BROADCAST,4,2)", lambda i: i // 4 * 4 + 2),
    ("swizzle(QUAD_PERM,3,2,1,0)", lambda i: i // 4 * 4 + 3 - i % 4),
    ('swizzle(BITMASK_PERM,"01pip")', lambda i: 8 + (i & 4) + (i & 2 ^ 2) + (i & 1)),
]


@pytest.mark.parametrize("offset, source", SWIZZLES, ids=[s[0] for s in SWIZZLES])
@pytest.mark.parametrize("arch", ALL)
def test_ds_swizzle(offset, source, arch):
    line = f"ds_swizzle_b32 v6, v0 offset:{offset}"
    assembles(line, arch)
    lanes = WAVE[arch]
    mask = 2**64 - 1 - 0x30
    w = run_lines([line], arch, [(0, DATA[:lanes]), (6, OLD)], exec_sgprs(mask))
    on = active_lanes(mask, lanes)
    for i in range(lanes):
        s = i // 32 * 32 + source(i % 32)
        assert w.vgpr_u32[6][0, i] == ((int(DATA[s]) if on[s] else 0) if on[i] else OLD)


@pytest.mark.parametrize("arch", GFX9)
def test_accumulation_registers(arch):
    lines = ["v_accvgpr_write_b32 a3, v0", "v_accvgpr_mov_b32 a5, a3", "v_accvgpr_read_b32 v3, a5"]
    for line in lines:
        assembles(line, arch)
    w = run_lines(lines, arch, [(0, DATA)], num_vgprs=16)
    np.testing.assert_array_equal(w.vgpr_u32[3][0], DATA)
    # a3 is not v3: it lies behind the vector registers.
    np.testing.assert_array_equal(w.vgpr_u32[4 + 3][0], DATA)


def test_every_opcode_has_a_case():
    tested = {
        "v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_permlane16_b32", "v_permlanex16_b32",
        "v_permlane16_swap_b32", "v_permlane32_swap_b32", "v_swap_b32", "v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32",
        "ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32",
    }  # fmt: skip
    assert set(LANES) == tested
