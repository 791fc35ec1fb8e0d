"""The public functions of grouped-query attention: arguments checked, defaults filled in, platform chosen."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from amdgpu.arch import current_arch, xcds
from amdgpu.launch import by_implementation
from flash.arguments import (
    as_array,
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
from flash.tuning import KEYS_FOR_A_FIXED_MAXIMUM
from gqa import decode, grid, kernel
from gqa.tuning import LARGEST_SIZE, Config, default_block_keys, default_config, for_window, uses_rows_kernel
from references import gqa as reference

DTYPES = ("bfloat16", "float16", "float32", "float64")


def grouped_query_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    past: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    window: int | None = None,
    sinks: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of T new tokens over a cache of S keys that holds theirs already (prompt, chunk of one,
    decode).

    With `L_b = past_b + T_b` valid keys in batch row b, and query row t at the position `p = past_b + t`:

        l_j     = scale q.k_j;   l = softcap tanh(l / softcap);   l = l + bias
        allowed = j < L_b  and  (not causal or j <= p)  and  (window is None or j > p - window)
        m   = max(max l_j, sink_h);   den = sum exp(l_j - m) + exp(sink_h - m)       over the allowed keys
        out = sum exp(l_j - m) v_j / den;   lse = m + log(den)

    Logits, maximum, sum and accumulator are fp32. Cache rows that no query row may see are never used, not
    even where they are NaN; a cache row that some query rows see must be finite. On a GPU a Pallas kernel shares out
    the query rows; where a KV group has few (`gqa.tuning.uses_rows_kernel`), another takes them all at once and shares
    out the keys, in blocks of 2048 or less, and a third merges. A fourth follows the first where a maximum may be
    fixed (`Config.fixed_maximum`). Elsewhere the blocked reference runs.
    Composes with jit, vmap, grad, checkpoint, scan and shard_map; derivatives recompute the reference from the inputs.
    `past` and `lengths` are operands: new values compile nothing anew.

    Args:
      q: `[B, T, H, K]` in bf16, fp16, fp32 (float64: on the reference only).
      k: `[B, S, G, K]`, past and new keys, S the capacity, in q's dtype, or in a 16-bit one where q is fp32;
        head h reads key head `h // (H // G)`.
      v: `[B, S, G, V]` in k's dtype; V may differ from K.
      past: integers, scalar or `[B]`: the keys before this step; `S - T` by default.
      lengths: integers `[B]`: the valid new tokens T_b; T by default.
      window: how many keys a row sees, its own included (1: itself only), static; no limit by default.
        FlashAttention, `jax.nn` and ONNX count `window - 1` instead.
      sinks: `[H]`, any float dtype: one raw logit per query head that takes part in the softmax without a
        value, neither scaled nor capped. 0 is smooth softmax, -inf is none.
      bias: any float dtype, broadcastable to `[B, H, T, S]`, added after the cap. -inf hides a key.
      softcap: cap on the logits, static, > 0; none by default.
      scale: factor of the logits, static; `K**-0.5` by default.
      causal: whether a row sees only keys up to its own position.
      return_lse: whether to return the natural logarithm of the denominator too.
      implementation: None (the best for the platform), "pallas" (on a CPU in interpret mode, slow) or "reference".
      config: how the kernels are cut; by default from the table in `gqa.tuning`.

    Returns:
      o `[B, T, H, V]` in q's dtype, or (o, lse) with lse `[B, T, H]` in fp32. Rows from `lengths[b]` on give
      0 and lse -inf; other rows without a key give 0 and the sink (-inf without one) as lse. Lengths that are known
      only at run time count as 0 below that, and as T beyond it; a past that exceeds the cache reads nothing out of
      range: such rows see what keys there are.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; the message names it. Values of past and
        lengths are checked where they are known at trace time.
      NotImplementedError: `implementation="pallas"`, and K or V > 256, or float64.

    Source: Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245; sinks as in
    https://github.com/openai/gpt-oss.
    """
    arrays = dict(q=q, k=k, v=v, past=past, lengths=lengths, sinks=sinks, bias=bias)
    window = int(window) if is_integer(window) else window
    flags = check_flag("causal", causal), check_flag("return_lse", return_lse)
    options = Options(window, static_number(softcap), static_number(scale), *flags)
    return attend(arrays, options, implementation, config)


def append_kv(
    cache_k: ArrayLike,
    cache_v: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    past: ArrayLike,
    lengths: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Writes the keys and values of new tokens behind those that a cache holds.

    Token `t < lengths[b]` goes to row `past[b] + t`. Padding tokens, and tokens that do not fit, are dropped;
    nothing is ever written out of range. A cache is no ring: whoever decodes has to stop at S tokens, also with a
    window. Called in a jitted function that donates the caches, it updates them in place.

    Args:
      cache_k: `[B, S, G, K]`, any float dtype.
      cache_v: `[B, S, G, V]`.
      k_new: `[B, T, G, K]` in cache_k's dtype.
      v_new: `[B, T, G, V]` in cache_v's dtype.
      past: integers, scalar or `[B]`: the keys that the cache holds.
      lengths: integers `[B]`: the valid new tokens; T by default.

    Returns:
      (cache_k, cache_v), updated.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; the message names it. Values of past and
        lengths are checked where they are known at trace time.
    """
    known = past, lengths
    named = dict(cache_k=cache_k, cache_v=cache_v, k_new=k_new, v_new=v_new)
    cache_k, cache_v, k_new, v_new = (as_array(name, x) for name, x in named.items())
    past, lengths = as_array("past", as_integers("past", past)), as_integers("lengths", lengths)
    if cache_k.ndim != 4 or k_new.ndim != 4:
        name, x = ("cache_k", cache_k) if cache_k.ndim != 4 else ("k_new", k_new)
        refuse(name, f"shape {x.shape}", "[B, tokens, G, K], of rank 4")
    (B, S, G), T = cache_k.shape[:3], k_new.shape[1]
    for name, cache, new in (("k", cache_k, k_new), ("v", cache_v, v_new)):
        if cache.shape[:-1] != (B, S, G):
            refuse(f"cache_{name}", f"shape {cache.shape}", f"[B, S, G, size] with B, S, G = {(B, S, G)}")
        if new.shape != (B, T, G, cache.shape[-1]):
            refuse(f"{name}_new", f"shape {new.shape}", f"[B, T, G, size] = {(B, T, G, cache.shape[-1])}")
        if not jnp.issubdtype(cache.dtype, jnp.floating):
            refuse(f"cache_{name}", cache.dtype.name, "of a float dtype")
        if new.dtype != cache.dtype:
            refuse(f"{name}_new", new.dtype.name, f"of cache_{name}'s dtype {cache.dtype.name}")
    check_integers("past", past, _past_shapes(B))
    check_integers("lengths", lengths, {(B,): "[B]"})
    _check_fits(*known, T, S)
    return _append_kv(cache_k, cache_v, k_new, v_new, past, lengths)


class Options(NamedTuple):
    """The static arguments of grouped_query_attention that say what is computed."""

    window: int | None
    softcap: float | None
    scale: float | None
    causal: bool
    return_lse: bool


def attend(
    arrays: dict, options: Options, implementation: str | None, config: Config | None, heads_first: bool = False
):
    """`grouped_query_attention` of its arrays by name, None for those not given.

    With `heads_first` k and v are `[B, G, S, size]`.
    """
    check_choice(implementation, ("pallas", "reference"), config, Config)
    return _attend(_check(arrays, options, heads_first), options, implementation, config, heads_first)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _attend(arrays: dict, options: Options, implementation: str | None, config: Config | None, heads_first: bool):
    # Known at run time only: within these no sum of positions wraps, and what they see is the same. Not in the kernel,
    # where it costs gfx1151 the registers that keep scratch memory out of its loops.
    for name, lowest, most in (("past", -(2**29), 2**29), ("lengths", 0, arrays["q"].shape[1])):
        if arrays[name] is not None:
            arrays = arrays | {name: jnp.clip(arrays[name], lowest, most)}
    if options.window is not None:
        options = options._replace(window=min(options.window, 2**30))

    def refer(arrays):
        if heads_first:
            # A view: the reference puts heads first itself.
            arrays = arrays | {name: jnp.swapaxes(arrays[name], 1, 2) for name in "kv"}
        return reference.grouped_query_attention(**arrays, **options._asdict())

    def launch(arrays, platform):
        results = _pallas(arrays, options, config, heads_first, platform)
        return (results["o"], results["lse"]) if options.return_lse else results["o"]

    q, k, v = (arrays[name] for name in "qkv")
    obstacle, empty = functools.partial(_obstacle, q, v), 0 in (q.size, k.size)
    return by_implementation(arrays, refer, launch, implementation, obstacle=obstacle, empty=empty)


def _obstacle(q, v) -> str | None:
    """What the Pallas kernels would need to be otherwise, if anything."""
    for name, x in (("K", q), ("V", v)):
        if x.shape[-1] > LARGEST_SIZE:
            return f"head sizes {name} up to {LARGEST_SIZE}, got {name} = {x.shape[-1]}"
    if q.dtype == jnp.float64:
        return "bfloat16, float16 and float32, got float64"
    return None


def _pallas(
    arrays: dict, options: Options, config: Config | None, heads_first: bool, platform: str | None
) -> dict[str, Array]:
    """o, and lse where it is asked for, by the kernels on "rocm", on "cuda", or (None) in interpret mode."""
    operands = {name: x for name, x in arrays.items() if x is not None}
    B, T, H, K = operands["q"].shape
    (S, G), V = _keys_and_heads(operands["k"], heads_first), operands["v"].shape[-1]
    if "past" in operands:
        operands["past"] = operands["past"].reshape(-1)
    for name, rank in (("sinks", 1), ("bias", 4)):
        if name in operands:
            x = operands[name]
            x = x.reshape((1,) * (rank - x.ndim) + x.shape)
            operands[name] = as_bias(x)
    architecture = current_arch()
    dtype = operands["q"].dtype
    reach = grid.reach(S, T, options.window)
    packed = uses_rows_kernel(T * (H // G), reach)
    which = "rows" if packed else "prefill" if options.window is None else "prefill_window"

    def of_table(moving):
        config = default_config(architecture, dtype.itemsize, K, V, which, moving=moving)
        config = for_window(config, options.window)
        workgroups = B * G * -(-T * (H // G) // config.block_q)
        return dataclasses.replace(config, block_keys=default_block_keys(architecture, workgroups, reach))

    problem = grid.Problem(
        batch=B,
        queries=T,
        keys=S,
        heads=H,
        groups=G,
        key_size=K,
        value_size=V,
        dtype=dtype,
        config=config or of_table(moving=False),
        xcds=xcds(architecture),
        packed=packed,
        window=options.window,
        causal=options.causal,
        softcap=options.softcap,
        bias=operands["bias"].shape if "bias" in operands else None,
        given=frozenset(operands) - {"q", "k", "v", "bias"},
        one_past="past" in operands and operands["past"].size == 1,
        heads_first=heads_first,
        returns_lse=options.return_lse,
    )
    if config is None and not (problem.fixed_maximum and reach >= KEYS_FOR_A_FIXED_MAXIMUM):
        problem = dataclasses.replace(problem, config=of_table(moving=True))
    target = architecture if platform == "rocm" and architecture.startswith("gfx") else platform
    scale = K**-0.5 if options.scale is None else float(options.scale)
    launch = decode.rows if packed else kernel.prefill
    # Kernels count in int32 whatever the caller's default.
    with jax.enable_x64(False):
        return launch(problem, operands, scale=scale, target=target)


_append_kv = jax.jit(reference.append_kv)


def _keys_and_heads(cache, heads_first: bool):
    """(S, G)."""
    return cache.shape[2:0:-1] if heads_first else cache.shape[1:3]


def _check(arrays: dict, options: Options, heads_first: bool) -> dict:
    """Returns the arrays as jax arrays; raises ValueError naming the argument."""
    known = arrays["past"], arrays["lengths"]
    integers = {name: as_integers(name, arrays[name]) for name in ("past", "lengths")}
    others = {name: x for name, x in arrays.items() if name not in integers}
    arrays = as_arrays(others, ("q", "k", "v")) | integers
    q, k, v, past, lengths, sinks, bias = (arrays[name] for name in ("q", "k", "v", "past", "lengths", "sinks", "bias"))
    for name, x, axes in (("q", q, "[B, T, H, K]"), ("k", k, "[B, S, G, K]"), ("v", v, "[B, S, G, V]")):
        if x.ndim != 4:
            refuse(name, f"shape {x.shape}", f"{axes}, of rank 4")
        if x.dtype.name not in DTYPES:
            refuse(name, x.dtype.name, f"one of {', '.join(DTYPES)}")
    if k.dtype != q.dtype and not (q.dtype == jnp.float32 and k.dtype.itemsize == 2):
        refuse("k", k.dtype.name, f"of q's dtype {q.dtype.name}, or 16-bit where q is float32")
    if v.dtype != k.dtype:
        refuse("v", v.dtype.name, f"of k's dtype {k.dtype.name}")
    (B, T, H, _), (S, G) = q.shape, _keys_and_heads(k, heads_first)
    check_heads(("q", "k", "v"), q, k, v, (S, G))
    if sinks is not None and (sinks.shape != (H,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        refuse("sinks", f"{sinks.dtype.name} {sinks.shape}", f"floats [H] = {(H,)}")
    check_broadcastable("bias", bias, (B, H, T, S))
    window = options.window
    if window is not None and not (is_integer(window) and 1 <= window < 2**31):
        refuse("window", repr(window), "None or an int from 1 (itself only) to 2**31 - 1")
    check_numbers(options.scale, options.softcap)
    check_integers("past", past, _past_shapes(B))
    check_integers("lengths", lengths, {(B,): "[B]"})
    if past is None and T > S:
        refuse("past", f"None with T = {T} and S = {S}", "given where k holds fewer than T keys")
    _check_fits(S - T if past is None else known[0], known[1], T, S)
    return arrays


def _past_shapes(B):
    return {(): "a scalar", (B,): "[B]"}


def _check_fits(past, lengths, T, S):
    """Refuses what does not fit into the cache, where the values are known."""
    # Sums of the caller's own dtype might wrap.
    new = np.asarray(T if lengths is None else lengths) if is_known(lengths) else np.asarray(0)
    if np.any((new < 0) | (new > T)):
        refuse("lengths", new.tolist(), f"between 0 and T = {T}")
    if not is_known(past):
        return
    past = np.asarray(past)
    # No sum, which might wrap in the caller's dtype. S - new is at least -T.
    if np.any((past < 0) | (past > S - new.astype(np.int64))):
        refuse("past", past.tolist(), f">= 0, with room for the {new.tolist()} new tokens in S = {S} keys")
