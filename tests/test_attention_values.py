"""Values at the edges: large logits, sinks and biases, run-time positions that no cache has, NaN in what is seen.

In interpret mode and as AMD machine code, where a maximum drops NaN and a multiply-add rounds once.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, at, fp32_bound, qkv, random, softmax_rows

import flash
import gqa

attention = partial(flash.flash_attention, implementation="pallas")
grouped = partial(gqa.grouped_query_attention, implementation="pallas")
PLACES = (None, "gfx942", "gfx1151")


def flash_config(splits):
    return flash.Config(16, 16, 1, splits=splits)


def growing(largest, keys, size=16):
    """One row of q that picks the first feature, and keys whose logits grow by 1/8 or more from tile to tile."""
    step = max(0.125, float(np.spacing(np.float32(largest))))
    q = jnp.zeros((1, 1, 1, size)).at[..., 0].set(1.0)
    k = jnp.zeros((1, keys, 1, size)).at[0, :, 0, 0].set(largest + step * (jnp.arange(float(keys)) // 16))
    return q, k, random(0, (1, keys, 1, size))[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("largest", [-1e5, 1e5, 1e6])
@pytest.mark.parametrize("splits", [1, 3])
def test_logits_that_grow_from_tile_to_tile(place, largest, splits):
    """Weights of all tiles and splits are relative to one rounded maximum: its rounding cancels."""
    q, k, v = growing(largest, 64)
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(64), scale=1.0)
    with at(place):
        o, lse = map(np.asarray, attention(q, k, v, scale=1.0, return_lse=True, config=flash_config(splits)))
    assert_close(o, o64, fp32_bound(o64))
    assert_close(lse, lse64, fp32_bound(lse64))


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("block_keys", [16, 64])
def test_a_sink_as_large_as_the_logits(place, block_keys):
    q, k, v = growing(250880.5, 64)
    sink = jnp.full(1, 250880.75)
    wide = np.float64(np.asarray(k[0, :, 0, 0])) - 250880.75
    weights = np.exp(wide) / (np.exp(wide).sum() + 1)
    with at(place):
        o = np.asarray(grouped(q, k, v, scale=1.0, sinks=sink, config=gqa.Config(16, 16, 1, block_keys=block_keys)))
    o64 = (weights @ np.float64(np.asarray(v[0, :, 0])))[None, None, None]
    assert_close(o, o64, fp32_bound(o64))


@pytest.mark.parametrize("scale", [None, 1e-9, 0.0])
@pytest.mark.parametrize("K", [16, 32, 128])
def test_huge_sinks(scale, K):
    q, k, v = qkv(1, 4, 20, 1, 1, K)
    for sink in (1e30, 1e38, 1.3e38, 2e38, 3.4e38):
        o, lse = grouped(q, k, v, sinks=np.float32([sink]), scale=scale, return_lse=True)
        assert not np.asarray(o).any()
        np.testing.assert_allclose(lse, sink, rtol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("sink", [np.nan, np.inf, -np.inf, -3e38, 3e38])
def test_sinks_that_are_no_logits(place, T, sink):
    """Kernels and reference agree, with keys and without: then lse is the sink."""
    q, k, v = qkv(1, T, 80, 1, 1)
    for bias in (None, np.float32([-np.inf])) if place is None else (None,):
        options = dict(sinks=np.float32([sink]), bias=bias, return_lse=True)
        expected = gqa.grouped_query_attention(q, k, v, **options, implementation="reference")
        with at(place):
            found = grouped(q, k, v, **options, config=gqa.Config(64, 32, 1))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x), y, atol=2e-6, rtol=2e-6)
        if bias is not None:
            np.testing.assert_array_equal(found[1], np.full((1, T, 1), sink, np.float32))


@pytest.mark.parametrize("function", [attention, grouped])
def test_a_bias_of_float64_that_fp32_cannot_hold(function):
    """A usual value of masks in NumPy: finite, so it hides no key where all have it."""
    with jax.enable_x64(True):
        q, k, v = (np.ones((1, n, 1, 16), np.float32) for n in (2, 3, 3))
        bias = np.array([[np.finfo(np.float64).min] * 3, [0, -1e300, -np.inf]])
        o, lse = function(q, k, v, bias=bias, return_lse=True, **({"causal": False} if function is grouped else {}))
    np.testing.assert_allclose(o, np.ones((1, 2, 1, 16)), rtol=1e-6)
    assert np.isfinite(np.asarray(lse)).all()


@pytest.mark.parametrize("function", [attention, grouped])
def test_large_products_of_small_scale(function):
    """q.k of -1e38 is a logit like any other where the scale is 1e-37."""
    q = jnp.zeros((1, 2, 1, 16)).at[..., 0].set(1e19)
    k = jnp.zeros((1, 20, 1, 16)).at[..., 0].set(-1e19)
    v = random(0, (1, 20, 1, 16))[0]
    every = {"causal": False} if function is grouped else {}
    o, lse = function(q, k, v, scale=1e-37, return_lse=True, **every)
    np.testing.assert_allclose(o, np.broadcast_to(np.mean(v, axis=1, keepdims=True), o.shape), atol=1e-6)
    np.testing.assert_allclose(lse, -10 + np.log(20), rtol=1e-5)


@pytest.mark.parametrize("bias", [1.6e38, -1.6e38])
def test_huge_biases(bias):
    q, k, v = qkv(1, 2, 20, 1, 1)
    one, lse = attention(q, k, v, bias=jnp.zeros((1, 1, 2, 20)).at[..., 3].set(bias), return_lse=True)
    assert np.isfinite(np.asarray(one)).all() and np.isfinite(np.asarray(lse)).all()
    others = [j for j in range(20) if (j == 3) == (bias > 0)]
    o64, _ = softmax_rows(q, k, v, lambda b, t: others)
    assert_close(np.asarray(one), o64, fp32_bound(o64))
    every, lse = attention(q, k, v, bias=jnp.full((1, 1, 2, 20), bias), return_lse=True)
    np.testing.assert_allclose(every, np.broadcast_to(np.mean(v, axis=1, keepdims=True), every.shape), atol=1e-6)
    np.testing.assert_allclose(lse, bias, rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [attention, grouped])
@pytest.mark.parametrize("of", ["q", "k", "bias"])
def test_nan_in_what_a_row_sees_is_not_lost(place, function, of):
    q, k, v = qkv(1, 16, 16, 1, 1)
    bias = jnp.zeros((1, 1, 16, 16))
    arguments = {"q": q, "k": k, "v": v, "bias": bias}
    arguments[of] = arguments[of].at[(0, 0, 3, 5) if of == "bias" else (0, 3, 0, 0)].set(jnp.nan)
    every = {"causal": False} if function is grouped else {}
    config = gqa.Config(16, 16, 1) if function is grouped else flash_config(1)
    with at(place):
        o = np.asarray(function(**arguments, **every, config=config))
    rows = np.isnan(o).all(axis=(0, 2, 3))
    assert rows.all() if of == "k" else list(np.flatnonzero(rows)) == [3]


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
@pytest.mark.parametrize("length", [-(2**31), -(2**31) + 1, -1, 0])
def test_lengths_below_zero_at_run_time_hide_all(implementation, length):
    q, k, v = qkv(1, 16, 40, 1, 1)
    function = partial(flash.flash_attention, implementation=implementation, return_lse=True)
    o, lse = jax.jit(lambda n: function(q, k, v, kv_lengths=n))(jnp.full(1, length, jnp.int32))
    assert not np.asarray(o).any() and np.isneginf(np.asarray(lse)).all()


# One row, which the rows kernel takes, and more than that takes.
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("window", [5, 2**31 - 1, np.int64(128), np.uint8(200)])
@pytest.mark.parametrize("past", [-(2**31), -(2**31) + 100, -5, -3, 75, 2**31 - 1])
def test_positions_that_no_cache_has(T, window, past):
    q, k, v = qkv(1, T, 80, 2, 1)
    found = [
        jax.jit(partial(gqa.grouped_query_attention, window=window, implementation=name, return_lse=True))(
            q, k, v, past=jnp.int32(past)
        )
        for name in ("pallas", "reference")
    ]
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-6)


def like_int32(function, dtype, value, nearest):
    """A run-time integer beyond int32 does what the nearest int32 does, whatever its lower half is."""
    with jax.enable_x64(True):
        found = jax.jit(function)(jnp.full(1, value, dtype))
        expected = jax.jit(function)(jnp.full(1, nearest, jnp.int32))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("dtype", "value", "nearest"),
    [("uint32", 2**32 - 3, 2**31 - 1), ("int64", 2**32 + 3, 2**31 - 1), ("int64", -(2**32) + 3, -(2**31))],
)
@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_integers_wider_than_int32_do_not_wrap(dtype, value, nearest, implementation):
    q, k, v = qkv(1, 4, 40, 1, 1)
    options = dict(return_lse=True, implementation=implementation)
    like_int32(lambda n: flash.flash_attention(q, k, v, kv_lengths=n, **options), dtype, value, nearest)
    like_int32(lambda n: gqa.grouped_query_attention(q, k, v, past=n, **options), dtype, value, nearest)
    like_int32(lambda n: gqa.grouped_query_attention(q, k, v, lengths=n, **options), dtype, value, nearest)
    like_int32(lambda n: gqa.append_kv(k, v, k[:, :4], v[:, :4], n), dtype, value, nearest)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_beyond_the_new_tokens(T, causal):
    """Run-time lengths above T count as T: the keys behind the T new ones are none of the sequence's."""
    q, k, v = qkv(1, T, 300, 2, 1)
    config = gqa.Config(32, 16, 1, block_keys=32)
    function = partial(gqa.grouped_query_attention, window=5, causal=causal, past=10, return_lse=True)
    expected = function(q, k, v, lengths=jnp.int32([T]))
    for options in (dict(implementation="pallas", config=config), dict(implementation="reference")):
        found = jax.jit(lambda n, options=options: function(q, k, v, lengths=n, **options))(jnp.int32([200]))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 60, 2**30, 1000])
def test_windows_larger_than_everything(T, window):
    q, k, v = qkv(1, T, 100, 2, 1)
    for causal in (False, True):
        windowed, whole = (grouped(q, k, v, window=w, causal=causal) for w in (window, None))
        np.testing.assert_allclose(windowed, whole, atol=2e-6)


def test_static_numbers_of_numpy_do_not_promote():
    q, k, v = qkv(1, 4, 600, 1, 1)
    for implementation in ("pallas", "reference"):
        wide, narrow = (
            gqa.grouped_query_attention(q, k, v, softcap=kind(3), scale=kind(0.25), implementation=implementation)
            for kind in (np.float64, float)
        )
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(wide, narrow)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_static_numbers_are_finite(name, value):
    for function in (flash.flash_attention, gqa.grouped_query_attention):
        with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
            function(*qkv(1, 4, 20, 1, 1), **{name: value})


def test_sums_of_known_positions_do_not_wrap():
    q, k, v = qkv(2, 4, 20, 1, 1)
    for past, lengths in (((2**31 - 1,) * 2, (1, 1)), ((253, 253), (4, 4))):
        kind = np.int32 if past[0] > 255 else np.uint8
        with pytest.raises(ValueError, match=r"^past must be"):
            gqa.grouped_query_attention(q, k, v, past=np.array(past, kind), lengths=np.array(lengths, kind))


def test_a_list_may_hold_a_traced_value():
    q, k, v = qkv(2, 4, 20, 1, 1)
    for name, function in (("past", gqa.grouped_query_attention), ("kv_lengths", flash.flash_attention)):
        listed = jax.jit(lambda n, f=function, name=name: f(q, k, v, **{name: [n, 3]}))(jnp.int32(5))
        np.testing.assert_array_equal(listed, function(q, k, v, **{name: jnp.array([5, 3], jnp.int32)}))
