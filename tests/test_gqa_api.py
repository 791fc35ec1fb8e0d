"""append_kv, grouped_query_attention over caches and under transformations, and what they refuse."""

import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, gqa_rows, qkv, random

import gqa
from references import gqa as reference

IMPLEMENTATIONS = ("reference", "pallas")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# Caches


@each_implementation
@pytest.mark.parametrize(
    "T, S, chunk, window",
    [(24, 30, 8, None), (24, 30, 8, 1), (24, 30, 8, 5), (300, 330, 130, None), (300, 330, 130, 50)],
)
def test_chunked_prefill_equals_one_shot(T, S, chunk, window, implementation):
    """executorch 21857, mlx 3452: wherever it is split, into chunks that may exceed the window; then token by token.

    Chunks of 130 tokens are several tiles of rows and of keys.
    """
    B = 2
    q, k, v = qkv(B, T, T, H=4, G=2)
    sinks = jnp.linspace(-2.0, 2.0, 4)
    whole = gqa.grouped_query_attention(q, k, v, window=window, sinks=sinks, implementation=implementation)

    chex.clear_trace_counter()

    # Traced once for all splits: how many tokens are past and new are values.
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(caches, q, k, v, past, lengths):
        caches = gqa.append_kv(*caches, k, v, past, lengths)
        o = gqa.grouped_query_attention(
            q, *caches, past=past, lengths=lengths, window=window, sinks=sinks, implementation=implementation
        )
        return caches, o

    rng = np.random.default_rng(0)
    # What is beyond the valid tokens of a cache or a chunk is garbage.
    garbage = jnp.full((B, S, 2, 16), jnp.nan)
    for most in (chunk, chunk, 1) if T < 100 else (chunk, chunk):
        caches, past, o = (garbage, garbage), np.zeros(B, np.int32), np.zeros(q.shape, np.float32)
        while np.any(past < T):
            lengths = np.minimum(rng.integers(1, most + 1, B), T - past).astype(np.int32)
            at = np.minimum(past[:, None] + np.arange(chunk), T - 1)
            valid = (np.arange(chunk) < lengths[:, None])[:, :, None, None]
            rows = np.arange(B)[:, None]
            parts = (jnp.where(valid, x[rows, at], jnp.nan) for x in (q, k, v))
            caches, part = step(caches, *parts, jnp.asarray(past), jnp.asarray(lengths))
            for b in range(B):
                o[b, past[b] : past[b] + lengths[b]] = part[b, : lengths[b]]
                assert np.all(part[b, lengths[b] :] == 0)
            past = past + lengths
        np.testing.assert_allclose(o, whole, rtol=0, atol=2e-6)


@each_implementation
def test_a_decode_loop(implementation):
    """One token at a time in a scan that carries the cache: each row equals that of the prompt."""
    q, k, v = qkv(B=2, T=9, S=9, H=4, G=2)
    options = dict(window=4, sinks=jnp.linspace(-1.0, 1.0, 4), implementation=implementation)

    def step(carry, token):
        past, caches = carry
        q, k, v = (x[:, None] for x in token)
        caches = gqa.append_kv(*caches, k, v, past)
        return (past + 1, caches), gqa.grouped_query_attention(q, *caches, past=past, **options)[:, 0]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    start = jnp.int32(0), (jnp.zeros((2, 12, 2, 16)), jnp.zeros((2, 12, 2, 16)))
    _, o = jax.jit(partial(jax.lax.scan, step))(start, tokens)
    np.testing.assert_allclose(
        jnp.moveaxis(o, 0, 1), gqa.grouped_query_attention(q, k, v, **options), rtol=0, atol=2e-6
    )


def append_row_by_row(cache, new, past, lengths):
    cache = np.array(cache)
    for b, t in np.ndindex(*new.shape[:2]):
        if t < lengths[b] and 0 <= past[b] + t < cache.shape[1]:
            cache[b, past[b] + t] = new[b, t]
    return cache


@pytest.mark.parametrize(
    "past, lengths",
    [
        ((0, 5), (3, 3)),
        ((4, 2), (0, 2)),
        # known only at run time: over the end, beyond it, before the start, far out
        ((6, 7), (3, 3)),
        ((8, 9), (3, 1)),
        ((-1, -3), (3, 3)),
        ((-8, 2**31 - 2), (3, 3)),
    ],
)
def test_append_kv(past, lengths):
    cache_k, cache_v, k, v = random(0, (2, 8, 2, 4), (2, 8, 2, 6), (2, 3, 2, 4), (2, 3, 2, 6))
    ours = jax.jit(gqa.append_kv)(cache_k, cache_v, k, v, jnp.asarray(past), jnp.asarray(lengths))
    for got, cache, new in zip(ours, (cache_k, cache_v), (k, v), strict=True):
        np.testing.assert_array_equal(got, append_row_by_row(cache, new, past, lengths))
        first = reference.append(
            jnp.swapaxes(cache, 1, 2), new, jnp.asarray(past), jnp.asarray(lengths), head_first=True
        )
        np.testing.assert_array_equal(jnp.swapaxes(first, 1, 2), got)


def test_append_kv_takes_a_scalar_past_and_all_tokens():
    cache, new = random(0, (2, 8, 2, 4), (2, 3, 2, 4))
    for past in (2, np.int64(2), jnp.asarray(2)):
        ours, _ = gqa.append_kv(cache, cache, new, new, past)
        np.testing.assert_array_equal(ours, append_row_by_row(cache, new, (2, 2), (3, 3)))


# XLA's CPU backend widens bf16 to scatter it, so there the update takes scratch; on a GPU it takes none.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_append_kv_updates_donated_caches_in_place(dtype):
    cache_k, cache_v, new = (jnp.zeros((2, 64, 2, 16), dtype) for _ in range(3))
    append = jax.jit(gqa.append_kv, donate_argnums=(0, 1))
    arguments = cache_k, cache_v, new[:, :1], new[:, :1], jnp.asarray([3, 60])
    memory = append.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache_k.nbytes + cache_v.nbytes
    assert memory.temp_size_in_bytes < cache_k.nbytes
    where = cache_k.unsafe_buffer_pointer()
    ours, _ = append(*arguments)
    assert cache_k.is_deleted() and ours.unsafe_buffer_pointer() == where


@each_implementation
def test_vmap(implementation):
    """mlx 3383."""
    q, k, v = qkv(B=3, T=4, S=9, H=4, G=2)
    sinks, past = random(1, (4,))[0], jnp.asarray([[5], [0], [2]])
    attention = partial(gqa.grouped_query_attention, window=3, implementation=implementation)
    mapped = jax.vmap(lambda q, k, v, past: attention(q, k, v, past=past, sinks=sinks))(
        q[:, None], k[:, None], v[:, None], past
    )
    np.testing.assert_allclose(mapped[:, 0], attention(q, k, v, past=past[:, 0], sinks=sinks), rtol=0, atol=1e-6)
    shared = jax.vmap(attention, in_axes=(0, None, None))(q[:, None], k[:1], v[:1])
    singles = [attention(q[i : i + 1], k[:1], v[:1]) for i in range(3)]
    np.testing.assert_allclose(shared, jnp.stack(singles), rtol=0, atol=1e-6)


@each_implementation
def test_new_values_compile_nothing_anew(implementation):
    q, k, v = qkv(B=2, T=4, S=9)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def attention(past, lengths):
        return gqa.grouped_query_attention(q, k, v, past=past, lengths=lengths, implementation=implementation)

    for past, lengths in (((0, 5), (4, 4)), ((3, 1), (0, 2)), ((5, 5), (1, 4))):
        past, lengths = jnp.asarray(past), jnp.asarray(lengths)
        o64, _ = gqa_rows(q=q, k=k, v=v, past=past, lengths=lengths)
        assert_close(attention(past, lengths), o64, fp32_bound(o64))


SHARDED = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import gqa
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("b", "g"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
shapes = (4, 20, 4, 16), (4, 30, 2, 16), (4, 30, 2, 16), (4, 20, 2, 16), (4, 20, 2, 16), (4,)
arrays = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
past = jnp.asarray([0, 3, 10, 7])
spec = P("b", None, "g")

def attend(q, cache_k, cache_v, k, v, sinks, past, implementation):
    caches = gqa.append_kv(cache_k, cache_v, k, v, past)
    return gqa.grouped_query_attention(q, *caches, past=past, sinks=sinks, window=9, implementation=implementation)

for implementation in ("reference", "pallas"):
    f = partial(attend, implementation=implementation)
    # jax's interpret mode does not pass its own check of what varies over which axis.
    check = {"check_vma": implementation != "pallas"}
    specs = (spec,) * 5 + (P("g"), P("b"))
    sharded = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec, **check))
    np.testing.assert_allclose(sharded(*arrays, past), f(*arrays, past), rtol=0, atol=1e-6)
    text = sharded.lower(*arrays, past).compile().as_text()
    collectives = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    assert not [word for word in collectives if word in text]
    print(implementation, len(sharded(*arrays, past).sharding.device_set))
    # The kernels have the reference's gradients.
    if implementation == "reference":
        ours, truth = (
            jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(g(*x, past)))))(arrays) for g in (sharded, f)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), ours, truth)
"""


def test_shard_map_over_batch_and_heads():
    result = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines() == ["reference 8", "pallas 8"], result.stderr


# Bad input

Q, K, V = qkv(B=2, T=3, S=7, H=4, G=2)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("q", dict(q=Q[0])),
        ("q", dict(q=Q.astype(jnp.int32))),
        ("k", dict(q=Q.astype(jnp.float16))),
        ("k", dict(q=Q.astype(jnp.float16), k=K.astype(jnp.bfloat16), v=V.astype(jnp.bfloat16))),
        ("v", dict(v=V.astype(jnp.float16))),
        ("k", dict(k=K[:1])),
        ("k", dict(k=K[..., :8])),
        ("v", dict(v=V[:, :6])),
        # fla 1029
        ("q", dict(q=Q[:, :, :3])),
        ("q", dict(q=Q[:, :, :0])),
        ("sinks", dict(sinks=jnp.zeros(2))),
        ("sinks", dict(sinks=jnp.zeros(4, jnp.int32))),
        ("bias", dict(bias=jnp.zeros((2, 4, 3, 6)))),
        ("bias", dict(bias=jnp.zeros((3, 7), jnp.int32))),
        ("window", dict(window=0)),
        ("window", dict(window=-1)),
        ("window", dict(window=2.0)),
        ("window", dict(window=2**31)),
        ("softcap", dict(softcap=0.0)),
        ("scale", dict(scale=jnp.float32(1.0))),
        ("past", dict(past=-1)),
        ("past", dict(past=5)),
        ("past", dict(past=jnp.asarray([1, 5]))),
        ("past", dict(past=jnp.asarray([1, 2, 3]))),
        ("past", dict(past=1.0)),
        ("past", dict(k=K[:, :2], v=V[:, :2])),
        ("lengths", dict(lengths=jnp.asarray([4, 1]))),
        ("lengths", dict(lengths=jnp.asarray([-1, 1]))),
        ("lengths", dict(lengths=2)),
        ("implementation", dict(implementation="xla")),
        ("config", dict(config=64)),
        ("window", dict(window=True)),
        ("causal", dict(causal=1)),
        ("past", dict(past=2**40)),
        ("past", dict(past=[2**40, 1])),
        ("lengths", dict(lengths=[2**33, 1])),
        ("v", dict(v=None)),
    ],
)
def test_bad_input_is_named(name, changed):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        gqa.grouped_query_attention(**dict(q=Q, k=K, v=V) | changed)


def test_a_past_that_fits_with_fewer_tokens():
    o = gqa.grouped_query_attention(Q, K, V, past=5, lengths=jnp.asarray([2, 0]))
    assert np.all(o[0, :2] != 0) and np.all(o[0, 2] == 0) and np.all(o[1] == 0)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("cache_k", dict(cache_k=K[0])),
        ("cache_v", dict(cache_v=V[:, :6])),
        ("cache_k", dict(cache_k=K.astype(jnp.int32))),
        ("k_new", dict(k_new=K[:, :1, :1])),
        ("v_new", dict(v_new=V[:, :2])),
        ("v_new", dict(v_new=V[:, :1].astype(jnp.bfloat16))),
        ("past", dict(past=-1)),
        ("past", dict(past=7)),
        ("past", dict(past=jnp.asarray([1.0, 1.0]))),
        ("lengths", dict(lengths=jnp.asarray([2, 1]))),
        ("lengths", dict(lengths=jnp.asarray([1]))),
        ("past", dict(past=None)),
        ("past", dict(past=2**40)),
        ("cache_k", dict(cache_k=None)),
    ],
)
def test_bad_input_of_append_kv_is_named(name, changed):
    arguments = dict(cache_k=K, cache_v=V, k_new=K[:, :1], v_new=V[:, :1], past=0)
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        gqa.append_kv(**arguments | changed)


def test_what_the_kernels_do_not_do():
    wide = jnp.zeros((1, 2, 1, 264))
    for arguments in ((wide, wide, wide[..., :8]), (wide[..., :8], wide[..., :8], wide)):
        assert gqa.grouped_query_attention(*arguments).shape == (1, 2, 1, arguments[2].shape[-1])
        with pytest.raises(NotImplementedError, match=r"head sizes [KV] up to 256, got [KV] = 264"):
            gqa.grouped_query_attention(*arguments, implementation="pallas")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        gqa.grouped_query_attention(*(np.zeros((1, 2, 1, 8)),) * 3, implementation="pallas")
