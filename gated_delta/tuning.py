"""How the gated delta kernels are cut on each architecture."""

import dataclasses

import jax.numpy as jnp

# Tiles of Triton's matrix products have at least 16 rows and columns, so neither a chunk nor a slice of V is narrower.
MIN_TILE = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """How one call is cut. Decode uses `dv_splits`, `num_warps` and `num_stages` only.

    Attributes:
      chunk_size: C, tokens in a chunk; a power of two, 16 to 128.
      window_chunks: W, chunks in a window. Scratch grows with W and never with the length of the sequence.
      dv_splits: slices of the V axis; each is scanned by its own program. Has to divide V.
      num_warps: warps (waves) of the scan and of decode, a power of two; the parallel passes take as many as their
        tiles need, in fp32 at least this.
      num_stages: depth of the compiler's software pipeline in loops that load, such as the scan's.
      outputs_in_scan: whether the scan computes the outputs too, and no pass after it: no states are written, but the
        scan needs more registers.
      overlap: whether what prepares a window is one kernel, whose programs run beside the scan of the window before, in
        the same launch, which then has `num_warps` warps. With more than one window what the scan reads is in memory
        twice. Only with `outputs_in_scan`.

    Raises:
      ValueError: a value out of its range, when the Config is built.
    """

    chunk_size: int
    window_chunks: int
    dv_splits: int
    num_warps: int = 4
    num_stages: int = 1
    outputs_in_scan: bool = False
    overlap: bool = False

    def __post_init__(self):
        for name in ("chunk_size", "window_chunks", "dv_splits", "num_warps", "num_stages"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        for name in ("outputs_in_scan", "overlap"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.overlap and not self.outputs_in_scan:
            raise ValueError(f"overlap must be False without outputs_in_scan, got {self.overlap!r}")
        if self.chunk_size not in (16, 32, 64, 128):
            raise ValueError(f"chunk_size must be 16, 32, 64 or 128, got {self.chunk_size!r}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps!r}")

    def check_splits(self, value_size: int) -> None:
        """Raises ValueError where `dv_splits` does not divide V; for a Config that a user gave."""
        if value_size % self.dv_splits:
            raise ValueError(f"config.dv_splits must divide the value size V = {value_size}, got {self.dv_splits}")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: where it applies, what it says, and what that rests on."""

    architecture: str
    itemsize: int
    config: Config
    reason: str


ROWS = (
    Row(
        "gfx1151",
        2,
        Config(16, 32, 4, 2, 1),
        "chunks of 16, 4 splits: -25 % for hip-ep 627's kernel; no spills",
    ),
    Row(
        "gfx1100",
        2,
        Config(16, 32, 4, 2, 1),
        "as gfx1151: 256 registers a lane, 64 KiB of LDS; no spills",
    ),
    Row(
        "gfx1201",
        2,
        Config(16, 32, 4, 2, 1),
        "as gfx1151: 256 registers a lane, 64 KiB of LDS; no spills",
    ),
    # One wave owns 16 columns of V: no product is computed twice and no barrier is waited for.
    Row(
        "gfx942", 2, Config(64, 16, 8, 1, 1), "scan: 10 instructions an MFMA, 791 in all (4 splits, 4 waves: 16, 1087)"
    ),
    Row(
        "gfx950", 2, Config(64, 16, 8, 1, 1), "scan: 18 instructions an MFMA, 720 in all (4 splits, 4 waves: 25, 1010)"
    ),
    Row(
        "sm_90",
        2,
        Config(32, 104, 8, 1, 3, outputs_in_scan=True, overlap=True),
        "H200, bf16, B 1, T 18778: 0.79 ms on the device; without overlap 0.92; 4 splits with 2 warps 0.90 to 0.91",
    ),
    Row("gfx942", 4, Config(32, 16, 8, 1, 1), "fp32 MFMA; 64 tokens would not fit the registers"),
    Row("gfx950", 4, Config(32, 16, 8, 1, 1), "fp32 MFMA; 64 tokens would not fit the registers"),
    Row("sm_90", 4, Config(16, 32, 4, 4, 2), "H200, T 18778: 8.3 ms; chunks of 32 spill: 9.7 at best"),
)
# Any other chip, by item size: the smallest tiles, which fit everywhere; in fp32 spread over more warps, since chips
# without fp32 matrix instructions keep whole operands in registers.
ANY = {2: Config(16, 32, 4, 4, 1), 4: Config(16, 32, 8, 8, 1)}


def default_config(architecture: str, dtype, value_size: int) -> Config:
    """The table's Config for an architecture id, a dtype and V.

    Of the row's `dv_splits`, the default keeps the largest number that divides V into slices of at least 16.
    """
    itemsize = jnp.dtype(dtype).itemsize
    rows = (r.config for r in ROWS if (r.architecture, r.itemsize) == (architecture, itemsize))
    config = next(rows, ANY[itemsize])
    fits = (n for n in range(config.dv_splits, 1, -1) if value_size % n == 0 and value_size // n >= MIN_TILE)
    return dataclasses.replace(config, dv_splits=next(fits, 1))
