"""The ways of computing a case that are compared: ours, the reference, and what jax itself offers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import references.gated_delta
from amdgpu.arch import current_arch, xcds
from benchmarks import peers
from benchmarks.candidate import Candidate, PlainAttention
from flash import flash_attention, grid
from flash.tuning import default_config
from gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gqa import grouped_query_attention
from references.cases import Case, FlashCase, GatedDeltaCase, GqaCase

# Up to this many tokens a gated delta case is a decode step.
DECODE_TOKENS = 4


def candidates(case: Case, arguments: dict[str, Any], *, gpu: bool, with_peers: bool = False) -> list[Candidate]:
    """All ways of computing `case` with the arguments of `references.cases.inputs`, "reference" among them.

    On a CPU "kernel" runs in interpret mode, which says nothing about speed, and no others are listed.
    """
    if isinstance(case, GatedDeltaCase):
        theirs = [peers.fla(arguments, decode=is_decode(case))] if with_peers else []
        return [*_gated_delta(case, arguments, gpu), *theirs]
    found = _ours(flash_attention if isinstance(case, FlashCase) else grouped_query_attention, arguments)
    plain = plain_attention(case, arguments)
    if gpu and plain is not None:
        found += _jax(plain)
        found += peers.attention(plain) if with_peers else []
    return found


def orders(case: FlashCase, arguments: dict[str, Any]) -> list[Candidate]:
    """The kernel with each order of workgroups that exists for the case; the first is the default."""
    arch = current_arch()
    row = default_config(arch, case.dtype, case.K, case.V)
    found = []
    for order in sorted(grid.ORDERS, key=lambda order: order != row.order):
        try:
            grid.check_order(order, case.H, xcds(arch))
        except ValueError:
            continue
        config = dataclasses.replace(row, order=order)
        attention = functools.partial(flash_attention, implementation="pallas", config=config)
        found.append(Candidate(order, _tuple(attention), arguments))
    return found


def is_decode(case: GatedDeltaCase) -> bool:
    """Whether the case is a decode step: few tokens, and a state that goes in and comes out."""
    return case.T <= DECODE_TOKENS and case.state is not None


def _gated_delta(case: GatedDeltaCase, arguments: dict[str, Any], gpu: bool) -> list[Candidate]:
    decode = is_decode(case)
    rule = recurrent_gated_delta_rule if decode else chunk_gated_delta_rule
    # A state of another dtype or layout than the one returned cannot be replaced by it.
    state = "initial_state" if decode and case.state_dtype == "float32" else None
    found = [
        Candidate(name, functools.partial(rule, implementation=implementation), arguments, state)
        for name, implementation in (("kernel", "pallas"), ("reference", "reference"))
    ]
    if gpu and not decode:
        found.append(Candidate("token scan", references.gated_delta.recurrent_gated_delta_rule, arguments))
    return found


def _ours(attention: Callable, arguments: dict[str, Any]) -> list[Candidate]:
    return [
        Candidate(name, _tuple(functools.partial(attention, implementation=implementation)), arguments)
        for name, implementation in (("kernel", "pallas"), ("reference", "reference"))
    ]


def plain_attention(case: FlashCase | GqaCase, arguments: dict[str, Any]) -> PlainAttention | None:
    """What a case comes to for others' attention; None where it asks for more than that can do.

    Sinks are left out, and the note says so. Causal masks and windows are aligned at the top left there, which is the
    same only where T = S, and where neither is needed: one row that sees all keys.
    """
    features = (case.bias, case.softcap)
    if isinstance(case, FlashCase):
        features += (case.q_segments, case.kv_lengths)
        window, sinks = None, None
    else:
        features += (case.past, case.lengths, case.kv_dtype)
        window, sinks = case.window, case.sinks
    aligned = case.causal and not (case.T == 1 and window is None)
    if any(x is not None for x in features) or (aligned and case.T != case.S) or (window is not None and not aligned):
        return None
    return PlainAttention(
        arguments={name: arguments[name] for name in ("q", "k", "v", "scale")},
        same_as=arguments if sinks is None else {**arguments, "sinks": None},
        is_causal=aligned,
        window=window,
        note="" if sinks is None else ", no sinks",
    )


def _jax(plain: PlainAttention) -> list[Candidate]:
    # jax.nn counts the keys before a row's own.
    window = None if plain.window is None else (plain.window - 1, 0)

    def attend(implementation, *, q, k, v, scale):
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=plain.is_causal, local_window_size=window, implementation=implementation
        )

    return [plain.candidate(f"jax.nn {name}", _tuple(functools.partial(attend, name))) for name in ("xla", "cudnn")]


def _tuple(function: Callable) -> Callable:
    """The function with its one output in a tuple."""

    def call(**arguments):
        return (function(**arguments),)

    return call
