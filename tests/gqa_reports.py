"""What users of grouped-query attention reported, as properties that any implementation must have.

Each function takes the implementation, with the signature of `references.gqa.grouped_query_attention`, and asserts.
Rows of the trackers that are a matter of accuracy alone are cases of `references.cases`; `test_references_gqa` and
`test_gqa_api` hold those about sinks, transformations and bad input.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import qkv, random

Attention = Callable[..., jax.Array]


def keys_seen(attention: Attention, T: int, S: int, **options) -> list[list[int]]:
    """The keys that each row weighs, read off values that are unit vectors."""
    q, k = jnp.zeros((1, T, 1, 8)), jnp.zeros((1, S, 1, 8))
    o = attention(q, k, jnp.eye(S)[None, :, None], **options)
    return [np.flatnonzero(row).tolist() for row in o[0, :, 0]]


def a_window_of_two_is_the_row_and_its_neighbour(attention: Attention) -> None:
    """onnxruntime 25927: row 3 of 4 sees keys 2 and 3, not key 1."""
    assert keys_seen(attention, 4, 4, window=2)[3] == [2, 3]


def a_window_ends_after_128_keys(attention: Attention) -> None:
    """Megatron-Bridge 2656, sglang 30050: of 129 tokens only the last row does not see key 0."""
    assert keys_seen(attention, 129, 129, window=128)[127:] == [[*range(128)], [*range(1, 129)]]


def a_step_sees_itself_and_the_past(attention: Attention) -> None:
    """gpt-oss 176: one token after five sees six keys."""
    assert keys_seen(attention, 1, 9, past=5) == [[0, 1, 2, 3, 4, 5]]


def wholly_masked_tiles_are_no_nan(attention: Attention) -> None:
    """hip-ep 623: 64 tokens after 33, window 5."""
    assert keys_seen(attention, 64, 97, window=5) == [[*range(p - 4, p + 1)] for p in range(33, 97)]


def no_row_of_a_prompt_longer_than_the_window_is_lost(attention: Attention) -> None:
    """nntrainer 3989, mlxcel 408: all 6 rows with a window of 4, and row 0 sees key 0."""
    seen = keys_seen(attention, 6, 6, window=4)
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def two_chunks_are_one_shot(attention: Attention) -> None:
    """executorch 21857: 3 + 3 tokens, window 4."""
    q, k, v = qkv(T=6, S=6)
    whole = attention(q, k, v, window=4)
    first, second = attention(q[:, :3], k, v, past=0, window=4), attention(q[:, 3:], k, v, past=3, window=4)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=0, atol=1e-6)


def values_outside_of_every_window_are_not_touched(attention: Attention) -> None:
    """vllm 30887: NaN in V there."""
    q, k, v = qkv(T=4, S=40)
    o = attention(q, k, v.at[:, :33].set(jnp.nan), window=4)
    np.testing.assert_array_equal(o, attention(q, k, v, window=4))


def large_sinks_take_their_share(attention: Attention) -> None:
    """vllm 52148, TransformerEngine 2541: sinks of 5 and 20 over 20 equal keys leave 20 / (20 + exp(sink))."""
    q, k = jnp.zeros((1, 20, 2, 16)), jnp.zeros((1, 20, 1, 16))
    sinks = jnp.asarray([5.0, 20.0])
    o = attention(q, k, jnp.ones((1, 20, 1, 16)), sinks=sinks)
    np.testing.assert_allclose(o[0, -1, :, 0], 20 / (20 + np.exp(sinks)), rtol=1e-5)


def a_sink_counts_once_over_many_blocks(attention: Attention) -> None:
    """rocm-libraries 12227: one row over 5000 keys of which only the last 100 are seen, with a cap."""
    q, k = jnp.zeros((1, 1, 2, 16)), jnp.zeros((1, 5000, 1, 16))
    sinks = jnp.log(jnp.asarray([100.0, 300.0]))
    for window, seen in ((100, 100), (None, 5000)):
        options = dict(window=window, sinks=sinks, softcap=5.0, return_lse=True)
        o, lse = attention(q, k, jnp.ones((1, 5000, 1, 16)), **options)
        np.testing.assert_allclose(o[0, 0, :, 0], seen / (seen + np.asarray([100, 300])), rtol=1e-5)
        np.testing.assert_allclose(lse[0, 0], np.log(seen + np.asarray([100, 300])), rtol=1e-5)


def a_step_is_the_last_row(attention: Attention) -> None:
    """mlx 3452: of 34 tokens at once, and alone after 33."""
    q, k, v = qkv(T=34, S=34, H=4, G=2)
    sinks = jnp.asarray([-5.0, 0.0, 2.0, 9.0])
    step = attention(q[:, 33:], k, v, sinks=sinks)
    np.testing.assert_allclose(step, attention(q, k, v, sinks=sinks)[:, 33:], rtol=0, atol=1e-6)


def very_negative_logits_are_an_ordinary_softmax(attention: Attention) -> None:
    """flashinfer 4267: logits around -2.45e5, one of them larger by log 2."""
    q = jnp.zeros((1, 4, 2, 16)).at[..., 0].set(1.0)
    k = jnp.zeros((1, 4, 1, 16)).at[..., 0].set(-2.45e5).at[0, 1, 0, 0].add(16.0)
    _, v = random(0, (1,), (1, 4, 1, 16))
    for scale, weights in ((1.0, np.eye(4)[1]), (2.0**-6, np.exp(0.25 * np.eye(4)[1]))):
        o = attention(q, k, v, scale=scale)
        expected = weights @ np.asarray(v, np.float64)[0, :, 0] / weights.sum()
        np.testing.assert_allclose(o[0, 3], np.stack([expected, expected]), rtol=0, atol=2e-5)


def a_hidden_key_is_not_the_maximum(attention: Attention) -> None:
    """lattice 361: it must not become what the others are measured from."""
    q = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(-2e4)
    k = jnp.zeros((1, 2, 1, 8)).at[0, 0, 0, 0].set(1.0)
    v = jnp.asarray([1.0, 100.0])[None, :, None, None]
    np.testing.assert_array_equal(attention(q, k, v, past=0), jnp.ones((1, 1, 1, 1)))


def large_fp16_logits_stay_finite(attention: Attention) -> None:
    """hip-ep 120: q = k = 64 of size 128 are logits of 46341, whose product alone exceeds fp16's range."""
    q, k = jnp.full((1, 4, 2, 128), 64.0, jnp.float16), jnp.full((1, 20, 1, 128), 64.0, jnp.float16)
    (v,) = random(0, (1, 20, 1, 128), dtype=jnp.float16)
    o = attention(q, k, v)
    means = [np.asarray(v, np.float64)[0, : 17 + t, 0].mean(axis=0) for t in range(4)]
    np.testing.assert_allclose(o[0, :, 1], np.stack(means), rtol=2**-10, atol=2**-10)


def heads_are_grouped(attention: Attention) -> None:
    """onnx 7274, HipKittens 22, FreeToken 177: 4, 6 and 48 heads on 2, prompt and step; none reads its neighbour's."""
    for H in (4, 6, 48):
        q, k = jnp.zeros((1, 5, H, 16)), jnp.zeros((1, 20, 2, 16))
        v = jnp.broadcast_to(jnp.asarray([1.0, 2.0])[:, None], (1, 20, 2, 16))
        expected = np.repeat([1.0, 2.0], H // 2)
        for T in (5, 1):
            np.testing.assert_allclose(attention(q[:, :T], k, v)[0, 0, :, 0], expected, rtol=1e-6, err_msg=f"H = {H}")
    # FreeToken 177 to the bit: whatever the second KV head holds, the first one's query heads do not change.
    q, k, v = qkv(T=1, S=20, H=48, G=2)
    o = attention(q, k, v)[:, :, :24]
    k, v = (x.at[:, :, 1].set(jnp.nan) for x in (k, v))
    np.testing.assert_array_equal(attention(q, k, v)[:, :, :24], o)


def heads_that_do_not_divide_are_refused(attention: Attention) -> None:
    """fla 1029: 3 heads on 2."""
    q, k, v = qkv(T=4, S=4, H=3, G=2)
    with pytest.raises(ValueError, match=r"^q must be of a multiple of k's G = 2 heads, got H = 3 heads"):
        attention(q, k, v)


def vmap_works(attention: Attention) -> None:
    """mlx 3383: over prompts, and over steps of different lengths."""
    for T in (4, 1):
        q, k, v = (x[:, None] for x in qkv(B=3, T=T, S=9, H=4, G=2))
        past = jnp.asarray([5, 0, 2])
        mapped = jax.vmap(lambda q, k, v, past: attention(q, k, v, past=past))(q, k, v, past)
        alone = [attention(q[i], k[i], v[i], past=past[i]) for i in range(3)]
        np.testing.assert_allclose(mapped, jnp.stack(alone), rtol=0, atol=1e-6)


REPORTS = (
    a_window_of_two_is_the_row_and_its_neighbour,
    a_window_ends_after_128_keys,
    a_step_sees_itself_and_the_past,
    wholly_masked_tiles_are_no_nan,
    no_row_of_a_prompt_longer_than_the_window_is_lost,
    two_chunks_are_one_shot,
    values_outside_of_every_window_are_not_touched,
    large_sinks_take_their_share,
    a_sink_counts_once_over_many_blocks,
    a_step_is_the_last_row,
    very_negative_logits_are_an_ordinary_softmax,
    a_hidden_key_is_not_the_maximum,
    large_fp16_logits_stay_finite,
    heads_are_grouped,
    heads_that_do_not_divide_are_refused,
    vmap_works,
)
