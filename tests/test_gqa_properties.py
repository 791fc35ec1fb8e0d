"""What grouped-query attention has to be, whoever computes it: accuracy over caches and blocks of keys, splits, steps.

Cases that interpret mode does at full size in no reasonable time are cut to fewer heads here, and run as they are on a
GPU (marker `gpu`).
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, qkv, random
from gqa_reports import REPORTS
from gqa_truth import gqa_matrices

import gqa
from gqa.onnx import group_query_attention
from references import accuracy
from references.cases import GQA_REAL, inputs

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# Modes of the sink, windows, pasts


class Node(NamedTuple):
    """A call as gpt-oss makes it, with 64 heads of 64 on 8, or 32 of 128."""

    mode: str
    window: int
    past: int
    size: int = 64

    def __str__(self):
        return f"{self.mode}-window{self.window}-past{self.past}-size{self.size}"


MODES = ("none", "sink", "smooth", "both")
NODES = (
    *(Node(mode, -1, 0) for mode in MODES),
    *(Node(mode, 128, 8192) for mode in MODES),
    *(Node("none", window, 1000) for window in (1, 100, 128, 4096)),
    *(Node("sink", window, 512) for window in (1, 100, 4096)),
    *(Node(mode, -1, 8192) for mode in ("none", "sink")),
    Node("both", 4096, 8192),
    *(Node(mode, -1, 512, 128) for mode in MODES),
    *(Node("sink", window, 1000, 128) for window in (1, 100, 128, 4096)),
)


def test_all_kinds_of_nodes_are_here():
    assert len(set(NODES)) == 26
    assert {node.mode for node in NODES} == set(MODES)
    assert {node.window for node in NODES} == {-1, 1, 100, 128, 4096}
    assert {node.past for node in NODES} == {0, 512, 1000, 8192}


# Tokens, and KV heads: one with its 8 or 4 query heads is enough to see what a head reads.
@pytest.mark.parametrize("T, G", [(80, 1), pytest.param(512, 8, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("node", NODES, ids=str)
@each_implementation
def test_modes_windows_and_pasts(node, T, G, implementation):
    """fp16, in a shared buffer with NaN beyond the valid keys: one compilation serves all pasts."""
    K, r, S = node.size, 512 // node.size, 8192 + T
    q, k, v = random(NODES.index(node), (1, T, r * G, K), (1, S, G, K), (1, S, G, K), dtype=jnp.float16)
    sinks = jnp.asarray(np.random.default_rng(0).uniform(-10, 10, r * G), jnp.float32)
    past, total = node.past, node.past + T
    k, v = (x.at[:, total:].set(jnp.nan) for x in (k, v))
    new_k, new_v = (x[:, past:total].reshape(1, T, -1) for x in (k, v))
    output, *_ = group_query_attention(
        q.reshape(1, T, -1),
        new_k,
        new_v,
        # The node puts the new rows there itself.
        *(jnp.swapaxes(x.at[:, past:total].set(jnp.nan), 1, 2) for x in (k, v)),
        seqlens_k=jnp.asarray([total - 1]),
        total_sequence_length=jnp.int32(total),
        head_sink=sinks if node.mode in ("sink", "both") else None,
        smooth_softmax=int(node.mode in ("smooth", "both")),
        local_window_size=node.window,
        num_heads=r * G,
        kv_num_heads=G,
        implementation=implementation,
    )
    window = None if node.window == -1 else node.window
    expected, _ = gqa_matrices(
        q=q,
        k=k,
        v=v,
        past=past,
        window=window,
        sinks={"none": None, "smooth": np.zeros(r * G)}.get(node.mode, sinks),
    )
    assert accuracy.relative_l2(np.asarray(output).reshape(expected.shape), expected) <= 5.74e-4


# Blocks of 2048 keys

ROWS = [case for case in GQA_REAL if case.name.startswith("rows_")]
# With one KV head for eight, and the same for one row: the shape of a decode step.
CUT = [replace(case, name=f"{case.name}_cut", H=4, G=1) for case in ROWS] + [
    replace(case, name=f"{case.name}_step", T=1, H=4, G=1) for case in ROWS if case.K == 160
]


@pytest.mark.parametrize("case", [*CUT, *(pytest.param(case, marks=pytest.mark.gpu) for case in ROWS)], ids=str)
@each_implementation
def test_blocks_of_keys(case, implementation):
    """fp32 rows over an fp16 cache: the mean squared error relative to that of 0, and every element."""
    arguments = inputs(case)
    o = np.asarray(gqa.grouped_query_attention(**arguments, implementation=implementation), np.float64)
    expected, _ = gqa_matrices(**arguments)
    assert np.sum((o - expected) ** 2) / np.sum(expected**2) <= 5e-4
    assert_close(o, expected, fp32_bound(expected))


def test_the_blocked_cases_are_here():
    assert {(case.S, case.K) for case in ROWS} == {(S, K) for S in (2560, 3000, 4096, 5000) for K in (64, 160, 256)}


# Steps


@pytest.mark.parametrize("n, window", [(34, 8), (300, None), (300, 100), (2100, None)])
@each_implementation
def test_a_step_equals_the_last_row_of_a_prompt(n, window, implementation):
    """mlx 3452, over one and over two blocks of keys; and as the second of two rows."""
    q, k, v = qkv(B=2, T=n, S=n, H=4, G=2, seed=n)
    attention = partial(
        gqa.grouped_query_attention,
        window=window,
        sinks=jnp.asarray([-9.0, -1.0, 2.0, 8.0]),
        return_lse=True,
        implementation=implementation,
    )
    o, lse = attention(q, k, v)
    for T in (1, 2) if n == 34 else (1,):
        step, step_lse = attention(q[:, -T:], k, v)
        np.testing.assert_allclose(step, o[:, -T:], rtol=0, atol=2e-6)
        np.testing.assert_allclose(step_lse, lse[:, -T:], rtol=1e-6, atol=2e-6)


@each_implementation
def test_steps_of_any_length_over_several_blocks_compile_once(implementation):
    """past is a value: below, at and beyond the ends of blocks, in one program."""
    S = 4200
    q, k, v = qkv(B=2, T=1, S=S, H=4, G=2)
    attention = partial(gqa.grouped_query_attention, sinks=jnp.zeros(4), implementation=implementation)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda past: attention(q, k, v, past=past), n=1))
    for past in ((0, 2046), (2047, 2048), (4095, 4096), (4199, 1)):
        expected, _ = gqa_matrices(q=q, k=k, v=v, past=past, sinks=np.zeros(4))
        assert_close(step(jnp.asarray(past)), expected, fp32_bound(expected))


# Cache rows that no row sees


@pytest.mark.parametrize(
    "T, S, past, lengths, window",
    [
        # several tiles and blocks of rows: beyond the valid keys, left of every window, rows of padding
        (100, 400, (230, 150), (100, 61), 50),
        (100, 400, (0, 290), (0, 100), None),
        # several blocks of keys, of which one, two or none is seen
        (1, 5000, (3000, 4110), (1, 1), 100),
        (1, 5000, (4990, 30), (1, 0), None),
        (3, 5000, (2047, 4994), (3, 2), 9),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@each_implementation
def test_nan_that_no_row_sees_changes_no_bit(T, S, past, lengths, window, dtype, implementation):
    q, k, v = qkv(2, T, S, H=4, G=2, dtype=dtype)
    past, lengths = jnp.asarray(past), jnp.asarray(lengths)
    sinks = jnp.asarray([-9.0, -1.0, 2.0, 8.0])

    @jax.jit
    def attention(q, k, v):
        options = dict(window=window, sinks=sinks, return_lse=True, implementation=implementation)
        return gqa.grouped_query_attention(q, k, v, past=past, lengths=lengths, **options)

    clean = attention(q, k, v)
    j, end = np.arange(S), np.asarray(past + lengths)[:, None]
    first = 0 if window is None else np.asarray(past)[:, None] - window + 1
    unseen = (j >= end) | (j < first) | (np.asarray(lengths) == 0)[:, None]
    assert np.any(unseen, axis=1).all() and not np.all(unseen)
    k, v = (jnp.where(unseen[:, :, None, None], jnp.nan, x) for x in (k, v))
    padding = np.arange(T) >= np.asarray(lengths)[:, None]
    poisoned = attention(jnp.where(padding[:, :, None, None], jnp.nan, q), k, v)
    chex.assert_tree_all_finite(poisoned[0])
    chex.assert_trees_all_equal(poisoned, clean)


# What users reported


@pytest.mark.parametrize(
    "B, S, G",
    [
        (2, 5000, 1),
        # beyond 2^31 elements: in a batch row, and where the second one starts
        pytest.param(1, 4_200_000, 8, marks=pytest.mark.gpu),
        pytest.param(2, 4_200_000, 8, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("T", [1, 600])
@each_implementation
def test_the_last_key_of_a_long_cache_is_found(B, S, G, T, implementation):
    """vllm 50427: each batch row's last key has a logit of 40 against 0, and its own value."""
    q = jnp.full((B, T, G, 64), 1, jnp.bfloat16)
    k, v = (jnp.zeros((B, S, G, 64), jnp.bfloat16) for _ in range(2))
    values = jnp.arange(1.0, B * G + 1).reshape(B, G, 1)
    k, v = k.at[:, -1].set(5), v.at[:, -1].set(jnp.broadcast_to(values, (B, G, 64)).astype(v.dtype))
    o = gqa.grouped_query_attention(q, k, v, implementation=implementation)
    np.testing.assert_array_equal(o[:, -1], v[:, -1])
    np.testing.assert_array_equal(o[:, :-1], np.zeros((B, T - 1, G, 64)))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
@each_implementation
def test_reports(report, implementation):
    report(partial(gqa.grouped_query_attention, implementation=implementation))
