"""`Config.fixed_maximum`: most tiles do not move the maximum of their rows, and a block where that was too small is
lost, and computed by a second kernel. In interpret mode and as AMD machine code; flash attention, and gqa's prefill.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, at, bits, flash_rows, fp32_bound, gqa_rows, of_each, random, softmax_rows
from planted import broken

import flash
import gqa
from amdgpu.lowering import triton_calls
from flash import api, kernel
from references import accuracy
from references.cases import FLASH_ODD, FLASH_SMALL, GQA_ODD, GQA_SMALL, FlashCase, GqaCase, inputs
from references.flash import dense as flash_dense
from references.gqa import dense as gqa_dense

FLASH = flash.Config(16, 16, 1, splits=1, fixed_maximum=True)
GQA = gqa.Config(16, 16, 1, fixed_maximum=True)
FLASH_AHEAD, GQA_AHEAD = replace(FLASH, scores_ahead=True), replace(GQA, scores_ahead=True)
PLACES = (None, "gfx942", "gfx950", "gfx1201")
attention = partial(flash.flash_attention, implementation="pallas", return_lse=True)
grouped = partial(gqa.grouped_query_attention, implementation="pallas", return_lse=True)


def assert_equals_float64(case, function, rows, dense, place=None):
    arguments = inputs(case)
    clean = arguments
    if getattr(case, "poison", False):
        clean = arguments | {name: jnp.nan_to_num(arguments[name].astype(jnp.float32)) for name in "kv"}
    o64, lse64 = rows(**clean)
    with at(place):
        o, lse = (np.asarray(x) for x in function(**arguments))
    ((low, _),) = of_each([dense], **arguments, return_lse=True)
    assert_close(o, o64, accuracy.attention_bound(o64, low, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))


def in_bf16(cases):
    return [case for case in cases if case.dtype == "bfloat16" and case.T > 1]


# Tiles of every kind: several free ones, cut by a diagonal, by lengths, by both edges of a window.
LONG = FlashCase("long", "", 2, 70, 150, 4, 2, 32, 16, "bfloat16", causal=True, kv_lengths=(150, 101))
WINDOW = GqaCase("window", "", 2, 40, 150, 4, 2, 32, 32, "bfloat16", past=(100, 7), window=60, sinks="uniform")


@pytest.mark.parametrize("case", [*in_bf16(FLASH_SMALL + FLASH_ODD), LONG], ids=str)
def test_flash_equals_float64(case):
    assert_equals_float64(case, partial(attention, config=FLASH), flash_rows, flash_dense)


@pytest.mark.parametrize("case", [*in_bf16(GQA_SMALL + GQA_ODD), WINDOW], ids=str)
def test_gqa_equals_float64(case):
    assert_equals_float64(case, partial(grouped, config=GQA), gqa_rows, gqa_dense)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("scores_ahead", [False, True])
def test_machine_code_equals_float64(scores_ahead, place):
    flash_config, gqa_config = (FLASH_AHEAD, GQA_AHEAD) if scores_ahead else (FLASH, GQA)
    case = replace(LONG, B=1, T=20, S=80, H=1, G=1, kv_lengths=None)
    assert_equals_float64(case, partial(attention, config=flash_config), flash_rows, flash_dense, place)
    case = replace(WINDOW, B=1, T=20, S=80, H=1, G=1, past=(60,), window=None)
    assert_equals_float64(case, partial(grouped, config=gqa_config), gqa_rows, gqa_dense, place)


AHEAD = [LONG, replace(LONG, name="one_free_tile", T=150, kv_lengths=(0, 33)), WINDOW]


@pytest.mark.parametrize("case", AHEAD, ids=str)
def test_scores_ahead_equal_float64(case):
    """Also where a block has one free tile, or none, or no key at all."""
    if isinstance(case, FlashCase):
        assert_equals_float64(case, partial(attention, config=FLASH_AHEAD), flash_rows, flash_dense)
    else:
        assert_equals_float64(case, partial(grouped, config=GQA_AHEAD), gqa_rows, gqa_dense)


def equations(jaxpr):
    """Those of a jaxpr and of all jaxprs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize(("function", "config"), [(attention, FLASH), (grouped, GQA)], ids=["flash", "gqa"])
def test_the_first_scores_ahead_are_computed_only_for_a_tile(function, config):
    """In a branch of their own: without a tile there may be no key to read."""

    def branches_with_products(**options):
        """For each kernel that walks all blocks; one for lost blocks is beside each."""
        q, k = (jnp.zeros((1, 40, heads, 16), jnp.bfloat16) for heads in (2, 1))
        jaxpr = jax.make_jaxpr(partial(function, config=replace(config, **options)))(q, k, k).jaxpr
        found = list(equations(jaxpr))
        branches = [b.jaxpr for e in found if e.primitive.name == "cond" for b in e.params["branches"]]
        with_products = [any(e.primitive.name == "dot_general" for e in branch.eqns) for branch in branches]
        return 2 * sum(with_products) / sum(e.primitive.name == "pallas_call" for e in found)

    assert (branches_with_products(), branches_with_products(scores_ahead=True)) == (0, 1)


def leap(gap, T=16, keys=80):
    """Logits of about 0, but for one key of the fourth tile, which all rows prefer by `gap`, in natural units."""
    q = jnp.zeros((1, T, 1, 16), jnp.bfloat16).at[..., 0].set(1.0)
    k = (random(0, (1, keys, 1, 16))[0] / 8).astype(jnp.bfloat16).at[0, 55, 0, 0].set(gap)
    return q, k, random(1, (1, keys, 1, 16), dtype="bfloat16")[0]


def assert_right(q, k, v, config=FLASH, place=None):
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(k.shape[1]), scale=1.0)
    with at(place):
        o, lse = (np.asarray(x) for x in attention(q, k, v, scale=1.0, config=config))
    assert_close(o, o64, accuracy.attention_bound(o64, np.float32(o64).astype(jnp.bfloat16), "bfloat16"))
    assert_close(lse, lse64, fp32_bound(lse64))


# 41 natural units are 60 binary ones, and 2^60 is the most that the sums of a block may come to.
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("gap", [20.0, 40.0, 45.0, 128.0, 4096.0])
def test_a_logit_that_leaps(gap, place):
    assert_right(*leap(gap), place=place)


@pytest.mark.parametrize("place", (None, "gfx942"))
@pytest.mark.parametrize("gap", [20.0, 45.0, 4096.0])
def test_a_logit_that_leaps_behind_scores_ahead(gap, place):
    assert_right(*leap(gap), config=FLASH_AHEAD, place=place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [1e32, -1e38])
def test_values_whose_weighted_sum_would_overflow(value, place):
    """The sum of weights fits, and times such values it does not."""
    q, k, v = leap(38.0)
    assert_right(q, k, v.at[0, 55, 0, 0].set(value).at[0, 20, 0, 0].set(-value / 2), place=place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_that_a_row_sees_is_not_lost(name, place):
    arrays = dict(zip("qkv", leap(0.0), strict=True))
    arrays[name] = arrays[name].at[0, 50].set(jnp.nan)
    with at(place):
        o, _ = attention(**arrays, config=FLASH)
    assert np.isnan(np.asarray(o, np.float32)).all()


CALLS = {"flash": partial(attention, causal=True, config=FLASH), "gqa": partial(grouped, config=GQA)}


def one_that_leaps():
    """q, k, v: the rows from 48 to 63 of batch row 1 and head 2 prefer one key by far."""
    q, k, v = (random(i, (2, 80, heads, 16), dtype="bfloat16")[0] for i, heads in enumerate((4, 2, 2)))
    q = (q / 4).at[..., 0].set(0.0).at[1, 48:64, 2, 0].set(1.0)
    return q, k.at[:, 40, :, 0].set(1e3), v


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("name", CALLS)
def test_blocks_that_are_lost_are_found(monkeypatch, name):
    """Among the two of five that a workgroup looks after."""
    monkeypatch.setattr(flash.grid, "LOST_BLOCKS", 2)
    q, k, v = one_that_leaps()
    attend = partial(CALLS[name], scale=1.0)
    o, lse = (np.asarray(x) for x in attend(q, k, v))
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(t + 1), scale=1.0)
    assert_close(o, o64, accuracy.attention_bound(o64, np.float32(o64).astype(jnp.bfloat16), "bfloat16"))
    assert_close(lse, lse64, fp32_bound(lse64))
    without = replace(attend.keywords["config"], fixed_maximum=False)
    same = o == np.asarray(attend(q, k, v, config=without)[0])
    assert same[1, 48:64, 2].all() and not same[:, 64:].all((1, 2)).any()


@pytest.mark.parametrize("name", CALLS)
def test_what_a_caller_may_wrap_around_it(name):
    """vmap, scan and grad, through both kernels."""
    attend = partial(CALLS[name], scale=1.0)
    arrays = one_that_leaps()
    alone = attend(*arrays)
    _, scanned = jax.lax.scan(lambda _, row: (None, attend(*(x[None] for x in row))), None, arrays)
    mapped = jax.jit(jax.vmap(lambda *row: attend(*(x[None] for x in row))))(*arrays)
    for wrapped in (mapped, scanned):
        assert bits([x[:, 0] for x in wrapped]) == bits(alone)

    def loss(attend):
        return jax.grad(lambda q: attend(q, *arrays[1:])[0].astype(jnp.float32).sum())(arrays[0])

    assert bits([loss(attend)]) == bits([loss(partial(attend, implementation="reference", config=None))])


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("window", [None, (40, 0), (30, 20)])
def test_lengths_and_windows(monkeypatch, window):
    monkeypatch.setattr(api, "default_config", lambda *_: FLASH)
    monkeypatch.setattr(api, "KEYS_FOR_A_FIXED_MAXIMUM", 0)
    q, k, v = one_that_leaps()
    lengths = dict(query_seq_lengths=jnp.array([80, 60]), key_value_seq_lengths=jnp.array([0, 77]))
    attend = partial(flash.dot_product_attention, scale=1.0, local_window_size=window, return_residual=True, **lengths)
    (o, lse), (o32, lse32) = (
        (np.asarray(x, np.float64) for x in attend(*arrays, implementation=implementation))
        for arrays, implementation in (((q, k, v), "pallas"), ([x.astype(jnp.float32) for x in (q, k, v)], "reference"))
    )
    assert_close(o, o32, accuracy.attention_bound(o32, np.float32(o32).astype(jnp.bfloat16), "bfloat16"))
    assert_close(lse, lse32, 2 * fp32_bound(lse32))


@pytest.mark.parametrize("place", PLACES)
def test_a_sink_above_the_fixed_maximum(place):
    """By more binary units than a weight can be scaled down; the value makes up for it."""
    q, k, v = leap(39.5)
    v = v.at[0, 55].set(2.0**69)
    sinks = np.float32([87.75])
    o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(80), scale=1.0, sinks=sinks)
    with at(place):
        o, lse = (np.asarray(x) for x in grouped(q, k, v, scale=1.0, sinks=sinks, causal=False, config=GQA))
    assert (o64 > 0.6).all()
    assert_close(o, o64, accuracy.attention_bound(o64, np.float32(o64).astype(jnp.bfloat16), "bfloat16"))
    assert_close(lse, lse64, fp32_bound(lse64))


def test_a_hidden_key_changes_no_bit():
    """Only what the rows of a block see decides how they are computed: here a key that none does would be too large."""
    q, k, v = leap(0.0, T=80)
    clean, leaping = (attention(q, x, v, causal=True, config=FLASH) for x in (k, k.at[0, 79].set(1e4)))
    rows = slice(0, 64)
    assert bits([x[:, rows] for x in clean]) == bits([x[:, rows] for x in leaping])


def test_other_dtypes_are_computed_as_without():
    for dtype in ("float16", "float32"):
        q, k, v = (x.astype(dtype) for x in leap(3.0))
        with_, without = (attention(q, k, v, config=replace(FLASH, fixed_maximum=fixed)) for fixed in (True, False))
        assert bits(with_) == bits(without)


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize(
    "edit",
    [
        ('pl.when(ins["lost"][block] > 0)', 'pl.when(ins["lost"][block] > 1)'),
        ("loop(fixed_from, free_stop, fixed,", "loop(fixed_from + 1, free_stop, fixed,"),
        ("        within = within & (jnp.sum(jnp.abs(x)) < jnp.inf)\n", "        pass\n"),
    ],
    ids=["not computed", "a tile left out", "sums of values not looked at"],
)
def test_planted_faults_are_seen(monkeypatch, edit):
    monkeypatch.setattr(api, "kernel", broken(kernel, edit))
    with pytest.raises(AssertionError):
        assert_right(*leap(1.0, T=17), config=replace(FLASH, num_warps=2))
        q, k, v = leap(38.0, T=17)
        assert_right(q, k, v.at[0, 55, 0, 0].set(1e32), config=replace(FLASH, num_warps=2))
        assert_right(*leap(128.0, T=17), config=replace(FLASH, num_warps=2))


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize(
    ("T", "dtype", "bias"),
    [(2048, "bfloat16", False), (2048, "float16", False), (2047, "bfloat16", False), (2048, "bfloat16", True)],
)
@pytest.mark.parametrize("module", [flash.api, gqa.api], ids=lambda module: module.__name__)
def test_a_row_may_have_another_config_where_no_maximum_is_fixed(monkeypatch, module, K, T, dtype, bias):
    """An H200's: what fits the registers with a fixed maximum spills with a bias."""
    monkeypatch.setattr(module, "current_arch", lambda: "sm_90")
    rows = flash.tuning.ROWS if module is flash.api else [row for row in gqa.tuning.ROWS if row.kernel == "prefill"]
    (row,) = (row for row in rows if (row.architecture, row.itemsize, row.head_size) == ("sm_90", 2, K))
    config = row.config if (T, dtype, bias) == (2048, "bfloat16", False) else row.moving
    function = flash.flash_attention if module is flash.api else gqa.grouped_query_attention
    q = jax.ShapeDtypeStruct((1, T, 16, K), dtype)
    optional = {"bias": jax.ShapeDtypeStruct((1, 1, T, T), dtype)} if bias else {}
    lowered = jax.jit(function).trace(q, q, q, **optional).lower(lowering_platforms=("cuda",))
    call, *lost = triton_calls(lowered)
    assert len(lost) == config.fixed_maximum
    assert (call.num_warps, call.num_stages) == (config.num_warps, config.num_stages)
    assert call.grid == (16 * -(-T // config.block_q), 1, 1)
