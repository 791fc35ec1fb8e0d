"""Flash attention: what is true.

Letters: `B` batch, `T` query tokens, `S` key tokens, `H` query heads, `G` key and value heads, `r = H // G`
query heads to one of them, `K` key size, `V` value size. Query head `h` reads key head `h // r`; k and v are
never repeated.

    s = scale * q.k ;  s = softcap * tanh(s / softcap) ;  s = s + bias ;  then the masks
    p = softmax of s over the allowed keys ;  o = p v ;  lse = log(sum exp(s))     (natural logarithm)

Two forms. `dense` writes the formula down, and rounds where a kernel in the input dtype rounds.
`flash_attention` and `dot_product_attention` walk tiles of query rows and blocks of keys with the online
softmax (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al.,
https://arxiv.org/abs/2205.14135): the fast path on a CPU, and the one that is differentiated, its memory
bounded by a tile whatever `S` is. Both keep logits, maximum, sum and accumulator in fp32, or in float64 for
float64 inputs (under `jax.enable_x64`).

Where a row may see no key at all, o is 0 and lse -inf, and gradients are finite. Keys that no row of a tile may see are
never used: NaN there changes nothing, not even a gradient. `dense` has one tile per batch row and key head.
"""

import jax
import jax.numpy as jnp
from jax import lax


def flash_attention(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    bias=None,
    softcap=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    kv_lengths=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
    block_size=256,
):
    """Attention by online softmax over blocks of keys (FlashAttention, https://arxiv.org/abs/2205.14135).

    `causal` aligns bottom-right, as FlashAttention does since 2.1: row `t` sees the keys `j <= t + L - T`,
    where `L` is `kv_lengths[b]`, or `S` without it. (`dot_product_attention` aligns top-left.)

    Args:
      q: `[B, T, H, K]` in bf16, fp16, fp32, float64, or in e4m3 with scales.
      k: `[B, S, G, K]`, `H % G == 0`.
      v: `[B, S, G, V]`.
      causal: whether rows see only keys up to their own position.
      scale: factor of the logits, default `K**-0.5`.
      bias: any float dtype, broadcastable to `[B, H, T, S]`, added after the cap. -inf hides a key.
      softcap: None, or the cap > 0 of `softcap * tanh(s / softcap)`.
      q_segment_ids: `[B, T]` int32; a row sees keys of its own segment only.
      kv_segment_ids: `[B, S]` int32.
      kv_lengths: `[B]` int32, valid keys of each batch row; keys from there on are hidden.
      q_scale: scalar; q stands for `q_scale * q` (fp8). Likewise `k_scale` and `v_scale`.
      k_scale: scalar.
      v_scale: scalar.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      block_size: most query rows of a tile, and most keys of a block.

    Returns:
      `o`, `[B, T, H, V]` in v's dtype (bf16 for fp8), or `(o, lse)` with lse `[B, T, H]` in fp32.
    """
    T, S = q.shape[1], k.shape[1]
    L = jnp.full((1,), S, jnp.int32) if kv_lengths is None else kv_lengths
    t = jnp.arange(T, dtype=jnp.int32)
    end_key = jnp.broadcast_to(jnp.minimum(L, S)[:, None], (L.shape[0], T))
    if causal:
        end_key = jnp.minimum(end_key, t[None] + L[:, None] - T + 1)
    o, lse = online_softmax(
        q,
        k,
        v,
        first_key=jnp.zeros_like(end_key),
        end_key=end_key,
        scale=logit_scale(q, scale, q_scale, k_scale),
        bias=bias,
        softcap=softcap,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        rows_per_tile=block_size,
        keys_per_block=block_size,
    )
    return _outputs(o, lse, v, v_scale, return_lse)


def dense(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    bias=None,
    softcap=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    kv_lengths=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
):
    """The formula with all `T x S` logits at once; arguments and results as `flash_attention`'s.

    It rounds where a kernel in the input dtype does: logits and softmax are fp32, P is rounded to v's dtype,
    and so is the output. In fp32 and float64 nothing is rounded on the way.
    """
    B, T, S = *q.shape[:2], k.shape[1]
    t = jnp.arange(T, dtype=jnp.int32)[:, None]
    j = jnp.arange(S, dtype=jnp.int32)[None, :]
    L = (jnp.full((B,), S, jnp.int32) if kv_lengths is None else kv_lengths).reshape(B, 1, 1, 1)
    allowed = jnp.broadcast_to(j < L, (B, 1, T, S))
    if causal:
        allowed = allowed & (j <= t + L - T)
    if q_segment_ids is not None and kv_segment_ids is not None:
        allowed = allowed & (q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])
    o, lse = dense_softmax(q, k, v, allowed, scale=logit_scale(q, scale, q_scale, k_scale), bias=bias, softcap=softcap)
    return _outputs(o, lse, v, v_scale, return_lse)


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    return_residual=False,
    block_size=256,
):
    """`jax.nn.dot_product_attention` by online softmax: its signature and, where rows have keys, its results.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html

    Causality is top-left (row `t` sees keys `j <= t`) and ignores lengths, unlike `flash_attention`'s. Three
    differences from `jax.nn`: a row without keys gives 0 (there the mean of the values); keys that no row
    sees are never used; the residual is fp32, and -inf for a row without keys (there in the key's dtype).

    Args:
      query: `[B, T, H, K]` or `[T, H, K]`.
      key: `[B, S, G, K]` or `[S, G, K]`, `H % G == 0`.
      value: `[B, S, G, V]` or `[S, G, V]`.
      bias: float, 3 or 4 dimensions that broadcast to `[B, H, T, S]`.
      mask: bool, likewise; True takes part.
      scale: factor of the logits, default `K**-0.5`.
      is_causal: whether row `t` sees only keys `j <= t`.
      query_seq_lengths: `[B]` int32; rows from there on give 0.
      key_value_seq_lengths: `[B]` int32; keys from there on are hidden.
      local_window_size: `(left, right)`, or one int for both: row `t` sees keys from `t - left` to `t +
        right`.
      return_residual: whether to return the logsumexp too; as in `jax.nn`, no gradient flows through it.
      block_size: most query rows of a tile, and most keys of a block.

    Returns:
      The output, shaped as query but for the value size, in value's dtype; or `(output, residual)`, where the
      residual is `[B, T, H]` or `[T, H]`.
    """
    q, k, v = (x if x.ndim == 4 else x[None] for x in (query, key, value))
    T, S = q.shape[1], k.shape[1]
    t = jnp.arange(T, dtype=jnp.int32)[None]
    first_key, end_key = jnp.zeros_like(t), jnp.full_like(t, S)
    if is_causal:
        end_key = jnp.minimum(end_key, t + 1)
    if local_window_size is not None:
        both = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        # A window wider than both sequences hides nothing; clipped, t + right cannot overflow int32.
        left, right = (min(size, T + S) for size in both)
        first_key = jnp.maximum(first_key, t - left)
        end_key = jnp.minimum(end_key, t + right + 1)
    if key_value_seq_lengths is not None:
        end_key = jnp.minimum(end_key, key_value_seq_lengths[:, None])
    if query_seq_lengths is not None:
        end_key = jnp.where(t < query_seq_lengths[:, None], end_key, 0)
    o, lse = online_softmax(
        q,
        k,
        v,
        first_key=first_key,
        end_key=end_key,
        scale=logit_scale(q, scale),
        bias=bias,
        mask=mask,
        rows_per_tile=block_size,
        keys_per_block=block_size,
    )
    o = o.astype(v.dtype).reshape(*query.shape[:-1], v.shape[-1])
    lse = lax.stop_gradient(lse).reshape(query.shape[:-1])
    return (o, lse) if return_residual else o


def dense_softmax(q, k, v, allowed, *, scale, bias=None, softcap=None, sinks=None):
    """One softmax over all keys that `allowed`, bool `[B|1, H|1, T, S]`, permits.

    `sinks`, `[H]`, are one more logit in each row's denominator. Returns `o` `[B, T, H, V]`, not yet rounded,
    and `lse` `[B, T, H]`, both in fp32 (float64).
    """
    H, G = q.shape[2], k.shape[2]
    dtype = _accumulator(q)
    allowed = _grouped(allowed, H, G)
    if bias is not None:
        bias = _grouped(bias, H, G)
        allowed = allowed & (bias != -jnp.inf)
    P_dtype = v.dtype
    q, k, v = (x.astype(dtype) for x in (_head_first(q, G), _head_first(k, G)[:, :, 0], _head_first(v, G)[:, :, 0]))
    q, k, v = _drop_unseen(q * scale, k, v, allowed)
    s = _logits(q, k, bias, softcap)
    m = jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True, where=allowed, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(dtype).reshape(1, G, H // G, 1, 1)
        m = jnp.maximum(m, lax.stop_gradient(sinks))
    m = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(jnp.where(allowed, s - m, -jnp.inf))
    den = p.sum(-1, keepdims=True)
    if sinks is not None:
        den = den + jnp.exp(sinks - m)
    empty = den == 0
    den = jnp.where(empty, 1, den)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(den))
    p = (p / den).astype(P_dtype).astype(dtype)
    return _token_first(_weighted_values(p, v)), _token_first(lse)[..., 0]


def online_softmax(
    q,
    k,
    v,
    *,
    first_key,
    end_key,
    scale,
    bias=None,
    mask=None,
    softcap=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    sinks=None,
    rows_per_tile=256,
    keys_per_block=256,
):
    """Softmax over the keys `first_key <= j < end_key` of each row, one block of keys after another.

    Causality, lengths and windows are each such an interval per row (int32 `[B|1, T]`, `end_key <= S`);
    `bias`, `mask` (`[B|1, H|1, T|1, S|1]`) and segment ids hide more. For each block, with m the running
    maximum, l the sum and o the output:

        m' = max(m, max s) ;  l' = l exp(m - m') + sum exp(s - m') ;  o' = o exp(m - m') + exp(s - m') v

    A sink is where the recurrence starts: `m = sink, l = 1, o = 0`. So it is added once, however many the
    blocks. Blocks that no row of a tile sees are skipped. For the backward pass a tile keeps only its inputs,
    and a block within it only (m, l, o).

    Returns `o` `[B, T, H, V]`, not yet rounded, and `lse` `[B, T, H]`, both in fp32 (float64).
    """
    B, T, H = q.shape[:3]
    S, G, V = v.shape[1:]
    dtype = _accumulator(q)
    rows, keys = _even(T, rows_per_tile), _even(S, keys_per_block)
    one_block = keys >= S
    axes = _varying_axes(q, k, v, first_key, end_key, scale, bias, mask, q_segment_ids, kv_segment_ids, sinks)
    q, k, v = _head_first(q, G), _head_first(k, G)[:, :, 0], _head_first(v, G)[:, :, 0]
    masks = tuple(None if x is None else _grouped(x, H, G) for x in (bias, mask))
    if sinks is not None:
        sinks = sinks.astype(dtype).reshape(1, G, H // G, 1)

    def tile(xs):
        q, first, end, q_segments, tile_masks = xs
        q = q.astype(dtype) * scale
        first, end = first[:, None, None, :, None], end[:, None, None, :, None]
        tile_masks = _rejoin(tile_masks, masks)

        def block(state, xs):
            start, k, v, kv_segments, block_masks = xs

            def step(state):
                bias, mask = _rejoin(block_masks, tile_masks)
                j = (start + jnp.arange(keys, dtype=jnp.int32)).reshape(1, 1, 1, 1, keys)
                allowed = (first <= j) & (j < end)
                if bias is not None:
                    allowed = allowed & (bias != -jnp.inf)
                if mask is not None:
                    allowed = allowed & mask
                if q_segments is not None:
                    same = q_segments[:, :, None] == kv_segments[:, None, :]
                    allowed = allowed & same[:, None, None]
                return _online_step(state, q, k.astype(dtype), v.astype(dtype), allowed, bias, softcap)

            if one_block:
                return step(state), None
            seen = jnp.any((first < end) & (first < start + keys) & (start < end))
            return lax.cond(seen, step, lambda state: state, state), None

        m = jnp.full((B, G, H // G, rows), -jnp.inf, dtype)
        l, o = jnp.zeros_like(m), jnp.zeros((*m.shape, V), dtype)
        if sinks is not None:
            # l = exp(sink - m) = 1, written so that the sink has its gradient; 0 for a sink of -inf.
            m = jnp.maximum(m, lax.stop_gradient(sinks))
            l = jnp.where(m == -jnp.inf, 0, jnp.exp(jnp.where(m == -jnp.inf, 0, sinks - m)))
        blocks = (
            keys * jnp.arange(-(-S // keys), dtype=jnp.int32),
            _cut(k, 2, keys),
            _cut(v, 2, keys),
            None if kv_segment_ids is None else _cut(kv_segment_ids, 1, keys),
            tuple(_cut_unless_broadcast(x, 4, keys) for x in tile_masks),
        )
        state = tuple(_vary(x, axes) for x in (m, l, o))
        (m, l, o), _ = lax.scan(jax.checkpoint(block), state, blocks, unroll=one_block)
        l = jnp.where(l == 0, 1, l)
        return o / l[..., None], (m + jnp.log(l))[..., None]

    tiles = (
        _cut(q, 3, rows),
        _cut(first_key, 1, rows),
        _cut(end_key, 1, rows),
        None if q_segment_ids is None else _cut(q_segment_ids, 1, rows),
        tuple(_cut_unless_broadcast(x, 3, rows) for x in masks),
    )
    _, (o, lse) = lax.scan(lambda _, xs: (None, jax.checkpoint(tile)(xs)), None, tiles, unroll=rows >= T)
    # [tiles, B, G, r, rows, size] -> [B, G, r, T, size]
    o, lse = (jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], len(x) * rows, x.shape[-1])[..., :T, :] for x in (o, lse))
    return _token_first(o), _token_first(lse)[..., 0]


def _online_step(state, q, k, v, allowed, bias, softcap):
    m, l, o = state
    q, k, v = _drop_unseen(q, k, v, allowed)
    s = _logits(q, k, bias, softcap)
    m_new = jnp.maximum(m, jnp.max(lax.stop_gradient(s), axis=-1, where=allowed, initial=-jnp.inf))
    # A row that has met no key yet has m' = -inf; measured from 0 instead, its exponents are still -inf.
    base = jnp.where(m_new == -jnp.inf, 0, m_new)
    decay = jnp.exp(m - base)
    p = jnp.exp(jnp.where(allowed, s - base[..., None], -jnp.inf))
    return m_new, l * decay + p.sum(-1), o * decay[..., None] + _weighted_values(p, v)


def _logits(q, k, bias, softcap):
    # q comes with the scale in it. `scale * (q.k) - m` could be contracted to a fused multiply-add, whose
    # unrounded product lies hundreds from the rounded m at logits of 1e9; the select below separates the two
    # in any case.
    s = jnp.einsum("bgrtk,bgsk->bgrts", q, k, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if bias is not None:
        s = s + bias.astype(s.dtype)
    # Finite terms may add up to -inf. A select and not a maximum, whose gradient is halved on a tie.
    lowest = jnp.finfo(s.dtype).min
    return jnp.where(s < lowest, lowest, s)


def _weighted_values(p, v):
    return jnp.einsum("bgrts,bgsv->bgrtv", p, v, precision=lax.Precision.HIGHEST)


def _drop_unseen(q, k, v, allowed):
    # 0 * NaN is NaN, in the products of the backward pass too: rows and keys that are in no pair become 0.
    rows = jnp.any(allowed, axis=4)[..., None]
    keys = jnp.any(allowed, axis=(2, 3))[..., None]
    return jnp.where(rows, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)


def _accumulator(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def logit_scale(q, scale, q_scale=None, k_scale=None):
    dtype = _accumulator(q)
    scale = jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    for factor in (q_scale, k_scale):
        scale = scale if factor is None else scale * jnp.asarray(factor, dtype)
    return scale


def _outputs(o, lse, v, v_scale, return_lse):
    o = o if v_scale is None else o * jnp.asarray(v_scale, o.dtype)
    # e4m3 has three bits of mantissa, and the output has no scale of its own.
    o = o.astype(jnp.bfloat16 if v.dtype.itemsize == 1 else v.dtype)
    return (o, lse) if return_lse else o


def _head_first(x, G):
    """`[B, T, H, size]` -> `[B, G, H // G, T, size]`."""
    B, T, H, size = x.shape
    return x.reshape(B, T, G, H // G, size).transpose(0, 2, 3, 1, 4)


def _token_first(x):
    """`[B, G, r, T, size]` -> `[B, T, G r, size]`."""
    B, G, r, T, size = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(B, T, G * r, size)


def _grouped(x, H, G):
    """Up to `[B|1, H|1, T|1, S|1]` -> `[B|1, G|1, r|1, T|1, S|1]`."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return x.reshape(x.shape[0], *((1, 1) if x.shape[1] == 1 else (G, H // G)), *x.shape[2:])


def _even(total, most):
    """Size of a part where `total` is cut evenly into as few parts of at most `most` as possible."""
    parts = max(1, -(-total // most))
    return max(1, -(-total // parts))


def _cut(x, axis, size):
    """`[..., n, ...]` -> `[ceil(n / size), ..., size, ...]`, padded with zeros."""
    parts = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, parts * size - x.shape[axis])
    x = jnp.pad(x, padding).reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _cut_unless_broadcast(x, axis, size):
    return None if x is None or x.shape[axis] == 1 else _cut(x, axis, size)


def _rejoin(parts, wholes):
    # What was not cut, because it broadcasts along that axis, is used whole.
    return tuple(whole if part is None else part for part, whole in zip(parts, wholes, strict=True))


def _varying_axes(*arrays):
    """The mesh axes over which any of the arrays differs, inside of a `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))


def _vary(x, axes):
    # A loop's carry must vary over the mesh axes over which its updates do (shard_map's check_vma).
    missing = tuple(axes - _varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
