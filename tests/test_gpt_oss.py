"""gpt-oss's attention blocks: the formulas, and that chunks and steps through a cache equal one shot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import gqa_rows

from benchmarks import gpt_oss
from references import accuracy

# More than a window of tokens, in three chunks of which the last is short.
SMALL = gpt_oss.Size(H=4, G=2, K=16, prompt=150, chunk=64, decoded=3)
HIDDEN = 24


@pytest.fixture(scope="module")
def block():
    layers = gpt_oss.random_layers(0, HIDDEN, SMALL)
    table = gpt_oss.rotary_table(SMALL.prompt + SMALL.decoded, SMALL.K)
    x = np.random.default_rng(1).normal(size=(1, SMALL.prompt + SMALL.decoded, HIDDEN)).astype(np.float32)
    return layers, gpt_oss.Rotary(*(jnp.asarray(t, jnp.float32) for t in table)), x


# The formulas


def test_rotary_table_of_the_model():
    cos, sin = gpt_oss.rotary_table(2, 64)
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * np.log(32) + 1) ** 2)
    speed = np.arctan2(sin, cos)[1]
    own = 150000.0 ** (-np.arange(32) / 32)
    # Pair 8 turns 32 times in 4096 tokens, pair 17 once: 4096 own / (2 pi).
    np.testing.assert_allclose(speed[:9], own[:9], rtol=1e-9)
    np.testing.assert_allclose(speed[18:], own[18:] / 32, rtol=1e-9)
    assert np.all((own[9:18] / 32 < speed[9:18]) & (speed[9:18] < own[9:18]))
    assert 4096 * own[8] / (2 * np.pi) > 32 > 4096 * own[9] / (2 * np.pi)
    assert 4096 * own[17] / (2 * np.pi) > 1 > 4096 * own[18] / (2 * np.pi)


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    rotary = gpt_oss.Rotary(*(jnp.asarray(t, jnp.float32) for t in gpt_oss.rotary_table(500, 64)))
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 64)).astype(np.float32)

    def product(p, j):
        q_p, k_j = (gpt_oss.rotate(jnp.asarray(x), rotary, jnp.asarray([n])) for x, n in ((q, p), (k, j)))
        return float(jnp.sum(q_p * k_j))

    assert product(400, 390) == pytest.approx(product(10, 0), rel=1e-4)
    assert abs(product(400, 380) - product(10, 0)) > 1e-2
    # Numbers i and i + 32 are one complex number.
    cos, sin = gpt_oss.rotary_table(8, 64)
    turned = (q[..., :32] + 1j * q[..., 32:]) * (cos + 1j * sin)[7]
    got = np.asarray(gpt_oss.rotate(jnp.asarray(q), rotary, jnp.asarray([7])))
    np.testing.assert_allclose(got[..., :32] + 1j * got[..., 32:], turned, rtol=1e-5, atol=1e-5)


def test_one_shot_follows_the_formula(block):
    layers, rotary, x = block
    found = gpt_oss.one_shot(layers, rotary, jnp.asarray(x), dtype="float32")
    cos, sin = (np.asarray(t, np.float64)[:, None] for t in rotary)
    h, (_, T, _), (H, G, K) = x.astype(np.float64), x.shape, (SMALL.H, SMALL.G, SMALL.K)
    for layer, window in zip(layers, (128, None), strict=True):
        w = [np.asarray(a, np.float64) for a in layer]
        y = w[0] * h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)
        q, k, v = np.split((y @ w[1] + w[2]).reshape(1, T, H + 2 * G, K), [H, H + G], axis=2)
        q, k = (
            np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
            for a, b in (np.split(z, 2, axis=-1) for z in (q, k))
        )
        o, _ = gqa_rows(q=q, k=k, v=v, window=window, sinks=w[5])
        h = h + o.reshape(1, T, H * K) @ w[3] + w[4]
    assert accuracy.relative_l2(found, h - x) < 2e-6


def test_weights_matter(block):
    """Each of them, in both layers: what would change nothing would check nothing."""
    layers, rotary, x = block
    found = gpt_oss.one_shot(layers, rotary, jnp.asarray(x), dtype="float32")
    for i, layer in enumerate(layers):
        for name in gpt_oss.Layer._fields:
            changed = layers[:i] + [layer._replace(**{name: 0.9 * getattr(layer, name)})] + layers[i + 1 :]
            other = gpt_oss.one_shot(changed, rotary, jnp.asarray(x), dtype="float32")
            assert accuracy.relative_l2(other, found) > 1e-3, (i, name)


# Chunks and steps


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_step_equals_one_shot(block, dtype, implementation):
    steps = gpt_oss.compare(*block, SMALL, dtype, implementation)
    assert [(step["past"], step["tokens"]) for step in steps] == [
        (0, 64),
        (64, 64),
        (128, 22),
        (150, 1),
        (151, 1),
        (152, 1),
    ]
    assert all(0 < step["error"] <= step["bound"] < 2e-2 for step in steps), steps


def test_a_chunk_and_a_token_are_compiled_once(block):
    even = dataclasses.replace(SMALL, prompt=128, decoded=5)
    gpt_oss.step.clear_cache()
    gpt_oss.compare(*block, even, "float32", "reference")
    assert gpt_oss.step._cache_size() == 2


def wrong_window(attention):
    return lambda q, k, v, *, window, **others: attention(q, k, v, window=window and window + 1, **others)


def no_sinks(attention):
    return lambda q, k, v, *, sinks, **others: attention(q, k, v, **others)


def past_one_too_few(attention):
    return lambda q, k, v, *, past, **others: attention(q, k, v, past=jnp.maximum(past - 1, 0), **others)


def rotated_from_the_chunks_start(rotate):
    return lambda x, rotary, positions: rotate(x, rotary, positions - positions[0])


def appended_one_row_late(append):
    return lambda cache_k, cache_v, k, v, past: append(cache_k, cache_v, k, v, past + 1)


@pytest.mark.parametrize(
    "name, fault",
    [
        ("grouped_query_attention", wrong_window),
        ("grouped_query_attention", no_sinks),
        ("grouped_query_attention", past_one_too_few),
        ("rotate", rotated_from_the_chunks_start),
        ("append_kv", appended_one_row_late),
    ],
)
def test_faults_are_seen(block, monkeypatch, name, fault):
    monkeypatch.setattr(gpt_oss, name, fault(getattr(gpt_oss, name)))
    gpt_oss.step.clear_cache()
    steps = gpt_oss.compare(*block, SMALL, "float32", "reference")
    gpt_oss.step.clear_cache()
    assert max(step["error"] / step["bound"] for step in steps) > 10


def test_sizes_fit_the_text():
    assert gpt_oss.FULL.fitted(10000) == gpt_oss.FULL
    assert gpt_oss.FULL.fitted(2000) == gpt_oss.Size(64, 8, 64, 1968, 1024, 32)
    assert gpt_oss.FULL.fitted(20) == gpt_oss.Size(64, 8, 64, 10, 10, 10)
    assert gpt_oss.FULL.fitted(1) == gpt_oss.Size(64, 8, 64, 1, 1, 0)


# The outcome


def small_run(monkeypatch, tokens):
    monkeypatch.setattr(gpt_oss, "SCALED_DOWN", SMALL)
    monkeypatch.setattr(gpt_oss, "INTERPRETED", dataclasses.replace(SMALL, prompt=40, chunk=40, decoded=2))
    monkeypatch.setattr(gpt_oss.minilm, "load_weights", dict)
    states = np.random.default_rng(0).normal(size=(tokens, HIDDEN)).astype(np.float32)
    monkeypatch.setattr(gpt_oss.minilm, "text_states", lambda weights, text: states)
    return gpt_oss.run(["text"], gpu=False, dtypes=("float32",))


def test_a_run_is_green_and_has_rates(monkeypatch):
    found = small_run(monkeypatch, 400)
    assert found["green"] and found["size"] == dataclasses.asdict(SMALL)
    reference, kernel = found["rows"]
    assert (reference["way"], len(reference["steps"])) == ("reference", 6)
    assert (kernel["way"], len(kernel["steps"])) == ("kernel, interpreted", 3)
    assert min(reference["tokens_per_second"]) > 1 and kernel["tokens_per_second"] is None
    text = gpt_oss.as_text(found)
    assert "H 4, G 2, K 16; 150 tokens in chunks of 64, then 3 one by one" in text
    assert text.count(" ok") == 2 and "CHECK FAILED" not in text


def test_a_red_run_has_no_rates(monkeypatch):
    right = gpt_oss.grouped_query_attention
    monkeypatch.setattr(gpt_oss, "grouped_query_attention", wrong_window(right))
    gpt_oss.step.clear_cache()
    found = small_run(monkeypatch, 400)
    gpt_oss.step.clear_cache()
    assert not found["green"]
    assert found["rows"][0]["tokens_per_second"] is None
    # The kernels got no more tokens than a window.
    assert gpt_oss.as_text(found).count("CHECK FAILED") == 1


def test_a_text_of_one_token(monkeypatch):
    found = small_run(monkeypatch, 1)
    assert found["green"] and found["size"]["decoded"] == 0
    assert found["rows"][0]["tokens_per_second"][1] is None
    assert " ok" in gpt_oss.as_text(found)


def test_rates_count_tokens(block, monkeypatch):
    class Measured:
        def median(self, way):
            return {"slow": 2.0, "fast": 0.5}[way]

    monkeypatch.setattr(gpt_oss.timing, "time_arms", lambda arms, **options: Measured())
    ways = {"slow": "reference", "fast": "reference"}
    rates = gpt_oss.tokens_per_second(*block, SMALL, "float32", ways, gpu=False)
    assert rates == {"slow": [75.0, 1.5], "fast": [300.0, 6.0]}


def test_the_real_text_runs_through_it():
    """The encoder's states, all of the path; needs its weights (see README.md)."""
    text = "A window of keys moves along with the token that reads it; the sink takes what nothing else deserves. " * 12
    found = gpt_oss.run([text], gpu=False, dtypes=("bfloat16",))
    assert found["green"] and found["size"]["prompt"] > 128
    assert jax.tree.all(jax.tree.map(np.isfinite, found["rows"][0]["tokens_per_second"]))
