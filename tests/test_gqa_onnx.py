"""gqa.onnx against results that ONNX Runtime's GroupQueryAttention gave (tests/data/gqa_ort).

index.json names each file's attributes and inputs. A file holds the inputs as `in_<name>`, the three outputs as
`ort_<name>`, and `valid`, the rows of the output that the operator defines.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa.onnx import group_query_attention
from references.accuracy import relative_l2

RECORDED = Path(__file__).parent / "data" / "gqa_ort"
INDEX = json.loads((RECORDED / "index.json").read_text())


def load(entry):
    with np.load(RECORDED / entry["file"]) as arrays:
        arrays = dict(arrays)
    return {name: arrays[f"in_{name}"] for name in entry["inputs"]}, arrays


def named(file):
    return next(entry for entry in INDEX if entry["file"] == file)


def test_all_recordings_are_here():
    assert len(INDEX) == 156
    assert {entry["file"] for entry in INDEX} == {path.name for path in RECORDED.glob("*.npz")}


def recordings():
    """All of them on the reference. The kernels are compiled for each: without a GPU they take some of each kind."""
    core = [entry for entry in INDEX if entry["file"].startswith("core")]
    others = [entry for entry in INDEX if entry not in core]
    some = core[::10] + others[::2]
    for entry in INDEX:
        name = entry["file"].removesuffix(".npz")
        yield pytest.param(entry, "reference", id=f"{name}-reference")
        yield pytest.param(entry, "pallas", id=f"{name}-pallas", marks=() if entry in some else pytest.mark.gpu)


@pytest.mark.parametrize("entry, implementation", [*recordings()])
def test_equals_onnx_runtime(entry, implementation):
    inputs, recorded = load(entry)
    output, *present = group_query_attention(**inputs, **entry["attributes"], implementation=implementation)
    valid, expected = recorded["valid"], recorded["ort_output"]
    assert output.shape == expected.shape and output.dtype == expected.dtype
    # Every recording is of defined rows, or this test would pass on anything.
    assert np.any(valid)
    if expected.dtype == np.float32:
        error = np.abs(np.asarray(output) - expected)[valid]
        assert np.all(error <= 2e-5 * np.maximum(1, np.abs(expected[valid]))), error.max()
    else:
        assert relative_l2(np.asarray(output)[valid], expected[valid]) < 2e-3
    # The caches, as far as they are valid: copied, and rotated in fp32
    for name, cache in zip(("key", "value"), present, strict=True):
        expected = recorded[f"ort_present_{name}"]
        assert cache.shape == expected.shape and cache.dtype == expected.dtype
        rows = np.arange(cache.shape[2]) <= recorded["in_seqlens_k"][:, None]
        rows = np.broadcast_to(rows[:, None], cache.shape[:3])
        np.testing.assert_allclose(np.asarray(cache)[rows], expected[rows], rtol=1e-6, atol=1e-6)


def test_rows_of_padding_are_zero():
    for file in ("ragged_prompt_w3_both.npz", "qlens_w-1_sink.npz"):
        entry = named(file)
        inputs, recorded = load(entry)
        output, *_ = group_query_attention(**inputs, **entry["attributes"])
        assert not np.all(recorded["valid"])
        assert np.all(np.asarray(output)[~recorded["valid"]] == 0)


def test_a_shared_buffer_takes_a_traced_total():
    """One compilation serves a prompt and a later step, which only the total tells apart."""
    entry = named("share_p5_w3.npz")
    inputs, recorded = load(entry)
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    node = jax.jit(lambda inputs: group_query_attention(**inputs, **entry["attributes"]))
    output, present_key, _ = node(inputs)
    np.testing.assert_allclose(output, recorded["ort_output"], rtol=0, atol=2e-5)
    # the same four tokens as a prompt: what the buffer held is overwritten from its start
    T = inputs["query"].shape[1]
    prompt = inputs | {"seqlens_k": jnp.asarray([T - 1]), "total_sequence_length": jnp.int32(T)}
    prompted, prompt_key, _ = node(prompt)
    assert node._cache_size() == 1
    np.testing.assert_array_equal(prompt_key[:, :, :T], present_key[:, :, 5 : 5 + T])
    empty = {name: x for name, x in prompt.items() if not name.startswith("past")} | {"total_sequence_length": T}
    alone, *_ = group_query_attention(**empty, **entry["attributes"])
    np.testing.assert_allclose(prompted, alone, rtol=0, atol=1e-6)


def test_donated_caches_are_updated_in_place():
    entry = named("share_p5_w-1.npz")
    inputs, _ = load(entry)
    caches = jnp.asarray(inputs.pop("past_key")), jnp.asarray(inputs.pop("past_value"))
    node = jax.jit(
        lambda key, value: group_query_attention(**inputs, past_key=key, past_value=value, **entry["attributes"]),
        donate_argnums=(0, 1),
    )
    memory = node.lower(*caches).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(cache.nbytes for cache in caches)


def test_position_ids():
    entry = named("rope_half_rd16_pk0_p5.npz")
    inputs, recorded = load(entry)
    node = partial(group_query_attention, **inputs, **entry["attributes"])
    output, *_ = node(position_ids=np.arange(5, 9)[None])
    np.testing.assert_allclose(output, recorded["ort_output"], rtol=0, atol=2e-5)
    output, *_ = node(position_ids=np.arange(4, 8)[None])
    assert np.max(np.abs(output - recorded["ort_output"])) > 1e-3


def test_bfloat16():
    entry = named("fp16_w3_sink.npz")
    inputs, recorded = load(entry)
    bf16 = {name: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float16 else x for name, x in inputs.items()}
    output, *present = group_query_attention(**bf16, **entry["attributes"])
    assert {x.dtype.name for x in (output, *present)} == {"bfloat16"}
    assert relative_l2(output, recorded["ort_output"]) < 2**-7


def shift_window(attributes):
    return attributes | {"local_window_size": attributes["local_window_size"] + 1}


def add_a_smooth_sink(inputs):
    return inputs | {"head_sink": np.logaddexp(inputs["head_sink"], 0)}


def one_token_more(inputs):
    return inputs | {"seqlens_k": inputs["seqlens_k"] + 1}


@pytest.mark.parametrize(
    "file, break_inputs, break_attributes",
    [
        ("core_p7_s9_w3_both_c0.npz", dict, shift_window),
        # smooth_softmax added to the sink that is given
        ("qlens_w-1_both.npz", add_a_smooth_sink, dict),
        # seqlens_k read as a count
        ("share_p5_w3.npz", one_token_more, dict),
        ("rope_interleaved_rdNone_pk1_p5.npz", dict, lambda a: a | {"rotary_interleaved": 0}),
        ("rope_half_rd16_pk0_p5.npz", dict, lambda a: a | {"do_rotary": 0}),
    ],
)
def test_broken_builds_fail(file, break_inputs, break_attributes):
    entry = named(file)
    inputs, recorded = load(entry)
    output, *_ = group_query_attention(**break_inputs(inputs), **break_attributes(entry["attributes"]))
    error = np.abs(np.asarray(output) - recorded["ort_output"])[recorded["valid"]]
    assert error.max() > 1e-3


# Bad input

B, T, H, G, SIZE = 2, 3, 4, 2, 8
NODE = dict(
    query=jnp.zeros((B, T, H * SIZE)),
    key=jnp.zeros((B, T, G * SIZE)),
    value=jnp.zeros((B, T, G * SIZE)),
    past_key=jnp.zeros((B, G, 5, SIZE)),
    past_value=jnp.zeros((B, G, 5, SIZE)),
    seqlens_k=jnp.full(B, 7),
    total_sequence_length=8,
    num_heads=H,
    kv_num_heads=G,
)
TABLE = jnp.zeros((9, SIZE // 2))


@pytest.mark.parametrize(
    "name, changed",
    [
        ("query", dict(query=jnp.zeros((B, T, H, SIZE)))),
        ("query", dict(query=jnp.zeros((B, T, H * SIZE + 1)))),
        ("query", dict(query=jnp.zeros((B, T, 33)), key=None, value=None)),
        ("key", dict(key=None)),
        ("key", dict(key=jnp.zeros((B, T + 1, G * SIZE)))),
        ("value", dict(value=None)),
        ("past_key", dict(past_key=None)),
        ("past_key", dict(past_key=jnp.zeros((B, 5, G, SIZE)))),
        ("past_value", dict(past_value=jnp.zeros((B, G, 5, SIZE + 1)))),
        ("seqlens_k", dict(seqlens_k=None)),
        ("seqlens_k", dict(seqlens_k=jnp.zeros(B))),
        ("seqlens_k", dict(seqlens_k=jnp.zeros(B + 1, jnp.int32))),
        ("query_seqlens", dict(query_seqlens=jnp.zeros(B + 1, jnp.int32))),
        ("total_sequence_length", dict(total_sequence_length=None)),
        ("total_sequence_length", dict(total_sequence_length=9)),
        ("total_sequence_length", dict(total_sequence_length=2)),
        ("total_sequence_length", dict(past_key=None, past_value=None)),
        ("cos_cache", dict(do_rotary=1)),
        ("sin_cache", dict(do_rotary=1, cos_cache=TABLE)),
        ("sin_cache", dict(do_rotary=1, cos_cache=TABLE, sin_cache=TABLE[:, :2])),
        ("position_ids", dict(position_ids=jnp.zeros((B, T + 1), jnp.int32))),
        ("attention_bias", dict(attention_bias=jnp.zeros((1, 1, T, 9)))),
        ("attention_bias", dict(attention_bias=jnp.zeros((T, 8)))),
        ("head_sink", dict(head_sink=jnp.zeros(G))),
        ("num_heads", dict(num_heads=3)),
        ("local_window_size", dict(local_window_size=-2)),
        ("do_rotary", dict(do_rotary=2)),
        ("qk_output", dict(qk_output=3)),
        ("key", dict(key=NODE["key"].astype(jnp.float16))),
        ("past_value", dict(past_value=NODE["past_value"].astype(jnp.float16))),
        ("implementation", dict(implementation="xla")),
        ("query", dict(query=jnp.zeros((B, T, H * SIZE), jnp.int32))),
        ("key", dict(key=jnp.zeros((B, T, G * SIZE // 2)))),
        ("attention_bias", dict(attention_bias=jnp.zeros((1, 1, T, 8), jnp.int32))),
        ("attention_bias", dict(attention_bias=jnp.zeros((1, 3, T, 8)))),
        ("head_sink", dict(head_sink=jnp.zeros(H, jnp.int32))),
        ("scale", dict(scale=float("nan"))),
        ("softcap", dict(softcap=-1.0)),
        ("seqlens_k", dict(seqlens_k=jnp.full(B, 8))),
        ("seqlens_k", dict(seqlens_k=jnp.full(B, T - 2))),
        ("seqlens_k", dict(seqlens_k=jnp.full(B, T), total_sequence_length=T)),
        ("seqlens_k", dict(seqlens_k=jnp.full(B, 1), query_seqlens=jnp.full(B, 3))),
        ("query_seqlens", dict(query_seqlens=jnp.full(B, T + 1))),
        ("query_seqlens", dict(query_seqlens=jnp.full(B, -1))),
        ("seqlens_k", dict(seqlens_k=jnp.full(B, 8), query_seqlens=jnp.full(B, 1), total_sequence_length=9)),
        ("cos_cache", dict(do_rotary=1, cos_cache=TABLE[:7], sin_cache=TABLE[:7])),
        ("cos_cache", dict(do_rotary=1, cos_cache=TABLE[:0], sin_cache=TABLE[:0])),
        ("cos_cache", dict(do_rotary=1, cos_cache=TABLE[:, :0], sin_cache=TABLE[:, :0])),
        ("cos_cache", dict(do_rotary=1, cos_cache=TABLE.astype(int), sin_cache=TABLE.astype(int))),
        ("position_ids", dict(do_rotary=1, cos_cache=TABLE, sin_cache=TABLE, position_ids=jnp.full((B, T), 9))),
        ("position_ids", dict(do_rotary=1, cos_cache=TABLE, sin_cache=TABLE, position_ids=jnp.full((B, T), -1))),
        ("attention_bias", dict(attention_bias=jnp.zeros((1, 1, T, 1)))),
        ("local_window_size", dict(local_window_size=1.5)),
        ("local_window_size", dict(local_window_size=2**40)),
        ("local_window_size", dict(local_window_size=None)),
        ("total_sequence_length", dict(total_sequence_length=8.9)),
        ("total_sequence_length", dict(total_sequence_length=[8, 8])),
        ("num_heads", dict(num_heads=None)),
        ("config", dict(local_window_size=0, config=3)),
        ("implementation", dict(local_window_size=0, implementation="zzz")),
        ("scale", dict(local_window_size=0, scale=None)),
    ],
)
def test_bad_input_is_named(name, changed):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        group_query_attention(**NODE | changed)


@pytest.mark.parametrize("name", ["seqlens_k", "query_seqlens"])
def test_numbers_that_are_known_are_checked_under_jit(name):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        jax.jit(lambda query: group_query_attention(**NODE | {"query": query, name: np.full(B, 80)}))(NODE["query"])


def test_no_new_token():
    empty = {name: NODE[name][:, :0] for name in ("query", "key", "value")}
    o, *present = group_query_attention(**NODE | empty | dict(total_sequence_length=5, seqlens_k=jnp.full(B, 4)))
    assert o.shape == (B, 0, H * SIZE) and [x.shape for x in present] == [(B, G, 5, SIZE)] * 2


def test_a_traced_total_needs_a_buffer():
    without = {name: x for name, x in NODE.items() if name not in ("past_key", "past_value", "total_sequence_length")}
    with pytest.raises(ValueError, match=r"^total_sequence_length must be a Python int"):
        jax.jit(lambda total: group_query_attention(**without, total_sequence_length=total))(3)


def test_what_is_not_done():
    group_query_attention(**NODE, qk_output=1)
    with pytest.raises(NotImplementedError, match="output_qk"):
        group_query_attention(**NODE, qk_output=1, num_outputs=4)
