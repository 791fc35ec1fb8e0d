"""How attention is cut: the order of workgroups, the tiles of keys a query block visits, and one `plan` per kernel.

A head has Q = ceil(T / block_q) query blocks, and each is one workgroup: B H Q of them in a 1-D grid, the axis in
which a GPU hands out work. A GPU with X dies (XCDs), each with an L2 of its own, gives workgroup w to die w % X. So
the order, which workgroup does which (batch row, head, query block), decides which die reads which keys:

    block_first           every die reads the keys of H / X heads at a time
    head_first            all dies read the keys of the same head
    swizzled_head_first   each die has heads of its own (H % X == 0)
    kv_group_first        each die has KV heads of its own, with all query heads that share them; any shape

An order is a bijection, so results do not depend on it, to the last bit. The orders below are drawn for B = 1, H = 4
heads, G = 2 KV heads (heads 0 and 1 share one, 2 and 3 the other), Q = 2 and X = 2; even workgroups are on die 0.

The orders are integer arithmetic alone (+ - * // %): a test enumerates them with numpy arrays, a kernel hands them its
program id. What depends on lengths (`key_tiles`) returns jax arrays where a condition enters.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flash.tuning import Config


def block_first(w, B, H, G, Q, X):
    """(b, h, q) of workgroup w: heads fast, blocks slow.

          q=0  1
    h=0 |   0  4
    h=1 |   1  5
    h=2 |   2  6
    h=3 |   3  7
    """
    return w // (H * Q), w % H, w // H % Q


def head_first(w, B, H, G, Q, X):
    """(b, h, q) of workgroup w: blocks fast, heads slow. A head of Q >= X blocks is on all dies.

          q=0  1
    h=0 |   0  1
    h=1 |   2  3
    h=2 |   4  5
    h=3 |   6  7
    """
    return w // (H * Q), w // Q % H, w % Q


def swizzled_head_first(w, B, H, G, Q, X):
    """(b, h, q) of workgroup w: each die takes its H / X heads one after another; `check_order` says when it exists.

              q=0  1
        h=0 |   0  2
        h=1 |   4  6
        h=2 |   1  3
        h=3 |   5  7

    Choudhary et al., https://arxiv.org/abs/2511.02132.
    """
    b, w = w // (H * Q), w % (H * Q)
    return b, w % X * (H // X) + w // (X * Q), w % (X * Q) // X


def kv_group_first(w, B, H, G, Q, X):
    """(b, h, q) of workgroup w: each die takes KV heads of its own, one after another, all batch rows alike.

              q=0  1
        h=0 |   0  4
        h=1 |   2  6
        h=2 |   1  5
        h=3 |   3  7

    With r = H // G, KV head s = b G + g has r Q workgroups: its r heads for q = 0, then for q = 1, and so on. The dies
    share out the largest multiple of X of the B G KV heads; the workgroups of those left over take turns.
    """
    r = H // G
    shared = B * G // X * X
    left_over = B * G - shared
    s, turn = w // X // (r * Q) * X + w % X, w // X % (r * Q)
    if left_over:
        # 1 from the first workgroup of a left-over KV head on: B G < 2 `shared`, or `shared` is 0.
        late = w // (shared * r * Q) if shared else 1
        e = w - shared * r * Q
        s += late * (shared + e % left_over - s)
        turn += late * (e // left_over - turn)
    return s // G, s % G * r + turn % r, turn // r


ORDERS: dict[str, Callable] = {
    order.__name__: order for order in (block_first, head_first, swizzled_head_first, kv_group_first)
}


def check_order(order: str, heads: int, xcds: int) -> None:
    """Raises ValueError where an order does not exist for a shape."""
    if order == "swizzled_head_first" and heads % xcds:
        raise ValueError(f"order 'swizzled_head_first' needs H to be a multiple of X = {xcds} dies, got H = {heads}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of one call.

    `left` and `right`: row t sees the keys from t - left to t + right (None: no such limit; together at least 0),
    shifted by L - T under `bottom_right`, where L is the number of valid keys. `bias` and `mask` are the shapes of
    those operands, four axes that are each 1 or that of `[B, H, T, S]`. `given` names the other operands besides q, k
    and v: `q_segment_ids` and `kv_segment_ids`, `kv_lengths`, `query_lengths`, and factors that are not known at trace
    time, `logit_factor` and `value_factor`. `config.splits` None counts as 1: who builds the problem fills it in.
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
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    given: frozenset[str] = frozenset()
    returns_lse: bool = False

    @property
    def block_q(self) -> int:
        return min(self.config.block_q, tile_size(self.queries))

    @property
    def block_k(self) -> int:
        return min(self.config.block_k, tile_size(self.keys))

    @property
    def num_warps(self) -> int:
        return warps_of(self.config.num_warps, self.block_q)

    @property
    def blocks(self) -> int:
        """Q: query blocks of a head."""
        return -(-self.queries // self.block_q)

    @property
    def splits(self) -> int:
        return self.config.splits or 1

    @property
    def fixed_maximum(self) -> bool:
        """Whether there are tiles whose maximum may be fixed. fp16 has no room for weights that are larger than 1."""
        possible = self.dtype == jnp.bfloat16 and self.splits == 1 and not self.hides_keys
        return self.config.fixed_maximum and possible

    @property
    def hides_keys(self) -> bool:
        """Whether more than a row's position decides which keys it sees."""
        return self.bias is not None or self.mask is not None or "q_segment_ids" in self.given

    @property
    def natural_logits(self) -> bool:
        """Whether logits are scaled before the softmax, and not inside of its exponent."""
        return self.softcap is not None or self.bias is not None

    @property
    def product_dtype(self) -> jnp.dtype:
        """What operands of products are: e4m3 numbers are fp16 numbers, and fp16 keeps the weights' accuracy."""
        return jnp.dtype(jnp.float16) if self.dtype.itemsize == 1 else self.dtype

    @property
    def out_dtype(self) -> jnp.dtype:
        """e4m3 has three bits of mantissa, and the output has no scale of its own: it is bf16 there."""
        return jnp.dtype(jnp.bfloat16) if self.dtype.itemsize == 1 else self.dtype


def warps_of(most: int, rows: int) -> int:
    """A warp multiplies at least 16 rows; up to four share them: one alone would hold too many keys and values."""
    return min(most, max(4, rows // 16))


def tile_size(size: int) -> int:
    """The power of two >= 16 that a tile takes along an axis of `size`; the rest is masked."""
    return max(16, pl.next_power_of_2(size))


def parts(size: int, most: int) -> list[tuple[int, int]]:
    """(start, tile) of the tiles that cover `size` elements of a head, each a power of two from 16 to `most`.

    Where two tiles waste less than one, two: 192 is 128 + 64, and 160 is 128 + 32; but 112 is 128.
    """
    found, start = [], 0
    while start < size:
        rest = size - start
        tile = whole = tile_size(rest)
        if whole > 16 and whole // 2 + tile_size(rest - whole // 2) < whole:
            tile = whole // 2
        tile = min(tile, most)
        found.append((start, tile))
        start += tile
    return found


def group_of(head, heads, groups):
    """The KV head that serves `head`: H // G consecutive heads share one."""
    return head // (heads // groups)


def workgroup(program, p: Problem):
    """(b, h, query block, split) of a program; the splits of a block are neighbours in the order's q.

    Where later rows see more keys, later blocks come first: the short ones fill the gaps at the end.
    """
    order = ORDERS[p.config.order]
    b, h, q = order(program, p.batch, p.heads, p.groups, p.blocks * p.splits, p.xcds)
    block, split = q // p.splits, q % p.splits
    return b, h, block if p.right is None else p.blocks - 1 - block, split


def lesser(x, y):
    """min, of Python numbers (the result is one too) or of traced ones."""
    return min(x, y) if all(isinstance(n, int | float) for n in (x, y)) else jnp.minimum(x, y)


def greater(x, y):
    """max, likewise."""
    return max(x, y) if all(isinstance(n, int | float) for n in (x, y)) else jnp.maximum(x, y)


def either(condition, x, y):
    """x, or y, in int32. (Of two Python numbers a kernel would make booleans.)"""
    return jnp.where(condition, jnp.int32(x), jnp.int32(y))


def keys_of_row(p: Problem, t, length):
    """(first, end): row t sees only keys first <= j < end of a batch row with `length` valid keys; both grow with t."""
    shift = length - p.queries if p.bottom_right else 0
    first, end = 0, lesser(length, p.keys)
    if p.left is not None:
        first = greater(t + shift - p.left, 0)
    if p.right is not None:
        end = lesser(end, t + shift + p.right + 1)
    return first, end


def keys_of_block(p: Problem, block, length, rows):
    """(first, end): the keys that any row of a query block sees; rows from `rows` on do not count."""
    t = block * p.block_q
    first, _ = keys_of_row(p, t, length)
    _, end = keys_of_row(p, lesser(t + p.block_q, rows) - 1, length)
    return first, end


def key_tiles(p: Problem, block, split, length, rows):
    """The tiles of keys that a workgroup visits: (start, free start, free stop, stop).

    Tiles from `free start` to `free stop` are seen whole by all rows and need no mask; those before are cut by the left
    edge of a window, those after by the diagonal or by the end of the keys:

        keys            0 1 2 3 | 4 5 6 7 | 8 9 . . |
        first row         x x x   x x x x
        second row          x x   x x x x   x
        third row             x   x x x x   x x
                        masked  | free    | masked  |  never visited

    Where a mask, a bias or segments hide keys, no tile is free. Split i of n takes the i-th share of all tiles.
    """
    t = block * p.block_q
    first, end = keys_of_block(p, block, length, rows)
    first_of_last, _ = keys_of_row(p, lesser(t + p.block_q, rows) - 1, length)
    _, end_of_first = keys_of_row(p, t, length)
    start = first // p.block_k
    stop = greater(-(-end // p.block_k), start)
    if p.left is not None:
        stop = either(first < end, stop, start)
    if "query_lengths" in p.given:
        stop = either(t < rows, stop, start)
    if p.splits > 1:
        share = -(-(stop - start) // p.splits)
        start = lesser(start + split * share, stop)
        stop = lesser(start + share, stop)
    if p.hides_keys:
        return start, stop, stop, stop
    free_start, free_stop = start, stop
    if p.left is not None:
        free_start = lesser(greater(-(-first_of_last // p.block_k), start), stop)
    if p.right is not None or "kv_lengths" in p.given or p.keys % p.block_k:
        free_stop = greater(lesser(end_of_first // p.block_k, stop), free_start)
    return start, free_start, free_stop, stop


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `pl.pallas_call` is told about one kernel; operands and results go by name.

    `updated` are operands that are results too, written in their place.
    """

    grid: tuple[int, ...]
    in_specs: dict[str, pl.BlockSpec]
    out_specs: dict[str, pl.BlockSpec]
    out_shape: dict[str, jax.ShapeDtypeStruct]
    updated: tuple[str, ...] = ()


def plan_forward(p: Problem) -> Plan:
    """One workgroup for each (b, h, query block): reads its rows of q, all keys and values of its KV head."""

    def head(program):
        return workgroup(program, p)[:2]

    results = result_shapes(p, p.out_dtype)
    plan = Plan((p.batch * p.heads * p.blocks,), _operand_specs(p, head), _result_specs(p, results, head), results)
    return with_lost(plan, head, p.blocks) if p.fixed_maximum else plan


def plan_lost_blocks(p: Problem) -> Plan:
    """One workgroup for each (b, h, some query blocks): computes those of them that are lost, in place."""

    def head(program):
        return lost_program(program, p.heads, p.blocks)[:2]

    results = result_shapes(p, p.out_dtype)
    specs = _operand_specs(p, head), _result_specs(p, results, head)
    return plan_of_lost(*specs, results, head, p.blocks)


# Query blocks that a workgroup for lost blocks looks after: most often it finds none.
LOST_BLOCKS = 16


def lost_program(program, heads, blocks):
    """(b, h, first query block) of a workgroup for lost blocks."""
    n = -(-blocks // LOST_BLOCKS)
    return program // (heads * n), program // n % heads, program % n * LOST_BLOCKS


def with_lost(plan: Plan, head: Callable, blocks: int) -> Plan:
    """`plan` with one more result, `lost` `[B, H, Q]`: 1 where a query block is lost, else 0. `head`: (b, h)."""
    batch, _, heads, _ = plan.out_shape["o"].shape
    lost = jax.ShapeDtypeStruct((batch, heads, blocks), jnp.int32)
    out_specs = plan.out_specs | {"lost": _lost_spec(head, blocks)}
    return dataclasses.replace(plan, out_specs=out_specs, out_shape=plan.out_shape | {"lost": lost})


def plan_of_lost(in_specs: dict, out_specs: dict, out_shape: dict, head: Callable, blocks: int) -> Plan:
    """The workgroups of `lost_program`, which read `lost` and write results in their place."""
    batch, _, heads, _ = out_shape["o"].shape
    in_specs = in_specs | out_specs | {"lost": _lost_spec(head, blocks)}
    return Plan((batch * heads * -(-blocks // LOST_BLOCKS),), in_specs, out_specs, out_shape, updated=tuple(out_specs))


def _lost_spec(head: Callable, blocks: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, blocks), lambda program: (*head(program), 0))


def plan_split_forward(p: Problem) -> Plan:
    """One workgroup for each (b, h, query block, split): writes the split's m, l and o."""

    def of_split(shape):
        def place(program):
            b, h, _, split = workgroup(program, p)
            return split, b, 0, h, *(0,) * (len(shape) - 4)

        return pl.BlockSpec((None, None, p.queries, None, *shape[4:]), place)

    buffers = partials(p)
    return Plan(
        grid=(p.batch * p.heads * p.blocks * p.splits,),
        in_specs=_operand_specs(p, lambda program: workgroup(program, p)[:2]),
        out_specs={name: of_split(buffer.shape) for name, buffer in buffers.items()},
        out_shape=buffers,
    )


def plan_merge(p: Problem) -> Plan:
    """One workgroup for each (b, h, query block): reads m, l and o of all splits."""

    def of_all_splits(shape):
        def place(program):
            b, h, _ = merge_program(program, p)
            return 0, b, 0, h, *(0,) * (len(shape) - 4)

        return pl.BlockSpec((p.splits, None, p.queries, None, *shape[4:]), place)

    results = result_shapes(p, p.out_dtype)
    return Plan(
        grid=(p.batch * p.heads * p.blocks,),
        in_specs={name: of_all_splits(buffer.shape) for name, buffer in partials(p).items()} | _factor_specs(p),
        out_specs=_result_specs(p, results, lambda program: merge_program(program, p)[:2]),
        out_shape=results,
    )


def merge_program(program, p: Problem):
    """(b, h, query block) of a program of the merge."""
    return program // (p.heads * p.blocks), program // p.blocks % p.heads, program % p.blocks


def partials(p: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """What each split leaves for the merge."""
    return softmax_buffers((p.splits, p.batch, p.queries, p.heads), p.value_size)


def softmax_buffers(rows: tuple[int, ...], value_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """An online softmax over some of the keys, in fp32: maximum, sum and output."""
    shapes = {"m": rows, "l": rows, "o": (*rows, value_size)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def result_shapes(p, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """o in `dtype`, and lse where p asks for it."""
    rows = (p.batch, p.queries, p.heads)
    results = {"o": jax.ShapeDtypeStruct((*rows, p.value_size), dtype)}
    if p.returns_lse:
        results["lse"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    return results


def _result_specs(p: Problem, results: dict, place: Callable) -> dict[str, pl.BlockSpec]:
    """All rows of one head, which `place` finds for a program as (b, h)."""

    def spec(shape):
        def head(program):
            b, h = place(program)
            return b, 0, h, *(0,) * (len(shape) - 3)

        return pl.BlockSpec((None, p.queries, None, *shape[3:]), head)

    return {name: spec(result.shape) for name, result in results.items()}


def _operand_specs(p: Problem, place: Callable) -> dict[str, pl.BlockSpec]:
    """What a workgroup of the forward kernels may read: everything of its batch row and head, `place(program)`."""

    def head(program):
        b, h = place(program)
        return b, 0, h, 0

    def kv_head(program):
        b, h = place(program)
        return b, 0, group_of(h, p.heads, p.groups), 0

    def batch_row(program):
        return place(program)[:1]

    def logits(shape):
        def of_program(program):
            b, h = place(program)
            return b if shape[0] > 1 else 0, h if shape[1] > 1 else 0, 0, 0

        return pl.BlockSpec((None, None, *shape[2:]), of_program)

    specs = {
        "q": pl.BlockSpec((None, p.queries, None, p.key_size), head),
        "k": pl.BlockSpec((None, p.keys, None, p.key_size), kv_head),
        "v": pl.BlockSpec((None, p.keys, None, p.value_size), kv_head),
    }
    if p.bias is not None:
        specs["bias"] = logits(p.bias)
    if p.mask is not None:
        specs["mask"] = logits(p.mask)
    optional = {
        "q_segment_ids": pl.BlockSpec((None, p.queries), lambda program: (*batch_row(program), 0)),
        "kv_segment_ids": pl.BlockSpec((None, p.keys), lambda program: (*batch_row(program), 0)),
        "kv_lengths": pl.BlockSpec((1,), batch_row),
        "query_lengths": pl.BlockSpec((1,), batch_row),
    }
    return specs | {name: spec for name, spec in optional.items() if name in p.given} | _factor_specs(p)


def _factor_specs(p: Problem) -> dict[str, pl.BlockSpec]:
    names = ("logit_factor", "value_factor")
    return {name: pl.BlockSpec((1,), lambda program: (0,)) for name in names if name in p.given}
