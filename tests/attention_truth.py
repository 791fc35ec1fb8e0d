"""What the tests of attention share: the truth in numpy and float64, row by row, and how it is compared.

The truth takes an explicit list of keys for each query row, and shares no line with the references that it judges.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from amdgpu import emulate
from references import accuracy


def random(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def qkv(B=1, T=8, S=8, H=2, G=1, K=16, V=16, dtype=jnp.float32, seed=0):
    return random(seed, (B, T, H, K), (B, S, G, K), (B, S, G, V), dtype=dtype)


def softmax_rows(q, k, v, keys_of_row, *, scale=None, bias=None, softcap=None, sinks=None):
    """`keys_of_row(b, t)` lists the keys of a row. Returns o `[B, T, H, V]` and lse `[B, T, H]`."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]
    scale = K**-0.5 if scale is None else scale
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias).astype(np.float64), (B, H, T, S))
    o, lse = np.zeros((B, T, H, V)), np.full((B, T, H), -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        keys = np.asarray(keys_of_row(b, t), int)
        keys = keys[bias[b, h, t, keys] > -np.inf]
        g = h // (H // G)
        s = scale * (k[b, keys, g] @ q[b, t, h])
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = s + bias[b, h, t, keys]
        values = v[b, keys, g]
        if sinks is not None and sinks[h] > -np.inf:
            s, values = np.append(s, float(sinks[h])), np.concatenate([values, np.zeros((1, V))])
        if s.size:
            m = s.max()
            p = np.exp(s - m)
            o[b, t, h] = p @ values / p.sum()
            lse[b, t, h] = m + np.log(p.sum())
    return o, lse


def flash_rows(*, q, k, v, causal, q_segment_ids, kv_segment_ids, kv_lengths, **options):
    """The truth of flash_attention's arguments."""
    T, S = q.shape[1], k.shape[1]
    q_segment_ids, kv_segment_ids, kv_lengths = (
        None if x is None else np.asarray(x) for x in (q_segment_ids, kv_segment_ids, kv_lengths)
    )

    def keys_of_row(b, t):
        L = S if kv_lengths is None else int(kv_lengths[b])
        keys = range(L if not causal else min(L, t + L - T + 1))
        return [j for j in keys if q_segment_ids is None or q_segment_ids[b, t] == kv_segment_ids[b, j]]

    return softmax_rows(q, k, v, keys_of_row, **options)


def gqa_rows(*, q, k, v, past=None, lengths=None, window=None, causal=True, **options):
    """The truth of grouped_query_attention's arguments."""
    (B, T), S = q.shape[:2], k.shape[1]
    past = np.broadcast_to(S - T if past is None else np.asarray(past), B)
    lengths = np.broadcast_to(T if lengths is None else np.asarray(lengths), B)

    def keys_of_row(b, t):
        p = past[b] + t
        last = p if causal else past[b] + lengths[b] - 1
        first = 0 if window is None else p - window + 1
        return range(max(first, 0), min(last, past[b] + lengths[b] - 1) + 1)

    o, lse = softmax_rows(q, k, v, keys_of_row, **options)
    for b in range(B):
        o[b, lengths[b] :], lse[b, lengths[b] :] = 0, -np.inf
    return o, lse


def finite_alike(x, truth):
    """Whether x is finite where the truth is, and equals it elsewhere: the lse of a row without a key is -inf."""
    finite = np.isfinite(truth)
    return np.isfinite(x[finite]).all() and np.array_equal(x[~finite], truth[~finite])


def assert_close(x, truth, bound):
    """`|x - truth| <= bound` element by element, with -inf exactly where the truth has it."""
    x = np.asarray(x).astype(np.float64)
    assert x.shape == truth.shape
    assert finite_alike(x, truth)
    finite = np.isfinite(truth)
    error = np.where(finite, np.abs(np.where(finite, x, 0) - np.where(finite, truth, 0)), 0)
    assert np.all(error <= bound), f"{np.max(error)} off, where {np.min(bound)} is allowed"


def fp32_bound(truth):
    return accuracy.attention_bound(truth, None, "float32")


def of_each(functions, **arguments):
    """The results of several functions of the same arguments, from one compilation."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray)}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    return jax.jit(lambda arrays: [f(**arrays, **static) for f in functions])(arrays)


def loss(attention, arguments, **others):
    """Of o and of lse, whose empty rows are -inf."""
    o, lse = attention(**arguments, **others, return_lse=True)
    return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.where(lse > -jnp.inf, jnp.cos(lse), 0))


def worst_excess(result, truth):
    """The largest errors of o and lse, in fp32, over their bounds: at most 1 where the comparison passes."""

    def excess(x, truth):
        x, finite = np.asarray(x, np.float64), np.isfinite(truth)
        if not finite_alike(x, truth):
            return np.inf
        x, truth = x[finite], truth[finite]
        return np.max(np.abs(x - truth) / accuracy.attention_bound(truth, None, "float32"))

    return max(excess(x, y) for x, y in zip(result, truth, strict=True))


def at(place):
    """Where kernels run: on an AMD chip's machine code, or (None) in interpret mode."""
    return emulate(place) if place else contextlib.nullcontext()


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
