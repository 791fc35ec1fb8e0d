"""What every launch of kernels shares: the platform that it is lowered for, its derivative, and mesh axes."""

import functools
from collections.abc import Callable

import jax
from jax import lax


def by_platform(arrays: dict, refer: Callable, launch: Callable, default: Callable | None = None):
    """`launch(arrays, platform=...)` where kernels run; derivatives, forward and reverse, are those of `refer(arrays)`.

    On ROCm and CUDA the platform is "rocm" or "cuda". Elsewhere `default(arrays)` runs, or without one the kernels in
    interpret mode, on a CPU, with None as the platform. Every branch is traced everywhere.
    """
    branches = {platform: functools.partial(launch, platform=platform) for platform in ("rocm", "cuda")}
    branches |= {"default": default} if default else {"cpu": functools.partial(launch, platform=None)}

    @jax.custom_jvp
    def differentiable(arrays):
        return lax.platform_dependent(arrays, **branches)

    @differentiable.defjvp
    def derivative(primals, tangents):
        return differentiable(*primals), jax.jvp(refer, primals, tangents)[1]

    return differentiable(arrays)


def vary_alike(operands: dict) -> dict:
    """Under shard_map: each operand made to vary over every mesh axis that one of them varies over."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands.values()))

    def widen(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return {name: widen(x) for name, x in operands.items()}
