"""How the gated delta kernels are cut on each architecture."""

import dataclasses

import jax.numpy as jnp

# Tiles of Triton's matrix products have at least 16 rows and columns, so neither a chunk nor a slice of V is narrower.
MIN_TILE = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Static shape of one prefill.

    Attributes:
      chunk_size: C, tokens in a chunk; a power of two, 16 to 128.
      window_chunks: W, chunks in a window. Scratch grows with W and never with the length of the sequence.
      dv_splits: slices of the V axis; each is scanned by its own program. Has to divide V.
      num_warps: wavefronts (warps) in a workgroup; a power of two.
      num_stages: depth of the software pipeline of the scan's loads.

    Raises:
      ValueError: a value out of its range, when the Config is built.
    """

    chunk_size: int
    window_chunks: int
    dv_splits: int
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self):
        if self.chunk_size not in (16, 32, 64, 128):
            raise ValueError(f"chunk_size must be 16, 32, 64 or 128, got {self.chunk_size!r}")
        for name in ("window_chunks", "dv_splits", "num_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
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
    Row("gfx1151", 2, Config(16, 32, 4, 4, 1), "chunk 32 -> 16, 4 splits: op -25 % measured on this chip"),
    Row("gfx1100", 2, Config(16, 32, 4, 4, 1), "as gfx1151: the same registers and LDS"),
    Row("gfx1201", 2, Config(16, 32, 4, 4, 1), "as gfx1151: the same registers and LDS"),
    Row("gfx942", 2, Config(64, 16, 4, 4, 1), "512 registers a lane hold chunks of 64 without spills"),
    Row("gfx950", 2, Config(64, 16, 4, 4, 1), "512 registers a lane hold chunks of 64 without spills"),
    Row("sm_90", 2, Config(64, 16, 4, 4, 3), "measured on an H200"),
    # fp32 tiles are twice as large and their products have no 16-bit matrix unit.
    Row("gfx942", 4, Config(32, 16, 4, 4, 1), "fp32 MFMA; tiles of 32 tokens fit the registers"),
    Row("gfx950", 4, Config(32, 16, 4, 4, 1), "fp32 MFMA; tiles of 32 tokens fit the registers"),
    Row("sm_90", 4, Config(32, 16, 4, 4, 2), "three TF32 products each; tiles of 32 tokens fit shared memory"),
)
# Any other chip: the smallest tiles, which fit everywhere.
ANY = Config(16, 32, 4, 4, 1)


def default_config(architecture: str, dtype, value_size: int) -> Config:
    """The table's Config for an architecture id, a dtype and V.

    Of the row's `dv_splits`, the default keeps the largest number that divides V into slices of at least 16.
    """
    itemsize = jnp.dtype(dtype).itemsize
    config = next((r.config for r in ROWS if (r.architecture, r.itemsize) == (architecture, itemsize)), ANY)
    fits = (n for n in range(config.dv_splits, 1, -1) if value_size % n == 0 and value_size // n >= MIN_TILE)
    return dataclasses.replace(config, dv_splits=next(fits, 1))
