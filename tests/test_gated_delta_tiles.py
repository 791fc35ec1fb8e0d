"""Tiles that pass through the matrix unit only to come out elsewhere: to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import tiles


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", None])
def test_transposed(architecture, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 16)) * 2.0 ** rng.integers(-14, 15, (32, 16))
    x = jnp.asarray(x, jnp.float32).astype(dtype).at[3, 5].set(jnp.finfo(dtype).max)
    result = tiles.transposed(x, architecture)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, x.T.astype(jnp.float32))


def test_a_nan_stays_in_its_row():
    """Its token's: nothing of an earlier or a later one is lost."""
    x = jnp.ones((32, 16), jnp.bfloat16).at[7, 3].set(jnp.nan)
    np.testing.assert_array_equal(np.isnan(tiles.transposed(x, "sm_90")), np.broadcast_to(np.arange(32) == 7, (16, 32)))


def test_terms_add_up():
    """Factors from exp(-60) to 1 / sqrt(1e-6), each with all of its 24 bits."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.exp(rng.uniform(-60, 7, 64)), jnp.float32).at[5].set(0.0)
    tile = tiles.terms_of_rows(x)
    assert tile.shape == (16, 64) and tile.dtype == jnp.bfloat16
    result = tiles.sum_of_terms(tile, 32)
    np.testing.assert_array_equal(result, np.broadcast_to(x, (32, 64)))
