"""The comparison is worth something: kernels with one fault each, of kinds that shipped elsewhere, fail it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from attention_truth import flash_rows, qkv, softmax_rows, worst_excess
from planted import broken

import flash
from flash import api, grid, kernel
from flash.tuning import Config
from references.cases import FlashCase, inputs

pytestmark = pytest.mark.usefixtures("fresh_traces")

# Ragged queries and keys, two KV heads of two query heads each, and a batch row with fewer keys.
CASE = FlashCase("broken", "", 2, 40, 50, 4, 2, 16, 16, causal=True, kv_lengths=(50, 37))
FULL = FlashCase("broken full", "", 2, 40, 50, 4, 2, 16, 16, kv_lengths=(50, 37))


def causal_off_by_one():
    # In the mask and in the tiles that are visited.
    wrong = broken(grid, ("end = lesser(end, t + shift + p.right + 1)", "end = lesser(end, t + shift + p.right)"))
    return dict(keys_of_row=wrong.keys_of_row)


def causal_top_left():
    wrong = broken(grid, ("shift = length - p.queries if p.bottom_right else 0", "shift = 0"))
    return dict(keys_of_row=wrong.keys_of_row)


def lengths_ignored():
    wrong = broken(grid, ("first, end = 0, lesser(length, p.keys)", "first, end = 0, p.keys"))
    return dict(keys_of_row=wrong.keys_of_row)


def diagonal_tile_not_masked():
    wrong = broken(grid, ("free_stop = greater(lesser(end_of_first // p.block_k, stop), free_start)", "pass"))
    return dict(key_tiles=wrong.key_tiles)


def last_tile_skipped():
    wrong = broken(grid, ("stop = greater(-(-end // p.block_k), start)", "stop = greater(end // p.block_k, start)"))
    return dict(key_tiles=wrong.key_tiles)


def one_split_counted_twice():
    wrong = broken(
        grid, ("start = lesser(start + split * share, stop)", "start = lesser(start + split // 2 * share, stop)")
    )
    return dict(key_tiles=wrong.key_tiles)


def heads_modulo_groups():
    return dict(group_of=lambda head, heads, groups: head % groups)


GRID_FAULTS = [
    (causal_off_by_one, CASE),
    (causal_top_left, CASE),
    (lengths_ignored, FULL),
    (diagonal_tile_not_masked, CASE),
    (last_tile_skipped, FULL),
    (one_split_counted_twice, CASE),
    (heads_modulo_groups, CASE),
]


def unmasked_tail():
    return broken(kernel, ("            s = jnp.where(allowed, s, -jnp.inf)\n", ""))


def lse_in_log2():
    return broken(kernel, ("m / LOG2_E + jnp.log(l)", "m + jnp.log2(l)"))


def output_not_rescaled():
    return broken(kernel, ("l, o = a * l, [a[:, None] * x for x in o]", "l = a * l"))


def splits_weigh_the_same():
    return broken(
        kernel,
        (
            "a, b = exp2(state.m - m_new, target), exp2(m - m_new, target)",
            "a = b = jnp.ones_like(m)",
        ),
    )


KERNEL_FAULTS = [(unmasked_tail, CASE), (unmasked_tail, FULL), (lse_in_log2, CASE), (output_not_rescaled, CASE)]


def excess_of(case, splits):
    """The largest errors of o and lse over their bounds: at most 1 where the comparison passes."""
    jax.clear_caches()
    arguments = inputs(case)
    truth = flash_rows(**arguments)
    config = Config(16, 16, 1, splits=splits)
    result = flash.flash_attention(**arguments, return_lse=True, implementation="pallas", config=config)

    return worst_excess(result, truth)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [CASE, FULL], ids=str)
def test_the_kernels_as_they_are_pass(case, splits):
    assert excess_of(case, splits) <= 1


@pytest.mark.parametrize(("fault", "case"), GRID_FAULTS, ids=lambda x: str(getattr(x, "__name__", x)))
def test_faults_of_the_grid_are_seen(monkeypatch, fault, case):
    for name, wrong in fault().items():
        # The functions of the broken module find each other there.
        monkeypatch.setattr(grid, name, wrong)
    assert excess_of(case, 3 if fault is one_split_counted_twice else 1) > 10


# Of a call like jax.nn's: a window over several tiles of keys, and rows of the second batch row that end at 150.
LIKE_JAX = dict(local_window_size=(70, 40), query_seq_lengths=jnp.asarray([200, 150]))


def excess_like_jax():
    jax.clear_caches()
    q, k, v = qkv(2, 200, 200, 1, 1)
    seen = [[range(max(t - 70, 0), min(t + 41, 200) if t < n else 0) for t in range(200)] for n in (200, 150)]
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: seen[b][t])
    attend = partial(flash.dot_product_attention, implementation="pallas", return_residual=True, **LIKE_JAX)
    return worst_excess(attend(q, k, v), (o64, lse64))


def window_one_wider():
    wrong = broken(grid, ("first = greater(t + shift - p.left, 0)", "first = greater(t + shift - p.left - 1, 0)"))
    return dict(keys_of_row=wrong.keys_of_row)


def window_one_longer():
    wrong = broken(grid, ("end = lesser(end, t + shift + p.right + 1)", "end = lesser(end, t + shift + p.right + 2)"))
    return dict(keys_of_row=wrong.keys_of_row)


def left_tile_not_masked():
    wrong = broken(
        grid, ("free_start = lesser(greater(-(-first_of_last // p.block_k), start), stop)", "free_start = start")
    )
    return dict(key_tiles=wrong.key_tiles)


@pytest.mark.parametrize("fault", [window_one_wider, window_one_longer, left_tile_not_masked])
def test_faults_of_windows_are_seen(monkeypatch, fault):
    for name, wrong in fault().items():
        monkeypatch.setattr(grid, name, wrong)
    assert excess_like_jax() > 10


def test_query_lengths_that_hide_nothing_are_seen(monkeypatch):
    wrong = broken(kernel, ("there = stored_rows.index < rows_end", "there = stored_rows.index < p.queries"))
    monkeypatch.setattr(api, "kernel", wrong)
    assert excess_like_jax() > 10


def test_the_call_like_jax_as_it_is_passes():
    assert excess_like_jax() <= 1


@pytest.mark.parametrize(("fault", "case"), KERNEL_FAULTS, ids=lambda x: str(getattr(x, "__name__", x)))
def test_faults_of_the_kernel_are_seen(monkeypatch, fault, case):
    monkeypatch.setattr(api, "kernel", fault())
    assert excess_of(case, 1) > 10


def test_splits_of_equal_weight_are_seen(monkeypatch):
    monkeypatch.setattr(api, "kernel", splits_weigh_the_same())
    assert excess_of(CASE, 3) > 10
