"""The public functions of the gated delta rule: arguments checked, defaults filled in, platform chosen."""

import functools
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from amdgpu.arch import current_arch
from amdgpu.launch import by_implementation
from gated_delta import decode, grid
from gated_delta.prefill import prefill
from gated_delta.tuning import Config, default_config
from references import gated_delta as reference

DTYPES = ("bfloat16", "float16", "float32")
# A state tile [K, V / dv_splits] in fp32 has to stay in registers.
LARGEST_KEY_SIZE = 256


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    state_v_first: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[Array, Array | None]:
    """Gated delta rule over whole sequences (prefill), in chunks.

    For each batch row and head, with S the state `[K, V]`:

        S   = exp(g_t) S;   u_t = beta_t (v_t - S^T k_t);   S = S + k_t u_t^T;   o_t = scale S^T q_t

    On a GPU Pallas kernels run window by window over the sequence, with scratch bounded by the window
    (`prefill_scratch_bytes`); elsewhere the chunked reference runs. Composes with jit, vmap, grad, checkpoint, scan and
    shard_map; derivatives recompute the chunked reference from the inputs.

    Args:
      q, k: `[B, T, G, K]` in bf16, fp16 or fp32. Keys are expected with a norm of at most 1.
      v: `[B, T, H, V]` in the same dtype; H is a multiple of G, and head h reads key head `h // (H // G)`.
      g: `[B, T, H]`, natural logarithm of the decay, at most 0 (-inf: a full reset), in any float dtype.
      beta: `[B, T, H]`, step size in [0, 1], up to 2 with negative eigenvalues, in any float dtype.
      scale: factor on the output, static; `K**-0.5` by default.
      initial_state: `[B, H, K, V]`, or `[R, H, K, V]` for packed sequences, in any float dtype; zeros by default.
      output_final_state: whether to return the state after the last token.
      use_qk_l2norm_in_kernel: whether to divide q and k by `sqrt(sum(x^2) + 1e-6)`, in fp32 and unrounded.
      cu_seqlens: int32 `[R + 1]`, for R sequences packed along T in one batch row: sequence r is the tokens
        `cu_seqlens[r]` to `cu_seqlens[r + 1]`; ascending from 0. Tokens after the last one give 0.
      state_v_first: whether states are `[.., V, K]` instead.
      implementation: None (the best for the platform), "pallas" (on a CPU in interpret mode, slow) or "reference".
      config: how the kernels are cut; by default from the table in `gated_delta.tuning`.

    Returns:
      o `[B, T, H, V]` in v's dtype, and the final state in fp32, or None.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; the message names it.
      NotImplementedError: `implementation="pallas"` and K > 256.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", https://arxiv.org/abs/2412.06464, equation 10; the chunk
    form is derived in `references.gated_delta`.
    """
    options = _Options(scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first, implementation, config)
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(_check(arrays, options), options, "prefill")


def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    state_v_first: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[Array, Array | None]:
    """Gated delta rule for one to a few tokens a call (decode): token by token, state in and state out.

    On a GPU one kernel runs, which reads the state once and writes it once; it is bound by that, K V 8 bytes a head.
    The state is updated in place where the caller's jit donates it (or carries it through a scan); otherwise XLA
    copies it first. Elsewhere the chunked reference runs. Composes as `chunk_gated_delta_rule` does.

    Args:
      q, k: `[B, T, G, K]`; v: `[B, T, H, V]`; g, beta: `[B, T, H]`, T small: the tokens follow one another.
      initial_state: `[B, H, K, V]`, or `[R, H, K, V]` for packed sequences.
      config: of it, `dv_splits`, `num_warps` and `num_stages` apply.
      The rest, and dtypes and units of all: as for `chunk_gated_delta_rule`.

    Returns:
      o `[B, T, H, V]` in v's dtype, and the final state in fp32, or None: those of `chunk_gated_delta_rule`, to
      rounding.

    Raises:
      ValueError, NotImplementedError: as `chunk_gated_delta_rule`.

    Source: https://arxiv.org/abs/2412.06464, equation 10, as it stands.
    """
    options = _Options(scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first, implementation, config)
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(_check(arrays, options), options, "decode")


def prefill_scratch_bytes(
    batch: int,
    seq_len: int,
    num_heads: int,
    key_size: int,
    value_size: int,
    *,
    dtype,
    config: Config | None = None,
    num_sequences: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> int:
    """Bytes that `chunk_gated_delta_rule` allocates on a GPU besides its results.

    The buffers of one window of at most `window_chunks` chunks, whatever the length of the sequence; under
    `Config.overlap` those that the scan reads are there twice. Windows are alike, so a longer sequence may take less.
    Where more than one window runs, a carry of B H K V 4 bytes is counted too; it is not allocated where the final
    state is asked for, whose buffer serves.

    Args:
      batch, seq_len, num_heads, key_size, value_size: B, T, H, K, V.
      dtype: of q, k and v.
      config: by default that of the architecture at hand.
      num_sequences: R, for packed sequences (B = 1); the table of their chunks grows with T: 20 bytes a chunk.
      use_qk_l2norm_in_kernel: what the call gets; with it queries have factors of their own, and the scratch is larger.

    Returns:
      Bytes, without the alignment (at most 256 bytes a buffer) that an allocator adds.

    Raises:
      ValueError: a size below 0 (0 for heads and features), another dtype, a Config whose `dv_splits` does not divide
        V, B != 1 with `num_sequences`, `use_qk_l2norm_in_kernel` that is not a Python bool.
      NotImplementedError: K > 256, which the kernels do not take.
    """
    sizes = dict(batch=batch, seq_len=seq_len, num_heads=num_heads, key_size=key_size, value_size=value_size)
    for name, size in (sizes | ({} if num_sequences is None else dict(num_sequences=num_sequences))).items():
        least = 1 if name in ("num_heads", "key_size", "value_size") else 0
        if not isinstance(size, int) or size < least:
            _refuse(name, repr(size), f"an int >= {least}")
    if jnp.dtype(dtype).name not in DTYPES:
        _refuse("dtype", jnp.dtype(dtype).name, f"one of {', '.join(DTYPES)}")
    if num_sequences is not None and batch != 1:
        _refuse("batch", batch, "1 where num_sequences is given")
    _check_bool("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    _check_config(config, value_size)
    if obstacle := _obstacle(key_size):
        raise NotImplementedError(f"the Pallas kernels take {obstacle}")
    if seq_len == 0 or batch == 0 or num_sequences == 0:
        return 0
    config = default_config(current_arch(), dtype, value_size) if config is None else config
    p = grid.Problem(
        batch=batch,
        seq_len=seq_len,
        groups=num_heads,  # which have no part in scratch
        heads=num_heads,
        key_size=key_size,
        value_size=value_size,
        dtype=jnp.dtype(dtype),
        config=config,
        sequences=num_sequences,
        l2norm=use_qk_l2norm_in_kernel,
    )
    return grid.scratch_bytes(p)


class _Options(NamedTuple):
    """The static arguments."""

    scale: float | None
    output_final_state: bool
    l2norm: bool
    state_v_first: bool
    implementation: str | None
    config: Config | None


def _check(arrays: dict, options: _Options) -> dict:
    """The only validation. Returns the arrays as jax arrays; raises ValueError naming the argument."""
    arrays = {name: x if x is None else jnp.asarray(x) for name, x in arrays.items()}
    for name in ("q", "k", "v", "g", "beta"):
        if arrays[name] is None:
            _refuse(name, "None", "an array")
    q, k, v, g, beta, state, offsets = arrays.values()
    for name, x, axes in (("q", q, "[B, T, G, K]"), ("k", k, "[B, T, G, K]"), ("v", v, "[B, T, H, V]")):
        if x.ndim != 4:
            _refuse(name, f"shape {x.shape}", f"{axes}, of rank 4")
        if x.dtype.name not in DTYPES:
            _refuse(name, x.dtype.name, f"one of {', '.join(DTYPES)}")
        if x.dtype != q.dtype:
            _refuse(name, x.dtype.name, f"of q's dtype {q.dtype.name}")
    if k.shape != q.shape:
        _refuse("k", f"shape {k.shape}", f"of q's shape [B, T, G, K] = {q.shape}")
    if v.shape[:2] != q.shape[:2]:
        _refuse("v", f"shape {v.shape}", f"[B, T, H, V] with q's B, T = {q.shape[:2]}")
    (B, _, G, K), (H, V) = q.shape, v.shape[2:]
    for name, size in (("q", G), ("q", K), ("v", H), ("v", V)):
        if size == 0:
            _refuse(name, f"shape {arrays[name].shape}", "without an empty axis of heads or features")
    if H % G:
        _refuse("v", f"H = {H} heads", f"of a multiple of q's G = {G} heads")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            _refuse(name, f"shape {x.shape}", f"[B, T, H] = {v.shape[:3]} as in v (tokens before heads)")
        if not _is_float(x):
            _refuse(name, x.dtype.name, "of a float dtype of at least 16 bits")
    if offsets is not None:
        if offsets.ndim != 1 or offsets.size == 0 or offsets.dtype != jnp.int32:
            _refuse("cu_seqlens", f"{offsets.dtype.name} {offsets.shape}", "int32 of shape [R + 1]")
        if B != 1:
            _refuse("q", f"B = {B}", "of B = 1 where cu_seqlens is given")
    if state is not None:
        rows = B if offsets is None else offsets.size - 1
        expected = (rows, H, V, K) if options.state_v_first else (rows, H, K, V)
        if state.shape != expected:
            axes = "[.., H, V, K]" if options.state_v_first else "[.., H, K, V]"
            _refuse("initial_state", f"shape {state.shape}", f"{axes} = {expected}")
        if not _is_float(state):
            _refuse("initial_state", state.dtype.name, "of a float dtype of at least 16 bits")
    if options.scale is not None and not isinstance(options.scale, numbers.Real):
        _refuse("scale", repr(options.scale), "a Python number (it is static) or None")
    _check_bool("output_final_state", options.output_final_state)
    _check_bool("use_qk_l2norm_in_kernel", options.l2norm)
    _check_bool("state_v_first", options.state_v_first)
    if options.implementation not in (None, "pallas", "reference"):
        _refuse("implementation", repr(options.implementation), 'None, "pallas" or "reference"')
    _check_config(options.config, V)
    return arrays


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 2


def _refuse(name, got, allowed):
    raise ValueError(f"{name} must be {allowed}, got {got}")


def _check_bool(name: str, value) -> None:
    if not isinstance(value, bool):
        _refuse(name, repr(value), "a Python bool (it is static)")


def _check_config(config: Config | None, value_size: int) -> None:
    if config is not None:
        if not isinstance(config, Config):
            _refuse("config", repr(config), "a gated_delta.Config or None")
        config.check_splits(value_size)


def _obstacle(key_size: int) -> str | None:
    """What the Pallas kernels would need to be otherwise, if anything."""
    return None if key_size <= LARGEST_KEY_SIZE else f"key sizes up to {LARGEST_KEY_SIZE}, got K = {key_size}"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _run(arrays: dict, options: _Options, phase: str) -> tuple[Array, Array | None]:
    """The phase ("prefill" or "decode") on the platform that it is lowered for."""
    refer = functools.partial(_reference, options=options)
    launch = functools.partial(_pallas, options=options, phase=phase)
    obstacle = functools.partial(_obstacle, arrays["q"].shape[-1])
    return by_implementation(arrays, refer, launch, options.implementation, obstacle=obstacle, empty=_is_empty(arrays))


def _is_empty(arrays: dict) -> bool:
    sequences = arrays["cu_seqlens"]
    return arrays["v"].size == 0 or (sequences is not None and sequences.size == 1)


def _reference(arrays: dict, options: _Options):
    # No chunk longer than the call: a decoded token is a chunk of its own, not one of 64 with a 64 x 64 inverse.
    tokens = arrays["q"].shape[1]
    return reference.chunk_gated_delta_rule(
        **arrays,
        scale=None if options.scale is None else float(options.scale),
        output_final_state=options.output_final_state,
        use_qk_l2norm_in_kernel=options.l2norm,
        state_v_first=options.state_v_first,
        chunk_size=64 if tokens > 32 else 1 << max(tokens - 1, 0).bit_length(),
    )


def _pallas(arrays: dict, options: _Options, phase: str, platform: str | None):
    (B, T, G, K), (H, V) = arrays["q"].shape, arrays["v"].shape[2:]
    offsets = arrays["cu_seqlens"]
    architecture = _architecture(platform)
    config = options.config or default_config(architecture or "", arrays["v"].dtype, V)
    problem = grid.Problem(
        batch=B,
        seq_len=T,
        groups=G,
        heads=H,
        key_size=K,
        value_size=V,
        dtype=arrays["v"].dtype,
        config=config,
        sequences=None if offsets is None else offsets.size - 1,
        has_initial=arrays["initial_state"] is not None,
        keeps_states=options.output_final_state,
        state_v_first=options.state_v_first,
        l2norm=options.l2norm,
    )
    operands = {name: x for name, x in arrays.items() if x is not None}
    scale = K**-0.5 if options.scale is None else float(options.scale)
    # Kernels count in int32 whatever the caller's default.
    with jax.enable_x64(False):
        if phase == "decode":
            return decode.decode(problem, operands, scale=scale, architecture=architecture)
        if offsets is not None:
            operands["table"] = grid.chunk_table(offsets, T, config.chunk_size)
        return prefill(problem, operands, scale=scale, architecture=architecture)


def _architecture(platform: str | None) -> str | None:
    """The architecture that a branch for `platform` is lowered for, as far as it is known; None for interpret mode."""
    if platform is None:
        return None
    prefix = {"rocm": "gfx", "cuda": "sm"}[platform]
    return current_arch() if current_arch().startswith(prefix) else prefix
