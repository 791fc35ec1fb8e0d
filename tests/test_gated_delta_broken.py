"""The comparison is worth something: kernels with one fault each, of kinds that shipped elsewhere, fail it."""

from dataclasses import replace
from functools import partial

import jax
import pytest
from planted import broken

import gated_delta
from gated_delta import grid, kernel, prefill
from references import accuracy
from references.cases import GatedDeltaCase, inputs

pytestmark = pytest.mark.usefixtures("fresh_traces")

# fp32 and a slow decay, across window boundaries, with a ragged end and two key heads: where each fault shows.
CASE = GatedDeltaCase("broken", "", 1, 90, 2, 4, 16, 16, gates=-1e-3)
CONFIG = gated_delta.Config(16, 2, 1)


broken_kernel = partial(broken, kernel)


def carry_scaled():
    return broken_kernel(("leave(last, unit[:, None] * state)", "leave(last, 0.99 * unit[:, None] * state)"))


def error_before_decay():
    # beta (v - S^T k) with the state before its decay: keys read a state that is exp(-g) larger.
    return broken_kernel(
        ('outs["key_in"][...] = from_start * key_norm', 'outs["key_in"][...] = from_start * jnp.exp(-g) * key_norm'),
        ("key_row = (beta * key_norm)[:, None]", "key_row = (beta * jnp.exp(-g) * key_norm)[:, None]"),
    )


def last_gate_from_a_padded_slot():
    return broken_kernel(
        ("coarse_end, fine_end = jnp.sum(coarse), jnp.sum(fine)",
         "coarse_end, fine_end = jnp.sum(jnp.where(live, coarse, -1.0)), jnp.sum(fine)"),
    )  # fmt: skip


def padding_that_decays():
    return broken_kernel(
        ('g = jnp.where(live, load_tokens(ins["g"], (), rows), 0.0)',
         'g = jnp.where(live, load_tokens(ins["g"], (), rows), -1.0)'),
    )  # fmt: skip


def padding_that_writes():
    return broken_kernel(
        ('beta = jnp.where(live, load_tokens(ins["beta"], (), rows), 0.0)',
         'beta = load_tokens(ins["beta"], (), rows)'),
        ("to_end = jnp.where(live, exp((coarse_end - coarse) + (fine_end - fine), p), 0.0)",
         "to_end = exp((coarse_end - coarse) + (fine_end - fine), p)"),
    )  # fmt: skip


def skipped_chunk():
    return broken_kernel(("chunk = first + i\n", "chunk = first + jnp.where(i == 1, 0, i)\n"))


FAULTS = [
    carry_scaled,
    error_before_decay,
    last_gate_from_a_padded_slot,
    padding_that_decays,
    padding_that_writes,
    skipped_chunk,
]


def worst_excess(case=CASE):
    """The largest error over its bound: at most 1 where the comparison passes."""
    jax.clear_caches()
    arguments = inputs(case)
    truth = accuracy.gated_delta_truth(arguments)
    result = gated_delta.chunk_gated_delta_rule(**arguments, implementation="pallas", config=CONFIG)
    errors = accuracy.gated_delta_errors(result, truth)
    bounds = accuracy.gated_delta_bounds(case, arguments, truth, chunk_size=16)
    return max(error / bound for error, bound in zip(errors, bounds, strict=True))


def test_the_kernel_as_it_is_passes():
    assert worst_excess() <= 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(monkeypatch, fault):
    monkeypatch.setattr(prefill, "kernel", fault())
    assert worst_excess() > 10


def test_heads_modulo_groups_are_seen(monkeypatch):
    monkeypatch.setattr(grid, "group_of", lambda head, heads, groups: head % groups)
    assert worst_excess() > 10


def test_a_single_gate_sum_is_seen(monkeypatch):
    """One fp32 sum of g instead of two loses accuracy after a strong gate."""
    case = replace(CASE, gates="strong16", keys="correlated")
    one_sum = broken_kernel(("coarse = jnp.floor(g / GATE_STEP) * GATE_STEP", "coarse = g"))
    monkeypatch.setattr(prefill, "kernel", one_sum)
    assert worst_excess(case) > 1
