"""The comparison is worth something: kernels with one fault each, of kinds that shipped elsewhere, fail it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from attention_truth import gqa_rows, worst_excess
from jax.experimental import pallas as pl

import gqa
from gqa import Config, decode, grid, kernel
from references.cases import GqaCase, inputs

pytestmark = pytest.mark.usefixtures("fresh_traces")

# Two KV heads of two query heads each, another past for each batch row, ragged tiles of rows and keys.
PLAIN = GqaCase("prefill", "", 2, 40, 90, 4, 2, 16, 16, past=(9, 50), lengths=(40, 31), sinks="uniform")
PREFILL, STEP = PLAIN, replace(PLAIN, name="step", T=3, past=(70, 80), lengths=(3, 2))
WINDOW = replace(PLAIN, name="window", lengths=None, window=21)
STEP_WINDOW = replace(STEP, name="step window", window=21)
CASES = (PREFILL, WINDOW, STEP, STEP_WINDOW)
# A step of all keys takes three blocks.
CONFIG = Config(16, 16, 1, block_keys=32)


# Each fault names the functions that it replaces: (module, name, wrong function).


def of_rows(change):
    """`change(p, t, first, end)` of the keys that each row sees: in masks, and in the tiles that are visited."""
    right = grid.keys_of_row
    return [(grid, "keys_of_row", lambda p, t, past, new: change(p, t, *right(p, t, past, new)))]


def window_plus_one():
    return of_rows(lambda p, t, first, end: (grid.greater(first - 1, 0), end))


def causal_top_left():
    return of_rows(lambda p, t, first, end: (first, grid.lesser(end, t + 1)))


def causal_one_too_few():
    return of_rows(lambda p, t, first, end: (first, end - 1))


def past_ignored():
    right = kernel.positions
    return [(module, "positions", lambda p, ins: (0, right(p, ins)[1])) for module in (kernel, decode)]


def lengths_ignored():
    right = kernel.positions
    return [(module, "positions", lambda p, ins: (right(p, ins)[0], p.queries)) for module in (kernel, decode)]


def heads_modulo_groups():
    return [(grid, "group_of", lambda head, heads, groups: head % groups)]


def groups_of_heads_modulo_groups():
    """A group reads the KV head that h % G gives to its first head h = g r."""
    right = grid.plan_rows

    def wrong(p):
        plan = right(p)

        def elsewhere(spec):
            def place(program):
                b, j, g, i = spec.index_map(program)
                return b, j, g * p.heads_per_group % p.groups, i

            return pl.BlockSpec(spec.block_shape, place)

        return replace(plan, in_specs=plan.in_specs | {name: elsewhere(plan.in_specs[name]) for name in "kv"})

    return [(grid, "plan_rows", wrong)]


def of_tiles(change):
    """`change(start, free start, free stop, stop)` of the tiles of keys that a workgroup of the prefill visits."""
    right = grid.key_tiles
    return [(grid, "key_tiles", lambda p, tile, past, new: change(*right(p, tile, past, new)))]


def left_edge_not_masked():
    return of_tiles(lambda start, free_start, free_stop, stop: (start, start, free_stop, stop))


def diagonal_not_masked():
    return of_tiles(lambda start, free_start, free_stop, stop: (start, free_start, stop, stop))


def last_tile_skipped():
    return of_tiles(lambda start, free_start, free_stop, stop: (start, free_start, free_stop, stop - 1))


def first_tile_skipped():
    return of_tiles(lambda start, free_start, free_stop, stop: (start + 1, free_start, free_stop, stop))


def one_block_counted_twice():
    right = grid.keys_of_block
    return [(grid, "keys_of_block", lambda p, block, *others: right(p, block // 2, *others))]


def of_sinks(change):
    right = kernel.results_of

    def wrong(state, c, sink, *others):
        return right(state, c, change(sink), *others)

    return [(module, "results_of", wrong) for module in (kernel, decode)]


def sink_scaled():
    return of_sinks(lambda sink: sink * 16**-0.5)


def sink_left_out():
    return of_sinks(lambda sink: None)


def sink_in_each_of_three_blocks():
    return of_sinks(lambda sink: sink + jnp.log(3.0))


def blocks_weigh_the_same():
    return [(decode, "exp2", lambda x, target: jnp.ones_like(x))]


def output_not_rescaled():
    right = kernel.softmax_step

    def wrong(state, s, v, **options):
        found = right(state, s, v, **options)
        fresh = right(state._replace(o=[jnp.zeros_like(x) for x in state.o]), s, v, **options)
        return found._replace(o=[x + y for x, y in zip(state.o, fresh.o, strict=True)])

    return [(kernel, "softmax_step", wrong)]


FAULTS = [
    (window_plus_one, (WINDOW, STEP_WINDOW)),
    (causal_top_left, (PREFILL, STEP)),
    (causal_one_too_few, (WINDOW, STEP_WINDOW)),
    (past_ignored, (PREFILL, STEP)),
    (lengths_ignored, (PREFILL, STEP_WINDOW)),
    (heads_modulo_groups, (PREFILL, WINDOW)),
    (groups_of_heads_modulo_groups, (STEP, STEP_WINDOW)),
    (left_edge_not_masked, (WINDOW,)),
    (diagonal_not_masked, (PREFILL, WINDOW)),
    (last_tile_skipped, (PREFILL, WINDOW)),
    (first_tile_skipped, (WINDOW,)),
    (one_block_counted_twice, (STEP,)),
    (sink_scaled, (PREFILL, STEP, STEP_WINDOW)),
    (sink_left_out, (WINDOW, STEP)),
    (sink_in_each_of_three_blocks, (STEP,)),
    (blocks_weigh_the_same, (STEP,)),
    (output_not_rescaled, (PREFILL, STEP_WINDOW)),
]


def excess_of(case):
    """The largest errors of o and lse over their bounds: at most 1 where the comparison passes."""
    jax.clear_caches()
    arguments = inputs(case)
    truth = gqa_rows(**arguments)
    result = gqa.grouped_query_attention(**arguments, return_lse=True, implementation="pallas", config=CONFIG)

    return worst_excess(result, truth)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_as_they_are_pass(case):
    assert excess_of(case) <= 1


def faults_and_cases():
    return [pytest.param(fault, case, id=f"{fault.__name__}-{case}") for fault, cases in FAULTS for case in cases]


@pytest.mark.parametrize(("fault", "case"), faults_and_cases())
def test_faults_are_seen(monkeypatch, fault, case):
    for module, name, wrong in fault():
        monkeypatch.setattr(module, name, wrong)
    assert excess_of(case) > 10
