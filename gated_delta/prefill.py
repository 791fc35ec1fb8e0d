"""The prefill window by window: which kernels are launched in which order, and what they hand on to one another."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from amdgpu.launch import vary_alike
from gated_delta import grid, kernel
from gated_delta.grid import Problem
from gated_delta.inverse import blocks_body, solve_body
from gated_delta.tiles import call


def empty(shape, dtype):
    """A buffer for kernels to fill. jax 0.10 takes `lax.empty` for batched under vmap, which breaks forward mode."""
    return lax.empty(shape, dtype) if jax.__version_info__ >= (0, 11) else jnp.zeros(shape, dtype)


class Pass(NamedTuple):
    """One kernel of the prefill.

    `body` takes (program of the pass, number of the window, operands, results); the number is None for a pass whose
    plan has no "window".
    """

    name: str
    plan: grid.Plan
    body: Callable


def launch(p: Problem, work: list[tuple[Pass, int, dict]], numbers, *, interpret) -> list[dict]:
    """One launch of several passes, the programs of one after those of another.

    `work` lists each pass, where in `numbers` the number of its window stands, and its operands by name. Returns the
    results of each by name.
    """
    plans = [x.plan for x, _, _ in work]

    def body(ins, outs):
        for n, ((x, place, _), start) in enumerate(zip(work, grid.starts(plans), strict=True)):
            program = pl.program_id(0) - start
            mine, results = ({name: ref for (m, name), ref in refs.items() if m == n} for refs in (ins, outs))

            def run(x=x, place=place, program=program, mine=mine, results=results):
                x.body(program, mine["window"][place] if "window" in mine else None, mine, results)

            if len(work) == 1:
                run()
            else:
                pl.when((program >= 0) & (program < x.plan.grid[0]))(run)

    operands = {(n, name): x for n, (_, _, own) in enumerate(work) for name, x in (own | {"window": numbers}).items()}
    name = "_".join(["gated_delta", *(x.name for x, _, _ in work)])
    results = call(body, name, p, grid.beside(plans), operands, interpret)
    return [{name: x for (m, name), x in results.items() if m == n} for n in range(len(work))]


def in_order(run, passes, arrays, numbers):
    """Passes of one window, one launch after another; each sees what the others wrote. Returns all arrays by name."""
    for x in passes:
        arrays = arrays | run([(x, 0, arrays)], numbers)[0]
    return arrays


def overlapped(run, p: Problem, prepare: Pass, scan: Pass, operands, results):
    """The scan of each window in one launch with what prepares the next. The last has nothing to prepare."""
    handed_on = [n for n in scan.plan.in_specs if n in grid.scratch(p)]

    def scan_window(numbers, place, results, prepared):
        """The scan of the window whose number stands at `place`. Returns results, and what is prepared for the next."""
        work = [(scan, place, operands | results | prepared), (prepare, place + 1, operands)]
        done, made = run(work, numbers)
        return results | done, {n: made[n] for n in handed_on}

    def scan_two_windows(i, state):
        """Two in a turn of the loop: with one, XLA would copy what is handed on."""
        numbers = 2 * i + jnp.arange(3, dtype=jnp.int32)
        return scan_window(numbers, 1, *scan_window(numbers, 0, *state))

    (first,) = run([(prepare, 0, operands)], jnp.zeros((3,), jnp.int32))
    state = results, {n: first[n] for n in handed_on}
    state = lax.fori_loop(0, (p.windows - 1) // 2, scan_two_windows, state)
    numbers = p.windows - 2 + jnp.arange(3, dtype=jnp.int32)
    results, prepared = scan_window(numbers, 0, *state) if p.windows % 2 == 0 else state
    return results | run([(scan, 1, operands | results | prepared)], numbers)[0]


def prefill(p: Problem, operands: dict, *, scale, architecture):
    """The three passes, window by window.

    Args:
      p: the static facts.
      operands: q, k, v, g, beta; `initial_state` where `p.has_initial`; `table` (grid.chunk_table) of packed sequences.
      scale: of the rule.
      architecture: what it is lowered for ("gfx942", "sm_90"), or None for interpret mode.

    Returns:
      (o, final states in fp32, or None where they are not asked for)
    """
    bind, run = functools.partial, functools.partial(launch, p, interpret=architecture is None)
    operands = vary_alike(operands)
    facts = {"p": p, "architecture": architecture}
    if p.config.overlap:
        before_scan = [Pass("prepare", grid.plan_prepare(p), bind(kernel.prepare_body, **facts))]
    else:
        before_scan = [
            Pass("locals", grid.plan_locals(p), bind(kernel.locals_body, **facts)),
            Pass("blocks", grid.plan_blocks(p), bind(blocks_body, p=p)),
            Pass("solve", grid.plan_solve(p), bind(solve_body, **facts)),
        ]
    scan = Pass("scan", grid.plan_scan(p), bind(kernel.scan_body, scale=scale, **facts))
    passes = [*before_scan, scan]
    if not p.config.outputs_in_scan:
        body = bind(kernel.outputs_body, scale=scale, **facts)
        passes.append(Pass("outputs", grid.plan_outputs(p), body))

    def window(number, results):
        arrays = in_order(run, passes, operands | results, jnp.full((1,), number, jnp.int32))
        return {n: arrays[n] for n in ("o", "carry") if n in arrays}

    results = {}
    if p.in_place:
        shape = grid.output_shape(p)
        # Packed sequences may end before T: what no sequence holds is 0.
        results["o"] = (empty if p.sequences is None else jnp.zeros)(shape.shape, shape.dtype)
    if p.carry_rows:
        results["carry"] = _first_carry(p, operands)
    results = {n: x for n, x in vary_alike(operands | results).items() if n in results}
    if p.overlaps:
        results = overlapped(run, p, before_scan[0], scan, operands, results)
    else:
        results = lax.fori_loop(0, p.windows, window, results) if p.windows > 1 else window(0, results)
    return results["o"], results["carry"] if p.keeps_states else None


def _first_carry(p: Problem, operands):
    shape = grid.carry_shape(p)
    if p.sequences is None or not p.keeps_states:
        return empty(shape.shape, shape.dtype)
    # The state of an empty sequence passes through: no chunk writes it.
    return operands["initial_state"].astype(shape.dtype) if p.has_initial else jnp.zeros(shape.shape, shape.dtype)
