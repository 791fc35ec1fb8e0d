"""The public functions of flash attention: arguments checked, defaults filled in, platform chosen."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from amdgpu.arch import current_arch, xcds
from amdgpu.launch import by_implementation
from flash import grid, kernel
from flash.arguments import (
    as_arrays,
    as_bias,
    as_integers,
    check_broadcastable,
    check_choice,
    check_flag,
    check_heads,
    check_integers,
    check_numbers,
    is_integer,
    is_known,
    refuse,
    static_number,
)
from flash.tuning import (
    KEYS_FOR_A_FIXED_MAXIMUM,
    LARGEST_KEY_SIZE,
    LARGEST_VALUE_SIZE,
    Config,
    default_config,
    default_splits,
)
from references import flash as reference

DTYPES = ("bfloat16", "float16", "float32", "float64")
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz")
# jax's lowering of Pallas kernels has no cast from e4m3fnuz.
PALLAS_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> Array | tuple[Array, Array]:
    """Softmax attention that never holds the `T x S` logits.

    For each batch row and head, over the keys j that a row may see:

        s = scale q.k_j;   s = softcap tanh(s / softcap);   s = s + bias
        o = softmax(s) v;   lse = log(sum exp(s))

    Logits, maximum, sum and accumulator are fp32. A row that sees no key gives 0, lse -inf and finite
    gradients. Keys that no row may see are never used, not even where they are NaN; a key that some rows see
    must be finite. On a GPU one Pallas kernel runs, or two: where few rows read many keys (split keys, and a merge),
    and where a maximum may be fixed (`Config.fixed_maximum`); elsewhere the blocked reference. Composes with jit, vmap,
    grad, checkpoint, scan and shard_map; derivatives recompute the reference from the inputs.

    Args:
      q: `[B, T, H, K]` in bf16, fp16, fp32 (float64: on the reference only), or e4m3 with scales.
      k: `[B, S, G, K]` in q's dtype; head h reads key head `h // (H // G)`.
      v: `[B, S, G, V]` in q's dtype; V may differ from K.
      causal: row t sees the keys `j <= t + L - T`, where L is `kv_lengths[b]`, or S without it: aligned
        bottom-right, as in FlashAttention from 2.1 on. `dot_product_attention` aligns top-left, like
        `jax.nn`'s.
      scale: factor of the logits, static; `K**-0.5` by default.
      bias: any float dtype, broadcastable to `[B, H, T, S]`, added after the cap. -inf hides a key.
      softcap: cap on the logits, static, > 0; none by default.
      q_segment_ids: integers `[B, T]`, given together with kv_segment_ids: a row sees the keys of its own
        segment. Of 64-bit ids the lower half counts.
      kv_segment_ids: integers `[B, S]`.
      kv_lengths: integers `[B]`, the valid keys of each batch row; keys from there on are hidden.
      q_scale: scalar, what an fp8 q is to be multiplied with; k_scale and v_scale likewise.
      k_scale: scalar.
      v_scale: scalar.
      return_lse: whether to return the natural logarithm of the softmax's denominator too.
      implementation: None (the best for the platform), "pallas" (on a CPU in interpret mode, slow) or "reference".
      config: how the kernels are cut; by default from the table in `flash.tuning`.

    Returns:
      o `[B, T, H, V]` in v's dtype (bf16 where v is fp8), or (o, lse) with lse `[B, T, H]` in fp32.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; the message names it. Values of kv_lengths
        are checked where they are known at trace time.
      NotImplementedError: `implementation="pallas"`, and K > 576, V > 512, a dtype of float64 or e4m3fnuz, or an array
        of bytes with 2^31 elements or more.

    Source: Dao, Fu, Ermon, Rudra, Re, "FlashAttention", https://arxiv.org/abs/2205.14135, and Dao,
    "FlashAttention-2", https://arxiv.org/abs/2307.08691; softcap as in Gemma 2,
    https://arxiv.org/abs/2408.00118.
    """
    arrays = dict(
        q=q,
        k=k,
        v=v,
        bias=bias,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    flags = check_flag("causal", causal), check_flag("return_lse", return_lse)
    options = _Options(flags[0], static_number(scale), static_number(softcap), flags[1])
    check_choice(implementation, ("pallas", "reference"), config, Config)
    return _flash_attention(_check_flash(arrays, options), options, implementation, config)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention` without the `T x S` logits: replace the import, and nothing else.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html

    The same arguments, and wherever inputs are finite and a row sees some key the same results. Three differences:

    - a row that sees no key gives 0 (`jax.nn`: the mean of the values);
    - keys that no row sees are never used, not even where they are NaN;
    - the residual is always fp32 (`jax.nn`: of key's dtype); a row that sees no key has -inf.

    Args:
      query: `[B, T, H, K]` or `[T, H, K]` in bf16, fp16, fp32 or float64.
      key: `[B, S, G, K]` or `[S, G, K]` in query's dtype; head h reads key head `h // (H // G)`.
      value: `[B, S, G, V]` or `[S, G, V]` in query's dtype; V may differ from K, unlike in `jax.nn`.
      bias: any float dtype, broadcastable to `[B, H, T, S]`, added to the scaled logits.
      mask: bool, broadcastable likewise; True takes part.
      scale: factor of the logits, `K**-0.5` by default.
      is_causal: row t sees the keys `j <= t`: aligned top-left whatever the lengths. `flash_attention` aligns
        bottom-right.
      query_seq_lengths: integers `[B]`; rows from there on give 0.
      key_value_seq_lengths: integers `[B]`; keys from there on are hidden.
      local_window_size: `(left, right)`, or one int for both: row t sees keys from `t - left` to `t + right`.
      implementation: None (the best for the platform), "pallas" (on a CPU in interpret mode, slow) or "reference";
        "xla" and "cudnn" call `jax.nn`.
      return_residual: whether to return the natural logarithm of the softmax's denominator too. As in
        `jax.nn`, no gradient flows through it.

    Returns:
      The output, shaped as query but for V, in value's dtype; or (output, residual), where the residual is
      `[B, T, H]` or `[T, H]`.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; the message names it.
      NotImplementedError: `implementation="pallas"`, and K > 576, V > 512, a dtype of float64 or a mask with 2^31
        elements or more.
    """
    check_choice(implementation, ("pallas", "reference", "xla", "cudnn"))
    if implementation in ("xla", "cudnn"):
        others: dict[str, Any] = dict(
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
        return jax.nn.dot_product_attention(query, key, value, bias, mask, **others)
    arrays = dict(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    arrays = _check_dot_product(arrays, local_window_size)
    window = None
    if local_window_size is not None:
        # Beyond 2^30 neither side reaches further, and positions plus a side stay int32.
        left, right = (min(max(int(side), -(2**30)), 2**30) for side in _sides(local_window_size))
        window = left, right
    # A Python number is static.
    static_scale = float(scale) if isinstance(scale, numbers.Real) else None
    if static_scale is not None:
        check_numbers(static_scale, None)
        arrays["scale"] = None
    flags = check_flag("is_causal", is_causal), check_flag("return_residual", return_residual)
    options = _NnOptions(static_scale, flags[0], window, flags[1])
    return _dot_product_attention(arrays, options, implementation)


class _Options(NamedTuple):
    """The static arguments of flash_attention that say what is computed."""

    causal: bool
    scale: float | None
    softcap: float | None
    return_lse: bool


class _NnOptions(NamedTuple):
    """The static arguments of dot_product_attention that say what is computed."""

    # None: the default, or an array.
    scale: float | None
    is_causal: bool
    local_window_size: tuple[int, int] | None
    return_residual: bool


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _flash_attention(arrays: dict, options: _Options, implementation: str | None, config: Config | None):
    def refer(arrays):
        return reference.flash_attention(**arrays, **options._asdict())

    def launch(arrays, platform):
        operands = dict(arrays)
        q_scale, k_scale, v_scale = (operands.pop(f"{name}_scale") for name in "qkv")
        factors = [x.astype(jnp.float32) for x in (q_scale, k_scale) if x is not None]
        operands["logit_factor"] = math.prod(factors) if factors else None
        operands["value_factor"] = v_scale
        positions = _Positions(right=0 if options.causal else None, bottom_right=options.causal)
        results = _pallas(operands, positions, options.scale, options.softcap, options.return_lse, config, platform)
        return (results["o"], results["lse"]) if options.return_lse else results["o"]

    return _run(arrays, [arrays[name] for name in "qkv"], None, refer, launch, implementation)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dot_product_attention(arrays: dict, options: _NnOptions, implementation: str | None):
    query, value = arrays["query"], arrays["value"]

    def refer(arrays):
        scale = arrays["scale"] if options.scale is None else options.scale
        return reference.dot_product_attention(**arrays | options._asdict() | {"scale": scale})

    def launch(arrays, platform):
        q, k, v = (x if x.ndim == 4 else x[None] for x in (arrays["query"], arrays["key"], arrays["value"]))
        operands = dict(
            q=q,
            k=k,
            v=v,
            bias=arrays["bias"],
            mask=arrays["mask"],
            query_lengths=arrays["query_seq_lengths"],
            kv_lengths=arrays["key_value_seq_lengths"],
            logit_factor=arrays["scale"],
        )
        scale = options.scale if arrays["scale"] is None else 1.0
        positions = _window(options, q.shape[1], k.shape[1])
        results = _pallas(operands, positions, scale, None, options.return_residual, None, platform)
        o = results["o"].reshape(*query.shape[:-1], value.shape[-1])
        return (o, results["lse"].reshape(query.shape[:-1])) if options.return_residual else o

    return _run(arrays, [query, arrays["key"], value], arrays["mask"], refer, launch, implementation)


def _run(arrays: dict, qkv: list, mask, refer: Callable, launch: Callable, implementation: str | None):
    """Kernels or the reference, as `by_implementation` says."""
    q, k, v = qkv
    obstacle, empty = functools.partial(_obstacle, q, k, v, mask), 0 in (q.size, k.size)
    return by_implementation(arrays, refer, launch, implementation, obstacle=obstacle, empty=empty)


def _obstacle(q, k, v, mask) -> str | None:
    """What the Pallas kernels would need to be otherwise, if anything."""
    for name, x, largest in (("K", q, LARGEST_KEY_SIZE), ("V", v, LARGEST_VALUE_SIZE)):
        if x.shape[-1] > largest:
            return f"head sizes {name} up to {largest}, got {name} = {x.shape[-1]}"
    if q.dtype.name not in PALLAS_DTYPES:
        return f"{', '.join(PALLAS_DTYPES)}, got {q.dtype.name}"
    # Their offsets are 64-bit from 2^32 bytes on, which is too late for elements of one byte.
    for x in (q, k, v, mask):
        if x is not None and x.dtype.itemsize == 1 and x.size >= 2**31:
            return f"arrays of bytes of less than 2^31 elements, got {x.dtype.name} {x.shape}"
    return None


def _sides(window) -> tuple | list:
    """(left, right) of a `local_window_size`."""
    return window if isinstance(window, tuple | list) else (window, window)


class _Positions(NamedTuple):
    """Row t sees the keys from t - left to t + right (None: all), shifted by L - T where `bottom_right`."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False


def _window(options: _NnOptions, T: int, S: int) -> _Positions:
    left, right = (T, S) if options.local_window_size is None else options.local_window_size
    if options.is_causal:
        right = min(right, 0)
    if left + right < 0:
        # No row sees a key.
        return _Positions(right=-T)
    # What reaches beyond all keys is no limit; what hides all keys need not hide them twice (t + right fits int32).
    return _Positions(None if left >= T else max(left, -S), None if right >= S else max(right, -T))


def _pallas(
    operands: dict,
    positions: _Positions,
    scale: float | None,
    softcap: float | None,
    returns_lse: bool,
    config: Config | None,
    platform: str | None,
) -> dict[str, Array]:
    """o, and lse where `returns_lse`, by the kernels on "rocm", on "cuda", or (None) in interpret mode."""
    operands = {name: x for name, x in operands.items() if x is not None}
    (B, T, H, K), (S, G, V) = operands["q"].shape, operands["v"].shape[1:]
    architecture = current_arch()
    dtype = operands["q"].dtype
    for name in [name for name in ("bias", "mask") if name in operands]:
        x = operands[name].reshape((1,) * (4 - operands[name].ndim) + operands[name].shape)
        operands[name] = x.astype(jnp.int8) if name == "mask" else as_bias(x)
    for name in [name for name in ("logit_factor", "value_factor") if name in operands]:
        operands[name] = operands[name].astype(jnp.float32).reshape(1)
    from_table = config is None
    if config is None:
        config = default_config(architecture, dtype, K, V)
    grid.check_order(config.order, H, xcds(architecture))
    problem = grid.Problem(
        batch=B,
        queries=T,
        keys=S,
        heads=H,
        groups=G,
        key_size=K,
        value_size=V,
        dtype=dtype,
        config=config,
        xcds=xcds(architecture),
        left=positions.left,
        right=positions.right,
        bottom_right=positions.bottom_right,
        softcap=softcap,
        bias=operands["bias"].shape if "bias" in operands else None,
        mask=operands["mask"].shape if "mask" in operands else None,
        given=frozenset(operands) - {"q", "k", "v", "bias", "mask"},
        returns_lse=returns_lse,
    )
    if config.splits is None:
        splits = default_splits(architecture, B * H * problem.blocks, -(-S // problem.block_k))
        problem = dataclasses.replace(problem, config=dataclasses.replace(config, splits=splits))
    left, right = positions.left, positions.right
    seen = S if left is None or right is None else min(S, config.block_q + left + right)
    if from_table and not (problem.fixed_maximum and seen >= KEYS_FOR_A_FIXED_MAXIMUM):
        config = default_config(architecture, dtype, K, V, moving=True)
        problem = dataclasses.replace(problem, config=dataclasses.replace(config, splits=problem.splits))
    target = architecture if platform == "rocm" and architecture.startswith("gfx") else platform
    scale = K**-0.5 if scale is None else float(scale)
    # Kernels count in int32 whatever the caller's default.
    with jax.enable_x64(False):
        return kernel.attention(problem, operands, scale=scale, target=target)


def _check_flash(arrays: dict, options: _Options) -> dict:
    known = arrays["kv_lengths"]
    integers = {
        name: as_integers(name, arrays.pop(name), wraps=name.endswith("ids"))
        for name in ("q_segment_ids", "kv_segment_ids", "kv_lengths")
    }
    arrays = as_arrays(arrays, ("q", "k", "v")) | integers
    B, T, H, S = _check_qkv(("q", "k", "v"), [arrays[name] for name in "qkv"], (4,), DTYPES + FP8_DTYPES)
    check_broadcastable("bias", arrays["bias"], (B, H, T, S))
    check_numbers(options.scale, options.softcap)
    if (arrays["q_segment_ids"] is None) != (arrays["kv_segment_ids"] is None):
        absent = "q_segment_ids" if arrays["q_segment_ids"] is None else "kv_segment_ids"
        refuse(absent, "None", "given where the other segment ids are")
    for name, shape, axes in (
        ("q_segment_ids", (B, T), "[B, T]"),
        ("kv_segment_ids", (B, S), "[B, S]"),
        ("kv_lengths", (B,), "[B]"),
    ):
        check_integers(name, arrays[name], {shape: axes})
    _check_range("kv_lengths", known, S)
    for name in ("q_scale", "k_scale", "v_scale"):
        x = arrays[name]
        if x is not None and (x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating)):
            refuse(name, f"{x.dtype.name} {x.shape}", "a float scalar")
    return arrays


def _check_dot_product(arrays: dict, window) -> dict:
    known = {name: arrays[name] for name in ("query_seq_lengths", "key_value_seq_lengths")}
    integers = {name: as_integers(name, arrays.pop(name)) for name in known}
    names = ("query", "key", "value")
    arrays = as_arrays(arrays, names) | integers
    B, T, H, S = _check_qkv(names, [arrays[name] for name in names], (3, 4), DTYPES)
    check_broadcastable("bias", arrays["bias"], (B, H, T, S))
    check_broadcastable("mask", arrays["mask"], (B, H, T, S), kind=jnp.bool_)
    scale = arrays["scale"]
    if scale is not None and (scale.shape != () or jnp.issubdtype(scale.dtype, jnp.complexfloating)):
        refuse("scale", f"{scale.dtype.name} {scale.shape}", "None or a real scalar")
    for name, lengths in known.items():
        check_integers(name, arrays[name], {(B,): "[B]"})
        # jax.nn takes lengths beyond the end for the end.
        _check_range(name, lengths, np.iinfo(np.int32).max)
    if window is not None and not (len(_sides(window)) == 2 and all(is_integer(side) for side in _sides(window))):
        refuse("local_window_size", repr(window), "None, an int or a pair of ints")
    return arrays


def _check_qkv(names, arrays, ranks, dtypes) -> tuple[int, int, int, int]:
    """Returns B, T, H, S."""
    for name, x in zip(names, arrays, strict=True):
        if x.ndim not in ranks:
            allowed = "[batch, tokens, heads, size]" + (" or [tokens, heads, size]" if 3 in ranks else "")
            refuse(name, f"shape {x.shape}", allowed)
        if x.dtype.name not in dtypes:
            refuse(name, x.dtype.name, f"one of {', '.join(dtypes)}")
        if x.dtype != arrays[0].dtype:
            refuse(name, x.dtype.name, f"of {names[0]}'s dtype {arrays[0].dtype.name}")
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    check_heads(names, q, k, v, k.shape[1:3])
    (B, T, H, _), S = q.shape, k.shape[1]
    return B, T, H, S


def _check_range(name, x, most):
    """Refuses lengths outside of 0 to most, where their values are known."""
    if not is_known(x):
        return
    x = np.asarray(0 if x is None else x)
    if np.any((x < 0) | (x > most)):
        refuse(name, x.tolist(), f"between 0 and {most}")
