"""How far a result may be from the float64 truth: the one rule that tests and benchmarks apply.

The bounds follow from the kind of case alone. None is set by looking at what a kernel reaches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from references.cases import GatedDeltaCase
from references.gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule

_OPTIONS = ("scale", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")
_recurrent = jax.jit(recurrent_gated_delta_rule, static_argnames=_OPTIONS)
_chunk = jax.jit(chunk_gated_delta_rule, static_argnames=(*_OPTIONS, "chunk_size", "operand_dtype"))


def relative_l2(x: np.ndarray, ref: np.ndarray) -> float:
    """|x - ref| / max(|ref|, 1e-30) in the Euclidean norm, computed in float64; inf where x is not finite."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    if x.shape != ref.shape:
        raise ValueError(f"x has the shape {x.shape}, ref {ref.shape}")
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-30))


class GatedDelta(NamedTuple):
    """One number for each result of the gated delta rule: an error, or a bound.

    The trailing half is looked at by itself because a fault in what chunks hand on grows along the sequence,
    where the whole of o, full of large early values, hides it.
    """

    o: float
    trailing_half: float
    state: float


def as_float64(arguments: dict) -> dict:
    """The same arguments with every floating point array as a float64 numpy array."""

    def widen(x):
        return np.asarray(x).astype(np.float64) if _is_float_array(x) else x

    return {name: widen(x) for name, x in arguments.items()}


def _is_float_array(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def gated_delta_truth(arguments: dict) -> tuple[np.ndarray, np.ndarray]:
    """o and the final state by the token scan in float64, from the arguments as they were rounded."""
    arguments = as_float64(arguments) | {"output_final_state": True}
    with jax.enable_x64(True):
        o, state = _recurrent(**arguments)
        return np.asarray(o), np.asarray(state)


def gated_delta_errors(result: tuple, truth: tuple[np.ndarray, np.ndarray]) -> GatedDelta:
    """Relative L2 errors of `(o, state)`."""
    (o, state), (o64, state64) = result, truth
    half = o64.shape[1] // 2
    o = np.asarray(o).astype(np.float64)
    return GatedDelta(relative_l2(o, o64), relative_l2(o[:, half:], o64[:, half:]), relative_l2(state, state64))


def gated_delta_bounds(
    case: GatedDeltaCase, arguments: dict, truth: tuple[np.ndarray, np.ndarray], chunk_size: int = 64
) -> GatedDelta:
    """What `gated_delta_errors` of a chunked implementation may be at most.

    fp32: 2e-6; 4e-6 where every token has the same gate; 2e-5 if beta exceeds 1.
    fp16: 1e-3. bf16: 4e-3, and 5e-3 for a constant gate of -1e-3.
    fp16 and bf16 with repeated or correlated keys, gates as strong as -316 or beta above 1: 1.5 times the
    errors of the chunk reference with operands rounded to that dtype, since there the data amplifies any
    rounding.
    """
    constant_gate = isinstance(case.gates, float)
    beta_above_1 = case.beta == "double" or (isinstance(case.beta, float) and case.beta > 1)
    if case.dtype == "float32":
        bound = 2e-5 if beta_above_1 else 4e-6 if constant_gate else 2e-6
        return GatedDelta(bound, bound, bound)
    strong_gate = case.gates in ("strong16", "strong64")
    if strong_gate or beta_above_1 or case.keys in ("repeated", "correlated"):
        rounded = _chunk(**arguments, chunk_size=chunk_size, operand_dtype=case.dtype)
        return GatedDelta(*(1.5 * error for error in gated_delta_errors(rounded, truth)))
    bound = {"float16": 1e-3, "bfloat16": 5e-3 if case.gates == -1e-3 else 4e-3}[case.dtype]
    return GatedDelta(bound, bound, bound)


def recurrent_gated_delta_bounds(case: GatedDeltaCase, arguments: dict) -> GatedDelta:
    """What `gated_delta_errors` of a token scan with an fp32 state may be at most.

    2e-6 + 4e-8 min(T, 1 / min|g|): with one gate for all tokens, exp(g) is off by the same rounding at every
    step, and that error grows for as many tokens as the state remembers. Outputs in 16 bits add their own
    rounding, half a unit of the last place.
    """
    weakest = float(np.min(np.abs(np.asarray(arguments["g"])), initial=np.inf))
    bound = 2e-6 + 4e-8 * min(case.T, 1 / max(weakest, 1e-30))
    last_place = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]
    return GatedDelta(bound + last_place, bound + last_place, bound)


def attention_bound(truth: np.ndarray, low_precision: np.ndarray | None, dtype: str) -> np.ndarray:
    """Largest allowed |x - truth| of an attention output, per element; broadcasts against `truth`.

    fp32 (and every lse): 2e-5 max(1, |truth|).
    fp16 and bf16: per row, twice the largest error of `low_precision`, the dense formula in the input dtype
    (logits and softmax in fp32; rounded are the probabilities, to v's dtype, and the output). On top of it one
    unit in the last place of the row's largest value.
    """
    truth = np.asarray(truth, np.float64)
    if dtype == "float32":
        return 2e-5 * np.maximum(1.0, np.abs(truth))
    info = jnp.finfo(dtype)
    error = np.max(np.abs(np.asarray(low_precision).astype(np.float64) - truth), axis=-1, keepdims=True, initial=0)
    largest = np.max(np.abs(truth), axis=-1, keepdims=True, initial=0)
    exponent = np.floor(np.log2(np.maximum(largest, float(info.tiny))))
    return 2 * error + float(info.eps) * 2.0**exponent
