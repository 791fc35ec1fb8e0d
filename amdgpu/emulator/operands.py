"""Operands: from their text to functions that read or write them for a group of waves.

A reader takes `Waves` and returns an array that broadcasts to [waves, lanes]; it may be a view of the register.
A writer takes `Waves` and a value and respects EXEC. Types are the letters of AMD's pseudocode: "u32", "i32",
"f32", "u16", "i16", "f16", "u64", "i64", "f64", and "b32", "b16", "b64" for bits that take float modifiers.
"""

import dataclasses
import re

import numpy as np

from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.formats import flush_subnormal
from amdgpu.emulator.registers import EXEC, M0, NULL, TTMP, VCC

DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "b32": np.uint32,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16, "b16": np.uint16,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64, "b64": np.uint64,
}  # fmt: skip
# Name -> first scalar register and how many. Pairs have a name for each half too.
_NAMED = {"m0": (M0, 1), "null": (NULL, 1)}
for _name, _first in (("exec", EXEC), ("vcc", VCC)):
    _NAMED[_name] = _first, 2
    _NAMED |= {f"{_name}_{half}": (_first + i, 1) for i, half in enumerate(("lo", "hi"))}
_SIGN = {"u32": 1 << 31, "u16": 1 << 15, "u64": 1 << 63}


@dataclasses.dataclass(frozen=True)
class Operand:
    """kind: "v" vector register, "a" accumulation register, "s" scalar register, "scc", or "" for a constant.

    index, count: first register and how many; half: "l" or "h" of a 16-bit register, else "".
    value: text of a constant. negate, absolute, extend: source modifiers (extend: SDWA's sext).
    """

    kind: str
    index: int = 0
    count: int = 1
    half: str = ""
    value: str = ""
    negate: bool = False
    absolute: bool = False
    extend: bool = False

    @property
    def vector(self) -> bool:
        return self.kind in ("v", "a")


_REGISTER = re.compile(r"([vsa]|ttmp)(?:(\d+)(?:\.([lh]))?|\[(\d+):(\d+)\])")
_CONSTANT = re.compile(r"-?(\d+|0x[0-9a-fA-F]+|\d+\.\d*(e[-+]?\d+)?)")
_FUNCTION = re.compile(r"(neg|abs|sext)\((.*)\)")


def parse_operand(text: str) -> Operand:
    """Raises EmulatorError for text that is neither a register nor a constant."""
    negate = absolute = extend = False
    while not (register := _REGISTER.fullmatch(text)) and not _CONSTANT.fullmatch(text) and text not in _NAMED:
        if m := _FUNCTION.fullmatch(text):
            negate, absolute = negate or m.group(1) == "neg", absolute or m.group(1) == "abs"
            extend, text = extend or m.group(1) == "sext", m.group(2)
        elif text.startswith("-"):
            negate, text = True, text[1:]
        elif len(text) > 2 and text[0] == text[-1] == "|":
            absolute, text = True, text[1:-1]
        elif text in ("scc", "src_scc"):
            return Operand("scc")
        else:
            raise EmulatorError(f"operand {text!r}")
    if register:
        kind, single, half, first, last = register.groups()
        first, last = int(single or first), int(single or last)
        if kind == "ttmp":
            kind, first, last = "s", first + TTMP, last + TTMP
        return Operand(kind, first, last - first + 1, half or "", "", negate, absolute, extend)
    if text in _NAMED:
        index, count = _NAMED[text]
        return Operand("s", index, count, "", "", negate, absolute, extend)
    return Operand("", value=text, negate=negate, absolute=absolute, extend=extend)


def constant_bits(value: str, kind: str) -> int:
    """The bits that a constant has for an operand of this type.

    Decimal points make a float of the operand's own type; integers are bits as they stand (sign-extended). A
    32-bit literal of a 64-bit float is its high half.
    """
    width = int(kind[1:])
    if "." in value:
        if kind[0] not in "fb":
            # An inline float constant in an integer operation is its 32-bit (or 16-bit) pattern.
            kind = f"f{min(width, 32)}"
        dtype = {16: np.float16, 32: np.float32, 64: np.float64}[int(kind[1:])]
        return int(dtype(float(value)).view({16: np.uint16, 32: np.uint32, 64: np.uint64}[int(kind[1:])]))
    number = int(value, 0)
    if kind == "f64" and not -16 <= number <= 64:
        number <<= 32
    return number & (2**width - 1)


def constant(value: str, kind: str) -> np.ndarray:
    """A constant as an array [1, 1] of the type."""
    bits = constant_bits(value, kind)
    width = int(kind[1:])
    unsigned = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    return np.full((1, 1), bits, unsigned).view(DTYPES[kind])


def _high_half(value, kind):
    """The high half of a constant as a packed operand: integers are 32 bits wide, floats only fill the low half."""
    bits = 0 if "." in value else constant_bits(value, "u32") >> 16
    return np.full((1, 1), bits, np.uint16).view(DTYPES[kind])


class OperandFactory:
    """Makes readers and writers for one program: it knows where accumulation registers begin, and the lanes."""

    def __init__(self, target, accum_offset: int, denormals: int = 3, fp16_overflow: bool = False):
        self.target, self.lanes, self.accum_offset = target, target.lanes, accum_offset
        # Whether the program sets the mode bit FP16_OVFL.
        self.fp16_overflow = fp16_overflow
        # FP_DENORM of float32: bit 0 keeps subnormal inputs, bit 1 keeps subnormal results.
        self.keep_inputs, self.keep_results = bool(denormals & 1), bool(denormals & 2)

    def vector_index(self, operand: Operand) -> int:
        """Row of a vector register in `Waves.vgprs`."""
        if not operand.vector:
            raise EmulatorError("a vector register is expected here")
        return operand.index + (self.accum_offset if operand.kind == "a" else 0)

    # ---- reading

    def read(self, operand: Operand, kind: str, high: bool = False):
        """Reader of one value per lane. high: take the high half of a 32-bit register (op_sel) for a 16-bit type."""
        base = self.read_bare(operand, kind, high)
        if kind == "f32" and not self.keep_inputs:
            return self.with_modifiers(lambda w: flush_subnormal(base(w)), operand, kind)
        return self.with_modifiers(base, operand, kind)

    def with_modifiers(self, base, operand: Operand, kind: str):
        """Reader `base` with the operand's abs, then neg."""
        negate, absolute = operand.negate, operand.absolute
        if not (negate or absolute):
            return base
        if kind[0] == "f":
            magnitude = (lambda w: np.abs(base(w))) if absolute else base
            return (lambda w: -magnitude(w)) if negate else magnitude
        if kind[0] != "b":
            raise EmulatorError("a sign modifier on an integer operand")
        sign = DTYPES[kind](_SIGN["u" + kind[1:]])
        magnitude = DTYPES[kind](~_SIGN["u" + kind[1:]] & (2 ** int(kind[1:]) - 1))
        if absolute and negate:
            return lambda w: base(w) | sign
        return (lambda w: base(w) & magnitude) if absolute else (lambda w: base(w) ^ sign)

    def read_bare(self, operand: Operand, kind: str, high: bool = False):
        """Reader without source modifiers."""
        width = int(kind[1:])
        if operand.kind == "":
            value = _high_half(operand.value, kind) if high and width == 16 else constant(operand.value, kind)
            return lambda w: value
        if operand.kind == "scc":
            return lambda w: w.scc.astype(DTYPES[kind])
        if operand.kind == "s":
            return self._read_scalar(operand, kind, high)
        n = self.vector_index(operand)
        if width == 16:
            h = int(operand.half == "h" or high)
            if kind == "f16":
                return lambda w: w.vgpr_f16[n][h]
            return (lambda w: w.vgpr_i16[n][h]) if kind == "i16" else (lambda w: w.vgpr_u16[n][h])
        if width == 64:
            dtype = DTYPES[kind]
            return lambda w: (
                w.vgpr_u32[n].astype(np.uint64) | (w.vgpr_u32[n + 1].astype(np.uint64) << np.uint64(32))
            ).view(dtype)
        if operand.half:
            h = int(operand.half == "h")
            dtype = DTYPES[kind]
            return lambda w: w.vgpr_u16[n][h].astype(np.uint32).view(dtype)
        if kind == "f32":
            return lambda w: w.vgpr_f32[n]
        return (lambda w: w.vgpr_i32[n]) if kind == "i32" else (lambda w: w.vgpr_u32[n])

    def _read_scalar(self, operand, kind, high):
        n, dtype = operand.index, DTYPES[kind]
        if n == NULL:
            zero = np.zeros((1, 1), dtype)
            return lambda w: zero
        if dtype().itemsize == 8:
            if operand.count == 1:
                raise EmulatorError("one scalar register where a pair is needed")
            return (lambda w: w.sgpr_u64[n]) if dtype == np.uint64 else (lambda w: w.sgpr_u64[n].view(dtype))
        if dtype().itemsize == 2:
            shift = np.uint32(16 if high else 0)
            return lambda w: (w.sgpr_u32[n] >> shift).astype(np.uint16).view(dtype)
        if kind == "f32":
            return lambda w: w.sgpr_f32[n]
        return (lambda w: w.sgpr_i32[n]) if kind == "i32" else (lambda w: w.sgpr_u32[n])

    def _mask_index(self, operand):
        if operand.kind != "s" or (operand.index != NULL and operand.count != self.lanes // 32):
            raise EmulatorError(f"a lane mask takes {self.lanes // 32} scalar registers")
        return operand.index

    def read_mask(self, operand: Operand):
        """Reader of a lane mask, bool [waves, lanes]."""
        n = self._mask_index(operand)
        if n == NULL:
            none = np.zeros((1, 1), bool)
            return lambda w: none
        return lambda w: w.read_mask(n)

    # ---- writing

    def write(self, operand: Operand, kind: str, high: bool = False, zero_high: bool = False):
        """Writer of one value per lane. A 16-bit result goes to one half; zero_high clears the other (gfx9)."""
        n, width = self.vector_index(operand), int(kind[1:])
        if width == 64:
            return lambda w, x: _write_pair(w, n, x)
        if width == 16:
            h = int(operand.half == "h" or high)
            if zero_high:
                return lambda w, x: _store(w, w.vgpr_u32[n], np.ascontiguousarray(x).view(np.uint16))
            if kind == "f16":
                return lambda w, x: _store(w, w.vgpr_f16[n][h], x)
            if kind == "i16":
                return lambda w, x: _store(w, w.vgpr_i16[n][h], x)
            return lambda w, x: _store(w, w.vgpr_u16[n][h], x)
        if kind == "f32":
            if not self.keep_results:
                return lambda w, x: _store(w, w.vgpr_f32[n], flush_subnormal(x))
            return lambda w, x: _store(w, w.vgpr_f32[n], x)
        if kind == "i32":
            return lambda w, x: _store(w, w.vgpr_i32[n], x)
        return lambda w, x: _store(w, w.vgpr_u32[n], x)

    def write_mask(self, operand: Operand):
        """Writer of a lane mask: bits of inactive lanes become 0."""
        n = self._mask_index(operand)
        return lambda w, mask: w.write_mask(n, mask & w.active)


def _store(w, row, x):
    if w.full:
        row[...] = x
    else:
        np.copyto(row, x, where=w.active)


def _write_pair(w, n, x):
    bits = np.asarray(x).view(np.uint64)
    _store(w, w.vgpr_u32[n], (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    _store(w, w.vgpr_u32[n + 1], (bits >> np.uint64(32)).astype(np.uint32))
