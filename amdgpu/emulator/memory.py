"""Memory: global buffers, LDS and scratch, every access checked against what was allocated."""

import dataclasses

import numpy as np

from amdgpu.emulator.errors import EmulatorError

# Buffers lie 64 GiB apart, so that an offset that is wrong in any of its 32 bits never reaches a neighbour; the
# addresses still fit the 48 bits of a buffer descriptor.
_BUFFER_SHIFT = 36


class Segment:
    """Bytes with loads and stores of whole words at an array of offsets, which the caller has checked."""

    def __init__(self, content: np.ndarray, writable: bool = True):
        self.writable = writable
        raw = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self.size = raw.size
        padded = np.zeros(-(-raw.size // 16) * 16 + 16, np.uint8)
        padded[: raw.size] = raw
        self.u8, self.u16, self.u32 = padded, padded.view(np.uint16), padded.view(np.uint32)

    def load(self, offset: np.ndarray, size: int) -> np.ndarray:
        """uint32 [words, *offset.shape]; 1 and 2 bytes are zero-extended to one word."""
        if size >= 4:
            words = np.arange(size // 4).reshape(-1, *[1] * offset.ndim)
            if not np.bitwise_and(offset, 3).any():
                return self.u32[(offset >> 2) + words]
            bytes_of_word = self.u8[(offset + 4 * words)[..., None] + np.arange(4)]
            return bytes_of_word.view(np.uint32)[..., 0]
        if size == 1:
            return self.u8[offset].astype(np.uint32)[None]
        if not np.bitwise_and(offset, 1).any():
            return self.u16[offset >> 1].astype(np.uint32)[None]
        return (self.u8[offset].astype(np.uint32) | (self.u8[offset + 1].astype(np.uint32) << np.uint32(8)))[None]

    def store(self, offset: np.ndarray, size: int, words: np.ndarray):
        """words: uint32 [words, *offset.shape]. Where lanes collide the last one wins."""
        if size >= 4 and not np.bitwise_and(offset, 3).any():
            step = np.arange(size // 4).reshape(-1, *[1] * offset.ndim)
            self.u32[(offset >> 2) + step] = words
            return
        if size == 2 and not np.bitwise_and(offset, 1).any():
            self.u16[offset >> 1] = words[0]
            return
        for i in range(size):
            self.u8[offset + i] = words[i // 4] >> np.uint32(8 * (i % 4))


class Memory:
    """Global memory: the buffers of one launch, each at an address of its own."""

    def __init__(self):
        self._segments: list[Segment] = []

    def add(self, content: np.ndarray, writable: bool) -> int:
        """Copy an array into a new buffer; its address. A store to a buffer that is not writable is an error."""
        self._segments.append(Segment(content, writable))
        return len(self._segments) << _BUFFER_SHIFT

    def content(self, address: int) -> np.ndarray:
        """The bytes of the buffer at this address, as uint8."""
        segment = self._segments[(address >> _BUFFER_SHIFT) - 1]
        return segment.u8[: segment.size]

    def _parts(self, address: np.ndarray, size: int, what: str):
        """(which lanes, segment, offsets) for each buffer that the addresses name; lanes None means all."""
        low, high = int(address.min()), int(address.max())
        number = low >> _BUFFER_SHIFT
        if high >> _BUFFER_SHIFT == number:
            yield None, *self._inside(number, address - (number << _BUFFER_SHIFT), high, size, what)
            return
        numbers = address >> _BUFFER_SHIFT
        for number in np.unique(numbers):
            lanes = numbers == number
            part = address[lanes]
            number = int(number)
            yield lanes, *self._inside(number, part - (number << _BUFFER_SHIFT), int(part.max()), size, what)

    def _inside(self, number, offset, high, size, what):
        last = high - (number << _BUFFER_SHIFT) + size
        if not 1 <= number <= len(self._segments) or last > self._segments[number - 1].size:
            known = [s.size for s in self._segments]
            raise EmulatorError(
                f"{what} of {size} bytes out of bounds: buffer {number - 1}, bytes {last - size} to {last - 1}"
                f" (buffers hold {known} bytes; the last is the kernel's arguments)"
            )
        return self._segments[number - 1], offset

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint32 [words, *address.shape] from int64 addresses; address must not be empty."""
        result = np.zeros((max(1, size // 4), *address.shape), np.uint32)
        for lanes, segment, offset in self._parts(address, size, "load"):
            if lanes is None:
                return segment.load(offset, size)
            result[:, lanes] = segment.load(offset, size)
        return result

    def store(self, address: np.ndarray, size: int, words: np.ndarray):
        """words: uint32 [words, *address.shape]; address must not be empty."""
        for lanes, segment, offset in self._parts(address, size, "store"):
            if not segment.writable:
                number = self._segments.index(segment)
                raise EmulatorError(f"store to buffer {number}, which is an input of the kernel")
            segment.store(offset, size, words if lanes is None else words[:, lanes])


_SEVERAL = 0xFF


class Lds:
    """The LDS of `groups` workgroups, `size` bytes each, poisoned.

    Waves of a group run in lockstep, so a barrier that is missing would not show in the values. Hence a record, in
    steps of `granule` bytes, of the wave that last wrote and last read: reading what another wave wrote since the
    last barrier, or writing over what another wave read since then, is an error. (Of several readers of the same
    bytes only the last is remembered.)
    """

    def __init__(self, groups: int, size: int, granule: int):
        self.size, self.granule, self.epoch = size, granule, 1
        self.segment = Segment(np.full(groups * size, 0xFF, np.uint8))
        records = groups * size // granule + 16
        self._written, self._read = np.zeros(records, np.int32), np.zeros(records, np.int32)

    def barrier(self):
        self.epoch += 1

    def _check(self, address, size, what):
        if address.size and (int(address.min()) < 0 or int(address.max()) + size > self.size):
            raise EmulatorError(
                f"LDS {what} of {size} bytes out of bounds: bytes {int(address.min())} to"
                f" {int(address.max()) + size - 1} of {self.size}"
            )

    def _granules(self, offset, size):
        steps = -(-size // self.granule)
        return offset // self.granule + np.arange(steps).reshape(-1, *[1] * offset.ndim)

    def load(self, address, size, workgroup, wave):
        """uint32 [words, *address.shape]; workgroup and wave broadcast against the int64 addresses."""
        self._check(address, size, "load")
        offset = address + workgroup * self.size
        granules, tag = self._granules(offset, size), (self.epoch << 8) + wave + 1
        last = self._written[granules]
        # A wave's own writes, all writes before the last barrier, and bytes that several waves wrote are fine.
        if ((last > self.epoch << 8) & (last != tag) & (last & 0xFF != _SEVERAL)).any():
            raise EmulatorError("LDS load of bytes that another wave wrote since the last barrier")
        self._read[granules] = tag
        return self.segment.load(offset, size)

    def store(self, address, size, words, workgroup, wave):
        self._check(address, size, "store")
        offset = address + workgroup * self.size
        granules, tag = (
            self._granules(offset, size),
            np.broadcast_to((self.epoch << 8) + wave + 1, address.shape),
        )
        last = self._read[granules]
        if ((last > self.epoch << 8) & (last != tag)).any():
            raise EmulatorError("LDS store over bytes that another wave read since the last barrier")
        before = self._written[granules]
        several = (before > self.epoch << 8) & (before != tag)
        self._written[granules] = tag
        # Lanes of other waves may have stored to the same bytes by this very instruction.
        several |= self._written[granules] != tag
        if several.any():
            self._written[granules[several]] = (self.epoch << 8) + _SEVERAL
        self.segment.store(offset, size, words)


class Scratch:
    """Private memory: `size` bytes for each lane of `waves` waves, poisoned."""

    def __init__(self, waves: int, lanes: int, size: int):
        self.size, self.lanes = size, lanes
        self.segment = Segment(np.full(waves * lanes * size, 0xFF, np.uint8))

    def offset(self, address, size, wave, what):
        """Offsets of int64 addresses [waves, lanes] in the segment; wave: the number of the wave in the batch."""
        if address.size and (int(address.min()) < 0 or int(address.max()) + size > self.size):
            raise EmulatorError(f"scratch {what} of {size} bytes out of bounds: the kernel has {self.size} per lane")
        return (wave * self.lanes + np.arange(self.lanes)) * self.size + address


@dataclasses.dataclass
class Storage:
    """What the waves of a batch of workgroups share."""

    memory: Memory
    lds: Lds
    scratch: Scratch
    num_warps: int
