"""Reading assembly text: instruction classes, loops, metadata, on hand-made snippets."""

import pytest

from amdgpu import assembly


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("v_mfma_f32_32x32x8_f16", "matrix"),
        ("v_smfmac_f32_16x16x32_f16", "matrix"),
        ("v_wmma_f32_16x16x16_bf16", "matrix"),
        ("v_swmmac_f32_16x16x32_f16", "matrix"),
        ("v_exp_f32_e32", "transcendental"),
        ("v_rcp_iflag_f32_e32", "transcendental"),
        ("v_s_rsq_f32", "transcendental"),
        ("v_sqrt_f32_e32", "transcendental"),
        ("v_sin_f32_e32", "transcendental"),
        ("v_log_f32_e32", "transcendental"),
        ("v_dual_fmac_f32", "vector"),
        ("v_pk_add_f32", "vector"),
        ("v_accvgpr_read_b32", "vector"),
        ("v_cvt_pk_bf16_f32", "vector"),
        ("v_ldexp_f32", "vector"),
        ("v_readlane_b32", "vector"),
        ("ds_read_b128", "lds"),
        ("ds_bpermute_b32", "lds"),
        ("global_load_dwordx4", "global"),
        ("buffer_load_dwordx4", "global"),
        ("flat_load_b32", "global"),
        ("scratch_load_b32", "scratch"),
        ("s_load_dwordx2", "scalar"),
        ("s_cbranch_scc1", "scalar"),
        ("s_and_saveexec_b64", "scalar"),
        ("s_waitcnt", "wait"),
        ("s_wait_loadcnt", "wait"),
        ("s_barrier_signal", "wait"),
        ("s_delay_alu", "wait"),
        ("s_nop", "wait"),
    ],
)
def test_instruction_class(opcode, expected):
    assert assembly.instruction_class(opcode) == expected
    assert expected in assembly.CLASSES


def test_instruction_of_no_class():
    with pytest.raises(ValueError, match="ldmatrix"):
        assembly.instruction_class("ldmatrix.sync")


NESTED = """
kernel:                                 ; @kernel
; %bb.0:
\ts_load_b64 s[0:1], s[0:1], 0x0
\t.loc\t1 2 3
.LBB0_1:                                ; outer
\tv_mov_b32_e32 v0, 0
.LBB0_2:                                ; inner, with a block that a branch skips
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]
\ts_cbranch_vccz .LBB0_4
; %bb.3:
\tscratch_load_b32 v1, off, off
\tv_exp_f32_e32 v1, v1                   // a comment
.LBB0_4:
\tds_load_b128 v[8:11], v30
\ts_waitcnt lgkmcnt(0)
\ts_cbranch_scc1 .LBB0_2
; %bb.5:
\tglobal_store_b32 v[2:3], v0, off
\tv_add_nc_u32_e32 v2, 4, v2
\ts_cbranch_scc0 .LBB0_1
; %bb.6:
\ts_endpgm
.Lfunc_end0:
\t.byte\t1
.Lignored:
\tv_not_code
"""


def test_nested_loops_are_counted_apart():
    outer, inner = assembly.loops(NESTED)
    assert (outer.label, outer.depth, outer.parent, outer.innermost) == (".LBB0_1", 1, None, False)
    assert (inner.label, inner.depth, inner.parent, inner.innermost) == (".LBB0_2", 2, ".LBB0_1", True)
    zero = dict.fromkeys(assembly.CLASSES, 0)
    assert outer.counts == zero | {"vector": 2, "global": 1, "scalar": 1}
    assert inner.counts == zero | dict(matrix=1, transcendental=1, lds=1, scratch=1, wait=1, scalar=2)
    assert inner.instructions == 7
    assert inner.instructions_per_matrix == 7
    assert inner.counts_per_matrix["scalar"] == 2
    assert inner.matrix_kinds == {"v_wmma_f32_16x16x16_f16": 1}
    assert outer.instructions_per_matrix is None
    assert outer.counts_per_matrix is None
    lines = NESTED.splitlines()
    assert "v_mov_b32_e32 v0, 0" in lines[outer.first_line - 1]
    assert "s_cbranch_scc0 .LBB0_1" in lines[outer.last_line - 1]
    assert "s_cbranch_scc1 .LBB0_2" in lines[inner.last_line - 1]


def test_instructions_know_the_line_they_were_made_from():
    # From `.loc file line column` on, until the next one, past labels and other directives.
    text = "v_nop\n.loc 1 7 3\n.A:\nv_nop\n.p2align 2\ns_nop 0\n\t.loc\t1 12 5 ; k.ttir:12:5\nv_nop\ns_branch .A\n"
    code = [i for block in assembly.blocks(text) for i in block.instructions]
    assert [i.source for i in code] == [0, 7, 7, 12, 12]
    (loop,) = assembly.loops(text)
    assert [i.source for i in loop.code] == [7, 7, 12, 12]


def labels(text):
    return [(loop.label, loop.parent) for loop in assembly.loops(text)]


def test_straight_and_branching_code_has_no_loop():
    assert labels("s_cbranch_scc0 .A\nv_nop\n.A:\ns_endpgm\n.Lfunc_end0:\n") == []


def test_two_loops_one_after_the_other():
    text = ".A:\nv_nop\ns_cbranch_scc0 .A\n.B:\nv_nop\nv_nop\ns_cbranch_scc0 .B\ns_endpgm\n"
    assert labels(text) == [(".A", None), (".B", None)]
    assert [loop.instructions for loop in assembly.loops(text)] == [2, 3]


def test_back_edges_to_one_header_are_one_loop():
    # A "continue" and the end of the body.
    text = ".A:\nv_nop\ns_cbranch_vccz .A\nv_mov_b32 v0, v1\ns_branch .A\n"
    (loop,) = assembly.loops(text)
    assert loop.counts["vector"] == 2
    assert loop.counts["scalar"] == 2


def test_loop_whose_test_stands_first():
    text = "s_branch .T\n.B:\nv_nop\n.T:\ns_cmp_eq_u32 s0, 0\ns_cbranch_scc0 .B\ns_endpgm\n"
    (loop,) = assembly.loops(text)
    assert loop.label == ".T"
    assert loop.counts["vector"] == 1


def test_loop_with_two_entries_is_found():
    text = "s_cbranch_scc0 .B\n.A:\nv_nop\n.B:\nv_nop\ns_cbranch_scc1 .A\ns_endpgm\n"
    (loop,) = assembly.loops(text)
    assert loop.counts["vector"] == 2


def test_three_levels():
    text = ".A:\nv_nop\n.B:\nv_nop\n.C:\nv_nop\n" + "".join(f"s_cbranch_scc0 .{x}\n" for x in "CBA")
    assert labels(text) == [(".A", None), (".B", ".A"), (".C", ".B")]
    assert [loop.depth for loop in assembly.loops(text)] == [1, 2, 3]
    assert [loop.innermost for loop in assembly.loops(text)] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v_nop\ns_cbranch_scc0 .LBB0_9\n", r"line 2: s_cbranch_scc0 to unknown label '\.LBB0_9'"),
        ("v_nop\nv_nop\ns_setpc_b64 s[0:1]\n", "line 3: s_setpc_b64 jumps to a computed address"),
        ("s_swappc_b64 s[0:1], s[2:3]\n", "line 1: s_swappc_b64"),
    ],
)
def test_control_flow_that_the_text_does_not_tell(text, message):
    with pytest.raises(ValueError, match=message):
        assembly.loops(text)


def test_metadata_of_exactly_one_kernel():
    section = ".amdgpu_metadata\n  - .agpr_count:     3\n    .vgpr_count: 72\n.end_amdgpu_metadata\n"
    assert assembly.metadata(section, "agpr_count") == 3
    assert assembly.metadata(section, "vgpr_count") == 72
    assert assembly.metadata(section, "workgroup_processor_mode") == 0
    for text, n in (("s_endpgm\n", 0), (section + section, 2)):
        with pytest.raises(ValueError, match=f"one kernel, found {n}"):
            assembly.metadata(text, "vgpr_count")
