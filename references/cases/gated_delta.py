"""Cases of the gated delta rule."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from references.cases import draw


@dataclass(frozen=True)
class GatedDeltaCase:
    """One call of `chunk_gated_delta_rule` or `recurrent_gated_delta_rule`, with the final state asked for.

    Letters: batch B, tokens T, key heads G, value heads H, head sizes K and V.
    """

    name: str
    # where the shape or the values come from
    source: str
    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    # of q, k and v
    dtype: str = "float32"
    # a number: the same gate everywhere. Else
    #   "model"    g = -exp(A_log) softplus(a + dt_bias), a normal, the rest from `gate_parameters`
    #   "sparse"   the same, two thirds of it zeroed
    #   "strong16", "strong64"   -316 at every 16th or 64th token, -0.01 elsewhere
    #   "reset"    -inf at token 5, -0.01 elsewhere
    gates: str | float = "model"
    # a number, or "model": sigmoid(b), or "double": 2 sigmoid(b)
    beta: str | float = "model"
    # "unit": independent unit vectors; "raw": of any length, some of them zero (for l2norm); "correlated":
    # unit vectors around a common one; "repeated": one unit vector; "one_hot": key head j holds unit vector j
    keys: str = "unit"
    # None, "normal", or "large": an entry of 65536 among normal ones
    state: str | None = "normal"
    state_dtype: str = "float32"
    l2norm: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    state_v_first: bool = False
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name


def inputs(case: GatedDeltaCase) -> dict:
    """Arguments of `chunk_gated_delta_rule`."""
    rng = draw.generator(case.name, case.seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    q, k = _queries_and_keys(rng, case)
    v = draw.normal(rng, (B, T, H, V), case.dtype)
    g, beta = _gates(rng, case), _beta(rng, case)
    rows = B if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    state = None
    if case.state is not None:
        shape = (rows, H, V, K) if case.state_v_first else (rows, H, K, V)
        state = np.array(draw.normal(rng, shape, "float32"))
        if case.state == "large":
            state[0, 0, 1, 2] = 65536.0
        state = draw.as_array(state, case.state_dtype)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": case.scale,
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "cu_seqlens": None if case.cu_seqlens is None else jnp.asarray(case.cu_seqlens, jnp.int32),
        "state_v_first": case.state_v_first,
    }


def _queries_and_keys(rng, case) -> tuple[jax.Array, jax.Array]:
    shape = (case.B, case.T, case.G, case.K)
    if case.keys == "raw":
        q, k = (np.array(draw.normal(rng, shape, case.dtype, 3.0)) for _ in range(2))
        # every seventh a zero vector
        q[:, ::7], k[:, 3::7] = 0, 0
        return jnp.asarray(q), jnp.asarray(k)
    q = draw.unit(rng, shape, case.dtype)
    if case.keys == "unit":
        return q, draw.unit(rng, shape, case.dtype)
    if case.keys == "one_hot":
        one_hot = draw.as_array(np.broadcast_to(np.eye(case.G, case.K), shape), case.dtype)
        return one_hot, one_hot
    common = np.asarray(draw.unit(rng, (case.B, 1, case.G, case.K), "float32"))
    spread = {"repeated": 0.0, "correlated": 0.5 * case.K**-0.5}[case.keys]
    around = np.asarray(draw.normal(rng, shape, "float32", spread))
    return q, draw.unit_norm(jnp.asarray(common + around), case.dtype)


def gate_parameters(rng: np.random.Generator, H: int) -> tuple[np.ndarray, np.ndarray]:
    """A_log and dt_bias `[H]` in float64 of the gate g = -exp(A_log) softplus(a + dt_bias), as an untrained layer has.

    A = exp(A_log) is uniform in (0, 16) and softplus(dt_bias), the step at a = 0, log-uniform in (0.001, 0.1): heads
    forget within a token or remember thousands. Source: `GatedDeltaNet.__init__` in
    https://github.com/fla-org/flash-linear-attention/blob/main/fla/layers/gated_deltanet.py.
    """
    # Not from 0 on, whose logarithm is -inf.
    A_log = np.log(rng.uniform(1e-3, 16.0, H))
    step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), H))
    # softplus(x) = step  <=>  x = log(exp(step) - 1) = step + log(1 - exp(-step))
    return A_log, step + np.log(-np.expm1(-step))


def _gates(rng, case) -> jax.Array:
    shape, H = (case.B, case.T, case.H), case.H
    if isinstance(case.gates, float):
        return draw.as_array(np.full(shape, case.gates))
    if case.gates in ("model", "sparse"):
        A_log, dt_bias = gate_parameters(rng, H)
        a = rng.standard_normal(shape)
        g = -np.exp(A_log) * np.logaddexp(a + dt_bias, 0.0)
        if case.gates == "sparse":
            g = np.where(rng.random(shape) < 2 / 3, 0.0, g)
        return draw.as_array(g)
    g = np.full(shape, -0.01, np.float32)
    if case.gates == "reset":
        g[:, 5] = -np.inf
    else:
        g[:, :: {"strong16": 16, "strong64": 64}[case.gates]] = -316.0
    return jnp.asarray(g)


def _beta(rng, case) -> jax.Array:
    shape = (case.B, case.T, case.H)
    if isinstance(case.beta, float):
        return draw.as_array(np.full(shape, case.beta))
    sigmoid = 1 / (1 + np.exp(-rng.standard_normal(shape)))
    return draw.as_array({"model": 1, "double": 2}[case.beta] * sigmoid)


def flops(case: GatedDeltaCase) -> int:
    """The chunk form's matmuls, with chunks of 64 tokens (or of T, where it is less), no inverse."""
    C = min(64, case.T)
    per_token = case.H * (3 * case.K * case.V + 2 * C * case.V) + case.G * 2 * C * case.K
    return 2 * case.B * case.T * per_token


def bytes_moved(case: GatedDeltaCase) -> int:
    """q, k, v, g, beta and the initial state read, o and the final state written."""
    item = jnp.dtype(case.dtype).itemsize
    tokens = case.B * case.T
    rows = case.B if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    states = rows * case.H * case.K * case.V
    moved = tokens * (2 * case.G * case.K + 2 * case.H * case.V) * item + tokens * 2 * case.H * 4 + states * 4
    return moved if case.state is None else moved + states * jnp.dtype(case.state_dtype).itemsize


_QWEN = "Qwen3-Next-80B-A3B-Instruct, config.json: 16 key and 32 value heads of 128"
_PROMPT = "hip-ep 627: Qwen3-Next-80B-A3B with the key heads repeated, a prompt of 18,778 tokens"
_PROMPTS = (0, 3000, 3001, 11000, 18778)
_SLOW = "a slow decay, with which a fault in the carried state shows"
_STRONG = "gates that trained checkpoints reach"
_AITER = "aiter 4952"
# a decay of 1e-12
_1E_12 = -27.631021

# Small cases share shapes wherever their point is something else: each new shape is a new compilation.

_SHAPES = "one chunk, several chunks, several batch rows"

GATED_DELTA_SMALL = (
    GatedDeltaCase("one_head", _SHAPES, 1, 64, 1, 1, 16, 16, state=None),
    GatedDeltaCase("grouped", _SHAPES, 2, 65, 1, 2, 32, 16),
    GatedDeltaCase("two_key_heads", _SHAPES, 1, 128, 2, 4, 16, 32, state=None),
    GatedDeltaCase("size_128", _QWEN, 1, 160, 1, 2, 128, 128),
    GatedDeltaCase("size_128_bf16", _QWEN, 1, 160, 1, 2, 128, 128, "bfloat16"),
    GatedDeltaCase("size_128_fp16", _QWEN, 1, 160, 1, 2, 128, 128, "float16"),
    GatedDeltaCase("slow_decay", _SLOW, 1, 160, 1, 2, 32, 32, gates=-1e-3),
    GatedDeltaCase("slow_decay_bf16", _SLOW, 1, 160, 1, 2, 32, 32, "bfloat16", -1e-3),
    GatedDeltaCase("slow_decay_fp16", _SLOW, 1, 160, 1, 2, 32, 32, "float16", -1e-3),
    GatedDeltaCase("l2norm", _SHAPES, 1, 96, 1, 2, 32, 32, keys="raw", l2norm=True),
    GatedDeltaCase("l2norm_bf16", _SHAPES, 1, 96, 1, 2, 32, 32, "bfloat16", keys="raw", l2norm=True, state=None),
    GatedDeltaCase("l2norm_fp16", _SHAPES, 1, 96, 1, 2, 32, 32, "float16", keys="raw", l2norm=True),
    GatedDeltaCase("packed", _SHAPES, 1, 90, 1, 2, 16, 24, cu_seqlens=(0, 16, 30, 64, 65, 80, 90)),
    GatedDeltaCase("v_first", _SHAPES, 2, 65, 1, 2, 32, 16, state_v_first=True),
)

_RAGGED = "lengths around the chunk sizes 16, 32, 64"
_SIZES = "FlashQLA 24: head sizes that are no power of two"
_PACKED = "packed sequences, empty ones among them"
_NEGATIVE = "negative eigenvalues, arXiv:2411.12537"
_TEXT = "keys of text"

GATED_DELTA_ODD = (
    *(GatedDeltaCase(f"T_{T}", _RAGGED, 1, T, 1, 2, 16, 16) for T in (1, 2, 15, 17, 33, 63, 65, 129)),
    GatedDeltaCase("T_0", "no token", 2, 0, 1, 2, 16, 16),
    GatedDeltaCase("K_48_V_40", _SIZES, 1, 40, 1, 2, 48, 40),
    GatedDeltaCase("K_96_V_64", _SIZES, 1, 70, 1, 1, 96, 64),
    GatedDeltaCase("K_160_V_128", _SIZES, 1, 40, 1, 1, 160, 128),
    GatedDeltaCase("K_20_V_12_bf16", _SIZES, 1, 50, 1, 1, 20, 12, "bfloat16"),
    GatedDeltaCase("heads_6_of_2", "H // G = 3", 1, 40, 2, 6, 16, 16, state=None),
    GatedDeltaCase("heads_2_of_2", "H // G = 1", 1, 40, 2, 2, 16, 16, state=None),
    GatedDeltaCase("aprender_3527", "aprender 3527", 1, 128, 2, 4, 16, 32, gates=-0.1, keys="one_hot", state=None),
    GatedDeltaCase("scale", "a scale of one's own", 1, 64, 1, 2, 16, 16, scale=0.7),
    # gates
    GatedDeltaCase("fla_99_111", "fla 99, 111", 1, 64, 1, 2, 16, 16, gates=-20.0),
    GatedDeltaCase("fla_104", "fla 104", 1, 160, 1, 2, 32, 32, gates=0.0),
    GatedDeltaCase("fla_389", "fla 389", 1, 160, 1, 2, 32, 32, gates="sparse"),
    GatedDeltaCase("executorch_21417", "executorch 21417", 1, 64, 1, 2, 16, 16, gates=_1E_12),
    GatedDeltaCase("lattice_716", "lattice 716", 1, 160, 1, 2, 32, 32, gates=_1E_12),
    GatedDeltaCase("fla_794", "fla 794", 1, 65, 1, 2, 16, 16, gates=-20.0),
    GatedDeltaCase("lattice_235", "lattice 235", 1, 64, 1, 2, 16, 16, gates="reset"),
    GatedDeltaCase("strong_64", _STRONG, 1, 160, 1, 2, 32, 32, gates="strong64"),
    GatedDeltaCase("strong_16", _STRONG, 1, 160, 1, 2, 32, 32, gates="strong16"),
    GatedDeltaCase("strong_64_bf16", _STRONG, 1, 160, 1, 2, 32, 32, "bfloat16", "strong64"),
    GatedDeltaCase("strong_16_fp16", _STRONG, 1, 160, 1, 2, 32, 32, "float16", "strong16"),
    GatedDeltaCase("fla_885", "fla 885", 1, 2, 1, 2, 16, 16, gates=-0.5),
    GatedDeltaCase("sparkinfer_604", "sparkinfer 604", 1, 33, 1, 2, 16, 16, gates=-0.1),
    # keys and beta
    GatedDeltaCase("aiter_4952", _AITER, 1, 64, 1, 2, 16, 16, "float32", -1e-3, 0.835, "repeated"),
    GatedDeltaCase("beta_1.9", _AITER, 1, 64, 1, 2, 16, 16, "float32", 0.0, 1.9, "repeated"),
    GatedDeltaCase("aiter_4952_bf16", _AITER, 1, 160, 1, 2, 32, 32, "bfloat16", -1e-3, 0.835, "repeated"),
    GatedDeltaCase("correlated", _TEXT, 1, 160, 1, 2, 32, 32, keys="correlated"),
    GatedDeltaCase("correlated_bf16", _TEXT, 1, 160, 1, 2, 32, 32, "bfloat16", keys="correlated"),
    GatedDeltaCase("correlated_fp16", _TEXT, 1, 160, 1, 2, 32, 32, "float16", keys="correlated"),
    GatedDeltaCase("beta_to_2", _NEGATIVE, 1, 160, 1, 2, 32, 32, beta="double"),
    GatedDeltaCase("beta_to_2_bf16", _NEGATIVE, 1, 160, 1, 2, 32, 32, "bfloat16", beta="double"),
    # states
    GatedDeltaCase("ollama_15865", "ollama 15865", 1, 160, 1, 2, 32, 32, "bfloat16"),
    GatedDeltaCase("attention_gym_464", "attention-gym 464", 1, 160, 1, 2, 32, 32, "float16", state="large"),
    GatedDeltaCase("sgl_640_zero", "sgl-kernel-npu 640", 1, 40, 1, 2, 48, 40, state=None),
    GatedDeltaCase("sgl_640_state", "sgl-kernel-npu 640", 1, 40, 1, 2, 48, 40, gates=-0.1),
    GatedDeltaCase("state_bf16", "a state in 16 bits", 1, 40, 1, 1, 32, 16, state_dtype="bfloat16"),
    GatedDeltaCase("ollama37_23", "ollama37 23", 2, 65, 1, 2, 32, 16, gates=-1e-3),
    # packed
    GatedDeltaCase("flashinfer_3536", "flashinfer 3536", 1, 5, 1, 1, 16, 24, cu_seqlens=(0, 0, 5)),
    GatedDeltaCase("no_sequence", "flashinfer 3536", 1, 5, 1, 1, 16, 24, cu_seqlens=(0,), state=None),
    GatedDeltaCase("empty_sequences", _PACKED, 1, 90, 1, 2, 16, 24, cu_seqlens=(0, 0, 1, 1, 34, 90, 90)),
    GatedDeltaCase("tokens_of_none", _PACKED, 1, 90, 1, 2, 16, 24, cu_seqlens=(0, 17, 40, 41, 41, 69, 70)),
    GatedDeltaCase("packed_from_zero", _PACKED, 1, 70, 1, 1, 16, 24, gates=-1e-3, cu_seqlens=(0, 32, 70), state=None),
    GatedDeltaCase("one_token_each", "fla 1077, cut down", 1, 40, 1, 1, 16, 24, cu_seqlens=tuple(range(41))),
    GatedDeltaCase("packed_bf16", _PACKED, 1, 90, 1, 2, 16, 24, "bfloat16", cu_seqlens=(0, 33, 80)),
    GatedDeltaCase(
        "packed_l2norm", _PACKED, 1, 70, 1, 2, 16, 24, l2norm=True, cu_seqlens=(0, 33, 70), state_v_first=True
    ),
)

GATED_DELTA_REAL = (
    *(
        GatedDeltaCase(f"qwen3_next_T{T}", _QWEN, 1, T, 16, 32, 128, 128, "bfloat16", state=None)
        for T in (18778, 2048, 4096, 16384, 32768)
    ),
    GatedDeltaCase("prompt_18778", _PROMPT, 1, 18778, 32, 32, 128, 128, "bfloat16", state=None),
    GatedDeltaCase("prompt_18778_fp16", _PROMPT, 1, 18778, 32, 32, 128, 128, "float16", state=None),
    GatedDeltaCase("prompt_18778_fp32", _PROMPT, 1, 18778, 32, 32, 128, 128, state=None),
    GatedDeltaCase("qwen3_next_B8_T2048", _QWEN, 8, 2048, 16, 32, 128, 128, "bfloat16", state=None),
    GatedDeltaCase("qwen3_next_packed", _QWEN, 1, 18778, 16, 32, 128, 128, "bfloat16", cu_seqlens=_PROMPTS),
    GatedDeltaCase("qwen3_next_decode_B1", _QWEN, 1, 1, 16, 32, 128, 128, "bfloat16"),
    GatedDeltaCase("qwen3_next_decode_B64", _QWEN, 64, 1, 16, 32, 128, 128, "bfloat16"),
    GatedDeltaCase(
        "fla_1077", "fla 1077", 1, 3000, 32, 32, 32, 32, "bfloat16", cu_seqlens=tuple(range(3001)), state=None
    ),
)
