"""The prefill kernel of grouped-query attention, the kernel for lost blocks, and what `decode` shares with them.

The online softmax is flash attention's (`flash.kernel.softmax_step`): with s the logits of a tile of keys,

    m' = max(m, c rowmax s);  p = exp2(c s - m');  l' = a l + rowsum p;  o' = a o + p V,  a = exp2(m - m')

After the last tile a sink z, a logit in natural units without a value, joins the denominator once:

    m' = max(m, z log2(e));  l' = a l + exp2(z log2(e) - m');  o' = a o

c is |scale| log2(e), and log2(e) where a softcap or a bias makes s natural (the scale's sign goes to q). Then o / l and
lse = m ln 2 + ln l.

A workgroup walks its tiles of keys in three loops (`grid.key_tiles`): those that the left edge of the window cuts,
those that all rows see whole, without any mask, and those that the diagonal or the end of the keys cuts; under
`Config.one_loop` in one, with masks. A window is known when the kernel is compiled: without one, neither the first loop
nor anything that it needs is there. Under `Config.fixed_maximum` loops and lost blocks are as in `flash.kernel.walk`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from amdgpu.launch import vary_alike
from flash.grid import Plan, lost_program
from flash.kernel import (
    LARGE_EXPONENT,
    LARGEST_LOGIT,
    LOG2_E,
    Axis,
    Softmax,
    call,
    empty_softmax,
    exp2,
    feature_axes,
    finish,
    load_pairs,
    load_tile,
    logits,
    lost_blocks,
    power_of_two_from,
    product_precision,
    softmax_step,
    store_tile,
    walk,
    with_bias,
)
from gqa import grid
from gqa.grid import Problem


def logit_unit(p: Problem, scale: float) -> float:
    """c > 0: a weight is exp2(c s). Also at a scale of 0, since c times a hidden key's -inf has to stay -inf."""
    return LOG2_E if p.natural_logits else max(abs(scale) * LOG2_E, 2.0**-126)


def positions(p: Problem, ins):
    """(past, new) of the batch row: keys before this step, and valid new tokens."""
    past = ins["past"][0] if "past" in p.given else p.keys - p.queries
    return past, ins["lengths"][0] if "lengths" in p.given else p.queries


def signed(p: Problem, scale: float, q):
    """q, negated where the scale is negative and c has no place for its sign."""
    return q if p.natural_logits or scale >= 0 else [-x for x in q]


def seen(p: Problem, t, past, start, end):
    """Which keys of a tile, from key `start` on and before `end`, each row t sees: bool `[rows or 1, keys]`."""
    # Counted from the tile's start its keys are constants, and rows stand past + t - start keys behind it.
    j = lax.iota(jnp.int32, p.block_k)[None, :]
    first_of_row, end_of_row = grid.keys_of_row(p, past + t[:, None] - start, 0, end - start)
    return j < end_of_row if p.window is None else (j < end_of_row) & (j >= first_of_row)


def scores_of(p: Problem, ins, q, keys: Axis, features, bias, allowed, *, scale, target):
    """The logits of a tile of keys, -inf for hidden ones, and the keys for whose values they are.

    Args:
      q: query rows `[rows, part of K]` each.
      keys: where the tile's keys are; they exist and are finite, also in the place of hidden ones.
      bias: `[rows or 1, keys or 1]`, or None.
      allowed: which keys each row sees, bool `[rows or 1, keys]`; None: all rows see all of them.
    """
    # A cache of 16 bits under rows of 32 is widened, exactly.
    k = [load_tile(ins["k"], keys, part).astype(p.dtype) for part in features]
    s = logits(p, q, k, scale, product_precision(p.dtype, target))
    if bias is not None:
        s = with_bias(s, bias)
        allowed = allowed & (bias != -jnp.inf)
        # A key that the bias hides from all rows may hold anything.
        keys = Axis(keys.index, jnp.max(allowed.astype(jnp.int32), axis=0) > 0)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf), keys


def add_values(p: Problem, ins, state: Softmax, s, keys: Axis, values, *, scale, target, fixed=False) -> Softmax:
    """The state after one more tile of keys; `s` and `keys` from `scores_of`, `fixed` as in `softmax_step`."""
    v = [load_tile(ins["v"], keys, part).astype(p.dtype) for part in values]
    c, precision = logit_unit(p, scale), product_precision(p.dtype, target)
    return softmax_step(state, s, v, c=c, target=target, precision=precision, fixed=fixed)


def exponent_of_sink(sink, c: float):
    """`sink` `[rows]` -> the two factors of its exponent, as `exponent_of`. It stays finite, and NaN stays NaN."""
    # A minimum alone would drop NaN on AMD.
    sink = jnp.where(sink != sink, sink, jnp.minimum(sink, largest_sink(c)))
    unit = float(LOG2_E * (power_of_two_from(c) / c))
    return sink, jnp.where(jnp.abs(sink * LOG2_E) < LARGE_EXPONENT, LOG2_E, unit)


def with_sink(state: Softmax, sink, c: float, target) -> Softmax:
    """One more logit a row, in natural units, without a value; its weight is one fused multiply-add, as the keys'."""
    m, l, o = state
    sink, unit = exponent_of_sink(jnp.broadcast_to(sink, m.shape), c)
    m_new = jnp.maximum(m, sink * unit)
    a = exp2(m - m_new, target)
    return Softmax(m_new, a * l + exp2(sink * unit - m_new, target), [a[:, None] * x for x in o])


def largest_sink(c: float) -> float:
    """The largest whose exponent is finite. Beside a larger one nothing weighs anything."""
    return float(2 * LARGEST_LOGIT / max(LOG2_E * (power_of_two_from(c) / c), 2.0))


def results_of(state: Softmax, c: float, sink, there, target):
    """(output, lse) of rows with a `sink` each, or None; where not `there` (None: all are), 0 and -inf."""
    if sink is None:
        o, lse = finish(state, c)
    else:
        sink = sink.astype(jnp.float32)
        o, lse = finish(with_sink(state, sink, c, target), c)
        lse = jnp.where((sink > largest_sink(c)) | (state.l == 0.0), sink, lse)
    if there is not None:
        o, lse = [jnp.where(there[:, None], x, 0.0) for x in o], jnp.where(there, lse, -jnp.inf)
    return o, lse


def prefill_body(ins, outs, *, p: Problem, scale, target):
    """One tile of rows of one head."""
    _, _, tile = grid.prefill_program(pl.program_id(0), p)
    lost = attend_rows(ins, outs, tile, p=p, scale=scale, target=target, fixed_maximum=p.fixed_maximum)
    if p.fixed_maximum:
        outs["lost"][tile] = lost


def lost_blocks_body(ins, outs, *, p: Problem, scale, target):
    """Those of some tiles of rows of one head that are lost."""
    _, _, first = lost_program(pl.program_id(0), p.heads, p.row_tiles)
    compute = functools.partial(attend_rows, ins, outs, p=p, scale=scale, target=target, fixed_maximum=False)
    lost_blocks(ins, first, p.row_tiles, compute)


def attend_rows(ins, outs, tile, *, p: Problem, scale, target, fixed_maximum: bool):
    """Stores the results of a tile of rows. Returns whether they are lost (`walk`)."""
    past, new = positions(p, ins)
    first, end = grid.keys_of_tile(p, tile, past, new)
    features, values = (feature_axes(size, p.config.head_tile) for size in (p.key_size, p.value_size))
    t = tile * p.block_q + lax.iota(jnp.int32, p.block_q)
    ragged = p.queries % p.block_q > 0
    rows = stored = Axis(t, t < p.queries if ragged else None)
    if ragged or "lengths" in p.given:
        # In the place of a row that is not there stands the last one that is.
        rows = Axis(jnp.minimum(t, grid.greater(grid.lesser(new, p.queries) - 1, 0)), None)
    q = signed(p, scale, [load_tile(ins["q"], rows, part) for part in features])

    def keys_of(i):
        return i * p.block_k + lax.iota(jnp.int32, p.block_k)

    def scores(i, masked):
        j, bias, allowed = keys_of(i), None, None
        if masked:
            # In the place of a key that no row sees stands one that a row sees.
            j = jnp.minimum(j if p.window is None else jnp.maximum(j, first), end - 1)
            allowed = seen(p, rows.index, past, i * p.block_k, end)
            bias = None if p.bias is None else load_pairs(ins["bias"], rows, Axis(j, None)).astype(jnp.float32)
        return scores_of(p, ins, q, Axis(j, None), features, bias, allowed, scale=scale, target=target)

    def add(i, state, s, keys=None, fixed=False):
        keys = keys or Axis(keys_of(i), None)
        return add_values(p, ins, state, s, keys, values, scale=scale, target=target, fixed=fixed)

    cuts = grid.key_tiles(p, tile, past, new)
    c, sink, empty = logit_unit(p, scale), None, empty_softmax(p.block_q, values)
    if "sinks" in p.given:
        sink = ins["sinks"][0].astype(jnp.float32)
        if fixed_maximum:
            # The sink may stand above the fixed maximum by more than the weights can be scaled down in the end.
            factor, unit = exponent_of_sink(jnp.broadcast_to(sink, empty.m.shape), c)
            empty = empty._replace(m=jnp.maximum(empty.m, factor * unit))
    options = dict(fixed_maximum=fixed_maximum, scores_ahead=p.config.scores_ahead, target=target)
    state, lost = walk(scores, add, cuts, empty, **options)
    is_new = stored.index < new if "lengths" in p.given else None
    o, lse = results_of(state, c, sink, is_new, target)
    for part, x in zip(values, o, strict=True):
        store_tile(outs["o"], stored, part, x.astype(p.dtype))
    if p.returns_lse:
        plgpu.store(outs["lse"].at[stored.index], lse, mask=stored.mask)
    return lost


def launch(body, name: str, p: Problem, plan: Plan, operands: dict, interpret: bool):
    """One kernel, named after what it is; operands and results go by name."""
    name = name if p.window is None else f"{name}_window"
    warps, stages = p.num_warps, p.config.num_stages
    return call(body, name, plan, operands, num_warps=warps, num_stages=stages, interpret=interpret)


def prefill(p: Problem, operands: dict, *, scale: float, target: str | None):
    """One launch, or two where a maximum may be fixed.

    Args:
      p: the static facts.
      operands: q, k, v, and what p names: `past` `[1 or B]` and `lengths` `[B]` in int32, `sinks` `[H]`, `bias` with 4
        axes.
      scale: of the logits.
      target: "cuda", an AMD architecture id, "rocm" for an unknown one, or None for interpret mode.

    Returns:
      {"o": `[B, T, H, V]`, and "lse": `[B, T, H]` where `p.returns_lse`}
    """
    options = dict(p=p, scale=scale, target=target)
    body, lost = functools.partial(prefill_body, **options), functools.partial(lost_blocks_body, **options)
    operands, interpret = vary_alike(operands), target is None
    results = launch(body, "gqa_prefill", p, grid.plan_prefill(p), operands, interpret)
    if p.fixed_maximum:
        results = launch(lost, "gqa_lost_blocks", p, grid.plan_lost_blocks(p), operands | results, interpret)
    return results
