"""Flash attention: the forward kernel, its split form and the merge of splits, and the kernel for lost blocks.

For a block of query rows, tile after tile of keys, with s the logits of a tile and V its values,

    m' = max(m, c rowmax s);  p = exp2(c s - m');  l' = a l + rowsum p;  o' = a o + p V,  a = exp2(m - m')

from m = -3.4e38, l = 0, o = 0; in the end o / l, and lse = (m + log2 l) / log2(e). This is the online softmax
of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867, as FlashAttention-2 runs it,
https://arxiv.org/abs/2307.08691.

Plain logits are q.k, unscaled, and c is scale log2(e): the scale costs nothing of its own. With a softcap or a bias, s
is scaled, capped and biased first, and c is log2(e).

A hidden key has s = -inf. m is finite from the start, so rows without a key so far have p = exp2(-inf) = 0 and a = 1.
Values that no row of the block sees are not read, so 0 times NaN does not arise.

Most tiles may leave m alone (`Config.fixed_maximum`). A block where that overflows is lost: the second
kernel computes it.

m, l, o and s are fp32; p is rounded to the dtype of V for its product. Heads whose size is no power of two are walked
in parts (`grid.parts`), so q, k, v and o are lists of tiles.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from amdgpu import arch
from amdgpu.launch import vary_alike
from flash import grid
from flash.grid import Problem

LOG2_E = math.log2(math.e)
Precision = lax.Precision | lax.DotAlgorithmPreset
# Where c |m| is larger, its rounding error may reach 2^4, and more than a weight of 2^16 in fp16 can take.
LARGE_EXPONENT = 2.0**28
# Where a maximum starts: finite, so that a row without a key so far has weights exp2(-inf - m) = 0.
LOWEST_EXPONENT = float(jnp.finfo(jnp.float32).min)
# A sum of weights relative to a maximum that is not moved. Of bf16 values up to 2^67 the weighted sum is finite too.
LARGEST_SUM = 2.0**60
# What a bias adds up to stays below: twice as much is finite, and above LOWEST_EXPONENT.
LARGEST_LOGIT = 1.7e38


class Axis(NamedTuple):
    """One axis of a tile: where its elements are, and which of them exist (None: all)."""

    index: jax.Array
    mask: jax.Array | None


def feature_axes(size, most) -> list[Axis]:
    """The `size` elements of a head, in parts."""
    found = []
    for start, tile in grid.parts(size, most):
        index = start + lax.iota(jnp.int32, tile)
        found.append(Axis(index, index < size if start + tile > size else None))
    return found


def tile_mask(rows: Axis, columns: Axis):
    """The mask of a 2-D tile, None where all of it exists."""
    views = [m[i] for m, i in ((rows.mask, (..., None)), (columns.mask, (None, ...))) if m is not None]
    if not views:
        return None
    mask = views[0] if len(views) == 1 else views[0] & views[1]
    return jnp.broadcast_to(mask, (rows.index.size, columns.index.size))


def load_tile(ref, rows: Axis, columns: Axis, at=()):
    """The tile ref[*at, rows, columns]; 0 where it does not exist."""
    ref, mask = ref.at[*at, rows.index[:, None], columns.index[None, :]], tile_mask(rows, columns)
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)


def load_pairs(ref, rows: Axis, columns: Axis):
    """The tile ref[rows, columns] of an array that may have size 1 along an axis, and so has the tile."""
    first = jnp.zeros(1, jnp.int32)
    i, j = (first if n == 1 else a.index for n, a in zip(ref.shape, (rows, columns), strict=True))
    return plgpu.load(ref.at[i[:, None], j[None, :]])


def store_tile(ref, rows: Axis, columns: Axis, value, at=()):
    plgpu.store(ref.at[*at, rows.index[:, None], columns.index[None, :]], value, mask=tile_mask(rows, columns))


def dot(x, y, precision: Precision = lax.Precision.DEFAULT):
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision, preferred_element_type=jnp.float32)


def chip_of(target: str | None) -> arch.Arch | None:
    """The facts of an AMD chip that is known."""
    return arch.facts(target) if target in arch.KNOWN else None


def inline_asm(asm: str, constraints: str, pack: int, *args):
    """What `asm` makes of each element of `args`, alike in shape and dtype, `pack` at a time."""
    shape = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
    (y,) = plgpu.elementwise_inline_asm(asm, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[shape])
    return y


def exp2(x, target):
    """2 ** x, fp32; by one instruction where it is known how to write it, which makes results below 2^-126 zero.

    What compilers make of `jnp.exp2` spends six more on those results.
    """
    chip = chip_of(target)
    if target == "cuda":
        asm, constraints, pack = "ex2.approx.ftz.f32 $0, $1;", "=f,f", 1
    elif chip and chip.exp2_wait_states is not None:
        # Eight at a time, in place. Of what follows the compiler does not see that it has to wait.
        pack = 8 if x.ndim == 2 else 1
        waits = ["s_nop 0"] * chip.exp2_wait_states
        asm = "\n".join([f"v_exp_f32 ${i}, ${i}" for i in range(pack)] + waits)
        constraints = ",".join(["=v"] * pack + [str(i) for i in range(pack)])
    else:
        return jnp.exp2(x)
    return inline_asm(asm, constraints, pack, x)


def weights(c, s, m, target):
    """exp2(c s - m), fp32, by one fused multiply-add: c s is not rounded where the compiler can be told so.

    XLA does not allow LLVM to fuse the two on NVIDIA GPUs, where they are a tenth of what a tile of 64 features takes.
    """
    if target != "cuda":
        return exp2(c * s - m, target)
    args = (jnp.broadcast_to(x, s.shape) for x in (c, s, -m))
    return inline_asm("fma.rn.f32 $0, $1, $2, $3;\nex2.approx.ftz.f32 $0, $0;", "=f,f,f,f", 1, *args)


def round_weights(p, dtype, target):
    """p >= 0, fp32, rounded to `dtype`."""
    chip = chip_of(target)
    if dtype == jnp.bfloat16 and chip and not chip.rounds_to_bf16:
        # What the compiler does instead of an instruction takes 4 times as many as this, which differs from it where p
        # lies half way between two bf16 numbers.
        bits = lax.bitcast_convert_type(p, jnp.uint32) + jnp.uint32(0x8000)
        return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)
    return p.astype(dtype)


class Softmax(NamedTuple):
    """An online softmax over the keys so far, fp32: `[rows]`, `[rows]`, and `[rows, part of V]` each.

    m is the maximum of exponents (`exponent_of`); l, the sum of weights, and o are relative to exp2(m).
    """

    m: jax.Array
    l: jax.Array
    o: list[jax.Array]


def empty_softmax(rows: int, parts: list[Axis]) -> Softmax:
    """No key so far."""
    o = [jnp.zeros((rows, part.index.size), jnp.float32) for part in parts]
    return Softmax(jnp.full(rows, LOWEST_EXPONENT, jnp.float32), jnp.zeros(rows, jnp.float32), o)


def logits(p, q, k, factor, precision):
    """q k^T, summed over the parts of a head; times `factor` and capped where p has them in natural units."""
    s = functools.reduce(jnp.add, (dot(x, y.T, precision) for x, y in zip(q, k, strict=True)))
    if p.softcap is not None:
        return p.softcap * jnp.tanh(s * (factor / p.softcap))
    return s * factor if p.natural_logits else s


def loop(lo, hi, step, state: Softmax) -> Softmax:
    """`step(tile, state)` from lo to hi. A loop that is known never to run is not there."""
    if lo is hi or (isinstance(lo, int) and isinstance(hi, int) and lo >= hi):
        return state
    return lax.fori_loop(lo, hi, step, state)


def walk(scores, add, cuts, empty: Softmax, *, fixed_maximum: bool, scores_ahead: bool, target):
    """(state, lost) after all tiles of `key_tiles`: masked, free of masks, masked.

    `scores(tile, masked)` is what `add(tile, state, *scores, fixed=...)` weighs the tile's values by; of a tile without
    masks the first score, the logits, is enough.

    With `fixed_maximum` the masked tiles and one more come first and give each row a maximum. The free tiles that are
    left are weighed relative to it (`fixed=True`): a tenth to a third fewer instructions. Where that was too small
    (`fits`), the block is `lost`, 1 and not 0, and left to `lost_blocks`. With `scores_ahead` too, the logits of a tile
    are computed before the weights of the tile before it, so that matrix units need not wait for those.
    """

    def step(tile, state, masked, fixed=False):
        return add(tile, state, *scores(tile, masked), fixed=fixed)

    start, free_start, free_stop, stop = cuts
    before, free, after = (start, free_start), (free_start, free_stop), (free_stop, stop)
    masked, moving, fixed = (
        functools.partial(step, masked=True),
        functools.partial(step, masked=False),
        functools.partial(step, masked=False, fixed=True),
    )
    if not fixed_maximum:
        return loop(*after, masked, loop(*free, moving, loop(*before, masked, empty))), 0
    fixed_from = jnp.minimum(free_start + 1, jnp.maximum(free_start, free_stop))
    if target == "cuda":
        # 0, but not for the compiler, which would write out a loop that it knows to run once. On sm_90 q would then
        # stand in shared memory twice.
        fixed_from += jnp.minimum(pl.program_id(0), 0)
    state = loop(*before, masked, loop(*after, masked, empty))
    state = loop(free_start, fixed_from, moving, state)
    if scores_ahead:
        state = loop_ahead(fixed_from, free_stop, lambda tile: scores(tile, masked=False)[0], add, state)
    else:
        state = loop(fixed_from, free_stop, fixed, state)
    return state, jnp.where(fixed_from < free_stop, 1 - fits(state), 0)


def loop_ahead(lo, hi, logits_of, add, state: Softmax) -> Softmax:
    """`add(tile, state, logits_of(tile), fixed=True)` from lo to hi, with the logits of the next tile first."""

    def step(tile, carried):
        state, s = carried
        following = logits_of(jnp.minimum(tile + 1, hi - 1))
        return add(tile, state, s, fixed=True), following

    # Without a tile there may be no key to read. (On AMD LLVM sinks these loads into the loop; on NVIDIA GPUs they are
    # copies to shared memory, and stay.)
    s = jax.eval_shape(logits_of, lo)
    s = lax.cond(lo < hi, lambda: logits_of(lo), lambda: jnp.zeros(s.shape, s.dtype))
    return lax.fori_loop(lo, hi, step, (state, s))[0]


def fits(state: Softmax):
    """1 where the sums of all rows stayed far from overflow, else 0; bf16 holds any weight that a sum of fp32 holds.

    Sums over all rows: one comparison for each, not one a row. And NaN stays, which on AMD a maximum would drop.
    """
    within = jnp.sum(state.l) < LARGEST_SUM
    for x in state.o:
        within = within & (jnp.sum(jnp.abs(x)) < jnp.inf)
    return within.astype(jnp.int32)


def lost_blocks(ins, first, blocks: int, compute) -> None:
    """`compute(block)` for those of the query blocks from `first` on, of `blocks` in all, that are lost.

    A kernel of its own: beside the fixed maximum it would take registers from a walk that almost never needs it.
    """
    index = first + lax.iota(jnp.int32, min(grid.LOST_BLOCKS, grid.tile_size(blocks)))
    lost = plgpu.load(ins["lost"].at[index], mask=index < blocks, other=0)

    def one(block, _):
        @pl.when(ins["lost"][block] > 0)
        def this():
            compute(block)

    @pl.when(jnp.max(lost) > 0)
    def some():
        lax.fori_loop(first, jnp.minimum(first + grid.LOST_BLOCKS, blocks), one, None)


def with_bias(s, bias):
    """s + bias, finite where that is not NaN. (A maximum would drop NaN on AMD.)"""
    s = s + bias
    s = jnp.where(s < -LARGEST_LOGIT, -LARGEST_LOGIT, s)
    return jnp.where(s > LARGEST_LOGIT, LARGEST_LOGIT, s)


def power_of_two_from(c):
    """The smallest power of two >= c, for c > 0."""
    if isinstance(c, float):
        return 2.0 ** math.ceil(math.log2(c))
    bits = (lax.bitcast_convert_type(c, jnp.int32) + 0x7FFFFF) >> 23 << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def exponent_of(s, c):
    """c s, rounded; where that is large, c' s with the power of two c' >= c, which is exact. It grows with s."""
    x = c * s
    return jnp.where(jnp.abs(x) < LARGE_EXPONENT, x, power_of_two_from(c) * s)


def softmax_step(
    state: Softmax, s, v, *, c, target, precision: Precision = lax.Precision.DEFAULT, fixed=False
) -> Softmax:
    """The state after one more tile of keys.

    Args:
      s: logits `[rows, keys]`, fp32; -inf for a hidden key.
      v: values `[keys, part of V]` each; finite, also of hidden keys.
      c: > 0; a weight is exp2(c s).
      target, precision: as in `exp2` and `dot`.
      fixed: whether m stays what it is (`walk`).
    """
    m, l, o = state
    m_new = m if fixed else jnp.maximum(m, exponent_of(jnp.max(s, axis=1), c))
    # One fused multiply-add, in which m is rounded and c s is not: one factor for the whole row. It cancels, also from
    # tile to tile, since all weights are relative to the m that is carried. Where m is huge that factor would overflow,
    # and a power of two for c makes both exact. Logits that differ at all then differ by 16 / c or more, so what weighs
    # anything still weighs the same.
    c_row = jnp.where(jnp.abs(m_new) < LARGE_EXPONENT, c, power_of_two_from(c))
    p = weights(c_row[:, None], s, m_new[:, None], target)
    rounded = round_weights(p, v[0].dtype, target)
    if not fixed:
        a = exp2(m - m_new, target)
        l, o = a * l, [a[:, None] * x for x in o]
    return Softmax(m_new, l + jnp.sum(p, axis=1), [x + dot(rounded, y, precision) for x, y in zip(o, v, strict=True)])


def finish(state: Softmax, c):
    """(output, lse in natural units): 0 and -inf for rows without a key."""
    m, l, o = state
    empty = l == 0.0
    l = jnp.where(empty, 1.0, l)
    m = jnp.where(jnp.abs(m) < LARGE_EXPONENT, m, m * (c / power_of_two_from(c)))
    # One division a row.
    return [(1.0 / l)[:, None] * x for x in o], jnp.where(empty, -jnp.inf, m / LOG2_E + jnp.log(l))


def product_precision(dtype, target):
    """How a product keeps fp32 accuracy for fp32 inputs; by default it would be a single TF32 (or XF32) product.

    Never None, which is what `jax.default_matmul_precision` says.
    """
    if dtype != jnp.float32:
        return lax.Precision.DEFAULT
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if target == "cuda" else lax.Precision.HIGHEST


def logit_units(p: Problem, ins, scale):
    """(factor, c): a logit is factor q.k, and a weight is exp2(c s)."""
    factor = scale * ins["logit_factor"][0] if "logit_factor" in ins else scale
    if p.natural_logits:
        return factor, LOG2_E
    # c > 0, also at a scale of 0: a hidden key's c (-inf) has to stay -inf.
    return factor, grid.greater(abs(factor) * LOG2_E, 2.0**-126)


def query_axes(p: Problem, block, rows_end) -> tuple[Axis, Axis]:
    """The rows of a block as they are read and as they are stored. In the place of rows from the end on, the last."""
    t = block * p.block_q + lax.iota(jnp.int32, p.block_q)
    if isinstance(rows_end, int) and p.queries % p.block_q == 0:
        return Axis(t, None), Axis(t, None)
    return Axis(jnp.minimum(t, grid.greater(rows_end - 1, 0)), None), Axis(t, t < p.queries)


def allowed_pairs(p: Problem, ins, rows: Axis, keys: Axis, start, bias, length):
    """Which keys of a tile, from key `start` on, each row sees: bool `[rows or 1, keys]`."""
    first, end = grid.keys_of_row(p, rows.index[:, None], length)
    # Counted from the tile's start, its keys are constants.
    j = lax.iota(jnp.int32, p.block_k)[None, :]
    allowed = j < end - start
    if p.left is not None:
        allowed = allowed & (j >= first - start)
    if p.bias is not None:
        allowed = allowed & (bias != -jnp.inf)
    if p.mask is not None:
        allowed = allowed & (load_pairs(ins["mask"], rows, keys) != 0)
    if "q_segment_ids" in ins:
        q_ids, kv_ids = (ins[f"{name}_segment_ids"].at[a.index] for name, a in (("q", rows), ("kv", keys)))
        allowed = allowed & (plgpu.load(q_ids)[:, None] == plgpu.load(kv_ids)[None, :])
    return allowed


def forward_body(ins, outs, *, p: Problem, scale, target):
    """One query block of one head over the keys of one split."""
    _, _, block, split = grid.workgroup(pl.program_id(0), p)
    lost = attend_rows(ins, outs, block, split, p=p, scale=scale, target=target, fixed_maximum=p.fixed_maximum)
    if p.fixed_maximum:
        outs["lost"][block] = lost


def lost_blocks_body(ins, outs, *, p: Problem, scale, target):
    """Those of some query blocks of one head that are lost."""
    _, _, first = grid.lost_program(pl.program_id(0), p.heads, p.blocks)
    compute = functools.partial(attend_rows, ins, outs, split=0, p=p, scale=scale, target=target, fixed_maximum=False)
    lost_blocks(ins, first, p.blocks, compute)


def attend_rows(ins, outs, block, split, *, p: Problem, scale, target, fixed_maximum: bool):
    """Stores the results of a query block where there is one split, else the split's m, l and o. Returns `lost`."""
    # Run-time lengths below 0 hide all, and may not wrap.
    length = jnp.maximum(ins["kv_lengths"][0], 0) if "kv_lengths" in ins else p.keys
    rows_end = jnp.clip(ins["query_lengths"][0], 0, p.queries) if "query_lengths" in ins else p.queries
    first, end = grid.keys_of_block(p, block, length, rows_end)
    rows, stored_rows = query_axes(p, block, rows_end)
    features, values = (feature_axes(size, p.config.head_tile) for size in (p.key_size, p.value_size))
    precision = product_precision(p.dtype, target)
    factor, c = logit_units(p, ins, scale)

    q = [load_tile(ins["q"], rows, part).astype(p.product_dtype) for part in features]
    # c has no sign: q takes it, exactly.
    if not p.natural_logits and "logit_factor" in ins:
        q = [x * jnp.sign(factor).astype(x.dtype) for x in q]
    elif not p.natural_logits and scale < 0:
        q = [-x for x in q]

    def keys_of(tile, masked):
        j = tile * p.block_k + lax.iota(jnp.int32, p.block_k)
        # In the place of keys that no row sees stands one that a row sees: it exists, and is finite.
        return Axis(jnp.minimum(j if p.left is None else jnp.maximum(j, first), end - 1) if masked else j, None)

    def scores(tile, masked):
        """The logits of a tile, -inf for hidden keys, and the keys for whose values they are."""
        keys = keys_of(tile, masked)
        k = [load_tile(ins["k"], keys, part).astype(p.product_dtype) for part in features]
        s, bias = logits(p, q, k, factor, precision), None
        if p.bias is not None:
            bias = load_pairs(ins["bias"], rows, keys).astype(jnp.float32)
            s = with_bias(s, bias)
        if masked:
            allowed = allowed_pairs(p, ins, rows, keys, tile * p.block_k, bias, length)
            s = jnp.where(allowed, s, -jnp.inf)
            if p.hides_keys:
                keys = Axis(keys.index, jnp.max(allowed.astype(jnp.int32), axis=0) > 0)
        return s, keys

    def add(tile, state, s, keys=None, fixed=False):
        keys = keys or keys_of(tile, masked=False)
        v = [load_tile(ins["v"], keys, part).astype(p.product_dtype) for part in values]
        return softmax_step(state, s, v, c=c, target=target, precision=precision, fixed=fixed)

    cuts = grid.key_tiles(p, block, split, length, rows_end)
    options = dict(fixed_maximum=fixed_maximum, scores_ahead=p.config.scores_ahead, target=target)
    state, lost = walk(scores, add, cuts, empty_softmax(p.block_q, values), **options)
    if "query_lengths" in ins:
        there = stored_rows.index < rows_end
        o = [jnp.where(there[:, None], x, 0.0) for x in state.o]
        state = Softmax(state.m, jnp.where(there, state.l, 0.0), o)
    if p.splits == 1:
        store_results(p, ins, outs, stored_rows, values, state, c)
        return lost
    for name in ("m", "l"):
        plgpu.store(outs[name].at[stored_rows.index], getattr(state, name), mask=stored_rows.mask)
    for part, o in zip(values, state.o, strict=True):
        store_tile(outs["o"], stored_rows, part, o)
    return lost


def merge_body(ins, outs, *, p: Problem, scale, target):
    """One query block of one head: m, l and o of all splits to results. A split without keys has l = 0 and o = 0."""
    _, _, block = grid.merge_program(pl.program_id(0), p)
    rows, stored_rows = query_axes(p, block, p.queries)
    values = feature_axes(p.value_size, p.config.head_tile)
    _, c = logit_units(p, ins, scale)

    def step(i, state):
        m, l = (plgpu.load(ins[name].at[i, rows.index]) for name in ("m", "l"))
        m_new = jnp.maximum(state.m, m)
        a, b = exp2(state.m - m_new, target), exp2(m - m_new, target)
        parts = (load_tile(ins["o"], rows, part, (i,)) for part in values)
        o = [a[:, None] * x + b[:, None] * y for x, y in zip(state.o, parts, strict=True)]
        return Softmax(m_new, a * state.l + b * l, o)

    state = lax.fori_loop(0, p.splits, step, empty_softmax(p.block_q, values))
    store_results(p, ins, outs, stored_rows, values, state, c)


def store_results(p: Problem, ins, outs, rows: Axis, values: list[Axis], state: Softmax, c):
    o, lse = finish(state, c)
    for part, x in zip(values, o, strict=True):
        x = x * ins["value_factor"][0] if "value_factor" in ins else x
        store_tile(outs["o"], rows, part, x.astype(p.out_dtype))
    if p.returns_lse:
        plgpu.store(outs["lse"].at[rows.index], lse, mask=rows.mask)


def call(body, name, plan: grid.Plan, operands: dict, *, num_warps, num_stages, interpret):
    """`pl.pallas_call` with operands and results by name."""
    ins, outs = sorted(plan.in_specs), sorted(plan.out_specs)
    varies = jax.typeof(operands["q"]).manual_axis_type
    return pl.pallas_call(
        body,
        grid=plan.grid,
        in_specs=[plan.in_specs],
        out_specs=plan.out_specs,
        out_shape={
            n: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=varies) for n, s in plan.out_shape.items()
        },
        input_output_aliases={ins.index(name): outs.index(name) for name in plan.updated},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )({n: operands[n] for n in plan.in_specs})


def attention(p: Problem, operands: dict, *, scale, target):
    """One launch; two where several workgroups share a query block, or where a maximum may be fixed.

    Args:
      p: the static facts.
      operands: q, k, v, and what p's flags name: `bias` and `mask` (int8) with 4 axes, `q_segment_ids`,
        `kv_segment_ids`, `kv_lengths`, `query_lengths` (int32), `logit_factor`, `value_factor` (fp32 `[1]`).
      scale: static factor of the logits.
      target: "cuda", an AMD architecture id, "rocm" for an unknown one, or None for interpret mode.

    Returns:
      {"o": `[B, T, H, V]`, and "lse": `[B, T, H]` where `p.returns_lse`}
    """
    operands = vary_alike(operands)
    forward, lost, merge = (
        functools.partial(body, p=p, scale=scale, target=target)
        for body in (forward_body, lost_blocks_body, merge_body)
    )
    order = p.config.order
    launch = functools.partial(call, num_warps=p.num_warps, num_stages=p.config.num_stages, interpret=target is None)
    if p.splits == 1:
        results = launch(forward, f"flash_forward_{order}", grid.plan_forward(p), operands)
        if p.fixed_maximum:
            results = launch(lost, "flash_lost_blocks", grid.plan_lost_blocks(p), operands | results)
        return results
    parts = launch(forward, f"flash_split_forward_{order}", grid.plan_split_forward(p), operands)
    return launch(merge, "flash_merge", grid.plan_merge(p), operands | parts)
