"""Moves between lanes: DPP sources, lane reads, permutes and swaps.

A lane permutation is an array `source[lanes]`: lane i reads lane source[i]. Rows are 16 lanes, banks 4.
"""

import re

import numpy as np

from amdgpu.emulator.bitops import U32, U64, bit_count
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.operands import parse_operand
from amdgpu.emulator.scalar import write_scalar

#: Modifiers that select a DPP permutation, and those that go with one.
DPP_CONTROLS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_share",
    "row_newbcast", "row_xmask", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "dpp8",
)  # fmt: skip
DPP_WORDS = frozenset((*DPP_CONTROLS, "row_mask", "bank_mask", "bound_ctrl", "fi"))


def dpp_permutation(control: str, value, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, valid): which lane each lane reads, and whether there is such a lane."""
    lane = np.arange(lanes)
    row, column = lane & ~15, lane & 15
    number = int(value) if isinstance(value, str) else 0
    everywhere = np.ones(lanes, bool)
    match control:
        case "quad_perm":
            return (lane & ~3) + np.array(value)[lane & 3], everywhere
        case "dpp8":
            return (lane & ~7) + np.array(value)[lane & 7], everywhere
        case "row_shl":
            return lane + number, column + number < 16
        case "row_shr":
            return lane - number, column >= number
        case "row_ror":
            return row + ((column - number) & 15), everywhere
        case "row_mirror":
            return row + 15 - column, everywhere
        case "row_half_mirror":
            return (lane & ~7) + 7 - (lane & 7), everywhere
        case "row_share" | "row_newbcast":
            return row + number, everywhere
        case "row_xmask":
            return row + (column ^ number), everywhere
        case "row_bcast":
            # Lane 15 of each row to the row behind it, or lane 31 to the rows 2 and 3.
            return (row - 1, row > 0) if number == 15 else (np.full(lanes, 31), lane >= 32)
        case "wave_shl":
            return lane + 1, lane < lanes - 1
        case "wave_shr":
            return lane - 1, lane > 0
        case "wave_rol":
            return (lane + 1) % lanes, everywhere
        case "wave_ror":
            return (lane - 1) % lanes, everywhere
    raise EmulatorError(f"DPP control {control}")


class Dpp:
    """The DPP modifiers of one instruction.

    A lane whose source does not exist or is inactive reads 0 with bound_ctrl (always for dpp8), and keeps its
    destination without; so do lanes outside of row_mask and bank_mask.
    """

    def __init__(self, inst, lanes: int):
        control = next(c for c in DPP_CONTROLS if c in inst.modifiers)
        source, self.valid = dpp_permutation(control, inst.modifiers[control], lanes)
        self.source = np.where(self.valid, source, 0)
        lane = np.arange(lanes)
        rows, banks = inst.integer("row_mask", 0xF), inst.integer("bank_mask", 0xF)
        self.selected = ((rows >> (lane // 16)) & 1).astype(bool) & ((banks >> (lane // 4 % 4)) & 1).astype(bool)
        # The set bit is printed as bound_ctrl:1 (older assemblers: bound_ctrl:0); the clear bit is not printed.
        self.zero_fill = "bound_ctrl" in inst.modifiers or control == "dpp8"
        self.read_inactive = inst.integer("fi") == 1
        self.everywhere = bool(self.selected.all()) and (self.zero_fill or bool(self.valid.all()))

    def _readable(self, w):
        if self.read_inactive or w.full:
            return self.valid
        return self.valid & w.active[:, self.source]

    def gather(self, w, x: np.ndarray) -> np.ndarray:
        """x [waves, lanes] as each lane sees it."""
        moved = x[:, self.source]
        if w.full and self.valid.all():
            return moved
        return np.where(self._readable(w), moved, x.dtype.type(0))

    def enabled(self, w):
        """Lanes that write their result: True for all, or bool that broadcasts to [waves, lanes]."""
        if self.everywhere and (self.zero_fill or w.full or self.read_inactive):
            return True
        return self.selected if self.zero_fill else self.selected & self._readable(w)


def _first_active(w):
    """int [waves]: the lowest active lane, 0 where there is none."""
    return np.zeros(w.count, np.intp) if w.full else w.active.argmax(axis=1)


def _readfirstlane(inst, factory):
    put = write_scalar(parse_operand(inst.operands[0]), "u32")
    source = parse_operand(inst.operands[1])
    if not source.vector:
        read = factory.read(source, "u32")
        return lambda w: put(w, read(w))
    n = factory.vector_index(source)
    return lambda w: put(w, w.vgpr_u32[n][np.arange(w.count), _first_active(w)][:, None])


def _readlane(inst, factory):
    put = write_scalar(parse_operand(inst.operands[0]), "u32")
    n = factory.vector_index(parse_operand(inst.operands[1]))
    lane = factory.read(parse_operand(inst.operands[2]), "u32")
    last = U32(factory.lanes - 1)

    def step(w):
        chosen = np.broadcast_to((lane(w) & last).astype(np.intp), (w.count, 1))
        put(w, np.take_along_axis(w.vgpr_u32[n], chosen, axis=1))

    return step


def _writelane(inst, factory):
    """Ignores EXEC."""
    n = factory.vector_index(parse_operand(inst.operands[0]))
    value, lane = (factory.read(parse_operand(o), "u32") for o in inst.operands[1:])
    last = U32(factory.lanes - 1)

    def step(w):
        w.vgpr_u32[n][np.arange(w.count), (lane(w) & last)[:, 0].astype(np.intp)] = value(w)[:, 0]

    return step


def _permlane16(inst, factory):
    """Lane i of a row reads the lane that nibble i of the two scalars names, in its own row or (x16) in the other
    row of the pair. op_sel: read inactive lanes; read 0 where there is nothing to read."""
    destination = parse_operand(inst.operands[0])
    n, d = factory.vector_index(parse_operand(inst.operands[1])), factory.vector_index(destination)
    low, high = (factory.read(parse_operand(o), "u32") for o in inst.operands[2:4])
    read_inactive, zero_fill = inst.bits("op_sel", 2)
    put = factory.write(destination, "u32")
    lane = np.arange(factory.lanes)
    row = (lane & ~15) ^ (16 if "x16" in inst.opcode else 0)
    shift = (4 * (lane & 15)).astype(U64)

    def step(w):
        nibbles = low(w).astype(U64) | (high(w).astype(U64) << U64(32))
        source = row + ((nibbles >> shift) & U64(15)).astype(np.intp)
        source = np.broadcast_to(source, (w.count, factory.lanes))
        moved = np.take_along_axis(w.vgpr_u32[n], source, axis=1)
        if not (read_inactive or w.full):
            readable = np.take_along_axis(w.active, source, axis=1)
            moved = np.where(readable, moved, U32(0) if zero_fill else w.vgpr_u32[d])
        put(w, moved)

    return step


def _permlane_swap(inst, factory):
    """The odd rows (of 16 or 32 lanes) of the first register change places with the even rows of the second."""
    a, b = (factory.vector_index(parse_operand(o)) for o in inst.operands[:2])
    size = 16 if "lane16" in inst.opcode else 32
    if set(inst.modifiers) - {"bound_ctrl", "fi"}:
        raise EmulatorError("modifiers of a lane swap")
    lane = np.arange(factory.lanes)
    odd = lane[(lane // size) % 2 == 1]
    even = odd - size

    def step(w):
        if not w.full:
            raise EmulatorError("a lane swap with inactive lanes")
        x, y = w.vgpr_u32[a], w.vgpr_u32[b]
        kept = x[:, odd]
        x[:, odd] = y[:, even]
        y[:, even] = kept

    return step


def _swap(inst, factory):
    a, b = (factory.vector_index(parse_operand(o)) for o in inst.operands)

    def step(w):
        x, y = w.vgpr_u32[a], w.vgpr_u32[b]
        x[...], y[...] = np.where(w.active, y, x), np.where(w.active, x, y)

    return step


def _mbcnt(inst, factory):
    """Counts the mask's bits below the own lane, of lanes 0 to 31 or (hi) from 32 on."""
    mask, add = (factory.read(parse_operand(o), "u32") for o in inst.operands[1:3])
    put = factory.write(parse_operand(inst.operands[0]), "u32")
    lane = np.arange(factory.lanes)
    below = np.clip(lane - (32 if "_hi_" in inst.opcode else 0), 0, 32)
    keep = (2 ** below.astype(U64) - U64(1)).astype(U32)
    return lambda w: put(w, bit_count(mask(w) & keep).astype(U32) + add(w))


def permute_step(inst, factory):
    """ds_bpermute_b32 and ds_permute_b32: lanes exchange data, addressed in bytes; LDS is not touched."""
    destination, address, data = (parse_operand(o) for o in inst.operands)
    where, value = factory.read(address, "u32"), factory.read(data, "u32")
    put = factory.write(destination, "u32")
    offset, last = U32(inst.integer("offset")), U32(factory.lanes - 1)

    def backward(w):
        source = np.broadcast_to((((where(w) + offset) >> U32(2)) & last).astype(np.intp), w.active.shape)
        x = np.where(w.active, value(w), U32(0))
        put(w, np.take_along_axis(x, source, axis=1))

    def forward(w):
        target = np.broadcast_to((((where(w) + offset) >> U32(2)) & last).astype(np.intp), w.active.shape)
        x, result = np.broadcast_to(value(w), w.active.shape), np.zeros(w.active.shape, U32)
        wave = np.broadcast_to(np.arange(w.count)[:, None], w.active.shape)
        result[wave[w.active], target[w.active]] = x[w.active]
        put(w, result)

    return backward if inst.opcode == "ds_bpermute_b32" else forward


def swizzle_step(inst, factory):
    """ds_swizzle_b32: a fixed permutation of each group of 32 lanes (bit masks) or of 4 (quads)."""
    source = swizzle_permutation(str(inst.modifiers.get("offset", "0")), factory.lanes)
    value, put = (
        factory.read(parse_operand(inst.operands[1]), "u32"),
        factory.write(parse_operand(inst.operands[0]), "u32"),
    )

    def step(w):
        x = np.where(w.active, value(w), U32(0))
        put(w, x[:, source])

    return step


def swizzle_permutation(offset: str, lanes: int) -> np.ndarray:
    """From the offset as LLVM prints it: swizzle(...) of a known mode, or the 16-bit number."""
    lane = np.arange(lanes)
    group, inner = lane & ~31, lane & 31
    if m := re.fullmatch(r"swizzle\((\w+),(.*)\)", offset.replace(" ", "")):
        mode, arguments = m.group(1), m.group(2)
        if mode == "BITMASK_PERM":
            # Five characters, highest bit first: 0, 1, p(reserve), i(nvert).
            mask = arguments.strip('"')
            keep = sum(1 << (4 - i) for i, c in enumerate(mask) if c in "pi")
            ones = sum(1 << (4 - i) for i, c in enumerate(mask) if c == "1")
            flip = sum(1 << (4 - i) for i, c in enumerate(mask) if c == "i")
            return group + (((inner & keep) | ones) ^ flip)
        numbers = [int(a) for a in arguments.split(",")]
        if mode == "QUAD_PERM":
            return (lane & ~3) + np.array(numbers)[lane & 3]
        if mode == "SWAP":
            return lane ^ numbers[0]
        if mode == "REVERSE":
            return lane ^ (numbers[0] - 1)
        if mode == "BROADCAST":
            return (lane & ~(numbers[0] - 1)) + numbers[1]
        raise EmulatorError(f"swizzle mode {mode}")
    bits = int(offset, 0)
    if bits & 0x8000:
        if bits & 0x7F00:
            raise EmulatorError(f"swizzle offset {offset}")
        return (lane & ~3) + ((bits >> (2 * (lane & 3))) & 3)
    return group + (((inner & (bits & 31)) | ((bits >> 5) & 31)) ^ ((bits >> 10) & 31))


#: Opcode -> decoder (instruction, operand factory) -> step.
LANES = {
    "v_readfirstlane_b32": _readfirstlane,
    "v_readlane_b32": _readlane,
    "v_writelane_b32": _writelane,
    "v_permlane16_b32": _permlane16,
    "v_permlanex16_b32": _permlane16,
    "v_permlane16_swap_b32": _permlane_swap,
    "v_permlane32_swap_b32": _permlane_swap,
    "v_swap_b32": _swap,
    "v_mbcnt_lo_u32_b32": _mbcnt,
    "v_mbcnt_hi_u32_b32": _mbcnt,
    "ds_bpermute_b32": permute_step,
    "ds_permute_b32": permute_step,
    "ds_swizzle_b32": swizzle_step,
}
