"""Grouped-query attention over a cache, with sinks and sliding windows: what is true.

Letters: `B` batch, `T` query tokens, `S` capacity of the cache in keys, `H` query heads, `G` key and value
heads, `K` key size, `V` value size. Query head `h` reads key head `h // (H // G)`. k and v hold past and new
keys: of row `b` the first `L_b = past_b + T_b` are valid, and query row `t` stands at the absolute position
`p = past_b + t`.

    l_j     = scale * q.k_j ;  l = softcap * tanh(l / softcap) ;  l = l + bias
    allowed = j < L_b  and  (not causal or j <= p)  and  (window is None or j > p - window)
    m   = max(max over allowed of l_j, sink_h) ;  den = sum over allowed of exp(l_j - m) + exp(sink_h - m)
    out = sum over allowed of exp(l_j - m) v_j / den ;  lse = m + log(den)

Grouped queries: Ainslie et al., https://arxiv.org/abs/2305.13245. Sinks: the attention of gpt-oss,
https://github.com/openai/gpt-oss; smooth softmax is a sink of 0.

Two forms: `dense` writes the formula down, `grouped_query_attention` walks blocks of 2048 keys carrying (m,
l, o). Logits, maximum, sum and accumulator are fp32, or float64 where q is (under `jax.enable_x64`).
"""

import jax.numpy as jnp

from references import flash


def grouped_query_attention(
    q,
    k,
    v,
    *,
    past=None,
    lengths=None,
    window=None,
    sinks=None,
    bias=None,
    softcap=None,
    scale=None,
    causal=True,
    return_lse=False,
    block_size=2048,
):
    """Attention of `T` new tokens over a cache, one block of keys after another.

    Args:
      q: `[B, T, H, K]` in bf16, fp16, fp32 or float64.
      k: `[B, S, G, K]`, q's dtype, or a 16-bit one where q is fp32; `H % G == 0`. Holds the new keys too.
      v: `[B, S, G, V]`, k's dtype.
      past: int32, `[B]` or a scalar: how many keys came before these tokens; default `S - T`.
      lengths: int32 `[B]`: how many of the new tokens are valid, `T_b`; default `T`.
      window: None, or how many keys a row sees, its own included (1: itself only).
      sinks: `[H]`, any float dtype: a further logit of each query head, taken as it is (no scale, no cap), that
        has no value row. -inf equals none.
      bias: any float dtype, broadcastable to `[B, H, T, S]`, added after the cap. -inf hides a key.
      softcap: None, or the cap > 0 of `softcap * tanh(l / softcap)`.
      scale: factor of the logits, default `K**-0.5`.
      causal: whether rows see only keys up to their own position.
      return_lse: whether to return the logarithm of the denominator too.
      block_size: most keys of a block.

    Returns:
      `o`, `[B, T, H, V]` in q's dtype, or `(o, lse)` with lse `[B, T, H]` in fp32. Rows from `lengths` on
      give 0 and lse -inf; other rows without a key give 0 and lse equal to the sink. Positions beyond the
      cache see what keys there are; cache rows that no row sees may hold anything, NaN included.
    """
    T, S = q.shape[1], k.shape[1]
    past, new = _past_and_new(q, k, past, lengths)
    t = jnp.arange(T, dtype=jnp.int32)[None]
    p = past[:, None] + t
    end_key = jnp.minimum(past + new, S)[:, None]
    end_key = jnp.minimum(end_key, p + 1) if causal else jnp.broadcast_to(end_key, p.shape)
    first_key = jnp.zeros_like(p) if window is None else jnp.maximum(p - window + 1, 0)
    real = t < new[:, None]
    o, lse = flash.online_softmax(
        q,
        k,
        v,
        first_key=first_key,
        end_key=jnp.where(real, end_key, 0),
        scale=flash.logit_scale(q, scale),
        bias=bias,
        softcap=softcap,
        sinks=_finite(sinks),
        # As many logits in a tile as flash's default, but long and narrow; with a window no wider than it needs.
        rows_per_tile=64,
        keys_per_block=block_size if window is None else min(block_size, max(256, window)),
    )
    return _outputs(q, o, lse, real, sinks, return_lse)


def dense(
    q,
    k,
    v,
    *,
    past=None,
    lengths=None,
    window=None,
    sinks=None,
    bias=None,
    softcap=None,
    scale=None,
    causal=True,
    return_lse=False,
):
    """The formula with all `T x S` logits at once; arguments and results as `grouped_query_attention`'s.

    It rounds where a kernel in the input dtype does: logits and softmax are fp32, P is rounded to v's dtype,
    and the output to q's. In fp32 and float64 nothing is rounded on the way.
    """
    T, S = q.shape[1], k.shape[1]
    past, new = _past_and_new(q, k, past, lengths)
    t = jnp.arange(T, dtype=jnp.int32)
    j = jnp.arange(S, dtype=jnp.int32)
    p = (past[:, None] + t)[:, :, None]
    allowed = j < (past + new)[:, None, None]
    if causal:
        allowed = allowed & (j <= p)
    if window is not None:
        allowed = allowed & (j > p - window)
    real = t < new[:, None]
    allowed = allowed & real[:, :, None]
    o, lse = flash.dense_softmax(
        q,
        k,
        v,
        allowed[:, None],
        scale=flash.logit_scale(q, scale),
        bias=bias,
        softcap=softcap,
        sinks=_finite(sinks),
    )
    return _outputs(q, o, lse, real, sinks, return_lse)


def append_kv(cache_k, cache_v, k_new, v_new, past, lengths=None):
    """Write the new keys and values of a step behind those that the cache holds.

    Token `t < lengths[b]` goes to cache row `past[b] + t`. Padding tokens, and tokens that do not fit, are
    dropped; nothing is written out of range. A jitted caller that donates the caches has them updated in
    place.

    Args:
      cache_k: `[B, S, G, K]`.
      cache_v: `[B, S, G, V]`.
      k_new: `[B, T, G, K]`, cache_k's dtype.
      v_new: `[B, T, G, V]`, cache_v's dtype.
      past: int32 `[B]` or scalar, keys that the cache holds.
      lengths: int32 `[B]`, the valid new tokens; default `T`.

    Returns:
      `(cache_k, cache_v)`, updated.
    """
    return append(cache_k, k_new, past, lengths), append(cache_v, v_new, past, lengths)


def append(cache, new, past, lengths=None, *, head_first=False):
    """One cache of `append_kv`. With `head_first` it is `[B, G, S, size]`; `new` is `[B, T, G, size]` in any
    case."""
    B, T = new.shape[:2]
    S = cache.shape[2 if head_first else 1]
    past, lengths = _per_row(past, B), _per_row(T if lengths is None else lengths, B)
    t = jnp.arange(T, dtype=jnp.int32)[None]
    row = past[:, None] + t
    # A scatter drops rows beyond the end, and counts negative ones from the end: so all that is to be dropped
    # goes beyond the end. Each to a row of its own, as unique_indices demands.
    row = jnp.where((t < lengths[:, None]) & (row >= 0) & (row < S), row, S + t)
    b = jnp.arange(B, dtype=jnp.int32)[:, None]
    at = cache.at[b, :, row] if head_first else cache.at[b, row]
    return at.set(new, mode="drop", unique_indices=True)


def _past_and_new(q, k, past, lengths):
    B, T = q.shape[:2]
    return _per_row(k.shape[1] - T if past is None else past, B), _per_row(T if lengths is None else lengths, B)


def _per_row(x, B):
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B,))


def _finite(sinks):
    """Sinks of +inf, of which differences would be NaN, as the largest number: beside that nothing else weighs."""
    return None if sinks is None else jnp.minimum(sinks, jnp.finfo(sinks.dtype).max)


def _outputs(q, o, lse, real, sinks, return_lse):
    o = o.astype(q.dtype)
    if sinks is not None:
        lse = jnp.where((sinks == jnp.inf)[None, None], jnp.inf, lse)
    # A sink would give a padding row an lse.
    return (o, jnp.where(real[:, :, None], lse, -jnp.inf)) if return_lse else o
