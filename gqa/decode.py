"""The rows kernel of grouped-query attention: few query rows, many keys; and the merge of blocks of keys.

All query rows of a KV group are the rows of one tile, so each key is read once and scored once for each row, whatever
the number of heads. One workgroup walks the keys of one block with the online softmax: 2048 keys, or fewer where that
would leave most of the device idle (`gqa.tuning.default_block_keys`). Where one block holds all keys that a row may
see, it writes the results. Else each block leaves its m, l and o in fp32, and per row the merge puts them together,
where the sink joins:

    M = max_i m_i;  w_i = exp2(m_i - M);  l = sum_i w_i l_i;  o = sum_i w_i o_i

A block without keys has l = 0 and o = 0 and weighs nothing; it reads no key. This is flash-decoding,
https://pytorch.org/blog/flash-decoding/.

The kernel is bound by memory: its loop has one form, masked, so that one pipeline of loads runs over all of a block.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from amdgpu.launch import vary_alike
from flash.kernel import Axis, Softmax, empty_softmax, exp2, feature_axes, load_tile, store_tile
from gqa import grid
from gqa.grid import Problem
from gqa.kernel import add_values, launch, logit_unit, positions, results_of, scores_of, seen, signed

# Elements of the partial outputs that the merge holds at once.
MERGE_TILE = 8192


def load_bias(ref, heads, t, keys: Axis):
    """The tile of packed rows of an array `[heads, t, keys]` that may have size 1 along an axis."""
    first = jnp.zeros(1, jnp.int32)
    h, t, j = (first if n == 1 else i for n, i in zip(ref.shape, (heads, t, keys.index), strict=True))
    return plgpu.load(ref.at[h[:, None], t[:, None], j[None, :]]).astype(jnp.float32)


def rows_body(ins, outs, *, p: Problem, scale, target):
    """One tile of the packed rows of a KV group over one block of keys."""
    _, _, tile, block = grid.rows_program(pl.program_id(0), p)
    past, new = positions(p, ins)
    features, values = (feature_axes(size, p.config.head_tile) for size in (p.key_size, p.value_size))
    r = p.heads_per_group
    stored = tile * p.block_q + lax.iota(jnp.int32, p.block_q)
    mask = stored < p.rows if p.rows % p.block_q else None
    # In the place of a row that is not there stands the last one that is.
    i = jnp.minimum(stored, grid.greater(grid.lesser(new, p.queries) * r - 1, 0))
    heads, t = Axis(i % r, None), i // r
    q = signed(p, scale, [load_tile(ins["q"], heads, part, (t[:, None],)) for part in features])

    first, end = grid.keys_of_block(p, block, tile, past, new)

    def step(n, state):
        start = first + n * p.block_k
        j = start + lax.iota(jnp.int32, p.block_k)
        keys = Axis(jnp.minimum(j, end - 1), None)
        # Rows of one token all see the keys of the block.
        allowed = (j < end)[None, :] if p.queries == 1 else seen(p, t, past, start, end)
        bias = None if p.bias is None else load_bias(ins["bias"], heads.index, t, keys)
        s, keys = scores_of(p, ins, q, keys, features, bias, allowed, scale=scale, target=target)
        return add_values(p, ins, state, s, keys, values, scale=scale, target=target)

    c = logit_unit(p, scale)
    tiles = -(-grid.greater(end - first, 0) // p.block_k)
    state = lax.fori_loop(0, tiles, step, empty_softmax(p.block_q, values))

    if p.key_blocks > 1:
        for name in ("m", "l"):
            plgpu.store(outs[name].at[stored], getattr(state, name), mask=mask)
        for part, o in zip(values, state.o, strict=True):
            store_tile(outs["o"], Axis(stored, mask), part, o)
        return
    heads, t = Axis(stored % r, mask), stored // r
    sink = plgpu.load(ins["sinks"].at[i % r]) if "sinks" in p.given else None
    o, lse = results_of(state, c, sink, t < new if "lengths" in p.given else None, target)
    for part, x in zip(values, o, strict=True):
        store_tile(outs["o"], heads, part, x.astype(p.dtype), (t[:, None],))
    if p.returns_lse:
        plgpu.store(outs["lse"].at[t, heads.index], lse, mask=mask)


def merge_body(ins, outs, *, p: Problem, scale, target):
    """One row: m, l and o of all blocks to results."""
    _, _, row = grid.merge_program(pl.program_id(0), p)
    c = logit_unit(p, scale)
    values = feature_axes(p.value_size, 256)
    width = sum(part.index.size for part in values)
    tile = min(pl.next_power_of_2(p.key_blocks), max(MERGE_TILE // pl.next_power_of_2(width), 1))

    def step(n, state):
        i = n * tile + lax.iota(jnp.int32, tile)
        there = i < p.key_blocks
        blocks = Axis(i, there if p.key_blocks % tile else None)
        m = plgpu.load(ins["m"].at[i], mask=there, other=-jnp.inf)
        l = plgpu.load(ins["l"].at[i], mask=there, other=0.0)
        m_new = jnp.maximum(state.m, jnp.max(m, axis=0, keepdims=True))
        a, w = exp2(state.m - m_new, target), exp2(m - m_new, target)
        o = [
            a[:, None] * x + jnp.sum(w[:, None] * load_tile(ins["o"], blocks, part), axis=0, keepdims=True)
            for x, part in zip(state.o, values, strict=True)
        ]
        return Softmax(m_new, a * state.l + jnp.sum(w * l, axis=0, keepdims=True), o)

    state, steps = empty_softmax(1, values), -(-p.key_blocks // tile)
    state = step(0, state) if steps == 1 else lax.fori_loop(0, steps, step, state)
    first = jnp.zeros(1, jnp.int32)
    sink = plgpu.load(ins["sinks"].at[first]) if "sinks" in p.given else None
    there = jnp.broadcast_to(row // p.heads_per_group < ins["lengths"][0], 1) if "lengths" in p.given else None
    o, lse = results_of(state, c, sink, there, target)
    for part, x in zip(values, o, strict=True):
        store_tile(outs["o"], Axis(first, None), part, x.astype(p.dtype))
    if p.returns_lse:
        plgpu.store(outs["lse"].at[first], lse)


def rows(p: Problem, operands: dict, *, scale: float, target: str | None):
    """One launch, or two where the keys of a KV group are more than those of a block. As `gqa.kernel.prefill`."""
    operands = vary_alike(operands)
    body, merge = (functools.partial(f, p=p, scale=scale, target=target) for f in (rows_body, merge_body))
    interpret = target is None
    if p.key_blocks == 1:
        return launch(body, "gqa_rows", p, grid.plan_rows(p), operands, interpret)
    parts = launch(body, "gqa_rows_split", p, grid.plan_rows(p), operands, interpret)
    return launch(merge, "gqa_rows_merge", p, grid.plan_merge(p), operands | parts, interpret)
