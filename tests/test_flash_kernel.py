"""The flash attention kernels (interpret mode), called without the public function, which runs the reference so far."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash import grid, kernel
from flash.tuning import Config
from references import accuracy
from references import flash as reference
from references.cases import FlashCase, inputs

# Ragged queries and keys, a tile wholly masked for some rows, two query heads to a KV head.
PLAIN = FlashCase("plain", "", 2, 40, 50, 4, 2, 24, 40)
CASES = [
    replace(PLAIN, name=f"{dtype} {'causal' if causal else 'full'}", dtype=dtype, causal=causal)
    for dtype in ("float32", "bfloat16", "float16")
    for causal in (False, True)
]


def attention(case, config=Config(16, 16), xcds=1):  # noqa: B008
    arguments = inputs(case)
    p = grid.Problem(
        batch=case.B,
        queries=case.T,
        keys=case.S,
        heads=case.H,
        groups=case.G,
        key_size=case.K,
        value_size=case.V,
        dtype=jnp.dtype(case.dtype),
        config=replace(config, splits=config.splits or 1),
        xcds=xcds,
        right=0 if case.causal else None,
        bottom_right=case.causal,
        returns_lse=True,
    )
    operands = {name: arguments[name] for name in ("q", "k", "v")}
    return jax.jit(lambda x: kernel.attention(p, x, scale=case.K**-0.5, target=None))(operands)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_float64(case, splits):
    arguments = inputs(case)
    with jax.enable_x64(True):
        truth, lse = (np.asarray(x) for x in reference.dense(**accuracy.as_float64(arguments), return_lse=True))
    low, _ = reference.dense(**arguments, return_lse=True)
    got = attention(case, Config(16, 16, splits=splits))
    assert (np.abs(np.asarray(got["o"], np.float64) - truth) <= accuracy.attention_bound(truth, low, case.dtype)).all()
    assert (np.abs(np.asarray(got["lse"], np.float64) - lse) <= accuracy.attention_bound(lse, None, "float32")).all()


@pytest.mark.parametrize("order", grid.ORDERS)
def test_orders_change_no_bit(order):
    case = CASES[3]
    plain = attention(case, Config(16, 16, order="block_first"))
    other = attention(case, Config(16, 16, order=order), xcds=2)
    assert [np.asarray(x).tobytes() for x in plain.values()] == [np.asarray(x).tobytes() for x in other.values()]
