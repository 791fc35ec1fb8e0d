"""How grouped-query attention is cut: the tiles of keys that query rows visit, and one `plan` per kernel.

Row t of batch row b stands at position p = past_b + t and sees the keys from max(p - window + 1, 0) up to p, all of
them below L_b = past_b + T_b. past_b and T_b are known at run time only.

Two ways to cut, with r = H // G heads to a KV group:

    prefill   a workgroup has block_q rows of one head and visits every tile of keys that they see. Workgroups come in
              the order `kv_group_first`: all heads of a KV group on one die, which reads their keys once.
    rows      a workgroup has the r T rows of a KV group, packed (row i is head i % r at t = i // r), and the keys of
              one block. Where there are several blocks, each leaves m, l and o, and a merge follows.

Blocks are counted from the first key that a row may see, so a window of 128 keys is one block wherever it stands:

    keys      0 1 2 3 4 5 6 7 8 9          block_keys = 4, past = 6, T = 2, window = 4
    t = 0           x x x x
    t = 1             x x x x
    block           0 0 0 0 1

Functions of positions are integer arithmetic: tests call them with ints, kernels with what they have read.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flash.grid import (
    Plan,
    either,
    greater,
    group_of,
    kv_group_first,
    lesser,
    lost_program,
    plan_of_lost,
    result_shapes,
    softmax_buffers,
    tile_size,
    warps_of,
    with_lost,
)
from gqa.tuning import Config


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of one call.

    `packed` says which of the two kernels it is: rows, or prefill. `bias` is the shape of that operand, four axes that
    are each 1 or that of `[B, H, T, S]`. `given` names the other operands besides q, k and v: `past` (default S - T),
    `lengths` (default T), `sinks`; `one_past`: past is one number for all batch rows. `heads_first`: k and v are
    `[B, G, S, size]`, not `[B, S, G, size]`.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    key_size: int
    value_size: int
    dtype: jnp.dtype
    config: Config
    xcds: int = 1
    packed: bool = False
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    given: frozenset[str] = frozenset()
    one_past: bool = False
    heads_first: bool = False
    returns_lse: bool = False

    @property
    def heads_per_group(self) -> int:
        """r."""
        return self.heads // self.groups

    @property
    def rows(self) -> int:
        """Query rows that are cut into tiles: of one head, or of a KV group."""
        return self.queries * (self.heads_per_group if self.packed else 1)

    @property
    def block_q(self) -> int:
        return min(self.config.block_q, tile_size(self.rows))

    @property
    def block_k(self) -> int:
        return min(self.config.block_k, tile_size(self.reach))

    @property
    def num_warps(self) -> int:
        """In the prefill kernel as flash attention's; in the rows kernel warps may share out the keys."""
        return self.config.num_warps if self.packed else warps_of(self.config.num_warps, self.block_q)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.block_q)

    @property
    def reach(self) -> int:
        """The most keys that the T rows of a head see together."""
        return reach(self.keys, self.queries, self.window)

    @property
    def key_blocks(self) -> int:
        """Workgroups that share the keys of a KV group in the rows kernel."""
        return -(-self.reach // self.config.block_keys)

    @property
    def fixed_maximum(self) -> bool:
        """As in `flash.grid.Problem`."""
        return self.config.fixed_maximum and self.dtype == jnp.bfloat16 and self.bias is None

    @property
    def natural_logits(self) -> bool:
        """Whether logits are scaled before the softmax, and not inside of its exponent."""
        return self.softcap is not None or self.bias is not None


def reach(keys: int, queries: int, window: int | None) -> int:
    """The most keys that the rows of a head see together."""
    return keys if window is None else min(keys, window + queries - 1)


def keys_of_row(p: Problem, t, past, new):
    """(first, end): row t sees the keys first <= j < end, for `past` keys and `new` tokens; both grow with t.

    first is negative where the window reaches beyond the first key.
    """
    position = past + t
    first = 0 if p.window is None else position - p.window + 1
    end = lesser(past + new, p.keys)
    return first, lesser(end, position + 1) if p.causal else end


def span_of_rows(p: Problem, tile, new):
    """(first, last) of the t of a tile's rows; rows of tokens from `new` on do not count. last < first: none does."""
    r = p.heads_per_group if p.packed else 1
    i = tile * p.block_q
    return i // r, (lesser(i + p.block_q, lesser(new, p.queries) * r) - 1) // r


def keys_of_tile(p: Problem, tile, past, new):
    """(first, end): the keys that any row of a tile of rows sees."""
    first_t, last_t = span_of_rows(p, tile, new)
    return greater(keys_of_row(p, first_t, past, new)[0], 0), keys_of_row(p, last_t, past, new)[1]


def key_tiles(p: Problem, tile, past, new):
    """The tiles of keys that a workgroup of the prefill kernel visits: (start, free start, free stop, stop).

    Tiles from `free start` to `free stop` are seen whole by all rows and need no mask; those before are cut by the left
    edge of the window, those after by the diagonal or by the end of the keys. No tile is free beside a bias, which may
    hide any key, or with `Config.one_loop`.
    """
    first_t, last_t = span_of_rows(p, tile, new)
    first, end = keys_of_tile(p, tile, past, new)
    _, end_of_first = keys_of_row(p, first_t, past, new)
    first_of_last, _ = keys_of_row(p, last_t, past, new)
    start = first // p.block_k
    stop = greater(-(-end // p.block_k), start)
    if p.window is not None:
        stop = either(first < end, stop, start)
    if "lengths" in p.given:
        stop = either(first_t <= last_t, stop, start)
    if p.bias is not None or p.config.one_loop:
        return start, stop, stop, stop
    free_start, free_stop = start, stop
    if p.window is not None:
        free_start = lesser(greater(-(-first_of_last // p.block_k), start), stop)
    if p.causal or p.given & {"past", "lengths"} or p.keys % p.block_k:
        free_stop = greater(lesser(end_of_first // p.block_k, stop), free_start)
    return start, free_start, free_stop, stop


def tiles_visited(p: Problem, past: int, new: int) -> tuple[int, int]:
    """(visited, masked): tiles of keys that one head's workgroups visit, and those of them that need a mask."""
    cuts = [[int(x) for x in key_tiles(p, tile, past, new)] for tile in range(p.row_tiles)]
    visited = sum(stop - start for start, _, _, stop in cuts)
    return visited, visited - sum(free_stop - free_start for _, free_start, free_stop, _ in cuts)


def keys_of_block(p: Problem, block, tile, past, new):
    """(first, end): the keys that a workgroup of the rows kernel visits; none where first >= end."""
    # The first key that row 0 sees.
    origin = greater(keys_of_row(p, 0, past, new)[0], 0)
    first, end = keys_of_tile(p, tile, past, new)
    if "lengths" in p.given:
        first_t, last_t = span_of_rows(p, tile, new)
        end = either(first_t <= last_t, end, 0)
    start = origin + block * p.config.block_keys
    return greater(first, start), lesser(end, start + p.config.block_keys)


def prefill_program(program, p: Problem):
    """(b, h, tile of rows) of a program; where later rows see more keys, later tiles come first."""
    b, h, tile = kv_group_first(program, p.batch, p.heads, p.groups, p.row_tiles, p.xcds)
    return b, h, p.row_tiles - 1 - tile if p.causal else tile


def rows_program(program, p: Problem):
    """(b, g, tile of rows, block of keys) of a program. KV heads of one block are neighbours, as in `[B, S, G, K]`."""
    g, w = program % p.groups, program // p.groups
    tile, w = w % p.row_tiles, w // p.row_tiles
    return w // p.key_blocks, g, tile, w % p.key_blocks


def merge_program(program, p: Problem):
    """(b, g, row) of a program of the merge."""
    return program // (p.groups * p.rows), program // p.rows % p.groups, program % p.rows


def plan_prefill(p: Problem) -> Plan:
    """One workgroup for each (b, h, tile of rows): reads its rows of q, and keys and values of its KV head."""

    def head(program):
        return prefill_program(program, p)[:2]

    plan = Plan((p.batch * p.heads * p.row_tiles,), *_specs_of_heads(p, head), result_shapes(p, p.dtype))
    return with_lost(plan, head, p.row_tiles) if p.fixed_maximum else plan


def plan_lost_blocks(p: Problem) -> Plan:
    """One workgroup for each (b, h, some tiles of rows): computes those of them that are lost, in place."""

    def head(program):
        return lost_program(program, p.heads, p.row_tiles)[:2]

    return plan_of_lost(*_specs_of_heads(p, head), result_shapes(p, p.dtype), head, p.row_tiles)


def _specs_of_heads(p: Problem, place: Callable) -> tuple[dict[str, pl.BlockSpec], dict[str, pl.BlockSpec]]:
    """What a program reads, and what it writes: of its batch row and head, `place(program)`."""

    def head(program):
        b, h = place(program)
        return b, 0, h, 0

    def kv_head(program):
        b, h = place(program)
        return b, group_of(h, p.heads, p.groups)

    def logits(program):
        b, h = place(program)
        return b, h, 0, 0

    def batch_row(program):
        return place(program)[:1]

    specs = {"q": pl.BlockSpec((None, p.queries, None, p.key_size), head)} | _cache_specs(p, kv_head)
    if p.bias is not None:
        specs["bias"] = _bias_spec(p.bias, None, logits)
    if "sinks" in p.given:
        specs["sinks"] = pl.BlockSpec((1,), lambda program: place(program)[1:2])
    out_specs = {"o": pl.BlockSpec((None, p.queries, None, p.value_size), head)}
    if p.returns_lse:
        out_specs["lse"] = pl.BlockSpec((None, p.queries, None), lambda program: head(program)[:3])
    return specs | _position_specs(p, batch_row), out_specs


def plan_rows(p: Problem) -> Plan:
    """One workgroup for each (b, g, tile of rows, block of keys): writes results, or m, l and o of its block."""
    r = p.heads_per_group

    def group(program):
        b, g, _, _ = rows_program(program, p)
        return b, 0, g, 0

    def kv_head(program):
        return rows_program(program, p)[:2]

    def logits(program):
        b, g, _, _ = rows_program(program, p)
        return b, g, 0, 0

    def batch_row(program):
        return rows_program(program, p)[:1]

    specs = {"q": pl.BlockSpec((None, p.queries, r, p.key_size), group)} | _cache_specs(p, kv_head)
    specs |= _position_specs(p, batch_row)
    if p.bias is not None:
        specs["bias"] = _bias_spec(p.bias, r, logits)
    grid = (p.batch * p.groups * p.row_tiles * p.key_blocks,)
    if p.key_blocks > 1:

        def of_block(shape):
            def place(program):
                b, g, _, block = rows_program(program, p)
                return b, g, block, *(0,) * (len(shape) - 3)

            return pl.BlockSpec((None, None, None, *shape[3:]), place)

        buffers = partials(p)
        return Plan(grid, specs, {name: of_block(buffer.shape) for name, buffer in buffers.items()}, buffers)
    if "sinks" in p.given:
        specs["sinks"] = pl.BlockSpec((r,), lambda program: rows_program(program, p)[1:2])
    out_specs = {"o": pl.BlockSpec((None, p.queries, r, p.value_size), group)}
    if p.returns_lse:
        out_specs["lse"] = pl.BlockSpec((None, p.queries, r), lambda program: group(program)[:3])
    return Plan(grid, specs, out_specs, result_shapes(p, p.dtype))


def plan_merge(p: Problem) -> Plan:
    """One workgroup for each (b, g, row): reads its m, l and o of all blocks."""
    r = p.heads_per_group

    def of_row(shape):
        def place(program):
            b, g, row = merge_program(program, p)
            return b, g, 0, row, *(0,) * (len(shape) - 4)

        return pl.BlockSpec((None, None, p.key_blocks, None, *shape[4:]), place)

    def head(program):
        b, g, row = merge_program(program, p)
        return b, row // r, g * r + row % r

    specs = {name: of_row(buffer.shape) for name, buffer in partials(p).items()}
    if "lengths" in p.given:
        specs["lengths"] = pl.BlockSpec((1,), lambda program: merge_program(program, p)[:1])
    if "sinks" in p.given:
        specs["sinks"] = pl.BlockSpec((1,), lambda program: head(program)[2:])
    out_specs = {"o": pl.BlockSpec((None, None, 1, p.value_size), lambda program: (*head(program), 0))}
    if p.returns_lse:
        out_specs["lse"] = pl.BlockSpec((None, None, 1), head)
    return Plan((p.batch * p.groups * p.rows,), specs, out_specs, result_shapes(p, p.dtype))


def partials(p: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """What each block of keys leaves for the merge, for the packed rows."""
    return softmax_buffers((p.batch, p.groups, p.key_blocks, p.rows), p.value_size)


def _cache_specs(p: Problem, place: Callable) -> dict[str, pl.BlockSpec]:
    """All keys and values of one KV head, which `place` finds for a program as (b, g)."""

    def spec(size):
        if p.heads_first:
            return pl.BlockSpec((None, None, p.keys, size), lambda program: (*place(program), 0, 0))

        def tokens_first(program):
            b, g = place(program)
            return b, 0, g, 0

        return pl.BlockSpec((None, p.keys, None, size), tokens_first)

    return {"k": spec(p.key_size), "v": spec(p.value_size)}


def _bias_spec(shape, heads: int | None, place: Callable) -> pl.BlockSpec:
    """The bias of one head (None) or of a group of `heads`; an axis of size 1 serves all."""

    def of_program(program):
        return tuple(i if n > 1 else 0 for i, n in zip(place(program), shape, strict=True))

    return pl.BlockSpec((None, min(heads, shape[1]) if heads else None, *shape[2:]), of_program)


def _position_specs(p: Problem, batch_row: Callable) -> dict[str, pl.BlockSpec]:
    specs = {
        "past": pl.BlockSpec((1,), lambda program: (0,) if p.one_past else batch_row(program)),
        "lengths": pl.BlockSpec((1,), batch_row),
    }
    return {name: spec for name, spec in specs.items() if name in p.given}
