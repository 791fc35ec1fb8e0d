"""Both kernels of grouped-query attention in interpret mode, each on every shape, cut so small that there are several
tiles of rows, tiles of keys and blocks of keys.

Which of the two a shape gets by itself is in `test_gqa_dispatch`.
"""

import itertools
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, bits, fp32_bound, gqa_rows, qkv, random, softmax_rows
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

import gqa
from gqa import Config, decode, grid, kernel
from gqa.grid import Problem
from gqa.tuning import uses_rows_kernel
from references import accuracy
from references import gqa as reference
from references.cases import GQA_ODD, GQA_SMALL, GqaCase, inputs

SMALL = Config(16, 16, 1, block_keys=32)
each_kernel = pytest.mark.parametrize("packed", [False, True], ids=["prefill", "rows"])
ours = partial(gqa.grouped_query_attention, implementation="pallas")


def attention(case, packed, config=SMALL, xcds=1, heads_first=False, **changed):
    """(o, lse) of one of the kernels, called without the public function."""
    arguments = inputs(case) | changed
    arrays = {n: x for n in ("q", "k", "v", "past", "lengths", "sinks", "bias") if (x := arguments[n]) is not None}
    if heads_first:
        arrays |= {name: jnp.swapaxes(arrays[name], 1, 2) for name in "kv"}
    if "past" in arrays:
        arrays["past"] = arrays["past"].reshape(-1)
    p = grid.Problem(
        *(case.B, case.T, case.S, case.H, case.G, case.K, case.V, jnp.dtype(case.dtype)),
        config=config,
        xcds=xcds,
        packed=packed,
        window=case.window,
        causal=case.causal,
        softcap=case.softcap,
        bias=arrays["bias"].shape if "bias" in arrays else None,
        given=frozenset(arrays) & {"past", "lengths", "sinks"},
        one_past="past" in arrays and arrays["past"].size == 1,
        heads_first=heads_first,
        returns_lse=True,
    )
    scale = case.K**-0.5 if case.scale is None else case.scale
    run = decode.rows if packed else kernel.prefill
    results = jax.jit(lambda arrays: run(p, arrays, scale=scale, target=None))(arrays)
    return results["o"], results["lse"]


def assert_equals_float64(case, packed, config=SMALL):
    arguments = inputs(case)
    o64, lse64 = gqa_rows(**arguments)
    low = reference.dense(**arguments)
    o, lse = attention(case, packed, config)
    assert o.dtype == case.dtype and lse.dtype == jnp.float32
    assert_close(o, o64, accuracy.attention_bound(o64, low, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))


@pytest.mark.parametrize("case", [c for c in GQA_SMALL + GQA_ODD if c.S <= 200], ids=str)
def test_small_tiles_equal_float64(case):
    """By the kernel that the case does not get by itself; `test_references_gqa` has the other one."""
    assert_equals_float64(case, not uses_rows_kernel(case.T * case.H // case.G, case.S))


@pytest.mark.parametrize("T, S", [(1, 2048), (1, 5000), (5, 2049)])
def test_blocks_of_2048_keys_equal_float64(T, S):
    assert_equals_float64(GqaCase(f"blocks {S}", "", 1, T, S, 2, 1, 16, 16, sinks="uniform"), True, Config(16, 256, 1))


# Ragged rows and keys, other positions for each batch row, a group of three, a window that crosses tiles and blocks.
EVERYTHING = GqaCase(
    "everything",
    "",
    3,
    37,
    101,
    6,
    2,
    24,
    80,
    past=(3, 64, 50),
    lengths=(37, 21, 0),
    window=41,
    sinks="uniform",
    bias="full",
    softcap=3.0,
)


@each_kernel
@pytest.mark.parametrize("without", [{}, dict(bias=None, window=None), dict(causal=False)], ids=str)
def test_every_feature_at_once(packed, without):
    assert_equals_float64(replace(EVERYTHING, **without), packed)


@pytest.mark.parametrize("config", [Config(32, 16, 2), Config(64, 32, 4, 2, head_tile=16)], ids=str)
@each_kernel
def test_other_tiles(packed, config):
    assert_equals_float64(replace(EVERYTHING, bias=None), packed, config)


@each_kernel
@pytest.mark.parametrize("window", [1, 17, 1000])
def test_windows(packed, window):
    assert_equals_float64(replace(EVERYTHING, bias=None, softcap=None, window=window), packed)


# The blocks that a step is cut into change nothing but the rounding.


@pytest.mark.parametrize("window", [None, 70])
def test_blocks_agree(window):
    case = GqaCase("blocks", "", 2, 2, 200, 4, 2, 16, 16, past=(190, 60), window=window, sinks="uniform")
    one, *others = (attention(case, True, replace(SMALL, block_keys=n)) for n in (256, 128, 48, 16))
    for other in others:
        chex.assert_trees_all_close(other, one, rtol=1e-6, atol=1e-6)


def test_more_blocks_than_one_tile_of_the_merge(monkeypatch):
    case = GqaCase("many blocks", "", 1, 1, 300, 2, 1, 16, 16, sinks="uniform")
    monkeypatch.setattr(decode, "MERGE_TILE", 64)
    assert_equals_float64(case, True, replace(SMALL, block_keys=16))


@each_kernel
def test_a_cache_of_either_layout(packed):
    plain = bits(attention(EVERYTHING, packed))
    assert bits(attention(EVERYTHING, packed, heads_first=True)) == plain
    # And the number of dies, which moves workgroups about.
    assert bits(attention(EVERYTHING, packed, xcds=4)) == plain
    assert bits(attention(EVERYTHING, packed)) == plain


@each_kernel
@pytest.mark.parametrize("shape", [(3, 1, 1, 101), (1, 6, 37, 1)])
def test_biases_of_every_shape(packed, shape):
    case, bias = replace(EVERYTHING, bias="full"), random(1, shape)[0]
    o64, lse64 = gqa_rows(**inputs(case) | dict(bias=np.asarray(bias)))
    o, lse = attention(case, packed, bias=bias)
    assert_close(o, o64, fp32_bound(o64))
    assert_close(lse, lse64, fp32_bound(lse64))


@each_kernel
def test_a_key_that_the_bias_hides_from_all_rows_may_be_nan(packed):
    case = replace(EVERYTHING, lengths=None, past=(3, 64, 50), window=None)
    arguments = inputs(case)
    bias = arguments["bias"].at[..., 2].set(-jnp.inf)
    clean = attention(case, packed, bias=bias)
    chex.assert_tree_all_finite(clean)
    k, v = (arguments[name].at[:, 2].set(jnp.nan) for name in "kv")
    assert bits(attention(case, packed, bias=bias, k=k, v=v)) == bits(clean)


@each_kernel
@pytest.mark.parametrize("window", [None, 20])
def test_nan_in_hidden_keys_changes_no_bit(packed, window):
    """Beyond the valid keys, left of every window, and in the rows of tokens that are not there."""
    case = GqaCase("nan", "", 2, 20, 120, 4, 2, 16, 16, "bfloat16", past=(50, 70), lengths=(20, 11), window=window)
    arguments = inputs(case)
    clean = attention(case, packed)
    j, t = np.arange(120), np.arange(20)
    past, new = np.asarray([50, 70])[:, None], np.asarray([20, 11])[:, None]
    hidden = (j >= past + new) | (j < past - (10**6 if window is None else window) + 1)
    k, v = (jnp.where(hidden[:, :, None, None], jnp.bfloat16(jnp.nan), arguments[name]) for name in "kv")
    q = jnp.where((t >= new)[:, :, None, None], jnp.bfloat16(jnp.nan), arguments["q"])
    assert bits(attention(case, packed, q=q, k=k, v=v)) == bits(clean)


# Logits


@each_kernel
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales(packed, scale):
    assert_equals_float64(GqaCase("scaled", "", 1, 20, 90, 2, 1, 16, 16, scale=scale, sinks="uniform"), packed)


@pytest.mark.parametrize("packed, dtype", [(False, "bfloat16"), (True, "float32")], ids=str)
def test_huge_logits(packed, dtype):
    """Weights are those of the largest logits, in whatever tile or block they are; one sink is far above."""
    S = 90
    v = random(0, (1, S, 2, 16), dtype=dtype)[0]
    q = jnp.zeros((1, 4, 2, 16), dtype).at[0, :, :, 0].set(jnp.asarray([[1.0], [-1.0], [2.0**14], [0.0]], dtype))
    k = np.zeros((1, S, 1, 16), np.float32)
    k[0, :, 0, 0] = np.random.default_rng(0).choice([-1.0, -0.5, 0.25, 0.5], S)
    k[0, [3, 40, 80], 0, 0] = 1.0
    case = GqaCase("huge", "", 1, 4, S, 2, 2, 16, 16, dtype, scale=1.0, causal=False, sinks=0.0)
    for magnitude in (2.0**4, 2.0**13, 2.0**15):
        keys = jnp.asarray(np.repeat(k, 2, axis=2) * magnitude, dtype)
        sinks = jnp.asarray([-3.0, 3e38])
        o, lse = attention(case, packed, q=q, k=keys, v=v, sinks=sinks)
        o64, lse64 = softmax_rows(q, keys, v, lambda b, t: range(S), scale=1.0, sinks=np.asarray(sinks, np.float64))
        # All that counts are ties, which weigh the same: only the values' and the output's rounding is left.
        assert_close(o, o64, 2 * float(jnp.finfo(dtype).eps) + 1e-6)
        np.testing.assert_allclose(lse, lse64, rtol=1e-6)


# Transformations


@pytest.mark.parametrize(("T", "name", "q_dtype"), [(40, "gqa_lost_blocks", "bfloat16"), (1, "gqa_rows", "float32")])
def test_shard_map_over_batch_and_heads(T, name, q_dtype):
    """Lowered for ROCm with jax's check of what varies over which axis."""
    device = AbstractDevice(device_kind="gfx942", num_cores=None, platform="rocm")
    mesh = AbstractMesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    spec = PartitionSpec("b", None, "h")

    config = Config(16, 16, 1, fixed_maximum=True)

    def shape(*sizes, spec, dtype=q_dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    with use_abstract_mesh(mesh):
        sharded = jax.jit(
            jax.shard_map(
                lambda q, k, v, past, sinks: ours(q, k, v, past=past, sinks=sinks, return_lse=True, config=config),
                mesh=mesh,
                in_specs=(spec, spec, spec, PartitionSpec(), PartitionSpec("h")),
                out_specs=(spec, spec),
            )
        )
        avals = shape(4, T, 16, 16, spec=spec), shape(4, 90, 4, 16, spec=spec), shape(4, 90, 4, 16, spec=spec)
        past, sinks = shape(spec=PartitionSpec(), dtype=jnp.int32), shape(16, spec=PartitionSpec("h"))
        text = sharded.trace(*avals, past, sinks).lower(lowering_platforms=("rocm",)).as_text()
    assert name in text
    assert "all_reduce" not in text and "all_gather" not in text


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_one_loop_equals_float64(window, name):
    case = GqaCase("loop", "", 2, 40, 150, 4, 2, 32, 32, name, past=(100, 7), lengths=(40, 33), sinks="uniform")
    arguments = inputs(replace(case, window=window))
    o64, lse64 = gqa_rows(**arguments)
    o, lse = (np.asarray(x) for x in ours(**arguments, config=Config(16, 16, 1, one_loop=True), return_lse=True))
    assert_close(o, o64, accuracy.attention_bound(o64, reference.dense(**arguments), name))
    assert_close(lse, lse64, fp32_bound(lse64))


def test_one_loop_walks_the_same_tiles():
    p = Problem(1, 40, 150, 4, 2, 32, 32, jnp.dtype("float32"), Config(16, 16, 1), window=60)
    one = replace(p, config=Config(16, 16, 1, one_loop=True))
    for tile, past in itertools.product(range(p.row_tiles), range(0, 111, 10)):
        start, *_, stop = grid.key_tiles(p, tile, past, 40)
        assert [int(x) for x in grid.key_tiles(one, tile, past, 40)] == [start, stop, stop, stop]


def test_one_loop_or_a_fixed_maximum():
    with pytest.raises(ValueError, match="one_loop must be False beside fixed_maximum, got True"):
        Config(16, 16, one_loop=True, fixed_maximum=True)
    for name in ("one_loop", "fixed_maximum", "scores_ahead"):
        with pytest.raises(ValueError, match=f"{name} must be a bool, got 1"):
            Config(16, 16, **{name: 1})


def test_what_a_caller_may_wrap_around_it():
    """grad of checkpoint of vmap, under jit, through both kernels."""
    q, k, v = qkv(B=2, T=20, S=90, H=8, G=2)
    sinks = jnp.linspace(-1.0, 1.0, 8)

    for tokens in (20, 1):

        def each(attend, tokens=tokens):
            def one(q, k, v, sinks):
                return attend(q, k, v, window=30, sinks=sinks)

            def total(q, k, v, sinks):
                mapped = jax.vmap(jax.checkpoint(one), in_axes=(0, 0, 0, None))
                return jnp.sum(jnp.sin(mapped(q[:, None, -tokens:], k[:, None], v[:, None], sinks)))

            return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(q, k, v, sinks)

        chex.assert_trees_all_close(each(ours), each(reference.grouped_query_attention), rtol=1e-5, atol=1e-5)
