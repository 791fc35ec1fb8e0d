"""Vector instructions on integers and bits, one row an opcode: (result type, source types, function).

A function takes arrays that broadcast to [waves, lanes], in the types named, and returns one of the result type.
Names are those behind "v_", without the encoding. D in the source types is the old value of the destination.
"""

import numpy as np

from amdgpu.emulator.bitops import (
    align_bits,
    bit_count,
    extract_field,
    first_one,
    leading_sign_bits,
    leading_zeros,
    multiply_high,
    permute_bytes,
    reverse_bits,
    sign_extend,
)
from amdgpu.emulator.floatops import median

U16, U32, I32, U64, I64 = np.uint16, np.uint32, np.int32, np.uint64, np.int64


def _low24(a, b):
    """The low 24 bits of both, as int64 with the sign of bit 23 where the inputs are signed."""
    if a.dtype == U32:
        return (a & U32(0xFFFFFF)).astype(I64), (b & U32(0xFFFFFF)).astype(I64)
    return sign_extend(a, 24).astype(I64), sign_extend(b, 24).astype(I64)


def _multiply24(a, b):
    x, y = _low24(a, b)
    return (x * y).astype(U32)


def _multiply24_high(a, b):
    x, y = _low24(a, b)
    return ((x * y) >> I64(32)).astype(U32)


def _shift_left(a, b):
    """Shift counts come first in the "rev" opcodes."""
    return b << (a.astype(b.dtype) & b.dtype.type(b.dtype.itemsize * 8 - 1))


def _shift_right(a, b):
    """Logical or arithmetic by the dtype of b."""
    return b >> (a.astype(b.dtype) & b.dtype.type(b.dtype.itemsize * 8 - 1))


def _bit_field(a, b, c):
    return extract_field(a, b & U32(31), c & U32(31), signed=False)


def _signed_bit_field(a, b, c):
    return extract_field(a, b & U32(31), c & U32(31), signed=True)


def _lshl_add_u64(a, b, c):
    # The design shifts by 0 where the count exceeds 4.
    shift = b & U32(7)
    return (a << np.where(shift <= 4, shift, 0).astype(U64)) + c


def _add(a, b):
    return a + b


def _sub(a, b):
    return a - b


def _subrev(a, b):
    return b - a


def _multiply(a, b):
    return a * b


def _mad(a, b, c):
    return a * b + c


def _in_turn(first, second):
    return lambda a, b, c: second(first(a, b), c)


INTEGER = {
    "mov_b32": ("b32", ("b32",), lambda a: a),
    "mov_b16": ("b16", ("b16",), lambda a: a),
    "mov_b64": ("u64", ("u64",), lambda a: a),
    "accvgpr_read_b32": ("u32", ("u32",), lambda a: a),
    "accvgpr_write_b32": ("u32", ("u32",), lambda a: a),
    "accvgpr_mov_b32": ("u32", ("u32",), lambda a: a),
    "not_b32": ("u32", ("u32",), np.invert),
    "not_b16": ("u16", ("u16",), np.invert),
    "and_b32": ("u32", ("u32", "u32"), np.bitwise_and),
    "or_b32": ("u32", ("u32", "u32"), np.bitwise_or),
    "xor_b32": ("u32", ("u32", "u32"), np.bitwise_xor),
    "xnor_b32": ("u32", ("u32", "u32"), lambda a, b: ~(a ^ b)),
    "and_b16": ("u16", ("u16", "u16"), np.bitwise_and),
    "or_b16": ("u16", ("u16", "u16"), np.bitwise_or),
    "xor_b16": ("u16", ("u16", "u16"), np.bitwise_xor),
    "and_or_b32": ("u32", ("u32",) * 3, lambda a, b, c: (a & b) | c),
    "or3_b32": ("u32", ("u32",) * 3, lambda a, b, c: a | b | c),
    "xor3_b32": ("u32", ("u32",) * 3, lambda a, b, c: a ^ b ^ c),
    "bfi_b32": ("u32", ("u32",) * 3, lambda mask, x, y: (mask & x) | (y & ~mask)),
    "bfe_u32": ("u32", ("u32",) * 3, _bit_field),
    "bfe_i32": ("u32", ("u32",) * 3, _signed_bit_field),
    "bfm_b32": ("u32", ("u32", "u32"), lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    "bfrev_b32": ("u32", ("u32",), reverse_bits),
    "bcnt_u32_b32": ("u32", ("u32", "u32"), lambda a, b: bit_count(a).astype(U32) + b),
    "clz_i32_u32": ("i32", ("u32",), leading_zeros),
    "ctz_i32_b32": ("i32", ("u32",), first_one),
    "cls_i32": ("i32", ("i32",), leading_sign_bits),
    "perm_b32": ("u32", ("u32",) * 3, permute_bytes),
    "alignbit_b32": ("u32", ("u32",) * 3, lambda a, b, c: align_bits(a, b, c & U32(31))),
    "alignbyte_b32": ("u32", ("u32",) * 3, lambda a, b, c: align_bits(a, b, (c & U32(3)) * U32(8))),
    "add_nc_u32": ("u32", ("u32", "u32"), _add),
    "sub_nc_u32": ("u32", ("u32", "u32"), _sub),
    "subrev_nc_u32": ("u32", ("u32", "u32"), _subrev),
    "add_nc_i32": ("i32", ("i32", "i32"), _add),
    "sub_nc_i32": ("i32", ("i32", "i32"), _sub),
    "add3_u32": ("u32", ("u32",) * 3, lambda a, b, c: a + b + c),
    "xad_u32": ("u32", ("u32",) * 3, lambda a, b, c: (a ^ b) + c),
    "lshl_add_u32": ("u32", ("u32",) * 3, lambda a, b, c: (a << (b & U32(31))) + c),
    "add_lshl_u32": ("u32", ("u32",) * 3, lambda a, b, c: (a + b) << (c & U32(31))),
    "lshl_or_b32": ("u32", ("u32",) * 3, lambda a, b, c: (a << (b & U32(31))) | c),
    "lshl_add_u64": ("u64", ("u64", "u32", "u64"), _lshl_add_u64),
    "lshlrev_b32": ("u32", ("u32", "u32"), _shift_left),
    "lshrrev_b32": ("u32", ("u32", "u32"), _shift_right),
    "ashrrev_i32": ("i32", ("u32", "i32"), _shift_right),
    "lshlrev_b64": ("u64", ("u32", "u64"), _shift_left),
    "lshrrev_b64": ("u64", ("u32", "u64"), _shift_right),
    "ashrrev_i64": ("i64", ("u32", "i64"), _shift_right),
    "lshlrev_b16": ("u16", ("u16", "u16"), _shift_left),
    "lshrrev_b16": ("u16", ("u16", "u16"), _shift_right),
    "ashrrev_i16": ("i16", ("u16", "i16"), _shift_right),
    "mul_lo_u32": ("u32", ("u32", "u32"), _multiply),
    "mul_hi_u32": ("u32", ("u32", "u32"), multiply_high),
    "mul_hi_i32": ("i32", ("i32", "i32"), multiply_high),
    "mul_u32_u24": ("u32", ("u32", "u32"), _multiply24),
    "mul_i32_i24": ("u32", ("i32", "i32"), _multiply24),
    "mul_hi_u32_u24": ("u32", ("u32", "u32"), _multiply24_high),
    "mul_hi_i32_i24": ("u32", ("i32", "i32"), _multiply24_high),
    "mad_u32_u24": ("u32", ("u32",) * 3, lambda a, b, c: _multiply24(a, b) + c),
    "mad_i32_i24": ("u32", ("i32", "i32", "u32"), lambda a, b, c: _multiply24(a, b) + c),
    "mad_u32_u16": ("u32", ("u16", "u16", "u32"), lambda a, b, c: a.astype(U32) * b + c),
    "mad_i32_i16": ("i32", ("i16", "i16", "i32"), lambda a, b, c: a.astype(I32) * b + c),
    "mad_u16": ("u16", ("u16",) * 3, _mad),
    "mad_i16": ("i16", ("i16",) * 3, _mad),
    "add_nc_u16": ("u16", ("u16", "u16"), _add),
    "sub_nc_u16": ("u16", ("u16", "u16"), _sub),
    "subrev_u16": ("u16", ("u16", "u16"), _subrev),
    "add_nc_i16": ("i16", ("i16", "i16"), _add),
    "sub_nc_i16": ("i16", ("i16", "i16"), _sub),
    "mul_lo_u16": ("u16", ("u16", "u16"), _multiply),
}
for _t in ("u32", "i32", "u16", "i16"):
    _pair, _triple = (_t,) * 2, (_t,) * 3
    INTEGER |= {
        f"min_{_t}": (_t, _pair, np.minimum),
        f"max_{_t}": (_t, _pair, np.maximum),
        f"min3_{_t}": (_t, _triple, _in_turn(np.minimum, np.minimum)),
        f"max3_{_t}": (_t, _triple, _in_turn(np.maximum, np.maximum)),
        f"med3_{_t}": (_t, _triple, median),
    }
    if _t in ("u32", "i32"):
        INTEGER[f"minmax_{_t}"] = _t, _triple, _in_turn(np.minimum, np.maximum)
        INTEGER[f"maxmin_{_t}"] = _t, _triple, _in_turn(np.maximum, np.minimum)
#: Names that differ between generations (gfx9 adds without "nc").
INTEGER |= {
    new: INTEGER[old]
    for new, old in {
        "add_u32": "add_nc_u32", "sub_u32": "sub_nc_u32", "subrev_u32": "subrev_nc_u32", "add_i32": "add_nc_i32",
        "sub_i32": "sub_nc_i32", "add_u16": "add_nc_u16", "sub_u16": "sub_nc_u16", "add_i16": "add_nc_i16",
        "sub_i16": "sub_nc_i16", "ffbh_u32": "clz_i32_u32", "ffbl_b32": "ctz_i32_b32", "ffbh_i32": "cls_i32",
    }.items()
}  # fmt: skip

_EXACT = {_add: _add, _sub: _sub, _subrev: _subrev, _mad: _mad, _multiply: _multiply}


def saturating(name: str):
    """The function of an integer opcode with the clamp modifier: exact, then cut to the range of the type (it is
    not the [0, 1] of floats). None where the opcode has no such form here."""
    kind, _, function = INTEGER[name]
    exact = _EXACT.get(function)
    if exact is None:
        return None
    dtype = {"u32": U32, "i32": I32, "u16": U16, "i16": np.int16}[kind]
    bounds = np.iinfo(dtype)
    return lambda *x: np.clip(exact(*[v.astype(I64) for v in x]), bounds.min, bounds.max).astype(dtype)


#: Opcodes whose 16-bit result clears the high half of the register on gfx9 (elsewhere, and for all others, it is
#: kept); the list of LLVM's GCNSubtarget::zeroesHigh16BitsOfDest.
CLEARS_HIGH_HALF = frozenset((
    "cvt_f16_f32", "cvt_f16_u16", "cvt_f16_i16", "rcp_f16", "rsq_f16", "sqrt_f16", "log_f16", "exp_f16",
    "sin_f16", "cos_f16", "floor_f16", "ceil_f16", "trunc_f16", "rndne_f16", "fract_f16", "frexp_mant_f16",
    "frexp_exp_i16_f16", "ldexp_f16", "lshlrev_b16", "lshrrev_b16", "ashrrev_i16", "add_u16", "sub_u16",
    "subrev_u16", "mul_lo_u16", "add_f16", "sub_f16", "subrev_f16", "mul_f16", "max_f16", "min_f16",
    "max_u16", "min_u16", "max_i16", "min_i16",
))  # fmt: skip
