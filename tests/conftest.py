"""Settings that hold for the whole suite."""

import os
from pathlib import Path

import jax

# jax >= 0.11 imports this on the first interpret-mode lowering, which adds a trace-context entry: every function
# traced before would be traced once more, and tests that count traces would fail.
import jax.experimental.pallas.fuser
import jaxlib.version
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# The programs of the suite run for milliseconds and compile for seconds.
jax.config.update("jax_disable_most_optimizations", True)
# Half the time of compilation. jaxlib 0.11 lost the flag, and a process ends at a flag that it does not know.
if jaxlib.version.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

MAPS = Path("/proc/self/maps")  # of Linux


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """After a test that leaves many memory maps.

    XLA maps memory for each program that it compiles, some hundred maps for a kernel in interpret mode, and a process
    has room for 65530 (Linux's default): thousands of programs end in a segmentation fault.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def fresh_traces():
    """For tests that change what is traced: nothing traced before them is found in them, nor theirs after them."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def optimized():
    """For programs that are large, and that are to be compiled as a user would."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_modifyitems(config, items):
    """Deselects the tests marked `gpu` where jax has no GPU."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu and jax.default_backend() != "gpu":
        config.hook.pytest_deselected(items=of_gpu)
        items[:] = [item for item in items if item not in of_gpu]
