"""Encodings (SDWA, op_sel, dual issue), floating-point modes, scalar forms, and what is refused."""

import numpy as np
import pytest
from emulator_formulas import flushed, wide
from emulator_harness import (
    Case,
    assembles,
    check_bits,
    round_to,
    run_lines,
)

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.vector_float import TRANSCENDENTAL

OLD = 0xA5A5A5A5


@pytest.mark.parametrize(
    "line, formula",
    [
        ("v_add_u32_sdwa v6, v0, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1",
         lambda a, b: (a >> 16 & 255) + (b >> 16)),
        ("v_add_u32_sdwa v6, sext(v0), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:DWORD",
         lambda a, b: ((a >> 8 & 255) ^ 128) - 128 + b),
        ("v_or_b32_sdwa v6, v0, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0",
         lambda a, b: ((a | b & 255) & 255) << 8),
        ("v_or_b32_sdwa v6, v0, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:WORD_1",
         lambda a, b: ((a & 0xFFFF) | b >> 16) << 16 | OLD & 0xFFFF),
        ("v_lshlrev_b16_sdwa v6, v0, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_1",
         lambda a, b: (b >> 16 << (a & 15)) & 0xFFFF),
        ("v_max_i16_sdwa v6, sext(v0), sext(v2) dst_sel:BYTE_3 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3",
         lambda a, b: max(((a & 255) ^ 128) - 128, ((b >> 24) ^ 128) - 128) % 256 << 24),
        ("v_cvt_f32_i32_sdwa v6, sext(v0) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
         lambda a, b: int(np.float32(((a >> 16) ^ 0x8000) - 0x8000).view(np.uint32))),
        ("v_cvt_f32_f16_sdwa v6, -v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
         lambda a, b: int(np.float32(-np.uint16(a >> 16).view(np.float16)).view(np.uint32))),
        ("v_cndmask_b32_sdwa v6, v0, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0",
         lambda a, b: b & 0xFFFF),
    ],
)  # fmt: skip
def test_sdwa(line, formula):
    assembles(line, "gfx942")
    # Normal float16 in the high halves, so that no NaN hides its payload.
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0, 2**32, 64, np.uint64).astype(np.uint32) & 0xBBFFFFFF for _ in range(2))
    w = run_lines([line], "gfx942", [(0, a), (2, b), (6, OLD)], [(106, 2**32 - 1), (107, 2**32 - 1)])
    want = [formula(int(x), int(y)) % 2**32 for x, y in zip(a, b, strict=True)]
    assert w.vgpr_u32[6][0].tolist() == want


def test_sdwa_compare():
    line = "v_cmp_gt_i16_sdwa s[4:5], sext(v0), v2 src0_sel:BYTE_1 src1_sel:DWORD"
    assembles(line, "gfx942")
    a = np.random.default_rng(7).integers(0, 2**32, 64, np.uint64).astype(np.uint32)
    w = run_lines([line], "gfx942", [(0, a), (2, 5)])
    np.testing.assert_array_equal(w.read_mask(4)[0], ((a >> 8) & 255).astype(np.uint8).view(np.int8) > 5)


def test_op_sel_picks_and_writes_halves():
    """gfx9's VOP3 form: sources 0 and 1 from their high halves, result to the high half, low half kept."""
    line = "v_mad_u16 v6, v0, v2, v4 op_sel:[1,0,1,1]"
    assembles(line, "gfx942")
    w = run_lines([line], "gfx942", [(0, 0x00030007), (2, 0x00110005), (4, 0x00020009), (6, OLD)])
    assert w.vgpr_u32[6][0, 0] == (3 * 5 + 2) << 16 | 0xA5A5


@pytest.mark.parametrize("mode, want", [(3, 2.0**-140), (2, 0.0), (1, 0.0), (0, 0.0)])
def test_denormal_modes_of_f32(mode, want):
    """FP_DENORM: bit 0 keeps subnormal sources, bit 1 keeps subnormal results."""
    tiny = np.float32(2.0**-140).view(np.uint32)
    w = run_lines(["v_mul_f32_e32 v6, 1.0, v0", "v_mul_f32_e32 v7, 0.5, v1"], "gfx942",
                  [(0, tiny), (1, np.float32(2.0**-126).view(np.uint32))], float_denorm_mode_32=mode)  # fmt: skip
    assert w.vgpr_f32[6][0, 0] == want
    # A normal source with a subnormal result.
    assert w.vgpr_f32[7][0, 0] == (2.0**-127 if mode & 2 else 0.0)
    # Moves and selections are no arithmetic.
    w = run_lines(["v_mov_b32_e32 v6, v0"], "gfx942", [(0, tiny)], float_denorm_mode_32=mode)
    assert w.vgpr_f32[6][0, 0] == 2.0**-140


@pytest.mark.parametrize("mode", [0, 3])
def test_exp_flushes_whatever_the_mode(mode):
    x = np.array([-126.0, -126.5, -140.0, 2.0**-130, -np.inf], np.float32)
    w = run_lines(["v_exp_f32_e32 v6, v0"], "gfx942", [(0, np.resize(x, 64).view(np.uint32))],
                  float_denorm_mode_32=mode)  # fmt: skip
    assert w.vgpr_f32[6][0, :5].tolist() == [2.0**-126, 0.0, 0.0, 1.0, 0.0]


def test_fp16_overflow_mode_keeps_finite_results_finite():
    line = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
    big, infinite = np.float16(60000).view(np.uint16), np.float16(np.inf).view(np.uint16)
    w = run_lines([line, "v_add_f16 v6, v0, v0", "v_add_f16 v7, v1, v1"], "gfx942", [(0, big), (1, infinite)])
    assert w.vgpr_f16[6][0][0, 0] == 65504 and np.isinf(w.vgpr_f16[7][0][0, 0])


def test_dual_issue_reads_before_it_writes():
    line = "v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0"
    assembles(line, "gfx1151")
    w = run_lines([line], "gfx1151", [(0, 5), (1, 7)])
    assert (w.vgpr_u32[0][0, 0], w.vgpr_u32[1][0, 0]) == (7, 5)


@pytest.mark.parametrize(
    "line, arch, message",
    [
        ("v_bogus_f32 v0, v1", "gfx942", "unknown opcode v_bogus_f32"),
        ("s_bogus_b32 s0, s1", "gfx942", "unknown opcode s_bogus_b32"),
        ("ds_bogus_b32 v0, v1", "gfx942", "unknown opcode ds_bogus_b32"),
        ("global_atomic_add v[0:1], v2, off", "gfx942", "unknown opcode global_atomic_add"),
        ("v_add_f32_e64 v0, v1, v2 mul:2", "gfx942", "modifiers"),
        ("v_lshlrev_b32_e64 v0, v1, v2 clamp", "gfx942", "integer clamp"),
        ("v_add_u32 v0, -v1, v2", "gfx942", "sign modifier"),
        ("v_add_f32 v0, v1", "gfx942", "operands"),
        ("v_cmp_eq_u32 s4, v0, v1", "gfx942", "a lane mask takes 2 scalar registers"),
        ("v_cndmask_b32 v0, v1, v2, s[4:5]", "gfx1151", "a lane mask takes 1 scalar registers"),
        ("v_mov_b32 v0, src_shared_base", "gfx942", "operand 'src_shared_base'"),
        ("s_mov_b64 s0, 1", "gfx942", "where a pair is needed"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1", "gfx942", "mode register"),
        ("s_sendmsg sendmsg(MSG_INTERRUPT)", "gfx942", "message"),
        (".long 0x7e000000", "gfx942", "unknown opcode .long"),
    ],
)
def test_what_is_unknown_is_an_error_with_its_line(line, arch, message):
    with pytest.raises(EmulatorError, match=rf"lines, line 2: .*{message}"):
        assemble(["s_nop 0", line, "s_endpgm"], arch)


def test_unknown_architecture():
    with pytest.raises(EmulatorError, match=r"gfx906.*gfx942, gfx950, gfx1100, gfx1151, gfx1201"):
        assemble(["s_endpgm"], "gfx906")


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendentals_of_scalars(name):
    """gfx12 computes them on scalar registers too, one value a wave."""
    kind = name[-3:]
    line = f"v_s_{name} s6, -|s0|" if name == "exp_f32" else f"v_s_{name} s6, s0"
    assembles(line, "gfx1201")
    function = {
        "exp": np.exp2, "log": np.log2, "rcp": lambda a: 1 / a, "rsq": lambda a: 1 / np.sqrt(a), "sqrt": np.sqrt
    }[name.split("_")[0]]  # fmt: skip
    formula = flushed(function) if kind == "f32" else wide(function)
    sources = np.array([0.0, 1.0, 4.0, 0.3, 7.5, -2.0, np.inf, np.nan, 2.0**-130], np.float32).astype(
        kind.replace("f", "float")
    )
    bits = sources.view(f"uint{kind[1:]}")
    w = run_lines([line], "gfx1201", [], [(0, bits)], waves=len(bits))
    case = Case(line, ("gfx1201",), "f32" if kind == "f32" else "f16", kind, formula, 1)
    values = sources.tolist()
    want = [round_to(formula(-abs(v) if name == "exp_f32" else v), kind) for v in values]
    # The high half of a 16-bit result is cleared.
    check_bits(case, "gfx1201", w.sgprs[:, 6].tolist(), want, [values])
