"""The gated delta kernels on a GPU: layers of published models against the float64 token scan, and scratch memory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import gated_delta
from amdgpu.arch import current_arch
from gated_delta.tuning import default_config
from references import accuracy
from references.cases import GATED_DELTA_REAL, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimized")]


# As Qwen3-Next calls the rule: with l2 norms, over windows that overlap.
NORMALISED = [
    replace(GATED_DELTA_REAL[0], name=f"l2norm_{dtype}", T=8000, dtype=dtype, keys="raw", l2norm=True)
    for dtype in ("bfloat16", "float16")
]


@pytest.mark.parametrize("case", [*GATED_DELTA_REAL, *NORMALISED], ids=str)
def test_kernels_equal_the_float64_scan(case):
    arguments = inputs(case)
    truth = accuracy.gated_delta_truth(arguments)
    if case.T == 1:
        result = gated_delta.recurrent_gated_delta_rule(**arguments, implementation="pallas")
        bounds = accuracy.recurrent_gated_delta_bounds(case, arguments)
    else:
        result = gated_delta.chunk_gated_delta_rule(**arguments, implementation="pallas")
        C = default_config(current_arch(), case.dtype, case.V).chunk_size
        bounds = accuracy.gated_delta_bounds(case, arguments, truth, C)
    errors = accuracy.gated_delta_errors(result, truth)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("T", [4096, 18778, 131072])
@pytest.mark.parametrize("output_final_state", [False, True])
def test_scratch_is_what_prefill_scratch_bytes_says(output_final_state, T, dtype):
    B, H, K, V = 1, 32, 128, 128
    config = gated_delta.Config(16, 32, 4)
    q, k, v = (jax.ShapeDtypeStruct((B, T, H, size), dtype) for size in (K, K, V))
    g = beta = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    rule = partial(
        gated_delta.chunk_gated_delta_rule,
        output_final_state=output_final_state,
        implementation="pallas",
        config=config,
    )
    allocated = jax.jit(rule).lower(q, k, v, g, beta).compile().memory_analysis().temp_size_in_bytes
    promised = gated_delta.prefill_scratch_bytes(B, T, H, K, V, dtype=dtype, config=config)
    # The buffer of the final state carries it from window to window.
    carry = B * H * K * V * 4 if output_final_state else 0
    assert abs(allocated - (promised - carry)) <= 4096


# Two, five, six and forty windows, which overlap. Of one window, XLA may put what dies early where `o` will be.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("T", [4096, 16384, 18778, 131072])
@pytest.mark.parametrize(("output_final_state", "l2norm"), [(False, False), (True, True)])
def test_scratch_of_the_default_is_what_prefill_scratch_bytes_says(output_final_state, l2norm, T, dtype):
    B, H, K, V = 1, 32, 128, 128
    q, k, v = (jax.ShapeDtypeStruct((B, T, H, size), dtype) for size in (K, K, V))
    g = beta = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    options = dict(output_final_state=output_final_state, use_qk_l2norm_in_kernel=l2norm, implementation="pallas")
    rule = partial(gated_delta.chunk_gated_delta_rule, **options)
    allocated = jax.jit(rule).lower(q, k, v, g, beta).compile().memory_analysis().temp_size_in_bytes
    carry = B * H * K * V * 4 if output_final_state else 0
    promised = gated_delta.prefill_scratch_bytes(B, T, H, K, V, dtype=dtype, use_qk_l2norm_in_kernel=l2norm)
    assert abs(allocated - (promised - carry)) <= 8192
