"""The ways of computing a case that are compared: ours, the reference, and what jax itself offers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import references.gated_delta
from amdgpu.arch import current_arch, xcds
from flash import flash_attention, grid
from flash.tuning import default_config
from gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gqa import grouped_query_attention
from references.cases import Case, FlashCase, GatedDeltaCase, GqaCase

# Up to this many tokens a gated delta case is a decode step.
DECODE_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of computing a case.

    Attributes:
      name: "kernel", "reference", or whose it is.
      function: `function(**arguments)` returns a tuple of arrays.
      arguments: of `function`; arrays among them become arguments of the compiled program, the rest is
        static.
      state: name of the array that the last output replaces from call to call (donated), or None.
      ours: whether a wrong result or a refusal to compile is a fault of this package.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    arguments: dict[str, Any]
    state: str | None = None
    ours: bool = True

    def array_names(self) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, jax.Array)]

    def arrays(self) -> list[jax.Array]:
        """The arguments of `compile`'s program, in order."""
        return [self.arguments[name] for name in self.array_names()]

    def compile(self) -> jax.stages.Compiled:
        """The program for these shapes: takes `arrays()`, returns the outputs.

        Raises:
          NotImplementedError: this way cannot do the case.
        """
        names = self.array_names()
        static = {name: value for name, value in self.arguments.items() if name not in names}

        def call(*arrays):
            return self.function(**dict(zip(names, arrays, strict=True)), **static)

        # The name of the program in a trace.
        call.__name__ = self.name.replace(" ", "_")
        donated = [names.index(self.state)] if self.state is not None else []
        return jax.jit(call, donate_argnums=donated).lower(*self.arrays()).compile()


def candidates(case: Case, arguments: dict[str, Any], *, gpu: bool) -> list[Candidate]:
    """All ways of computing `case` with the arguments of `references.cases.inputs`, "reference" among them.

    On a CPU "kernel" runs in interpret mode, which says nothing about speed, and no others are listed.
    """
    if isinstance(case, GatedDeltaCase):
        return _gated_delta(case, arguments, gpu)
    if isinstance(case, FlashCase):
        return [*_ours(flash_attention, arguments), *(_jax_flash(case, arguments) if gpu else [])]
    return [*_ours(grouped_query_attention, arguments), *(_jax_gqa(case, arguments) if gpu else [])]


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


def _jax_flash(case: FlashCase, arguments: dict[str, Any]) -> list[Candidate]:
    plain = (case.bias, case.softcap, case.q_segments, case.kv_lengths) == (None,) * 4
    # jax.nn aligns its causal mask top-left: the same only where T = S.
    if not plain or (case.causal and case.T != case.S):
        return []

    # The last five are None here.
    def attend(implementation, *, q, k, v, scale, causal, bias, softcap, q_segment_ids, kv_segment_ids, kv_lengths):
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation=implementation)

    return _jax_arms(attend, "", arguments)


def _jax_gqa(case: GqaCase, arguments: dict[str, Any]) -> list[Candidate]:
    plain = (case.bias, case.softcap, case.past, case.lengths) == (None,) * 4
    step = case.T == 1 and case.window is None
    if not plain or not case.causal or not (step or case.T == case.S):
        return []

    # The last five are None here. jax.nn counts the keys before a row's own, and aligns its causal mask top-left,
    # which would leave a decode step one key.
    def attend(implementation, *, q, k, v, scale, causal, window, past, lengths, sinks, bias, softcap):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=causal and not step,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation,
        )

    note = "" if case.sinks is None else ", no sinks"
    return _jax_arms(attend, note, {**arguments, "sinks": None})


def _jax_arms(attend: Callable, note: str, arguments: dict[str, Any]) -> list[Candidate]:
    return [
        Candidate(f"jax.nn {name}{note}", _tuple(functools.partial(attend, name)), arguments, ours=False)
        for name in ("xla", "cudnn")
    ]


def _tuple(function: Callable) -> Callable:
    """The function with its one output in a tuple."""

    def call(**arguments):
        return (function(**arguments),)

    return call
