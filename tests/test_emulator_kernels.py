"""Whole Pallas kernels as AMD machine code, against numpy."""

import jax
import numpy as np
import pytest
from emulator_kernels import KERNELS

from amdgpu.emulator import emulate


def relative_error(got, want):
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    return np.sqrt(np.sum((got - want) ** 2) / np.sum(want**2))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"])
def test_kernels(arch):
    """All kernels of a chip in one context: entering and leaving it clears jax's caches."""
    failures = []
    with emulate(arch) as ran:
        for kernel in KERNELS:
            if arch not in kernel.archs:
                continue
            arguments = kernel.arguments(np.random.default_rng(0))
            before = len(ran)
            results = jax.tree.leaves(jax.jit(kernel.build())(*arguments))
            assert len(ran) == before + 1 and ran[-1].wave_instructions > 0
            wanted = jax.tree.leaves(kernel.reference(*arguments))
            for got, want in zip(results, wanted, strict=True):
                if kernel.tolerance is None:
                    ok, error = np.array_equal(got, want), "not equal"
                else:
                    error = relative_error(got, want)
                    ok = error <= kernel.tolerance
                if not ok:
                    failures.append(f"{kernel.name}: {error}")
    assert not failures
