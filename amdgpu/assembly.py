"""Reads AMD assembly text: what the kernel's metadata says, its instructions by class, and its loops.

Opcodes are classed by their prefix, as AMD's ISA documents group them (CDNA3, CDNA4, RDNA3, RDNA3.5, RDNA4).
Loops are found in the control flow graph and not from the compiler's comments, so hand-written and inline
assembly counts too.
"""

import dataclasses
import re
from collections import Counter

CLASSES = ("matrix", "vector", "transcendental", "lds", "global", "scratch", "scalar", "wait")

# Longest prefixes first: the first match wins.
_PREFIXES = (
    ("v_mfma_", "matrix"),
    ("v_smfmac_", "matrix"),
    ("v_wmma_", "matrix"),
    ("v_swmmac_", "matrix"),
    # gfx12 has them on scalars too: v_s_exp_f32.
    *((f"v_{s}{name}_", "transcendental") for s in ("", "s_") for name in ("exp", "log", "rcp", "rsq", "sqrt")),
    *((f"v_{name}_", "transcendental") for name in ("sin", "cos")),
    ("v_", "vector"),
    ("ds_", "lds"),
    ("scratch_", "scratch"),
    ("global_", "global"),
    ("buffer_", "global"),
    ("flat_", "global"),
    # Instructions that only wait, order or idle: they issue, but use no unit.
    ("s_waitcnt", "wait"),
    ("s_wait_", "wait"),
    ("s_nop", "wait"),
    ("s_delay_alu", "wait"),
    ("s_clause", "wait"),
    ("s_sleep", "wait"),
    ("s_setprio", "wait"),
    ("s_barrier", "wait"),
    ("s_", "scalar"),
)


def instruction_class(opcode: str) -> str:
    """One of `CLASSES` for an opcode such as `v_mfma_f32_32x32x8_f16`.

    - matrix: MFMA, WMMA and their sparse forms.
    - vector: every other VALU instruction: conversions, moves to and from accumulation registers, packed and
      dual-issued ones (a `v_dual_` pair counts once).
    - transcendental: exp, log, rcp, rsq, sqrt, sin, cos.
    - lds: all `ds_`, the lane permutes through the LDS unit among them.
    - global: global, buffer and flat. scratch: spilled registers and private arrays.
    - scalar: SALU, scalar loads, branches.
    - wait: waits, barriers, nops and scheduling hints.

    Raises:
        ValueError: no AMD instruction starts like this.
    """
    for prefix, name in _PREFIXES:
        if opcode.startswith(prefix):
            return name
    raise ValueError(f"opcode: got {opcode!r}, which is no AMD instruction")


@dataclasses.dataclass(frozen=True)
class Instruction:
    # 1-based line in the assembly text.
    line: int
    opcode: str
    operands: str
    # Line of the compiled file (`.loc`) that it was made from; 0 where the text does not say.
    source: int = 0


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after another; control enters at the top and leaves at the bottom."""

    label: str
    instructions: tuple[Instruction, ...]
    # Indices of the blocks that may run next.
    successors: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the control flow graph: blocks that reach one another, entered at `label`.

    Counts are static: each instruction once, whatever the trip count, blocks that a branch may skip included.
    They leave out loops inside of this one, which are reported by themselves.
    """

    label: str
    # Lines of the assembly text that the loop spans, nested loops included.
    first_line: int
    last_line: int
    # 1 for a loop in no other loop.
    depth: int
    # The label of the loop around it.
    parent: str | None
    innermost: bool
    # Instructions of each class, all of `CLASSES`.
    counts: dict[str, int]
    # Matrix instructions by opcode.
    matrix_kinds: dict[str, int]
    # What was counted.
    code: tuple[Instruction, ...] = dataclasses.field(repr=False)

    @property
    def instructions(self) -> int:
        """All instructions of the loop, nested loops left out."""
        return sum(self.counts.values())

    @property
    def instructions_per_matrix(self) -> float | None:
        """All instructions for one matrix instruction; None where the loop has none."""
        return self.instructions / self.counts["matrix"] if self.counts["matrix"] else None

    @property
    def counts_per_matrix(self) -> dict[str, float] | None:
        """Instructions of each class for one matrix instruction; None where the loop has none."""
        matrix = self.counts["matrix"]
        return {name: n / matrix for name, n in self.counts.items()} if matrix else None


def count_classes(instructions) -> dict[str, int]:
    found = Counter(instruction_class(i.opcode) for i in instructions)
    return {name: found[name] for name in CLASSES}


def count_matrix_kinds(instructions) -> dict[str, int]:
    return dict(Counter(i.opcode for i in instructions if instruction_class(i.opcode) == "matrix"))


def metadata(text: str, key: str) -> int:
    """An integer of the kernel's `.amdgpu_metadata`, such as `vgpr_count`; 0 where there is no such entry.

    Raises:
        ValueError: the text holds no kernel metadata, or that of more than one kernel.
    """
    begin, end = ".amdgpu_metadata", ".end_amdgpu_metadata"
    if text.count(end) != 1:
        raise ValueError(f"assembly text: expected the metadata of one kernel, found {text.count(end)}")
    section = text[text.index(begin) : text.index(end)]
    found = re.findall(rf"^\s*(?:- )?\.{key}:\s*(\d+)\s*$", section, re.MULTILINE)
    return int(found[0]) if found else 0


_LABEL = re.compile(r"^([A-Za-z_.$][\w.$]*):")
_SOURCE = re.compile(r"^\.loc\s+\d+\s+(\d+)")
_BRANCH = re.compile(r"^s_(c?branch)")
_ENDS = "s_endpgm"
# These go where the text does not say.
_COMPUTED = ("s_setpc", "s_swappc", "s_call", "s_rfe", "s_cbranch_g_fork", "s_cbranch_i_fork")


def blocks(text: str) -> list[Block]:
    """The basic blocks of the kernel in a text of assembly, in its order.

    Raises:
        ValueError: a branch to a label that the text does not have, or a jump to a computed address.
    """
    pieces: list[tuple[str, list[Instruction]]] = [("entry", [])]
    source = 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(";")[0].split("//")[0].strip()
        label = _LABEL.match(line)
        if label:
            if label[1].startswith(".Lfunc_end"):
                break
            pieces.append((label[1], []))
            line = line[label.end() :].strip()
        if location := _SOURCE.match(line):
            source = int(location[1])
        # Directives start with a dot; what follows the code is data.
        if not line or line.startswith("."):
            continue
        opcode, _, operands = line.partition(" ")
        if opcode.startswith(_COMPUTED):
            raise ValueError(f"line {number}: {opcode} jumps to a computed address, so loops cannot be found")
        pieces[-1][1].append(Instruction(number, opcode, operands.strip(), source))
        if _BRANCH.match(opcode) or opcode.startswith(_ENDS):
            pieces.append((f"after line {number}", []))
    where = {label: i for i, (label, _) in enumerate(pieces)}
    return [
        Block(label, tuple(code), _successors(code, i, len(pieces), where)) for i, (label, code) in enumerate(pieces)
    ]


def _successors(code: list[Instruction], i: int, n: int, where: dict[str, int]) -> tuple[int, ...]:
    following = (i + 1,) if i + 1 < n else ()
    if not code:
        return following
    last = code[-1]
    if last.opcode.startswith(_ENDS):
        return ()
    branch = _BRANCH.match(last.opcode)
    if not branch:
        return following
    if last.operands not in where:
        raise ValueError(f"line {last.line}: {last.opcode} to unknown label {last.operands!r}")
    target = (where[last.operands],)
    return target if branch[1] == "branch" else (*target, *following)


def loops(text: str) -> list[Loop]:
    """All loops of the kernel, outer before inner, in the order of the text.

    A loop is a strongly connected part of the control flow graph. Its header is the block that control enters
    first; what is strongly connected without the header are the loops inside. In the code that compilers make
    these are the natural loops, merged where they share a header; a loop with several entries is one as well.
    """
    graph = blocks(text)
    reachable = _reachable(graph)
    found = []

    def search(members: frozenset[int], depth: int, parent: str | None) -> frozenset[int]:
        """Reports the loops made of these blocks alone; returns the blocks that are in one."""
        inside = set()
        for component in _cycles(graph, members):
            header = _header(graph, component, reachable - component)
            label = graph[header].label
            place = len(found)
            nested = search(component - {header}, depth + 1, label)
            own = [i for b in sorted(component - nested) for i in graph[b].instructions]
            lines = [i.line for b in component for i in graph[b].instructions]
            found.insert(
                place,
                Loop(
                    label=label,
                    first_line=min(lines),
                    last_line=max(lines),
                    depth=depth,
                    parent=parent,
                    innermost=not nested,
                    counts=count_classes(own),
                    matrix_kinds=count_matrix_kinds(own),
                    code=tuple(own),
                ),
            )
            inside |= component
        return frozenset(inside)

    search(reachable, 1, None)
    return found


def _reachable(graph: list[Block]) -> frozenset[int]:
    # What follows an unconditional branch is a block that falls through, but nothing may ever get there.
    seen, todo = set(), [0]
    while todo:
        block = todo.pop()
        if block not in seen:
            seen.add(block)
            todo += graph[block].successors
    return frozenset(seen)


def _header(graph: list[Block], component: frozenset[int], outside: frozenset[int]) -> int:
    entered = {s for i in outside for s in graph[i].successors}
    return min(entered & component, default=min(component))


def _cycles(graph: list[Block], members: frozenset[int]) -> list[frozenset[int]]:
    """Strongly connected parts of the graph cut down to `members`, those with a cycle, in text order."""
    # Blocks reachable from each in one step or more, as the bits of an integer (Warshall's closure).
    reach = {i: sum(1 << s for s in set(graph[i].successors) & members) for i in members}
    for middle in members:
        for i in members:
            if reach[i] >> middle & 1:
                reach[i] |= reach[middle]
    parts = {
        frozenset(j for j in members if reach[i] >> j & 1 and reach[j] >> i & 1) for i in members if reach[i] >> i & 1
    }
    return sorted(parts, key=min)
