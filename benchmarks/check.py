"""Is an output right? The rule of references/accuracy.py, applied to a benchmark's cases.

The gated delta rule is checked whole on a GPU, and for its first and last heads on a CPU. Attention over long
sequences is checked in blocks of rows, whose truth in float64 can be computed apart from the rest.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import references.flash
import references.gqa
from references import accuracy
from references.cases import Case, FlashCase, GatedDeltaCase, GqaCase

# Rows of a block, and the length beyond which blocks are looked at instead of all rows: its square in logits a head.
BLOCK = 256
WHOLE_TO = 1024

Figures = dict[str, float]


def is_green(errors: Figures, bounds: Figures) -> bool:
    """Whether every error is within its bound; NaN is not."""
    return all(errors[name] <= bounds[name] for name in bounds)


class GatedDeltaTruth:
    """o and the state of a case by the token scan in float64."""

    def __init__(self, case: GatedDeltaCase, arguments: dict[str, Any], *, gpu: bool):
        self.case = case
        self.heads = slice(None)
        if not gpu and case.T > WHOLE_TO:
            shared, r = np.unique([0, case.G - 1]), case.H // case.G
            self.heads = (shared[:, None] * r + np.arange(r)).reshape(-1)
            arguments = {
                **arguments,
                **{name: arguments[name][:, :, shared] for name in ("q", "k")},
                **{name: arguments[name][:, :, self.heads] for name in ("v", "g", "beta")},
            }
            if case.state is not None:
                arguments["initial_state"] = arguments["initial_state"][:, self.heads]
        self.arguments = arguments
        self.truth = accuracy.gated_delta_truth(arguments)

    def compare(self, outputs: tuple, *, token_by_token: bool, chunk_size: int) -> tuple[Figures, Figures]:
        """Errors of `(o, state)` and their bounds, for a scan over tokens or over chunks of that size."""
        o, state = outputs
        errors = accuracy.gated_delta_errors((o[:, :, self.heads], state[:, self.heads]), self.truth)
        if token_by_token:
            bounds = accuracy.recurrent_gated_delta_bounds(self.case, self.arguments)
        else:
            bounds = accuracy.gated_delta_bounds(self.case, self.arguments, self.truth, chunk_size)
        return errors._asdict(), bounds._asdict()


@dataclasses.dataclass(frozen=True)
class Block:
    """Some rows and heads of an attention output: float64 truth and the largest error allowed per element."""

    rows: slice
    heads: slice
    truth: np.ndarray
    bound: np.ndarray


class AttentionTruth:
    """The dense formula in float64, for all rows or for blocks of them."""

    def __init__(self, case: FlashCase | GqaCase, arguments: dict[str, Any]):
        reference = references.flash if isinstance(case, FlashCase) else references.gqa
        # Options, and arrays that are not there, are no arguments of jit.
        options = {name: x for name, x in arguments.items() if not isinstance(x, jax.Array)}
        dense = jax.jit(functools.partial(reference.dense, **options))
        self.blocks: list[Block] = []
        for part, rows, heads in _blocks(case, arguments):
            with jax.enable_x64(True):
                truth = np.asarray(dense(**accuracy.as_float64(part)))
            low = None if case.dtype == "float32" else np.asarray(dense(**part))
            bound = np.broadcast_to(accuracy.attention_bound(truth, low, case.dtype), truth.shape)
            self.blocks.append(Block(rows, heads, truth, bound))

    def compare(self, outputs: tuple) -> tuple[Figures, Figures]:
        """Error and bound of o's element that is nearest to its bound, or farthest beyond it."""
        worst = (0.0, 0.0, 0.0)
        for block in self.blocks:
            o = np.asarray(outputs[0][:, block.rows, block.heads]).astype(np.float64)
            if o.size == 0:
                continue
            error = np.abs(o - block.truth)
            error = np.where(np.isnan(error), np.inf, error)
            at = np.unravel_index(np.argmax(error / block.bound), error.shape)
            found = (error[at] / block.bound[at], error[at], block.bound[at])
            worst = max(worst, tuple(float(x) for x in found))
        return {"o": worst[1]}, {"o": worst[2]}


def truth_of(case: Case, arguments: dict[str, Any], *, gpu: bool) -> GatedDeltaTruth | AttentionTruth:
    """What a call with `arguments` of the public function has to return."""
    if isinstance(case, GatedDeltaCase):
        return GatedDeltaTruth(case, arguments, gpu=gpu)
    return AttentionTruth(case, arguments)


def _blocks(
    case: FlashCase | GqaCase, arguments: dict[str, Any]
) -> Iterator[tuple[dict[str, jax.Array], slice, slice]]:
    """Arrays of smaller calls, with the rows and the heads of the whole output that they compute.

    Rows t0 <= t < t1 see the keys of the whole call if they are given the first `S - (T - t1)` of them, for a
    causal mask is aligned at the end. Not so with lengths, segments and biases: such cases are checked whole.
    """
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    T, S, r = case.T, case.S, case.H // case.G
    if case.B * T * S <= WHOLE_TO**2 or not arrays.keys() <= {"q", "k", "v", "sinks"}:
        yield arrays, slice(None), slice(None)
        return
    for t0 in sorted({0, max(0, (T - BLOCK) // 2), max(0, T - BLOCK)}):
        t1 = min(T, t0 + BLOCK)
        last_key = S - (T - t1) if case.causal else S
        for g in sorted({0, case.G - 1}):
            heads, group = slice(g * r, (g + 1) * r), slice(g, g + 1)
            part = {
                "q": arrays["q"][:, t0:t1, heads],
                "k": arrays["k"][:, :last_key, group],
                "v": arrays["v"][:, :last_key, group],
            }
            if "sinks" in arrays:
                part["sinks"] = arrays["sinks"][heads]
            yield part, slice(t0, t1), heads
