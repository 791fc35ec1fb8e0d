"""Checks of arguments that the functions of attention share. Each raises ValueError and names the argument."""

import math
import numbers

import jax
import jax.numpy as jnp
from jax.core import Tracer


def refuse(name: str, got, allowed: str):
    raise ValueError(f"{name} must be {allowed}, got {got}")


def static_number(x):
    """A number as a Python float: others, of a strong dtype, would not promote."""
    return float(x) if isinstance(x, numbers.Real) else x


def is_known(x) -> bool:
    """Whether the values of an argument, or of all numbers in a list, are known while tracing."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


def check_numbers(scale, softcap) -> None:
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            refuse(name, repr(value), "None or a finite Python number (it is static)")
    if softcap is not None and softcap <= 0:
        refuse("softcap", softcap, "None, or > 0 and finite")


def check_broadcastable(name: str, x, shape, kind=jnp.floating) -> None:
    """x, if given, is of a `kind` of dtype and broadcastable to `shape`, that of the logits."""
    if x is None:
        return
    if not jnp.issubdtype(x.dtype, kind):
        refuse(name, x.dtype.name, "bool" if kind is jnp.bool_ else "of a float dtype")
    padded = (1,) * (4 - x.ndim) + x.shape
    if x.ndim > 4 or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        refuse(name, f"shape {x.shape}", f"broadcastable to [B, H, T, S] = {shape}")


def as_int32(x):
    """Integers, saturated: one beyond int32 does not come out as another's position."""
    widest, own = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return jnp.clip(x, max(widest.min, own.min), min(widest.max, own.max)).astype(jnp.int32)
