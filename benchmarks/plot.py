"""Pictures of time against the length of the sequence."""

import pathlib
import statistics
from collections.abc import Sequence

from benchmarks.results import Result, families


def write_plots(folder: pathlib.Path, results: Sequence[Result]) -> list[pathlib.Path]:
    """One PNG per family: median time against T, a line per arm, its fastest and slowest round as a band.

    Returns:
      The files written; none where nothing was timed.
    """
    import matplotlib.figure

    folder.mkdir(parents=True, exist_ok=True)
    written: list[pathlib.Path] = []
    for (algorithm, length, *fixed), members in families(results).items():
        # A Figure of its own, not pyplot's: no window system, no state left behind.
        figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for arm in dict.fromkeys(result.arm for result in members):
            line = sorted((r for r in members if r.arm == arm), key=lambda r: r.shape[length])
            lengths = [r.shape[length] for r in line]
            axes.plot(lengths, [statistics.median(r.seconds) * 1e3 for r in line], marker="o", label=arm)
            low, high = ([pick(r.seconds) * 1e3 for r in line] for pick in (min, max))
            axes.fill_between(lengths, low, high, alpha=0.2)
        axes.set(xscale="log", yscale="log", xlabel=f"{length} (tokens)", ylabel="time of a call (ms)")
        ticks = sorted({r.shape[length] for r in members})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.set_title(f"{algorithm}: " + ", ".join(f"{letter} {size}" for letter, size in fixed), fontsize=9)
        axes.grid(True, alpha=0.3)
        axes.legend()
        name = "_".join([algorithm, *(f"{letter}{size}" for letter, size in fixed)])
        path = folder / ("".join(c if c.isalnum() or c in "-_." else "-" for c in name) + ".png")
        figure.savefig(path, dpi=120)
        written.append(path)
    return written
