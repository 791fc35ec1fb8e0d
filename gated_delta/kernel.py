"""The three passes of the gated delta rule prefill, as the bodies of its kernels (`gated_delta.prefill` runs them).

With D_t the sum of g from the chunk's first token to t, E_ts = exp(D_t - D_s) for s <= t (else 0), and S the state
at the chunk's start, a chunk is (references.gated_delta derives it)

    locals    gram     = M = strictly_lower(diag(beta) (E * K K^T))
              solve    = (I + M)^-1 diag(beta)            [C, C], by `gated_delta.inverse`
              score    = E * Q K^T                        [C, C]
              key_in   = exp(D),  key_out = exp(D_C - D),  decay = exp(D_C)
              query_in = exp(D), which without l2norm is `key_in`
    scan      U   = solve (V - key_in K S)                [C, V]
              S  <- decay S + K^T (key_out U)             [K, V]
    outputs   O   = scale (query_in Q S + score U)        [C, V]

which is the affine map S <- (decay I - K^T key_out solve key_in K) S + K^T key_out solve V, never formed.
L2 normalisation multiplies rows and columns: it is folded into key_in, key_out, query_in and the two [C, C] matrices,
so normalised keys are never rounded. Decayed keys are never stored: only their per-token factors are.

Precision. Sums, gates, the inverse and the carried state are fp32. A product's operands have the input dtype:

    fp32   products keep fp32 accuracy (`product_precision`).
    fp16   S is kept relative to a power of two, one for each column of V in each chunk, about that column's norm;
           R = V - key_in K S and U relative to `update_power` of it. A state of 65536 stays finite and a small one
           normal. Neither power depends on the chunk's tokens, so no output depends on a later token.
    bf16   `solve` and R enter their product as two terms, x = hi + lo. What is left is the rounding of S, U, score and
           the output; with one term each the error is 3.6e-3 to 4.7e-3, around the 4e-3 that is promised.

`query_in` of 16-bit inputs reaches a scan with outputs as three terms of bf16, which are exact, and is added up by a
product, which leaves it where the product with Q is.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from gated_delta import grid
from gated_delta.grid import Problem
from gated_delta.inverse import solve_body, substitute
from gated_delta.tiles import (
    columns,
    dot,
    load,
    load_tile,
    load_tokens,
    product_precision,
    split_terms,
    store_tile,
    sum_of_terms,
    terms_of_rows,
    tile_mask,
    token_rows,
    transposed,
)

# exp(-104) is 0 in fp32, so this floor loses nothing and makes g = -inf (a full reset) an ordinary number.
LOWEST_LOG_DECAY = -104.0
# Sums of up to 128 multiples of 2^-10 that are at least -104 are exact in fp32.
GATE_STEP = 2.0**-10
LOG2_E = math.log2(math.e)
# Under the square root of an l2 norm, as in the reference.
NORM_EPSILON = 1e-6


def power_of_two(square):
    """The power of two p with p <= sqrt(square) < 2 p, for normal numbers >= 0; 1 for zero."""
    exponent = lax.bitcast_convert_type(square, jnp.int32) >> 23
    # A biased exponent e stands for e - 127, of which the half, rounded down, is biased again.
    return lax.bitcast_convert_type(jnp.where(exponent > 0, (exponent + 127) >> 1, 127) << 23, jnp.float32)


def update_power(power):
    """The power of two that R and U are relative to: |V| < 2^16 and |k^T S| < 2^13 of it leave room to grow twofold."""
    return jnp.maximum(power * 2.0**-12, 2.0)


def reciprocal(power):
    """1 / p of a power of two, exactly."""
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(power, jnp.int32), jnp.float32)


def exp(x, p: Problem):
    """exp(x). For 16-bit inputs by a power of two, which takes fewer instructions; relative error about |x| 2^-24."""
    return jnp.exp(x) if p.dtype == jnp.float32 else jnp.exp2(x * LOG2_E)


def square_norms(products, diagonal):
    """|x|^2 of each row of x [C, K], fp32, from the diagonal of x x^T.

    With one warp for each chunk, sums along rows of K elements took as many instructions as all the rest, and spilled.
    """
    return jnp.sum(jnp.where(diagonal, products, 0.0), axis=1)


def norm_factor(square):
    return lax.rsqrt(square + NORM_EPSILON)


def locals_body(program, window, ins, outs, *, p: Problem, architecture):
    """Pass (a), one chunk of one head: all that does not depend on the state, but for the inverse."""
    c = p.config.chunk_size
    in_window, _, _ = grid.chunk_program(program, p.batch, p.heads)
    rows, existing = token_rows(p, ins, window * p.window_chunks + in_window)
    live = existing.mask
    assert live is not None
    features = columns(0, p.key_size, p.key_tile)
    t, s = (lax.broadcasted_iota(jnp.int32, (c, c), d) for d in range(2))
    precision = product_precision(p, architecture)
    # First all products, the queries' norms before the keys are there: else gfx11 spills.
    query_norm = key_norm = query_row = key_column = 1.0
    q = load_tile(ins["q"], (), rows, features)
    if p.l2norm:
        query_norm = norm_factor(square_norms(dot(q, q.T, precision), t == s))
        query_row = query_norm[:, None]
    k = load_tile(ins["k"], (), rows, features)
    keys_keys, queries_keys = dot(k, k.T, precision), dot(q, k.T, precision)
    key_squares = square_norms(keys_keys, t == s)
    if p.l2norm:
        key_norm = norm_factor(key_squares)
        key_column = key_norm[None, :]
    beta = jnp.where(live, load_tokens(ins["beta"], (), rows), 0.0)
    g = jnp.where(live, load_tokens(ins["g"], (), rows), 0.0)

    # D = coarse + fine. Differences of D keep fp32 accuracy, which one sum would lose after a strong gate: next to
    # -104 an ulp is 8e-6. The coarse sums are exact, and the fine ones are below 2^-3.
    g = jnp.maximum(g, LOWEST_LOG_DECAY)
    coarse = jnp.floor(g / GATE_STEP) * GATE_STEP
    fine = g - coarse
    coarse_end, fine_end = jnp.sum(coarse), jnp.sum(fine)
    coarse, fine = jnp.cumsum(coarse), jnp.cumsum(fine)
    from_start = exp(coarse + fine, p)
    to_end = jnp.where(live, exp((coarse_end - coarse) + (fine_end - fine), p), 0.0)
    if p.scaled:
        # Tokens that write nothing have no part in `key_power`: with beta = 0, or a zero key, whose factor is 1000.
        to_end = jnp.where((beta != 0) & (key_squares > 0), to_end, 0.0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    # Select, then exp: above the diagonal the exponent is positive and may overflow.
    decays = exp(jnp.where(t >= s, between, -jnp.inf), p)

    key_out = to_end * key_norm
    if p.scaled:
        key_power = power_of_two(jnp.square(jnp.max(key_out)))
        key_out = reciprocal(key_power) * key_out
        outs["key_power"][...] = key_power
    outs["key_in"][...] = from_start * key_norm
    outs["key_out"][...] = key_out
    if p.query_terms:
        outs["query_in"][...] = terms_of_rows(query_norm * from_start)
    elif p.l2norm:
        outs["query_in"][...] = query_norm * from_start
    outs["decay"][...] = exp(coarse_end + fine_end, p)
    outs["score"][...] = (query_row * key_column * decays * queries_keys).astype(p.dtype)

    key_row = (beta * key_norm)[:, None]
    outs["gram"][...] = jnp.where(t > s, key_row * key_column * decays * keys_keys, 0.0)
    outs["strength"][...] = beta


def prepare_body(program, window, ins, outs, *, p: Problem, architecture):
    """Pass (a) of one chunk of one head in one kernel: a barrier stands where otherwise a launch ends."""

    def barrier():
        if architecture is not None:
            plgpu.debug_barrier()

    locals_body(program, window, ins, outs, p=p, architecture=architecture)
    barrier()
    substitute(outs["gram"], outs["blocks"], (), lax.iota(jnp.int32, p.config.chunk_size))
    barrier()
    solve_body(program, window, outs, outs, p=p, architecture=architecture)


def scan_body(program, window, ins, outs, *, p: Problem, scale, architecture):
    """Pass (b), one head and one slice of V: carries the state over the chunks of a window.

    Stores each chunk's first state and its updates for pass (c), or under `outputs_in_scan` does that pass's work.

    All tiles are held transposed: S^T [V / dv_splits, K], R^T and U^T [V / dv_splits, C]. A warp then owns rows of V,
    and S, R and U pass from one product to the next in its registers. fp16 keeps `state` in units of `unit`, one for
    each row.

    `ins["initial_state"]` (optional) has each sequence's initial state. `outs["carry"]` (optional, in place) takes the
    state from window to window; where final states are asked for it is their buffer, a row for each sequence.
    """
    b, _, slice_of_values = grid.scan_program(program, p.heads, p.config.dv_splits)
    first = window * p.window_chunks
    last = jnp.minimum(first + p.window_chunks, p.chunks) - 1
    features = columns(0, p.key_size, p.key_tile)
    values = columns(slice_of_values * p.slice_size, p.slice_size, p.slice_tile)
    square = columns(0, p.config.chunk_size, p.config.chunk_size)
    precision = product_precision(p, architecture)

    def sequence_of(chunk):
        """(sequence, whether the chunk is its first, whether it is its last)."""
        if p.sequences is None:
            return b, chunk == 0, chunk == p.chunks - 1
        row = [ins["table"][chunk, column] for column in (grid.SEQUENCE, grid.OPENS, grid.CLOSES)]
        return row[0], row[1] == 1, row[2] == 1

    def state_at(ref, row):
        v, k = values.index[:, None], features.index[None, :]
        return ref.at[row, v, k] if p.state_v_first else ref.at[row, k, v]

    def load_state(ref, row, condition):
        return load(state_at(ref, row), tile_mask(values, features, condition)).astype(jnp.float32)

    def enter(chunk, state):
        """The state before `chunk`, which may open a sequence or the window."""
        sequence, opens, _ = sequence_of(chunk)
        if "carry" in outs:
            resumes = (chunk == first) & ~opens
            carried = load_state(outs["carry"], sequence if p.keeps_states else b, resumes)
            state = jnp.where(resumes, carried, state)
        fresh = load_state(ins["initial_state"], sequence, opens) if "initial_state" in ins else 0.0
        return jnp.where(opens, fresh, state)

    def leave(chunk, state):
        """Stores the state after `chunk` where the chunk closes a sequence or the window."""
        if "carry" in outs:
            sequence, _, closes = sequence_of(chunk)
            stores = chunk == last
            if p.keeps_states:
                stores |= closes
            if p.keeps_states and p.sequences is not None:
                # A chunk that is not needed counts as the last sequence's, which may be empty.
                stores &= ins["table"][chunk, grid.LENGTH] > 0
            mask = tile_mask(values, features, stores)
            plgpu.store(state_at(outs["carry"], sequence if p.keeps_states else b), state, mask=mask)

    def factors(i):
        """The scalars that a chunk's state and updates are multiplied with, by name."""
        found = {"decay": ins["decay"][i]}
        if p.scaled:
            found["key_power"] = ins["key_power"][i]
        return found

    def ahead(i):
        """The factors of chunk i, loaded one chunk early; None where the scan loads them in place.

        No product of that chunk depends on them, so the compiler does not pipeline their loads, and the scan with
        outputs would wait for them.
        """
        return factors(jnp.minimum(i, p.window_chunks - 1)) if p.config.outputs_in_scan else None

    def step(i, carried):
        state, unit, fetched = carried
        chunk = first + i
        rows, existing = token_rows(p, ins, chunk)
        if p.sequences is not None:
            state, unit = enter(chunk, unit[:, None] * state), jnp.ones_like(unit)
        k = load_tile(ins["k"], (), rows, features)
        v = transposed(load_tile(ins["v"], (), rows, values), architecture)
        solve = [load_tile(ins["solve"], (i, jnp.int32(term)), square, square).T for term in range(p.terms)]
        key_in, key_out = (load_tokens(ins[name], (i,), square)[None, :] for name in ("key_in", "key_out"))
        query_in = key_in  # before fp16 makes that relative to its powers

        here, following = fetched or factors(i), ahead(i + 1)
        decay, rescale = here["decay"], 1.0
        if p.scaled:
            power = unit * power_of_two(jnp.sum(state * state, axis=1))
            if "power" in outs:
                plgpu.store(outs["power"].at[i, values.index], power, mask=values.mask)
            scale_update, key_power = update_power(power), here["key_power"]
            v, key_in = reciprocal(scale_update)[:, None] * v, (power * reciprocal(scale_update))[:, None] * key_in
            rescale = (unit * reciprocal(power))[:, None]
            decay = decay * (unit * reciprocal(scale_update * key_power))[:, None]
            unit = scale_update * key_power
        rounded_state = (rescale * state).astype(p.dtype)
        if not p.config.outputs_in_scan:
            store_tile(outs["state"], (i,), values, features, rounded_state)

        residual = split_terms(v - key_in * dot(rounded_state, k.T, precision), p.dtype, p.terms)
        update = dot(residual[0], solve[0], precision)
        if p.terms == 2:
            update = update + dot(residual[0], solve[1]) + dot(residual[1], solve[0])
        state = decay * state + dot((key_out * update).astype(p.dtype), k, precision)
        if p.config.outputs_in_scan:
            q, score = load_tile(ins["q"], (), rows, features), load_tile(ins["score"], (i,), square, square)
            if p.query_terms:
                terms = load_tile(ins["query_in"], (i,), columns(0, grid.BLOCK, grid.BLOCK), square)
                query_in = sum_of_terms(terms, p.slice_tile)
            elif p.l2norm:
                query_in = load_tokens(ins["query_in"], (i,), square)[None, :]
            past = query_in * dot(rounded_state, q.T, precision)
            present = dot(update.astype(p.dtype), score.T, precision)
            if p.scaled:
                past, present = power[:, None] * past, scale_update[:, None] * present
            store_tile(outs["o"], (), existing, values, (scale * (past + present)).astype(p.dtype).T)
        else:
            # Last, which keeps its addresses out of the products' registers: earlier costs a spill on gfx1151.
            store_tile(outs["update"], (i,), values, square, update.astype(p.dtype))
        if p.sequences is not None:
            leave(chunk, unit[:, None] * state)
        return state, unit, following

    state = jnp.zeros((p.slice_tile, p.key_tile), jnp.float32)
    if p.sequences is None:
        state = enter(first, state)
    unit = jnp.ones((p.slice_tile,), jnp.float32)
    state, unit, _ = lax.fori_loop(0, last + 1 - first, step, (state, unit, ahead(0)))
    if p.sequences is None:
        leave(last, unit[:, None] * state)


def outputs_body(program, window, ins, outs, *, p: Problem, scale, architecture):
    """Pass (c), one chunk of one head: one slice of V after the other, the features in blocks of at most 64.

    Neither is taken whole: [K, V] = 128 x 128 at once would need four times the LDS and, in fp32, spill.
    """
    in_window, _, _ = grid.chunk_program(program, p.batch, p.heads)
    rows, existing = token_rows(p, ins, window * p.window_chunks + in_window)
    square = columns(0, p.config.chunk_size, p.config.chunk_size)
    width = min(64, p.key_tile)
    blocks = [columns(start, min(width, p.key_size - start), width) for start in range(0, p.key_size, width)]
    precision = product_precision(p, architecture)
    q = [load_tile(ins["q"], (), rows, block) for block in blocks]
    score = load_tile(ins["score"], (), square, square)
    query_in = load_tokens(ins["query_in" if p.l2norm else "key_in"], (), square)[:, None]

    def one_slice(part, _):
        values = columns(part * p.slice_size, p.slice_size, p.slice_tile)
        states = [load_tile(ins["state"], (), values, block) for block in blocks]
        update = load_tile(ins["update"], (), values, square)
        past = query_in * functools.reduce(jnp.add, [dot(x, s.T, precision) for x, s in zip(q, states, strict=True)])
        present = dot(score, update.T, precision)
        if p.scaled:
            power = load(ins["power"].at[values.index], values.mask)
            past, present = power[None, :] * past, update_power(power)[None, :] * present
        store_tile(outs["o"], (), existing, values, (scale * (past + present)).astype(p.dtype))

    # A loop, not one slice after the other in the program's text: the compiler would load them all at once.
    lax.fori_loop(0, p.config.dv_splits, one_slice, None)
