"""Vector instructions: how sources are read and results written, and the opcodes of one row in a table.

A vector instruction is decoded into (compute, write): both halves of a dual-issue pair compute before either
writes.
"""

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.lanes import DPP_CONTROLS, DPP_WORDS, Dpp
from amdgpu.emulator.operands import DTYPES, parse_operand
from amdgpu.emulator.vector_convert import CONVERT
from amdgpu.emulator.vector_float import FLOAT
from amdgpu.emulator.vector_int import CLEARS_HIGH_HALF, INTEGER, saturating

#: Every opcode that is one row: name -> (result type, source types, function).
ALU = {**INTEGER, **FLOAT, **CONVERT}

_SDWA_WORDS = frozenset(("dst_sel", "dst_unused", "src0_sel", "src1_sel"))
#: What SDWA selects of a register: (first bit, bits).
SDWA_FIELDS = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
}  # fmt: skip


def check_modifiers(inst, *allowed: str):
    """A modifier that the emulator does not know changes what is computed: an error, never a wrong number."""
    known = {*allowed, *DPP_WORDS, *_SDWA_WORDS}
    if unknown := set(inst.modifiers) - known:
        raise EmulatorError(f"modifiers {sorted(unknown)}")


def vcc(factory):
    """The operand that lane masks come from where none is named."""
    return parse_operand("vcc" if factory.lanes == 64 else "vcc_lo")


def uses_dpp(inst) -> bool:
    return any(c in inst.modifiers for c in DPP_CONTROLS)


class VectorFormat:
    """Sources and results of one vector instruction with its op_sel, DPP, SDWA and clamp modifiers."""

    def __init__(self, inst, factory, name: str):
        self.inst, self.factory, self.name = inst, factory, name
        self.sdwa = inst.encoding == "sdwa" or "src0_sel" in inst.modifiers
        self.dpp = Dpp(inst, factory.lanes) if uses_dpp(inst) else None
        self.op_sel = inst.bits("op_sel", 4)

    def read(self, position: int, index: int, kind: str):
        """Reader of the operand at `position`, which is source number `index` of the instruction."""
        operand = parse_operand(self.inst.operands[position])
        if self.sdwa and index < 2:
            return self._read_sdwa(operand, index, kind)
        if operand.extend:
            raise EmulatorError("sext outside of SDWA")
        high = bool(self.op_sel[index]) and kind[1:] == "16"
        if self.op_sel[index] and kind[1:] != "16":
            raise EmulatorError("op_sel of a source that is not 16 bits wide")
        if self.dpp is None or index > 0:
            return self.factory.read(operand, kind, high)
        if kind[1:] == "64":
            raise EmulatorError("DPP of a 64-bit source")
        plain = self.factory.read(operand, kind, high)
        gather = self.dpp.gather
        return lambda w: gather(w, plain(w))

    def _read_sdwa(self, operand, index, kind):
        shift, width = SDWA_FIELDS[self.inst.modifiers.get(f"src{index}_sel", "DWORD")]
        if int(kind[1:]) > 32:
            raise EmulatorError("SDWA of a 64-bit source")
        raw = self.factory.read_bare(operand, "u32")
        unused = U32(32 - width)
        narrow = DTYPES[f"u{kind[1:]}"]

        def field(w):
            x = raw(w)
            if width < 32:
                x = x << U32(32 - width - shift)
                x = (x.view(np.int32) >> np.int32(unused)).view(U32) if operand.extend else x >> unused
            return x.astype(narrow).view(DTYPES[kind])

        return self.factory.with_modifiers(field, operand, kind)

    def write(self, kind: str, sources: int, position: int = 0):
        """Writer of the result, an array of type `kind`."""
        inst, factory = self.inst, self.factory
        destination = parse_operand(inst.operands[position])
        if self.sdwa and (kind[1:] == "16" or inst.modifiers.get("dst_sel", "DWORD") != "DWORD"):
            put = self._write_sdwa(destination)
        elif self.dpp is not None:
            put = self._write_dpp(self.dpp, destination, kind)
        else:
            high = bool(self.op_sel[sources]) and kind[1:] == "16"
            clears = factory.target.gfx9 and self.name in CLEARS_HIGH_HALF and not (high or destination.half)
            put = factory.write(destination, kind, high, clears)
        if inst.flag("clamp") and kind[0] == "f":
            dtype = DTYPES[kind]
            # The comparison is false for NaN, which clamps to 0.
            inner = put
            return lambda w, x: inner(w, np.where(x > 0, np.minimum(x, dtype(1)), dtype(0)))
        return put

    def _write_dpp(self, dpp, destination, kind):
        n = self.factory.vector_index(destination)
        if kind[1:] == "64":
            raise EmulatorError("DPP of a 64-bit result")
        enabled = dpp.enabled
        plain = self.factory.write(destination, kind)
        half = int(destination.half == "h")

        def put(w, x):
            lanes = enabled(w)
            if lanes is True:
                plain(w, x)
                return
            if kind[1:] == "16":
                row, x = w.vgpr_u16[n][half], np.asarray(x).view(np.uint16)
            else:
                row, x = w.vgpr_u32[n], np.asarray(x).view(U32)
            np.copyto(row, x, where=w.active & lanes)

        return put

    def _write_sdwa(self, destination):
        shift, width = SDWA_FIELDS[self.inst.modifiers.get("dst_sel", "DWORD")]
        unused = self.inst.modifiers.get("dst_unused", "UNUSED_PAD")
        keep = U32((2**width - 1) << shift)
        n = self.factory.vector_index(destination)
        put = self.factory.write(destination, "u32")
        if unused == "UNUSED_SEXT":
            raise EmulatorError("dst_unused:UNUSED_SEXT")

        def write(w, x):
            x = np.ascontiguousarray(x)
            bits = x.view(np.uint16).astype(U32) if x.dtype.itemsize == 2 else x.view(U32)
            bits = (bits << U32(shift)) & keep
            put(w, bits | (w.vgpr_u32[n] & ~keep) if unused == "UNUSED_PRESERVE" else bits)

        return write


def decode_alu(inst, factory):
    """(compute, write) of an opcode with one row in ALU; None for others."""
    name = inst.opcode[2:]
    row = ALU.get(name)
    if row is None:
        return None
    check_modifiers(inst, "clamp", "op_sel")
    kind, sources, function = row
    if inst.flag("clamp") and kind[0] not in "f":
        function = saturating(name) if name in INTEGER else None
        if function is None:
            raise EmulatorError("integer clamp of this opcode")
    given = sum(s != "D" for s in sources)
    if len(inst.operands) != given + 1:
        raise EmulatorError(f"{len(inst.operands)} operands where {given + 1} are expected")
    form = VectorFormat(inst, factory, name)
    reads = []
    for i, source in enumerate(sources):
        if source == "D":
            reads.append(factory.read(parse_operand(inst.operands[0]), kind))
        else:
            reads.append(form.read(i + 1, i, source))
    if factory.fp16_overflow:
        if name == "cvt_pk_f16_f32":
            raise EmulatorError("a packed conversion with FP16_OVFL set")
        if kind == "f16":
            function = _saturate_f16(function)
    return _call(function, reads), form.write(kind, len(sources))


def _call(function, reads):
    if len(reads) == 1:
        (a,) = reads
        return lambda w: function(a(w))
    if len(reads) == 2:
        a, b = reads
        return lambda w: function(a(w), b(w))
    a, b, c = reads
    return lambda w: function(a(w), b(w), c(w))


def _saturate_f16(function):
    """With the mode bit FP16_OVFL finite inputs never make an infinite float16."""

    def f(*x):
        r = function(*x)
        finite = np.logical_and.reduce(np.broadcast_arrays(*[np.isfinite(v) for v in x]))
        return np.where(np.isinf(r) & finite, np.copysign(np.float16(65504), r), r)

    return f
