"""Random arrays of a given dtype."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

# numpy draws small arrays without compiling anything; jax draws large ones on the device.
_LARGEST_ON_HOST = 1 << 22


def generator(name: str, seed: int) -> np.random.Generator:
    """A generator of its own for each case, the same one each time."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def as_array(x: np.ndarray, dtype: str = "float32") -> jax.Array:
    """`x` in `dtype`. The cast is numpy's, since one of jax's would be compiled for each shape."""
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, factor: float = 1.0) -> jax.Array:
    """Normal values of standard deviation `factor`."""
    if np.prod(shape, dtype=np.int64) > _LARGEST_ON_HOST:
        key = jax.random.key(int(rng.integers(1 << 31)))
        return (jax.random.normal(key, shape, jnp.float32) * factor).astype(dtype)
    return as_array(rng.standard_normal(shape, np.float32) * np.float32(factor), dtype)


def unit(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal values divided by their norm over the last axis."""
    return unit_norm(normal(rng, shape, "float32"), dtype)


def unit_norm(x: jax.Array, dtype: str) -> jax.Array:
    """fp32 `x` divided by its norm over the last axis."""
    if x.size > _LARGEST_ON_HOST:
        return (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))).astype(dtype)
    on_host = np.asarray(x)
    return as_array(on_host / np.sqrt(np.sum(on_host * on_host, axis=-1, keepdims=True)), dtype)
