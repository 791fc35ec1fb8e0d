"""What the emulator must know of an architecture."""

import dataclasses

from amdgpu.emulator.errors import EmulatorError

#: Architecture id -> lanes of a wave. gfx9 runs 64; Triton compiles for 32 on gfx11 and gfx12.
LANES = {"gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1151": 32, "gfx1201": 32}


@dataclasses.dataclass(frozen=True)
class Target:
    """An architecture id and the facts that change what an instruction means."""

    arch: str

    def __post_init__(self):
        if self.arch not in LANES:
            raise EmulatorError(f"unknown architecture {self.arch!r}; the emulator knows {', '.join(LANES)}")

    @property
    def lanes(self) -> int:
        return LANES[self.arch]

    @property
    def gfx9(self) -> bool:
        return self.arch.startswith("gfx9")

    @property
    def gfx11(self) -> bool:
        return self.arch.startswith("gfx11")

    @property
    def gfx12(self) -> bool:
        return self.arch.startswith("gfx12")

    @property
    def fnuz(self) -> bool:
        """8-bit floats have no negative zero and one NaN (gfx942); else they are the OCP formats."""
        return self.arch == "gfx942"
