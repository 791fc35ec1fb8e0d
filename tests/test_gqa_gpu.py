"""The kernels of grouped-query attention on a GPU: published shapes against float64, of which some heads and some
rows; every size, dtype and block of the other shapes."""

from functools import partial

import jax
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound

import gqa
from gqa.tuning import FEW_ROWS, SOME_ROWS
from references import accuracy
from references import gqa as reference
from references.cases import GQA_ODD, GQA_REAL, GQA_SMALL, GqaCase, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimized")]

ours = partial(gqa.grouped_query_attention, implementation="pallas")
dense = jax.jit(reference.dense, static_argnames=("causal", "window", "return_lse"))
# Rows of one slice: their logits in float64 take 64 S 8 bytes a head.
ROWS = 64


def slices(case):
    """(batch row, head, first row): the corners, and others at random."""
    rng = np.random.default_rng(0)
    last = case.T - min(ROWS, case.T)
    picked = [(0, 0, 0), (case.B - 1, case.H - 1, last)]
    return picked + [tuple(int(rng.integers(n)) for n in (case.B, case.H, last + 1)) for _ in range(4)]


def assert_slices_equal_float64(case, o, lse, arguments=None, places=None):
    arguments = arguments or inputs(case)
    r = case.H // case.G
    for b, h, t in places or slices(case):
        rows = slice(t, t + min(ROWS, case.T))
        past = case.S - case.T if case.past is None else int(np.broadcast_to(case.past, case.B)[b])
        # Of a smaller cache, the rows of the slice are the last tokens.
        keys = past + rows.stop
        one = slice(b, b + 1)
        k, v = (arguments[name][one, :keys, h // r : h // r + 1] for name in "kv")
        part = dict(q=arguments["q"][one, rows, h : h + 1], k=k, v=v, window=case.window)
        if case.sinks is not None:
            part["sinks"] = arguments["sinks"][h : h + 1]
        low = dense(**part)
        with jax.enable_x64(True):
            o64, lse64 = (np.asarray(x) for x in dense(**accuracy.as_float64(part), return_lse=True))
        assert_close(o[one, rows, h : h + 1], o64, accuracy.attention_bound(o64, low, case.dtype))
        assert_close(lse[one, rows, h : h + 1], lse64, fp32_bound(lse64))


def run(case, **options):
    return [np.asarray(x) for x in ours(**inputs(case), return_lse=True, **options)]


@pytest.mark.parametrize("case", GQA_REAL, ids=str)
def test_kernels_equal_float64(case):
    assert_slices_equal_float64(case, *run(case))


@pytest.mark.parametrize("case", GQA_SMALL + GQA_ODD, ids=str)
def test_small_cases_equal_float64(case):
    arguments = inputs(case)
    o, lse = run(case)
    low = dense(**arguments)
    with jax.enable_x64(True):
        o64, lse64 = (np.asarray(x) for x in dense(**accuracy.as_float64(arguments), return_lse=True))
    assert_close(o, o64, accuracy.attention_bound(o64, low, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))


DTYPES = [("bfloat16", None), ("float16", None), ("float32", None), ("float32", "float16"), ("float32", "bfloat16")]


@pytest.mark.parametrize(("K", "V"), [(40, 40), (64, 64), (128, 128), (160, 160), (224, 112), (256, 256)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("T", "window"), [(1, None), (5, 100), (300, None), (300, 100)])
def test_sizes_equal_float64(K, V, dtype, kv_dtype, T, window):
    case = GqaCase("sizes", "", 2, T, 2500, 12, 4, K, V, dtype, kv_dtype, window=window, sinks="uniform")
    assert_slices_equal_float64(case, *run(case))


def test_blocks_whose_maximum_leaps_equal_float64():
    """As of flash attention: some rows of one head of one batch row are computed again."""
    case = GqaCase("leaps", "", 2, 3000, 4000, 16, 2, 64, 64, "bfloat16", past=(1000, 500), sinks="uniform")
    arguments = inputs(case)
    q, k = arguments["q"].at[:, :, :, 0].set(0.0), arguments["k"].at[:, 1500, :, 0].set(1e4)
    arguments |= dict(q=q.at[1, 1111:1500, 9, 0].set(1.0).at[0, 2999, 1, 0].set(1.0), k=k)
    o, lse = (np.asarray(x) for x in ours(**arguments, return_lse=True))
    places = [(1, 9, 1088), (1, 9, 1130), (1, 9, 1470), (0, 1, 2936), (0, 0, 1088), (1, 8, 1470)]
    assert_slices_equal_float64(case, o, lse, arguments, places)


@pytest.mark.parametrize("S", [2047, 2048, 2049, 2560, 3000, 4096, 5000, 20000])
@pytest.mark.parametrize("T", [1, 8, FEW_ROWS // 4, FEW_ROWS // 4 + 1, SOME_ROWS // 4, SOME_ROWS // 4 + 1])
def test_thresholds_equal_float64(S, T):
    case = GqaCase("thresholds", "", 2, T, S, 16, 4, 64, 64, "bfloat16", sinks="uniform")
    assert_slices_equal_float64(case, *run(case))


@pytest.mark.parametrize("T", [1, 300])
def test_two_runs_are_bit_equal(T):
    case = GqaCase("twice", "", 2, T, 9000, 16, 4, 64, 64, "bfloat16", past=(8000, 100), sinks="uniform")
    first, second = run(case), run(case)
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
