"""The com.microsoft.GroupQueryAttention operator of ONNX Runtime, on this package's functions."""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from flash.arguments import (
    as_array,
    as_integers,
    check_broadcastable,
    check_choice,
    check_integers,
    check_numbers,
    is_integer,
    is_known,
    refuse,
)
from gqa.api import DTYPES, Options, attend
from gqa.tuning import Config
from references.gqa import append


def group_query_attention(
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    seqlens_k: ArrayLike | None = None,
    total_sequence_length: ArrayLike | None = None,
    cos_cache: ArrayLike | None = None,
    sin_cache: ArrayLike | None = None,
    position_ids: ArrayLike | None = None,
    attention_bias: ArrayLike | None = None,
    head_sink: ArrayLike | None = None,
    *,
    query_seqlens: ArrayLike | None = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    smooth_softmax: int = 0,
    qk_output: int = 0,
    num_outputs: int = 3,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[Array, Array, Array]:
    """Rotates q and k, appends k and v to the cache, attends over it: one node of an ONNX graph.

    Inputs and attributes have the operator's names, and the inputs its order:
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention

    How many tokens `T_b` of batch row b are new, and how many keys `past_b` stand before them:

        with query_seqlens:                    T_b = query_seqlens[b],    past_b = seqlens_k[b] + 1 - T_b
        else, T == total_sequence_length:      T_b = seqlens_k[b] + 1,    past_b = 0              (a prompt)
        else:                                  T_b = T,                   past_b = seqlens_k[b] + 1 - T

    Composes with jit: the arrays may be traced, with one exception (total_sequence_length).

    Args:
      query: `[B, T, H K]`, or packed `[B, T, H K + G K + G K]` (then key and value are None), in bf16, fp16 or fp32
        (float64: on the reference only); so are all of key, value and the caches.
      key: `[B, T, G K]`.
      value: `[B, T, G V]`.
      past_key: `[B, G, P, K]`, the cache: P is the number of past keys, or the capacity of a shared buffer.
      past_value: `[B, G, P, V]`.
      seqlens_k: int32 `[B]`, the *index* of each row's last valid key: valid keys minus 1.
      total_sequence_length: int32 scalar, the most valid keys of any row. The present caches are as long as the past
        where that holds the total already; only then may the total be traced. Else they have the total's length.
      cos_cache: `[positions, K / 2]`, or fewer columns: half of the part of each head that is rotated, the first one.
      sin_cache: likewise.
      position_ids: int `[B, T]`, the positions to rotate by; `past_b + t` by default.
      attention_bias: `[B or 1, H or 1, T, up to the present length]`, added to the capped logits.
      head_sink: `[H]`, one more logit in each row's denominator.
      query_seqlens: int32 `[B]`, the valid new tokens of each row.
      num_heads: H.
      kv_num_heads: G.
      scale: factor of the logits; 0 is `K**-0.5`.
      softcap: cap on the logits; 0 is none.
      local_window_size: keys that a row sees, its own included; -1 is no limit; 0 gives rows of zeros.
      do_rotary: 1 rotates q and k (https://arxiv.org/abs/2104.09864).
      rotary_interleaved: 1 pairs neighbours `(2 i, 2 i + 1)`, 0 pairs halves `(i, i + size / 2)`.
      smooth_softmax: 1 is a head_sink of 0; a head_sink that is given wins.
      qk_output: 0, 1 or 2: which logits the fourth output would hold.
      num_outputs: of the node; the fourth, output_qk, is not made here.
      implementation: as in `grouped_query_attention`.
      config: as in `grouped_query_attention`.

    Returns:
      output `[B, T, H V]` in query's dtype, zeros in the rows from `T_b` on (ONNX Runtime leaves them
      unspecified), and present_key, present_value `[B, G, present length, size]`.

    Raises:
      ValueError: an input of the wrong shape or value, or missing; the message names it. Values of seqlens_k and
        query_seqlens are checked where they are known at trace time.
      NotImplementedError: `num_outputs=4`; what `grouped_query_attention` cannot do.
    """
    for name, number in (
        ("num_heads", num_heads),
        ("kv_num_heads", kv_num_heads),
        ("local_window_size", local_window_size),
        ("num_outputs", num_outputs),
    ):
        if not is_integer(number):
            refuse(name, repr(number), "an int")
    for name, flag, allowed in (
        ("do_rotary", do_rotary, (0, 1)),
        ("rotary_interleaved", rotary_interleaved, (0, 1)),
        ("smooth_softmax", smooth_softmax, (-1, 0, 1)),
        ("qk_output", qk_output, (0, 1, 2)),
    ):
        if flag not in allowed:
            refuse(name, flag, f"one of {allowed}")
    if num_outputs > 3:
        raise NotImplementedError(f"the fourth output, output_qk (qk_output = {qk_output}), is not available")
    if not -1 <= local_window_size < 2**31:
        refuse("local_window_size", local_window_size, "-1 (no limit), or from 0 to 2**31 - 1")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is None:
            refuse(name, None, "a Python number")
    check_numbers(scale, softcap or None)
    check_choice(implementation, ("pallas", "reference"), config, Config)
    if min(num_heads, kv_num_heads) < 1 or num_heads % kv_num_heads:
        refuse("num_heads", num_heads, f"a multiple of kv_num_heads = {kv_num_heads}")
    query = as_array("query", query)
    if query.dtype.name not in DTYPES:
        refuse("query", query.dtype.name, f"one of {', '.join(DTYPES)}")
    q, k, v = _split(query, key, value, num_heads, kv_num_heads)
    if k.shape[-1] != q.shape[-1]:
        refuse("key", f"size {k.shape[-1]} of a head", f"of query's size {q.shape[-1]}")
    (B, T), G = q.shape[:2], kv_num_heads
    if (past_key is None) != (past_value is None):
        refuse("past_key" if past_key is None else "past_value", None, "given together with the other cache")
    caches = [None if x is None else jnp.asarray(x) for x in (past_key, past_value)]
    for name, cache, new in zip(("past_key", "past_value"), caches, (k, v), strict=True):
        if cache is None:
            continue
        size = new.shape[-1]
        if cache.ndim != 4 or (*cache.shape[:2], cache.shape[3]) != (B, G, size):
            refuse(name, f"shape {cache.shape}", f"[B, G, P, size] with B, G, size = {(B, G, size)}")
        if cache.dtype != query.dtype:
            refuse(name, cache.dtype.name, f"of query's dtype {query.dtype.name}")
    known = seqlens_k, query_seqlens
    seqlens_k = _row_integers("seqlens_k", seqlens_k, B)
    query_seqlens = None if query_seqlens is None else _row_integers("query_seqlens", query_seqlens, B)
    # Where it is known while tracing.
    total = _known_total(total_sequence_length)
    present_length = _present_length(total, caches[0], query_seqlens is None, T)
    capacity = 0 if caches[0] is None else caches[0].shape[2]
    _check_valid(*known, total, T, present_length, capacity)
    rotary = None
    if do_rotary:
        rotary = _rotary_tables(cos_cache, sin_cache, k.shape[-1], total or 1)
    if position_ids is not None:
        known_ids = np.asarray(position_ids) if is_known(position_ids) else None
        position_ids = as_integers("position_ids", position_ids)
        check_integers("position_ids", position_ids, {(B, T): "[B, T]"})
        if rotary is not None and known_ids is not None:
            rows = rotary[0].shape[0]
            if np.any((known_ids < 0) | (known_ids >= rows)):
                refuse("position_ids", known_ids.tolist(), f"between 0 and {rows - 1}, the rows of cos_cache")
    if attention_bias is not None:
        attention_bias = jnp.asarray(attention_bias)
        columns = attention_bias.shape[-1] if attention_bias.ndim == 4 else present_length + 1
        least = total or 0
        if not least <= columns <= present_length:
            shape = "[B or 1, H or 1, T, columns]"
            refuse(
                "attention_bias", f"shape {attention_bias.shape}", f"{shape} with {least} to {present_length} columns"
            )
        check_broadcastable("attention_bias", attention_bias, (B, num_heads, T, columns))
    if head_sink is not None:
        sinks = jnp.asarray(head_sink)
        if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
            refuse("head_sink", f"{sinks.dtype.name} {sinks.shape}", f"floats [H] = {(num_heads,)}")
    else:
        sinks = jnp.zeros(num_heads, jnp.float32) if smooth_softmax == 1 else None
    options = _NodeOptions(
        present_length=present_length,
        window=int(local_window_size),
        softcap=float(softcap) or None,
        scale=float(scale) or None,
        interleaved=bool(rotary_interleaved),
        implementation=implementation,
        config=config,
    )
    arrays = dict(
        qkv=(q, k, v),
        caches=tuple(caches),
        last=seqlens_k,
        total=jnp.asarray(total_sequence_length, jnp.int32).reshape(()),
        lengths=query_seqlens,
        rotary=rotary,
        positions=position_ids,
        bias=attention_bias,
        sinks=sinks,
    )
    return _run(arrays, options)


class _NodeOptions(NamedTuple):
    """The static arguments."""

    present_length: int
    window: int
    softcap: float | None
    scale: float | None
    interleaved: bool
    implementation: str | None
    config: Config | None


@functools.partial(jax.jit, static_argnums=1)
def _run(arrays: dict, options: _NodeOptions):
    q, k, v = arrays["qkv"]
    B, T, H, _ = q.shape
    valid = arrays["last"] + 1
    if arrays["lengths"] is None:
        is_prompt = arrays["total"] == T
        lengths = jnp.where(is_prompt, valid, T)
        past = jnp.where(is_prompt, 0, valid - T)
    else:
        lengths = arrays["lengths"]
        past = valid - lengths

    if arrays["rotary"] is not None:
        positions = arrays["positions"]
        if positions is None:
            positions = past[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        cos, sin = arrays["rotary"]
        q, k = (_rotate(x, positions, cos, sin, options.interleaved) for x in (q, k))

    present = []
    for cache, new in zip(arrays["caches"], (k, v), strict=True):
        missing = options.present_length - (0 if cache is None else cache.shape[2])
        if cache is None:
            cache = jnp.zeros((B, new.shape[2], missing, new.shape[3]), new.dtype)
        elif missing:
            cache = jnp.pad(cache, ((0, 0), (0, 0), (0, missing), (0, 0)))
        present.append(append(cache, new, past, lengths, head_first=True))

    V = v.shape[-1]
    if options.window == 0:
        return jnp.zeros((B, T, H * V), q.dtype), *present
    bias = arrays["bias"]
    if bias is not None:
        # Columns beyond the bias are keys beyond every row's length.
        bias = jnp.pad(bias, ((0, 0),) * 3 + ((0, options.present_length - bias.shape[-1]),))
    o = attend(
        dict(q=q, k=present[0], v=present[1], past=past, lengths=lengths, sinks=arrays["sinks"], bias=bias),
        Options(
            window=None if options.window == -1 else options.window,
            softcap=options.softcap,
            scale=options.scale,
            causal=True,
            return_lse=False,
        ),
        options.implementation,
        options.config,
        # The cache as it is: no transposed copy.
        heads_first=True,
    )
    return cast(Array, o).reshape(B, T, H * V), *present


def _rotate(x, positions, cos, sin, interleaved):
    """x `[B, T, heads, size]`; of each head the first `2 cos.shape[1]` numbers are rotated, in pairs."""
    half = cos.shape[1]
    cos, sin = (jnp.take(table, positions, axis=0, mode="clip")[:, :, None] for table in (cos, sin))
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    pair = a * cos - b * sin, a * sin + b * cos
    turned = jnp.stack(pair, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _split(query, key, value, H, G):
    """q `[B, T, H, K]`; k and v likewise, with G heads of K and V features."""
    if query.ndim != 3:
        refuse("query", f"shape {query.shape}", "[B, T, hidden]")
    if (key is None) != (value is None):
        refuse("key" if key is None else "value", None, "given together with the other, or packed into query")
    B, T, hidden = query.shape
    if key is None:
        if hidden % (H + 2 * G):
            refuse("query", f"shape {query.shape}", f"packed, [B, T, a multiple of H + 2 G = {H + 2 * G}]")
        K = hidden // (H + 2 * G)
        parts = query[..., : H * K], query[..., H * K : (H + G) * K], query[..., (H + G) * K :]
    else:
        parts = query, jnp.asarray(key), jnp.asarray(value)
    for name, x, heads in zip(("query", "key", "value"), parts, (H, G, G), strict=True):
        if x.ndim != 3 or x.shape[:2] != (B, T) or x.shape[2] % heads:
            refuse(name, f"shape {x.shape}", f"[B, T, heads size] with B, T, heads = {(B, T, heads)}")
        if x.dtype != query.dtype:
            refuse(name, x.dtype.name, f"of query's dtype {query.dtype.name}")
    return (x.reshape(B, T, heads, x.shape[2] // heads) for x, heads in zip(parts, (H, G, G), strict=True))


def _row_integers(name, x, B):
    if x is None:
        refuse(name, None, f"integers [B] = {(B,)}")
    x = as_array(name, as_integers(name, x))
    if x.size != B or not jnp.issubdtype(x.dtype, jnp.integer):
        refuse(name, f"{x.dtype.name} {x.shape}", f"integers [B] = {(B,)}")
    return x.reshape(B)


def _check_valid(last, lengths, total, T, present_length, capacity):
    """Refuses valid keys and new tokens that cannot be, where their numbers are known."""
    new = None if lengths is None or not is_known(lengths) else np.asarray(lengths, np.int64).reshape(-1)
    if new is not None and np.any((new < 0) | (new > T)):
        refuse("query_seqlens", new.tolist(), f"between 0 and T = {T}")
    if total is None or not is_known(last):
        return
    last, most, past = np.asarray(last, np.int64).reshape(-1), present_length, None
    if lengths is not None:
        past = None if new is None else last + 1 - new
    elif total == T:
        # A prompt: all keys are new.
        most = T
    else:
        new = np.full_like(last, T)
        past = last + 1 - new
    new = np.zeros_like(last) if new is None else new
    if np.any((last + 1 < new) | (last >= most)):
        refuse("seqlens_k", last.tolist(), f"between {(new - 1).tolist()} and {most - 1}, the last key's index")
    if past is not None and np.any(past > capacity):
        allowed = f"at most {(capacity + new - 1).tolist()}: past keys are in past_key, P = {capacity}"
        refuse("seqlens_k", last.tolist(), allowed)


def _known_total(total) -> int | None:
    """total_sequence_length; None where it is traced."""
    if total is None:
        refuse("total_sequence_length", None, "an integer")
    if isinstance(total, Tracer):
        return None
    total = np.asarray(total)
    if total.size != 1 or not np.issubdtype(total.dtype, np.integer):
        refuse("total_sequence_length", total.tolist(), "an integer")
    if total.reshape(()) < 0:
        refuse("total_sequence_length", total.tolist(), ">= 0")
    return int(total.reshape(()))


def _present_length(total: int | None, past, no_query_seqlens, T):
    capacity = 0 if past is None else past.shape[2]
    if total is None:
        if past is None:
            refuse(
                "total_sequence_length",
                "a traced value",
                "a Python int where no past holds the total already",
            )
        return capacity
    if past is None and no_query_seqlens and total != T:
        refuse("total_sequence_length", total, f"T = {T} where there is no past")
    if no_query_seqlens and not T <= total <= capacity + T:
        refuse("total_sequence_length", total, f"between T = {T} and P + T = {capacity + T}")
    return max(total, capacity)


def _rotary_tables(cos, sin, size, positions):
    """Both in fp32, of at least so many positions."""
    for name, table in (("cos_cache", cos), ("sin_cache", sin)):
        if table is None:
            refuse(name, None, "given where do_rotary is 1")
    cos, sin = as_array("cos_cache", cos), as_array("sin_cache", sin)
    for name, table in (("cos_cache", cos), ("sin_cache", sin)):
        if table.ndim != 2 or table.shape != cos.shape or not 1 <= table.shape[1] <= size // 2:
            refuse(name, f"shape {table.shape}", f"[positions, 1 to {size // 2}], the same for both")
        if not jnp.issubdtype(table.dtype, jnp.floating):
            refuse(name, table.dtype.name, "of a float dtype")
        if table.shape[0] < positions:
            refuse(
                name, f"{table.shape[0]} positions", f"of the {positions} positions of total_sequence_length, or more"
            )
    return cos.astype(jnp.float32), sin.astype(jnp.float32)
