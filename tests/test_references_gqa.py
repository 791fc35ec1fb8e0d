"""Grouped-query attention, reference forms and public function, against float64 and what users reported."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, gqa_rows, loss, of_each, qkv, random
from gqa_reports import keys_seen

import gqa
from references import accuracy
from references import gqa as reference
from references.cases import GQA_ODD, GQA_SMALL, GqaCase, inputs

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_implementation
@pytest.mark.parametrize("case", GQA_SMALL + GQA_ODD, ids=str)
def test_equals_float64(case, implementation):
    arguments = inputs(case)
    o64, lse64 = gqa_rows(**arguments)
    public = partial(gqa.grouped_query_attention, implementation=implementation)
    (o, lse), (low_o, low_lse) = of_each([public, reference.dense], **arguments, return_lse=True)
    chex.assert_trees_all_equal_shapes_and_dtypes((o, lse), (low_o, low_lse))
    assert o.dtype == case.dtype
    assert lse.dtype == jnp.float32
    assert_close(o, o64, accuracy.attention_bound(o64, low_o, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))
    # The dense form rounds P and the output, each by half a unit of the largest value at most.
    dtype = arguments["v"].dtype
    largest = np.max(np.abs(np.nan_to_num(np.asarray(arguments["v"]).astype(np.float64))))
    rounded = float(jnp.finfo(dtype).eps) * largest
    assert_close(low_o, o64, fp32_bound(o64) if dtype == jnp.float32 else rounded)
    assert_close(low_lse, lse64, fp32_bound(lse64))


EVERYTHING = GqaCase(
    "everything",
    "all features at once",
    2,
    21,
    53,
    6,
    2,
    16,
    24,
    past=(0, 29),
    lengths=(21, 13),
    window=17,
    sinks="uniform",
    bias="full",
    softcap=3.0,
)


@pytest.mark.parametrize("case", (*GQA_SMALL, EVERYTHING), ids=str)
def test_float64_all_through(case):
    arguments = inputs(case)
    o64, lse64 = gqa_rows(**arguments)
    with jax.enable_x64(True):
        arguments = accuracy.as_float64(arguments)
        results = of_each([reference.dense, gqa.grouped_query_attention], **arguments, return_lse=True)
        assert {x.dtype.name for x in jax.tree.leaves(results)} == {"float64"}
        results = jax.tree.map(np.asarray, results)
    for o, lse in results:
        assert_close(o, o64, 1e-12)
        assert_close(lse, lse64, 1e-12)


@pytest.mark.parametrize("sinks", [None, "uniform"])
def test_block_size_only_rounds(sinks):
    """The sink is added once, however many blocks there are."""
    case = GqaCase("blocks", "", 2, 7, 64, 4, 2, 16, 16, past=(57, 11), softcap=5.0, sinks=sinks)
    arguments = inputs(case)
    o64, lse64 = gqa_rows(**arguments)
    sizes = (1, 5, 16, 64)
    for o, lse in of_each(
        [partial(reference.grouped_query_attention, block_size=size, return_lse=True) for size in sizes], **arguments
    ):
        assert_close(o, o64, fp32_bound(o64))
        assert_close(lse, lse64, fp32_bound(lse64))


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_fp32_queries_over_16_bit_keys(dtype, implementation):
    (q,), (k, v) = random(0, (2, 3, 4, 16)), random(1, (2, 20, 2, 16), (2, 20, 2, 16), dtype=dtype)
    o = gqa.grouped_query_attention(q, k, v, implementation=implementation)
    assert o.dtype == jnp.float32
    o64, _ = gqa_rows(q=q, k=k, v=v)
    assert_close(o, o64, fp32_bound(o64))


# What a row sees


@each_implementation
def test_keys_seen(implementation):
    """Beyond what `gqa_reports` has: a window of one, both ends of a window without a causal mask, padding."""
    attention = partial(gqa.grouped_query_attention, implementation=implementation)
    assert keys_seen(attention, 4, 4, window=1) == [[0], [1], [2], [3]]
    assert keys_seen(attention, 3, 9, past=2, window=2, causal=False) == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    assert keys_seen(attention, 3, 6, lengths=jnp.asarray([2])) == [[0, 1, 2, 3], [0, 1, 2, 3, 4], []]


@each_implementation
def test_positions_beyond_the_cache(implementation):
    """Values that only run time knows read nothing out of range."""
    q, k, v = qkv(T=3, S=8)
    k, v = jnp.zeros_like(k), jnp.broadcast_to(jnp.eye(8, 16)[None, :, None], v.shape)

    @jax.jit
    def seen(past):
        return gqa.grouped_query_attention(q, k, v, past=past, window=4, implementation=implementation)

    def rows(past):
        return [np.flatnonzero(row).tolist() for row in seen(jnp.int32(past))[0, :, 0]]

    assert rows(7) == [[4, 5, 6, 7], [5, 6, 7], [6, 7]]
    assert rows(30) == [[], [], []]
    assert rows(-2) == [[], [], [0]]


# Sinks


@each_implementation
def test_sinks(implementation):
    q, k, v = qkv(T=6, S=6, H=4, G=2)
    attention = partial(gqa.grouped_query_attention, q, k, v, return_lse=True, implementation=implementation)
    o, lse = attention()
    chex.assert_trees_all_equal(attention(sinks=jnp.full(4, -jnp.inf)), (o, lse))
    sinks = jnp.asarray([-10.0, 0.0, 5.0, 20.0])
    with_o, with_lse = attention(sinks=sinks)
    # den = exp(lse) + exp(sink)
    share = jax.nn.sigmoid(lse - sinks)
    np.testing.assert_allclose(with_o, o * share[..., None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(with_lse, jnp.logaddexp(lse, sinks), rtol=1e-6, atol=1e-6)
    # neither scaled nor capped
    capped, capped_lse = attention(softcap=2.0, scale=3.0)
    with_o, _ = attention(softcap=2.0, scale=3.0, sinks=sinks)
    np.testing.assert_allclose(with_o, capped * jax.nn.sigmoid(capped_lse - sinks)[..., None], rtol=1e-5, atol=1e-6)
    # any float dtype
    chex.assert_trees_all_equal(attention(sinks=sinks.astype(jnp.bfloat16)), attention(sinks=sinks))


@each_implementation
def test_rows_without_a_key(implementation):
    q, k, v = qkv(B=2, T=3, S=4, H=2)
    sinks = jnp.asarray([1.5, -jnp.inf])
    bias = jnp.zeros((1, 1, 3, 4)).at[:, :, 1].set(-jnp.inf)
    options = dict(bias=bias, lengths=jnp.asarray([3, 2]), implementation=implementation)
    o, lse = gqa.grouped_query_attention(q, k, v, sinks=sinks, **options, return_lse=True)
    assert np.all(o[:, 1] == 0) and np.all(o[1, 2] == 0)
    np.testing.assert_array_equal(lse[:, 1], jnp.stack([sinks, sinks]))
    np.testing.assert_array_equal(lse[1, 2], [-np.inf, -np.inf])

    @jax.jit
    @partial(jax.grad, argnums=(0, 1, 2, 3))
    def gradient(q, k, v, sinks):
        return gqa.grouped_query_attention(q, k, v, sinks=sinks, **options).sum()

    gradients = gradient(q, k, v, sinks)
    chex.assert_tree_all_finite(gradients)
    assert np.all(gradients[0][:, 1] == 0) and gradients[3][0] != 0 and gradients[3][1] == 0


@each_implementation
def test_nan_that_no_row_sees_changes_no_bit(implementation):
    """vllm 30887: cache rows beyond the valid ones, left of every window, rows of padding."""
    B, T, S = 2, 4, 40
    q, k, v = qkv(B, T, S, H=4, G=2)
    options = dict(window=3, implementation=implementation)
    past, lengths = jnp.asarray([20, 30]), jnp.asarray([4, 2])

    @jax.jit
    def outputs_and_gradients(q, k, v):
        attention = partial(gqa.grouped_query_attention, past=past, lengths=lengths, **options)
        gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), (0, 1, 2))(q, k, v)
        return attention(q, k, v, return_lse=True), gradients

    clean = outputs_and_gradients(q, k, v)
    unseen = np.ones((B, S), bool)
    unseen[0, 18:24] = unseen[1, 28:32] = False
    k, v = (jnp.where(unseen[:, :, None, None], jnp.nan, x) for x in (k, v))
    chex.assert_trees_all_equal(outputs_and_gradients(q.at[1, 2:].set(jnp.nan), k, v), clean)


@each_implementation
def test_gradients_equal_those_of_the_dense_form(implementation):
    arguments = inputs(EVERYTHING)
    first = {name: arguments.pop(name) for name in ("q", "k", "v", "bias", "sinks")}
    public = partial(gqa.grouped_query_attention, implementation=implementation)
    small_blocks = partial(reference.grouped_query_attention, block_size=16)

    @jax.jit
    def gradients(first):
        return [jax.grad(partial(loss, f, **arguments))(first) for f in (public, small_blocks, reference.dense)]

    ours, small_blocks, truth = gradients(first)
    for gradient in (ours, small_blocks):
        chex.assert_tree_all_finite(gradient)
        chex.assert_trees_all_close(gradient, truth, atol=2e-5, rtol=2e-5)


# Broken builds: the comparison with float64 must see each of these faults.


def window_plus_one(*, window, **arguments):
    return gqa.grouped_query_attention(**arguments, window=window + 1)


def sink_scaled(*, q, sinks, **arguments):
    return gqa.grouped_query_attention(**arguments, q=q, sinks=sinks * q.shape[-1] ** -0.5)


def sink_twice(*, sinks, **arguments):
    return gqa.grouped_query_attention(**arguments, sinks=sinks + jnp.log(2.0))


def heads_modulo_groups(*, q, sinks, **arguments):
    # query heads 0, 1, 2, 3 read key heads 0, 1, 0, 1 instead of 0, 0, 1, 1
    order = np.array([0, 2, 1, 3])
    return gqa.grouped_query_attention(**arguments, q=q[:, :, order], sinks=sinks[order])[:, :, order]


def causal_top_left(*, past, **arguments):
    return gqa.grouped_query_attention(**arguments, past=0)


def past_ignored(*, k, v, past, **arguments):
    k, v = (jnp.stack([x[b, p : p + 8] for b, p in enumerate(past.tolist())]) for x in (k, v))
    return gqa.grouped_query_attention(**arguments, k=k, v=v, past=0)


@pytest.mark.parametrize(
    "broken", [window_plus_one, sink_scaled, sink_twice, heads_modulo_groups, causal_top_left, past_ignored]
)
def test_broken_builds_fail(broken):
    arguments = inputs(GqaCase("gate", "", 2, 8, 40, 4, 2, 16, 16, past=(9, 32), window=12, sinks="uniform"))
    o64, _ = gqa_rows(**arguments)
    assert_close(gqa.grouped_query_attention(**arguments), o64, fp32_bound(o64))
    with pytest.raises(AssertionError):
        assert_close(broken(**arguments), o64, fp32_bound(o64))
