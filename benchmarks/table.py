"""Plain-text tables."""

from collections.abc import Sequence


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits and no exponent; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    # The precision of %g with an exponent, spelled out: 1.2e+04 -> 12000, 0.0123 stays.
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - int(f"{rounded:e}".split("e")[1]))
    return f"{rounded:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """A time with its unit: "1.23 s", "4.56 ms", "7.89 us"; "-" for None."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds / 1e-6)} us"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 2) -> str:
    """Columns as wide as their widest cell, two spaces apart; `left` of them are left-aligned, the rest right.

    Raises:
      ValueError: a row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {list(row)}")
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def align(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([align(lines[0]), "  ".join("-" * width for width in widths), *map(align, lines[1:])])
