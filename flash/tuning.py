"""How the flash attention kernels are cut on each architecture."""

import dataclasses
import functools

import jax.numpy as jnp

from amdgpu.arch import ARCHITECTURES

ORDERS = ("block_first", "head_first", "swizzled_head_first", "kv_group_first")


def check_tiles(config) -> None:
    """Of a Config of attention: the tiles, the warps and the stages."""
    check_ints(config, "block_q", "block_k", "num_warps", "num_stages", "head_tile")
    for name in ("block_q", "block_k", "head_tile"):
        if getattr(config, name) not in (16, 32, 64, 128, 256):
            raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {getattr(config, name)!r}")
    if config.num_warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {config.num_warps!r}")
    if config.num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {config.num_stages!r}")


def check_ints(config, *names: str) -> None:
    """Of a Config: neither 16.0 nor True, which equal ints."""
    for name in names:
        if type(getattr(config, name)) is not int:
            raise ValueError(f"{name} must be an int, got {getattr(config, name)!r}")


def check_bool(config, name: str) -> None:
    if type(getattr(config, name)) is not bool:
        raise ValueError(f"{name} must be a bool, got {getattr(config, name)!r}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Static shape of one attention call.

    Attributes:
      block_q: query rows of a workgroup; a power of two, 16 to 256. Short inputs take fewer.
      block_k: keys of a tile; a power of two, 16 to 256. Short inputs take fewer.
      num_warps: wavefronts (warps) in a workgroup; a power of two, 1 to 16. Short inputs take fewer.
      num_stages: depth of the software pipeline of the loads of keys and values.
      head_tile: most elements of a head in one tile, a power of two from 16 to 256; larger heads are walked in parts.
      splits: workgroups that share the keys of one query block, 1 to 64; None: as many as fill the device.
      order: the order of workgroups, one of `flash.grid`'s.
      fixed_maximum: whether the weights of most keys are relative to the largest logit of the first tiles, which saves
        instructions; where other logits exceed that by 35 or more (natural units), a second kernel computes the query
        block once more. In bf16, where nothing but positions hides keys and no split shares them; else as without.
      scores_ahead: where a maximum is fixed, whether the logits of a tile are computed ahead of the weights of the tile
        before it; elsewhere without effect.

    Raises:
      ValueError: a value out of its range, when the Config is built.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1
    head_tile: int = 256
    splits: int | None = None
    order: str = "kv_group_first"
    fixed_maximum: bool = False
    scores_ahead: bool = False

    def __post_init__(self):
        check_tiles(self)
        if self.splits is not None and not (type(self.splits) is int and 1 <= self.splits <= 64):
            raise ValueError(f"splits must be None or an int from 1 to 64, got {self.splits!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        check_bool(self, "fixed_maximum")
        check_bool(self, "scores_ahead")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: where it applies, what it says, and what that rests on."""

    architecture: str
    itemsize: int
    # Heads up to this size: the larger of K and V.
    head_size: int
    config: Config
    reason: str
    # Instead of `config` where no maximum is fixed; None: the same.
    moving: Config | None = None


# Static evidence (machine code, not a timing): instructions of the mask-free loop / of the masked loop of a causal call
# for each matrix instruction, fp16, T = S = 4096; no scratch access in them unless it is said. "bf16": its mask-free
# loop where the maximum is fixed. That is off where it would cost workgroups a CU, or spill.
fixed = functools.partial(Config, fixed_maximum=True)
ROWS = (
    # A fixed maximum would leave bf16 two workgroups a CU here, not three.
    Row("gfx942", 2, 64, Config(128, 64, 4, 1), "static: 9.0 / 11.9, two workgroups a CU"),
    Row("gfx942", 2, 128, fixed(128, 64, 4), "static: 6.3 / 7.9, nothing spilled; bf16 5.4"),
    Row("gfx942", 2, 256, fixed(128, 32, 4), "static: 6.3 / 7.3; 64 keys take 414 registers; bf16 5.0"),
    Row("gfx942", 2, 576, fixed(64, 16, 4), "static: 7.2 / 7.1; bf16 5.1"),
    Row("gfx950", 2, 64, fixed(256, 128, 8), "static: 13.0 / 17.4; 128x64 with 4 waves: 15.2 / 20.6; bf16 10.6"),
    Row("gfx950", 2, 128, fixed(256, 64, 8), "static: 9.4 / 12.0; 128x64 with 4 waves: 10.5 / 14; bf16 7.2"),
    Row("gfx950", 2, 256, fixed(128, 32, 8), "static: 10.7 / 12.0; 256 rows spill; bf16 7.5"),
    Row("gfx950", 2, 576, fixed(64, 32, 8), "static: 9.0 / 10.1; bf16 7.0"),
    Row("gfx1151", 2, 64, Config(128, 64, 8, 1), "static: 13.5 / 16.4; 64x32 with 4 waves: 16.9 / 24"),
    Row("gfx1151", 2, 128, Config(64, 32, 4, 2, head_tile=64), "static: 13.9 / 15.7; whole heads spill in the loops"),
    Row("gfx1151", 2, 160, Config(64, 16, 4, 2), "static: 18.0 / 19.9; 32 keys or larger heads spill in the loops"),
    Row("gfx1100", 2, 64, Config(128, 64, 8, 2), "static: 18.5 / 24.6; with one stage a loop of bf16 spills"),
    Row("gfx1100", 2, 128, Config(64, 32, 4, 2, head_tile=64), "static: 16.7 / 19.9; whole heads spill in the loops"),
    Row("gfx1201", 2, 64, Config(128, 64, 8, 1), "static: 16.0 / 19.0; 64x32 with 4 waves: 19.6 / 24.3"),
    Row("gfx1201", 2, 128, fixed(64, 32, 4), "static: 13.2 / 15.8, nothing spilled; bf16 11.5"),
    Row(
        "sm_90",
        2,
        64,
        fixed(128, 64, 4, 3, scores_ahead=True),
        "H200, bf16, B4 T4096 H32: 1.12 / 0.68 ms; as moving but fixed 1.26 / 0.66; a bias spills with 4 warps",
        Config(128, 64, 8, 4),
    ),
    Row(
        "sm_90",
        2,
        128,
        fixed(256, 64, 8, 3),
        "H200, T16384 H64: 16.7 / 8.5 ms; 128x64 17.4 / 8.7, moving 18 / 9.1; 256 rows spill with a bias or segments",
        Config(128, 64, 8, 3),
    ),
    Row("sm_90", 2, 256, Config(128, 64, 8, 2), "two stages of 64 keys fill the shared memory"),
    Row("sm_90", 2, 576, Config(64, 32, 8, 1), "as much as fits the shared memory"),
    Row("gfx942", 4, 128, Config(64, 32, 4, 1), "static: two workgroups a CU"),
    Row("gfx942", 4, 576, Config(64, 16, 4, 1, head_tile=64), "static: fits the LDS; whole heads spill in the loops"),
    Row("gfx950", 4, 128, Config(128, 32, 4, 1), "static: two workgroups a CU"),
    Row("gfx950", 4, 576, Config(64, 16, 4, 1, head_tile=64), "static: fits the LDS; whole heads spill in the loops"),
    Row("sm_90", 4, 128, Config(64, 32, 4, 2), "three TF32 products each"),
)
# Any other chip, dtype or size: small tiles, which fit everywhere.
ANY = Config(64, 32, 4, 1)
ANY_LARGE = Config(32, 16, 4, 1)

# The most that the kernels are built for: multi-head latent attention has (576, 512).
LARGEST_KEY_SIZE, LARGEST_VALUE_SIZE = 576, 512

# Workgroups that a device runs at once, at least one on each of its compute units.
COMPUTE_UNITS = {"sm_90": 132} | {row.id: row.cus for row in ARCHITECTURES}
# With fewer keys, the launch for lost blocks may cost more than a fixed maximum saves.
KEYS_FOR_A_FIXED_MAXIMUM = 2048
# A split of fewer tiles does not pay for its part of the merge.
TILES_OF_A_SPLIT = 4


def default_config(architecture: str, dtype, key_size: int, value_size: int, *, moving: bool = False) -> Config:
    """The table's Config for an architecture id, a dtype, K and V; `moving`: for a call that fixes no maximum."""
    # fp8 is multiplied as fp16.
    itemsize = max(2, jnp.dtype(dtype).itemsize)
    size = max(key_size, value_size)
    for row in ROWS:
        if (row.architecture, row.itemsize) == (architecture, itemsize) and size <= row.head_size:
            return config_of(row, moving)
    return ANY if size <= 128 else ANY_LARGE


def config_of(row, moving: bool):
    """The Config of a Row, of this table or of gqa's."""
    config = row.moving if moving and row.moving else row.config
    return dataclasses.replace(config, fixed_maximum=False) if moving else config


def default_splits(architecture: str, workgroups: int, tiles: int) -> int:
    """Into how many parts the keys of a query block are split.

    One, where the B H Q `workgroups` fill the device; else as many as it has room for, each of `TILES_OF_A_SPLIT` tiles
    of keys at least.
    """
    room = COMPUTE_UNITS.get(architecture, 1) // max(workgroups, 1)
    return max(1, min(room, tiles // TILES_OF_A_SPLIT, 64))
