"""Prefill and decode on the hidden states of real text, compared with the float64 token scan.

Random keys are nearly orthogonal; those of text are not, since neighbouring tokens have similar hidden
states. Then writes of the delta rule collide, the triangular system of a chunk is far from the identity, and
errors grow. Text goes through the MiniLM encoder (`minilm`) and Qwen3-Next's projections, convolution and
gates (`qwen3_next`) into `chunk_gated_delta_rule` as a whole, and into `recurrent_gated_delta_rule` token by
token.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import minilm, qwen3_next
from benchmarks.table import table
from gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule
from references import accuracy
from references.cases import GatedDeltaCase

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFAULT_TEXTS = (ROOT / "LICENSE", ROOT / "README.md")

# Published for this encoder: cosines of the three sentences' embeddings,
# https://sbert.net/docs/quickstart.html.
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
COSINES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
# Half of the last decimal published, and fp32 rounding.
COSINE_ERROR = 6e-5

# Tokens left to decode after a prefill of all the others; tokens for the kernel in interpret mode.
HANDOVER, INTERPRETED = 64, 256


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Heads and sizes of the gated delta layer."""

    G: int
    H: int
    K: int
    V: int


# Qwen3-Next-80B-A3B, and an eighth of its heads where there is no GPU.
FULL, SCALED_DOWN = Geometry(16, 32, 128, 128), Geometry(2, 4, 128, 128)


def sentence_cosines(weights: minilm.Weights) -> dict[tuple[int, int], float]:
    """Cosines of the embeddings of SENTENCES, by pair."""
    ids, lengths, _ = minilm.token_windows(SENTENCES)
    hidden = minilm.hidden_states(weights, ids, lengths)
    e = np.asarray(minilm.sentence_embeddings(hidden, jnp.asarray(lengths)))
    return {(i, j): float(e[i] @ e[j]) for i, j in COSINES}


def neighbour_cosine(k: np.ndarray) -> float:
    """Mean cosine of each key with the one before it, over tokens and heads; k [1, T, G, K]."""
    k = np.asarray(k).astype(np.float64)
    k = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-30)
    return float((k[:, 1:] * k[:, :-1]).sum(-1).mean())


@functools.partial(jax.jit, donate_argnums=0)
def decode_step(state: jax.Array, *token: jax.Array) -> tuple[jax.Array, Any]:
    """One token (q, k, v, g, beta with T = 1) through the state [1, H, K, V], which is given away."""
    return recurrent_gated_delta_rule(
        *token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def decode(inputs: qwen3_next.Inputs, state: Any) -> tuple[np.ndarray, Any]:
    """One call of `recurrent_gated_delta_rule` per token, the state handed from call to call.

    Args:
      inputs: of B = 1, T >= 1. state: fp32 [1, H, K, V]; consumed.

    Returns:
      o [1, T, H, V] and the last state.
    """
    tokens = [np.asarray(x) for x in inputs]
    outputs = []
    for t in range(tokens[0].shape[1]):
        o, state = decode_step(state, *(x[:, t : t + 1] for x in tokens))
        outputs.append(o)
    return np.concatenate([np.asarray(o) for o in outputs], axis=1), state


def run(
    texts: Sequence[str],
    *,
    gpu: bool,
    full: bool = False,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    on_step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that this file is about.

    Args:
      texts: encoded one by one, joined along T; at least one token together.
      gpu: whether the kernels run as they are, in a layer of Qwen3-Next's full size.
      full: whether the layer has that size without a GPU too.

    Returns:
      cosines: pair -> (found, published). tokens, neighbour_cosine: of the text's keys.
      rows: one dict per dtype and way: dtype, way, tokens, errors, bounds.
      green: whether all of it is as it should be.

    Raises:
      minilm.PackageMissing: the encoder's weights are not installed.
    """
    on_step("encoder")
    geometry = FULL if gpu or full else SCALED_DOWN
    # A GPU would multiply fp32 in TF32, and the published cosines are exact to 5e-5.
    with jax.default_matmul_precision("highest"):
        weights = minilm.load_weights()
        cosines = sentence_cosines(weights)
        hidden = np.concatenate([minilm.text_states(weights, text) for text in texts])[None]
        layer = qwen3_next.random_layer(0, hidden.shape[-1], geometry.G, geometry.H, geometry.K, geometry.V)
        inputs = jax.jit(qwen3_next.gated_delta_inputs, static_argnums=(2, 3, 4))
        by_dtype = {dtype: inputs(layer, hidden, geometry.G, geometry.K, dtype) for dtype in dtypes}
    rows = []
    for dtype, drawn in by_dtype.items():
        rows += _ways(dtype, drawn, geometry, gpu, on_step)
    green = all(row["errors"][name] <= row["bounds"][name] for row in rows for name in row["bounds"])
    close = all(abs(cosines[pair] - value) <= COSINE_ERROR for pair, value in COSINES.items())
    return {
        "cosines": {f"{i}-{j}": [cosines[i, j], COSINES[i, j]] for i, j in COSINES},
        "tokens": hidden.shape[1],
        "geometry": dataclasses.asdict(geometry),
        "neighbour_cosine": neighbour_cosine(by_dtype[dtypes[0]].k),
        "rows": rows,
        "green": green and close,
    }


def _ways(dtype: str, drawn: qwen3_next.Inputs, geometry: Geometry, gpu: bool, on_step) -> list[dict[str, Any]]:
    """Prefill, decode, and a prefill that hands over to decode, each with its errors and bounds."""
    T = drawn.q.shape[1]
    case = GatedDeltaCase(
        "real_text",
        "hidden states of text",
        1,
        T,
        **dataclasses.asdict(geometry),
        dtype=dtype,
        keys="correlated",
        l2norm=True,
    )
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    arguments = {**drawn._asdict(), **options}
    prefill = functools.partial(chunk_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def tokens(start, stop):
        return qwen3_next.Inputs(*(x[:, start:stop] for x in drawn))

    on_step(f"{dtype}: float64 scan")
    truth = accuracy.gated_delta_truth(arguments)
    chunked = accuracy.gated_delta_bounds(case, arguments, truth)
    token_by_token = accuracy.recurrent_gated_delta_bounds(case, arguments)
    rows = []

    def compare(way, count, result, truth, bounds):
        errors = accuracy.gated_delta_errors(result, truth)
        row = {"dtype": dtype, "way": way, "tokens": count}
        rows.append({**row, "errors": errors._asdict(), "bounds": bounds._asdict()})

    on_step(f"{dtype}: prefill")
    compare("prefill", T, prefill(*drawn), truth, chunked)
    on_step(f"{dtype}: decode")
    zeros = jnp.zeros((1, geometry.H, geometry.K, geometry.V), jnp.float32)
    compare("decode", T, decode(drawn, zeros), truth, token_by_token)

    rest = min(HANDOVER, T // 2)
    if rest:
        on_step(f"{dtype}: prefill, then decode")
        o, state = prefill(*tokens(0, T - rest))
        o_rest, state = decode(tokens(T - rest, T), state)
        o = np.concatenate([np.asarray(o), o_rest], axis=1)
        compare(f"prefill, then {rest} decoded", T, (o, state), truth, chunked)

    if not gpu:
        on_step(f"{dtype}: kernel in interpret mode")
        short = tokens(0, INTERPRETED)
        count = short.q.shape[1]
        part = accuracy.gated_delta_truth({**short._asdict(), **options})
        bounds = accuracy.gated_delta_bounds(dataclasses.replace(case, T=count), {**short._asdict(), **options}, part)
        result = prefill(*short, implementation="pallas")
        compare("prefill kernel, interpreted", count, result, part, bounds)
    return rows


def as_text(found: dict[str, Any]) -> str:
    """The findings of `run`, for a reader."""
    geometry = ", ".join(f"{letter} {size}" for letter, size in found["geometry"].items())
    lines = [
        f"{found['tokens']} tokens of text; {geometry}; mean cosine of neighbouring keys "
        f"{found['neighbour_cosine']:.3f} (0 for independent ones)",
        "sentence cosines, found (published): "
        + ", ".join(f"{pair} {value:.4f} ({published:.4f})" for pair, (value, published) in found["cosines"].items()),
    ]
    cells = []
    for row in found["rows"]:
        red = any(row["errors"][name] > row["bounds"][name] for name in row["bounds"])
        figures = [f"{row['errors'][name]:.1e} / {row['bounds'][name]:.1e}" for name in row["bounds"]]
        cells.append([row["way"], row["dtype"], str(row["tokens"]), *figures, "CHECK FAILED" if red else "ok"])
    header = ["way", "dtype", "tokens", "o: error / bound", "trailing half", "state", "check"]
    return "\n".join([*lines, table(header, cells)])
