"""What a Pallas kernel becomes on an AMD GPU, seen and run without one.

- `amdgpu.compile_for(fn, *shapes, arch=...)`: registers, LDS, spills, occupancy and loops of every Pallas
  kernel in a jitted function, from real machine code (extra `isa`: `pip install "pallas-rocm-kernels[isa]"`).
- `amdgpu.emulate(arch)`: a context in which Pallas kernels run as that machine code, on the CPU.
- `amdgpu.arch`: facts per architecture, and the architecture that code is traced for.
- `python -m amdgpu --help`: the same from a shell.

Static evidence: nothing here measures time. Importing this package imports neither the compiler nor the
emulator, so kernels may use `amdgpu.arch` at no cost.
"""

__all__ = ["arch", "compile_for", "emulate"]

from typing import TYPE_CHECKING

from amdgpu import arch

if TYPE_CHECKING:
    from amdgpu.emulator import emulate
    from amdgpu.isa import compile_for


def __getattr__(name: str):
    # Imported at first use: kernels import amdgpu.arch and must not pull in a compiler or an interpreter.
    if name == "compile_for":
        from amdgpu.isa import compile_for

        return compile_for
    if name == "emulate":
        from amdgpu.emulator import emulate

        return emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
