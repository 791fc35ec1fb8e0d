"""Cases of grouped-query attention."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from references.cases import draw


@dataclass(frozen=True)
class GqaCase:
    """One call of `grouped_query_attention`.

    Letters: batch B, new tokens T, keys the cache holds S, query heads H, KV heads G, head sizes K and V.
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
    # of k and v, where it is not that of q
    kv_dtype: str | None = None
    # keys before this step: one number, one per batch row, or None for S - T
    past: int | tuple[int, ...] | None = None
    # valid new tokens of each batch row; None for T
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    # a number, or "uniform" in (-10, 10)
    sinks: str | float | None = None
    # "full": normal values [B, H, T, S]
    bias: str | None = None
    softcap: float | None = None
    scale: float | None = None
    causal: bool = True
    # fill all of q, all of k with one number
    q_value: float | None = None
    k_value: float | None = None
    # NaN in the rows of the cache beyond past + lengths
    poison: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


def _past_and_lengths(case: GqaCase) -> tuple[np.ndarray, np.ndarray]:
    """past_b and T_b of every batch row, int64 `[B]`."""
    past = case.S - case.T if case.past is None else case.past
    past = np.broadcast_to(np.asarray(past, np.int64), (case.B,))
    lengths = np.broadcast_to(np.asarray(case.T if case.lengths is None else case.lengths, np.int64), (case.B,))
    return past, lengths


def inputs(case: GqaCase) -> dict:
    """Arguments of `grouped_query_attention`; `return_lse` is left to the caller."""
    rng = draw.generator(case.name, case.seed)
    B, T, S, H, G = case.B, case.T, case.S, case.H, case.G
    q = draw.normal(rng, (B, T, H, case.K), case.dtype)
    kv_dtype = case.kv_dtype or case.dtype
    k = draw.normal(rng, (B, S, G, case.K), kv_dtype)
    v = draw.normal(rng, (B, S, G, case.V), kv_dtype)
    q = q if case.q_value is None else draw.as_array(np.full(q.shape, case.q_value), case.dtype)
    k = k if case.k_value is None else draw.as_array(np.full(k.shape, case.k_value), kv_dtype)
    if case.poison:
        past, lengths = _past_and_lengths(case)
        beyond = (np.arange(S) >= (past + lengths)[:, None])[:, :, None, None]
        k, v = (draw.as_array(np.where(beyond, np.nan, x), kv_dtype) for x in (k, v))
    sinks = None
    if case.sinks is not None:
        drawn = rng.uniform(-10, 10, H) if case.sinks == "uniform" else np.full(H, case.sinks)
        sinks = draw.as_array(drawn)
    return {
        "q": q,
        "k": k,
        "v": v,
        "past": None if case.past is None else jnp.asarray(case.past, jnp.int32),
        "lengths": None if case.lengths is None else jnp.asarray(case.lengths, jnp.int32),
        "window": case.window,
        "sinks": sinks,
        "bias": None if case.bias is None else draw.normal(rng, (B, H, T, S), "float32"),
        "softcap": case.softcap,
        "scale": case.scale,
        "causal": case.causal,
    }


def _seen(case: GqaCase) -> tuple[int, int]:
    """(query, key) pairs of one head, and keys that some query sees, both summed over the batch."""
    pairs = keys = 0
    for past, length in zip(*_past_and_lengths(case), strict=True):
        p = past + np.arange(length)
        last = p + 1 if case.causal else np.full(length, past + length)
        first = np.zeros(length, np.int64) if case.window is None else np.clip(p + 1 - case.window, 0, None)
        pairs += int((last - first).sum())
        keys += int(last.max(initial=0) - first.min(initial=last.max(initial=0)))
    return pairs, keys


def flops(case: GqaCase) -> int:
    """Products of visible (query, key) pairs with k and with v."""
    return 2 * case.H * _seen(case)[0] * (case.K + case.V)


def bytes_moved(case: GqaCase) -> int:
    """q and the keys and values that some query sees read, the output written."""
    item, kv_item = jnp.dtype(case.dtype).itemsize, jnp.dtype(case.kv_dtype or case.dtype).itemsize
    return (case.B * case.T * case.H * item + _seen(case)[1] * case.G * kv_item) * (case.K + case.V)


_SHAPES = "tests: one tile, several tiles, several batch rows"

GQA_SMALL = (
    GqaCase("prompt", _SHAPES, 1, 64, 64, 4, 2, 32, 32),
    GqaCase("sinks_and_window", _SHAPES, 1, 96, 96, 4, 2, 16, 16, window=20, sinks="uniform"),
    GqaCase("past", _SHAPES, 1, 32, 96, 4, 1, 16, 16, sinks="uniform"),
    GqaCase("past_per_row", _SHAPES, 2, 16, 96, 4, 2, 16, 16, past=(3, 50), lengths=(16, 9)),
    GqaCase(
        "size_64_bf16",
        "gpt-oss-20b, cut down",
        1,
        80,
        80,
        8,
        1,
        64,
        64,
        "bfloat16",
        window=33,
        sinks="uniform",
    ),
    GqaCase("size_64_fp16", "gpt-oss-20b, cut down", 1, 48, 112, 8, 1, 64, 64, "float16", sinks="uniform"),
    GqaCase("size_128_bf16", _SHAPES, 1, 64, 64, 4, 1, 128, 128, "bfloat16", sinks="uniform"),
    GqaCase("decode", _SHAPES, 2, 1, 100, 8, 2, 32, 32, past=(40, 99), sinks="uniform"),
    GqaCase("softcap", _SHAPES, 1, 32, 64, 4, 2, 16, 16, softcap=3.0, window=40),
    GqaCase("bias", _SHAPES, 1, 32, 64, 4, 2, 16, 16, bias="full", sinks="uniform"),
    GqaCase("not_causal", _SHAPES, 1, 32, 64, 4, 2, 16, 16, causal=False, window=30),
)

_ROWS = "llama.cpp's FLASH_ATTN_EXT tests with more than 2048 keys: 32 fp32 rows, an fp16 cache"
_MASKED_TILE = "hip-ep 623: the first key tile of some rows is wholly masked"
_BLOCKS = "a key block of 2048: one less, just one, one more"
_GROUPS = "onnx 7274, HipKittens 22"

GQA_ODD = (
    GqaCase("onnxruntime_25927", "onnxruntime 25927", 1, 4, 4, 1, 1, 16, 16, window=2),
    GqaCase("megatron_bridge_2656", "Megatron-Bridge 2656, sglang 30050", 1, 129, 129, 2, 1, 16, 16, window=128),
    GqaCase("window_1", "itself only", 1, 40, 40, 2, 1, 16, 16, window=1, sinks="uniform"),
    GqaCase("gpt_oss_176", "gpt-oss 176", 1, 1, 6, 2, 1, 16, 16, sinks="uniform"),
    GqaCase("hip_ep_623", "hip-ep 623", 1, 64, 97, 2, 1, 16, 16, window=5),
    *(
        GqaCase(f"masked_tile_{n}_{past}", _MASKED_TILE, 1, 2 * n, past + 2 * n, 2, 1, 16, 16, window=window)
        for n in (16, 32, 64)
        for past, window in ((n + 1, 5), (1, 1))
    ),
    GqaCase("nntrainer_3989", "nntrainer 3989, mlxcel 408", 1, 6, 6, 2, 1, 16, 16, window=4),
    GqaCase("executorch_21857", "executorch 21857", 1, 3, 6, 2, 1, 16, 16, window=4),
    GqaCase("vllm_52148", "vllm 52148", 1, 20, 20, 2, 1, 16, 16, sinks=5.0),
    GqaCase("transformer_engine_2541", "TransformerEngine 2541", 1, 20, 20, 2, 1, 16, 16, sinks=20.0),
    GqaCase("sink_of_minus_inf", "equal to no sink", 1, 20, 20, 2, 1, 16, 16, sinks=float("-inf")),
    GqaCase(
        "rocm_libraries_12227",
        "rocm-libraries 12227",
        1,
        1,
        5000,
        2,
        1,
        16,
        16,
        window=100,
        sinks="uniform",
        softcap=5.0,
    ),
    GqaCase("mlx_3452_prompt", "mlx 3452", 1, 34, 34, 2, 1, 16, 16, sinks="uniform"),
    GqaCase("mlx_3452_step", "mlx 3452", 1, 1, 34, 2, 1, 16, 16, sinks="uniform"),
    GqaCase("flashinfer_4267", "flashinfer 4267", 1, 4, 20, 2, 1, 16, 16, q_value=512.0, k_value=-120.0),
    GqaCase("hip_ep_120", "hip-ep 120", 1, 4, 20, 2, 1, 128, 128, "float16", q_value=64.0, k_value=64.0),
    GqaCase("heads_4_2", _GROUPS, 1, 20, 20, 4, 2, 16, 16),
    GqaCase("heads_6_2", _GROUPS, 1, 20, 20, 6, 2, 16, 16, sinks="uniform"),
    GqaCase("freetoken_177", "FreeToken 177", 1, 4, 20, 48, 2, 16, 16, sinks="uniform"),
    GqaCase("heads_5_1_bf16", "H // G = 5", 1, 20, 20, 5, 1, 16, 16, "bfloat16", sinks="uniform"),
    GqaCase("heads_14_2_step", "H // G = 7", 2, 1, 50, 14, 2, 16, 16, past=(0, 49), sinks="uniform"),
    GqaCase("poison", "vllm 30887", 2, 8, 64, 4, 2, 16, 16, past=(0, 20), lengths=(8, 3), poison=True),
    GqaCase(
        "poison_step_bf16",
        "vllm 30887",
        2,
        1,
        64,
        4,
        2,
        16,
        16,
        "bfloat16",
        past=(0, 20),
        poison=True,
        sinks="uniform",
    ),
    GqaCase("no_new_token", "a batch row without tokens", 2, 8, 30, 4, 2, 16, 16, past=(5, 7), lengths=(0, 8)),
    GqaCase("past_scalar", "one past for all rows", 2, 8, 30, 4, 2, 16, 16, past=11, sinks="uniform"),
    *(GqaCase(f"keys_{S}", _BLOCKS, 1, 1, S, 2, 1, 16, 16, sinks="uniform") for S in (2047, 2048, 2049, 2560)),
    *(GqaCase(f"size_{K}", "sizes", 1, 20, 40, 2, 1, K, K, window=9) for K in (8, 40, 96, 160, 224, 256)),
    GqaCase(
        "fp32_rows_fp16_cache", _ROWS, 2, 1, 50, 4, 2, 32, 32, "float32", "float16", past=(20, 49), sinks="uniform"
    ),
    GqaCase("K_224_V_112", "V != K", 1, 4, 40, 2, 1, 224, 112, sinks="uniform"),
)

_GPT_OSS = "gpt-oss-20b config.json: 64 query and 8 KV heads of 64, sinks, every other layer a window of 128"
_ZAMBA = "Zamba2-2.7B config.json: 32 heads of 160"

GQA_REAL = (
    GqaCase(
        "gpt_oss_T16384_window",
        _GPT_OSS,
        1,
        16384,
        16384,
        64,
        8,
        64,
        64,
        "bfloat16",
        window=128,
        sinks="uniform",
    ),
    GqaCase("gpt_oss_T16384_full", _GPT_OSS, 1, 16384, 16384, 64, 8, 64, 64, "bfloat16", sinks="uniform"),
    GqaCase(
        "gpt_oss_512_past_8192_window",
        _GPT_OSS,
        1,
        512,
        8704,
        64,
        8,
        64,
        64,
        "bfloat16",
        window=128,
        sinks="uniform",
    ),
    GqaCase("gpt_oss_512_past_8192_full", _GPT_OSS, 1, 512, 8704, 64, 8, 64, 64, "bfloat16", sinks="uniform"),
    *(
        GqaCase(f"gpt_oss_decode_B{B}_{S}", _GPT_OSS, B, 1, S, 64, 8, 64, 64, "bfloat16", sinks="uniform")
        for B in (1, 16)
        for S in (8192, 131072)
    ),
    # Where one block of keys ends, and beyond: no jump in the time of a key.
    *(
        GqaCase(f"gpt_oss_decode_B16_{S}", _GPT_OSS, 16, 1, S, 64, 8, 64, 64, "bfloat16", sinks="uniform")
        for S in (2048, 2049, 2560, 4096)
    ),
    GqaCase("zamba2_T4096", _ZAMBA, 1, 4096, 4096, 32, 32, 160, 160, "bfloat16"),
    GqaCase("zamba2_decode_4096", _ZAMBA, 1, 1, 4096, 32, 32, 160, 160, "bfloat16"),
    *(
        GqaCase(f"rows_{S}_size_{K}", _ROWS, 1, 32, S, 32, 8, K, K, "float32", "float16")
        for S in (2560, 3000, 4096, 5000)
        for K in (64, 160, 256)
    ),
)
