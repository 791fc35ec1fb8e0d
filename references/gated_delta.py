"""The gated delta rule in plain `jax.numpy` and `lax`: what the kernels must equal.

For every batch row and head, with natural-log decay g_t <= 0, step size beta_t and state S of shape [K, V]:

    S   = exp(g_t) S                          decay
    u_t = beta_t (v_t - S^T k_t)              error on the decayed state
    S   = S + k_t u_t^T                       write
    o_t = scale S^T q_t                       read

Forms that share no more than the layout of their arguments:

    recurrent_gated_delta_rule    the four lines above, a `lax.scan` over tokens; in float64, the truth
    chunk_gated_delta_rule        chunks of C tokens, matmuls only; the path where there is no GPU
    affine_gated_delta_rule       chunk maps S_out = L S_in + b: `lax.scan`, or `lax.associative_scan`

Letters: B batch, T tokens, G key heads, H value heads (head h reads key head h // (H // G)), K and V head
sizes, R packed sequences; a sequence has N chunks of C tokens.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464, equation 10 and section 3.3);
Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv:2406.06484).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    state_v_first: bool = False,
) -> tuple[Array, Array | None]:
    """The recurrence itself, token by token.

    Args:
      q, k: `[B, T, G, K]`, in bf16, fp16, fp32 or fp64. Keys are expected with a norm of at most 1.
      v: `[B, T, H, V]`, H a multiple of G.
      g: `[B, T, H]`, natural logarithm of the decay, at most 0; -inf erases the state.
      beta: `[B, T, H]`, step size from 0 to 1; to 2 where eigenvalues may be negative.
      scale: factor on the output; `K**-0.5` if None.
      initial_state: `[B, H, K, V]` (`[R, H, K, V]` if packed) of any float dtype; zeros if None.
      output_final_state: whether the state after the last token is returned.
      use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum(x^2) + 1e-6)` first.
      cu_seqlens: int32 `[R + 1]`, ascending from 0: with B = 1, sequence r holds the tokens from offset r up
        to offset r + 1. Tokens after the last offset belong to none, and their outputs are 0.
      state_v_first: states are `[.., V, K]` instead.

    Returns:
      o `[B, T, H, V]` in v's dtype, and the final state in fp32 (float64 for float64 inputs) or None.
      Arguments are not checked here; `gated_delta.recurrent_gated_delta_rule` does that.
    """
    (B, T, G, K), (H, V) = q.shape, v.shape[2:]
    dtype = _working_dtype(q)
    scale = float(K**-0.5) if scale is None else scale
    S0 = _initial_state(initial_state, state_v_first, (q, k, v, g, beta), cu_seqlens)
    if T == 0 or S0.shape[0] == 0:
        return _result(jnp.zeros_like(v), S0, output_final_state, state_v_first)

    S0 = S0.reshape(-1, G, H // G, K, V)
    q, k, v_, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = q * _inverse_norm(q)[..., None], k * _inverse_norm(k)[..., None]
    v_, g, beta = (x.reshape(B, T, G, H // G, *x.shape[3:]) for x in (v_, g, beta))

    def token(S, x):
        q_t, k_t, v_t, g_t, beta_t = x
        S = jnp.exp(g_t)[..., None, None] * S
        u_t = beta_t[..., None] * (v_t - _einsum("bgk,bgrkv->bgrv", k_t, S))
        S = S + k_t[:, :, None, :, None] * u_t[..., None, :]
        return S, scale * _einsum("bgk,bgrkv->bgrv", q_t, S)

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v_, g, beta))
    if cu_seqlens is None:
        S, o = lax.scan(token, S0, xs)
    else:
        # R is no sequence's number: reads of it are clamped, writes to it are dropped.
        R = S0.shape[0]
        sequence = jnp.searchsorted(cu_seqlens, jnp.arange(T, dtype=cu_seqlens.dtype), side="right") - 1

        def packed_token(states, x):
            r, *x = x
            S, o_t = token(states.at[r].get(mode="clip")[None], x)
            return states.at[r].set(S[0], mode="drop"), jnp.where(r < R, o_t, 0)

        S, o = lax.scan(packed_token, S0, (sequence, *xs))
    o = jnp.moveaxis(o, 0, 1).reshape(B, T, H, V).astype(v.dtype)
    return _result(o, S.reshape(-1, H, K, V), output_final_state, state_v_first)


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    operand_dtype: str | None = None,
) -> tuple[Array, Array | None]:
    """The chunk form: what does not depend on the state all at once, then a scan over chunks that multiplies.

    With the inclusive sum D_t of g inside a chunk and E_ts = exp(D_t - D_s) for s <= t, else 0:

        A = (I + strictly_lower(diag(beta) (E * K K^T)))^-1
        Tm = A diag(beta)                    P = scale (E * Q K^T)             both for all chunks at once
        U  = Tm (V - diag(exp D) K S_in)                                       then chunk after chunk
        O  = scale diag(exp D) Q S_in + P U
        S_out = exp(D_C) S_in + K^T diag(exp(D_C - D)) U

    Args, returns: those of `recurrent_gated_delta_rule`, and
      chunk_size: C, any positive number.
      operand_dtype: None for the accuracy of the working dtype; "bfloat16" or "float16" rounds each operand
        of a matmul to that dtype's mantissa and accumulates in fp32, as a kernel on 16-bit matrix units does:
        Q, K, Tm, P, S_in, V - exp(D) K S_in, U and exp(D_C - D) U. The exponent keeps its range, as it does
        in a kernel that carries a power of two beside each tile. Gates, the inverse and the carried state
        stay fp32.
    """
    (B, T, G, K), (H, V) = q.shape, v.shape[2:]
    dtype, C = _working_dtype(q), chunk_size
    scale = float(K**-0.5) if scale is None else scale
    S0 = _initial_state(initial_state, state_v_first, (q, k, v, g, beta), cu_seqlens)
    if T == 0 or S0.shape[0] == 0:
        return _result(jnp.zeros_like(v), S0, output_final_state, state_v_first)

    def rounded(x):
        return x if operand_dtype is None else lax.reduce_precision(x, 8, jnp.finfo(operand_dtype).nmant)

    # q, k: [N, B, G, C, K]. v, g, beta: [N, B, G, H // G, C, ..]. No head of q and k is ever repeated.
    table = None if cu_seqlens is None else _chunk_table(cu_seqlens, T, C)
    q_, k_, v_, g_, beta_ = (
        jnp.moveaxis(_to_chunks(x.astype(dtype), C, table), (1, 3), (0, 2)) for x in (q, k, v, g, beta)
    )
    v_, g_, beta_ = (x.reshape(*x.shape[:2], G, H // G, *x.shape[3:]) for x in (v_, g_, beta_))

    # The norms of q and k are factors on rows and columns: their 16-bit values enter the matmuls unchanged.
    norm_q = norm_k = jnp.ones((1, 1, 1, 1, 1), dtype)
    if use_qk_l2norm_in_kernel:
        norm_q, norm_k = _inverse_norm(q_)[:, :, :, None], _inverse_norm(k_)[:, :, :, None]
    q_, k_ = rounded(q_), rounded(k_)

    D, difference = _gate_sums(g_)
    exp_D, exp_D_C, exp_rest = jnp.exp(D), jnp.exp(D[..., -1]), jnp.exp(difference[..., -1, :])
    lower = np.tril(np.ones((C, C), bool))
    # The exponent is masked before exp: exp of a positive D_t - D_s (s > t) could be inf, and inf * 0 is NaN in
    # the backward pass.
    E = jnp.exp(jnp.where(lower, difference, -jnp.inf)) * norm_k[..., None, :]
    kk = _einsum("nbgtk,nbgsk->nbgts", k_, k_)[:, :, :, None]
    qk = _einsum("nbgtk,nbgsk->nbgts", q_, k_)[:, :, :, None]
    M = jnp.where(np.tril(lower, -1), (norm_k * beta_)[..., None] * E * kk, 0)
    Tm = rounded(_unit_lower_inverse(M) * beta_[..., None, :])
    P = rounded((scale * norm_q)[..., None] * E * qk)
    k_in, k_out, q_in = norm_k * exp_D, norm_k * exp_rest, scale * norm_q * exp_D

    def chunk(S, x):
        q_n, k_n, v_n, Tm_n, P_n, k_in_n, k_out_n, q_in_n, exp_D_C_n = x
        S_op = rounded(S)
        R = v_n - k_in_n[..., None] * _einsum("bgck,bgrkv->bgrcv", k_n, S_op)
        U = _einsum("bgrts,bgrsv->bgrtv", Tm_n, rounded(R))
        O = q_in_n[..., None] * _einsum("bgck,bgrkv->bgrcv", q_n, S_op)
        O = O + _einsum("bgrts,bgrsv->bgrtv", P_n, rounded(U))
        S = exp_D_C_n[..., None, None] * S + _einsum("bgck,bgrcv->bgrkv", k_n, rounded(k_out_n[..., None] * U))
        return S, O

    xs = (q_, k_, v_, Tm, P, k_in, k_out, q_in, exp_D_C)
    S0 = S0.reshape(-1, G, H // G, K, V)
    if table is None:
        S, O = lax.scan(chunk, S0, xs)
    else:

        def packed_chunk(states, x):
            r, *x = x
            S, O = chunk(states.at[r].get(mode="clip")[None], x)
            return states.at[r].set(S[0], mode="drop"), O

        S, O = lax.scan(packed_chunk, S0, (table.sequence, *xs))
    # [N, B, G, H // G, C, V] -> [B, N, C, H, V]
    O = jnp.transpose(O, (1, 0, 4, 2, 3, 5)).reshape(B, -1, C, H, V)
    o = _from_chunks(O, T, table).astype(v.dtype)
    return _result(o, S.reshape(-1, H, K, V), output_final_state, state_v_first)


def affine_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    associative: bool = False,
) -> tuple[Array, Array | None]:
    """The chunk form through affine maps `S_out = L S_in + b`, one for each chunk.

    With A, D and E as in `chunk_gated_delta_rule` and Kt_s = exp(D_C - D_s) k_s:

        Ul = A diag(beta) V        Wc = A diag(beta exp(D)) K       by forward substitution
        L  = exp(D_C) I - Kt^T Wc  b  = Kt^T Ul
        O  = scale (diag(exp D) Q S_in + (E * Q K^T) (Ul - Wc S_in))

    The map (L2, b2) after (L1, b1) is (L2 L1, L2 b1 + b2). That composition is associative, which is what allows a
    sequence to be split into chunks, windows or devices anywhere.

    D_t - D_s is summed afresh for each pair (t, s), and each value head gets its own copy of the keys: slower than
    `chunk_gated_delta_rule` and on purpose unlike it.

    Args, returns: those of `recurrent_gated_delta_rule`, but for NaN and inf, which here pass on to later sequences
    (0 times NaN), and
      chunk_size: C, any positive number.
      associative: compose the maps as a tree, by `lax.associative_scan`, instead of applying one after the other.
    """
    (_, T, G, K), (H, V) = q.shape, v.shape[2:]
    dtype, C = _working_dtype(q), chunk_size
    scale = float(K**-0.5) if scale is None else scale
    S0 = _initial_state(initial_state, state_v_first, (q, k, v, g, beta), cu_seqlens)
    if T == 0 or S0.shape[0] == 0:
        return _result(jnp.zeros_like(v), S0, output_final_state, state_v_first)

    table = None if cu_seqlens is None else _chunk_table(cu_seqlens, T, C)
    q_, k_ = (jnp.repeat(x.astype(dtype), H // G, axis=2) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q_, k_ = q_ * _inverse_norm(q_)[..., None], k_ * _inverse_norm(k_)[..., None]
    # [N, B, H, C, ..]
    q_, k_, v_, g_, beta_ = (
        jnp.moveaxis(_to_chunks(x.astype(dtype), C, table), (1, 3), (0, 2)) for x in (q_, k_, v, g, beta)
    )

    g_ = jnp.maximum(g_, _gate_floor(dtype))
    strict = np.tril(np.ones((C, C), bool), -1)
    # sums[t, s] = g_(s+1) + .. + g_t
    sums = jnp.cumsum(jnp.where(strict, g_[..., :, None], 0), axis=-2)
    E = jnp.exp(jnp.where(strict | np.eye(C, dtype=bool), sums, -jnp.inf))
    D = jnp.cumsum(g_, axis=-1)
    M = jnp.where(strict, beta_[..., None] * E * _einsum("nbhtk,nbhsk->nbhts", k_, k_), 0)
    right = jnp.concatenate([beta_[..., None] * v_, (beta_ * jnp.exp(D))[..., None] * k_], axis=-1)
    solved = lax.linalg.triangular_solve(M, right, left_side=True, lower=True, unit_diagonal=True)
    Ul, Wc = solved[..., :V], solved[..., V:]
    Kt = E[..., -1, :, None] * k_
    L = jnp.exp(D[..., -1])[..., None, None] * jnp.eye(K, dtype=dtype) - _einsum("nbhck,nbhcj->nbhkj", Kt, Wc)
    b = _einsum("nbhck,nbhcv->nbhkv", Kt, Ul)

    # A sequence's first chunk starts from that sequence's state, whatever stood before: its map becomes the
    # constant (0, L S0 + b).
    N = b.shape[0]
    if table is None:
        first, starts = np.arange(N) == 0, jnp.broadcast_to(S0, b.shape)
    else:
        first, starts = table.first, S0.at[table.sequence].get(mode="clip")[:, None]
    first = first[:, None, None, None, None]
    b = jnp.where(first, _einsum("nbhkj,nbhjv->nbhkv", L, starts) + b, b)
    S = (_states_as_a_tree if associative else _states_one_by_one)(jnp.where(first, 0, L), b)
    S_in = jnp.where(first, starts, jnp.roll(S, 1, axis=0))

    O = jnp.exp(D)[..., None] * _einsum("nbhck,nbhkv->nbhcv", q_, S_in)
    U = Ul - _einsum("nbhck,nbhkv->nbhcv", Wc, S_in)
    P = E * _einsum("nbhtk,nbhsk->nbhts", q_, k_)
    O = scale * (O + _einsum("nbhts,nbhsv->nbhtv", P, U))
    o = _from_chunks(jnp.transpose(O, (1, 0, 3, 2, 4)), T, table).astype(v.dtype)
    if table is None:
        S = S[-1]
    else:
        used = (table.count > 0)[:, None, None, None]
        S = jnp.where(used, S[:, 0].at[table.start + table.count - 1].get(mode="clip"), S0)
    return _result(o, S, output_final_state, state_v_first)


def _states_one_by_one(L: Array, b: Array) -> Array:
    """The state after each chunk, `[N, ..]`."""

    def apply(S, Lb):
        S = _einsum("bhkj,bhjv->bhkv", Lb[0], S) + Lb[1]
        return S, S

    return lax.scan(apply, jnp.zeros_like(b[0]), (L, b))[1]


def _states_as_a_tree(L: Array, b: Array) -> Array:
    """The same. The first chunk's L is 0, so the b of a composed map is the state itself."""

    def compose(earlier, later):
        (L1, b1), (L2, b2) = earlier, later
        return _einsum("nbhkj,nbhji->nbhki", L2, L1), _einsum("nbhkj,nbhjv->nbhkv", L2, b1) + b2

    return lax.associative_scan(compose, (L, b))[1]


class _ChunkTable(NamedTuple):
    """Which tokens of packed sequences each chunk holds. A chunk never holds tokens of two sequences."""

    # [N]: R where the chunk is unused
    sequence: Array
    # [N]
    first: Array
    # [N, C]: index of the token, and whether there is one
    token: Array
    valid: Array
    # [R]: first chunk and number of chunks of each sequence
    start: Array
    count: Array
    # [T]: chunk and row of each token, and whether it belongs to a sequence
    chunk: Array
    row: Array
    used: Array


def _chunk_table(cu_seqlens: Array, T: int, C: int) -> _ChunkTable:
    """Chunks of packed sequences; `(T + R (C - 1)) // C` of them always suffice, whatever the offsets."""
    cu = cu_seqlens.astype(jnp.int32)
    R = cu.shape[0] - 1
    N = (T + R * (C - 1)) // C
    count = (cu[1:] - cu[:-1] + C - 1) // C
    end = jnp.cumsum(count)
    start = end - count

    n = jnp.arange(N, dtype=jnp.int32)
    sequence = jnp.searchsorted(end, n, side="right").astype(jnp.int32)
    r = jnp.minimum(sequence, R - 1)
    token = (cu[r] + C * (n - start[r]))[:, None] + jnp.arange(C, dtype=jnp.int32)[None]
    valid = (sequence < R)[:, None] & (token < cu[r + 1][:, None])

    t = jnp.arange(T, dtype=jnp.int32)
    owner = jnp.searchsorted(cu, t, side="right").astype(jnp.int32) - 1
    used = owner < R
    owner = jnp.minimum(owner, R - 1)
    place = t - cu[owner]
    return _ChunkTable(sequence, n == start[r], token, valid, start, count, start[owner] + place // C, place % C, used)


def _to_chunks(x: Array, C: int, table: _ChunkTable | None) -> Array:
    """`[B, T, ..]` -> `[B, N, C, ..]`, zeros where a chunk has no token: they leave the state alone."""
    B, T = x.shape[:2]
    if table is None:
        x = jnp.pad(x, ((0, 0), (0, -T % C)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(B, -1, C, *x.shape[2:])
    valid = table.valid.reshape(1, *table.valid.shape, *(1,) * (x.ndim - 2))
    return jnp.where(valid, x.at[:, table.token].get(mode="clip"), 0)


def _from_chunks(x: Array, T: int, table: _ChunkTable | None) -> Array:
    """`[B, N, C, ..]` -> `[B, T, ..]`, zeros for tokens of no sequence."""
    if table is None:
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]
    used = table.used.reshape(1, T, *(1,) * (x.ndim - 3))
    return jnp.where(used, x.at[:, table.chunk, table.row].get(mode="clip"), 0)


def _gate_floor(dtype) -> float:
    """exp of it is 0 in `dtype`: no decay is lost, and -inf becomes a number that can be subtracted."""
    return -104.0 if dtype == jnp.float32 else -746.0


def _gate_sums(g: Array) -> tuple[Array, Array]:
    """Inclusive sums D `[.., C]` over the last axis, and the differences D_t - D_s `[.., C, C]`.

    After one strong gate (-104, say) the differences of one fp32 sum are off by up to 8e-6. So g is split,
    exactly, into a multiple of a power of two, coarse enough that sums of C of them are exact, and a small
    rest; both are summed and subtracted by themselves.
    """
    floor = _gate_floor(g.dtype)
    g = jnp.maximum(g, floor)
    # C multiples of the unit, each at most -floor, have to fit into the bits of a significand.
    unit = 2.0 ** -math.floor(math.log2(2.0 ** (jnp.finfo(g.dtype).nmant + 1) / (g.shape[-1] * -floor)))
    coarse = lax.stop_gradient(jnp.round(g / unit) * unit)
    coarse, rest = jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1)
    difference = (coarse[..., :, None] - coarse[..., None, :]) + (rest[..., :, None] - rest[..., None, :])
    return coarse + rest, difference


def _unit_lower_inverse(M: Array) -> Array:
    """(I + M)^-1 for strictly lower triangular M `[.., C, C]`, by forward substitution.

    A Neumann or Newton series is no substitute: for 64 repetitions of one key its terms reach 1e7 times the
    result before they cancel.
    """
    I = jnp.broadcast_to(jnp.eye(M.shape[-1], dtype=M.dtype), M.shape)
    return lax.linalg.triangular_solve(M, I, left_side=True, lower=True, unit_diagonal=True)


def _inverse_norm(x: Array) -> Array:
    """1 / sqrt(sum(x^2) + 1e-6) over the last axis; finite with its derivative at x = 0."""
    return lax.rsqrt(jnp.sum(x * x, axis=-1) + 1e-6)


def _einsum(subscripts: str, *operands: Array) -> Array:
    # HIGHEST: without it a GPU multiplies fp32 in TF32, which is short of the 2e-6 promised.
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


def _working_dtype(q: Array):
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


def _initial_state(initial_state, state_v_first, qkvgb, cu_seqlens):
    """`[B | R, H, K, V]` in the working dtype."""
    q, _, v, _, _ = qkvgb
    dtype = _working_dtype(q)
    if initial_state is not None:
        S = initial_state.astype(dtype)
        S = jnp.swapaxes(S, -1, -2) if state_v_first else S
    else:
        rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        S = jnp.zeros((rows, v.shape[2], q.shape[3], v.shape[3]), dtype)
    # Under shard_map the carry of a scan must vary over every mesh axis that its inputs vary over.
    axes = set().union(*(jax.typeof(x).manual_axis_type.varying for x in qkvgb))
    missing = axes - set(jax.typeof(S).manual_axis_type.varying)
    return lax.pcast(S, tuple(missing), to="varying") if missing else S


def _result(o, S, output_final_state, state_v_first):
    if not output_final_state:
        return o, None
    return o, jnp.swapaxes(S, -1, -2) if state_v_first else S
