"""Flash attention, reference forms and public function, against float64 and what users reported.

A kernel joins these tests by its name in IMPLEMENTATIONS.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, flash_rows, fp32_bound, loss, of_each, qkv, random, softmax_rows

import flash
from references import accuracy
from references import flash as reference
from references.cases import FLASH_ODD, FLASH_SMALL, FlashCase, inputs

OPTIONS = ("causal", "scale", "softcap", "return_lse", "block_size")
blocked = jax.jit(reference.flash_attention, static_argnames=OPTIONS)
IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_implementation
@pytest.mark.parametrize("case", FLASH_SMALL + FLASH_ODD, ids=str)
def test_equals_float64(case, implementation):
    arguments = inputs(case)
    o64, lse64 = flash_rows(**arguments)
    public = partial(flash.flash_attention, implementation=implementation)
    (o, lse), (low_o, low_lse) = of_each([public, reference.dense], **arguments, return_lse=True)
    chex.assert_trees_all_equal_shapes_and_dtypes((o, lse), (low_o, low_lse))
    assert o.dtype == case.dtype
    assert lse.dtype == jnp.float32
    assert_close(o, o64, accuracy.attention_bound(o64, low_o, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))
    # The dense form rounds P and the output, each by half a unit of the largest value at most.
    largest = np.max(np.abs(np.nan_to_num(np.asarray(arguments["v"]).astype(np.float64))), initial=0)
    rounded = float(jnp.finfo(case.dtype).eps) * largest
    assert_close(low_o, o64, fp32_bound(o64) if case.dtype == "float32" else rounded)
    assert_close(low_lse, lse64, fp32_bound(lse64))


EVERYTHING = FlashCase(
    "everything",
    "all features at once",
    2,
    37,
    53,
    6,
    2,
    16,
    24,
    causal=True,
    bias="empty_row",
    softcap=3.0,
    q_segments=(20, 17),
    kv_segments=(30, 23),
    kv_lengths=(53, 41),
)


@pytest.mark.parametrize("case", (*FLASH_SMALL, EVERYTHING), ids=str)
def test_float64_all_through(case):
    arguments = inputs(case)
    o64, lse64 = flash_rows(**arguments)
    with jax.enable_x64(True):
        arguments = accuracy.as_float64(arguments)
        results = of_each([reference.dense, flash.flash_attention], **arguments, return_lse=True)
        assert {x.dtype.name for x in jax.tree.leaves(results)} == {"float64"}
        results = jax.tree.map(np.asarray, results)
    for o, lse in results:
        assert_close(o, o64, 1e-12)
        assert_close(lse, lse64, 1e-12)


@pytest.mark.parametrize("block_size", [1, 16, 53])
def test_block_size_only_rounds(block_size):
    arguments = inputs(EVERYTHING)
    o64, lse64 = flash_rows(**arguments)
    o, lse = blocked(**arguments, return_lse=True, block_size=block_size)
    assert_close(o, o64, fp32_bound(o64))
    assert_close(lse, lse64, fp32_bound(lse64))


def gradients_of(functions, first, **others):
    return jax.jit(lambda first: [jax.grad(partial(loss, f, **others))(first) for f in functions])(first)


def split(arguments, names=("q", "k", "v", "bias")):
    """(those to differentiate, the others)"""
    first = {name: arguments[name] for name in names if arguments[name] is not None}
    return first, {name: x for name, x in arguments.items() if name not in first}


@each_implementation
def test_gradients_equal_those_of_the_dense_form(implementation):
    first, others = split(inputs(EVERYTHING))
    public = partial(flash.flash_attention, implementation=implementation)
    small_blocks = partial(reference.flash_attention, block_size=16)
    ours, small_blocks, truth = gradients_of((public, small_blocks, reference.dense), first, **others)
    for gradients in (ours, small_blocks):
        chex.assert_tree_all_finite(gradients)
        chex.assert_trees_all_close(gradients, truth, atol=2e-5, rtol=2e-5)


def test_derivatives_equal_differences():
    form = partial(reference.flash_attention, block_size=16)
    first, others = split(inputs(EVERYTHING), ("q", "k", "v"))
    with jax.enable_x64(True):
        arguments = accuracy.as_float64(first)
        others = accuracy.as_float64(others)

        def f(x):
            return loss64(form, arguments | {"q": arguments["q"] + x * dq, "k": arguments["k"] * (1 + x)}, others)

        def loss64(form, arguments, others):
            o, lse = form(**arguments, **others, return_lse=True)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse > -jnp.inf, jnp.cos(lse), 0))

        dq = np.random.default_rng(0).standard_normal(arguments["q"].shape)
        f = jax.jit(f)
        step = 1e-5
        expected = (float(f(step)) - float(f(-step))) / (2 * step)
        forward = float(jax.jit(lambda x: jax.jvp(f, (x,), (1.0,))[1])(0.0))
        reverse = float(jax.jit(jax.grad(f))(0.0))
    np.testing.assert_allclose([forward, reverse], expected, rtol=1e-7)


def test_backward_memory_holds_no_logits():
    T = 16384
    shapes = [jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)] * 3
    gradient = jax.grad(lambda q, k, v: flash.flash_attention(q, k, v, causal=True).sum(), (0, 1, 2))
    memory = jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    # One set of logits is 1 GiB; q, k, v and their gradients are 6 MiB.
    assert memory < 32 * 2**20


@each_implementation
def test_nan_in_hidden_keys_changes_no_bit(implementation):
    """pytorch 101967, flash-attention 1395: beyond a length, in a hidden column or segment."""
    B, T, S = 2, 5, 12
    arguments = dict(zip("qkv", qkv(B, T, S, H=4, G=2), strict=True))
    hidden_column = jnp.zeros((1, 1, 1, S)).at[..., 3].set(-jnp.inf)
    ids = jnp.asarray([[0] * T] * B), jnp.asarray([[0] * 6 + [1] * 6] * B)
    # options, and the keys that no row sees under them
    for options, rows, keys in (
        (dict(kv_lengths=jnp.asarray([4, 11])), 0, slice(4, None)),
        (dict(kv_lengths=jnp.asarray([7, 12]), causal=True), 0, slice(7, None)),
        (dict(bias=hidden_column), slice(None), 3),
        (dict(q_segment_ids=ids[0], kv_segment_ids=ids[1]), slice(None), slice(6, None)),
    ):
        poisoned = arguments | {name: arguments[name].at[rows, keys].set(jnp.nan) for name in "kv"}
        attention = partial(flash.flash_attention, **options, implementation=implementation)

        @jax.jit
        def outputs_and_gradients(arguments, attention=attention):
            return attention(**arguments, return_lse=True), jax.grad(partial(loss, attention))(arguments)

        chex.assert_trees_all_equal(outputs_and_gradients(poisoned), outputs_and_gradients(arguments))


@each_implementation
def test_a_later_key_changes_no_bit_of_an_earlier_row(implementation):
    q, k, v = qkv(T=20, S=20)
    attention = partial(flash.flash_attention, causal=True, implementation=implementation)
    before, after = attention(q, k, v), attention(q, k.at[:, 13:].add(1.0), v.at[:, 13:].multiply(2.0))
    np.testing.assert_array_equal(before[:, :13], after[:, :13])
    assert np.all(np.any(np.asarray(before != after)[:, 13:], axis=(2, 3)))


@each_implementation
@pytest.mark.parametrize("T, S, expected", [(2, 5, [[0, 1, 2, 3], [0, 1, 2, 3, 4]]), (5, 2, [[], [], [], [0], [0, 1]])])
def test_causal_aligns_bottom_right(T, S, expected, implementation):
    """flash-attention 1778. Values that are unit vectors show which keys a row sees."""
    q, k = jnp.zeros((1, T, 1, 16)), jnp.zeros((1, S, 1, 16))
    v = jnp.eye(S)[None, :, None]
    o, lse = flash.flash_attention(q, k, v, causal=True, return_lse=True, implementation=implementation)
    assert [np.flatnonzero(row).tolist() for row in o[0, :, 0]] == expected
    # pytorch 181645: the natural logarithm
    counts = [np.log(len(keys)) if keys else -np.inf for keys in expected]
    np.testing.assert_allclose(lse[0, :, 0], counts, rtol=1e-6)


@each_implementation
@pytest.mark.parametrize("value, K", [(133120.0, 1), (133120.0, 16), (-2.45e5, 16)])
def test_huge_logits(value, K, implementation):
    """aotriton 54, flashinfer 4267: equal logits of 1e9 and more are an ordinary softmax."""
    for T, S in ((1, 1), (4, 8)):
        q, k = jnp.full((1, T, 1, K), abs(value), jnp.bfloat16), jnp.full((1, S, 1, K), value, jnp.bfloat16)
        v = jnp.broadcast_to(jnp.arange(S, dtype=jnp.bfloat16)[:, None, None], (1, S, 1, K))
        o = flash.flash_attention(q, k, v, scale=0.25, implementation=implementation)
        np.testing.assert_array_equal(o.astype(jnp.float32), jnp.full(q.shape, (S - 1) / 2))


@each_implementation
@pytest.mark.parametrize("K, V", [(512, 512), (576, 512)])
def test_large_sizes(K, V, implementation):
    """pytorch 189849; DeepSeek-V3's latent attention."""
    q, k, v = qkv(T=3, S=20, K=K, V=V)
    o64, _ = softmax_rows(q, k, v, lambda b, t: range(20))
    assert_close(flash.flash_attention(q, k, v, implementation=implementation), o64, fp32_bound(o64))


@each_implementation
def test_biases_of_the_lowest_number_are_finite(implementation):
    """flash-attention 442, with every key of a row there: an ordinary softmax over equals."""
    q, k, v = qkv(T=4, S=8)
    lowest = jnp.full((4, 8), jnp.finfo(jnp.float32).min)
    attention = partial(flash.flash_attention, q, k, v, implementation=implementation)
    np.testing.assert_allclose(attention(bias=lowest), np.broadcast_to(v.mean(1)[:, None], (1, 4, 2, 16)), rtol=1e-5)
    chex.assert_tree_all_finite(jax.grad(lambda bias: attention(bias=bias).sum())(lowest))


@each_implementation
@pytest.mark.parametrize("shape", [(9, 11), (1, 11), (9, 1), (4, 1, 1), (2, 1, 9, 11)])
def test_biases_broadcast(shape, implementation):
    arguments = dict(zip("qkv", qkv(2, 9, 11, H=4, G=2), strict=True), bias=random(1, shape)[0])
    attention = partial(flash.flash_attention, causal=True, implementation=implementation)
    full = arguments | {"bias": jnp.broadcast_to(arguments["bias"], (2, 4, 9, 11))}
    np.testing.assert_allclose(attention(**arguments), attention(**full), rtol=0, atol=1e-6)
    ours, truth = gradients_of((attention, partial(reference.dense, causal=True)), arguments)
    chex.assert_trees_all_close(ours, truth, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "dtype, implementation",
    [(jnp.float8_e4m3fn, "reference"), (jnp.float8_e4m3fnuz, "reference"), (jnp.float8_e4m3fn, "pallas")],
)
def test_fp8_with_scales(dtype, implementation):
    q, k, v = (x.astype(dtype) for x in qkv(T=24, S=24, dtype=jnp.bfloat16))
    scales = dict(q_scale=0.5, k_scale=jnp.float32(2.5), v_scale=jnp.float32(0.75))
    o, lse = flash.flash_attention(q, k, v, **scales, return_lse=True, implementation=implementation)
    assert o.dtype == jnp.bfloat16
    wide = (np.asarray(x).astype(np.float64) * float(f) for x, f in zip((q, k, v), scales.values(), strict=True))
    o64, lse64 = softmax_rows(*wide, lambda b, t: range(24))
    assert_close(o, o64, 2**-8 * np.max(np.abs(o64)))
    assert_close(lse, lse64, fp32_bound(lse64))


# Broken builds: the comparison with float64 must see each of these faults.


def heads_modulo_groups(q, k, v, **options):
    # query heads 0, 1, 2, 3 read key heads 0, 1, 0, 1 instead of 0, 0, 1, 1
    order = np.array([0, 2, 1, 3])
    return flash.flash_attention(q[:, :, order], k, v, **options)[:, :, order]


def causal_off_by_one(q, k, v, **options):
    longer = jnp.pad(k, ((0, 0), (0, 1), (0, 0), (0, 0))), jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return flash.flash_attention(q, *longer, **options)


def causal_top_left(q, k, v, **options):
    return flash.dot_product_attention(q, k, v, is_causal=True)


def padding_unmasked(q, k, v, **options):
    q, k, v = (jnp.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0))) for x in (q, k, v))
    return flash.flash_attention(q, k, v, causal=False)[:, :-3]


def a_block_counted_twice(q, k, v, **options):
    twice = jnp.concatenate([k[:, :8], k], 1), jnp.concatenate([v[:, :8], v], 1)
    return flash.flash_attention(q, *twice, **options)


@pytest.mark.parametrize(
    "broken",
    [heads_modulo_groups, causal_off_by_one, causal_top_left, padding_unmasked, a_block_counted_twice],
)
def test_broken_builds_fail(broken):
    case = FlashCase("gate", "", 2, 24, 32, 4, 2, 16, 16, causal=True)
    arguments = inputs(case)
    o64, _ = flash_rows(**arguments)
    assert_close(flash.flash_attention(**arguments), o64, fp32_bound(o64))
    with pytest.raises(AssertionError):
        assert_close(broken(**arguments), o64, fp32_bound(o64))
