"""Branches, barriers, mode changes, and the instructions that only matter to timing."""

import numpy as np

from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.registers import EXEC, VCC

# Waits: the counters of gfx9 to gfx11, those of gfx12, and what is waited for besides.
_COUNTERS = ("vm", "lgkm", "exp", "vs")
_COUNTERS_12 = ("load", "store", "ds", "km", "exp", "sample", "bvh")
_WAITS = (
    "s_waitcnt",
    *(f"s_waitcnt_{name}cnt" for name in _COUNTERS),
    "s_waitcnt_depctr",
    *(f"s_wait_{name}cnt" for name in _COUNTERS_12),
    *(f"s_wait_{name}cnt_dscnt" for name in ("load", "store")),
    *(f"s_wait_{name}" for name in ("alu", "idle")),
)
# Invalidating and writing back what is cached.
_CACHES = (
    *(f"buffer_{level}inv" for level in ("", "gl0_", "gl1_")),
    *(f"global_{action}" for action in ("wb", "inv", "wbinv")),
    *(f"s_{letter}cache_inv" for letter in "di"),
    "buffer_wbl2",
)
_HINTS = ("s_delay_alu", "s_clause", "s_setprio", "s_sleep", "s_set_inst_prefetch_distance")
#: Instructions without effect here.
NO_EFFECT = frozenset((*_WAITS, *_CACHES, *_HINTS, "s_nop", "v_nop", "s_code_end"))


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
