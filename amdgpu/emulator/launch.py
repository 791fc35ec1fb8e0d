"""Running a program over a grid of workgroups."""

import math

import numpy as np

from amdgpu.emulator.control import arrive
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.memory import Lds, Memory, Scratch, Storage
from amdgpu.emulator.program import Program
from amdgpu.emulator.registers import TTMP, Waves

# As many workgroups run in lockstep as fill about this many lanes: numpy's fixed cost per call is paid once for all
# of them, and their registers still stay in the processor's cache.
LANES_IN_LOCKSTEP = 4096


def launch(
    program: Program,
    grid: tuple[int, int, int],
    num_warps: int,
    memory: Memory,
    arguments: list[int],
    lds_bytes: int = 0,
    limit: int = 100_000_000,
) -> int:
    """Run every workgroup of the grid; the number of instructions executed, counted per wave.

    arguments: the kernel's 64-bit arguments, addresses from `Memory.add`. limit: of instructions.
    Raises EmulatorError naming kernel, line and instruction for what goes wrong at run time.
    """
    number = program.listing.descriptor.get
    words = np.zeros(max(len(arguments), number("kernarg_size", 0) // 8), np.uint64)
    words[: len(arguments)] = arguments
    kernarg = memory.add(words, writable=False)
    lds_bytes = max(lds_bytes, number("group_segment_fixed_size", 0))
    total, per_batch = math.prod(grid), max(1, LANES_IN_LOCKSTEP // (num_warps * program.target.lanes))
    executed = 0
    for first in range(0, total, per_batch):
        workgroups = np.arange(first, min(first + per_batch, total))
        waves = _start(program, grid, num_warps, memory, kernarg, lds_bytes, workgroups)
        executed += run_waves(program, waves, limit - executed)[0]
    return executed


def _start(program, grid, num_warps, memory, kernarg, lds_bytes, workgroups):
    target, number, count = program.target, program.listing.descriptor.get, len(workgroups)
    scratch = Scratch(count * num_warps, target.lanes, number("private_segment_fixed_size", 0))
    storage = Storage(memory, Lds(count, lds_bytes, program.lds_granule), scratch, num_warps)
    slot = np.repeat(np.arange(count), num_warps)
    wave = np.tile(np.arange(num_warps), count)
    w = Waves.start(program.num_vgprs, target.lanes, slot, wave, storage)
    x, y, z = (i[slot] for i in np.unravel_index(workgroups, grid, order="F"))
    _set_scalars(w, program, kernarg, x, y, z)
    w.vgpr_u32[0][...] = wave[:, None] * target.lanes + np.arange(target.lanes)
    return w


def _set_scalars(w, program, kernarg, x, y, z):
    """The registers that hardware sets: the address of the arguments, and which workgroup and wave this is.

    The order is that of "Initial Kernel Execution State" in LLVM's AMDGPUUsage.
    """
    number, n = program.listing.descriptor.get, 0
    for name, size in (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2)):
        n += size if number(f"user_sgpr_{name}", 0) else 0
    if number("user_sgpr_kernarg_segment_ptr", 0):
        w.sgprs[:, n], w.sgprs[:, n + 1] = kernarg & 0xFFFFFFFF, kernarg >> 32
    if program.target.gfx12:
        w.sgprs[:, TTMP + 9], w.sgprs[:, TTMP + 7] = x, y | z << 16
        w.sgprs[:, TTMP + 8] = w.wave[:, 0] << 25
        return
    n = number("user_sgpr_count", 0)
    for axis, value in zip("xyz", (x, y, z), strict=True):
        if number(f"system_sgpr_workgroup_id_{axis}", 0):
            w.sgprs[:, n] = value
            n += 1


def run_waves(program: Program, waves: Waves, limit: int = 100_000_000) -> tuple[int, list[Waves]]:
    """Run waves to their end: instructions executed, and the groups in which the waves ended.

    Groups whose control flow has parted run one by one, the one furthest behind first, so that they meet again
    where their paths do.
    """
    ready, waiting, finished, executed = {0: [waves]}, [], [], 0
    while ready or waiting:
        if not ready:
            # Every wave that is left stands at a barrier.
            waves.storage.lds.barrier()
            for at, group in waiting:
                ready.setdefault(at, []).append(group)
            waiting = []
        at = min(ready)
        groups = ready.pop(at)
        w = groups[0] if len(groups) == 1 else Waves.merge(groups)
        block = program.blocks.get(at)
        if block is None:
            raise EmulatorError(f"{program.kernel}: the program runs past its end")
        with np.errstate(all="ignore"):
            _run_block(program, block, w)
        executed += w.count * len(block.instructions)
        if executed > limit:
            raise EmulatorError(f"{program.kernel}: more than {limit} instructions")
        if block.end == "exit":
            finished.append(w)
            continue
        if block.end == "barrier":
            waiting.append((block.following, w))
            continue
        for to, group in _successors(block, w):
            ready.setdefault(to, []).append(group)
    return executed, finished


def _successors(block, w):
    if block.end == "next":
        return [(block.following, w)]
    if block.end == "jump":
        return [(block.target, w)]
    taken = block.condition(w)[:, 0]
    count = np.count_nonzero(taken)
    if count == len(taken):
        return [(block.target, w)]
    if count == 0:
        return [(block.following, w)]
    there, here = w.split(taken)
    return [(block.target, there), (block.following, here)]


def _run_block(program, block, w):
    i = 0
    try:
        for i, step in enumerate(block.steps):  # noqa: B007
            step(w)
        if block.end == "barrier":
            i += 1
            arrive(block.instructions[-1], w)
    except Exception as error:
        inst = block.instructions[min(i, len(block.instructions) - 1)]
        raise EmulatorError(f"{program.kernel}, line {inst.line}: {inst.text}: {error}") from error
