"""A kernel's listing decoded once: every instruction a function of `Waves`, in basic blocks."""

import dataclasses
import re
from collections.abc import Callable

from amdgpu.emulator.control import BRANCHES, decode_control, is_barrier, sets_fp16_overflow
from amdgpu.emulator.division import decode_division
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.lanes import LANES
from amdgpu.emulator.lds import access_granule, decode_lds
from amdgpu.emulator.matrix import decode_mfma, decode_wmma
from amdgpu.emulator.operands import OperandFactory
from amdgpu.emulator.packed import PACKED_DECODERS
from amdgpu.emulator.parse import Instruction, Listing, parse_lines, parse_listing
from amdgpu.emulator.scalar import decode_scalar
from amdgpu.emulator.target import Target
from amdgpu.emulator.vector import decode_alu
from amdgpu.emulator.vector_fp8 import decode_fp8
from amdgpu.emulator.vector_special import SPECIAL
from amdgpu.emulator.vmem import decode_memory, decode_scalar_load

_VECTOR = (decode_alu, *SPECIAL, decode_division, *PACKED_DECODERS, decode_fp8, decode_mfma, decode_wmma)
_SCALAR = (decode_control, decode_scalar_load, decode_scalar)
_MEMORY = (decode_control, decode_lds, decode_memory)


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after the other, and how the block ends.

    end: "next", "jump", "branch", "barrier" or "exit". target: instruction index of a jump or a taken branch;
    following: of the block behind. condition: of a branch, bool [waves, 1].
    """

    steps: tuple[Callable, ...]
    instructions: tuple[Instruction, ...]
    end: str
    target: int
    following: int
    condition: Callable | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A decoded kernel. blocks: by the index of their first instruction."""

    target: Target
    listing: Listing
    blocks: dict[int, Block]
    num_vgprs: int
    lds_granule: int

    @property
    def kernel(self) -> str:
        return self.listing.kernel

    def without(self, index: int) -> "Program":
        """The program with instruction `index` left out: a broken build, to prove that a test notices."""
        old = self.listing
        labels = {name: at - (at > index) for name, at in old.labels.items()}
        kept = old.instructions[:index] + old.instructions[index + 1 :]
        return decode(dataclasses.replace(old, instructions=kept, labels=labels), self.target.arch)

    def find(self, pattern: str) -> list[int]:
        """Indices of the instructions whose text matches the regular expression."""
        return [i for i, inst in enumerate(self.listing.instructions) if re.search(pattern, inst.text)]


def load_program(text: str, arch: str) -> Program:
    """Decode the assembly text of one kernel.

    Raises EmulatorError naming kernel, line and instruction for whatever the emulator does not know.
    """
    return decode(parse_listing(text), arch)


def assemble(lines: list[str], arch: str, **descriptor: int) -> Program:
    """A program from bare instructions and labels, for tests; `descriptor` as in the .amdhsa_ directives."""
    instructions, labels = parse_lines(lines)
    return decode(Listing("lines", instructions, labels, descriptor), arch)


def decode(listing: Listing, arch: str) -> Program:
    """A program from a parsed listing."""
    target = Target(arch)
    number = listing.descriptor.get
    for mode in ("float_round_mode_32", "float_round_mode_16_64"):
        if number(mode, 0) != 0:
            raise EmulatorError(f"{listing.kernel}: {mode} other than to nearest even")
    if number("float_denorm_mode_16_64", 3) != 3:
        raise EmulatorError(f"{listing.kernel}: flushed float16 subnormals")
    texts = [i.text for i in listing.instructions]
    arch_vgprs, acc_vgprs = _registers_used(texts, "v"), _registers_used(texts, "a")
    overflow = bool(number("fp16_overflow", 0)) or _sets_fp16_overflow(listing)
    factory = OperandFactory(target, arch_vgprs, number("float_denorm_mode_32", 3), overflow)
    decoded = [_located(listing, inst, lambda i=inst: _decode(i, factory)) for inst in listing.instructions]
    granule = access_granule({i.opcode for i in listing.instructions})
    return Program(target, listing, _blocks(listing, decoded), max(1, arch_vgprs + acc_vgprs), granule)


def _sets_fp16_overflow(listing):
    """Whether the kernel sets the mode bit FP16_OVFL, which must come before everything that it may change."""
    changes = [i for i, inst in enumerate(listing.instructions) if inst.opcode.startswith("s_setreg")]
    for i in changes:
        inst = listing.instructions[i]
        _located(listing, inst, lambda inst=inst: sets_fp16_overflow(inst))
        if any(before.opcode.startswith("v_") for before in listing.instructions[:i]):
            raise EmulatorError(f"{listing.kernel}, line {inst.line}: {inst.text}: a change of mode amid the kernel")
    return bool(changes)


def _registers_used(texts, letter):
    """One more than the highest register of this kind."""
    pattern = re.compile(rf"(?<![\w.]){letter}(?:\[\d+:)?(\d+)")
    return max((int(n) for text in texts for n in pattern.findall(text)), default=-1) + 1


def _located(listing, inst, action):
    try:
        return action()
    except EmulatorError as error:
        raise EmulatorError(f"{listing.kernel}, line {inst.line}: {inst.text}: {error}") from error


def _decode_vector(inst, factory):
    opcode = inst.opcode.replace("v_dual_", "v_")
    if opcode != inst.opcode:
        inst = dataclasses.replace(inst, opcode=opcode)
    for decoder in _VECTOR:
        if pair := decoder(inst, factory):
            return pair
    raise EmulatorError(f"unknown opcode {inst.opcode}")


def _decode(inst, factory):
    """The step of an instruction; None for one that ends a block."""
    if inst.opcode in BRANCHES or inst.opcode == "s_endpgm" or is_barrier(inst):
        return None
    if inst.pair is not None:
        return _dual(_decode_vector(inst, factory), _decode_vector(inst.pair, factory))
    if inst.opcode in LANES:
        return LANES[inst.opcode](inst, factory)
    if inst.opcode.startswith("v_") and inst.opcode != "v_nop":
        compute, write = _decode_vector(inst, factory)
        return lambda w: write(w, compute(w))
    for decoder in _SCALAR if inst.opcode.startswith("s_") else _MEMORY:
        if step := decoder(inst, factory):
            return step
    raise EmulatorError(f"unknown opcode {inst.opcode}")


def _dual(first, second):
    (compute_x, write_x), (compute_y, write_y) = first, second

    def step(w):
        x = compute_x(w)
        # A move computes a view of its source, which the first write may change.
        y = compute_y(w).copy()
        write_x(w, x)
        write_y(w, y)

    return step


def _blocks(listing, decoded):
    instructions = listing.instructions
    starts = {0, *listing.labels.values()}
    for i, step in enumerate(decoded):
        if step is None:
            starts.add(i + 1)
    edges = sorted(s for s in starts if s < len(instructions))
    blocks = {}
    for start, stop in zip(edges, [*edges[1:], len(instructions)], strict=True):
        last = instructions[stop - 1]
        end, target, condition = "next", -1, None
        if last.opcode == "s_endpgm":
            end = "exit"
        elif last.opcode in ("s_barrier", "s_barrier_wait"):
            end = "barrier"
        elif last.opcode in BRANCHES:
            condition = BRANCHES[last.opcode]
            end = "branch" if condition else "jump"
            target = _located(listing, last, lambda i=last: _target(listing, i))
        body = slice(start, stop if end == "next" else stop - 1)
        blocks[start] = Block(tuple(decoded[body]), instructions[start:stop], end, target, stop, condition)
    return blocks


def _target(listing, inst):
    if inst.operands[0] not in listing.labels:
        raise EmulatorError(f"unknown label {inst.operands[0]}")
    return listing.labels[inst.operands[0]]
