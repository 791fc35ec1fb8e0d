"""Which kernel a call runs, on both sides of every threshold; and that the result is right there."""

import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound
from gqa_truth import gqa_matrices

import gqa
from gqa import grid, tuning
from references.cases import GqaCase, inputs

ours = partial(gqa.grouped_query_attention, implementation="pallas")


def kernels(arguments, config=None, implementation="pallas"):
    """Names of the kernels that a call launches."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    attend = partial(gqa.grouped_query_attention, implementation=implementation, config=config)
    jaxpr = jax.make_jaxpr(lambda arrays: attend(**arrays, **static))(arrays)
    # jax numbers names that stand there several times: one for each platform.
    return set(re.findall(r"\bgqa_(?:prefill|rows)[a-z_]*", str(jaxpr)))


def check(case, expected, config=None):
    arguments = inputs(case)
    assert kernels(arguments, config) == expected
    o64, lse64 = gqa_matrices(**arguments)
    o, lse = ours(**arguments, config=config, return_lse=True)
    assert_close(o, o64, fp32_bound(o64))
    assert_close(lse, lse64, fp32_bound(lse64))


def case(T, S, H=1, G=1, window=None):
    return GqaCase(f"dispatch_{T}_{S}_{H}_{window}", "", 1, T, S, H, G, 16, 16, window=window, sinks="uniform")


PREFILL, ONE_BLOCK, BLOCKS = {"gqa_prefill"}, {"gqa_rows"}, {"gqa_rows_split", "gqa_rows_merge"}
FEW, SOME, MANY = tuning.FEW_ROWS, tuning.SOME_ROWS, tuning.MANY_KEYS


@pytest.mark.parametrize("S", [1, 2047, 2048, 2049, 2560, 3000, 4096, 5000, 20000])
def test_keys_of_a_step(S):
    check(case(1, S, 4, 2), ONE_BLOCK if S <= 2048 else BLOCKS)


@pytest.mark.parametrize(("K", "names"), [(16, (PREFILL, ONE_BLOCK)), (320, (set(), set()))])
def test_the_default(K, names):
    """Kernels, but for heads that they do not take."""
    for T, expected in zip((100, 1), names, strict=True):
        assert kernels(inputs(replace(case(T, 200), K=K, V=K)), implementation=None) == expected
        assert kernels(inputs(replace(case(T, 200), K=K, V=K)), implementation="reference") == set()


@pytest.mark.parametrize("S", [2049, 20000])
def test_a_window_needs_no_second_block(S):
    check(case(1, S, 4, 2, window=100), {"gqa_rows_window"})
    check(case(1, S, 4, 2, window=2048), {"gqa_rows_window"})


@pytest.mark.parametrize("rows", [FEW - 1, FEW, FEW + 1])
def test_few_rows(rows):
    check(case(rows, MANY), ONE_BLOCK if rows <= FEW else PREFILL)


@pytest.mark.parametrize("rows", [SOME - 1, SOME, SOME + 1])
def test_some_rows_over_many_keys(rows):
    check(case(rows, MANY + 1), BLOCKS if rows <= SOME else PREFILL)


@pytest.mark.parametrize("S", [MANY - 1, MANY, MANY + 1])
def test_many_keys(S):
    check(case(FEW + 1, S), BLOCKS if S > MANY else PREFILL)


def test_rows_are_those_of_a_kv_group():
    r = 8
    check(case(FEW // r, 100, 2 * r, 2), ONE_BLOCK)
    check(case(FEW // r + 1, 100, 2 * r, 2), PREFILL)


def test_twenty_thousand_rows():
    long = case(20000, 20000, window=100)
    arguments = inputs(long)
    assert kernels(arguments) == {"gqa_prefill_window"}
    o = ours(**arguments)
    for first in (0, 9900, 19800):
        rows = slice(first, first + 200)
        part = {name: arguments[name][:, : rows.stop] for name in "kv"} | {"q": arguments["q"][:, rows]}
        o64, _ = gqa_matrices(**arguments | part)
        assert_close(o[:, rows], o64, fp32_bound(o64))


@pytest.mark.parametrize("H", [1, 4])
@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("after_one_tile", [True, False])
def test_rows_whose_first_tile_is_wholly_masked(n, H, after_one_tile):
    """hip-ep 623: their maximum is still that of no key when the next tile comes."""
    past, window = (n + 1, 5) if after_one_tile else (1, 1)
    T, S = 2 * n, past + 2 * n
    packed = tuning.uses_rows_kernel(T * H, S)
    # The rows kernel starts at the first key of its first row: only a row n tokens later starts on a masked tile.
    config = gqa.Config(2 * n if packed else n, n, 1)
    p = grid.Problem(
        1, T, S, H, 1, 16, 16, np.dtype(np.float32), config, packed=packed, window=window, given=frozenset({"past"})
    )
    late = []
    for tile in range(p.row_tiles):
        if packed:
            start = int(grid.keys_of_block(p, 0, tile, past, T)[0])
        else:
            start = int(grid.key_tiles(p, tile, past, T)[0]) * p.block_k
        first_t, last_t = grid.span_of_rows(p, tile, T)
        firsts = [int(grid.keys_of_row(p, t, past, T)[0]) for t in range(first_t, last_t + 1)]
        assert min(firsts) >= start
        late += [first - start >= p.block_k for first in firsts]
    assert any(late)

    name = "gqa_rows_window" if packed else "gqa_prefill_window"
    for sinks in (None, "uniform"):
        check(GqaCase("masked", "", 1, T, S, H, 1, 16, 16, past=past, window=window, sinks=sinks), {name}, config)
