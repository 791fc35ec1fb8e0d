"""dot_product_attention against jax.nn.dot_product_attention and float64, over the arguments that the two share.

A kernel joins these tests by its name in IMPLEMENTATIONS.
"""

import functools
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, of_each, qkv, random, softmax_rows

import flash
from references import accuracy

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# Each causality, window and kind of lengths; the other arguments in turn.
WINDOWS = (None, (2, 0), (0, 3), 4)
LENGTHS = ((), ("query",), ("key_value",), ("query", "key_value"))
HEADS = ((4, 4), (4, 2), (4, 1))
BIASES = (None, (2, 4, 12, 18), (1, 1, 12, 18), (4, 1, 18), (2, 1, 1, 18))
MASKS = (None, (2, 4, 12, 18), (1, 1, 12, 18), (4, 12, 18))
MATRIX = list(itertools.product((False, True), WINDOWS, LENGTHS))


def nn_arguments(index, causal, window, lengths):
    H, G = HEADS[index % 3]
    # jax.nn does not lower for fp16 on a CPU
    dtype = (jnp.float32, jnp.bfloat16)[index // 3 % 2]
    q, k, v = qkv(2, 12, 18, H, G, dtype=dtype, seed=index)
    bias, mask = BIASES[index % 5], MASKS[3 * index // 5 % 4]
    return dict(
        query=q,
        key=k,
        value=v,
        bias=bias if bias is None else random(1, bias)[0],
        mask=mask if mask is None else random(2, mask)[0] > -0.3,
        scale=(None, 0.4)[index // 5 % 2],
        is_causal=causal,
        query_seq_lengths=jnp.asarray([12, 5]) if "query" in lengths else None,
        key_value_seq_lengths=jnp.asarray([7, 18]) if "key_value" in lengths else None,
        local_window_size=window,
    )


def nn_keys(a):
    T, S = a["query"].shape[1], a["key"].shape[1]
    a = a | {name: np.asarray(a[name]) for name in a if name.endswith("lengths") and a[name] is not None}
    window = (T + S,) * 2 if a["local_window_size"] is None else np.broadcast_to(a["local_window_size"], 2)
    rows = (T,) * 2 if a["query_seq_lengths"] is None else a["query_seq_lengths"]
    last = (S,) * 2 if a["key_value_seq_lengths"] is None else a["key_value_seq_lengths"]

    def keys_of_row(b, t):
        keys = range(int(last[b])) if t < rows[b] else ()
        return [j for j in keys if t - window[0] <= j <= t + window[1] and (j <= t or not a["is_causal"])]

    return keys_of_row


@functools.cache
def expected(index):
    """The arguments, jax.nn's results and the float64 truth."""
    a = nn_arguments(index, *MATRIX[index])
    # jax.nn itself mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        (theirs,) = of_each([jax.nn.dot_product_attention], **a, return_residual=True)
    bias = np.zeros((1, 1, 1, 1)) if a["bias"] is None else np.asarray(a["bias"])
    bias = bias if a["mask"] is None else np.where(a["mask"], bias, -np.inf)
    truth = softmax_rows(a["query"], a["key"], a["value"], nn_keys(a), scale=a["scale"], bias=bias)
    return a, theirs, truth


@each_implementation
@pytest.mark.parametrize("index", range(len(MATRIX)), ids=lambda i: "-".join(map(str, MATRIX[i])))
def test_dot_product_attention_equals_jax_nn(index, implementation):
    a, (nn_o, nn_residual), (o64, lse64) = expected(index)
    o, residual = flash.dot_product_attention(**a, return_residual=True, implementation=implementation)
    assert o.dtype == nn_o.dtype and residual.dtype == jnp.float32
    rows = lse64 > -np.inf
    assert np.any(rows)
    low = np.where(rows[..., None], np.asarray(nn_o).astype(np.float64), 0)
    assert_close(o, o64, accuracy.attention_bound(o64, low, o.dtype.name))
    assert_close(residual, lse64, fp32_bound(lse64))
    # jax.nn itself agrees with this truth, within the rounding of its dtype
    eps = float(jnp.finfo(o.dtype).eps)
    np.testing.assert_allclose(low, o64, rtol=0, atol=max(8 * eps, 2e-5))
    np.testing.assert_allclose(np.asarray(nn_residual, np.float64)[rows], lse64[rows], rtol=eps, atol=max(eps, 2e-5))


def test_the_matrix_has_every_pair_of_arguments():
    """Any value of one argument stands together with any value of any other in some call."""

    def kinds(index):
        a = nn_arguments(index, *MATRIX[index])
        shapes = {name: None if a[name] is None else a[name].shape for name in ("bias", "mask")}
        heads = a["query"].shape[2], a["key"].shape[2]
        return (*MATRIX[index], heads, a["query"].dtype, shapes["bias"], shapes["mask"], a["scale"])

    columns = list(zip(*map(kinds, range(len(MATRIX))), strict=True))
    assert [len(set(column)) for column in columns] == [2, 4, 4, 3, 2, 5, 4, 2]
    missing = [
        (i, j, x, y)
        for (i, one), (j, other) in itertools.combinations(enumerate(columns), 2)
        for x, y in set(itertools.product(one, other)) - set(zip(one, other, strict=True))
    ]
    assert missing == []


@each_implementation
def test_dot_product_attention_of_three_dimensions(implementation):
    q, k, v = (x[0] for x in qkv(T=5, S=7, H=4, G=2))
    mask = random(1, (4, 5, 7))[0] > -1
    ours = partial(flash.dot_product_attention, implementation=implementation)
    arguments = dict(query=q, key=k, value=v, return_residual=True)
    for options in (dict(mask=mask), dict(mask=mask[0], local_window_size=(1, 2))):
        results, theirs = of_each([ours, jax.nn.dot_product_attention], **arguments, **options)
        chex.assert_trees_all_close(results, theirs, atol=2e-6)


@each_implementation
def test_dot_product_attention_gradients_equal_jax_nn(implementation):
    q, k, v = qkv(2, 12, 18, 4, 2)
    bias = random(3, (1, 4, 12, 18))[0]

    def f(attention, q, k, v, bias):
        o, residual = attention(q, k, v, bias, is_causal=True, local_window_size=(5, 0), return_residual=True)
        return jnp.sum(jnp.sin(o)) + jnp.sum(residual)

    ours, theirs = (
        jax.jit(jax.grad(partial(f, attention), (0, 1, 2, 3)))
        for attention in (
            partial(flash.dot_product_attention, implementation=implementation),
            jax.nn.dot_product_attention,
        )
    )
    chex.assert_trees_all_close(ours(q, k, v, bias), theirs(q, k, v, bias), atol=2e-6)


@each_implementation
def test_dot_product_attention_of_rows_without_keys(implementation):
    """mlx 2608 and others: 0, -inf and finite gradients, where jax.nn gives the mean of the values."""
    q, k, v = qkv(T=4, S=6)
    mask = jnp.ones((1, 1, 4, 6), bool).at[:, :, 2].set(False)

    def f(q, k, v):
        return flash.dot_product_attention(q, k, v, mask=mask, return_residual=True, implementation=implementation)

    o, residual = f(q, k, v)
    assert np.all(o[:, 2] == 0) and np.all(residual[:, 2] == -np.inf)
    assert np.all(np.isfinite(residual[:, jnp.asarray([0, 1, 3])]))
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x)[0])), (0, 1, 2)))(q, k, v)
    chex.assert_tree_all_finite(gradients)
    assert np.all(gradients[0][:, 2] == 0)


@each_implementation
def test_dot_product_attention_takes_a_traced_scale(implementation):
    q, k, v = qkv(T=4, S=6)
    f = jax.jit(lambda scale: flash.dot_product_attention(q, k, v, scale=scale, implementation=implementation))
    np.testing.assert_allclose(f(0.7), jax.nn.dot_product_attention(q, k, v, scale=0.7), rtol=0, atol=1e-6)


def test_dot_product_attention_passes_xla_on():
    q, k, v = qkv(T=4, S=4)
    ours = flash.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    np.testing.assert_array_equal(ours, jax.nn.dot_product_attention(q, k, v, is_causal=True))
    jaxpr = jax.make_jaxpr(partial(flash.dot_product_attention, implementation="xla"))(q, k, v)
    assert "_dot_product_attention" not in str(jaxpr)


Q, K, V = qkv(B=2, T=5, S=7, H=4, G=2)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("query", dict(query=Q[0, 0])),
        ("query", dict(query=Q.astype(jnp.int32))),
        ("key", dict(key=K.astype(jnp.bfloat16))),
        ("value", dict(value=V[:, :6])),
        ("query", dict(query=Q[:, :, :3])),
        ("bias", dict(bias=jnp.zeros((2, 4, 5, 6)))),
        ("mask", dict(mask=jnp.zeros((2, 4, 5, 7)))),
        ("mask", dict(mask=jnp.ones((3, 5, 7), bool))),
        ("query_seq_lengths", dict(query_seq_lengths=jnp.asarray([1]))),
        ("query_seq_lengths", dict(query_seq_lengths=jnp.asarray([1, -1]))),
        ("key_value_seq_lengths", dict(key_value_seq_lengths=jnp.asarray([1.0, 2.0]))),
        ("local_window_size", dict(local_window_size=(1, 2, 3))),
        ("local_window_size", dict(local_window_size=1.5)),
        ("scale", dict(scale=jnp.ones(2))),
        ("implementation", dict(implementation="triton")),
        ("scale", dict(scale=float("nan"))),
        ("scale", dict(scale=float("inf"), implementation="pallas")),
        ("scale", dict(scale=jnp.asarray(1j))),
        ("is_causal", dict(is_causal=1)),
        ("local_window_size", dict(local_window_size=True)),
        ("query", dict(query=None)),
    ],
)
def test_bad_input_of_dot_product_attention_is_named(name, changed):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        flash.dot_product_attention(**dict(query=Q, key=K, value=V) | changed)


def test_what_no_kernel_can_do():
    with pytest.raises(NotImplementedError, match="V up to 512, got V = 640"):
        flash.dot_product_attention(Q, K, jnp.zeros((2, 7, 2, 640)), implementation="pallas")


def test_sides_of_a_window_beyond_int64():
    q, k, v = qkv(1, 6, 9, 1, 1)
    found = flash.dot_product_attention(q, k, v, local_window_size=(2**63, -1), implementation="pallas")
    np.testing.assert_allclose(found, flash.dot_product_attention(q, k, v, local_window_size=(9, -1)), atol=2e-6)
