"""Runs a function as AMD machine code, on the CPU, and compares it with a reference."""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from references import accuracy

# Relative L2 between a user's function and its reference: a few roundings of the output's dtype.
BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Check:
    """One small case of a function."""

    name: str
    arch: str
    # Runs the function on the case and returns its outputs.
    run: Callable
    # What the outputs are worth: from them to (error, allowed error) by name.
    compare: Callable


@dataclasses.dataclass(frozen=True)
class Result:
    # (error, allowed error) by name.
    errors: dict[str, tuple[float, float]]
    # Names of the kernels that ran as machine code, in order, and the instructions that their waves executed.
    kernels: tuple[str, ...]
    wave_instructions: int
    seconds: float

    @property
    def equal(self) -> bool:
        """Every error within its bound, and at least one kernel really ran."""
        return bool(self.kernels) and all(error <= bound for error, bound in self.errors.values())


def run_check(check: Check) -> Result:
    """Runs it.

    Raises:
        ValueError: unknown architecture.
        ImportError: triton is not installed.
        Whatever the emulator raises: an opcode that it lacks, an access out of bounds.
    """
    from amdgpu import emulate

    start = time.perf_counter()
    with emulate(check.arch) as ran:
        outputs = jax.tree.map(np.asarray, check.run())
    return Result(
        errors=check.compare(outputs),
        kernels=tuple(kernel.name for kernel in ran),
        wave_instructions=sum(kernel.wave_instructions for kernel in ran),
        seconds=time.perf_counter() - start,
    )


def own_check(name: str, arch: str, fn: Callable, reference: Callable, shapes: tuple, static: dict) -> Check:
    """A user's function against the user's reference, on inputs drawn for `shapes`.

    Inputs are normal numbers, the same ones each time; integers and booleans are 0. Outputs may differ by the
    `BOUNDS` of their dtype in relative L2, those of any other dtype not at all.
    """
    arguments = draw(shapes)

    def compare(outputs):
        truth = jax.tree.leaves(reference(*arguments, **static))
        outputs = jax.tree.leaves(outputs)
        found, expected = ([x.shape for x in leaves] for leaves in (outputs, truth))
        if found != expected:
            raise ValueError(f"{name}: outputs of shapes {found}, the reference's are {expected}")
        return {
            f"output {i}": (accuracy.relative_l2(x, y), BOUNDS.get(x.dtype.name, 0.0))
            for i, (x, y) in enumerate(zip(outputs, truth, strict=True))
        }

    return Check(name, arch, lambda: fn(*arguments, **static), compare)


def draw(shapes: tuple) -> tuple:
    """An array for each `jax.ShapeDtypeStruct`; None stays None."""
    rng = np.random.default_rng(0)

    def array(s):
        if s is None:
            return None
        values = rng.standard_normal(s.shape) if jnp.issubdtype(s.dtype, jnp.floating) else np.zeros(s.shape)
        return jnp.asarray(values.astype(s.dtype))

    return tuple(array(s) for s in shapes)
