"""Integer functions on arrays of bits that numpy lacks."""

import numpy as np

U8, U32, I32, U64, I64 = np.uint8, np.uint32, np.int32, np.uint64, np.int64


def bit_length(a: np.ndarray) -> np.ndarray:
    """int64 number of bits up to the highest one that is set; 0 for 0."""
    wide = a.astype(U64)
    high, low = (wide >> U64(32)).astype(np.float64), (wide & U64(0xFFFFFFFF)).astype(np.float64)
    # frexp's exponent of an integer below 2**53 is its bit length.
    return np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1]).astype(I64)


def bit_count(a: np.ndarray) -> np.ndarray:
    """int64 number of set bits."""
    return np.bitwise_count(a).astype(I64)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    """Bits in the opposite order, same unsigned dtype."""
    raw = np.ascontiguousarray(a)[..., None].view(U8)
    bits = np.unpackbits(raw, axis=-1, bitorder="little")
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(a.dtype)[..., 0]


def first_one(a: np.ndarray) -> np.ndarray:
    """int32 number of the lowest set bit; -1 where there is none."""
    lowest = a & (~a + a.dtype.type(1))
    return (bit_length(lowest) - 1).astype(I32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """int32 number of zeros above the highest set bit; -1 where there is none."""
    return np.where(a == 0, -1, a.dtype.itemsize * 8 - bit_length(a)).astype(I32)


def leading_sign_bits(a: np.ndarray) -> np.ndarray:
    """int32 number of leading bits equal to the sign, of int32; -1 where all are."""
    return leading_zeros(np.where(a < 0, ~a, a).view(U32))


def sign_extend(a: np.ndarray, width: int) -> np.ndarray:
    """int32 of the low `width` bits of uint32 or int32."""
    return (a.view(U32) << U32(32 - width)).view(I32) >> I32(32 - width)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """High 32 bits of the 64-bit product of two uint32, or of two int32."""
    wide = U64 if a.dtype == U32 else I64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def extract_field(value: np.ndarray, offset: np.ndarray, size: np.ndarray, signed: bool) -> np.ndarray:
    """`size` bits of value from bit `offset`, sign-extended on demand; unsigned arrays of one dtype, size <= width."""
    unsigned = value.dtype.type
    width = value.dtype.itemsize * 8
    shifted = value >> offset
    keep = np.where(size >= unsigned(width), ~unsigned(0), (unsigned(1) << (size & unsigned(width - 1))) - unsigned(1))
    field = shifted & keep
    if signed:
        top = (field >> ((size - unsigned(1)) & unsigned(width - 1))) & unsigned(1)
        field = np.where((size > 0) & (top == 1), field | ~keep, field)
    return field


def align_bits(high: np.ndarray, low: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Low 32 bits of the 64-bit {high, low} shifted right."""
    wide = (high.astype(U64) << U64(32)) | low
    return (wide >> shift.astype(U64)).astype(U32)


def permute_bytes(high: np.ndarray, low: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """v_perm_b32: each byte of the selector picks byte 0..7 of {high, low}; 8..11 repeat the sign of byte 1, 3, 5
    or 7; 12 is 0x00, above it is 0xFF."""
    shape = np.broadcast(high, low, selector).shape
    words = np.empty((*shape, 2), U32)
    words[..., 0], words[..., 1] = low, high
    source = words.view(U8)
    first = selector.flat[0]
    if (selector == first).all():
        # Nearly always: the selector is a constant.
        result = np.empty((*shape, 4), U8)
        for i in range(4):
            result[..., i] = _selected_byte(source, int(first) >> 8 * i & 0xFF)
        return result.view(U32)[..., 0]
    choices = np.stack([_selected_byte(source, k) + np.zeros(shape, U8) for k in range(14)], axis=-1)
    wanted = np.ascontiguousarray(np.broadcast_to(selector, shape))[..., None].view(U8)
    picked = np.take_along_axis(choices, np.minimum(wanted, 13).astype(np.intp), axis=-1)
    return picked.view(U32)[..., 0]


def _selected_byte(source, k):
    if k < 8:
        return source[..., k]
    if k < 12:
        return (source[..., 2 * (k - 8) + 1] >> U8(7)) * U8(0xFF)
    return U8(0) if k == 12 else U8(0xFF)


def truth_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """v_bitop3: bit i of the result is bit (a_i, b_i, c_i), a_i highest, of the 8-bit table."""
    none = a.dtype.type(0)
    entries = [~none if table & (1 << i) else none for i in range(8)]
    # The lowest operand chooses between neighbouring entries, the next one between the results, and so on.
    for bits in (c, b, a):
        entries = [(zero & ~bits) | (one & bits) for zero, one in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]
