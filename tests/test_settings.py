"""Settings of jax that a caller may have: results do not depend on them, and nothing fails for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import flash
import gated_delta
import gqa
from gqa.onnx import group_query_attention


def ones(*shape):
    return jnp.ones(shape)


Q, K, N, PAST = ones(2, 6, 4, 16), ones(2, 22, 2, 16), jnp.asarray([22, 3]), jnp.asarray([3, 4])
RULE = dict(q=ones(1, 70, 2, 16), k=ones(1, 70, 2, 16), v=ones(1, 70, 4, 16), g=-ones(1, 70, 4), beta=ones(1, 70, 4))
CACHE = ones(1, 1, 9, 8)
CALLS = {
    "flash_attention": partial(
        *(flash.flash_attention, Q, K, K),
        causal=True,
        bias=ones(4, 6, 22),
        softcap=2.0,
        kv_lengths=N,
        q_segment_ids=jnp.zeros((2, 6), int),
        kv_segment_ids=jnp.zeros((2, 22), int),
    ),
    "dot_product_attention": partial(
        *(flash.dot_product_attention, Q, K, K, ones(22), jnp.ones((6, 22), bool)),
        is_causal=True,
        query_seq_lengths=PAST,
        key_value_seq_lengths=N,
        local_window_size=3,
    ),
    "three axes": partial(flash.dot_product_attention, Q[0], K[0], K[0]),
    "grouped_query_attention": partial(
        gqa.grouped_query_attention, Q, K, K, past=PAST, lengths=PAST, window=5, sinks=ones(4), bias=ones(22)
    ),
    "onnx": partial(
        *(group_query_attention, ones(1, 1, 16), ones(1, 1, 8), ones(1, 1, 8), CACHE, CACHE, jnp.asarray([7]), 8),
        num_heads=2,
        kv_num_heads=1,
        do_rotary=1,
        cos_cache=ones(9, 4),
        sin_cache=ones(9, 4),
    ),
    "chunk_gated_delta_rule": partial(gated_delta.chunk_gated_delta_rule, **RULE, use_qk_l2norm_in_kernel=True),
    "packed": partial(gated_delta.chunk_gated_delta_rule, **RULE, cu_seqlens=jnp.asarray([0, 20, 70], jnp.int32)),
    "recurrent_gated_delta_rule": partial(
        gated_delta.recurrent_gated_delta_rule, **jax.tree.map(lambda x: x[:, :2], RULE), output_final_state=True
    ),
}


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("name", CALLS)
def test_without_rank_promotion(name, implementation):
    with jax.numpy_rank_promotion("raise"):
        CALLS[name](implementation=implementation)


def test_caches_and_gradients_without_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        gqa.append_kv(K, K, K[:, :2], K[:, :2], PAST, jnp.asarray([1, 2]))
        jax.grad(lambda q: flash.flash_attention(q, K, K, causal=True).sum())(Q)


@pytest.mark.parametrize("precision", ["BF16_BF16_F32", "TF32_TF32_F32", "highest"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_choose_their_precision(dtype, precision):
    q, k, v, g, beta = (
        jnp.asarray(np.random.default_rng(0).uniform(-1, 1, shape), dtype)
        for shape in ((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2), (1, 20, 2))
    )
    for call in (
        partial(flash.flash_attention, q, k, v),
        partial(gqa.grouped_query_attention, q, k, v),
        partial(gated_delta.chunk_gated_delta_rule, q, k / 4, v, -jnp.abs(g), jnp.abs(beta)),
        partial(gated_delta.recurrent_gated_delta_rule, q[:, :1], k[:, :1] / 4, v[:, :1], g[:, :1], beta[:, :1]),
    ):
        expected = jax.tree.leaves(call(implementation="pallas"))
        with jax.default_matmul_precision(precision):
            found = jax.tree.leaves(call(implementation="pallas"))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


SHAPES = {
    flash.flash_attention: ((70, 4, 16), (70, 2, 16), (70, 2, 16)),
    flash.dot_product_attention: ((70, 4, 16), (70, 2, 16), (70, 2, 16)),
    gqa.grouped_query_attention: ((70, 4, 16), (70, 2, 16), (70, 2, 16)),
    gated_delta.chunk_gated_delta_rule: ((70, 2, 16), (70, 2, 16), (70, 4, 16), (70, 4), (70, 4)),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_symbolic_shapes_are_exported_on_the_reference(function, platform):
    (B,) = export.symbolic_shape("B")
    avals = [jax.ShapeDtypeStruct((B, *shape), jnp.float32) for shape in SHAPES[function]]
    exported = export.export(jax.jit(function), platforms=[platform])(*avals)
    assert "triton" not in exported.mlir_module()
    with pytest.raises(NotImplementedError, match="shapes that are known, got a symbolic one"):
        export.export(jax.jit(partial(function, implementation="pallas")), platforms=[platform])(*avals)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_symbolic_sizes_are_not_compared(platform, implementation):
    """For elements of one byte, whose number is limited in a kernel."""
    (B,) = export.symbolic_shape("B")
    S = jax.ShapeDtypeStruct
    q, k, mask = S((B, 70, 4, 16), "bfloat16"), S((B, 70, 2, 16), "bfloat16"), S((B, 1, 1, 70), "bool")
    masked = partial(flash.dot_product_attention, implementation=implementation)
    export.export(jax.jit(lambda q, k, mask: masked(q, k, k, mask=mask)), platforms=[platform])(q, k, mask)
    q, k = (S(x.shape, "float8_e4m3fn") for x in (q, k))
    attend = partial(flash.flash_attention, implementation=implementation)
    export.export(jax.jit(attend), platforms=[platform])(q, k, k)
