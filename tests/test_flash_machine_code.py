"""The flash attention kernels as AMD machine code, run on the CPU, against float64.

Small heads and tiles, so that every feature runs; test_flash_amd_gate has the tuned rows.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, bits, finite_alike, flash_rows, fp32_bound, of_each, qkv, random, softmax_rows

import flash
from amdgpu import emulate
from flash import grid
from flash.tuning import Config
from references import accuracy
from references import flash as reference
from references.cases import FlashCase, inputs

ours = partial(flash.flash_attention, implementation="pallas")

CAUSAL = FlashCase("causal fp16", "", 1, 40, 50, 2, 1, 32, 32, "float16", causal=True)
FULL = FlashCase("full bf16", "", 1, 20, 40, 2, 2, 48, 16, "bfloat16")
FP32 = FlashCase("causal fp32", "", 1, 20, 40, 1, 1, 16, 16, causal=True)
BIASED = FlashCase("biased", "", 1, 20, 40, 2, 1, 16, 16, "bfloat16", bias="heads", kv_lengths=(33,), softcap=5.0)
SEGMENTS = FlashCase(
    "segments", "", 2, 20, 40, 2, 1, 16, 16, "float16", q_segments=(8, 12), kv_segments=(30, 10), kv_lengths=(40, 30)
)
# (case, splits, chip): each with a wave of 64 lanes and one of 32, all five chips.
RUNS = (
    (CAUSAL, 2, "gfx942"),
    (CAUSAL, 2, "gfx1100"),
    (FULL, 1, "gfx950"),
    (FULL, 1, "gfx1151"),
    (FP32, 2, "gfx942"),
    (FP32, 1, "gfx1201"),
    (BIASED, 2, "gfx950"),
    (BIASED, 1, "gfx1151"),
    (SEGMENTS, 1, "gfx942"),
    (SEGMENTS, 2, "gfx1201"),
)


def worst_excess(case, splits, arch, transform=lambda program: program):
    """The largest error of o and lse over its bound, at most 1 where they are right; and the kernels that ran."""
    arguments = inputs(case)
    config = Config(32, 16, 2, splits=splits)
    with emulate(arch, transform=transform) as ran:
        results = jax.tree.map(np.asarray, ours(**arguments, config=config, return_lse=True))
    truth = flash_rows(**arguments)
    ((low, _),) = of_each([reference.dense], **arguments, return_lse=True)
    bounds = accuracy.attention_bound(truth[0], low, case.dtype), fp32_bound(truth[1])
    worst = 0.0
    for x, y, bound in zip(results, truth, bounds, strict=True):
        finite = np.isfinite(y)
        if not finite_alike(x, y):
            return np.inf, [run.name for run in ran]
        error = np.where(finite, x.astype(np.float64), 0) - np.where(finite, y, 0)
        worst = max(worst, float(np.max(np.abs(error) / np.where(finite, bound, 1))))
    return worst, [run.name for run in ran]


@pytest.mark.parametrize(("case", "splits", "arch"), RUNS, ids=str)
def test_machine_code_equals_float64(case, splits, arch):
    excess, ran = worst_excess(case, splits, arch)
    split = ["flash_split_forward_kv_group_first", "flash_merge"]
    assert ran == (split if splits > 1 else ["flash_forward_kv_group_first"])
    assert excess <= 1


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
def test_dot_product_attention(arch):
    """A window, a mask, lengths and a scale of run time."""
    q, k, v = qkv(2, 20, 30, 4, 2, dtype="float16")
    mask = random(1, (2, 1, 20, 30))[0] > -0.5
    lengths = dict(query_seq_lengths=jnp.asarray([20, 11]), key_value_seq_lengths=jnp.asarray([30, 19]))
    options = dict(mask=mask, scale=jnp.float32(0.3), local_window_size=(9, 4), return_residual=True)
    with emulate(arch) as ran:
        o, residual = jax.tree.map(
            np.asarray, flash.dot_product_attention(q, k, v, **lengths, **options, implementation="pallas")
        )
    assert [run.name for run in ran] == ["flash_forward_kv_group_first"]

    def keys(b, t):
        seen = range(max(t - 9, 0), min(t + 4, (29, 18)[b]) + 1) if t < (20, 11)[b] else ()
        return [j for j in seen if mask[b, 0, t, j]]

    o64, lse64 = softmax_rows(q, k, v, keys, scale=0.3)
    # One rounding of P and one of the output, each of half a unit of the largest value.
    assert_close(o, o64, 2**-10 * np.abs(np.asarray(v, np.float64)).max())
    assert_close(residual, lse64, fp32_bound(lse64))


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "bfloat16"), ("gfx950", "float32"), ("gfx1151", "float16")])
def test_orders_change_no_bit(arch, dtype):
    case = FlashCase("orders", "", 1, 40, 20, 8, 4, 16, 16, dtype, causal=True)
    config = Config(32, 16, 1, splits=1)
    with emulate(arch) as ran:
        results = [
            bits(ours(**inputs(case), config=replace(config, order=order), return_lse=True)) for order in grid.ORDERS
        ]
    assert [run.name for run in ran] == [f"flash_forward_{order}" for order in grid.ORDERS]
    assert all(result == results[0] for result in results)


def test_no_tile_is_left_out():
    """aiter 3936: 12 heads on eight dies; what no workgroup writes is NaN here."""
    case = FlashCase("heads", "", 1, 20, 16, 12, 3, 16, 16)
    with emulate("gfx942") as ran:
        o = np.asarray(ours(**inputs(case), config=Config(16, 16, 1, splits=1)))
    assert [(run.name, run.grid) for run in ran] == [("flash_forward_kv_group_first", (24, 1, 1))]
    o64, _ = flash_rows(**inputs(case))
    assert_close(o, o64, fp32_bound(o64))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1151"])
def test_machine_code_keeps_large_logits_apart(arch):
    """c s - c m is one rounding there: logits of 2^20 still differ by as much as they do."""
    q = jnp.zeros((1, 16, 1, 16)).at[..., 0].set(1.0)
    k = jnp.zeros((1, 16, 1, 16)).at[0, :, 0, 0].set(2.0**20 - 0.125 * jnp.arange(16.0))
    v = random(0, (1, 16, 1, 16))[0]
    o64, _ = softmax_rows(q, k, v, lambda b, t: range(16), scale=1.0)
    with emulate(arch) as ran:
        o = np.asarray(ours(q, k, v, scale=1.0, config=Config(16, 16, 1, splits=1)))
    assert ran
    assert_close(o, o64, fp32_bound(o64))


# (chip, kernel, an instruction, which of those in the text): a weight, a product, a part of the results.
MUTATIONS = [
    ("gfx942", "flash_split_forward_kv_group_first", "v_exp_f32", 0),
    ("gfx1151", "flash_split_forward_kv_group_first", "v_wmma", -1),
    ("gfx942", "flash_split_forward_kv_group_first", "global_store", -1),
    ("gfx1151", "flash_merge", "v_exp_f32", 0),
    ("gfx942", "flash_merge", "global_store", 0),
]


@pytest.mark.parametrize(("arch", "kernel", "pattern", "which"), MUTATIONS)
def test_an_instruction_left_out_is_noticed(arch, kernel, pattern, which):
    def drop(program):
        return program.without(program.find(pattern)[which]) if program.kernel == kernel else program

    excess, ran = worst_excess(CAUSAL, 2, arch, drop)
    assert ran == ["flash_split_forward_kv_group_first", "flash_merge"]
    assert excess > 10
