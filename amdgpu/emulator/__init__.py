"""A functional interpreter of AMD GPU machine code, in numpy: what a kernel computes on the chip, without the chip.

    with amdgpu.emulate("gfx942") as ran:
        o, state = gated_delta.chunk_gated_delta_rule(q, k, v, g, beta)
    assert ran

It takes the assembly text that Triton's AMD backend emits for gfx942, gfx950, gfx1100, gfx1151 and gfx1201, decodes
every line once into a function on numpy arrays, and runs the workgroups of a grid. Integers, comparisons, moves,
memory, lane masks and control flow are exact. Float arithmetic is rounded once, as IEEE 754 and AMD's documents
define it.

An opcode or a modifier that it does not know is an error which names kernel, line and instruction, and so is
everything that the hardware would let pass in silence: an access outside of the buffers passed, a store to an input,
an LDS access beyond the kernel's size, LDS bytes that waves exchange without a barrier between. Registers, LDS,
scratch and results hold NaN patterns until they are written.

What it does not model:

- Time: no cycles, no caches, no bank conflicts, no occupancy. Nothing here says how fast a kernel is.
- Hazards and waits: a load's result is there at once, so a missing `s_waitcnt` or `s_nop` does not show.
- The rounding inside matrix instructions: products and sums are formed in float64 and rounded once, where hardware
  rounds (and on some chips flushes) partial sums in an order of its own. XF32 operands are rounded to nearest.
- The last bit of transcendentals: `v_exp_f32` and the like are rounded to nearest from float64; hardware is within one
  ulp. Their flushing of subnormals is modelled.
- NaN payloads and floating-point exceptions. Rounding modes other than to nearest are refused.
- The order in which waves and workgroups run: they run in lockstep, meeting at barriers. Kernels that talk to each
  other through global memory, atomics, function calls and traps are refused or meaningless.

Where the parts are: `parse` (text to instructions), `operands`, `registers` and `memory` (what instructions read and
write), `scalar`, `vector*`, `packed`, `division`, `lanes`, `matrix`, `lds` and `vmem` (one table, or one decoder, per
class of instructions), `control` and `program` (basic blocks), `launch` (workgroups and barriers), `context`
(`emulate`).

Sources: AMD's "RDNA3", "RDNA4", "AMD Instinct MI300 (CDNA3)" and "CDNA4" instruction set architecture documents,
AMD's matrix instruction calculator (https://github.com/ROCm/amd_matrix_instruction_calculator) for layouts, and
LLVM's https://llvm.org/docs/AMDGPUUsage.html for the state in which a kernel starts.
"""

from amdgpu.emulator.context import KernelRun, emulate, run_kernel
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.program import Program, assemble, load_program

__all__ = ["EmulatorError", "KernelRun", "Program", "assemble", "emulate", "load_program", "run_kernel"]
