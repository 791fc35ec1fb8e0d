"""What this package ships for AMD GPUs: each public function, with the row of its tuning table that it uses.

`python -m amdgpu` prints them; the tests compile and run them. Kernel packages are imported when their
entries are asked for, since they import `amdgpu.arch` themselves.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

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
    """What an algorithm ships for these architectures, to be compiled; empty where it has no kernels yet.

    Raises:
        ValueError: no such algorithm.
    """
    _known(algorithm)
    if algorithm == "gated_delta":
        return [work for arch in archs for work in _gated_delta_works(arch)]
    return []


def checks(algorithm: str, archs: Sequence[str]) -> list[Check]:
    """Small cases of the same, to be run as machine code; empty where it has no kernels yet.

    Raises:
        ValueError: no such algorithm.
    """
    _known(algorithm)
    if algorithm == "gated_delta":
        return [check for arch in archs for check in _gated_delta_checks(arch)]
    return []


def _known(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got {algorithm!r}, known are {', '.join(ALGORITHMS)}")


def _gated_delta_rows(arch: str):
    """(dtype, row) of the table. fp32 on gfx11 and gfx12 has no row: README's limits say what it costs there."""
    from gated_delta import tuning

    for dtype in DTYPES:
        for row in tuning.ROWS:
            if (row.architecture, row.itemsize) == (arch, jnp.dtype(dtype).itemsize):
                yield dtype, row


def _gated_delta_works(arch: str) -> list[Work]:
    import gated_delta

    # A layer of Qwen3-Next: 16 key heads, 32 value heads, all of size 128.
    B, T, G, H, K, V = 1, 4096, 16, 32, 128, 128
    found = []
    for dtype, row in _gated_delta_rows(arch):
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
                "config": row.config,
            }
            work = Work(
                name=f"{fn.__name__} {dtype}",
                label=f"B={B} T={tokens} G={G} H={H} K={K} V={V}",
                fn=fn,
                arch=arch,
                shapes=(),
                keywords=keywords,
                row=str(row.config),
                reason=row.reason,
            )
            found.append(work)
    return found


def _gated_delta_checks(arch: str) -> list[Check]:
    import gated_delta

    found = []
    for dtype, row in _gated_delta_rows(arch):
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
