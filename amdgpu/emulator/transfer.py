"""What all memory instructions share: active lanes, and moving words between registers and memory."""

import numpy as np

from amdgpu.emulator.bitops import U32, sign_extend
from amdgpu.emulator.errors import EmulatorError


def select(w, x: np.ndarray) -> np.ndarray:
    """x, which broadcasts to [waves, lanes], in the active lanes. Where all are active x itself; else a list."""
    if w.full:
        return x
    if x.shape == w.active.shape:
        return x[w.active]
    return np.broadcast_to(x, w.active.shape)[w.active]


def write_words(w, n: int, words: np.ndarray):
    """Write uint32 [words, *active lanes] to the registers from row n on."""
    rows = w.vgprs[n : n + len(words)]
    if w.full:
        rows[...] = words
    else:
        rows[:, w.active] = words


def read_words(w, n: int, count: int) -> np.ndarray:
    """uint32 [count, *active lanes] of the registers from row n on."""
    rows = w.vgprs[n : n + count]
    return rows if w.full else rows[:, w.active]


class LoadTarget:
    """How loaded bytes arrive in a register: whole words, or 8 and 16 bits extended or put into one half."""

    def __init__(self, factory, operand, size: int, signed: bool, half: str):
        """half: "" (fill the register), "low" or "high" (keep the other half)."""
        self.n, self.size, self.signed = factory.vector_index(operand), size, signed
        self.half = {"l": "low", "h": "high"}.get(operand.half, half)
        if half and factory.target.gfx9:
            raise EmulatorError("a d16 load, which with ECC does not keep the other half of its register")

    def write(self, w, words: np.ndarray):
        if self.size < 4:
            if self.signed:
                words = sign_extend(words, 8 * self.size).view(U32)
            if self.half:
                old = read_words(w, self.n, 1)
                if self.half == "high":
                    words = (old & U32(0xFFFF)) | (words << U32(16))
                else:
                    words = (old & U32(0xFFFF0000)) | (words & U32(0xFFFF))
        write_words(w, self.n, words)


class StoreSource:
    """The words that a store takes from its registers; 8 and 16 bits come from the low or the high half."""

    def __init__(self, factory, operand, size: int, high: bool):
        self.n, self.count = factory.vector_index(operand), max(1, size // 4)
        self.shift = U32(16 if high or operand.half == "h" else 0)

    def read(self, w) -> np.ndarray:
        words = read_words(w, self.n, self.count)
        return words >> self.shift if self.shift else words


#: Suffixes of loads and stores: bytes, negative where the value is sign-extended.
SIZES = {
    "dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16,
    "ubyte": 1, "u8": 1, "sbyte": -1, "i8": -1, "ushort": 2, "u16": 2, "sshort": -2, "i16": -2, "short": 2,
    "b16": 2, "byte": 1, "b8": 1,
}  # fmt: skip
