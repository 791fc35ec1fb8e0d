"""What is true: each algorithm in plain `jax.numpy` and `lax`, the cases to try it on, and how far off one may be."""
