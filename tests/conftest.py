"""Settings that hold for the whole suite."""

import jax

# jax >= 0.11 imports this on the first interpret-mode lowering, which adds a trace-context entry: every function
# traced before would be traced once more, and tests that count traces would fail.
import jax.experimental.pallas.fuser

jax.config.update("jax_numpy_dtype_promotion", "strict")
# The programs of the suite run for milliseconds and compile for seconds.
jax.config.update("jax_disable_most_optimizations", True)
