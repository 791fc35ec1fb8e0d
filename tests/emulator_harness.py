"""Runs single instructions in the emulator and says what they should give, for tests/test_emulator_*.py.

A case names an instruction, the architectures that have it, the types of its sources v0, v1, v2 (or s0, s1, s2) and
of its result, and a formula in Python's exact integers and fractions. LLVM's assembler must accept the line for each
architecture, so that no case tests an instruction that does not exist.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from triton.backends.amd.compiler import assemble_amdgcn

from amdgpu.emulator.launch import run_waves
from amdgpu.emulator.memory import Lds, Memory, Scratch, Storage
from amdgpu.emulator.program import assemble
from amdgpu.emulator.registers import Waves
from amdgpu.emulator.target import LANES

CDNA3, CDNA4 = ("gfx942",), ("gfx950",)
GFX9 = CDNA3 + CDNA4
GFX11, GFX12 = ("gfx1100", "gfx1151"), ("gfx1201",)
RDNA = GFX11 + GFX12
ALL = GFX9 + RDNA

INTEGERS = (
    0, 1, 2, 3, 5, 7, 15, 16, 31, 32, 33, 63, 64, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0xDEADBEEF, 0x12345678,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.25, -7.75, 2.0**-149, -(2.0**-140), 2.0**-126, 1.5 * 2.0**-126,
    2.0**127, -(2.0**127), 3.0e38, math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, 6e-8, 1e-5, 16777217.0,
    2147483520.0, 2147483648.0, 4294967040.0, 4294967296.0, -2147483648.0, -3e9, 0.49999997, 127.5, 128.5, 254.5,
)  # fmt: skip
_DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
#: Content of buffers in tests of memory.
BYTES = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
#: gfx9's names of what gfx11 and gfx12 call by its bits.
OLD_NAMES = {
    "b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4", "u8": "ubyte", "i8": "sbyte",
    "u16": "ushort", "i16": "sshort", "b8": "byte", "b16": "short",
}  # fmt: skip
#: Samples of every case.
SAMPLES = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """`line` with sources v0, v2, v4 (s0, s2, s4 for scalar ones) and result v6 (s6).

    sources, result: types. expected: Python numbers -> int, float, Fraction or bool (a lane mask). ulps: allowed
    distance of a float result; 0 is bit for bit, any NaN for a NaN. packed: "f16" or "bf16" where the result holds
    two of them.
    """

    line: str
    archs: tuple[str, ...]
    result: str
    sources: str
    expected: Callable
    ulps: int = 0
    packed: str = ""

    @property
    def name(self) -> str:
        return self.line.split()[0]

    def __str__(self):
        return self.line


def assembles(line: str, arch: str):
    """Raises where LLVM's assembler does not know the line."""
    assemble_amdgcn(line + "\n", arch, "")


def run_lines(
    lines, arch, vgprs=(), sgprs=(), waves=1, lds_bytes=0, memory=None, vccs=None, num_vgprs=None, **descriptor
):
    """Run instructions on some waves of one workgroup; the `Waves` afterwards.

    vgprs: (number, uint32 array that broadcasts to [waves, lanes]); sgprs: (number, uint32 array [waves] or a number).
    """
    program = assemble([*lines, "s_endpgm"], arch, **descriptor)
    lanes = LANES[arch]
    lds = Lds(1, lds_bytes, program.lds_granule)
    scratch = Scratch(waves, lanes, descriptor.get("private_segment_fixed_size", 0))
    storage = Storage(memory or Memory(), lds, scratch, waves)
    count = max([num_vgprs or 0, program.num_vgprs, *(n + 1 for n, _ in vgprs)])
    w = Waves.start(count, lanes, np.zeros(waves, int), np.arange(waves), storage)
    for n, value in vgprs:
        w.vgpr_u32[n][...] = value
    for n, value in sgprs:
        w.sgprs[:, n] = value
    w.exec_changed()
    _, finished = run_waves(program, w)
    return finished[0] if len(finished) == 1 else Waves.merge(finished)


@functools.cache
def _samples(seed: int, width: int, floats: bool) -> np.ndarray:
    """Bits of SAMPLES values: half of them edges, half random."""
    rng = np.random.default_rng(seed)
    unsigned = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    random = rng.integers(0, 2**width, SAMPLES, np.uint64).astype(unsigned)
    if floats:
        dtype = {16: np.float16, 32: np.float32, 64: np.float64}[width]
        with np.errstate(over="ignore", under="ignore"):
            edges = np.array(FLOATS, np.float64).astype(dtype).view(unsigned)
            ordinary = (rng.standard_normal(SAMPLES) * 10.0 ** rng.integers(-3, 4, SAMPLES)).astype(dtype)
        random = np.where(rng.random(SAMPLES) < 0.5, random, ordinary.view(unsigned))
    else:
        edges = np.array(INTEGERS, np.uint64)
        edges = np.concatenate([edges, (edges << np.uint64(32)) | edges[::-1]]).astype(unsigned)
    return np.where(rng.random(SAMPLES) < 0.5, rng.choice(edges, SAMPLES), random)


def inputs(kinds: list[str]) -> list[np.ndarray]:
    """Bits of the sources of a case, unsigned [SAMPLES]."""
    return [_samples(i, int(k[1:]), k[0] == "f") for i, k in enumerate(kinds)]


def to_python(bits: np.ndarray, kind: str) -> list:
    """Ints, or floats (every float16 and float32 is a Python float)."""
    return bits.view(_DTYPES[kind]).tolist()


def round_to(x, kind: str):
    """The float of this type nearest to x (ties to even), as its bits; x is exact: int, float or Fraction."""
    dtype, unsigned = _DTYPES[kind], {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}[kind]
    if isinstance(x, float) and not (math.isfinite(x) and x):
        with np.errstate(invalid="ignore"):
            return int(dtype(x).view(unsigned))
    precision, smallest, largest = {"f16": (11, -24, 16), "f32": (24, -149, 128), "f64": (53, -1074, 1024)}[kind]
    value = abs(Fraction(x))
    if value == 0:
        return 0
    exponent = math.floor(math.log2(value.numerator) - math.log2(value.denominator))
    while Fraction(2) ** exponent > value:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    step = Fraction(2) ** max(exponent - precision + 1, smallest)
    # Python's round of a Fraction is to even.
    rounded = round(value / step) * step
    result = math.inf if rounded >= Fraction(2) ** largest else float(rounded)
    return int(dtype(math.copysign(result, x if isinstance(x, float) else (1 if x > 0 else -1))).view(unsigned))


def expected_bits(case: Case, columns: list[list]) -> list[int]:
    results = []
    for values in zip(*columns, strict=True):
        r = case.expected(*values)
        if case.result[0] == "f":
            results.append(round_to(r, case.result))
        else:
            results.append(int(r) % 2 ** int(case.result[1:]))
    return results


def check_bits(case: Case, arch: str, got: list[int], want: list[int], columns: list[list]):
    """Compares results bit for bit, or within the case's ulps."""
    if case.packed:
        got, want = ([_one_nan(x, case.packed) for x in bits] for bits in (got, want))
    if case.result[0] == "f":
        dtype = _DTYPES[case.result]
        unsigned = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}[case.result]
        g, e = (np.array(x, unsigned).view(dtype) for x in (got, want))
        same = (np.array(got, unsigned) == np.array(want, unsigned)) | (np.isnan(g) & np.isnan(e))
        if case.ulps:
            distance = np.abs(_ordinal(np.array(got, unsigned)) - _ordinal(np.array(want, unsigned)))
            same |= np.isfinite(g) & np.isfinite(e) & (distance <= case.ulps)
    else:
        same = np.array([a == b for a, b in zip(got, want, strict=True)])
    if not same.all():
        i = int(np.argmin(same))
        args = [c[i] for c in columns]
        raise AssertionError(f"{arch}: {case.line}: inputs {args}: got {got[i]:#x}, expected {want[i]:#x}")


def _one_nan(word, kind):
    """A word of two halves with every NaN made the same."""
    top = 0x7C00 if kind == "f16" else 0x7F80
    halves = [word & 0xFFFF, word >> 16]
    halves = [0x7FFF if h & 0x7FFF > top else h for h in halves]
    return halves[0] | halves[1] << 16


def _ordinal(bits):
    width = bits.dtype.itemsize * 8
    magnitude = (bits & bits.dtype.type(2 ** (width - 1) - 1)).astype(object)
    return np.where(bits >> bits.dtype.type(width - 1), -magnitude, magnitude)


def check_vector(case: Case, arch: str):
    """Run a vector case on one architecture: full EXEC, then with every third lane off (which keeps its result)."""
    kinds = case.sources.split()
    lanes = LANES[arch]
    waves = SAMPLES // lanes
    bits = inputs(kinds)
    vgprs = [(6, 0xA5A5A5A5), (7, 0xA5A5A5A5)]
    for i, (b, kind) in enumerate(zip(bits, kinds, strict=True)):
        b = b.reshape(waves, lanes)
        if kind[1:] == "64":
            vgprs += [(2 * i, b & np.uint64(0xFFFFFFFF)), (2 * i + 1, b >> np.uint64(32))]
        elif kind[1:] == "16":
            # The other half must not matter.
            vgprs.append((2 * i, b.astype(np.uint32) | np.uint32(0x5A5A0000)))
        else:
            vgprs.append((2 * i, b))
    columns = [to_python(b, k) for b, k in zip(bits, kinds, strict=True)]
    want = expected_bits(case, columns)
    for active in (2**lanes - 1, sum(1 << i for i in range(lanes) if i % 3)):
        sgprs = [(126, active & 0xFFFFFFFF), (127, active >> 32)]
        w = run_lines([case.line], arch, vgprs, sgprs, waves=waves, num_vgprs=8)
        low, high = w.vgpr_u32[6].reshape(-1), w.vgpr_u32[7].reshape(-1)
        wide = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        got = (wide & np.uint64(2 ** int(case.result[1:]) - 1)).tolist()
        on = [(active >> (i % lanes)) & 1 for i in range(SAMPLES)]
        old = 0xA5A5A5A5A5A5A5A5 % 2 ** int(case.result[1:])
        check_bits(case, arch, [g for g, o in zip(got, on, strict=True) if o],
                   [e for e, o in zip(want, on, strict=True) if o],
                   [[v for v, o in zip(c, on, strict=True) if o] for c in columns])  # fmt: skip
        assert all(g == old for g, o in zip(got, on, strict=True) if not o), f"{arch}: {case.line}: inactive lanes"


def check_mask(case: Case, arch: str):
    """Like `check_vector` for an instruction that writes a lane mask to s[4:5] (s4 with 32 lanes)."""
    kinds, lanes = case.sources.split(), LANES[arch]
    waves = SAMPLES // lanes
    bits = inputs(kinds)
    vgprs = []
    for i, (b, kind) in enumerate(zip(bits, kinds, strict=True)):
        b = b.reshape(waves, lanes)
        if kind[1:] == "64":
            vgprs += [(2 * i, b & np.uint64(0xFFFFFFFF)), (2 * i + 1, b >> np.uint64(32))]
        else:
            vgprs.append((2 * i, b))
    columns = [to_python(b, k) for b, k in zip(bits, kinds, strict=True)]
    want = [bool(case.expected(*values)) for values in zip(*columns, strict=True)]
    for active in (2**lanes - 1, sum(1 << i for i in range(lanes) if i % 3)):
        sgprs = [(4, 0xFFFFFFFF), (5, 0xFFFFFFFF), (126, active & 0xFFFFFFFF), (127, active >> 32)]
        w = run_lines([case.line], arch, vgprs, sgprs, waves=waves)
        got = w.read_mask(4).reshape(-1).tolist()
        for i, (g, e) in enumerate(zip(got, want, strict=True)):
            on = bool((active >> (i % lanes)) & 1)
            assert g == (e and on), f"{arch}: {case.line}: inputs {[c[i] for c in columns]}, active {on}: got {g}"


def registers(first, size):
    count = max(1, size // 4)
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def suffix(name, arch):
    return OLD_NAMES[name] if arch in GFX9 else name


def pointer(memory, content, writable=False):
    address = memory.add(content, writable)
    return address, address % 2**32, address >> 32


def loaded(data, size, signed):
    """The word that a load of `size` bytes at each offset leaves in its first register."""
    value = int.from_bytes(data[:size].tobytes(), "little", signed=signed)
    return value % 2 ** (32 * max(1, size // 4))


def descriptor(memory, content, num_records, arch, writable=True):
    address = memory.add(content, writable)
    flags = 0x27000 if arch in GFX9 else 0x31027000
    return address, [(4, address % 2**32), (5, address >> 32), (6, num_records), (7, flags)]
