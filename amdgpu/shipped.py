"""What this package ships for AMD GPUs: each public function, with the row of its tuning table that it uses.

`python -m amdgpu` prints them; the tests compile and run them. Kernel packages are imported when their
entries are asked for, since they import `amdgpu.arch` themselves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from amdgpu.check import Check

ALGORITHMS = ("gated_delta", "flash", "gqa")
DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Work:
    """One function with its arguments, ready for `isa.compile_for`."""

    # Short, and different for each work of an architecture: the function and the dtype.
    name: str
    # The sizes, in words.
    label: str
    fn: Callable
    arch: str
    # Positional arguments of `fn`: shapes.
    shapes: tuple
    # Keyword arguments of `fn`: shapes, and static values such as its config.
    keywords: dict
    # The row of the tuning table that it runs with, and the row's reason.
    row: str = ""
    reason: str = ""


def works(algorithm: str, archs: Sequence[str]) -> list[Work]:
    """What an algorithm ships for these architectures, to be compiled.

    Raises:
        ValueError: no such algorithm.
    """
    found = {"gated_delta": _gated_delta_works, "flash": _flash_works, "gqa": _gqa_works}
    return [work for arch in archs for work in found[_known(algorithm)](arch)]


def checks(algorithm: str, archs: Sequence[str]) -> list[Check]:
    """Small cases of the same, to be run as machine code.

    Raises:
        ValueError: no such algorithm.
    """
    found = {"gated_delta": _gated_delta_checks, "flash": _flash_checks, "gqa": _gqa_checks}
    return [check for arch in archs for check in found[_known(algorithm)](arch)]


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got {algorithm!r}, known are {', '.join(ALGORITHMS)}")
    return algorithm


def _rows(tuning, arch: str):
    """(dtype, row) of a tuning table. fp32 on gfx11 and gfx12 has no row: README's limits say what it costs there."""
    for dtype in DTYPES:
        for row in tuning.ROWS:
            if (row.architecture, row.itemsize) == (arch, jnp.dtype(dtype).itemsize):
                yield dtype, row


def _work(fn: Callable, arch: str, kind: str, label: str, row, keywords: dict) -> Work:
    """`fn` with a row of its table; `kind` tells it from the other works of the function."""
    keywords = keywords | {"config": row.config}
    return Work(f"{fn.__name__} {kind}", label, fn, arch, (), keywords, row=str(row.config), reason=row.reason)


def _gated_delta_works(arch: str) -> list[Work]:
    import gated_delta
    from gated_delta import tuning

    # A layer of Qwen3-Next: 16 key heads, 32 value heads, all of size 128.
    B, T, G, H, K, V = 1, 4096, 16, 32, 128, 128
    found = []
    for dtype, row in _rows(tuning, arch):
        for fn, tokens in (
            (gated_delta.chunk_gated_delta_rule, T),
            (gated_delta.recurrent_gated_delta_rule, 1),
        ):
            keywords = {
                "q": jax.ShapeDtypeStruct((B, tokens, G, K), dtype),
                "k": jax.ShapeDtypeStruct((B, tokens, G, K), dtype),
                "v": jax.ShapeDtypeStruct((B, tokens, H, V), dtype),
                "g": jax.ShapeDtypeStruct((B, tokens, H), "float32"),
                "beta": jax.ShapeDtypeStruct((B, tokens, H), "float32"),
                "initial_state": jax.ShapeDtypeStruct((B, H, K, V), "float32"),
                "output_final_state": True,
            }
            found.append(_work(fn, arch, dtype, f"B={B} T={tokens} G={G} H={H} K={K} V={V}", row, keywords))
    return found


def _gated_delta_checks(arch: str) -> list[Check]:
    import gated_delta
    from gated_delta import tuning

    found = []
    for dtype, row in _rows(tuning, arch):
        # The shipped row but for the window: two chunks, so that a small case crosses a boundary.
        config = dataclasses.replace(row.config, window_chunks=2)
        found += [
            _gated_delta_check(gated_delta.chunk_gated_delta_rule, arch, dtype, 2 * config.chunk_size + 5, config),
            _gated_delta_check(gated_delta.recurrent_gated_delta_rule, arch, dtype, 2, config),
        ]
    return found


def _gated_delta_check(fn: Callable, arch: str, dtype: str, tokens: int, config) -> Check:
    """A ragged sequence of two heads that share a key head, with an initial state."""
    import gated_delta
    from references import accuracy, cases

    B, G, H, K, V = 1, 1, 2, 128, 128
    name = f"{fn.__name__} {dtype} B={B} T={tokens} G={G} H={H} K={K} V={V}"
    case = cases.GatedDeltaCase(name, "the shipped row, small", B, tokens, G, H, K, V, dtype, state="normal")
    arguments = cases.inputs(case)

    def compare(outputs):
        truth = accuracy.gated_delta_truth(arguments)
        errors = accuracy.gated_delta_errors(outputs, truth)
        if fn is gated_delta.recurrent_gated_delta_rule:
            bounds = accuracy.recurrent_gated_delta_bounds(case, arguments)
        else:
            bounds = accuracy.gated_delta_bounds(case, arguments, truth, chunk_size=config.chunk_size)
        return {part: (getattr(errors, part), getattr(bounds, part)) for part in errors._fields}

    return Check(name, arch, lambda: fn(**arguments, config=config), compare)


# Of attention: few query rows share out their keys ("split"), by two kernels.
FLASH_KINDS = ("full", "causal", "split")


def _flash_works(arch: str) -> list[Work]:
    import flash
    from flash import tuning

    B, H, G = 1, 16, 16
    found = []
    for dtype, row in _rows(tuning, arch):
        K, V = row.head_size, min(row.head_size, tuning.LARGEST_VALUE_SIZE)
        for kind in FLASH_KINDS:
            T, S = (16, 8192) if kind == "split" else (4096, 4096)
            keywords = {
                "q": jax.ShapeDtypeStruct((B, T, H, K), dtype),
                "k": jax.ShapeDtypeStruct((B, S, G, K), dtype),
                "v": jax.ShapeDtypeStruct((B, S, G, V), dtype),
                "causal": kind == "causal",
                "implementation": "pallas",
            }
            label = f"B={B} T={T} S={S} H={H} G={G} V={V}"
            found.append(_work(flash.flash_attention, arch, f"{dtype} K={K} {kind}", label, row, keywords))
    return found


def _flash_checks(arch: str) -> list[Check]:
    """Two blocks of queries, masked and mask-free tiles; or few queries whose keys are split three ways."""
    from flash import tuning

    found = []
    for dtype, row in _rows(tuning, arch):
        K, V = row.head_size, min(row.head_size, tuning.LARGEST_VALUE_SIZE)
        block_q, block_k = row.config.block_q, row.config.block_k
        for kind, T, S in (
            ("causal", block_q + 5, block_q + block_k + 9),
            ("split", 5, 4 * block_k + 9),
        ):
            config = dataclasses.replace(row.config, splits=3 if kind == "split" else 1)
            found.append(_flash_check(arch, dtype, kind, T, S, K, V, config))
    return found


def _flash_check(arch: str, dtype: str, kind: str, T: int, S: int, K: int, V: int, config) -> Check:
    """Two heads that share a KV head."""
    import flash
    from references import cases
    from references import flash as reference

    name = f"flash_attention {dtype} K={K} {kind} B=1 T={T} S={S} H=2 G=1 V={V}"
    case = cases.FlashCase(name, "the shipped row, small", 1, T, S, 2, 1, K, V, dtype, causal=kind == "causal")
    arguments = {name: cases.inputs(case)[name] for name in "qkv"}
    fn = partial(flash.flash_attention, causal=case.causal, implementation="pallas", config=config)
    return _attention_check(name, arch, dtype, fn, partial(reference.dense, causal=case.causal), arguments)


def _gqa_works(arch: str) -> list[Work]:
    """A chunk of a prompt, or one row, behind 8192 keys."""
    import gqa
    from gqa import tuning

    B, H, G = 1, 64, 8
    found = []
    for dtype, row in _rows(tuning, arch):
        size, T = row.head_size, 1 if row.kernel == "rows" else 512
        S = 8192 + T
        keywords = {
            "q": jax.ShapeDtypeStruct((B, T, H, size), dtype),
            "k": jax.ShapeDtypeStruct((B, S, G, size), dtype),
            "v": jax.ShapeDtypeStruct((B, S, G, size), dtype),
            "sinks": jax.ShapeDtypeStruct((H,), "float32"),
            "window": 128 if row.kernel == "prefill_window" else None,
            "implementation": "pallas",
        }
        kind, label = f"{dtype} K={size} {row.kernel}", f"B={B} T={T} S={S} H={H} G={G} V={size}"
        found.append(_work(gqa.grouped_query_attention, arch, kind, label, row, keywords))
    return found


def _gqa_checks(arch: str) -> list[Check]:
    """Two tiles of rows behind a few keys, or two rows of three heads over three blocks of keys; with sinks."""
    import gqa
    from gqa import tuning
    from references import cases
    from references import gqa as reference

    found = []
    for dtype, row in _rows(tuning, arch):
        config, size, block_k = row.config, row.head_size, row.config.block_k
        if row.kernel == "rows":
            config = dataclasses.replace(config, block_keys=2 * block_k)
            T, S, H, window = 2, 4 * block_k + 9, 3, None
        else:
            # More rows than the rows kernel takes.
            T, H = max(config.block_q, 64) + 5, 2
            S, window = T + block_k + 3, block_k + 5 if row.kernel == "prefill_window" else None
        name = f"grouped_query_attention {dtype} {row.kernel} B=1 T={T} S={S} H={H} G=1 K=V={size}"
        case = cases.GqaCase(
            name, "the shipped row, small", 1, T, S, H, 1, size, size, dtype, window=window, sinks="uniform"
        )
        arguments = cases.inputs(case)
        arguments = {name: arguments[name] for name in ("q", "k", "v", "sinks")}
        fn = partial(gqa.grouped_query_attention, window=window, implementation="pallas", config=config)
        found.append(_attention_check(name, arch, dtype, fn, partial(reference.dense, window=window), arguments))
    return found


def _attention_check(name: str, arch: str, dtype: str, fn: Callable, dense: Callable, arguments: dict) -> Check:
    """`fn` of the arguments against `dense` in float64; its own error in the inputs' dtype is a part of the bound."""
    from references import accuracy

    truth = jax.jit(partial(dense, return_lse=True))

    def compare(outputs):
        low = None if dtype == "float32" else np.asarray(truth(**arguments)[0])
        with jax.enable_x64(True):
            wide = {name: np.asarray(x).astype(np.float64) for name, x in arguments.items()}
            o64, lse64 = (np.asarray(x) for x in truth(**wide))
        bounds = accuracy.attention_bound(o64, low, dtype), accuracy.attention_bound(lse64, None, "float32")
        parts = zip(("o", "lse"), outputs, (o64, lse64), bounds, strict=True)
        return {part: _worst(x, true, bound) for part, x, true, bound in parts}

    return Check(name, arch, lambda: fn(**arguments, return_lse=True), compare)


def _worst(x: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> tuple[float, float]:
    """Error and bound of the element that is nearest to its bound, or farthest beyond it; NaN is infinitely far."""
    error = np.nan_to_num(np.abs(np.asarray(x).astype(np.float64) - truth), nan=np.inf)
    bound = np.broadcast_to(bound, error.shape)
    at = np.unravel_index(np.argmax(error / bound), error.shape)
    return float(error[at]), float(bound[at])
