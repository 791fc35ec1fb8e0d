"""The public flash_attention under transformations, and what it refuses.

A kernel joins these tests by its name in IMPLEMENTATIONS.
"""

import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import qkv, random

import flash
from references import flash as reference

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_implementation
def test_vmap(implementation):
    """jax 39451: over queries only, over all, over the batch's lengths."""
    q, k, v = qkv(B=3, T=5, S=7, H=4, G=2)
    attention = partial(flash.flash_attention, causal=True, implementation=implementation)
    mapped = jax.vmap(attention, in_axes=(0, None, None))(q[:, None], k[:1], v[:1])
    singles = jnp.stack([attention(q[i : i + 1], k[:1], v[:1]) for i in range(3)])
    np.testing.assert_allclose(mapped, singles, rtol=0, atol=1e-6)
    lengths = jnp.asarray([[7], [0], [3]])
    mapped = jax.vmap(lambda q, k, v, n: attention(q, k, v, kv_lengths=n))(q[:, None], k[:, None], v[:, None], lengths)
    np.testing.assert_allclose(mapped[:, 0], attention(q, k, v, kv_lengths=lengths[:, 0]), rtol=0, atol=1e-6)


@each_implementation
def test_scan_of_checkpointed_layers(implementation):
    x = 0.5 * random(0, (1, 6, 2, 16))[0]
    attention = partial(flash.flash_attention, causal=True, implementation=implementation)

    def layers(x):
        return jax.lax.scan(jax.checkpoint(lambda x, _: (x + attention(x, x, x), None)), x, None, length=3)[0]

    def unrolled(x):
        for _ in range(3):
            x = x + reference.dense(x, x, x, causal=True)
        return x

    ours, truth = (jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(x) for f in (layers, unrolled))
    chex.assert_trees_all_close(ours, truth, rtol=1e-5, atol=1e-5)


SHARDED = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import flash
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("b", "g"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
shapes = (4, 40, 4, 16), (4, 70, 2, 16), (4, 70, 2, 16)
q, k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
n = jnp.asarray([70, 3, 0, 41])
spec = P("b", None, "g")
functions = {
    "flash_attention": lambda q, k, v, n, **i: flash.flash_attention(q, k, v, causal=True, kv_lengths=n, **i),
    "dot_product_attention":
        lambda q, k, v, n, **i: flash.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=n, **i),
}
for name, implementation in ((name, i) for name in functions for i in ("reference", "pallas")):
    f = partial(functions[name], implementation=implementation)
    # jax's interpret mode does not pass its own check of what varies over which axis.
    check = {"check_vma": implementation != "pallas"}
    sharded = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3 + (P("b"),), out_specs=spec, **check))
    np.testing.assert_allclose(sharded(q, k, v, n), f(q, k, v, n), rtol=0, atol=1e-6)
    text = sharded.lower(q, k, v, n).compile().as_text()
    collectives = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    assert not [word for word in collectives if word in text], name
    print(name, implementation, len(sharded(q, k, v, n).sharding.device_set))
    # The kernels have the reference's gradients.
    if implementation == "reference":
        ours, truth = (
            jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(g(*x, n))), (0, 1, 2)))(q, k, v) for g in (sharded, f)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), ours, truth)
"""


def test_shard_map_over_batch_and_heads():
    """jax 21855, jax-triton 163: eight devices, no collective in the forward pass."""
    result = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=300)
    names = "flash_attention", "dot_product_attention"
    printed = [f"{name} {implementation} 8" for name in names for implementation in IMPLEMENTATIONS]
    assert (result.returncode, result.stdout.splitlines()) == (0, printed), result.stderr


# Bad input

Q, K, V = qkv(B=2, T=5, S=7, H=4, G=2)
IDS = jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 7), jnp.int32)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("q", dict(q=Q[0])),
        ("q", dict(q=Q.astype(jnp.int32))),
        ("k", dict(k=K.astype(jnp.bfloat16))),
        ("v", dict(v=V.astype(jnp.float16))),
        ("k", dict(k=K[:1])),
        ("k", dict(k=K[..., :8])),
        ("v", dict(v=V[:, :6])),
        ("v", dict(v=V[:, :, :1])),
        ("q", dict(q=Q[:, :, :3])),
        ("q", dict(q=Q[:, :, :0])),
        ("bias", dict(bias=jnp.zeros((2, 4, 5, 6)))),
        ("bias", dict(bias=jnp.zeros((1, 2, 5, 7)))),
        ("bias", dict(bias=jnp.zeros((1, 1, 1, 5, 7)))),
        ("bias", dict(bias=jnp.ones((5, 7), bool))),
        ("softcap", dict(softcap=0.0)),
        ("softcap", dict(softcap=-1.0)),
        ("softcap", dict(softcap=jnp.float32(3.0))),
        ("scale", dict(scale=jnp.float32(3.0))),
        ("kv_segment_ids", dict(q_segment_ids=IDS[0])),
        ("q_segment_ids", dict(kv_segment_ids=IDS[1])),
        ("q_segment_ids", dict(q_segment_ids=IDS[1], kv_segment_ids=IDS[1])),
        ("kv_segment_ids", dict(q_segment_ids=IDS[0], kv_segment_ids=IDS[1].astype(jnp.float32))),
        ("kv_lengths", dict(kv_lengths=jnp.asarray([-1, 3]))),
        ("kv_lengths", dict(kv_lengths=jnp.asarray([1, 8]))),
        ("kv_lengths", dict(kv_lengths=jnp.asarray([1]))),
        ("kv_lengths", dict(kv_lengths=jnp.asarray([1.0, 3.0]))),
        ("q_scale", dict(q_scale=jnp.ones(2))),
        ("implementation", dict(implementation="cudnn")),
        ("q", dict(q=None)),
        ("k", dict(k="k")),
        ("causal", dict(causal="no")),
        ("causal", dict(causal=np.array([True, False]))),
        ("scale", dict(scale=True)),
        ("scale", dict(scale=2e38)),
        ("softcap", dict(softcap=1e300)),
        ("softcap", dict(softcap=1e-30)),
        ("kv_lengths", dict(kv_lengths=[2**40, 1])),
        ("kv_lengths", dict(kv_lengths=np.array([2**63 + 1, 1], np.uint64))),
    ],
)
def test_bad_input_is_named(name, changed):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        flash.flash_attention(**dict(q=Q, k=K, v=V) | changed)


def test_lengths_of_run_time_are_not_checked():
    o = jax.jit(lambda n: flash.flash_attention(Q, K, V, kv_lengths=n))(jnp.asarray([-1, 7]))
    assert np.all(o[0] == 0)


SHAPE = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    "named, shapes",
    [
        ("K up to 576, got K = 577", [SHAPE((1, 8, 1, 577), jnp.float32)] * 2 + [SHAPE((1, 8, 1, 16), jnp.float32)]),
        ("V up to 512, got V = 513", [SHAPE((1, 8, 1, 16), jnp.float32)] * 2 + [SHAPE((1, 8, 1, 513), jnp.float32)]),
        ("got float8_e4m3fnuz", [SHAPE((1, 8, 1, 16), jnp.float8_e4m3fnuz)] * 3),
        ("less than 2\\^31 elements", [SHAPE((1, 2**20, 16, 128), jnp.float8_e4m3fn)] * 3),
    ],
)
def test_what_no_kernel_can_do(named, shapes):
    """pytorch 189849, flash-attention 2260: refused, or done by the reference."""
    with pytest.raises(NotImplementedError, match=named):
        jax.eval_shape(partial(flash.flash_attention, implementation="pallas"), *shapes)
    assert jax.eval_shape(flash.flash_attention, *shapes).shape == shapes[0].shape[:3] + shapes[2].shape[3:]


def test_float64_has_no_kernel():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64"):
        jax.eval_shape(partial(flash.flash_attention, implementation="pallas"), *[SHAPE((1, 8, 1, 16), "float64")] * 3)


def test_config_is_checked():
    with pytest.raises(ValueError, match=r"^config must be a flash\.Config or None, got 64"):
        flash.flash_attention(Q, K, V, config=64)
