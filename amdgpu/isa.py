"""What the Pallas kernels in a jitted function become on an AMD GPU: registers, LDS, occupancy, loops.

    reports = compile_for(fn, jax.ShapeDtypeStruct((1, 4096, 32, 128), "bfloat16"), arch="gfx942")

The machine code is what a chip would run, up to the version of Triton's AMD compiler: here that of the `triton`
package, in jaxlib another. Static evidence and no timing: what a kernel asks of the chip, not how long the chip takes.
"""

import dataclasses
import re
from collections.abc import Callable

from amdgpu import arch as architectures
from amdgpu import assembly
from amdgpu.assembly import Loop
from amdgpu.lowering import (
    CompiledKernel,
    CompileError,
    NoPallasKernel,
    TritonCall,
    compile_call,
    lower_rocm,
    triton_calls,
)

__all__ = [
    "CompileError",
    "CompiledKernel",
    "KernelReport",
    "Loop",
    "NoPallasKernel",
    "Occupancy",
    "TritonCall",
    "compile_call",
    "compile_for",
    "lower_rocm",
    "occupancy",
    "report",
    "triton_calls",
]


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Workgroups resident at once, by what a kernel asks for."""

    # A multiple of 1/2 where two CUs share a workgroup processor; 0 where a workgroup does not fit.
    workgroups_per_cu: float
    waves_per_simd: float
    # What runs out first: "registers", "LDS", "waves", "barriers", joined by "and" where they tie.
    limiter: str
    # The same as a sentence, with the numbers.
    reason: str


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel on one architecture."""

    name: str
    arch: str
    # Workgroups along x, y, z; waves of a workgroup; stages of the software pipeline.
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    # 32-bit registers of a wave, in each lane. `vgprs` is what counts for occupancy: on gfx9 it includes the
    # accumulation registers (`agprs`), which share the register file.
    vgprs: int
    agprs: int
    sgprs: int
    # Registers that did not fit, and bytes of scratch memory a lane has for them and for private arrays.
    spilled_vgprs: int
    spilled_sgprs: int
    scratch_bytes: int
    lds_bytes: int
    occupancy: Occupancy
    # Static instruction counts of the whole kernel, by class and, for matrix instructions, by opcode.
    counts: dict[str, int]
    matrix_kinds: dict[str, int]
    # Outer before inner, in the order of the text; each leaves out the loops inside of it.
    loops: tuple[Loop, ...]
    # The machine code this was read from.
    kernel: CompiledKernel = dataclasses.field(repr=False)

    @property
    def inner_loops(self) -> tuple[Loop, ...]:
        """Loops that hold no other loop."""
        return tuple(loop for loop in self.loops if loop.innermost)

    @property
    def scratch_in_loops(self) -> int:
        """Instructions inside any loop that touch scratch memory."""
        return sum(loop.counts["scratch"] for loop in self.loops)

    @property
    def faults(self) -> tuple[str, ...]:
        """What no kernel should be shipped with, a sentence each; empty where all is well.

        - It does not fit the chip: a workgroup's LDS or a wave's registers.
        - A loop touches scratch memory: registers spilled there are stored and loaded in every round.
        - A loop multiplies tiles (`tt.dot`) without matrix instructions, though the chip has them for the operands.
        """
        found = [] if self.occupancy.workgroups_per_cu else [self.occupancy.reason]
        dots = _dots(self.kernel.call.ttir)
        for loop in self.loops:
            if loop.counts["scratch"]:
                found.append(
                    f"loop {loop.label}: {loop.counts['scratch']} instructions touch scratch memory "
                    f"({self.spilled_vgprs} vector registers spilled, {self.scratch_bytes} B of scratch a lane)"
                )
            made = {i.source for i in loop.code}
            by_matrix = {i.source for i in loop.code if assembly.instruction_class(i.opcode) == "matrix"}
            for line in sorted((made - by_matrix) & dots.keys()):
                element, precision, text = dots[line]
                if _has_matrix_instruction(self.arch, element, precision):
                    found.append(f"loop {loop.label}: no matrix instruction for {text} (line {line} of the Triton IR)")
        return tuple(found)

    def as_dict(self) -> dict:
        """Everything but the machine code, ready for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "kernel"}
        fields["occupancy"] = dataclasses.asdict(self.occupancy)
        fields["grid"] = list(self.grid)
        fields["faults"] = list(self.faults)
        fields["loops"] = [
            {
                **{f.name: getattr(loop, f.name) for f in dataclasses.fields(loop) if f.name != "code"},
                "instructions": loop.instructions,
                "instructions_per_matrix": loop.instructions_per_matrix,
                "counts_per_matrix": loop.counts_per_matrix,
            }
            for loop in self.loops
        ]
        return fields


def compile_for(fn: Callable, *shapes, arch: str, **keywords) -> list[KernelReport]:
    """Compiles every Pallas kernel in a function for an AMD architecture and reports what came out.

    Args:
        fn: a function of arrays, jitted or not, that runs Pallas kernels on ROCm.
        *shapes: its positional arguments, `jax.ShapeDtypeStruct` or arrays (only shape and dtype are read).
        arch: architecture id, one of `amdgpu.arch.KNOWN`.
        **keywords: its keyword arguments; those made of arrays or shapes are traced, all others are static.

    Returns:
        One report per kernel in program order; kernels that are equal in everything are reported once.

    Raises:
        ValueError: unknown architecture.
        NoPallasKernel: `fn` has none on ROCm with these arguments (a ValueError as well).
        ImportError: triton is not installed; the message names the extra.
        CompileError: the compiler refuses a kernel; the message names it.

    For more from one compilation use its steps: `lower_rocm`, `triton_calls`, `compile_call`, `report`.
    """
    # Equal calls, such as one layer's kernel in every layer of a model, have equal machine code.
    calls = dict.fromkeys(triton_calls(lower_rocm(fn, *shapes, arch=arch, **keywords)))
    if not calls:
        name = getattr(fn, "__name__", repr(fn))
        raise NoPallasKernel(f"fn: {name} has no Pallas kernel when lowered for ROCm ({arch}) with these arguments")
    return [report(compile_call(call, arch)) for call in calls]


def report(kernel: CompiledKernel) -> KernelReport:
    """Reads the report off the machine code of one kernel."""
    text = kernel.amdgcn
    code = [i for block in assembly.blocks(text) for i in block.instructions]
    vgprs = assembly.metadata(text, "vgpr_count")
    sgprs = assembly.metadata(text, "sgpr_count")
    return KernelReport(
        name=kernel.name,
        arch=kernel.arch,
        grid=kernel.call.grid,
        num_warps=kernel.call.num_warps,
        num_stages=kernel.call.num_stages,
        vgprs=vgprs,
        agprs=assembly.metadata(text, "agpr_count"),
        sgprs=sgprs,
        spilled_vgprs=assembly.metadata(text, "vgpr_spill_count"),
        spilled_sgprs=assembly.metadata(text, "sgpr_spill_count"),
        scratch_bytes=assembly.metadata(text, "private_segment_fixed_size"),
        lds_bytes=kernel.lds_bytes,
        occupancy=occupancy(
            kernel.arch,
            num_warps=kernel.call.num_warps,
            vgprs=vgprs,
            sgprs=sgprs,
            lds_bytes=kernel.lds_bytes,
            wgp_mode=bool(assembly.metadata(text, "workgroup_processor_mode")),
        ),
        counts=assembly.count_classes(code),
        matrix_kinds=assembly.count_matrix_kinds(code),
        loops=tuple(assembly.loops(text)),
        kernel=kernel,
    )


def occupancy(
    arch: str, *, num_warps: int, vgprs: int, sgprs: int = 0, lds_bytes: int = 0, wgp_mode: bool = False
) -> Occupancy:
    """How many workgroups of `num_warps` waves a CU holds at once.

    With `s` SIMDs, `w` waves a workgroup, and amounts rounded up to what the hardware gives out in one piece:

        registers:  floor(s floor(file / vgprs) / w)      (on gfx9 the same for scalar registers)
        LDS:        floor(LDS of the CU / lds_bytes)
        waves:      floor(s max_waves / w)
        barriers:   16 a CU, for workgroups of more than one wave

    and the least of them; in WGP mode (gfx11, gfx12) all of it for a pair of CUs, then halved.
    Grids smaller than the chip are not considered.

    Raises:
        ValueError: unknown architecture.
    """
    chip = architectures.facts(arch)
    cus = chip.cus_per_wgp if wgp_mode else 1
    unit = "WGP" if cus > 1 else "CU"
    simds = cus * chip.simds_per_cu
    # A wave without vector registers does not exist: the hardware gives out one granule at least.
    given = _round_up(max(vgprs, 1), chip.vgpr_granule)
    waves = {"registers": chip.vgprs_per_simd // given}
    words = {"registers": f"{vgprs} VGPRs ({given} given out of {chip.vgprs_per_simd} a lane)"}
    if chip.sgprs_per_simd is not None:
        by_sgprs = chip.sgprs_per_simd // _round_up(max(sgprs, 1), chip.sgpr_granule)
        if by_sgprs < waves["registers"]:
            waves["registers"] = by_sgprs
            words["registers"] = f"{sgprs} SGPRs ({chip.sgprs_per_simd} a SIMD)"
    limits = {
        "registers": simds * waves["registers"] // num_warps,
        "waves": simds * chip.max_waves_per_simd // num_warps,
    }
    words["waves"] = f"{num_warps} waves a workgroup ({chip.max_waves_per_simd} a SIMD)"
    if lds_bytes:
        pool = cus * chip.lds_bytes_per_cu
        limits["LDS"] = pool // _round_up(lds_bytes, chip.lds_granule)
        words["LDS"] = f"{lds_bytes:,} B of LDS ({pool:,} B a {unit})"
    if num_warps > 1:
        limits["barriers"] = cus * chip.max_workgroups_per_cu
        words["barriers"] = f"one barrier a workgroup ({limits['barriers']} a {unit})"
    for limiter, asked, allowed, what, whose in (
        ("LDS", lds_bytes, chip.lds_bytes_per_workgroup, "B of LDS", "workgroup"),
        ("registers", vgprs, chip.vgprs_per_wave, "VGPRs", "wave"),
    ):
        if asked > allowed:
            reason = f"does not fit: {asked:,} {what} asked, a {whose} may have {allowed:,}"
            return Occupancy(0.0, 0.0, limiter, reason)
    least = min(limits.values())
    limiting = [name for name in limits if limits[name] == least]
    return Occupancy(
        workgroups_per_cu=least / cus,
        waves_per_simd=least * num_warps / simds,
        limiter=" and ".join(limiting),
        reason=f"{' and '.join(words[name] for name in limiting)}: {least or 'none fits'} a {unit}",
    )


_DOT = re.compile(r"\btt\.dot .*?(?:inputPrecision = (\w+) )?: tensor<([\dx]+)x(\w+)> \* tensor<([\dx]+)x\w+>")


def _dots(ttir: str) -> dict[int, tuple[str, str, str]]:
    """The products of tiles in Triton IR: line -> (element of the operands, precision asked for, in words)."""
    found = {}
    for number, line in enumerate(ttir.splitlines(), 1):
        if match := _DOT.search(line):
            precision, a, element, b = match.groups()
            found[number] = element, precision or "", f"the product of {a} and {b} {element}"
    return found


def _has_matrix_instruction(arch: str, element: str, precision: str) -> bool:
    if element == "f64":
        return False
    # bf16x3 and bf16x6 are products of bf16 terms.
    return element != "f32" or precision.startswith("bf16") or architectures.facts(arch).fp32_matrix


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
