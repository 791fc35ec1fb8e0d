"""Checks of arguments that the functions of attention share. Each raises ValueError and names the argument."""

import numbers
from typing import NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def refuse(name: str, got, allowed: str) -> NoReturn:
    raise ValueError(f"{name} must be {allowed}, got {got}")


def static_number(x):
    """A number as a Python float: others, of a strong dtype, would not promote."""
    return float(x) if isinstance(x, numbers.Real) and not isinstance(x, bool) else x


def as_array(name: str, x) -> jax.Array:
    if x is None:
        refuse(name, None, "an array")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array, got {x!r}: {error}") from error


def as_arrays(arrays: dict, required: tuple[str, ...]) -> dict:
    """By name; None stays None but for those that are required."""
    return {name: None if x is None and name not in required else as_array(name, x) for name, x in arrays.items()}


def as_integers(name: str, x, *, wraps: bool = False):
    """Integers, or None, as an int32 array. What is beyond int32 saturates, and is nobody else's position; or it wraps:
    of names, then, the lower half counts."""
    if x is None:
        return None
    # In NumPy where that can be: jax would refuse, or cut, what is wider than its own integers.
    x = as_array(name, x) if isinstance(x, jax.Array) or not is_known(x) else np.asarray(x)
    if not np.issubdtype(x.dtype, np.integer):
        return as_array(name, x)
    if not wraps:
        widest, own = np.iinfo(np.int32), np.iinfo(x.dtype)
        x = x.clip(max(widest.min, own.min), min(widest.max, own.max))
    return jnp.asarray(x.astype(np.int32))


def is_known(x) -> bool:
    """Whether the values of an argument, or of all numbers in a list, are known while tracing."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


def check_numbers(scale, softcap) -> None:
    """Python numbers (they are static) that leave fp32 room: beyond these no model is, and logits overflow."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            refuse(name, repr(value), "None or a Python number (it is static)")
    if scale is not None and not abs(scale) <= 2.0**64:
        refuse("scale", scale, "None, or finite and of at most 2**64")
    if softcap is not None and not 2.0**-60 <= softcap <= 2.0**60:
        refuse("softcap", softcap, "None, or > 0 and finite, between 2**-60 and 2**60")


def check_broadcastable(name: str, x, shape, kind=jnp.floating) -> None:
    """x, if given, is of a `kind` of dtype and broadcastable to `shape`, that of the logits."""
    if x is None:
        return
    if not jnp.issubdtype(x.dtype, kind):
        refuse(name, x.dtype.name, "bool" if kind is jnp.bool_ else "of a float dtype")
    padded = (1,) * (4 - x.ndim) + x.shape
    if x.ndim > 4 or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        refuse(name, f"shape {x.shape}", f"broadcastable to [B, H, T, S] = {shape}")


def check_choice(implementation, allowed: tuple[str, ...], config=None, kind: type | None = None) -> None:
    """`implementation` is None or one of `allowed`, and `config` None or of a kind."""
    if implementation is not None and implementation not in allowed:
        refuse("implementation", repr(implementation), f"None or one of {', '.join(map(repr, allowed))}")
    if config is not None and kind is not None and not isinstance(config, kind):
        refuse("config", repr(config), f"a {kind.__module__.split('.')[0]}.{kind.__name__} or None")


def check_heads(names: tuple[str, str, str], q, k, v, keys_and_heads: tuple[int, int]) -> None:
    """Arrays of four axes, each as the other two say; `keys_and_heads` are k's S and G."""
    (S, G), (B, _, H, K) = keys_and_heads, q.shape
    for name, x in zip(names, (q, k, v), strict=True):
        if 0 in x.shape[2:]:
            refuse(name, f"shape {x.shape}", "without an empty axis of heads or features")
    if k.shape[0] != B or k.shape[3] != K:
        refuse(names[1], f"shape {k.shape}", f"[B, S, G, K] with {names[0]}'s B = {B} and K = {K}")
    if v.shape[:3] != k.shape[:3]:
        refuse(names[2], f"shape {v.shape}", f"[B, S, G, V] with {names[1]}'s B, S, G = {(B, S, G)}")
    if H % G:
        refuse(names[0], f"H = {H} heads", f"of a multiple of {names[1]}'s G = {G} heads")


def check_integers(name: str, x, shapes: dict[tuple[int, ...], str]) -> None:
    """x, if given, holds integers, in one of the shapes; each stands beside the names of its axes."""
    if x is not None and (x.shape not in shapes or not jnp.issubdtype(x.dtype, jnp.integer)):
        allowed = " or ".join(f"{axes} = {shape}" if shape else axes for shape, axes in shapes.items())
        refuse(name, f"{x.dtype.name} {x.shape}", f"integers, {allowed}")


def is_integer(value) -> TypeGuard[int]:
    """A Python or NumPy integer; True is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)


def check_flag(name: str, value) -> bool:
    if not isinstance(value, bool | np.bool_):
        refuse(name, repr(value), "a Python bool (it is static)")
    return bool(value)


def as_bias(bias):
    """A bias as kernels take it: 16 bits, or fp32, in which what is finite in float64 stays finite."""
    if bias.dtype.itemsize == 2:
        return bias
    if bias.dtype.itemsize > 4:
        largest = float(jnp.finfo(jnp.float32).max)
        bias = jnp.where(jnp.isinf(bias), bias, jnp.clip(bias, -largest, largest))
    return bias.astype(jnp.float32)
