"""What users of other attention kernels reported, row by row: each a test of the kernels and of the reference.

Rows that ask for nothing but the right numbers are cases of `references.cases`, which test_references_flash compares
with float64 under every implementation; rows that other tests hold are named in REPORTED with those. The rest is here.
"""

import importlib
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, qkv, softmax_rows

import flash
from flash import Config
from references.cases import FLASH_ODD, FLASH_REAL

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

CASES = {case.name: case for case in FLASH_ODD + FLASH_REAL}
# Source of a row: the cases that are it, or the tests that hold it.
REPORTED = {
    "jax 23819": ["jax_23819_cut", "jax_23819"],
    "jax 27224": ["jax_27224", "jax_27224_causal_bf16", "test_flash_reports.test_tails_of_blocks"],
    "jax 24491": ["jax_24491_cut", "jax_24491"],
    "jax's own Triton kernel": ["heads_4_of_2", "causal_T64_S32"],
    "jax 23349": ["jax_23349"],
    "jax 39576": ["test_flash_reports.test_a_window_without_causality"],
    "jax 39451": ["test_flash_api.test_vmap"],
    "jax 21855, jax-triton 163": ["test_flash_api.test_shard_map_over_batch_and_heads"],
    "aotriton 54": ["aotriton_54", "test_references_flash.test_huge_logits"],
    "pytorch 189849": ["test_references_flash.test_large_sizes", "test_flash_api.test_what_no_kernel_can_do"],
    "aiter 2720": ["aiter_2720_3", "aiter_2720_5", "test_flash_reports.test_few_rows_are_distinct"],
    "aiter 5364": ["aiter_5364", "aiter_5364_causal", "test_flash_reports.test_a_row_whose_first_tile_is_masked"],
    "aiter 3936": ["aiter_3936", "test_flash_kernel.test_no_tile_is_left_out"],
    "FlyDSL 919, 950": ["test_flash_orders.test_the_default_path_has_the_intended_order"],
    "pytorch 101967": ["poison", "poison_causal_bf16"],
    "pytorch 101967, flash-attention 1395": [
        "test_references_flash.test_nan_in_hidden_keys_changes_no_bit",
        "test_flash_kernel.test_nan_in_hidden_keys_changes_no_bit",
    ],
    "mlx 2608": ["mlx_2608", "test_flash_dot_product_attention.test_dot_product_attention_of_rows_without_keys"],
    "flash-attention 1778": ["causal_2_5", "causal_5_2", "test_references_flash.test_causal_aligns_bottom_right"],
    "flash-attention 2260": [
        "test_flash_grid.test_large_arrays_have_64_bit_offsets",
        "test_flash_api.test_what_no_kernel_can_do",
    ],
    "pytorch 181645": ["test_references_flash.test_causal_aligns_bottom_right"],
    "vllm fa 176": ["test_flash_reports.test_two_splits_of_two_batch_rows"],
    "onnx 7867": ["onnx_7867", "test_flash_reports.test_a_cap_comes_before_the_mask"],
    "llama.cpp 29034": ["llama_cpp_29034", "test_flash_reports.test_a_cap_comes_before_the_mask"],
    "flash-attention 442": [
        "flash_attention_442",
        "test_references_flash.test_biases_of_the_lowest_number_are_finite",
    ],
    "triton 621, sglang 1281": [f"size_{K}" for K in (63, 96, 128, 224)],
}


@pytest.mark.parametrize("row", REPORTED)
def test_every_row_is_held_by_something(row):
    for name in REPORTED[row]:
        module, dot, test = name.partition(".")
        if dot:
            found = getattr(importlib.import_module(module), test)
            assert found.__name__.startswith("test_")
        else:
            assert CASES[name].source.startswith(row), name


@each_implementation
def test_tails_of_blocks(implementation):
    """jax 27224: T = S = 192 in blocks of 128. Equal keys: a key beyond the end would weigh as much as the others."""
    q, k = jnp.ones((1, 192, 1, 16)), jnp.zeros((1, 192, 1, 16))
    v = jnp.ones((1, 192, 1, 16))
    config = Config(128, 128, 4, splits=1)
    o, lse = flash.flash_attention(q, k, v, return_lse=True, implementation=implementation, config=config)
    np.testing.assert_allclose(o, 1.0, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(192), rtol=1e-6)


def keys_that_rows_see(T, S, attend):
    """By equal keys whose values are unit vectors: the positions of a row's output that are not 0."""
    q, k = jnp.zeros((1, T, 1, 16)), jnp.zeros((1, S, 1, 16))
    o = attend(q, k, jnp.eye(S)[None, :, None])
    return [np.flatnonzero(row).tolist() for row in o[0, :, 0]]


@each_implementation
def test_a_window_without_causality(implementation):
    """jax 39576: local_window_size (2, 0), is_causal False."""
    attend = partial(flash.dot_product_attention, local_window_size=(2, 0), implementation=implementation)
    assert keys_that_rows_see(20, 20, attend) == [list(range(max(i - 2, 0), i + 1)) for i in range(20)]


@each_implementation
@pytest.mark.parametrize("T", [3, 5])
def test_few_rows_are_distinct(T, implementation):
    """aiter 2720: rows of a short prompt came out as copies of one another."""
    q, k, v = qkv(1, T, 8)
    o = np.asarray(flash.flash_attention(q, k, v, implementation=implementation))
    gaps = np.abs(o[0, :, None] - o[0, None]).max(axis=(2, 3)) + np.eye(T)
    assert gaps.min() > 1e-3


@each_implementation
def test_a_row_whose_first_tile_is_masked(implementation):
    """aiter 5364: no -inf - -inf in a tile that a row does not see; no key at all gives 0."""
    q, k, v = qkv(2, 4, 80, 1, 1)
    hidden = jnp.where(jnp.arange(80) < 70, -jnp.inf, 0.0)
    lengths = jnp.asarray([80, 0])
    o, lse = flash.flash_attention(
        q, k, v, bias=hidden, kv_lengths=lengths, return_lse=True, implementation=implementation
    )
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(70, 80) if b == 0 else ())
    assert_close(o, o64, fp32_bound(o64))
    assert_close(lse, lse64, fp32_bound(lse64))
    assert np.all(np.asarray(o[1]) == 0) and np.all(np.asarray(lse[1]) == -np.inf)


@each_implementation
def test_two_splits_of_two_batch_rows(implementation):
    """vllm's flash attention 176: the second batch row read the first one's partial results."""
    q, k, v = qkv(2, 20, 70, 2, 1)
    attend = partial(flash.flash_attention, implementation=implementation, return_lse=True)
    config = Config(16, 16, 1, splits=2)
    both = attend(q, k, v, config=config)
    swapped = attend(q[::-1], k[::-1], v[::-1], config=config)
    chex.assert_trees_all_equal(both, jax.tree.map(lambda x: x[::-1], swapped))
    o64, _ = softmax_rows(q, k, v, lambda b, t: range(70))
    assert_close(both[0], o64, fp32_bound(o64))
    assert np.abs(np.asarray(both[0][0] - both[0][1])).max() > 0.1


@each_implementation
def test_a_cap_comes_before_the_mask(implementation):
    """onnx 7867, llama.cpp 29034: capped, a masked logit would be -cap, and weigh e^-10 of the others.

    Values of 1e6 at hidden keys show it. S = 65 leaves one key of the last tile, and what is beyond it.
    """
    q, k = jnp.zeros((1, 65, 1, 16)), jnp.zeros((1, 65, 1, 16))
    v = jnp.where(jnp.arange(65) < 32, 1.0, 1e6)[None, :, None, None] * jnp.ones((1, 1, 1, 16))
    attend = partial(flash.flash_attention, q, k, v, softcap=10.0, implementation=implementation)
    np.testing.assert_allclose(attend(causal=True)[:, :32], 1.0, rtol=1e-6)
    _, lse = attend(return_lse=True)
    np.testing.assert_allclose(lse, np.log(65), rtol=1e-6)
