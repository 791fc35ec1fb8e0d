"""LDS instructions: ds_* loads and stores, and the transposing loads of gfx950.

Addresses are byte offsets in the workgroup's LDS. The table maps an opcode to a decoder.
"""

import re

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.operands import parse_operand
from amdgpu.emulator.transfer import LoadTarget, StoreSource, lane_bytes, select, write_words
from amdgpu.emulator.vector import check_modifiers

I64 = np.int64


def _operands(inst, factory, count):
    if len(inst.operands) != count:
        raise EmulatorError(f"{len(inst.operands)} operands where {count} are expected")
    return [parse_operand(o) for o in inst.operands]


def _where(w):
    """(workgroup, wave) of each active lane."""
    return select(w, w.workgroup), select(w, w.wave)


def _load(inst, factory, size, half):
    check_modifiers(inst, "offset")
    destination, address = _operands(inst, factory, 2)
    target = LoadTarget(factory, destination, abs(size), size < 0, half)
    read, offset, size = factory.read(address, "u32"), inst.integer("offset"), abs(size)

    def step(w):
        a = select(w, read(w)).astype(I64) + offset
        if a.size:
            target.write(w, w.storage.lds.load(a, size, *_where(w)))

    return step


def _store(inst, factory, size, high):
    check_modifiers(inst, "offset")
    address, data = _operands(inst, factory, 2)
    source = StoreSource(factory, data, size, high)
    read, offset = factory.read(address, "u32"), inst.integer("offset")

    def step(w):
        a = select(w, read(w)).astype(I64) + offset
        if a.size:
            w.storage.lds.store(a, size, source.read(w), *_where(w))

    return step


def _load2(inst, factory, size, stride):
    """Two loads at offset0 and offset1, counted in elements (times 64 with st64)."""
    check_modifiers(inst, "offset0", "offset1")
    destination, address = _operands(inst, factory, 2)
    n, read = factory.vector_index(destination), factory.read(address, "u32")
    offsets = [inst.integer(o) * size * stride for o in ("offset0", "offset1")]

    def step(w):
        a = select(w, read(w)).astype(I64)
        if a.size:
            write_words(w, n, np.concatenate([w.storage.lds.load(a + o, size, *_where(w)) for o in offsets]))

    return step


def _store2(inst, factory, size, stride):
    check_modifiers(inst, "offset0", "offset1")
    address, *data = _operands(inst, factory, 3)
    sources = [StoreSource(factory, d, size, False) for d in data]
    read = factory.read(address, "u32")
    offsets = [inst.integer(o) * size * stride for o in ("offset0", "offset1")]

    def step(w):
        a = select(w, read(w)).astype(I64)
        if a.size:
            for source, offset in zip(sources, offsets, strict=True):
                w.storage.lds.store(a + offset, size, source.read(w), *_where(w))

    return step


def _load_transposed(inst, factory, bits):
    """ds_read_b64_tr_b16 and _b8 (gfx950): each group of 16 lanes loads 64 bits a lane and gets them transposed.

    With n = 64 / bits elements a lane, read the group's elements as a matrix of 16 rows (lanes) and n columns. It is
    cut into n blocks of 16 / n rows and n columns; lane i gets column i % n of block rows i // n + (16 / n) e, e = 0
    to n - 1: the elements of a 16 x n tile whose rows of 16 elements lie in 16 / n consecutive lanes each.
    """
    check_modifiers(inst, "offset")
    destination, address = _operands(inst, factory, 2)
    n, read, offset = factory.vector_index(destination), factory.read(address, "u32"), inst.integer("offset")
    element = {16: np.uint16, 8: np.uint8}[bits]
    count = 64 // bits
    lane = np.arange(factory.lanes)
    group, inner = lane & ~15, lane & 15
    # Row e of the tile is spread over 16 / count lanes of `count` elements; lane i wants element i of every row.
    e = np.arange(count)[None]
    source_lane = group[:, None] + (16 // count) * e + (inner // count)[:, None]
    source_element = np.broadcast_to((inner % count)[:, None], source_lane.shape)

    def step(w):
        if not w.full:
            raise EmulatorError("a transposing load with inactive lanes")
        a = np.broadcast_to(read(w), w.active.shape).astype(I64) + offset
        words = w.storage.lds.load(a, 8, *_where(w))
        elements = np.ascontiguousarray(words.transpose(1, 2, 0)).view(element)
        moved = np.ascontiguousarray(elements[:, source_lane, source_element])
        write_words(w, n, moved.view(U32).transpose(2, 0, 1))

    return step


def _table():
    table = {}
    for name in ("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128"):
        table[f"ds_read_{name}"] = table[f"ds_load_{name}"] = (_load, lane_bytes(name), "")
    # Not under gfx9's names: see LoadTarget.
    for name in ("u8", "i8", "u16"):
        table[f"ds_load_{name}_d16"] = (_load, lane_bytes(name), "low")
        table[f"ds_load_{name}_d16_hi"] = (_load, lane_bytes(name), "high")
    for name in ("b8", "b16", "b32", "b64", "b96", "b128"):
        table[f"ds_write_{name}"] = table[f"ds_store_{name}"] = (_store, lane_bytes(name), False)
    for name in ("b8", "b16"):
        table[f"ds_write_{name}_d16_hi"] = table[f"ds_store_{name}_d16_hi"] = (_store, lane_bytes(name), True)
    for name in ("b32", "b64"):
        size = lane_bytes(name)
        table[f"ds_read2_{name}"] = table[f"ds_load_2addr_{name}"] = (_load2, size, 1)
        table[f"ds_read2st64_{name}"] = table[f"ds_load_2addr_stride64_{name}"] = (_load2, size, 64)
        table[f"ds_write2_{name}"] = table[f"ds_store_2addr_{name}"] = (_store2, size, 1)
        table[f"ds_write2st64_{name}"] = table[f"ds_store_2addr_stride64_{name}"] = (_store2, size, 64)
    table["ds_read_b64_tr_b16"] = (_load_transposed, 16)
    table["ds_read_b64_tr_b8"] = (_load_transposed, 8)
    return table


#: Opcode -> (decoder, its further arguments).
LDS = _table()


def decode_lds(inst, factory):
    """The step of a ds_* instruction; None for an opcode that is not in the table."""
    row = LDS.get(inst.opcode)
    return row[0](inst, factory, *row[1:]) if row else None


def access_granule(opcodes) -> int:
    """Smallest number of bytes that one of these opcodes reads or writes in LDS."""
    sizes = [int(m.group(1)) // 8 for o in opcodes if o.startswith("ds_") for m in [re.search(r"_[bui](\d+)", o)] if m]
    return min([4, *sizes])
