"""Matrix instructions: MFMA (gfx9) and WMMA (gfx11, gfx12), D = A B + C.

Products and sums are formed in float64 (int64 for integers) and rounded once to the type of D, which is better than
any hardware: the order and the rounding of its partial sums are not modelled. Layouts, for lane l:

MFMA, M x M x K, one block: with n = K / (64 / M) elements a lane, A[l % M][n (l // M) + e] is element e of the lane's
registers, and B[n (l // M) + e][l % M] likewise. D[8 (r // 4) + 4 (l // 32) + r % 4][l % 32] is register r for M = 32,
D[4 (l // 16) + r][l % 16] for M = 16. Of several blocks lane l holds block l // M of A and B, and the registers of D
follow block by block (for M = 4 its lanes do).

WMMA 16 x 16 x 16 on gfx11: A[l % 16][e] in 16 elements, lanes 16 to 31 repeating lanes 0 to 15, B likewise by
columns; D[2 r + l // 16][l % 16] is register r. On gfx12: A[l % 16][8 (l // 16) + e] in 8 elements;
D[8 (l // 16) + r][l % 16] is register r.
"""

import dataclasses

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.formats import FP8_VALUES, bf16_to_f32, f32_to_bf16
from amdgpu.emulator.operands import parse_operand

F64 = np.float64
_BITS = {"f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "i8": 8, "u8": 8}
_FLOAT8 = ("fp8", "bf8")


@dataclasses.dataclass(frozen=True)
class Mfma:
    """Shape of an MFMA: rows (= columns) of a block, K, blocks, types of D, A and B."""

    rows: int
    depth: int
    blocks: int
    result: str
    a: str
    b: str


MFMA = {
    "f32_32x32x2_f32": Mfma(32, 2, 1, "f32", "f32", "f32"),
    "f32_16x16x4_f32": Mfma(16, 4, 1, "f32", "f32", "f32"),
    "f32_32x32x1_2b_f32": Mfma(32, 1, 2, "f32", "f32", "f32"),
    "f32_16x16x1_4b_f32": Mfma(16, 1, 4, "f32", "f32", "f32"),
    "f32_4x4x1_16b_f32": Mfma(4, 1, 16, "f32", "f32", "f32"),
    "f32_32x32x4_xf32": Mfma(32, 4, 1, "f32", "xf32", "xf32"),
    "f32_16x16x8_xf32": Mfma(16, 8, 1, "f32", "xf32", "xf32"),
    "i32_32x32x16_i8": Mfma(32, 16, 1, "i32", "i8", "i8"),
    "i32_16x16x32_i8": Mfma(16, 32, 1, "i32", "i8", "i8"),
    "i32_32x32x32_i8": Mfma(32, 32, 1, "i32", "i8", "i8"),
    "i32_16x16x64_i8": Mfma(16, 64, 1, "i32", "i8", "i8"),
    # The formats of A and B are the modifiers cbsz and blgp.
    "f32_16x16x128_f8f6f4": Mfma(16, 128, 1, "f32", "f8f6f4", "f8f6f4"),
    "f32_32x32x64_f8f6f4": Mfma(32, 64, 1, "f32", "f8f6f4", "f8f6f4"),
}
for _t in ("f16", "bf16"):
    MFMA |= {
        f"f32_32x32x8_{_t}": Mfma(32, 8, 1, "f32", _t, _t),
        f"f32_16x16x16_{_t}": Mfma(16, 16, 1, "f32", _t, _t),
        f"f32_32x32x16_{_t}": Mfma(32, 16, 1, "f32", _t, _t),
        f"f32_16x16x32_{_t}": Mfma(16, 32, 1, "f32", _t, _t),
        f"f32_32x32x4_2b_{_t}": Mfma(32, 4, 2, "f32", _t, _t),
        f"f32_16x16x4_4b_{_t}": Mfma(16, 4, 4, "f32", _t, _t),
        f"f32_4x4x4_16b_{_t}": Mfma(4, 4, 16, "f32", _t, _t),
    }
for _a in _FLOAT8:
    for _b in _FLOAT8:
        MFMA |= {
            f"f32_16x16x32_{_a}_{_b}": Mfma(16, 32, 1, "f32", _a, _b),
            f"f32_32x32x16_{_a}_{_b}": Mfma(32, 16, 1, "f32", _a, _b),
        }

#: WMMA 16 x 16 x 16: name -> (type of D, of A, of B).
WMMA = {
    "f32_16x16x16_f16": ("f32", "f16", "f16"),
    "f32_16x16x16_bf16": ("f32", "bf16", "bf16"),
    "f16_16x16x16_f16": ("f16", "f16", "f16"),
    "bf16_16x16x16_bf16": ("bf16", "bf16", "bf16"),
    "i32_16x16x16_iu8": ("i32", "iu8", "iu8"),
}
#: Further ones that only gfx12 has.
WMMA_GFX12 = {f"f32_16x16x16_{a}_{b}": ("f32", a, b) for a in _FLOAT8 for b in _FLOAT8}


def round_to_xf32(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the 10 mantissa bits of XF32."""
    bits = np.ascontiguousarray(x).view(U32)
    return ((bits + U32(0xFFF) + ((bits >> U32(13)) & U32(1))) & U32(0xFFFFE000)).view(np.float32)


def _elements(registers: np.ndarray, kind: str, fnuz: bool) -> np.ndarray:
    """float64 [waves, lanes, elements] of uint32 [registers, waves, lanes], lowest bits first."""
    per_register = 32 // _BITS[kind]
    unsigned = {32: np.uint32, 16: np.uint16, 8: np.uint8}[_BITS[kind]]
    parts = np.ascontiguousarray(registers).view(unsigned).reshape(*registers.shape, per_register)
    parts = parts.transpose(1, 2, 0, 3).reshape(*registers.shape[1:], -1)
    match kind:
        case "f32":
            return parts.view(np.float32).astype(F64)
        case "xf32":
            return round_to_xf32(parts.view(np.float32)).astype(F64)
        case "f16":
            return parts.view(np.float16).astype(F64)
        case "bf16":
            return bf16_to_f32(parts).astype(F64)
        case "i8":
            return parts.view(np.int8).astype(F64)
        case "u8":
            return parts.astype(F64)
    return FP8_VALUES[f"{kind}_fnuz" if fnuz else kind][parts].astype(F64)


def _source(inst, factory, position, kind, elements, repeats=False):
    """Reader [waves, lanes, elements] of operand A or B; of 16 lanes where the other 16 must repeat them."""
    operand = parse_operand(inst.operands[position])
    n, count = factory.vector_index(operand), operand.count
    if count * 32 != elements * _BITS[kind]:
        raise EmulatorError(f"operand {position} has {count} registers for {elements} elements of {kind}")
    fnuz = factory.target.fnuz
    if not repeats:
        return lambda w: _elements(w.vgprs[n : n + count], kind, fnuz)

    def read(w):
        registers = w.vgprs[n : n + count]
        first, second = registers[..., :16], registers[..., 16:]
        if not np.array_equal(first, second):
            raise EmulatorError("lanes 16 to 31 do not repeat lanes 0 to 15")
        return _elements(first, kind, fnuz)

    return read


def _accumulator(inst, factory, count, kind):
    """Reader of C as uint32 registers viewed in its type [count, waves, lanes], or a constant."""
    operand = parse_operand(inst.operands[3])
    dtype = np.int32 if kind == "i32" else np.float32
    if operand.negate or operand.absolute:
        raise EmulatorError("a sign modifier on C")
    if operand.kind == "":
        value = factory.read(operand, kind)
        return lambda w: value(w)[None]
    n = factory.vector_index(operand)
    if operand.count != count:
        raise EmulatorError(f"C has {operand.count} registers where {count} are expected")
    return lambda w: w.vgprs[n : n + count].view(dtype)


def _add(product: np.ndarray, c: np.ndarray) -> np.ndarray:
    """uint32 of D = product + C, in the type of C."""
    if c.dtype == np.int32:
        return (product.astype(np.int64) + c).astype(np.int32).view(U32)
    return (product + c).astype(np.float32).view(U32)


def _no_modifiers(inst, *allowed):
    for name, value in inst.modifiers.items():
        zero = not any(value) if isinstance(value, tuple) else str(value) in ("0", "0x0")
        if name not in allowed and not zero:
            raise EmulatorError(f"matrix modifier {name}")


def decode_mfma(inst, factory):
    """(compute, write) of v_mfma_*; None for others. MFMA ignores EXEC."""
    if not inst.opcode.startswith("v_mfma_"):
        return None
    name = inst.opcode[7:].removesuffix("_1k")
    if name not in MFMA:
        return None
    shape = MFMA[name]
    a_kind, b_kind = shape.a, shape.b
    if shape.a == "f8f6f4":
        _no_modifiers(inst, "cbsz", "blgp")
        a_kind, b_kind = (_f8f6f4(inst.integer(m)) for m in ("cbsz", "blgp"))
    else:
        _no_modifiers(inst)
    lanes, rows, blocks = 64, shape.rows, shape.blocks
    groups = lanes // (rows * blocks)
    per_lane = shape.depth // groups
    a, b = (_source(inst, factory, i + 1, k, per_lane) for i, k in enumerate((a_kind, b_kind)))
    count = rows * rows * blocks // lanes
    c = _accumulator(inst, factory, count, shape.result)
    d = parse_operand(inst.operands[0])
    n = factory.vector_index(d)
    if d.count != count:
        raise EmulatorError(f"D has {d.count} registers where {count} are expected")

    def matrix(x):
        # [waves, groups or blocks, rows, elements]: groups of lanes continue along K.
        x = x.reshape(len(x), blocks, groups, rows, per_lane)
        return x.transpose(0, 1, 3, 2, 4).reshape(len(x), blocks, rows, shape.depth)

    def registers(product):
        waves = len(product)
        if rows == 4:
            # [waves, block, row, column] -> register = row, lane = (block, column).
            return product.transpose(2, 0, 1, 3).reshape(4, waves, lanes)
        row_groups = lanes // rows
        split = product.reshape(waves, blocks, rows // (4 * row_groups), row_groups, 4, rows)
        # -> register = (block, outer row, row in 4), lane = (row group, column).
        return split.transpose(1, 2, 4, 0, 3, 5).reshape(count, waves, lanes)

    def compute(w):
        product = matrix(a(w)) @ matrix(b(w)).swapaxes(2, 3)
        return _add(registers(product), c(w))

    def write(w, result):
        w.vgprs[n : n + count] = result

    return compute, write


def _f8f6f4(code):
    kinds = {0: "fp8", 1: "bf8"}
    if code not in kinds:
        raise EmulatorError("6-bit and 4-bit matrix formats")
    return kinds[code]


def decode_wmma(inst, factory):
    """(compute, write) of v_wmma_*; None for others."""
    if not inst.opcode.startswith("v_wmma_") or factory.target.gfx9:
        return None
    gfx12 = factory.target.gfx12
    row = (WMMA | WMMA_GFX12 if gfx12 else WMMA).get(inst.opcode[7:].removesuffix("_w32"))
    if row is None:
        return None
    result, a_kind, b_kind = row
    signed = inst.bits("neg_lo", 3)
    _no_modifiers(inst, *(("neg_lo",) if a_kind == "iu8" else ()), *(("op_sel",) if _BITS.get(result) == 16 else ()))
    if a_kind == "iu8":
        a_kind, b_kind = ("i8" if s else "u8" for s in signed[:2])
    per_lane = 8 if gfx12 else 16
    a, b = (_source(inst, factory, i + 1, k, per_lane, not gfx12) for i, k in enumerate((a_kind, b_kind)))

    def matrix(x):
        if gfx12:
            return x.reshape(-1, 2, 16, 8).swapaxes(1, 2).reshape(-1, 16, 16)
        return x

    def registers(product):
        if gfx12:
            return product.reshape(-1, 2, 8, 16).transpose(2, 0, 1, 3).reshape(8, -1, 32)
        return product.reshape(-1, 8, 2, 16).transpose(1, 0, 2, 3).reshape(8, -1, 32)

    def product(w):
        if not w.full:
            raise EmulatorError("WMMA with inactive lanes")
        return registers(matrix(a(w)) @ matrix(b(w)).swapaxes(1, 2))

    destination = parse_operand(inst.operands[0])
    n = factory.vector_index(destination)
    if _BITS.get(result) == 16:
        return _wmma_16bit(inst, factory, product, result, n)
    if destination.count != 8:
        raise EmulatorError(f"D has {destination.count} registers where 8 are expected")
    c = _accumulator(inst, factory, 8, result)

    def write(w, x):
        w.vgprs[n : n + 8] = x

    return lambda w: _add(product(w), c(w)), write


def _wmma_16bit(inst, factory, product, result, n):
    """C and D of 16 bits: one half of 8 registers on gfx11 (op_sel[2]: the high one), 4 full registers on gfx12."""
    gfx12 = factory.target.gfx12
    operand = parse_operand(inst.operands[3])
    high = inst.bits("op_sel", 3)[2]
    if operand.kind == "":
        if operand.value != "0":
            raise EmulatorError("C is a constant other than 0")
        m = None
    else:
        m = factory.vector_index(operand)

    def half_rows(w, first):
        """float16 or bf16 bits [8, waves, lanes] of 8 results."""
        if gfx12:
            words = w.vgprs[first : first + 4].view(np.uint16).reshape(4, w.count, w.lanes, 2)
            return words.transpose(0, 3, 1, 2).reshape(8, w.count, w.lanes)
        return np.stack([w.vgpr_u16[first + r][high] for r in range(8)])

    def compute(w):
        x = product(w)
        if m is not None:
            bits = half_rows(w, m)
            x = x + (bits.view(np.float16) if result == "f16" else bf16_to_f32(bits)).astype(F64)
        if result == "f16":
            return x.astype(np.float16).view(np.uint16)
        return f32_to_bf16(x.astype(np.float32)).astype(np.uint16)

    def write(w, x):
        for r in range(8):
            if gfx12:
                w.vgpr_u16[n + r // 2][r % 2][...] = x[r]
            else:
                w.vgpr_u16[n + r][high][...] = x[r]

    return compute, write
