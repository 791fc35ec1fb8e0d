"""Decoder attention blocks with gpt-oss-20b's geometry, on the hidden states of real text.

Layer i takes hidden states x `[B, T, D]` at the positions p = past + t; the even ones see a window of 128 keys, the
odd ones all:

    y       = w x / sqrt(mean(x^2) + 1e-5)
    q, k, v = y W_qkv + b_qkv                    H heads of q, G of k and of v, each of size K
    q, k    = rotate(q, p), rotate(k, p)         the halves of a head are the pairs that turn
    caches  = append_kv(caches, k, v, past)
    x       = x + attention(q, caches; window, sinks) W_o + b_o

A prompt goes through the caches in chunks, then tokens one by one, and each step is compared with what the whole
sequence gives in one shot by the dense formula in float64, which knows no cache. The experts between the attention
blocks are left out. Source: https://github.com/openai/gpt-oss (gpt_oss/torch/model.py) and the config.json of
gpt-oss-20b: 64 heads on 8 of size 64, rotary base 150000 stretched by YaRN (https://arxiv.org/abs/2309.00071).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import references.gqa
from benchmarks import minilm, timing
from benchmarks.table import number, table
from gqa import append_kv, grouped_query_attention
from references import accuracy

# Of layers 0, 2, ... and 1, 3, ...
WINDOWS = (128, None)
NORM_EPSILON = 1e-5
ROTARY_BASE, YARN_FACTOR, TRAINED_LENGTH, FAST_TURNS, SLOW_TURNS = 150000.0, 32.0, 4096, 32.0, 1.0
# Rows whose logits the dense formula holds at once.
ROWS = 256
ROUNDS_ON_GPU, ROUNDS_ON_CPU, TIMING_SECONDS = 15, 3, 30.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Heads H on G, of size K; tokens of the prompt and of one chunk of it, and tokens decoded after it."""

    H: int
    G: int
    K: int
    prompt: int
    chunk: int
    decoded: int

    def fitted(self, tokens: int) -> "Size":
        """The same with no more than `tokens` tokens, at most half of them for decoding."""
        decoded = min(self.decoded, tokens // 2)
        prompt = min(self.prompt, tokens - decoded)
        return dataclasses.replace(self, prompt=prompt, chunk=min(self.chunk, prompt), decoded=decoded)


FULL, SCALED_DOWN = Size(64, 8, 64, 4096, 1024, 32), Size(8, 1, 64, 1024, 256, 32)
# Tokens for the kernels in interpret mode: more than a window.
INTERPRETED = Size(8, 1, 64, 192, 64, 4)


class Layer(NamedTuple):
    """Weights: norm `[D]`, qkv `[D, (H + 2 G) K]` with qkv_bias, out `[H K, D]` with out_bias, sinks `[H]`."""

    norm: jax.Array
    qkv: jax.Array
    qkv_bias: jax.Array
    out: jax.Array
    out_bias: jax.Array
    sinks: jax.Array


class Rotary(NamedTuple):
    """cos and sin `[positions, K / 2]`."""

    cos: jax.Array
    sin: jax.Array


def random_layers(seed: int, hidden: int, size: Size, count: int = len(WINDOWS)) -> list[Layer]:
    """fp32 weights from a seed: matrices of deviation rows**-0.5, vectors that change something, sinks in (-10, 10)."""
    rng = np.random.default_rng(seed)
    heads = size.H + 2 * size.G
    return [
        Layer(
            *(
                jnp.asarray(x, jnp.float32)
                for x in (
                    rng.uniform(0.5, 1.5, hidden),
                    rng.normal(0, hidden**-0.5, (hidden, heads * size.K)),
                    rng.normal(0, 0.1, heads * size.K),
                    rng.normal(0, (size.H * size.K) ** -0.5, (size.H * size.K, hidden)),
                    rng.normal(0, 0.1, hidden),
                    rng.uniform(-10, 10, size.H),
                )
            )
        )
        for _ in range(count)
    ]


def rotary_table(positions: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) `[positions, K / 2]` in float64.

    Pair i turns by base^(-2 i / K) a token: those that turn often within the trained length as they are, those that
    turn less than once by a factor more slowly, and in between a mixture. YaRN also lengthens q and k.
    """
    i = np.arange(K // 2)
    speed = ROTARY_BASE ** (-2 * i / K)

    def pair_of(turns):
        """The pair that turns so often within the trained length."""
        return K / 2 * np.log(TRAINED_LENGTH / (turns * 2 * np.pi)) / np.log(ROTARY_BASE)

    fast, slow = pair_of(FAST_TURNS), pair_of(SLOW_TURNS)
    slowed = np.clip((i - fast) / (slow - fast), 0, 1)
    speed = speed * (1 - slowed) + speed / YARN_FACTOR * slowed
    length = 0.1 * np.log(YARN_FACTOR) + 1
    angle = np.arange(positions)[:, None] * speed
    return length * np.cos(angle), length * np.sin(angle)


def rotate(x: jax.Array, rotary: Rotary, positions: jax.Array) -> jax.Array:
    """x `[B, T, heads, K]` at positions `[T]`: numbers i and i + K / 2 of a head turn together."""
    cos, sin = (jnp.take(t, positions, axis=0)[:, None] for t in rotary)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def project(layer: Layer, rotary: Rotary, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    """q `[B, T, H, K]`, k and v `[B, T, G, K]` of hidden states, in x's dtype."""
    B, T, _ = x.shape
    H, K = layer.sinks.shape[0], 2 * rotary.cos.shape[1]
    y = layer.norm * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
    qkv = jnp.matmul(y, layer.qkv, precision="highest") + layer.qkv_bias
    G = (qkv.shape[-1] // K - H) // 2
    q, k, v = jnp.split(qkv.reshape(B, T, H + 2 * G, K), [H, H + G], axis=2)
    return rotate(q, rotary, positions), rotate(k, rotary, positions), v


def add_output(layer: Layer, x: jax.Array, o: jax.Array) -> jax.Array:
    """x + o W_o + b_o for o `[B, T, H, K]`."""
    o = o.astype(x.dtype).reshape(*x.shape[:2], -1)
    return x + jnp.matmul(o, layer.out, precision="highest") + layer.out_bias


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="caches")
def step(
    layers: list[Layer], rotary: Rotary, caches: list, x: jax.Array, past: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, list]:
    """T tokens through all layers, behind the `past` ones whose keys and values the caches hold.

    Args:
      caches: (keys, values) `[B, S, G, K]` of each layer, given away; their dtype is that of the attention.
      x: fp32 `[B, T, D]`. past: int32 scalar.

    Returns:
      What the layers add to x, and the caches.
    """
    before, positions = x, past + jnp.arange(x.shape[1], dtype=jnp.int32)
    updated = []
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        q, k, v = (y.astype(cache[0].dtype) for y in project(layer, rotary, x, positions))
        cache = append_kv(*cache, k, v, past)
        o = grouped_query_attention(
            q, *cache, past=past, window=WINDOWS[i % 2], sinks=layer.sinks, implementation=implementation
        )
        x = add_output(layer, x, cast(jax.Array, o))
        updated.append(cache)
    return x - before, updated


@functools.partial(jax.jit, static_argnames="dtype")
def one_shot(layers: list[Layer], rotary: Rotary, x: jax.Array, *, dtype: str) -> jax.Array:
    """What the layers add to x if all its tokens come at once: no cache, dense attention with operands of `dtype`."""
    before, (B, T, _) = x, x.shape
    blocks = -(-T // ROWS)
    for i, layer in enumerate(layers):
        q, k, v = (y.astype(dtype) for y in project(layer, rotary, x, jnp.arange(T, dtype=jnp.int32)))

        def attend(block, k=k, v=v, window=WINDOWS[i % 2], sinks=layer.sinks):
            rows, past = block
            return references.gqa.dense(rows, k, v, past=past, window=window, sinks=sinks)

        H, K = q.shape[2:]
        rows = jnp.pad(q, ((0, 0), (0, blocks * ROWS - T), (0, 0), (0, 0))).reshape(B, blocks, ROWS, H, K)
        o = lax.map(attend, (jnp.moveaxis(rows, 1, 0), ROWS * jnp.arange(blocks, dtype=jnp.int32)))
        x = add_output(layer, x, jnp.moveaxis(o, 0, 1).reshape(B, blocks * ROWS, H, K)[:, :T])
    return x - before


def empty_caches(size: Size, dtype: str, count: int = len(WINDOWS)) -> list:
    """With room for a prompt and what is decoded after it."""
    shape = 1, size.prompt + size.decoded, size.G, size.K
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(count)]


def spans_of(size: Size) -> tuple[list[slice], list[slice]]:
    """The tokens of each chunk of the prompt, and each of those decoded."""
    starts = range(0, size.prompt, size.chunk)
    chunks = [slice(start, min(start + size.chunk, size.prompt)) for start in starts]
    return chunks, [slice(t, t + 1) for t in range(size.prompt, size.prompt + size.decoded)]


def walk(layers, rotary, x, caches, *, spans: Sequence[slice], implementation: str | None) -> tuple[list, list]:
    """`step` for each span of x's tokens, the caches handed on. Returns what each adds, and the caches."""
    found = []
    for span in spans:
        update, caches = step(layers, rotary, caches, x[:, span], jnp.int32(span.start), implementation=implementation)
        found.append(update)
    return found, caches


def compare(layers: list[Layer], rotary: Rotary, x: np.ndarray, size: Size, dtype: str, implementation) -> list[dict]:
    """Each step's error: relative L2 of what the layers add to its tokens, from the one shot in float64; its bound.

    The bound is 2e-5 in fp32. In 16 bits it is twice the error, for the same tokens, of the one shot with operands
    rounded to that dtype.
    """
    spans = [span for part in spans_of(size) for span in part]
    x = x[:, : size.prompt + size.decoded]
    updates, _ = walk(
        layers, rotary, jnp.asarray(x), empty_caches(size, dtype), spans=spans, implementation=implementation
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (layers, rotary, x))
        truth = np.asarray(one_shot(*wide, dtype="float64"))
    rounded = None if dtype == "float32" else np.asarray(one_shot(layers, rotary, jnp.asarray(x), dtype=dtype))
    steps = []
    for span, update in zip(spans, updates, strict=True):
        bound = 2e-5
        if rounded is not None:
            bound = 2 * accuracy.relative_l2(rounded[:, span], truth[:, span])
        error = accuracy.relative_l2(update, truth[:, span])
        steps.append({"past": span.start, "tokens": span.stop - span.start, "error": error, "bound": bound})
    return steps


def tokens_per_second(layers, rotary, x, size: Size, dtype: str, ways: dict[str, str | None], gpu: bool) -> dict:
    """way -> [prompt, decoded]: tokens of each that go through a second, None without any; the ways take turns."""
    rates: dict[str, list[float | None]] = {way: [] for way in ways}
    x = jnp.asarray(x)
    for spans in spans_of(size):
        if not spans:
            for found in rates.values():
                found.append(None)
            continue
        arms = []
        for way, implementation in ways.items():
            call = functools.partial(walk, layers, rotary, spans=spans, implementation=implementation)
            # Each call writes the same rows of the caches that the call before it returns.
            _, caches = walk(
                layers, rotary, x, empty_caches(size, dtype), spans=spans_of(size)[0], implementation=implementation
            )
            arms.append(timing.Arm(way, call, [[x, caches]], state_argument=1))
        rounds = ROUNDS_ON_GPU if gpu else ROUNDS_ON_CPU
        measured = timing.time_arms(arms, rounds=rounds, overlap=gpu, limit_seconds=TIMING_SECONDS)
        for way, found in rates.items():
            found.append((spans[-1].stop - spans[0].start) / measured.median(way))
    return rates


def run(
    texts: Sequence[str],
    *,
    gpu: bool,
    full: bool = False,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    on_step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that this file is about.

    Args:
      texts: encoded one by one, joined along T; at least one token together.
      gpu: whether the kernels run as they are; else a few tokens go through them in interpret mode.
      full: whether to run at full size without a GPU too.

    Returns:
      size: what ran. rows: one dict per dtype and way: dtype, way, steps (past, tokens, error, bound of each), and
      tokens_per_second (prompt, decoded) or None. green: whether every step is within its bound.

    Raises:
      minilm.PackageMissing: the encoder's weights are not installed.
    """
    on_step("encoder")
    with jax.default_matmul_precision("highest"):
        weights = minilm.load_weights()
        x = np.concatenate([minilm.text_states(weights, text) for text in texts])[None]
    size = (FULL if gpu or full else SCALED_DOWN).fitted(x.shape[1])
    layers = random_layers(0, x.shape[-1], size)
    rotary = Rotary(*(jnp.asarray(t, jnp.float32) for t in rotary_table(size.prompt + size.decoded, size.K)))
    ways: dict[str, str | None] = {"kernel": "pallas", "reference": "reference"} if gpu else {"reference": "reference"}
    rows = []
    for dtype in dtypes:
        for way, implementation in ways.items():
            on_step(f"{dtype}: {way}")
            steps = compare(layers, rotary, x, size, dtype, implementation)
            rows.append({"dtype": dtype, "way": way, "steps": steps, "tokens_per_second": None})
        if not all(_green(row) for row in rows):
            continue
        on_step(f"{dtype}: tokens per second")
        rates = tokens_per_second(layers, rotary, x, size, dtype, ways, gpu)
        for row in rows[-len(ways) :]:
            row["tokens_per_second"] = rates[row["way"]]
    if not gpu:
        few = dataclasses.replace(INTERPRETED, H=size.H, G=size.G).fitted(x.shape[1])
        for dtype in dtypes:
            on_step(f"{dtype}: kernels in interpret mode")
            steps = compare(layers, rotary, x, few, dtype, "pallas")
            rows.append({"dtype": dtype, "way": "kernel, interpreted", "steps": steps, "tokens_per_second": None})
    return {"size": dataclasses.asdict(size), "rows": rows, "green": all(_green(row) for row in rows)}


def _green(row: dict[str, Any]) -> bool:
    return all(step["error"] <= step["bound"] for step in row["steps"])


def as_text(found: dict[str, Any]) -> str:
    """The findings of `run`, for a reader."""
    size = found["size"]
    header = ["way", "dtype", "chunks", "worst error / bound", "steps", "worst error / bound"]
    header += ["prompt tokens/s", "decoded tokens/s", "check"]
    cells = []
    for row in found["rows"]:
        chunks = [step for step in row["steps"] if step["past"] == 0 or step["tokens"] > 1]
        decoded = [step for step in row["steps"] if step not in chunks]
        cell = [row["way"], row["dtype"]]
        for part in (chunks, decoded):
            worst = max(part, key=lambda step: step["error"] / step["bound"], default=None)
            cell += [str(len(part)), "-" if worst is None else f"{worst['error']:.1e} / {worst['bound']:.1e}"]
        cell += [number(rate) for rate in row["tokens_per_second"] or (None, None)]
        cells.append([*cell, "ok" if _green(row) else "CHECK FAILED"])
    windows = ", ".join(str(window or "none") for window in WINDOWS)
    heads = ", ".join(f"{letter} {size[letter]}" for letter in "HGK")
    tokens = f"{size['prompt']} tokens in chunks of {size['chunk']}, then {size['decoded']} one by one"
    line = f"gpt-oss attention blocks on text, windows {windows}: {heads}; {tokens}"
    return f"{line}\n{table(header, cells)}"
