"""Real sentences through the MiniLM encoder with our attention in it, compared with the encoder that has `jax.nn`'s.

What a user does who replaces an import: the same encoder (`minilm`), the same weights, another attention in each of its
six layers. Sentences differ in length, so every call has keys that are hidden. Three things are looked at:

- the embeddings are those that the encoder has with `jax.nn.dot_product_attention`;
- so are the hidden states of a whole text, in windows of 512 tokens;
- each sentence of a pair is nearest to the one that says the same in other words, and for three others the cosines are
  the published ones (`real_input`).

In bf16 (queries, keys and values rounded, all else fp32) the two encoders round differently. There the error against
the encoder in fp32 is at most twice that of `jax.nn`: `references.accuracy.attention_bound`'s rule, for whole arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import minilm
from benchmarks.real_input import COSINE_ERROR, COSINES, SENTENCES
from benchmarks.table import table
from flash import dot_product_attention, flash_attention
from references import accuracy

# Two sentences each that say the same in other words.
PAIRS = (
    ("A man is feeding his dog in the kitchen.", "Someone gives food to a dog at home."),
    ("The stock market fell sharply on Monday.", "Share prices dropped a lot at the start of the week."),
    ("How do I reset my password?", "I have forgotten my password and need a new one."),
    ("The train to Berlin leaves at nine.", "There is a nine o'clock train going to Berlin."),
    ("Heavy rain flooded the village overnight.", "After a storm in the night the whole village was under water."),
)
TEXTS = (*SENTENCES, *(sentence for pair in PAIRS for sentence in pair))
# In fp32, relative L2: the most that one element of one call may be off.
FP32_ERROR = 2e-5
DTYPES = ("float32", "bfloat16")

Attention = Callable[..., Any]


def theirs(q, k, v, *, kv_lengths):
    # jax.nn itself mixes dtypes, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=kv_lengths)


def replaced(q, k, v, *, kv_lengths, implementation):
    """The same call as `theirs`."""
    return dot_product_attention(q, k, v, key_value_seq_lengths=kv_lengths, implementation=implementation)


def attentions() -> dict[str, Attention]:
    """Ours, by name."""
    return {
        f"{name}, {arm}": functools.partial(function, implementation=implementation)
        for name, function in (("flash_attention", flash_attention), ("dot_product_attention", replaced))
        for arm, implementation in (("kernel", "pallas"), ("reference", "reference"))
    }


def rounded(attention: Attention, dtype: str) -> Attention:
    """The attention with q, k and v in `dtype`, and its output in fp32 again."""

    def call(q, k, v, *, kv_lengths):
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        return attention(q, k, v, kv_lengths=kv_lengths).astype(jnp.float32)

    return call


def embed(weights: minilm.Weights, texts: Sequence[str], attention: Attention) -> np.ndarray:
    """Embeddings of short texts, one window each: fp32 [texts, 384], of unit length."""
    ids, lengths, _ = minilm.token_windows(texts)
    hidden = minilm.hidden_states(weights, ids, lengths, attention=attention)
    return np.asarray(minilm.sentence_embeddings(hidden, jnp.asarray(lengths)))


def states(weights: minilm.Weights, ids: np.ndarray, lengths: np.ndarray, attention: Attention) -> np.ndarray:
    """Hidden states of all tokens of all windows, one after another."""
    found = []
    for start in range(0, len(ids), minilm.WINDOWS_AT_ONCE):
        part = slice(start, start + minilm.WINDOWS_AT_ONCE)
        hidden = np.asarray(minilm.hidden_states(weights, ids[part], lengths[part], attention=attention))
        found += [row[:length] for row, length in zip(hidden, lengths[part], strict=True)]
    return np.concatenate(found)


def misranked(embeddings: np.ndarray) -> list[str]:
    """The sentences of PAIRS whose nearest neighbour among all TEXTS is another than the one of their pair."""
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.argmax(axis=1)
    first = len(SENTENCES)
    # Pairs stand side by side.
    partner = [first + (i ^ 1) for i in range(2 * len(PAIRS))]
    return [TEXTS[first + i] for i, j in enumerate(partner) if nearest[first + i] != j]


def run(
    texts: Sequence[str],
    *,
    gpu: bool,
    full: bool = False,
    dtypes: Sequence[str] = DTYPES,
    on_step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything that this file is about.

    Args:
      texts: of any length, cut into windows.
      gpu: whether kernels run as they are, so that the texts go through them too.
      full: whether all windows are looked at without a GPU, and not the first ones only.
      dtypes: of queries, keys and values.

    Returns:
      sentences, tokens: how many there are, tokens of the texts. rows: one dict for each attention, dtype and kind of
        input: attention, dtype, what, error, bound.
      cosines: pair -> [found by the kernels in fp32, published]. misranked: sentences that are nearest to a wrong one.
      green: whether all of it is as it should be.

    Raises:
      minilm.PackageMissing: the encoder's weights are not installed.
    """
    weights = minilm.load_weights()
    ids, lengths, _ = minilm.token_windows(texts)
    if not gpu and not full:
        ids, lengths = (x[: minilm.WINDOWS_AT_ONCE] for x in (ids, lengths))
    kinds = {
        "sentences": functools.partial(embed, weights, TEXTS),
        "text": functools.partial(states, weights, ids, lengths),
    }
    rows, wrong, cosines = [], set(), {}
    # A GPU would multiply fp32 in TF32.
    with jax.default_matmul_precision("highest"):
        for what, encode in kinds.items():
            on_step(f"{what}: jax.nn")
            truth = encode(theirs)
            for dtype in dtypes:
                bound = FP32_ERROR
                if dtype != "float32":
                    bound = 2 * accuracy.relative_l2(encode(rounded(theirs, dtype)), truth)
                for name, attention in attentions().items():
                    # Interpret mode would take minutes for a text.
                    if what == "text" and not gpu and name.endswith("kernel"):
                        continue
                    on_step(f"{what}: {name}, {dtype}")
                    found = encode(rounded(attention, dtype))
                    error = accuracy.relative_l2(found, truth)
                    rows.append({"attention": name, "dtype": dtype, "what": what, "error": error, "bound": bound})
                    if what == "sentences":
                        wrong.update(misranked(found))
                    if (what, dtype, name) == ("sentences", "float32", "flash_attention, kernel"):
                        cosines = {f"{i}-{j}": [float(found[i] @ found[j]), COSINES[i, j]] for i, j in COSINES}
    close = all(abs(value - published) <= COSINE_ERROR for value, published in cosines.values())
    return {
        "sentences": len(TEXTS),
        "tokens": int(lengths.sum()),
        "rows": rows,
        "cosines": cosines,
        "misranked": sorted(wrong),
        "green": close and not wrong and all(row["error"] <= row["bound"] for row in rows),
    }


def as_text(found: dict[str, Any]) -> str:
    """The findings of `run`, for a reader."""
    pairs = found["cosines"].items()
    cosines = ", ".join(f"{pair} {value:.4f} ({published:.4f})" for pair, (value, published) in pairs)
    ranked = f"the two of each of {len(PAIRS)} pairs nearest to one another"
    wrong = f"CHECK FAILED: nearest to a wrong one: {'; '.join(found['misranked'])}"
    lines = [
        f"{found['sentences']} sentences, {wrong if found['misranked'] else ranked}; {found['tokens']} tokens of text",
        f"cosines with the kernels, found (published): {cosines}",
    ]
    cells = [
        [
            row["attention"],
            row["what"],
            row["dtype"],
            f"{row['error']:.1e} / {row['bound']:.1e}",
            "ok" if row["error"] <= row["bound"] else "CHECK FAILED",
        ]
        for row in found["rows"]
    ]
    header = ["attention of the encoder", "input", "dtype", "off jax.nn's / bound", "check"]
    return "\n".join([*lines, table(header, cells)])
