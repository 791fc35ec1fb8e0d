"""Kernel reports as text that a person can read."""

from collections.abc import Sequence

from amdgpu.assembly import CLASSES, Loop
from amdgpu.isa import KernelReport

NOTE = "Static evidence from machine code, not a timing. Counts are instructions of one wave, each counted once."

_KERNEL_HEAD = (
    "kernel",
    "grid",
    "warps",
    "stages",
    "VGPR",
    "AGPR",
    "SGPR",
    "spilled",
    "scratch B",
    "LDS B",
    "groups/CU",
    "limited by",
)
_LOOP_HEAD = ("loop", "depth", "instructions", "per matrix", *CLASSES, "matrix opcodes")


def table(reports: Sequence[KernelReport]) -> str:
    """Kernels, then their loops (a nested one indented, and left out of the one around it), then faults."""
    text = _columns([_KERNEL_HEAD, *(_kernel_row(r) for r in reports)], left=(0, 1, 11))
    rows = [_loop_row(r, loop) for r in reports for loop in r.loops]
    text += "\n\n" + _columns([_LOOP_HEAD, *rows], left=(0, len(_LOOP_HEAD) - 1)) if rows else "\n\n  no loops"
    return text + "".join(f"\n  FAULT  {r.name}: {fault}" for r in reports for fault in r.faults)


def _kernel_row(r: KernelReport) -> tuple[str, ...]:
    spilled = str(r.spilled_vgprs) + (f"+{r.spilled_sgprs}s" if r.spilled_sgprs else "")
    return (
        r.name,
        "x".join(map(str, r.grid)),
        str(r.num_warps),
        str(r.num_stages),
        str(r.vgprs),
        str(r.agprs),
        str(r.sgprs),
        spilled,
        f"{r.scratch_bytes:,}",
        f"{r.lds_bytes:,}",
        f"{r.occupancy.workgroups_per_cu:g}",
        f"{r.occupancy.limiter}: {r.occupancy.reason}",
    )


def _loop_row(r: KernelReport, loop: Loop) -> tuple[str, ...]:
    each = loop.instructions_per_matrix
    kinds = " ".join(f"{opcode} x{n}" for opcode, n in loop.matrix_kinds.items())
    return (
        "  " * (loop.depth - 1) + f"{r.name} {loop.label}",
        str(loop.depth),
        str(loop.instructions),
        "-" if each is None else f"{each:.1f}",
        *(str(loop.counts[name]) for name in CLASSES),
        kinds,
    )


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Rows of equal length in aligned columns, to the right but for those in `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
