"""What the orders of workgroups in `flash.grid` would cost on GPUs of several dies: enumerated, and modelled.

For every workgroup of a launch, with the row of the tuning table for the chip, an order says which die it runs on,
which head it computes and how many tiles of keys it reads. From that follow by counting

- dies a head, dies a KV head: on how many dies the workgroups of one are, on average. Each of those dies loads the
  keys and values into an L2 of its own.
- work: tiles read by the busiest die over the mean of all dies.

and by `amdgpu.l2`, a model in which nothing is timed,

- hits: share of the tile reads that the private L2s serve, for a spread of D tiles between workgroups that run at the
  same time. D is the model's one free number: 0 is lockstep, and D = 124 reproduces what an MI355X was measured to hit.
- HBM: gigabytes that the others read, for the larger D.
- makespan: steps until the last workgroup is done, over an even share of them.

One workgroup runs on a compute unit. A hit rate is that of die 0, from its first six rounds of workgroups.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from amdgpu import arch, l2
from benchmarks.table import number, table
from flash import grid
from flash.tuning import default_config, default_splits
from references.cases import FlashCase

# Tiles between workgroups that run at the same time: lockstep, and about what measured hit rates say.
SPREADS = (0, 128)
# The chips of `amdgpu.arch` with more than one die.
CHIPS = tuple(chip for chip in arch.KNOWN if arch.xcds(chip) > 1)


@dataclasses.dataclass(frozen=True)
class OrderCost:
    """One order of one case on one chip.

    Attributes:
      case, architecture, order: what. block_q, block_k: how the chip's row cuts it.
      dies_per_head, dies_per_kv_head: mean over the heads, and over the KV heads, of all batch rows.
      work: the busiest die's tiles over the mean.
      hits: spread D -> modelled share of tile reads that hit. hbm_bytes: modelled, for the largest D.
      makespan: modelled, 1 is the best.
      note: why there are no figures, or "".
    """

    case: str
    architecture: str
    order: str
    block_q: int
    block_k: int
    dies_per_head: float | None = None
    dies_per_kv_head: float | None = None
    work: float | None = None
    hits: dict[int, float] = dataclasses.field(default_factory=dict)
    hbm_bytes: float | None = None
    makespan: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Launch:
    """The workgroups of a case in launch order; arrays of integers.

    Attributes:
      problem: how it is cut. head, kv_head: numbered through all batch rows. block: of queries. tiles: of keys.
    """

    problem: grid.Problem
    head: np.ndarray
    kv_head: np.ndarray
    block: np.ndarray
    tiles: np.ndarray


def problem_of(case: FlashCase, chip: str, order: str) -> grid.Problem:
    """The case as `flash_attention` cuts it on the chip, but for the order and for splits of the keys."""
    config = dataclasses.replace(default_config(chip, case.dtype, case.K, case.V), order=order, splits=1)
    sizes = (case.B, case.T, case.S, case.H, case.G, case.K, case.V)
    causal = {"right": 0, "bottom_right": True} if case.causal else {}
    return grid.Problem(*sizes, jnp.dtype(case.dtype), config, arch.xcds(chip), **causal)


def launch(p: grid.Problem) -> Launch:
    """Its workgroups."""
    b, h, block, _ = grid.workgroup(np.arange(p.batch * p.heads * p.blocks), p)
    of_block = []
    for i in range(p.blocks):
        start, _, _, stop = grid.key_tiles(p, i, 0, p.keys, p.queries)
        of_block.append(int(stop) - int(start))
    kv_head = b * p.groups + grid.group_of(h, p.heads, p.groups)
    return Launch(p, b * p.heads + h, kv_head, block, np.array(of_block)[block])


def cost(case: FlashCase, chip: str, order: str) -> OrderCost:
    """Counts and models one order."""
    p = problem_of(case, chip, order)
    found = OrderCost(case.name, chip, order, p.block_q, p.block_k)
    try:
        grid.check_order(order, p.heads, p.xcds)
    except ValueError as error:
        return dataclasses.replace(found, note=str(error))
    found_launch, chip_facts = launch(p), arch.facts(chip)
    dies, resident = p.xcds, chip_facts.cus // p.xcds
    tile_bytes = p.block_k * (p.key_size + p.value_size) * p.dtype.itemsize
    tiles, streams = found_launch.tiles, found_launch.kv_head
    capacity = chip_facts.l2_bytes // tile_bytes
    hits = {
        spread: l2.hit_rate(
            streams,
            tiles,
            dies=dies,
            resident=resident,
            capacity=capacity,
            spread=spread,
            # In lockstep there is nothing to draw.
            draws=4 if spread else 1,
            of_dies=(0,),
        )
        for spread in SPREADS
    }
    work = l2.work_per_die(tiles, dies)
    return dataclasses.replace(
        found,
        dies_per_head=float(l2.streams_per_die(found_launch.head, dies).mean()),
        dies_per_kv_head=float(l2.streams_per_die(streams, dies).mean()),
        work=float(work.max() / work.mean()),
        hits=hits,
        hbm_bytes=l2.hbm_bytes(hits[max(SPREADS)], tiles, tile_bytes),
        makespan=l2.makespan(tiles, dies=dies, resident=resident),
    )


def is_split(case: FlashCase, chip: str) -> bool:
    """Whether so few query blocks read the keys that each of them is shared out among workgroups."""
    p = problem_of(case, chip, "kv_group_first")
    return default_splits(chip, case.B * case.H * p.blocks, -(-case.S // p.block_k)) > 1


def run(
    cases: Sequence[FlashCase],
    *,
    chips: Sequence[str] = CHIPS,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[list[OrderCost], str]:
    """Every order of every case on every chip; and a line on the cases that are left out.

    Left out are those whose keys are split: they have fewer workgroups than the chip has places, and all run at once.
    """
    found, left = [], []
    for chip in chips:
        for case in cases:
            if is_split(case, chip):
                left.append(f"{case.name} ({chip})")
                continue
            for order in grid.ORDERS:
                on_step(f"{chip} {case.name}: {order}")
                found.append(cost(case, chip, order))
    line = f"left out, for their keys are split among few query blocks: {', '.join(left)}" if left else ""
    return found, line


HEADER = (
    "case",
    "order",
    "dies a head",
    "dies a KV head",
    *(f"hits, D = {spread}" for spread in SPREADS),
    f"HBM GB, D = {max(SPREADS)}",
    "work max/mean",
    "makespan",
)


def as_text(found: Sequence[OrderCost]) -> str:
    """A table for each chip; the order that runs by default has a star."""
    parts = []
    for chip in dict.fromkeys(one.architecture for one in found):
        facts = arch.facts(chip)
        head = (
            f"{chip}: {facts.xcds} dies, each with {facts.cus // facts.xcds} workgroups at a time and an L2 of "
            f"{facts.l2_bytes / 2**20:g} MiB; counted and modelled, not a timing"
        )
        parts += [head, table(HEADER, [_row(one) for one in found if one.architecture == chip])]
    notes = dict.fromkeys(f"{one.case}: {one.note}" for one in found if one.note)
    return "\n".join([*parts, "* runs by default; 128x64: rows of a query block x keys of a tile", *notes])


def _row(one: OrderCost) -> list[str]:
    default = " *" if one.order == default_config(one.architecture, "bfloat16", 128, 128).order else ""
    name = [f"{one.case} ({one.block_q}x{one.block_k})", f"{one.order}{default}"]
    if one.hbm_bytes is None:
        return [*name, *["-"] * (len(HEADER) - 2)]
    return [
        *name,
        number(one.dies_per_head),
        number(one.dies_per_kv_head),
        *(f"{100 * one.hits[spread]:.1f} %" for spread in SPREADS),
        number(one.hbm_bytes / 1e9),
        f"{one.work:.3f}",
        f"{one.makespan:.3f}",
    ]


def write_plots(folder: pathlib.Path, cases: Sequence[FlashCase], chips: Sequence[str] = CHIPS) -> list[pathlib.Path]:
    """One PNG per case and chip: a panel for each order, heads down, query blocks across, a colour for each die.

    Of the first batch row. Returns the files written.
    """
    import matplotlib.figure
    import matplotlib.patches

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chip in chips:
        for case in cases:
            if is_split(case, chip):
                continue
            figure = matplotlib.figure.Figure(figsize=(11, 8), layout="constrained")
            colours = matplotlib.colormaps["tab10"]
            for axes, order in zip(figure.subplots(2, 2).flat, grid.ORDERS, strict=True):
                axes.set(title=order, xlabel="query block", ylabel="head")
                axes.imshow(die_map(case, chip, order), cmap=colours, vmin=0, vmax=9, aspect="auto", origin="upper")
            dies = arch.xcds(chip)
            legend = [matplotlib.patches.Patch(color=colours(die), label=f"die {die}") for die in range(dies)]
            figure.legend(handles=legend, loc="outside lower center", ncols=dies)
            figure.suptitle(f"{case.name} on {chip}: H {case.H}, G {case.G}, {'causal' if case.causal else 'full'}")
            path = folder / f"orders_{chip}_{case.name}.png"
            figure.savefig(path, dpi=100)
            written.append(path)
    return written


def die_map(case: FlashCase, chip: str, order: str) -> np.ndarray:
    """The die of each (head, query block) of the first batch row; NaN everywhere where the order does not exist."""
    p = problem_of(case, chip, order)
    dies = np.full((p.heads, p.blocks), np.nan)
    try:
        grid.check_order(order, p.heads, p.xcds)
    except ValueError:
        return dies
    found = launch(p)
    first = found.head < p.heads
    dies[found.head[first], found.block[first]] = np.flatnonzero(first) % p.xcds
    return dies
