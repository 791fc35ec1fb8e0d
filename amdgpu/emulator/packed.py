"""Packed and mixed-precision vector instructions (VOP3P).

op_sel and op_sel_hi say, per source, which half (or which register of a pair) makes the low and the high result;
neg_lo and neg_hi negate what each of them takes.
"""

import numpy as np

from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.floatops import maximum, maxnum, minimum, minnum
from amdgpu.emulator.formats import fma_f16, fma_f32
from amdgpu.emulator.operands import DTYPES, Operand, parse_operand
from amdgpu.emulator.vector import check_modifiers


def _shift_left(a, b):
    return b << (a & a.dtype.type(15))


def _shift_right(a, b):
    return b >> (a.astype(b.dtype) & b.dtype.type(15))


#: v_pk_* -> (element type, source types, function of one element).
PACKED = {
    "pk_add_f32": ("f32", ("f32",) * 2, np.add),
    "pk_mul_f32": ("f32", ("f32",) * 2, np.multiply),
    "pk_fma_f32": ("f32", ("f32",) * 3, fma_f32),
    "pk_add_f16": ("f16", ("f16",) * 2, np.add),
    "pk_mul_f16": ("f16", ("f16",) * 2, np.multiply),
    "pk_fma_f16": ("f16", ("f16",) * 3, fma_f16),
    "pk_max_f16": ("f16", ("f16",) * 2, maxnum),
    "pk_min_f16": ("f16", ("f16",) * 2, minnum),
    "pk_maximum_f16": ("f16", ("f16",) * 2, maximum),
    "pk_minimum_f16": ("f16", ("f16",) * 2, minimum),
    "pk_maximum3_f16": ("f16", ("f16",) * 3, lambda a, b, c: maximum(maximum(a, b), c)),
    "pk_minimum3_f16": ("f16", ("f16",) * 3, lambda a, b, c: minimum(minimum(a, b), c)),
    "pk_mad_u16": ("u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    "pk_mad_i16": ("i16", ("i16",) * 3, lambda a, b, c: a * b + c),
    "pk_mul_lo_u16": ("u16", ("u16",) * 2, np.multiply),
    "pk_lshlrev_b16": ("u16", ("u16",) * 2, _shift_left),
    "pk_lshrrev_b16": ("u16", ("u16",) * 2, _shift_right),
    "pk_ashrrev_i16": ("i16", ("u16", "i16"), _shift_right),
}
for _t in ("u16", "i16"):
    PACKED |= {
        f"pk_add_{_t}": (_t, (_t,) * 2, np.add),
        f"pk_sub_{_t}": (_t, (_t,) * 2, np.subtract),
        f"pk_max_{_t}": (_t, (_t,) * 2, np.maximum),
        f"pk_min_{_t}": (_t, (_t,) * 2, np.minimum),
    }
PACKED |= {"pk_max_num_f16": PACKED["pk_max_f16"], "pk_min_num_f16": PACKED["pk_min_f16"]}

_SATURATES = (np.add, np.subtract, np.multiply)


def decode_packed(inst, factory):
    """(compute, write) of v_pk_* arithmetic; None for others."""
    row = PACKED.get(inst.opcode[2:])
    if row is None:
        return None
    check_modifiers(inst, "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")
    kind, sources, function = row
    if len(inst.operands) != len(sources) + 1:
        raise EmulatorError(f"{len(inst.operands)} operands where {len(sources) + 1} are expected")
    if inst.flag("clamp"):
        function = _clamped(function, kind)
    if kind == "f16" and factory.fp16_overflow:
        raise EmulatorError("packed float16 with FP16_OVFL set")
    low, high = _halves(inst, factory, sources)
    destination = parse_operand(inst.operands[0])

    def compute(w):
        return function(*[read(w) for read in low]), function(*[read(w) for read in high])

    if kind == "f32":
        puts = [factory.write(_register(destination, i), "f32") for i in (0, 1)]
    else:
        puts = [factory.write(destination, kind, high=bool(i)) for i in (0, 1)]

    def write(w, results):
        puts[0](w, results[0])
        puts[1](w, results[1])

    return compute, write


def _clamped(function, kind):
    if kind[0] == "f":
        one, zero = DTYPES[kind](1), DTYPES[kind](0)

        def f(*x):
            r = function(*x)
            return np.where(r > 0, np.minimum(r, one), zero)

        return f
    if function not in _SATURATES:
        raise EmulatorError("integer clamp of this opcode")
    bounds = np.iinfo(DTYPES[kind])
    return lambda a, b: np.clip(function(a.astype(np.int64), b.astype(np.int64)), bounds.min, bounds.max).astype(
        DTYPES[kind]
    )


def _register(operand, i):
    """Register i of a pair."""
    return Operand(operand.kind, operand.index + i, 1)


def _halves(inst, factory, sources):
    """Readers of the low and of the high result's sources."""
    count = len(sources)
    low_select, high_select = inst.bits("op_sel", count), inst.bits("op_sel_hi", count, 1)
    low_negate, high_negate = inst.bits("neg_lo", count), inst.bits("neg_hi", count)
    halves = []
    for select, negate in ((low_select, low_negate), (high_select, high_negate)):
        readers = []
        for i, kind in enumerate(sources):
            operand = parse_operand(inst.operands[i + 1])
            if operand.negate or operand.absolute:
                raise EmulatorError("a sign modifier on a packed operand")
            read = _read_half(factory, operand, kind, select[i])
            if negate[i]:
                if kind[0] != "f":
                    raise EmulatorError("neg_lo or neg_hi of an integer")
                read = (lambda r: lambda w: -r(w))(read)
            readers.append(read)
        halves.append(readers)
    return halves


def _read_half(factory, operand, kind, select):
    if kind[1:] == "16":
        return factory.read(operand, kind, high=bool(select))
    if operand.kind == "":
        # What the high half of a constant is depends on the generation; the compiler never asks for it.
        if select:
            raise EmulatorError("the high half of a constant")
        return factory.read(operand, kind)
    return factory.read(_register(operand, select), kind)


def decode_pk_mov(inst, factory):
    """v_pk_mov_b32: the low result is register op_sel[0] of the first pair, the high one op_sel[1] of the second."""
    if inst.opcode != "v_pk_mov_b32":
        return None
    check_modifiers(inst, "op_sel", "op_sel_hi")
    select = inst.bits("op_sel", 2)
    low, high = (_read_half(factory, parse_operand(inst.operands[i + 1]), "u32", select[i]) for i in (0, 1))
    destination = parse_operand(inst.operands[0])
    puts = [factory.write(_register(destination, i), "u32") for i in (0, 1)]

    def write(w, results):
        puts[0](w, results[0])
        puts[1](w, results[1])

    return lambda w: (np.array(low(w)), np.array(high(w))), write


def decode_mix(inst, factory):
    """v_fma_mix*: each source is a float32, or with op_sel_hi a float16 (op_sel: its high half)."""
    if inst.opcode not in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        return None
    check_modifiers(inst, "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")
    if inst.flag("clamp") or inst.flag("neg_hi") or inst.flag("neg_lo"):
        raise EmulatorError("modifiers of a mixed-precision fma")
    halves, is_half = inst.bits("op_sel", 3), inst.bits("op_sel_hi", 3)
    reads = [
        factory.read(parse_operand(inst.operands[i + 1]), "f16" if is_half[i] else "f32", high=bool(halves[i]))
        for i in range(3)
    ]
    destination = parse_operand(inst.operands[0])

    def compute(w):
        return fma_f32(*[read(w).astype(np.float32) for read in reads])

    if inst.opcode == "v_fma_mix_f32":
        return compute, factory.write(destination, "f32")
    if factory.fp16_overflow:
        raise EmulatorError("a mixed-precision fma with FP16_OVFL set")
    put = factory.write(destination, "f16", high=inst.opcode == "v_fma_mixhi_f16")
    return lambda w: compute(w).astype(np.float16), put


#: Tried in turn, like `vector_special.SPECIAL`.
PACKED_DECODERS = (decode_packed, decode_pk_mov, decode_mix)
