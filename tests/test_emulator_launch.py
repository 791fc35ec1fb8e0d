"""Grids, control flow of waves in lockstep, barriers, and the assembly text."""

import numpy as np
import pytest
from emulator_harness import ALL, GFX9, GFX12, assembles, run_lines

from amdgpu.emulator import EmulatorError, assemble, load_program
from amdgpu.emulator.control import BRANCHES, NO_EFFECT
from amdgpu.emulator.launch import launch
from amdgpu.emulator.memory import Memory
from amdgpu.emulator.parse import parse_instruction, parse_listing, split_outside
from amdgpu.emulator.target import LANES

LISTING = """
	.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
	.text
	.globl	add_one                          ; -- Begin function add_one
	.p2align	8
add_one:                                   ; @add_one
.Lfunc_begin0:
	.cfi_startproc
; %bb.0:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	.loc	1 5 3                              ; here:5:3
	v_lshlrev_b32_e32 v1, 2, v0             ; a comment // of words
	s_waitcnt lgkmcnt(0)
	s_lshl_b32 s3, s2, 8
	v_add_u32_e32 v1, s3, v1
	global_load_dword v2, v1, s[4:5]
	s_waitcnt vmcnt(0)
	v_add_u32_e32 v2, 1, v2
	global_store_dword v1, v2, s[4:5]
	s_endpgm
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
	.amdhsa_kernel add_one
		.amdhsa_group_segment_fixed_size 0
		.amdhsa_kernarg_size 24
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_float_denorm_mode_32 3
	.end_amdhsa_kernel
	.text
.Lfunc_end0:
	.long	42
"""


def test_a_kernel_over_a_grid():
    program = load_program(LISTING, "gfx942")
    memory = Memory()
    address = memory.add(np.arange(64 * 100, dtype=np.uint32), writable=True)
    executed = launch(program, (100, 1, 1), 1, memory, [address])
    np.testing.assert_array_equal(memory.content(address).view(np.uint32), np.arange(6400) + 1)
    assert executed == 100 * 10


def test_listing():
    listing = parse_listing(LISTING)
    assert listing.kernel == "add_one"
    assert [i.opcode for i in listing.instructions][:3] == ["s_load_dwordx2", "v_lshlrev_b32", "s_waitcnt"]
    assert listing.instructions[1].text == "v_lshlrev_b32_e32 v1, 2, v0"
    assert (
        listing.instructions[1].line
        == LISTING.splitlines().index("	v_lshlrev_b32_e32 v1, 2, v0             ; a comment // of words") + 1
    )
    assert listing.descriptor["kernarg_size"] == 24


@pytest.mark.parametrize("text, message", [("", "found 0"), (LISTING + LISTING, "found 2"),
                                           (LISTING.replace("add_one:", "other:"), "no label")])  # fmt: skip
def test_what_is_no_kernel(text, message):
    with pytest.raises(EmulatorError, match=message):
        load_program(text, "gfx942")


@pytest.mark.parametrize("directive, message", [
    ("float_round_mode_32 1", "float_round_mode_32"), ("float_denorm_mode_16_64 0", "float16 subnormals"),
])  # fmt: skip
def test_modes_that_are_not_modelled(directive, message):
    text = LISTING.replace(".amdhsa_float_denorm_mode_32 3", f".amdhsa_{directive}")
    with pytest.raises(EmulatorError, match=f"add_one: .*{message}"):
        load_program(text, "gfx942")


def test_instruction_text():
    inst = parse_instruction("v_cmp_gt_f32_e64_dpp vcc_lo, v1, |v2| quad_perm:[1,0,3,2] row_mask:0xf fi:1", 7)
    assert (inst.opcode, inst.encoding, inst.line) == ("v_cmp_gt_f32", "e64_dpp", 7)
    assert inst.operands == ("vcc_lo", "v1", "|v2|")
    assert inst.modifiers == {"quad_perm": (1, 0, 3, 2), "row_mask": "0xf", "fi": "1"}
    inst = parse_instruction("buffer_load_dwordx4 v[0:3], v8, s[0:3], 0 offen offset:16 lds", 1)
    assert inst.operands == ("v[0:3]", "v8", "s[0:3]", "0")
    assert inst.flag("offen") and inst.flag("lds") and inst.integer("offset") == 16
    inst = parse_instruction("v_dual_mov_b32 v1, 0 :: v_dual_add_f32 v2, v3, v4", 1)
    assert inst.pair.opcode == "v_dual_add_f32" and inst.pair.operands == ("v2", "v3", "v4")
    assert split_outside('v1, v[2:3], f(4, 5), "6, 7"', ",") == ["v1", "v[2:3]", "f(4, 5)", '"6, 7"']


@pytest.mark.parametrize("arch", ALL)
def test_workgroup_ids(arch):
    """Along three axes: in scalar registers behind the user's, or on gfx12 in ttmp registers."""
    if arch in GFX12:
        lines = ["s_mov_b32 s20, ttmp9", "s_and_b32 s21, ttmp7, 0xffff", "s_lshr_b32 s22, ttmp7, 16",
                 "s_bfe_u32 s23, ttmp8, 0x50019"]  # fmt: skip
    else:
        # The wave's number is known from the first lane's id.
        shift = 6 if arch in GFX9 else 5
        lines = ["s_mov_b32 s20, s4", "s_mov_b32 s21, s5", "s_mov_b32 s22, s6", "v_readfirstlane_b32 s23, v0",
                 f"s_lshr_b32 s23, s23, {shift}"]  # fmt: skip
    store = "global_store_dwordx4" if arch in GFX9 else "global_store_b128"
    load = "s_load_dwordx2" if arch in GFX9 else "s_load_b64"
    shift = "s_mul_i32 s24, s22, 6", "s_mul_i32 s25, s21, 3", "s_add_i32 s24, s24, s25", "s_add_i32 s24, s24, s20"
    shift = [x.replace("s_add_i32", "s_add_co_i32") if arch in GFX12 else x for x in shift]
    add = "s_add_co_i32" if arch in GFX12 else "s_add_i32"
    lines = [f"{load} s[8:9], s[2:3], 0x0", *lines, *shift, "s_lshl_b32 s24, s24, 1", f"{add} s24, s24, s23",
             "s_lshl_b32 s24, s24, 4", "v_mov_b32_e32 v1, s24",
             *[f"v_mov_b32_e32 v{4 + i}, s{20 + i}" for i in range(4)],
             f"{store} v1, v[4:7], s[8:9]", "s_endpgm"]  # fmt: skip
    for line in lines:
        assembles(line, arch)
    program = assemble(lines, arch, user_sgpr_count=4, user_sgpr_dispatch_ptr=1, user_sgpr_kernarg_segment_ptr=1,
                       **{f"system_sgpr_workgroup_id_{a}": 1 for a in "xyz"})  # fmt: skip
    memory = Memory()
    out = memory.add(np.zeros((4, 2, 3, 2, 4), np.uint32), True)
    launch(program, (3, 2, 4), 2, memory, [out])
    got = memory.content(out).view(np.uint32).reshape(4, 2, 3, 2, 4)
    for z, y, x, wave in np.ndindex(4, 2, 3, 2):
        assert got[z, y, x, wave].tolist() == [x, y, z, wave]


def loop(arch, counts):
    """Each wave goes round its own number of times, counting in v1 and s1."""
    add = "s_add_co_i32" if arch in GFX12 else "s_add_i32"
    lines = ["s_mov_b32 s1, 0", "v_mov_b32_e32 v1, 0", ".again:", f"{add} s1, s1, 1", "v_add_u32_e32 v1, 2, v1",
             "s_cmp_lt_u32 s1, s0", "s_cbranch_scc1 .again", "v_mov_b32_e32 v2, v1"]  # fmt: skip
    if arch not in GFX9:
        lines = [x.replace("v_add_u32", "v_add_nc_u32") for x in lines]
    return run_lines(lines, arch, [], [(0, np.array(counts, np.uint32))], waves=len(counts))


@pytest.mark.parametrize("arch", ALL)
def test_waves_leave_a_loop_one_by_one(arch):
    counts = [3, 1, 7, 1, 4]
    w = loop(arch, counts)
    assert w.wave[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert w.sgprs[:, 1].tolist() == counts
    np.testing.assert_array_equal(w.vgpr_u32[2], np.broadcast_to(2 * np.array(counts)[:, None], (5, LANES[arch])))


def test_executed_instructions_are_counted_per_wave():
    lines = ["s_mov_b32 s0, 5", ".a:", "s_add_i32 s0, s0, -1", "s_cmp_gt_i32 s0, 0", "s_cbranch_scc1 .a", "s_endpgm"]
    program = assemble(lines, "gfx942")
    assert launch(program, (10, 1, 1), 4, Memory(), []) == 40 * (1 + 5 * 3 + 1)


def test_endless_loops_stop():
    program = assemble([".a:", "s_nop 0", "s_branch .a"], "gfx942")
    with pytest.raises(EmulatorError, match="more than 1000 instructions"):
        launch(program, (1, 1, 1), 1, Memory(), [], limit=1000)


def test_a_program_without_end():
    program = assemble(["s_nop 0"], "gfx942")
    with pytest.raises(EmulatorError, match="runs past its end"):
        launch(program, (1, 1, 1), 1, Memory(), [])


def test_unknown_label():
    with pytest.raises(EmulatorError, match=r"unknown label .nowhere"):
        assemble(["s_branch .nowhere", "s_endpgm"], "gfx942")


@pytest.mark.parametrize("opcode, s0, taken", [
    ("s_cbranch_scc0", 0, True), ("s_cbranch_scc0", 1, False), ("s_cbranch_scc1", 1, True),
    ("s_cbranch_scc1", 0, False), ("s_cbranch_vccz", 0, True), ("s_cbranch_vccz", 4, False),
    ("s_cbranch_vccnz", 4, True), ("s_cbranch_vccnz", 0, False), ("s_cbranch_execz", 0, True),
    ("s_cbranch_execz", 4, False), ("s_cbranch_execnz", 4, True), ("s_cbranch_execnz", 0, False),
    ("s_branch", 0, True),
])  # fmt: skip
@pytest.mark.parametrize("arch", ALL)
def test_branches(opcode, s0, taken, arch):
    set_mask = {"scc": ["s_cmp_lg_u32 s0, 0"], "vcc": ["s_mov_b32 vcc_lo, s0", "s_mov_b32 vcc_hi, 0"],
                "exe": ["s_mov_b32 exec_lo, s0", "s_mov_b32 exec_hi, 0"]}  # fmt: skip
    lines = ["s_mov_b32 s1, 0", *set_mask.get(opcode.removeprefix("s_cbranch_")[:3], []), f"{opcode} .there",
             "s_mov_b32 s1, 1", ".there:", "s_nop 0"]  # fmt: skip
    w = run_lines(lines, arch, [], [(0, s0)])
    assert w.sgprs[0, 1] == (0 if taken else 1)


def test_high_half_of_a_64_lane_mask_counts():
    w = run_lines(["s_mov_b32 s1, 0", "s_cbranch_vccz .there", "s_mov_b32 s1, 1", ".there:", "s_nop 0"], "gfx942", [],
                  [(106, 0), (107, 1)])  # fmt: skip
    assert w.sgprs[0, 1] == 1
    # With 32 lanes vcc_hi is an ordinary register.
    w = run_lines(["s_mov_b32 s1, 0", "s_cbranch_vccz .there", "s_mov_b32 s1, 1", ".there:", "s_nop 0"], "gfx1151", [],
                  [(106, 0), (107, 1)])  # fmt: skip
    assert w.sgprs[0, 1] == 0


def test_every_branch_has_a_case():
    assert set(BRANCHES) == {"s_branch"} | {
        f"s_cbranch_{x}" for x in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")
    }


HINTS = [
    ("s_nop 3", "gfx942"), ("s_waitcnt vmcnt(0) lgkmcnt(0)", "gfx942"), ("s_setprio 1", "gfx942"), ("v_nop", "gfx942"),
    ("buffer_inv sc1", "gfx942"), ("buffer_wbl2 sc1", "gfx942"), ("s_sleep 1", "gfx942"), ("s_icache_inv", "gfx942"),
    ("s_dcache_inv", "gfx942"),
    ("s_waitcnt_vscnt null, 0x0", "gfx1151"), ("s_waitcnt_vmcnt null, 0x0", "gfx1151"),
    ("s_waitcnt_lgkmcnt null, 0x0", "gfx1151"), ("s_waitcnt_expcnt null, 0x0", "gfx1151"),
    ("s_waitcnt_depctr depctr_va_vdst(0)", "gfx1151"), ("s_delay_alu instid0(VALU_DEP_1) | instskip(NEXT)", "gfx1151"),
    ("s_clause 0x1", "gfx1151"), ("s_set_inst_prefetch_distance 0x1", "gfx1151"), ("buffer_gl0_inv", "gfx1151"),
    ("buffer_gl1_inv", "gfx1151"), ("s_wait_idle", "gfx1151"), ("s_code_end", "gfx1151"),
    ("s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)", "gfx1151"),
    ("s_wait_alu depctr_va_vcc(0)", "gfx1201"), ("s_wait_loadcnt 0x0", "gfx1201"), ("s_wait_storecnt 0x0", "gfx1201"),
    ("s_wait_dscnt 0x0", "gfx1201"), ("s_wait_kmcnt 0x0", "gfx1201"), ("s_wait_expcnt 0x0", "gfx1201"),
    ("s_wait_loadcnt_dscnt 0x0", "gfx1201"), ("s_wait_storecnt_dscnt 0x0", "gfx1201"),
    ("s_wait_samplecnt 0x0", "gfx1201"), ("s_wait_bvhcnt 0x0", "gfx1201"), ("global_inv scope:SCOPE_SE", "gfx1201"),
    ("global_wb scope:SCOPE_SE", "gfx1201"), ("global_wbinv scope:SCOPE_SE", "gfx1201"),
]  # fmt: skip


@pytest.mark.parametrize("line, arch", HINTS)
def test_hints_and_waits_do_nothing(line, arch):
    assembles(line, arch)
    w = run_lines([line], arch, [(0, 5)], [(0, 6)])
    assert (w.vgpr_u32[0] == 5).all() and w.sgprs[0, 0] == 6 and not w.scc.any()


def test_every_hint_has_a_case():
    assert {line.split()[0] for line, _ in HINTS} - {"s_sendmsg"} == NO_EFFECT


PING = ["ds_write_b32 v0, v1", "s_barrier", "ds_read_b32 v2, v3", "s_barrier", "ds_write_b32 v0, v2", "s_barrier",
        "ds_read_b32 v4, v3"]  # fmt: skip


def test_waves_on_different_paths_meet_at_barriers():
    """The odd waves arrive at barriers of their own; hardware counts arrivals, not places."""
    lines = ["s_bitcmp1_b32 s0, 0", "s_cbranch_scc1 .odd", *PING, "s_branch .end", ".odd:", "s_nop 0", "s_nop 0", *PING,
             ".end:", "s_nop 0"]  # fmt: skip
    own = np.arange(256).reshape(4, 64) * 4
    other = np.roll(own, 1, axis=0)
    w = run_lines(lines, "gfx942", [(0, own), (1, own), (3, other)], [(0, np.arange(4))], waves=4, lds_bytes=1024)
    np.testing.assert_array_equal(w.vgpr_u32[2], other)
    np.testing.assert_array_equal(w.vgpr_u32[4], np.roll(other, 1, axis=0))


def test_a_wave_that_has_ended_is_not_waited_for():
    lines = ["s_cmp_eq_u32 s0, 0", "s_cbranch_scc1 .end", "s_barrier", "s_mov_b32 s1, 5", ".end:", "s_nop 0"]
    w = run_lines(lines, "gfx942", [], [(0, np.arange(4)), (1, 0)], waves=4)
    assert w.sgprs[:, 1].tolist() == [0, 5, 5, 5]


def test_split_barriers():
    lines = ["s_barrier_signal -1", "s_nop 0", "s_barrier_wait -1"]
    for line in lines:
        assembles(line, "gfx1201")
    run_lines(lines * 2, "gfx1201", waves=2)
    with pytest.raises(EmulatorError, match=r"line 2: s_barrier_wait -1: .*without s_barrier_signal"):
        run_lines(lines[1:], "gfx1201", waves=2)
    with pytest.raises(EmulatorError, match=r"line 4.*without s_barrier_signal"):
        run_lines([*lines, "s_barrier_wait -1"], "gfx1201", waves=2)
    with pytest.raises(EmulatorError, match="other than the workgroup's"):
        assemble(["s_barrier_signal -2", "s_endpgm"], "gfx1201")


def test_without_drops_one_instruction_and_keeps_the_labels():
    lines = ["s_mov_b32 s0, 1", "s_branch .there", "s_mov_b32 s0, 2", ".there:", "s_mov_b32 s1, 3", "s_endpgm"]
    program = assemble(lines, "gfx942")
    assert program.find("s_mov") == [0, 2, 3]
    assert program.without(0).listing.labels == {".there": 2}
    assert program.without(3).listing.labels == {".there": 3}
    assert [i.text for i in program.without(1).listing.instructions] == [lines[i] for i in (0, 2, 4, 5)]
