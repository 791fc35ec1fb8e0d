"""The decode kernel: a few tokens a call, one launch, the state read once and written once.

The recurrence itself, in fp32 on one slice of V:

    S  <- exp(g_t) S
    u   = beta_t (v_t - S^T k_t)
    S  <- S + k_t u^T
    o_t = scale S^T q_t

A call moves the state (K V 4 bytes a head, in and out) and little else: it is bound by memory.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from amdgpu.launch import vary_alike
from gated_delta import grid
from gated_delta.grid import Problem
from gated_delta.kernel import LOWEST_LOG_DECAY, NORM_EPSILON
from gated_delta.tiles import call, columns, load, tile_mask


def decode_body(ins, outs, *, p: Problem, scale):
    """All tokens of one sequence, for one head and one slice of V."""
    sequence, _, part = grid.scan_program(pl.program_id(0), p.heads, p.config.dv_splits)
    features = columns(0, p.key_size, p.key_tile)
    values = columns(part * p.slice_size, p.slice_size, p.slice_tile)
    # The tile has the state's own layout, so that its rows are contiguous in memory.
    rows, cols = (values, features) if p.state_v_first else (features, values)
    of_feature, of_value = (lambda x: x[:, None]), (lambda x: x[None, :])
    feature_axis = 0
    if p.state_v_first:
        of_feature, of_value, feature_axis = of_value, of_feature, 1
    tile = (rows.index[:, None], cols.index[None, :])

    first, end = 0, p.seq_len
    if p.sequences is not None:
        first, end = (jnp.clip(ins["cu_seqlens"][sequence + i], 0, p.seq_len) for i in (0, 1))

    def token(t, state):
        q, k = (load(ins[n].at[t, features.index], features.mask).astype(jnp.float32) for n in ("q", "k"))
        v = load(ins["v"].at[t, values.index], values.mask).astype(jnp.float32)
        g, beta = (ins[n][t].astype(jnp.float32) for n in ("g", "beta"))
        if p.l2norm:
            q, k = (x * lax.rsqrt(jnp.sum(x * x) + NORM_EPSILON) for x in (q, k))
        state = jnp.exp(jnp.maximum(g, LOWEST_LOG_DECAY)) * state
        u = beta * (v - jnp.sum(of_feature(k) * state, axis=feature_axis))
        state = state + of_feature(k) * of_value(u)
        o = scale * jnp.sum(of_feature(q) * state, axis=feature_axis)
        plgpu.store(outs["o"].at[t, values.index], o.astype(p.dtype), mask=values.mask)
        return state

    if p.has_initial:
        state = load(ins["state"].at[tile], tile_mask(rows, cols)).astype(jnp.float32)
    else:
        state = jnp.zeros((rows.index.size, cols.index.size), jnp.float32)
    state = lax.fori_loop(first, end, token, state)
    if p.keeps_states:
        plgpu.store(outs["state"].at[tile], state, mask=tile_mask(rows, cols))


def decode(p: Problem, operands: dict, *, scale, architecture):
    """One launch.

    Args:
      p: the static facts.
      operands: q, k, v, g, beta; `initial_state` where `p.has_initial`; `cu_seqlens` of packed sequences.
      scale: of the rule.
      architecture: what it is lowered for ("gfx942", "sm_90"), or None for interpret mode.

    Returns:
      (o, final states in fp32, or None where they are not asked for)
    """
    plan = grid.plan_decode(p)
    operands = dict(operands)
    if p.has_initial:
        operands["state"] = operands["initial_state"].astype(jnp.float32)
    if p.sequences is not None:
        # Sequences may end before T: what no sequence holds is 0.
        operands["o"] = jnp.zeros_like(operands["v"])
    operands = vary_alike(operands)
    body = functools.partial(decode_body, p=p, scale=scale)
    results = call(body, "gated_delta_decode", p, plan, operands, interpret=architecture is None)
    return results["o"], results.get("state")
