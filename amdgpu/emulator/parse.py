"""Assembly text to instructions: operands, modifiers, labels, and the kernel descriptor.

The text is what LLVM prints for amdgcn (Triton's `asm["amdgcn"]`). Nothing here knows what an opcode does.
"""

import dataclasses
import re

from amdgpu.emulator.errors import EmulatorError

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_DATA_DIRECTIVES = (".byte", ".short", ".word", ".long", ".4byte", ".quad")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` without its encoding suffix, operands and modifiers as text.

    Modifiers are those words behind the operands: a flag (`offen`, `clamp`) maps to True, `name:value` to the
    text of the value, `name:[1,0]` to a tuple of ints. `pair` is the second half of a dual-issue instruction.
    """

    opcode: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: dict[str, bool | str | tuple[int, ...]]
    line: int
    text: str
    pair: "Instruction | None" = None

    def flag(self, name: str) -> bool:
        return bool(self.modifiers.get(name, False))

    def integer(self, name: str, default: int = 0) -> int:
        return int(str(self.modifiers.get(name, default)), 0)

    def bits(self, name: str, count: int, default: int = 0) -> tuple[int, ...]:
        """A per-operand modifier such as op_sel:[0,1], filled up with its default to `count` entries."""
        given = self.modifiers.get(name, ())
        if not isinstance(given, tuple):
            raise EmulatorError(f"modifier {name} without brackets")
        return given + (default,) * (count - len(given))


@dataclasses.dataclass(frozen=True)
class Listing:
    """A kernel as text: its instructions, the instruction index of each label, and the descriptor's numbers."""

    kernel: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    descriptor: dict[str, int]


def split_outside(text: str, separator: str) -> list[str]:
    """Split at separators that stand outside of brackets, parentheses, bars and quotes."""
    parts, depth, quoted, part = [], 0, False, ""
    for c in text:
        if c == '"':
            quoted = not quoted
        depth += (c in "[(") - (c in "])")
        if c == separator and depth == 0 and not quoted:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    parts.append(part.strip())
    return [p for p in parts if p]


def _modifier(word: str) -> tuple[str, bool | str | tuple[int, ...]]:
    name, colon, value = word.partition(":")
    if not colon:
        return name, True
    if value.startswith("["):
        return name, tuple(int(v, 0) for v in value.strip("[]").split(","))
    return name, value


def parse_instruction(text: str, line: int) -> Instruction:
    """One line without labels or comments."""
    halves = [h.strip() for h in text.split("::")]
    pair = parse_instruction(halves[1], line) if len(halves) == 2 else None
    opcode, _, rest = halves[0].partition(" ")
    operands, modifiers = [], {}
    for part in split_outside(rest.replace("\t", " "), ","):
        # Only `name:value` and bare words follow an operand; the first word of each part is the operand.
        first, *words = split_outside(part, " ")
        operands.append(first)
        modifiers.update(_modifier(word) for word in words)
    encoding = _ENCODING.search(opcode) if opcode.startswith("v_") else None
    return Instruction(
        opcode=opcode[: encoding.start()] if encoding else opcode,
        encoding=encoding.group(1) if encoding else "",
        operands=tuple(operands),
        modifiers=modifiers,
        line=line,
        text=text,
        pair=pair,
    )


def parse_lines(lines: list[str], first_line: int = 1) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and labels of a function's body. Directives are skipped, except data among the code."""
    instructions, labels = [], {}
    for number, raw in enumerate(lines, first_line):
        text = re.split(r";|//", raw)[0].strip()
        if not text:
            continue
        if label := re.fullmatch(r"([.\w$]+):", text):
            labels[label.group(1)] = len(instructions)
        elif not text.startswith("."):
            instructions.append(parse_instruction(re.sub(r"\s+", " ", text), number))
        elif text.startswith(_DATA_DIRECTIVES):
            # An instruction that the assembler could only write as data must not be skipped.
            instructions.append(Instruction(text.split()[0], "", (), {}, number, text))
    return tuple(instructions), labels


def parse_listing(text: str) -> Listing:
    """The one kernel of an assembly text. Raises EmulatorError where there is none, or more than one."""
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)
    if len(names) != 1:
        raise EmulatorError(f"expected the assembly text of one kernel, found {len(names)}: {names}")
    descriptor = {k: int(v, 0) for k, v in re.findall(r"^\s*\.amdhsa_(\w+)\s+(-?\w+)\s*$", text, re.M) if k != "kernel"}
    if size := re.search(r"\.kernarg_segment_size:\s+(\d+)", text):
        descriptor.setdefault("kernarg_size", int(size.group(1)))
    lines = text.splitlines()
    start = next((i for i, l in enumerate(lines) if re.match(rf"{re.escape(names[0])}:", l)), None)
    if start is None:
        raise EmulatorError(f"no label of the kernel {names[0]!r}")
    end = start + 1
    while end < len(lines) and not re.match(r"\s*\.section|\.Lfunc_end", lines[end]):
        end += 1
    instructions, labels = parse_lines(lines[start + 1 : end], start + 2)
    return Listing(names[0], instructions, labels, descriptor)
