"""Cases of flash attention."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from references.cases import draw


@dataclass(frozen=True)
class FlashCase:
    """One call of `flash_attention`.

    Letters: batch B, query tokens T, key tokens S, query heads H, KV heads G, head sizes K and V.
    """

    name: str
    # where the shape or the values come from
    source: str
    B: int
    T: int
    S: int
    H: int
    G: int
    K: int
    V: int
    dtype: str = "float32"
    causal: bool = False
    scale: float | None = None
    # "full" [B, H, T, S], "heads" [1, H, 1, S], "keys" [B, 1, 1, S], all normal; "empty_row": "full" with
    # row 1 wholly -inf; "lowest": finfo.min on the first half of the keys, as [1, 1, 1, S]
    bias: str | None = None
    softcap: float | None = None
    # lengths of the segments of queries and keys, the same in every batch row
    q_segments: tuple[int, ...] | None = None
    kv_segments: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    # fill all of q, all of k with one number
    q_value: float | None = None
    k_value: float | None = None
    # NaN in the rows of k and v from kv_lengths on
    poison: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


def inputs(case: FlashCase) -> dict:
    """Arguments of `flash_attention`; `return_lse` is left to the caller."""
    rng = draw.generator(case.name, case.seed)
    B, T, S, H, G = case.B, case.T, case.S, case.H, case.G
    q = draw.normal(rng, (B, T, H, case.K), case.dtype)
    k = draw.normal(rng, (B, S, G, case.K), case.dtype)
    v = draw.normal(rng, (B, S, G, case.V), case.dtype)
    q = q if case.q_value is None else draw.as_array(np.full(q.shape, case.q_value), case.dtype)
    k = k if case.k_value is None else draw.as_array(np.full(k.shape, case.k_value), case.dtype)
    lengths = None if case.kv_lengths is None else jnp.asarray(case.kv_lengths, jnp.int32)
    if case.poison:
        beyond = (np.arange(S) >= np.asarray(case.kv_lengths)[:, None])[:, :, None, None]
        k, v = (draw.as_array(np.where(beyond, np.nan, x), case.dtype) for x in (k, v))
    return {
        "q": q,
        "k": k,
        "v": v,
        "causal": case.causal,
        "scale": case.scale,
        "bias": _bias(rng, case),
        "softcap": case.softcap,
        "q_segment_ids": _segment_ids(case.q_segments, B),
        "kv_segment_ids": _segment_ids(case.kv_segments, B),
        "kv_lengths": lengths,
    }


def _bias(rng, case):
    if case.bias is None:
        return None
    if case.bias == "lowest":
        bias = np.zeros((1, 1, 1, case.S), np.float32)
        bias[..., : case.S // 2] = np.finfo(np.float32).min
        return jnp.asarray(bias)
    full = (case.B, case.H, case.T, case.S)
    shape = {"heads": (1, case.H, 1, case.S), "keys": (case.B, 1, 1, case.S)}.get(case.bias, full)
    bias = draw.normal(rng, shape, "float32")
    return jnp.where(np.arange(case.T)[:, None] == 1, -jnp.inf, bias) if case.bias == "empty_row" else bias


def _segment_ids(lengths, B):
    if lengths is None:
        return None
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return jnp.asarray(np.broadcast_to(ids, (B, ids.size)))


def flops(case: FlashCase) -> int:
    """Products of visible (query, key) pairs with k and with v; segments and biases are not looked at."""
    pairs = 0
    for length in case.kv_lengths or (case.S,) * case.B:
        if case.causal:
            seen = np.clip(np.arange(case.T, dtype=np.int64) + length - case.T + 1, 0, length)
            pairs += int(seen.sum())
        else:
            pairs += case.T * length
    return 2 * case.H * pairs * (case.K + case.V)


def bytes_moved(case: FlashCase) -> int:
    """q, k, v read and o written."""
    item = jnp.dtype(case.dtype).itemsize
    keys = sum(case.kv_lengths or (case.S,) * case.B)
    return (case.B * case.T * case.H + keys * case.G) * (case.K + case.V) * item


_SHAPES = "tests: one tile, several tiles, several batch rows"

FLASH_SMALL = (
    FlashCase("one_head", _SHAPES, 1, 64, 64, 1, 1, 32, 32),
    FlashCase("causal", _SHAPES, 1, 128, 128, 2, 2, 16, 16, causal=True),
    FlashCase("batch", _SHAPES, 2, 64, 128, 2, 1, 32, 32),
    FlashCase("size_64_bf16", _SHAPES, 1, 128, 128, 2, 2, 64, 64, "bfloat16"),
    FlashCase("size_64_causal_bf16", _SHAPES, 1, 128, 128, 2, 1, 64, 64, "bfloat16", causal=True),
    FlashCase("size_128_fp16", _SHAPES, 1, 96, 96, 2, 2, 128, 128, "float16"),
    FlashCase("size_128_causal_bf16", _SHAPES, 1, 96, 96, 2, 2, 128, 128, "bfloat16", causal=True),
    FlashCase("bias", _SHAPES, 2, 64, 64, 2, 2, 16, 16, bias="full"),
    FlashCase("softcap", _SHAPES, 1, 64, 64, 2, 2, 16, 16, softcap=2.0, causal=True),
    FlashCase("segments", _SHAPES, 2, 96, 96, 2, 1, 16, 16, q_segments=(40, 56), kv_segments=(40, 56)),
)

_SIZES = "triton 621, sglang 1281"
_ALIGNED = "flash-attention 1778"

FLASH_ODD = (
    FlashCase("jax_27224", "jax 27224", 1, 192, 192, 1, 1, 16, 16),
    FlashCase("jax_27224_causal_bf16", "jax 27224", 1, 192, 192, 1, 1, 16, 16, "bfloat16", causal=True),
    FlashCase("jax_23819_cut", "jax 23819, cut down", 1, 124, 124, 2, 2, 16, 16),
    FlashCase("jax_24491_cut", "jax 24491, cut down", 1, 64, 130, 2, 2, 16, 16),
    FlashCase("heads_4_of_2", "jax's own Triton kernel", 1, 64, 64, 4, 2, 16, 16),
    FlashCase("causal_T64_S32", "jax's own Triton kernel", 1, 64, 32, 1, 1, 16, 16, causal=True),
    FlashCase("jax_23349", "jax 23349", 2, 32, 128, 1, 1, 16, 16, kv_lengths=(24, 125)),
    FlashCase("poison", "pytorch 101967", 2, 32, 128, 2, 1, 16, 16, kv_lengths=(24, 125), poison=True),
    FlashCase(
        "poison_causal_bf16",
        "pytorch 101967",
        2,
        40,
        100,
        2,
        1,
        32,
        32,
        "bfloat16",
        True,
        kv_lengths=(60, 99),
        poison=True,
    ),
    FlashCase(
        "aotriton_54",
        "aotriton 54",
        1,
        1,
        1,
        1,
        1,
        16,
        16,
        "bfloat16",
        scale=0.25,
        q_value=133120.0,
        k_value=133120.0,
    ),
    FlashCase("aiter_2720_3", "aiter 2720", 2, 3, 3, 2, 2, 16, 16),
    FlashCase("aiter_2720_5", "aiter 2720", 2, 5, 5, 2, 2, 16, 16, causal=True),
    FlashCase("aiter_5364", "aiter 5364", 2, 16, 80, 1, 1, 16, 16, kv_lengths=(0, 70)),
    FlashCase("aiter_5364_causal", "aiter 5364", 2, 40, 80, 1, 1, 16, 16, causal=True, kv_lengths=(0, 17)),
    FlashCase("aiter_3936", "aiter 3936", 1, 40, 40, 12, 3, 16, 16, "bfloat16"),
    FlashCase("mlx_2608", "mlx 2608", 1, 20, 40, 2, 2, 16, 16, bias="empty_row"),
    FlashCase("causal_2_5", _ALIGNED, 1, 2, 5, 1, 1, 16, 16, causal=True),
    FlashCase("causal_5_2", _ALIGNED, 1, 5, 2, 1, 1, 16, 16, causal=True),
    FlashCase("onnx_7867", "onnx 7867", 1, 20, 40, 1, 1, 16, 16, causal=True, softcap=10.0),
    FlashCase("llama_cpp_29034", "llama.cpp 29034", 1, 8, 65, 1, 1, 16, 16, softcap=10.0),
    FlashCase("flash_attention_442", "flash-attention 442", 1, 16, 256, 1, 1, 16, 16, bias="lowest"),
    FlashCase("bias_heads", "a bias per head", 2, 24, 70, 4, 2, 16, 16, bias="heads", causal=True),
    FlashCase("bias_keys", "a bias per key", 2, 24, 70, 2, 2, 16, 16, "float16", bias="keys"),
    FlashCase(
        "segments_uneven",
        "packed prompts",
        1,
        50,
        70,
        2,
        2,
        16,
        16,
        q_segments=(10, 40),
        kv_segments=(33, 37),
    ),
    FlashCase("segments_no_key", "packed prompts", 1, 50, 40, 2, 2, 16, 16, q_segments=(20, 30), kv_segments=(40,)),
    *(FlashCase(f"size_{K}", _SIZES, 1, 40, 72, 1, 1, K, K) for K in (63, 80, 96, 128, 224, 256)),
    FlashCase("size_96_bf16", _SIZES, 1, 72, 72, 1, 1, 96, 96, "bfloat16", causal=True),
    FlashCase("K_64_V_32", "V != K", 1, 40, 72, 1, 1, 64, 32),
    FlashCase("K_192_V_128", "DeepSeek-V3", 1, 40, 72, 1, 1, 192, 128),
    FlashCase("T_0", "no query", 1, 0, 16, 1, 1, 16, 16),
    FlashCase("S_0", "no key", 1, 16, 0, 1, 1, 16, 16),
)

_DIFFUSION = "FlyDSL 919: 64 heads of 128, not causal"

FLASH_REAL = (
    FlashCase("T16384_full", _DIFFUSION, 1, 16384, 16384, 64, 64, 128, 128, "bfloat16"),
    FlashCase("T16384_causal", _DIFFUSION, 1, 16384, 16384, 64, 64, 128, 128, "bfloat16", causal=True),
    FlashCase("B4_T4096_full", "32 heads of 64", 4, 4096, 4096, 32, 32, 64, 64, "bfloat16"),
    FlashCase("B4_T4096_causal", "32 heads of 64", 4, 4096, 4096, 32, 32, 64, 64, "bfloat16", causal=True),
    FlashCase("llama_3_8b", "Meta-Llama-3-8B config.json", 1, 8192, 8192, 32, 8, 128, 128, "bfloat16", causal=True),
    FlashCase("S65536_full", _DIFFUSION, 1, 65536, 65536, 64, 64, 128, 128, "bfloat16"),
    FlashCase("jax_23819", "jax 23819", 1, 4092, 4092, 4, 4, 64, 64, "bfloat16"),
    FlashCase("jax_24491", "jax 24491", 1, 1024, 2048, 4, 4, 64, 64, "bfloat16"),
)
