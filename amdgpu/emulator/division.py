"""The division macro: v_div_scale, v_div_fmas and v_div_fixup of float32."""

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.formats import fma_f32
from amdgpu.emulator.operands import parse_operand
from amdgpu.emulator.vector import check_modifiers, vcc


def _exponent(x):
    return ((x.view(U32) >> U32(23)) & U32(0xFF)).astype(np.int32)


def div_scale(value, denominator, numerator):
    """(scaled value, mask): the first step of a division; see V_DIV_SCALE_F32 in AMD's documents.

    The mask tells v_div_fmas to undo a scaling by 2**64 of only one of the two.
    """
    en, ed = _exponent(numerator), _exponent(denominator)
    gap = en - ed
    if ((en > 23) & (ed > 0) & (ed < 253) & (gap < 96) & (gap > -126)).all():
        return value, np.zeros((1, 1), bool)
    up, down = np.ldexp(value, 64), np.ldexp(value, -64)
    is_denominator = value == denominator
    inverse_tiny, quotient_tiny = ed >= 253, gap <= -126
    # From the last case to the first, which wins.
    scaled, mask = np.where(en <= 23, up, value), False
    for condition, result, marks in (
        (quotient_tiny, np.where(value == numerator, up, value), True),
        (inverse_tiny, down, False),
        # The documents scale the denominator up here, which would make it infinite.
        (inverse_tiny & quotient_tiny, np.where(is_denominator, down, value), True),
        (ed == 0, up, False),
        (gap >= 96, np.where(is_denominator, up, value), True),
        ((numerator == 0) | (denominator == 0), np.float32(np.nan), False),
    ):
        scaled, mask = np.where(condition, result, scaled), np.where(condition, marks, mask)
    return scaled.astype(np.float32), mask


def div_fixup(quotient, denominator, numerator):
    """The last step of a division: the special cases of V_DIV_FIXUP_F32, else the quotient with the right sign."""
    en, ed, eq = _exponent(numerator), _exponent(denominator), _exponent(quotient)
    sign = (denominator.view(U32) ^ numerator.view(U32)) & U32(0x80000000)
    r = quotient.view(U32) & U32(0x7FFFFFFF)
    if not ((en > 0) & (en < 255) & (ed > 0) & (ed < 255) & (en - ed >= -150) & (eq < 255)).all():
        infinite, zero = U32(0x7F800000), U32(0)
        large_n, large_d = np.isinf(numerator), np.isinf(denominator)
        # A quotient beyond the range makes the macro's steps infinite or NaN. (The documents name the exponent of
        # the denominator, whose case is excluded by then.)
        r = np.where(eq == 255, infinite, r)
        r = np.where(en - ed < -150, zero, r)
        r = np.where(large_d | (numerator == 0), zero, r)
        r = np.where((denominator == 0) | large_n, infinite, r)
        invalid = ((denominator == 0) & (numerator == 0)) | (large_d & large_n)
        invalid |= np.isnan(denominator) | np.isnan(numerator)
        return np.where(invalid, np.float32(np.nan), (r | sign).view(np.float32))
    return (r | sign).view(np.float32)


def _fixup(inst, factory):
    sources = _sources(inst, factory, 1)
    return lambda w: div_fixup(*sources(w)), factory.write(parse_operand(inst.operands[0]), "f32")


def _scale(inst, factory):
    # The one of the three with two results: the value, and the mask for v_div_fmas.
    sources = _sources(inst, factory, 2)
    put = factory.write(parse_operand(inst.operands[0]), "f32")
    put_mask = factory.write_mask(parse_operand(inst.operands[1]))

    def write(w, result):
        scaled, mask = result
        put(w, scaled)
        put_mask(w, mask)

    return lambda w: div_scale(*sources(w)), write


def _fmas(inst, factory):
    sources, mask = _sources(inst, factory, 1), factory.read_mask(vcc(factory))

    def compute(w):
        x, y, z = sources(w)
        r = fma_f32(x, y, z)
        # The documents say 2**32; the hardware undoes the 2**64 of v_div_scale, up where the third source is >= 2
        # and down elsewhere.
        scaled = np.ldexp(r.astype(np.float64), np.where(_exponent(z) > 127, 64, -64)).astype(np.float32)
        return np.where(mask(w), scaled, r)

    return compute, factory.write(parse_operand(inst.operands[0]), "f32")


def _sources(inst, factory, first: int):
    """Reader of the three float32 sources, which stand from operand `first` on."""
    readers = [factory.read(parse_operand(text), "f32") for text in inst.operands[first : first + 3]]
    return lambda w: [read(w) for read in readers]


_DECODERS = {"v_div_scale_f32": _scale, "v_div_fmas_f32": _fmas, "v_div_fixup_f32": _fixup}


def decode_division(inst, factory):
    """(compute, write) of the three instructions of the division macro; None for other opcodes."""
    decode = _DECODERS.get(inst.opcode)
    if decode is None:
        return None
    check_modifiers(inst)
    return decode(inst, factory)
