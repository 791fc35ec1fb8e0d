"""The flash attention kernels on a GPU: published shapes against float64, some heads and some rows of each."""

from functools import partial

import jax
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound

import flash
from flash import Config, grid
from references import accuracy
from references import flash as reference
from references.cases import FLASH_REAL, FlashCase, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimized")]

ours = partial(flash.flash_attention, implementation="pallas")
dense = jax.jit(reference.dense, static_argnames=("causal", "return_lse"))
# Rows of one slice: their logits in float64 take 64 S 8 bytes a head.
ROWS = 64


def slices(case):
    """(head, first row): the corners, and others at random."""
    rng = np.random.default_rng(0)
    last = case.T - min(ROWS, case.T)
    picked = [(0, 0), (case.H - 1, last)]
    return picked + [(int(rng.integers(case.H)), int(rng.integers(last + 1))) for _ in range(4)]


def assert_slices_equal_float64(case, arguments, o, lse, places=None):
    for h, t in places or slices(case):
        rows = slice(t, t + min(ROWS, case.T))
        g = h // (case.H // case.G)
        # With that many keys, the rows of the slice are the last rows of a causal call.
        keys = case.S if not case.causal else case.S - case.T + rows.stop
        q, k, v = arguments["q"][:, rows, h : h + 1], *(arguments[n][:, :keys, g : g + 1] for n in "kv")
        part = dict(q=q, k=k, v=v, causal=case.causal)
        low = dense(**part)
        with jax.enable_x64(True):
            o64, lse64 = (np.asarray(x) for x in dense(**accuracy.as_float64(part), return_lse=True))
        assert_close(o[:, rows, h : h + 1], o64, accuracy.attention_bound(o64, low, case.dtype))
        assert_close(lse[:, rows, h : h + 1], lse64, fp32_bound(lse64))


@pytest.mark.parametrize("case", FLASH_REAL, ids=str)
def test_kernels_equal_float64(case):
    arguments = inputs(case)
    o, lse = ours(**arguments, return_lse=True)
    assert_slices_equal_float64(case, arguments, np.asarray(o), np.asarray(lse))


# As if every query block were one of few: split keys, by default on no shape of the table.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("T", "causal"), [(1, False), (16, True), (100, True)])
def test_split_keys_equal_float64(T, causal, dtype):
    case = FlashCase("split", "", 2, T, 20000, 8, 2, 128, 128, dtype, causal=causal)
    arguments = inputs(case)
    o, lse = ours(**arguments, return_lse=True)
    assert_slices_equal_float64(case, arguments, np.asarray(o), np.asarray(lse))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_orders_change_no_bit(dtype, causal):
    arguments = inputs(FlashCase("orders", "", 2, 1000, 1100, 12, 4, 64, 64, dtype, causal=causal))
    results = [
        [np.asarray(x).tobytes() for x in ours(**arguments, config=Config(64, 32, 4, 2, order=order), return_lse=True)]
        for order in grid.ORDERS
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_whose_maximum_leaps_equal_float64(causal, K):
    """Where a maximum was fixed too early, `flash.kernel.lost_blocks` computes some blocks of some heads."""
    case = FlashCase("leaps", "", 2, 3000, 3000, 4, 2, K, K, "bfloat16", causal=causal)
    arguments = inputs(case)
    q, k = arguments["q"].at[:, :, :, 0].set(0.0), arguments["k"].at[:, 1100, :, 0].set(1e4)
    arguments |= dict(q=q.at[1, 1111:1500, 2, 0].set(1.0).at[0, 2999, 1, 0].set(1.0), k=k)
    o, lse = ours(**arguments, return_lse=True)
    for b, h, t in ((1, 2, 1088), (1, 2, 1130), (1, 2, 1470), (0, 1, 2936), (0, 0, 1088), (1, 3, 1470)):
        one = slice(b, b + 1)
        part = {name: x[one] if hasattr(x, "shape") else x for name, x in arguments.items()}
        assert_slices_equal_float64(case, part, np.asarray(o[one]), np.asarray(lse[one]), [(h, t)])


@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sizes_equal_float64(K, V, dtype):
    case = FlashCase("sizes", "", 2, 300, 333, 4, 2, K, V, dtype, causal=True)
    arguments = inputs(case)
    o, lse = ours(**arguments, return_lse=True)
    assert_slices_equal_float64(case, arguments, np.asarray(o), np.asarray(lse))
