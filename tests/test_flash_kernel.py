"""The flash attention kernels in interpret mode, cut so small that every case has several blocks and tiles."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from attention_truth import assert_close, bits, flash_rows, fp32_bound, of_each, qkv, random, softmax_rows
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

import flash
from flash import grid, kernel
from flash.tuning import Config
from references import accuracy
from references import flash as reference
from references.cases import FLASH_ODD, FLASH_SMALL, FlashCase, inputs

# Ragged queries and keys, a tile wholly masked for some rows, two query heads to a KV head.
PLAIN = FlashCase("plain", "", 2, 40, 50, 4, 2, 24, 40)
CASES = [
    replace(PLAIN, name=f"{dtype} {'causal' if causal else 'full'}", dtype=dtype, causal=causal)
    for dtype in ("float32", "bfloat16", "float16")
    for causal in (False, True)
]
SMALL_BLOCKS = Config(16, 16, 1, splits=1)
ours = partial(flash.flash_attention, implementation="pallas")


def assert_equals_float64(case, config):
    arguments = inputs(case)
    o64, lse64 = flash_rows(**arguments)
    (o, lse), (low, _) = of_each([partial(ours, config=config), reference.dense], **arguments, return_lse=True)
    assert_close(o, o64, accuracy.attention_bound(o64, low, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))


# One of each kind; `test_references_flash` has all of them, with larger blocks.
SPLIT = {
    "batch",
    "size_64_causal_bf16",
    "size_128_fp16",
    "segments",
    "causal_T64_S32",
    "poison_causal_bf16",
    "aiter_5364_causal",
    "mlx_2608",
    "flash_attention_442",
    "K_192_V_128",
}


@pytest.mark.parametrize("case", [c for c in FLASH_SMALL + FLASH_ODD if c.name in SPLIT], ids=str)
def test_split_kernels_equal_float64(case):
    """Some splits get no tile, and some rows have no key in a split."""
    assert_equals_float64(case, replace(SMALL_BLOCKS, splits=3))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_blocks_equal_float64(case):
    assert_equals_float64(case, SMALL_BLOCKS)


@pytest.mark.parametrize("splits", [1, 2])
def test_every_feature_at_once(splits):
    case = FlashCase(
        "everything",
        "",
        2,
        37,
        53,
        6,
        2,
        24,
        80,
        causal=True,
        bias="empty_row",
        softcap=3.0,
        q_segments=(20, 17),
        kv_segments=(30, 23),
        kv_lengths=(53, 41),
    )
    assert_equals_float64(case, replace(SMALL_BLOCKS, splits=splits))


# What `conftest` does for speed lets XLA fuse multiplications and additions in one program and not in the next.
FUSED_ALIKE = {"xla_cpu_use_fusion_emitters": True} if jaxlib.version.__version_info__ < (0, 11) else {}


def attention(case, config, xcds):
    """The kernels for a GPU of `xcds` dies, called without the public function."""
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
        config=config,
        xcds=xcds,
        right=0 if case.causal else None,
        bottom_right=case.causal,
        returns_lse=True,
    )
    operands = {name: arguments[name] for name in ("q", "k", "v")}
    program = jax.jit(lambda x: kernel.attention(p, x, scale=case.K**-0.5, target=None), compiler_options=FUSED_ALIKE)
    return program(operands)


# Every order, and the one that is shipped in every dtype; four and three dies, on which KV heads are left over.
OTHERS = (("kv_group_first", 4), ("kv_group_first", 3), ("head_first", 4), ("swizzled_head_first", 2))


@pytest.mark.parametrize(("case", "others"), [(CASES[1], 1), (CASES[3], 4), (CASES[5], 1)], ids=str)
def test_orders_change_no_bit(case, others):
    plain = bits(attention(case, replace(SMALL_BLOCKS, order="block_first"), 1))
    for order, xcds in OTHERS[:others]:
        assert bits(attention(case, replace(SMALL_BLOCKS, order=order), xcds)) == plain


@pytest.mark.parametrize("H, G", [(12, 12), (6, 6), (9, 3), (40, 10)])
def test_no_tile_is_left_out(H, G):
    """aiter 3936: a published remap for eight dies leaves out 10 to 25 % of the tiles of these heads."""
    case = FlashCase("heads", "", 1, 32, 16, H, G, 16, 16)
    o64, _ = flash_rows(**inputs(case))
    got = attention(case, SMALL_BLOCKS, 8)
    assert_close(got["o"], o64, fp32_bound(o64))


def test_splits_agree():
    case = FlashCase("splits", "", 1, 20, 200, 2, 1, 16, 16, causal=True)
    one, *others = (attention(case, replace(SMALL_BLOCKS, splits=n), 1) for n in (1, 2, 13))
    for other in others:
        chex.assert_trees_all_close(other, one, rtol=0, atol=1e-6)


def test_two_runs_are_bit_equal():
    run = partial(ours, **inputs(CASES[3]), config=replace(SMALL_BLOCKS, splits=2), return_lse=True)
    assert bits(run()) == bits(run())


# Keys that no row sees


def poison(arguments, keys):
    return arguments | {name: arguments[name].at[:, keys].set(jnp.nan) for name in ("key", "value")}


# Blocks of 64 rows and tiles of 32 keys, the default on a CPU; of up to 128 rows with small heads elsewhere.
@pytest.mark.parametrize(
    ("options", "rows", "hidden"),
    [
        # beyond the diagonal of all rows, in the same tile and in others
        (dict(is_causal=True), slice(None), slice(300, None)),
        # left of every row's window, and right of it
        (dict(local_window_size=(5, 3)), slice(None), slice(303, None)),
        (dict(local_window_size=(-7, 20)), slice(None), slice(0, 7)),
        # of every row: these windows are empty
        (dict(local_window_size=(-3, 1)), slice(None), slice(None)),
        (dict(local_window_size=(2, -5), is_causal=True), slice(None), slice(None)),
        # and of the windows of one block of rows: the others may turn NaN
        (dict(local_window_size=(5, 3)), slice(128, 256), slice(0, 123)),
        (dict(local_window_size=(5, 3)), slice(128, 256), slice(259, None)),
        (dict(is_causal=True), slice(0, 128), slice(128, None)),
        (dict(key_value_seq_lengths=jnp.asarray([33, 33])), slice(None), slice(33, None)),
        (dict(mask=jnp.arange(330) != 21), slice(None), 21),
    ],
    ids=[
        "beyond the diagonal",
        "right of every window",
        "left of every window",
        "beside empty windows",
        "beside empty causal windows",
        "left of a block's windows",
        "right of a block's windows",
        "beyond a block's diagonal",
        "beyond the lengths",
        "masked",
    ],
)
def test_nan_in_hidden_keys_changes_no_bit(options, rows, hidden):
    q, k, v = qkv(2, 300, 330, 4, 2, dtype="bfloat16")
    attention = partial(flash.dot_product_attention, **options, return_residual=True, implementation="pallas")
    arguments = dict(query=q, key=k, value=v)
    clean, poisoned = (
        jax.tree.map(lambda x: x[:, rows], attention(**a)) for a in (arguments, poison(arguments, hidden))
    )
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in clean)
    assert bits(clean) == bits(poisoned)


# Logits


@pytest.mark.parametrize("scale, splits", [(-0.3, 1), (0.0, 3), (1e-35, 1), (40.0, 3)])
def test_scales(scale, splits):
    case = FlashCase("scaled", "", 1, 20, 50, 2, 1, 16, 16, scale=scale, causal=True)
    assert_equals_float64(case, replace(SMALL_BLOCKS, splits=splits))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_of_run_time(scale):
    q, k, v = qkv(1, 20, 50)
    got = jax.jit(partial(flash.dot_product_attention, implementation="pallas"))(q, k, v, scale=jnp.float32(scale))
    o64, _ = softmax_rows(q, k, v, lambda b, t: range(50), scale=scale)
    assert_close(got, o64, fp32_bound(o64))


@pytest.mark.parametrize(("dtype", "splits"), [("float32", 1), ("bfloat16", 2), ("float16", 1)])
def test_huge_logits(dtype, splits):
    """Weights are those of the largest logits, whatever their size, be they in the first tile or in a later one."""
    S, V = 48, 16
    rng = np.random.default_rng(0)
    v = jnp.asarray(rng.standard_normal((1, S, 1, V), np.float32), dtype)
    q = jnp.zeros((1, 4, 1, 16), dtype).at[0, :, 0, 0].set(jnp.asarray([1.0, -1.0, 2.0**14, 0.0], dtype))
    for magnitude in (2.0**4, 2.0**13, 2.0**15):
        k = np.zeros((1, S, 1, 16), np.float32)
        k[0, :, 0, 0] = rng.choice([-1.0, -0.5, 0.25, 0.5], S)
        k[0, [3, 20, 45], 0, 0] = 1.0
        k = jnp.asarray(k * magnitude, dtype)
        for scale in (1.0, 2.0**9):
            o64, lse64 = softmax_rows(q, k, v, lambda b, t: range(S), scale=scale)
            config = replace(SMALL_BLOCKS, splits=splits)
            o, lse = ours(q, k, v, scale=scale, config=config, return_lse=True)
            # All that counts are ties, which weigh the same: only the values' and the output's rounding is left.
            assert_close(o, o64, 2 * float(jnp.finfo(dtype).eps) + 1e-6)
            np.testing.assert_allclose(lse[..., 0], lse64[..., 0], rtol=1e-6)


def test_a_bias_of_one_element():
    q, k, v = qkv(2, 20, 30, 4, 2)
    for shape in ((), (1, 1, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1)):
        bias = random(1, shape)[0]
        plain, other = (ours(q, k, v, config=SMALL_BLOCKS, bias=b) for b in (jnp.zeros(shape), bias))
        np.testing.assert_allclose(plain, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float16"])
def test_biases_may_have_another_dtype(bias_dtype):
    q, k, v = qkv(1, 20, 30)
    bias = random(1, (20, 30), dtype=bias_dtype)[0]
    got = ours(q, k, v, bias=bias, config=SMALL_BLOCKS)
    o64, _ = softmax_rows(q, k, v, lambda b, t: range(30), bias=np.asarray(bias, np.float32))
    assert_close(got, o64, fp32_bound(o64))


# Transformations


def test_lengths_are_values_not_shapes():
    q, k, v = qkv(2, 20, 50)
    traced = jax.jit(chex.assert_max_traces(lambda q, k, v, n: ours(q, k, v, kv_lengths=n), n=1))
    for lengths in ((50, 50), (0, 17), (-3, 1)):
        o = traced(q, k, v, jnp.asarray(lengths, jnp.int32))
        assert np.isfinite(o).all()
        assert all((np.asarray(o[b]) == 0).all() == (n <= 0) for b, n in enumerate(lengths))


@pytest.mark.parametrize("name", ["fixed_maximum", "scores_ahead"])
def test_switches_are_bools(name):
    with pytest.raises(ValueError, match=f"{name} must be a bool, got 1"):
        Config(16, 16, **{name: 1})


FIXED = Config(16, 16, 1, splits=1, fixed_maximum=True)


@pytest.mark.parametrize(("dtype", "config"), [("float32", None), ("bfloat16", FIXED)])
def test_shard_map_over_batch_and_heads(dtype, config):
    """Lowered for ROCm with jax's check of what varies over which axis; a bias may be the same on all devices."""
    device = AbstractDevice(device_kind="gfx942", num_cores=None, platform="rocm")
    mesh = AbstractMesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    spec = PartitionSpec("b", None, "h")
    bias_spec = PartitionSpec(None, "h")

    def shape(*sizes, spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    with use_abstract_mesh(mesh):
        sharded = jax.jit(
            jax.shard_map(
                lambda q, k, v, bias: (
                    ours(q, k, v, bias=bias, causal=True, return_lse=True),
                    ours(q, k, v, causal=True, config=config, return_lse=True),
                ),
                mesh=mesh,
                in_specs=(spec, spec, spec, bias_spec),
                out_specs=((spec, spec), (spec, spec)),
            )
        )
        avals = shape(4, 40, 8, 16, spec=spec), shape(4, 50, 4, 16, spec=spec), shape(4, 50, 4, 16, spec=spec)
        lowered = sharded.trace(*avals, shape(1, 8, 1, 50, spec=bias_spec)).lower(lowering_platforms=("rocm",))
    text = lowered.as_text()
    assert "flash_forward_kv_group_first" in text
    assert ("flash_lost_blocks" in text) == (config is not None)
    assert "all_reduce" not in text and "all_gather" not in text
