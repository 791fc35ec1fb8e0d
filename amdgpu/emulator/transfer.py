"""What all memory instructions share: active lanes, and moving words between registers and memory."""

import re

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


def word_count(suffix: str) -> int | None:
    """Words that the end of a load's or store's name stands for: 4 for `dwordx4` and `b128`; None for no words."""
    m = re.fullmatch(r"dword(?:x(\d+))?|b(\d+)", suffix)
    if m is None:
        return None
    words, rest = divmod(int(m[2]), 32) if m[2] else (int(m[1] or 1), 0)
    return words if rest == 0 and words in (1, 2, 3, 4, 8, 16) else None


def lane_bytes(suffix: str) -> int | None:
    """Bytes that a lane moves, by the end of a load's or store's name; negative where the value is sign-extended.

    Words (at most 4), `byte` and `short`, or 8 and 16 bits; s and i are signed. None for anything else.
    """
    words = word_count(suffix)
    if words is not None:
        return 4 * words if words <= 4 else None
    m = re.fullmatch(r"([us]?)(byte|short)|([bui])(8|16)", suffix)
    if m is None:
        return None
    size = 2 if m[2] == "short" or m[4] == "16" else 1
    return -size if m[1] == "s" or m[3] == "i" else size
