"""The truth of causal grouped-query attention by whole matrices: fit for thousands of keys, unlike row by row."""

import numpy as np


def gqa_matrices(*, q, k, v, past=None, window=None, sinks=None, **others):
    """(o `[B, T, H, V]`, lse `[B, T, H]`) in float64; what else may be given is not. Each row has a key."""
    assert all(x is None or x is True for x in others.values()), others
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    o, lse = np.zeros((B, T, H, v.shape[-1])), np.zeros((B, T, H))
    for b, h in np.ndindex(B, H):
        g = h // (H // G)
        p = int(np.broadcast_to(S - T if past is None else past, B)[b]) + np.arange(T)[:, None]
        j = np.arange(p.max() + 1)
        s = q[b, :, h] @ k[b, : len(j), g].T / np.sqrt(K)
        s[(j > p) | (j <= p - (len(j) if window is None else window))] = -np.inf
        sink = -np.inf if sinks is None else float(sinks[h])
        m = np.maximum(s.max(axis=1), sink)
        e = np.exp(s - m[:, None])
        den = e.sum(axis=1) + np.exp(sink - m)
        o[b, :, h], lse[b, :, h] = e @ v[b, : len(j), g] / den[:, None], m + np.log(den)
    return o, lse
