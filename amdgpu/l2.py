"""What an order of workgroups costs on a GPU of several dies, each with an L2 of its own: a model on the CPU.

A launch is two arrays over its workgroups, in the order in which the GPU hands them out: `streams`, which stream of
tiles a workgroup reads (attention: its batch row and KV head), and `tiles`, how many tiles of it, from the first on. A
tile is what the kernel loads at once: `block_k` keys and their values. Workgroup w runs on die w % dies, and a die runs
`resident` of them at a time.

The L2 of a die is a least-recently-used list of tiles. Resident workgroups advance one tile a step, all at the same
speed, but they need not start together: each place on the die starts up to `spread` tiles late, drawn at random. So
`spread` is the one free number of the model, and belongs beside every rate that it gives. With S = 65536 and 64 heads
of 128, an MI355X was measured to hit 2.36 % of its reads in the order block_first and 93.62 % in head_first (FlyDSL,
pull request 919). In tiles of 64 keys the model gives 1.5 % and 93.1 % for a spread of 124, and 75.0 % and 96.9 % in
lockstep.

This is a model of what is shared, not a timing: no bandwidth, no latency, no other traffic.
"""

import heapq

import numpy as np


def streams_per_die(streams, dies: int) -> np.ndarray:
    """For each stream, on how many dies it is read."""
    streams = np.asarray(streams)
    read = np.zeros((int(streams.max()) + 1, dies), bool)
    read[streams, np.arange(streams.size) % dies] = True
    return read.sum(axis=1)


def work_per_die(tiles, dies: int) -> np.ndarray:
    """Tiles that the workgroups of each die read."""
    tiles = np.asarray(tiles)
    return np.bincount(np.arange(tiles.size) % dies, weights=tiles, minlength=dies)


def makespan(tiles, *, dies: int, resident: int) -> float:
    """Steps until the last workgroup is done, over the steps that an even share takes; 1 is the best.

    Each die starts its workgroups in order, as places become free.
    """
    tiles = np.asarray(tiles)
    last = 0
    for die in range(dies):
        free_at = [0] * resident
        for n in tiles[die::dies].tolist():
            heapq.heapreplace(free_at, free_at[0] + n)
        last = max(last, *free_at)
    return last * dies * resident / float(tiles.sum()) if tiles.any() else 1.0


def hit_rate(
    streams,
    tiles,
    *,
    dies: int,
    resident: int,
    capacity: int,
    spread: int,
    waves: int = 6,
    draws: int = 4,
    of_dies: tuple[int, ...] | None = None,
) -> float:
    """Share of tile reads that the private L2s serve.

    Args:
      streams, tiles: integers, one for each workgroup in launch order.
      dies: dies with a private L2.
      resident: workgroups that a die runs at a time.
      capacity: tiles that an L2 holds.
      spread: how many tiles apart resident workgroups may start.
      waves: of each die the first `waves * resident` workgroups are looked at.
      draws: the mean over that many drawings of the starts, from fixed seeds.
      of_dies: the dies that are looked at; all by default.
    """
    hits = reads = 0
    for die in range(dies) if of_dies is None else of_dies:
        queue = [np.asarray(x)[die::dies][: waves * resident] for x in (streams, tiles)]
        # Who reads nothing is gone at once.
        queue = [x[queue[1] > 0].tolist() for x in queue]
        for seed in range(draws):
            starts = np.random.default_rng(seed).integers(0, spread, resident, endpoint=True).tolist()
            hits += _hits(list(zip(*queue, strict=True)), starts, capacity)
            reads += sum(queue[1])
    return hits / reads if reads else 0.0


def hbm_bytes(rate: float, tiles, tile_bytes: int) -> float:
    """Bytes that all workgroups read from HBM, at a hit rate."""
    return (1.0 - rate) * float(np.sum(tiles)) * tile_bytes


def _hits(workgroups: list[tuple[int, int]], starts: list[int], capacity: int) -> int:
    """Hits of one die: its workgroups are (stream, tiles), and place i starts `starts[i]` steps late."""
    # A dict keeps the order in which its keys were entered: the first key is the least recently used.
    cache: dict[tuple[int, int], None] = {}
    waiting = iter(workgroups)
    # (stream, next tile, tiles) of each place; negative: it waits.
    places = [(stream, -start, n) for start, (stream, n) in zip(starts, waiting, strict=False)]
    hits = 0
    while places:
        going = []
        for stream, tile, n in places:
            if tile >= 0:
                key = (stream, tile)
                if key in cache:
                    hits += 1
                    del cache[key]
                elif len(cache) == capacity:
                    del cache[next(iter(cache))]
                cache[key] = None
            if tile + 1 < n:
                going.append((stream, tile + 1, n))
            elif (following := next(waiting, None)) is not None:
                going.append((following[0], 0, following[1]))
        places = going
    return hits
