"""Conversions between float32, float16, bf16 and 8-bit floats.

gfx942 has the formats without negative zero ("fnuz"), gfx950 and gfx12 the OCP ones. With the mode bit FP16_OVFL a
result too large for the format becomes its largest finite value.
"""

import re

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.formats import f32_to_bf16, f32_to_fp8, fp8_to_f32
from amdgpu.emulator.operands import Operand, parse_operand
from amdgpu.emulator.vector import SDWA_FIELDS, check_modifiers
from amdgpu.emulator.vector_convert import pack

F32 = np.float32


def _kind(factory, name):
    return f"{name}_fnuz" if factory.target.fnuz else name


def _selected_byte(inst):
    """Number of the byte, or the first of the two, that the modifiers choose in the source."""
    if "src0_sel" in inst.modifiers:
        return SDWA_FIELDS[inst.modifiers["src0_sel"]][0] // 8
    return inst.integer("byte_sel")


def decode_fp8(inst, factory):
    """(compute, write) of the conversions of 8-bit floats; None for others."""
    name = inst.opcode[2:]
    for pattern, decoder in _FORMS:
        if m := re.fullmatch(pattern, name):
            return decoder(inst, factory, *m.groups())
    return None


def _to_float(inst, factory, kind):
    """v_cvt_f32_fp8: one byte."""
    check_modifiers(inst, "byte_sel")
    byte, kind = _selected_byte(inst), _kind(factory, kind)
    source = factory.read(parse_operand(inst.operands[1]), "u32")
    put = factory.write(parse_operand(inst.operands[0]), "f32")
    return lambda w: fp8_to_f32(source(w) >> U32(8 * byte), kind), put


def _pair_writer(inst, factory):
    destination = parse_operand(inst.operands[0])
    if destination.count != 2:
        raise EmulatorError("two registers are expected")
    puts = [factory.write(Operand(destination.kind, destination.index + i), "f32") for i in (0, 1)]

    def write(w, pair):
        puts[0](w, pair[0])
        puts[1](w, pair[1])

    return write


def _to_float_pair(inst, factory, kind):
    """v_cvt_pk_f32_fp8: two bytes; op_sel[0] (or SDWA's WORD_1) takes the high half."""
    check_modifiers(inst, "op_sel")
    operand = parse_operand(inst.operands[1])
    byte = 2 if inst.bits("op_sel", 1)[0] or operand.half == "h" else _selected_byte(inst)
    source = factory.read(Operand(operand.kind, operand.index, value=operand.value), "u32")
    kind = _kind(factory, kind)

    def compute(w):
        x = source(w) >> U32(8 * byte)
        return fp8_to_f32(x, kind), fp8_to_f32(x >> U32(8), kind)

    return compute, _pair_writer(inst, factory)


def _half_writer(inst, factory, sources):
    """Writer of 16 bits to the half that op_sel's last bit chooses."""
    destination = parse_operand(inst.operands[0])
    return factory.write(destination, "u16", high=bool(inst.bits("op_sel", sources + 1)[sources]))


def _from_float_pair(inst, factory, kind):
    """v_cvt_pk_fp8_f32: two bytes into the half of the destination that op_sel[2] chooses."""
    check_modifiers(inst, "op_sel")
    kind, saturate = _kind(factory, kind), factory.fp16_overflow
    a, b = (factory.read(parse_operand(o), "f32") for o in inst.operands[1:3])

    def compute(w):
        return (f32_to_fp8(a(w), kind, saturate) | (f32_to_fp8(b(w), kind, saturate) << U32(8))).astype(np.uint16)

    # op_sel of VOP3 has four entries, the last for the destination.
    destination = parse_operand(inst.operands[0])
    selected = inst.bits("op_sel", 4)
    return compute, factory.write(destination, "u16", high=bool(selected[2] or selected[3]))


def _scaled_from_float(inst, factory, kind):
    """v_cvt_scalef32_pk_fp8_f32 (gfx950): both sources are divided by the power of two in the third."""
    check_modifiers(inst, "op_sel")
    a, b, scale = (factory.read(parse_operand(o), "f32") for o in inst.operands[1:4])
    saturate = factory.fp16_overflow

    def compute(w):
        s = _power_of_two(scale(w))
        low, high = (f32_to_fp8(x(w) / s, kind, saturate) for x in (a, b))
        return (low | (high << U32(8))).astype(np.uint16)

    return compute, _half_writer(inst, factory, 3)


def _power_of_two(scale):
    """The exponent field of a float32 as a number; the other bits do not count."""
    return (np.asarray(scale).view(U32) & U32(0x7F800000)).view(F32)


def _scaled_to_float(inst, factory, result, kind):
    """v_cvt_scalef32_pk_{f32,f16,bf16}_fp8 (gfx950): two bytes times the power of two in the second source."""
    check_modifiers(inst, "op_sel")
    byte = 2 if inst.bits("op_sel", 1)[0] else 0
    source, scale = (
        factory.read(parse_operand(inst.operands[1]), "u32"),
        factory.read(parse_operand(inst.operands[2]), "f32"),
    )

    def pair(w):
        x, s = source(w) >> U32(8 * byte), _power_of_two(scale(w))
        return fp8_to_f32(x, kind) * s, fp8_to_f32(x >> U32(8), kind) * s

    if result == "f32":
        return pair, _pair_writer(inst, factory)
    put = factory.write(parse_operand(inst.operands[0]), "u32")
    if result == "f16":
        return lambda w: pack(*[x.astype(np.float16) for x in pair(w)]), put
    return lambda w: pack(*[f32_to_bf16(x).astype(np.uint16) for x in pair(w)]), put


#: Pattern of the opcode -> decoder; the pattern's groups are the decoder's further arguments.
_FORMS = (
    (r"cvt_f32_(fp8|bf8)", _to_float),
    (r"cvt_pk_f32_(fp8|bf8)", _to_float_pair),
    (r"cvt_pk_(fp8|bf8)_f32", _from_float_pair),
    (r"cvt_scalef32_pk_(fp8|bf8)_f32", _scaled_from_float),
    (r"cvt_scalef32_pk_(f32|f16|bf16)_(fp8|bf8)", _scaled_to_float),
)
