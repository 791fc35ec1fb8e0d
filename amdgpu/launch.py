"""What every launch of kernels shares: the platform that it is lowered for, its derivative, and mesh axes."""

import functools
from collections.abc import Callable

import jax
from jax import lax


def by_implementation(
    arrays: dict,
    refer: Callable,
    launch: Callable,
    implementation: str | None,
    *,
    obstacle: Callable[[], str | None] = lambda: None,
    empty: bool = False,
):
    """`launch(arrays, platform=...)` or `refer(arrays)`, as `implementation` says.

    Kernels take shapes that are known: of an array with a symbolic one (`jax.export`) that is the obstacle.

    None: kernels on ROCm and CUDA, the reference elsewhere. "pallas": kernels, in interpret mode on a CPU, where the
    platform is None; NotImplementedError where `obstacle()` says what they would need to be otherwise. "reference":
    that. An obstacle, unless kernels were asked for, and an empty call lead to the reference too.

    Derivatives are those of the reference, computed again from the inputs: nothing else of the forward pass is kept.
    """
    refer = jax.checkpoint(refer)
    if implementation == "reference":
        return refer(arrays)
    # Every branch of platform_dependent is traced everywhere, so what Pallas cannot do is settled before it.
    known = all(isinstance(n, int) for x in jax.tree.leaves(arrays) for n in x.shape)
    found = obstacle() if known else "shapes that are known, got a symbolic one"
    if implementation == "pallas" and found:
        raise NotImplementedError(f"the Pallas kernels take {found}")
    if found or empty:
        return refer(arrays)
    branches = {platform: functools.partial(launch, platform=platform) for platform in ("rocm", "cuda")}
    branches |= {"cpu": functools.partial(launch, platform=None)} if implementation == "pallas" else {"default": refer}

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
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return {name: widen(x) for name, x in operands.items()}
