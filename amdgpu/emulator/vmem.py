"""Global, buffer and scratch memory, scalar loads, and loads from global memory straight into LDS."""

import re

import numpy as np

from amdgpu.emulator.bitops import I64, U32
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.operands import parse_operand
from amdgpu.emulator.registers import M0
from amdgpu.emulator.scalar import write_scalar
from amdgpu.emulator.transfer import LoadTarget, StoreSource, lane_bytes, select, word_count

# Hints for the caches, which do not exist here.
_HINTS = frozenset(("glc", "slc", "dlc", "sc0", "sc1", "nt", "th", "scope"))


def _check_hints(inst, *allowed):
    if unknown := set(inst.modifiers) - _HINTS - {"offset", *allowed}:
        raise EmulatorError(f"modifiers {sorted(unknown)}")


def decode_scalar_load(inst, factory):
    """s_load_*: words at base + offset, both of them uniform in a wave."""
    if not inst.opcode.startswith("s_load_"):
        return None
    words = word_count(inst.opcode.removeprefix("s_load_"))
    if words is None:
        return None
    _check_hints(inst)
    destination, base = parse_operand(inst.operands[0]), factory.read(parse_operand(inst.operands[1]), "u64")
    offset = parse_operand(inst.operands[2])
    if destination.count != words:
        raise EmulatorError(f"{destination.count} registers for {words} words")
    constant, register = inst.integer("offset"), None
    if offset.kind == "":
        constant += int(offset.value, 0)
    else:
        register = factory.read(offset, "u32")
    n = destination.index
    write_scalar(destination, "u32")

    def step(w):
        address = base(w).astype(I64) + constant
        if register is not None:
            address = address + register(w)
        # Scalar loads ignore the two lowest bits.
        data = w.storage.memory.load(np.broadcast_to(address, (w.count, 1)) & ~3, 4 * words)
        w.sgprs[:, n : n + words] = data[:, :, 0].T

    return step


class _GlobalAddress:
    """Addresses of a global instruction: 64 bits in two registers, or a scalar base plus 32 unsigned bits."""

    def __init__(self, inst, factory, vector, scalars):
        _check_hints(inst)
        self.offset = inst.integer("offset")
        if scalars and scalars[0] != "off":
            self.base = factory.read(parse_operand(scalars[0]), "u64")
            self.vector = factory.read(parse_operand(vector), "u32")
        else:
            self.base = factory.read(parse_operand("0"), "u64")
            self.vector = factory.read(parse_operand(vector), "i64")

    def compute(self, w, size):
        """(int64 addresses [*active lanes], None: all of them count)."""
        address = select(w, self.vector(w)).astype(I64) + select(w, self.base(w)).astype(I64)
        return address + self.offset, None


class _BufferAddress:
    """Addresses of a buffer instruction, whose descriptor says where the buffer begins and ends.

    Raw buffers only: an access beyond the end reads 0 and writes nothing, which is how the compiler masks lanes. One
    that is partly beyond is cut by words on the hardware; here it is refused.
    """

    def __init__(self, inst, factory, vector, scalars):
        _check_hints(inst, "offen", "lds")
        resource, scalar = (parse_operand(o) for o in scalars)
        if resource.kind != "s" or resource.count != 4:
            raise EmulatorError("a buffer descriptor is four scalar registers")
        self.resource, self.scalar = resource.index, factory.read(scalar, "u32")
        self.vector = factory.read(parse_operand(vector if inst.flag("offen") else "0"), "u32")
        self.offset, self.rdna = inst.integer("offset"), not factory.target.gfx9

    def compute(self, w, size):
        """(int64 addresses [*active lanes], bool: which of them lie inside)."""
        words = w.sgprs[:, self.resource : self.resource + 4].astype(I64)
        if self.rdna and ((words[:, 3] >> 28) & 3 != 3).any():
            raise EmulatorError("a buffer descriptor that is not raw")
        if (words[:, 1] >> (30 if self.rdna else 31)).any():
            raise EmulatorError("a swizzled buffer descriptor")
        scalar = self.scalar(w).astype(I64)
        offset = select(w, np.broadcast_to(self.vector(w), w.active.shape)).astype(I64) + self.offset
        limit = select(w, words[:, 2:3] - scalar)
        inside = offset + size <= limit
        if ((offset < limit) & ~inside).any():
            raise EmulatorError("a buffer access across the end of the descriptor's range")
        base = (words[:, :1] | (words[:, 1:2] & 0xFFFF) << 32) + scalar
        return select(w, base) + offset, inside


def _load(factory, address, destination, size, half):
    target = LoadTarget(factory, parse_operand(destination), abs(size), size < 0, half)
    size = abs(size)

    def step(w):
        a, inside = address.compute(w, size)
        if not a.size:
            return
        if inside is None or inside.all():
            target.write(w, w.storage.memory.load(a, size))
            return
        words = np.zeros((max(1, size // 4), *a.shape), U32)
        if inside.any():
            words[:, inside] = w.storage.memory.load(a[inside], size)
        target.write(w, words)

    return step


def _store(factory, address, source, size, high):
    data = StoreSource(factory, parse_operand(source), size, high)

    def step(w):
        a, inside = address.compute(w, size)
        if not a.size:
            return
        words = data.read(w)
        if inside is not None and not inside.all():
            a, words = a[inside], words[:, inside]
            if not a.size:
                return
        w.storage.memory.store(a, size, words)

    return step


def _load_to_lds(factory, address, size):
    """Each lane's bytes go to LDS at M0 + offset + size * lane."""
    if size < 4:
        raise EmulatorError("a load of less than a word into LDS")
    mask = I64(0x3FFFF if factory.target.arch == "gfx950" else 0xFFFF)
    lane = np.arange(factory.lanes)

    def step(w):
        a, inside = address.compute(w, size)
        if not a.size:
            return
        target = select(w, (w.sgpr_u32[M0].astype(I64) & mask) + address.offset + size * lane)
        words = np.zeros((max(1, size // 4), *a.shape), U32)
        chosen = np.ones(a.shape, bool) if inside is None else inside
        if chosen.any():
            words[:, chosen] = w.storage.memory.load(a[chosen], size)
        w.storage.lds.store(target, size, words, select(w, w.workgroup), select(w, w.wave))

    return step


def _split_suffix(suffix):
    """(bytes, "" or the half of the register) of the part behind load_ or store_; None if it is unknown."""
    half = ""
    for mark, which in (("_d16_hi", "high"), ("d16_hi_", "high"), ("_d16", "low"), ("d16_", "low")):
        if mark in suffix:
            suffix, half = suffix.replace(mark, ""), which
            break
    size = lane_bytes(suffix)
    return None if size is None else (size, half)


def decode_memory(inst, factory):
    """The step of a global_, buffer_ or scratch_ load or store; None for other opcodes."""
    m = re.fullmatch(r"(global|buffer|scratch)_(load|store)_(lds_)?(\w+)", inst.opcode)
    if m is None or (split := _split_suffix(m.group(4))) is None:
        return None
    space, verb, to_lds = m.group(1), m.group(2), bool(m.group(3)) or inst.flag("lds")
    size, half = split
    operands = list(inst.operands)
    if space == "scratch":
        return None if to_lds else _scratch(inst, factory, verb, operands, size, half)
    # Loads name the data first, stores of global memory the address; buffers always name the data first.
    data = "" if to_lds else operands.pop(0 if verb == "load" or space == "buffer" else 1)
    vector, *scalars = operands
    address = (_BufferAddress if space == "buffer" else _GlobalAddress)(inst, factory, vector, scalars)
    if to_lds:
        return _load_to_lds(factory, address, size)
    if verb == "load":
        return _load(factory, address, data, size, half)
    return _store(factory, address, data, abs(size), half == "high")


def _scratch(inst, factory, verb, operands, size, half):
    _check_hints(inst)
    data, vector, scalar = operands if verb == "load" else (operands[1], operands[0], operands[2])
    parts = [factory.read(parse_operand("0" if o == "off" else o), "u32") for o in (vector, scalar)]
    constant, size, signed = inst.integer("offset"), abs(size), size < 0

    def offset(w):
        """Offsets of the active lanes in the batch's scratch; inactive lanes may hold any address."""
        address = np.broadcast_to(parts[0](w).astype(I64) + parts[1](w) + constant, w.active.shape)
        number = w.workgroup * w.storage.num_warps + w.wave
        return select(w, w.storage.scratch.offset(np.where(w.active, address, 0), size, number, verb))

    if verb == "load":
        target = LoadTarget(factory, parse_operand(data), size, signed, half)

        def load(w):
            at = offset(w)
            if at.size:
                target.write(w, w.storage.scratch.segment.load(at, size))

        return load
    source = StoreSource(factory, parse_operand(data), size, half == "high")

    def store(w):
        at = offset(w)
        if at.size:
            w.storage.scratch.segment.store(at, size, source.read(w))

    return store
