"""Vector instructions with lane masks or results of their own form, beside the rows of `vector.ALU`."""

import numpy as np

from amdgpu.emulator.bitops import I64, U32, U64, truth_table
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.floatops import COMPARE
from amdgpu.emulator.operands import parse_operand
from amdgpu.emulator.registers import EXEC
from amdgpu.emulator.scalar import write_scalar
from amdgpu.emulator.vector import VectorFormat, check_modifiers, vcc
from amdgpu.emulator.vector_float import TRANSCENDENTAL

_COMPARE_TYPES = ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64")
_ORDERED = {"f", "lt", "eq", "le", "gt", "ne", "ge", "t"}


def _split_compare(opcode):
    """("cmp" or "cmpx", relation, type) of a compare opcode; None for another."""
    parts = opcode[2:].split("_")
    if len(parts) != 3 or parts[0] not in ("cmp", "cmpx") or parts[2] not in _COMPARE_TYPES:
        return None
    floats = parts[2][0] == "f"
    if parts[1] not in COMPARE or (floats and parts[1] in ("ne", "t")) or (not floats and parts[1] not in _ORDERED):
        return None
    return parts


def decode_compare(inst, factory):
    """v_cmp_* writes a lane mask, v_cmpx_* EXEC (on gfx9 both)."""
    if inst.opcode in ("v_cmp_class_f32", "v_cmp_class_f16"):
        return _class(inst, factory)
    split = _split_compare(inst.opcode)
    if split is None:
        return None
    prefix, relation, kind = split
    form, first, write = _mask_format(inst, factory, prefix)
    a, b = form.read(first, 0, kind), form.read(first + 1, 1, kind)
    compare = COMPARE[relation]
    return lambda w: compare(a(w), b(w)), write


def _mask_format(inst, factory, prefix):
    """(format, position of the first source, writer of the mask)."""
    check_modifiers(inst, "op_sel")
    form = VectorFormat(inst, factory, inst.opcode[2:])
    if form.dpp is not None and not form.dpp.everywhere:
        raise EmulatorError("DPP with disabled lanes in a compare")
    if prefix == "cmp":
        return form, 1, factory.write_mask(parse_operand(inst.operands[0]))
    if not factory.target.gfx9:
        return form, 0, lambda w, mask: w.write_mask(EXEC, mask & w.active)
    put = factory.write_mask(parse_operand(inst.operands[0]))

    def write_both(w, mask):
        mask = mask & w.active
        put(w, mask)
        w.write_mask(EXEC, mask)

    return form, 1, write_both


#: Bits of the class mask: signalling NaN, quiet NaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf.
def float_class(x: np.ndarray) -> np.ndarray:
    """Number of the class (0 to 9) of each float16 or float32."""
    half = x.dtype == np.float16
    bits = x.view(np.uint16).astype(U32) if half else x.view(U32)
    fraction_bits, top = (10, 31) if half else (23, 255)
    exponent = (bits >> U32(fraction_bits)) & U32(top)
    fraction = bits & U32(2**fraction_bits - 1)
    negative = (bits >> U32(15 if half else 31)) == 1
    quiet = (fraction >> U32(fraction_bits - 1)) & U32(1)
    magnitude = np.where(exponent == top, 0, np.where(exponent != 0, 1, np.where(fraction != 0, 2, 3)))
    signed = np.where(negative, 2 + magnitude, 9 - magnitude)
    return np.where((exponent == top) & (fraction != 0), quiet, signed).astype(U32)


def _class(inst, factory):
    prefix, kind = inst.opcode[2:].split("_")[0], inst.opcode[-3:]
    form, first, write = _mask_format(inst, factory, prefix)
    value, wanted = form.read(first, 0, kind), form.read(first + 1, 1, "u32")
    return lambda w: ((wanted(w) >> float_class(value(w))) & U32(1)).astype(bool), write


def decode_select(inst, factory):
    """v_cndmask: the second source where the mask (VCC if none is named) is set."""
    kind = {"v_cndmask_b32": "b32", "v_cndmask_b16": "b16"}.get(inst.opcode)
    if kind is None:
        return None
    check_modifiers(inst, "op_sel")
    form = VectorFormat(inst, factory, inst.opcode[2:])
    a, b = form.read(1, 0, kind), form.read(2, 1, kind)
    mask = factory.read_mask(parse_operand(inst.operands[3]) if len(inst.operands) > 3 else vcc(factory))
    return lambda w: np.where(mask(w), b(w), a(w)), form.write(kind, 3)


#: opcode -> (operation, operands in reverse, carry in)
_CARRY = {
    "v_add_co_u32": (1, False, False), "v_sub_co_u32": (-1, False, False), "v_subrev_co_u32": (-1, True, False),
    "v_add_co_ci_u32": (1, False, True), "v_sub_co_ci_u32": (-1, False, True),
    "v_subrev_co_ci_u32": (-1, True, True), "v_addc_co_u32": (1, False, True),
    "v_subb_co_u32": (-1, False, True), "v_subbrev_co_u32": (-1, True, True),
}  # fmt: skip


def decode_carry(inst, factory):
    """Additions and subtractions with a carry per lane: destination, carry out, two sources, carry in."""
    if inst.opcode not in _CARRY:
        return None
    check_modifiers(inst)
    sign, reverse, carries_in = _CARRY[inst.opcode]
    form = VectorFormat(inst, factory, inst.opcode[2:])
    if form.dpp is not None and not form.dpp.everywhere:
        raise EmulatorError("DPP with disabled lanes and a carry")
    a, b = form.read(2, 0, "u32"), form.read(3, 1, "u32")
    if len(inst.operands) != 4 + carries_in:
        raise EmulatorError(f"{len(inst.operands)} operands where {4 + carries_in} are expected")
    # Without a carry in it is 0, as the null register.
    carry = factory.read_mask(parse_operand(inst.operands[4] if carries_in else "null"))
    put, put_carry = form.write("u32", 3), factory.write_mask(parse_operand(inst.operands[1]))
    if reverse:
        a, b = b, a

    def compute(w):
        return a(w).astype(I64) + sign * (b(w).astype(I64) + carry(w))

    def write(w, r):
        put(w, (r & 0xFFFFFFFF).astype(U32))
        put_carry(w, (r < 0) | (r > 0xFFFFFFFF))

    return compute, write


def decode_mad64(inst, factory):
    """v_mad_u64_u32 and v_mad_i64_i32: a 64-bit sum and its bit 64."""
    name = inst.opcode[2:].replace("_co_", "_")
    if name not in ("mad_u64_u32", "mad_i64_i32"):
        return None
    check_modifiers(inst)
    signed = name == "mad_i64_i32"
    a, b = (factory.read(parse_operand(o), "i32" if signed else "u32") for o in inst.operands[2:4])
    c = factory.read(parse_operand(inst.operands[4]), "u64")
    put = factory.write(parse_operand(inst.operands[0]), "u64")
    put_carry = factory.write_mask(parse_operand(inst.operands[1]))
    wide = I64 if signed else U64

    def compute(w):
        p, addend = (a(w).astype(wide) * b(w).astype(wide)).view(U64), c(w)
        r = p + addend
        carry = r < addend
        if signed:
            carry = carry ^ ((p >> U64(63)) == 1) ^ ((addend >> U64(63)) == 1)
        return r, carry

    def write(w, result):
        put(w, np.broadcast_to(result[0], w.active.shape))
        put_carry(w, np.broadcast_to(result[1], w.active.shape))

    return compute, write


def decode_bitop3(inst, factory):
    kind = {"v_bitop3_b32": "u32", "v_bitop3_b16": "u16"}.get(inst.opcode)
    if kind is None:
        return None
    check_modifiers(inst, "bitop3", "op_sel")
    form = VectorFormat(inst, factory, inst.opcode[2:])
    a, b, c = (form.read(i + 1, i, kind) for i in range(3))
    table = inst.integer("bitop3")
    return lambda w: truth_table(a(w), b(w), c(w), table), form.write(kind, 3)


def decode_dot2(inst, factory):
    """v_dot2_f32_f16: two products of float16 and a float32, rounded once. (Those of bf16 flush subnormals in ways
    that are not documented, so they are not here.)"""
    if inst.opcode not in ("v_dot2_f32_f16", "v_dot2c_f32_f16"):
        return None
    check_modifiers(inst)
    accumulate = parse_operand(inst.operands[3] if len(inst.operands) > 3 else inst.operands[0])
    a, b = (factory.read(parse_operand(o), "u32") for o in inst.operands[1:3])
    c, put = factory.read(accumulate, "f32"), factory.write(parse_operand(inst.operands[0]), "f32")

    def half(x, h):
        return (x >> U32(16 * h)).astype(np.uint16).view(np.float16).astype(np.float64)

    def compute(w):
        x, y = (read(w) for read in (a, b))
        return (half(x, 0) * half(y, 0) + half(x, 1) * half(y, 1) + c(w)).astype(np.float32)

    return compute, put


def decode_scalar_transcendental(inst, factory):
    """v_s_exp_f32 and the like (gfx12): a transcendental of the vector unit on scalar registers."""
    row = TRANSCENDENTAL.get(inst.opcode.removeprefix("v_s_")) if inst.opcode.startswith("v_s_") else None
    if row is None or not factory.target.gfx12:
        return None
    if inst.modifiers:
        raise EmulatorError(f"modifiers {sorted(inst.modifiers)}")
    kind, _, function = row
    read = factory.read(parse_operand(inst.operands[1]), kind)
    return lambda w: function(read(w)), write_scalar(parse_operand(inst.operands[0]), kind)


#: Tried in turn: each returns (compute, write), or None for an opcode of another kind.
SPECIAL = (
    decode_compare,
    decode_select,
    decode_carry,
    decode_mad64,
    decode_bitop3,
    decode_dot2,
    decode_scalar_transcendental,
)
