"""From a jitted function to AMD machine code, without an AMD GPU.

    function --jax, for ROCm--> StableHLO with one custom call a Pallas kernel --its payload--> Triton IR
             --Triton's AMD backend--> assembly text

Every step is a plain function of its arguments, so whoever asked for a result can keep it and use it again.
`triton` is imported in the last step only.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from amdgpu import arch as architectures

# What jax's lowering of a Pallas kernel for GPUs through Triton emits.
TRITON_TARGET = "__gpu$xla.gpu.triton"

MISSING_TRITON = (
    "AMD machine code needs the Triton compiler, which is not installed: "
    'pip install "pallas-rocm-kernels[isa]" (the extra `isa`)'
)


class NoPallasKernel(ValueError):
    """A function that was lowered for ROCm holds no Pallas kernel."""


class CompileError(RuntimeError):
    """Triton's AMD backend refused a kernel; the message has its words, the kernel and the architecture."""


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """One Pallas kernel as it stands in a function lowered for ROCm."""

    name: str
    # Workgroups along x, y, z.
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    # Triton IR as text.
    ttir: str


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture."""

    call: TritonCall
    arch: str
    # The symbol in the assembly; XLA launches the kernel by it.
    name: str
    # Assembly text: the .amdgcn stage of Triton.
    amdgcn: str
    # Bytes of LDS that a workgroup asks for at launch (not in the assembly: Triton's LDS is dynamic).
    lds_bytes: int


def lower_rocm(fn: Callable, *avals, arch: str, **keywords) -> jax.stages.Lowered:
    """Lowers `fn` for a ROCm device of the given architecture, which need not be there.

    Args:
        fn: a function of arrays, jitted or not.
        *avals: its positional arguments: arrays, `jax.ShapeDtypeStruct`, or trees of them.
        arch: architecture id, one of `amdgpu.arch.KNOWN`.
        **keywords: its keyword arguments; those made of arrays or shapes are traced, all others are static.

    Raises:
        ValueError: unknown architecture.
        Whatever tracing `fn` or lowering its Pallas kernels raises.
    """
    architectures.facts(arch)
    traced = {name: _shapes(value) for name, value in keywords.items() if _is_array_tree(value)}
    static = {name: value for name, value in keywords.items() if name not in traced}
    # A function of its own for each call: nothing traced for another device is found in a cache.
    wrapped = jax.jit(functools.partial(fn, **static))
    # jax >= 0.11 asks for a device at lowering, and `arch.current_arch` reads its kind while tracing.
    device = AbstractDevice(platform="rocm", device_kind=arch, num_cores=None)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return wrapped.trace(*_shapes(avals), **traced).lower(lowering_platforms=("rocm",))


def _is_array(leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_array_tree(value) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(_is_array, leaves))


def _shapes(tree):
    # Arrays live on a device, which would contradict the abstract one.
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x, tree)


def triton_calls(lowered: jax.stages.Lowered) -> list[TritonCall]:
    """The Pallas kernels of a function lowered for ROCm in program order, those in loops and branches too."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    dialect.register_dialect(module.context)
    # Jitted functions and some bodies of loops are functions of the module: followed where they are called.
    functions = {
        ir.StringAttr(f.operation.attributes["sym_name"]).value: f.operation
        for f in module.body
        if f.operation.name == "func.func"
    }
    calls = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == TRITON_TARGET:
                calls.append(_triton_call(ir, operation))
        if operation.name == "func.call":
            visit_function(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    def visit_function(name):
        # Once each, however often it is called.
        if name in functions:
            visit(functions.pop(name))

    visit_function("main")
    # What is called in other ways than by func.call.
    for name in tuple(functions):
        visit_function(name)
    return calls


def _triton_call(ir, operation) -> TritonCall:
    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])

    def number(key):
        return int(ir.IntegerAttr(config[key]).value)

    payload = ir.StringAttr(config["ir"]).value_bytes
    with operation.context:
        module = ir.Module.parse(payload)
    return TritonCall(
        name=ir.StringAttr(config["name"]).value,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
        ttir=str(module),
    )


def load_triton() -> tuple:
    """(the module triton, its class GPUTarget).

    Raises:
        ImportError: triton is not installed; the message names the extra.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise ImportError(MISSING_TRITON) from error
    return triton, GPUTarget


def compile_call(call: TritonCall, arch: str) -> CompiledKernel:
    """Compiles one kernel to machine code of `arch`, without a GPU. Triton keeps results in its disk cache.

    Raises:
        ValueError: unknown architecture.
        ImportError: triton is not installed.
        CompileError: the compiler refuses the kernel.
    """
    wave_size = architectures.facts(arch).wave_size
    triton, GPUTarget = load_triton()
    with tempfile.TemporaryDirectory() as folder:
        # Triton takes a kernel given as IR from a file only, and tells the stage from its ending.
        path = pathlib.Path(folder, "kernel.ttir")
        path.write_text(call.ttir)
        # XLA lets LLVM contract a * b + c as well; without a choice Triton 3.9 warns.
        options = {"num_warps": call.num_warps, "num_stages": call.num_stages, "enable_fp_fusion": True}
        target = GPUTarget("hip", arch, wave_size)
        path.write_text(_simplified(triton, path, target, options))
        run = functools.partial(triton.compile, str(path), target, options)
        try:
            compiled = run()
        # Its passes raise what they please: RuntimeError, ValueError, AssertionError, errors of their own.
        except Exception as error:
            raise CompileError(
                f"kernel {call.name!r} (num_warps {call.num_warps}, num_stages {call.num_stages}) "
                f"does not compile for {arch}: {type(error).__name__}: {error}\n{_stderr_of(run)}".rstrip()
            ) from error
    return CompiledKernel(
        call=call,
        arch=arch,
        name=compiled.metadata.name,
        amdgcn=compiled.asm["amdgcn"],
        lds_bytes=compiled.metadata.shared,
    )


def _simplified(triton, path: pathlib.Path, target, options: dict) -> str:
    """The kernel after Triton's first passes, which XLA runs and `triton.compile` skips for a kernel given as IR.

    They fold a sum into the product before it, for one, so that a matrix instruction accumulates.
    """
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend = triton.compiler.make_backend(target)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    text = str(backend.make_ttir(module, {}, backend.parse_options(options)))
    # Its locations name the file: without a folder that differs each time, Triton finds the kernel in its cache.
    return text.replace(f"{path.parent}{os.sep}", "")


def _stderr_of(run: Callable) -> str:
    """What a call that raises writes to the process's stderr: LLVM and MLIR put their diagnostics there.

    It runs again, after the failure: were the first run captured and the compiler aborted, all would be lost.
    """
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.suppress(Exception):
                run()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        return file.read().decode(errors="replace")
