"""Qwen3-Next's path from hidden states to the inputs of the gated delta rule.

    [q | k | v] = silu(conv(W_qkv x))        conv: causal, depthwise, 4 taps, no bias
    beta = sigmoid(W_b x)
    g    = -exp(A_log) softplus(W_a x + dt_bias)

l2norm of q and k belongs to the rule itself (`use_qk_l2norm_in_kernel`). The output gate z and the output
projection come after the rule and are left out. Source: `Qwen3NextGatedDeltaNet` in
https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen3_next/modeling_qwen3_next.py.
The model has G 16, H 32, K = V = 128 on hidden states of 2048; here the same path is run at any size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from references.cases.gated_delta import gate_parameters

CONV_TAPS = 4


class Layer(NamedTuple):
    """Weights of the path, fp32; D is the width of the hidden states.

    qkv: [D, 2 G K + H V] · conv: [4, 2 G K + H V], the last tap is the token itself · b, a: [D, H] ·
    A_log, dt_bias: [H]
    """

    qkv: jax.Array
    conv: jax.Array
    b: jax.Array
    a: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array


class Inputs(NamedTuple):
    """q and k: [B, T, G, K] · v: [B, T, H, V] · fp32 g and beta: [B, T, H]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def random_layer(seed: int, hidden: int, G: int, H: int, K: int, V: int) -> Layer:
    """Weights from a seed.

    Projections are normal with deviation hidden**-0.5, taps uniform in (-1/2, 1/2) (PyTorch's default for 4
    taps). A_log and dt_bias are those of the cases (`gate_parameters`), so that heads forget over anything from
    one token to thousands. (The model's own code starts at dt_bias = 1, where every head forgets within a token
    or two: nothing would be carried from chunk to chunk.)
    """
    rng = np.random.default_rng(seed)
    channels = 2 * G * K + H * V
    values = (
        rng.normal(0, hidden**-0.5, (hidden, channels)),
        rng.uniform(-0.5, 0.5, (CONV_TAPS, channels)),
        rng.normal(0, hidden**-0.5, (hidden, H)),
        rng.normal(0, hidden**-0.5, (hidden, H)),
        *gate_parameters(rng, H),
    )
    return Layer(*(jnp.asarray(value, jnp.float32) for value in values))


def causal_conv(x: jax.Array, taps: jax.Array) -> jax.Array:
    """y_t = sum_j taps[j] x_{t - 3 + j} per channel, zeros before the first token: [B, T, channels]."""
    T = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (CONV_TAPS - 1, 0), (0, 0)))
    return sum((taps[j] * padded[:, j : j + T] for j in range(CONV_TAPS)), start=jnp.zeros_like(x))


def gated_delta_inputs(layer: Layer, hidden: jax.Array, G: int, K: int, dtype: jnp.dtype) -> Inputs:
    """The rule's inputs for hidden states [B, T, D]: q, k, v in `dtype`, g and beta in fp32."""
    B, T, _ = hidden.shape
    H = layer.A_log.shape[0]
    channels = jax.nn.silu(causal_conv(hidden @ layer.qkv, layer.conv))
    q, k, v = jnp.split(channels, [G * K, 2 * G * K], axis=-1)
    return Inputs(
        q=q.reshape(B, T, G, K).astype(dtype),
        k=k.reshape(B, T, G, K).astype(dtype),
        v=v.reshape(B, T, H, -1).astype(dtype),
        g=-jnp.exp(layer.A_log) * jax.nn.softplus(hidden @ layer.a + layer.dt_bias),
        beta=jax.nn.sigmoid(hidden @ layer.b),
    )
