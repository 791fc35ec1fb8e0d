"""Branches, barriers, mode changes, and the instructions that only matter to timing."""

import numpy as np

from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.registers import EXEC, VCC

#: Instructions without effect here: waits, hints, cache control.
NO_EFFECT = frozenset((
    "s_nop", "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt", "s_waitcnt_expcnt",
    "s_waitcnt_depctr", "s_wait_alu", "s_wait_idle", "s_wait_loadcnt", "s_wait_storecnt", "s_wait_dscnt",
    "s_wait_kmcnt", "s_wait_expcnt", "s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt", "s_wait_samplecnt",
    "s_wait_bvhcnt", "s_delay_alu", "s_clause", "s_setprio", "s_sleep", "s_code_end",
    "s_set_inst_prefetch_distance", "s_icache_inv", "s_dcache_inv", "buffer_gl0_inv", "buffer_gl1_inv",
    "buffer_inv", "buffer_wbl2", "global_inv", "global_wb", "global_wbinv", "v_nop",
))  # fmt: skip


def _vcc(w):
    return w.sgpr_u64[VCC] if w.lanes == 64 else w.sgpr_u32[VCC]


def _exec(w):
    return w.sgpr_u64[EXEC] if w.lanes == 64 else w.sgpr_u32[EXEC]


#: Opcode -> condition, bool [waves, 1].
BRANCHES = {
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: _vcc(w) == 0,
    "s_cbranch_vccnz": lambda w: _vcc(w) != 0,
    "s_cbranch_execz": lambda w: _exec(w) == 0,
    "s_cbranch_execnz": lambda w: _exec(w) != 0,
    "s_branch": None,
}


def sets_fp16_overflow(inst) -> bool:
    """Whether the instruction sets the mode bit FP16_OVFL; EmulatorError for any other change of the mode."""
    if inst.opcode != "s_setreg_imm32_b32":
        return False
    register = inst.operands[0].replace(" ", "")
    if register in ("hwreg(HW_REG_MODE,23,1)", "hwreg(HW_REG_WAVE_MODE,23,1)") and inst.operands[1] == "1":
        return True
    raise EmulatorError("a change of the mode register other than setting FP16_OVFL")


def decode_control(inst, factory):
    """The step of an instruction of this module that neither branches nor waits; None for others."""
    if inst.opcode in NO_EFFECT or sets_fp16_overflow(inst):
        return lambda w: None
    if inst.opcode == "s_sendmsg":
        if inst.operands != ("sendmsg(MSG_DEALLOC_VGPRS)",):
            raise EmulatorError("a message other than MSG_DEALLOC_VGPRS")
        return lambda w: None
    if inst.opcode == "s_barrier_signal":
        _whole_workgroup(inst)

        def signal(w):
            w.signalled[...] = True

        return signal
    return None


def _whole_workgroup(inst):
    if inst.operands != ("-1",):
        raise EmulatorError("a barrier other than the workgroup's")


def is_barrier(inst) -> bool:
    """s_barrier, or the second half of a split barrier."""
    if inst.opcode == "s_barrier_wait":
        _whole_workgroup(inst)
    return inst.opcode in ("s_barrier", "s_barrier_wait")


def arrive(inst, w):
    """Check, and forget, that the signal of a split barrier has come."""
    if inst.opcode == "s_barrier_wait":
        if not np.all(w.signalled):
            raise EmulatorError("s_barrier_wait without s_barrier_signal: the workgroup would wait forever")
        w.signalled[...] = False
