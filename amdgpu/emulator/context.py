"""`emulate(arch)`: Pallas kernels run as AMD machine code wherever they are called."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.launch import launch
from amdgpu.emulator.memory import Memory
from amdgpu.emulator.program import Program, load_program
from amdgpu.emulator.target import Target
from amdgpu.lowering import CompiledKernel, compile_call, lower_rocm, triton_calls


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One launch: the kernel's name, its grid, how many instructions its waves executed, and the emulator's time."""

    name: str
    grid: tuple[int, int, int]
    wave_instructions: int
    seconds: float


def run_kernel(
    compiled: CompiledKernel,
    program: Program,
    inputs: list[np.ndarray],
    outputs: list[tuple[tuple[int, ...], np.dtype]],
    aliases: dict[int, int],
) -> tuple[list[np.ndarray], int]:
    """Launch a kernel on arrays.

    Args:
        compiled, program: the kernel, and its machine code as decoded by `load_program`, or a broken version of it.
        inputs: one array for each of its operands.
        outputs: shape and dtype of each result.
        aliases: input -> output that share a buffer.

    Returns:
        The results, and the number of instructions executed, counted per wave. What the kernel did not write holds
        0xFF bytes.
    """
    memory = Memory()
    addresses = [memory.add(x, writable=i in aliases) for i, x in enumerate(inputs)]
    shared = {o: addresses[i] for i, o in aliases.items()}
    results = []
    for o, (shape, dtype) in enumerate(outputs):
        poison = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        results.append(shared.get(o) or memory.add(poison, writable=True))
    call = compiled.call
    executed = launch(program, call.grid, call.num_warps, memory, addresses + results, compiled.lds_bytes)
    arrays = [
        memory.content(address).copy().view(dtype).reshape(shape)
        for address, (shape, dtype) in zip(results, outputs, strict=True)
    ]
    return arrays, executed


class _Emulation:
    """The kernels of one `emulate` context, compiled once each, and what ran."""

    def __init__(self, arch: str, transform: Callable[[Program], Program]):
        self.arch, self.transform, self.ran = arch, transform, []
        self._programs = {}

    def load(self, fn, avals) -> tuple[CompiledKernel, Program]:
        calls = triton_calls(lower_rocm(fn, *avals, arch=self.arch))
        if len(calls) != 1:
            raise EmulatorError(f"a pallas_call that lowers to {len(calls)} kernels")
        if calls[0] not in self._programs:
            compiled = compile_call(calls[0], self.arch)
            program = self.transform(load_program(compiled.amdgcn, self.arch))
            self._programs[calls[0]] = compiled, program
        return self._programs[calls[0]]

    def emulated(self, fn, aliases: dict[int, int]):
        """fn, a function of flat arrays that is one pallas_call, run as machine code; vmap gives the kernel that
        Pallas makes of the batch."""

        @jax.custom_batching.custom_vmap
        def call(*xs):
            return self._callback(fn, aliases, xs)

        @call.def_vmap
        def rule(axis_size, in_batched, *xs):
            # Pallas itself would copy an aliased operand that is not batched, outside of the kernel.
            copies = [i in aliases and not b for i, b in enumerate(in_batched)]
            xs = [jnp.broadcast_to(x, (axis_size, *x.shape)) if c else x for x, c in zip(xs, copies, strict=True)]
            axes = [0 if b or c else None for b, c in zip(in_batched, copies, strict=True)]
            outs = self.emulated(jax.vmap(fn, axes, axis_size=axis_size), aliases)(*xs)
            return outs, [True] * len(outs)

        return call

    def _callback(self, fn, aliases, xs):
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]
        _check_single_kernel(fn, avals)
        compiled, program = self.load(fn, avals)
        outputs = [(x.shape, x.dtype) for x in jax.eval_shape(fn, *avals)]
        outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]

        def run(*arrays):
            start = time.perf_counter()
            results, executed = run_kernel(compiled, program, [np.asarray(a) for a in arrays], outputs, aliases)
            seconds = time.perf_counter() - start
            self.ran.append(KernelRun(compiled.call.name, compiled.call.grid, executed, seconds))
            return results

        return jax.pure_callback(run, outs, *xs, vmap_method="sequential")


def _check_single_kernel(fn, avals):
    """The kernel's operands must be the function's arguments as they are, and its results the function's."""
    jaxpr = jax.make_jaxpr(fn)(*avals).jaxpr
    while True:
        if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].invars != jaxpr.invars or jaxpr.eqns[0].outvars != jaxpr.outvars:
            raise EmulatorError(f"a pallas_call with computations around its kernel: {jaxpr}")
        eqn = jaxpr.eqns[0]
        if eqn.primitive.name == "pallas_call":
            return
        jaxpr = eqn.params["jaxpr"].jaxpr


@contextlib.contextmanager
def emulate(arch: str, *, transform: Callable[[Program], Program] = lambda p: p) -> Iterator[list[KernelRun]]:
    """Context in which every `pl.pallas_call` runs as machine code of an AMD GPU, on the CPU.

        with emulate("gfx942") as ran:
            o, state = gated_delta.chunk_gated_delta_rule(q, k, v, g, beta)
        assert ran

    Triton's AMD backend (extra `isa`) makes machine code of each kernel's ROCm lowering, which is then interpreted.
    Inside, `lax.platform_dependent` takes its `rocm` branch (or the default), so public functions run the kernels
    that a ROCm device would. They compose as ever with jit, vmap, grad and loops. jax's caches are cleared on entry
    and on exit: a function that was traced outside would otherwise run what it was traced to.

    Not thread-safe: until the context ends, `pl.pallas_call` and `jax.lax.platform_dependent` are replaced in their
    modules, for every thread of the process, and the caches cleared are everyone's. Code that took `pallas_call` by
    another name (`from ... import pallas_call`) is not reached. Contexts may not overlap or nest.

    Args:
        arch: gfx942, gfx950, gfx1100, gfx1151 or gfx1201.
        transform: applied to each decoded kernel before it runs; `Program.without` makes broken builds of it.

    Yields:
        The list of `KernelRun`, one entry for each launch so far. Assert that it is not empty: an empty list means
        that no kernel was reached, and the results prove nothing.

    Raises:
        EmulatorError: unknown architecture; or, where a kernel runs, an instruction that the emulator does not
            know, a memory access out of bounds, or anything else that the hardware leaves undefined.
    """
    Target(arch)
    emulation = _Emulation(arch, transform)
    pallas_call, platform_dependent = pl.pallas_call, jax.lax.platform_dependent

    def rocm_branch(*args, default=None, **branches):
        branch = branches.get("rocm", default)
        if branch is None:
            raise EmulatorError("platform_dependent without a rocm branch or a default")
        return branch(*args)

    def emulated_call(kernel, out_shape=None, *rest, interpret=False, input_output_aliases=None, **options):
        if interpret:
            raise EmulatorError("a pallas_call in interpret mode")
        aliases = dict(input_output_aliases or {})
        original = pallas_call(kernel, out_shape, *rest, input_output_aliases=aliases, **options)

        def call(*args):
            leaves, tree = jax.tree.flatten(args)
            leaves = [jnp.asarray(x) for x in leaves]
            results = jax.tree.structure(jax.eval_shape(original, *args))

            def flat(*xs):
                return tuple(jax.tree.leaves(original(*jax.tree.unflatten(tree, xs))))

            return jax.tree.unflatten(results, emulation.emulated(flat, aliases)(*leaves))

        return call

    jax.clear_caches()
    jax.lax.platform_dependent, pl.pallas_call = rocm_branch, emulated_call
    try:
        yield emulation.ran
    finally:
        pl.pallas_call, jax.lax.platform_dependent = pallas_call, platform_dependent
        jax.clear_caches()
