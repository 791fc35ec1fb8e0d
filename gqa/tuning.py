"""How the kernels of grouped-query attention are cut on each architecture, and which of them runs."""

import dataclasses
import functools

from flash.tuning import COMPUTE_UNITS, check_bool, check_ints, check_tiles, config_of


@dataclasses.dataclass(frozen=True)
class Config:
    """Static shape of one call.

    Attributes:
      block_q: query rows of a workgroup; a power of two, 16 to 256. Short inputs take fewer. Rows of one head in the
        prefill kernel, of all heads of a KV group in the rows kernel.
      block_k: keys of a tile; a power of two, 16 to 256. Short inputs take fewer.
      num_warps: wavefronts (warps) in a workgroup; a power of two, 1 to 16. Short inputs take fewer in the prefill
        kernel.
      num_stages: depth of the software pipeline of the loads of keys and values.
      head_tile: most elements of a head in one tile, a power of two from 16 to 256; larger heads are walked in parts.
      block_keys: keys that one workgroup of the rows kernel walks, a multiple of block_k. Where there are more, several
        workgroups share them, and a second kernel merges what they leave. The prefill kernel has no use for it.
      fixed_maximum, scores_ahead: as in `flash.Config`. The rows kernel has no use for them.
      one_loop: whether the prefill kernel walks all its tiles in one loop with masks, whose loads are pipelined from
        the first tile to the last, and not in three loops. For windows of few tiles.

    Raises:
      ValueError: a value out of its range, when the Config is built.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1
    head_tile: int = 256
    block_keys: int = 2048
    fixed_maximum: bool = False
    scores_ahead: bool = False
    one_loop: bool = False

    def __post_init__(self):
        check_tiles(self)
        check_ints(self, "block_keys")
        for name in ("fixed_maximum", "scores_ahead", "one_loop"):
            check_bool(self, name)
        if self.fixed_maximum and self.one_loop:
            raise ValueError(f"one_loop must be False beside fixed_maximum, got {self.one_loop!r}")
        if self.block_keys < 1 or self.block_keys % self.block_k:
            raise ValueError(f"block_keys must be a multiple of block_k = {self.block_k}, got {self.block_keys!r}")


KERNELS = ("prefill", "prefill_window", "rows")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: where it applies, what it says, and what that rests on."""

    architecture: str
    # One of KERNELS; a window is few tiles of keys, and takes more registers.
    kernel: str
    # Of the products: q's.
    itemsize: int
    # Heads up to this size: the larger of K and V.
    head_size: int
    config: Config
    reason: str
    # As in `flash.tuning.Row`.
    moving: Config | None = None


# Static evidence (machine code, not a timing): instructions of the mask-free loop / of the masked loops for each matrix
# instruction, fp16, T = 512 behind 8192 keys (prefill) or one row over 8192 keys (rows); no scratch access in them
# unless it is said. "bf16": its mask-free loop where the maximum is fixed (`flash.tuning`).
fixed = functools.partial(Config, fixed_maximum=True)
ROWS = (
    Row("gfx942", "prefill", 2, 64, fixed(128, 64, 4), "static: 9.5 / 11.9, two workgroups a CU; bf16 8.2"),
    Row("gfx942", "prefill", 2, 128, Config(128, 64, 4, 1), "static: 6.3 / 7.9, nothing spilled"),
    Row("gfx942", "prefill", 2, 256, fixed(128, 32, 4), "static: 6.0 / 7.5, nothing spilled; bf16 4.4"),
    Row("gfx942", "prefill_window", 2, 128, Config(128, 64, 4, 1), "static: 9.7 / 14.3; 64x64 takes 1.6 times as many"),
    Row("gfx942", "prefill_window", 2, 256, Config(128, 32, 4, 1), "static: 6.0 / 7.8"),
    Row("gfx942", "rows", 2, 128, Config(64, 64, 4, 1), "static: four workgroups a CU at 64, three at 128"),
    Row("gfx942", "rows", 2, 256, Config(64, 32, 4, 1), "static: four workgroups a CU"),
    Row("gfx950", "prefill", 2, 64, fixed(256, 128, 8), "static: 13.1 / 17.4; 128x64, 4 waves: 15.4 / 20.7; bf16 10.9"),
    Row("gfx950", "prefill", 2, 128, fixed(256, 64, 8), "static: 9.5 / 12.0; 128x64, 4 waves: 10.8 / 13.2; bf16 7.5"),
    Row("gfx950", "prefill", 2, 256, fixed(128, 32, 8), "static: 10.4 / 12.2; bf16 7.8"),
    Row("gfx950", "prefill_window", 2, 128, Config(128, 64, 4, 1), "static: 15.4 / 24.3, at 128 10.7 / 15.5"),
    Row("gfx950", "prefill_window", 2, 256, Config(128, 32, 8, 1), "static: 10.8 / 14.2"),
    Row("gfx950", "rows", 2, 128, Config(64, 64, 4, 1), "static: five workgroups a CU at 64, three at 128"),
    Row("gfx950", "rows", 2, 256, Config(64, 32, 4, 1), "static: three workgroups a CU"),
    Row("gfx1100", "prefill", 2, 128, Config(64, 32, 4, 1, head_tile=64), "static: two stages or whole heads spill"),
    Row("gfx1100", "prefill_window", 2, 128, Config(64, 16, 4, 2), "static: 21 registers spilled, none in a loop"),
    Row("gfx1151", "prefill", 2, 64, Config(128, 64, 8, 1), "static: 14.7 / 16.0; 64x32 with 4 waves: 18.6 / 20.7"),
    Row("gfx1151", "prefill", 2, 128, Config(64, 32, 4, 1, head_tile=64), "static: 15.2 / 16.0; two stages may spill"),
    Row("gfx1151", "prefill", 2, 160, Config(64, 16, 4, 2), "static: 18.1 / 19.9"),
    Row("gfx1151", "prefill", 2, 256, Config(64, 16, 4, 1), "static: 16.4 / 17.5, 22 of 525 touch scratch"),
    Row("gfx1151", "prefill_window", 2, 64, Config(128, 64, 8, 2), "static: 14.1 / 18.5; with one stage bf16 spills"),
    Row("gfx1151", "prefill_window", 2, 128, Config(64, 32, 4, 1, head_tile=64), "static: 14.7 / 17.7"),
    Row("gfx1151", "prefill_window", 2, 160, Config(64, 16, 4, 2), "static: 18.2 / 20.8"),
    Row("gfx1151", "prefill_window", 2, 256, Config(64, 16, 4, 1), "static: 16.0 / 18.1, 18 of 511 touch scratch"),
    Row("gfx1151", "rows", 2, 128, Config(64, 32, 4, 1), "static: 4096 B of LDS at 64, 8192 at 128, nothing spilled"),
    Row("gfx1151", "rows", 2, 160, Config(16, 32, 4, 1), "static: 8192 B of LDS, nothing spilled; 32 rows spill"),
    Row("gfx1151", "rows", 2, 256, Config(16, 16, 4, 1), "static: 8192 B of LDS, nothing spilled"),
    Row(
        "sm_90",
        "prefill",
        2,
        64,
        fixed(128, 64, 4, 3, scores_ahead=True),
        "H200, bf16, T16384 64/8/64: 4.50 ms; as moving but fixed 4.7 to 4.9; a bias spills with 4 warps",
        Config(128, 64, 8, 3),
    ),
    Row(
        "sm_90",
        "prefill",
        2,
        128,
        fixed(256, 64, 8, 3),
        "H200, T8192 32/8/128: 1.10 ms; 128x64 1.16, not fixed 1.27; 256 rows spill with a bias",
        Config(128, 64, 8, 3),
    ),
    Row("sm_90", "prefill", 2, 256, Config(128, 64, 8, 2), "two stages of 64 keys fill the shared memory"),
    Row(
        "sm_90",
        "prefill_window",
        2,
        64,
        Config(64, 64, 4, 3, one_loop=True),
        "H200, T16384 64/8/64, window 128: 0.226 ms; three loops 0.29, with two stages 0.25; 128x64 0.31",
    ),
    Row(
        "sm_90",
        "prefill_window",
        2,
        128,
        Config(64, 32, 4, 3, one_loop=True),
        "H200, T8192 32/8/128, window 128: 0.112 ms; 64 keys 0.114, three loops 0.13, 128x64 0.19",
    ),
    Row("sm_90", "prefill_window", 2, 256, Config(128, 64, 8, 2), "as without a window"),
    Row("sm_90", "rows", 2, 128, Config(64, 64, 4, 3), "H200: 71 us for 131072 keys of 8 heads of 64, as all tiles"),
    Row("sm_90", "rows", 2, 256, Config(64, 32, 4, 3), "not measured: as for 128, with half the keys"),
    *(
        Row(architecture, kernel, 4, size, config, reason)
        for architecture in ("gfx942", "gfx950")
        for kernel, size, config, reason in (
            ("prefill", 128, Config(64, 32, 4, 1), "static: two workgroups a CU"),
            ("prefill", 256, Config(64, 16, 4, 1, head_tile=64), "static: two workgroups a CU"),
            ("prefill_window", 128, Config(64, 32, 4, 1), "static: two workgroups a CU"),
            ("prefill_window", 256, Config(64, 16, 4, 1, head_tile=64), "static: two workgroups a CU"),
            ("rows", 128, Config(64, 32, 4, 1), "static: two workgroups a CU"),
            ("rows", 256, Config(32, 16, 4, 1), "static: two workgroups a CU"),
        )
    ),
    *(
        Row("sm_90", kernel, 4, size, config, reason)
        for kernel, size, config, reason in (
            ("prefill", 64, Config(64, 32, 4, 2), "static: nothing spilled"),
            ("prefill", 128, Config(64, 16, 4, 2), "static: nothing spilled; 32 keys spill"),
            ("prefill", 256, Config(64, 16, 4, 1, head_tile=64), "static: whole heads spill 20 times as much"),
            ("prefill_window", 64, Config(64, 32, 4, 2), "static: as without a window"),
            ("prefill_window", 128, Config(64, 16, 4, 2), "static: as without a window"),
            ("prefill_window", 256, Config(64, 16, 4, 1, head_tile=64), "static: as without a window"),
            ("rows", 128, Config(32, 32, 4, 2), "static: nothing spilled"),
            ("rows", 256, Config(32, 16, 4, 1, head_tile=64), "static: whole heads spill 10 times as much"),
        )
    ),
)
# Any other chip, dtype or size: small tiles, which fit everywhere.
ANY = Config(64, 32, 4, 1)
ANY_LARGE = Config(32, 16, 4, 1)

# The most that the kernels are built for.
LARGEST_SIZE = 256

# A KV group with up to that many rows goes to the rows kernel.
FEW_ROWS = 64
# And one with up to that many where there are more keys than those of one block: it shares them out, and the prefill
# kernel, one workgroup for each head and 64 rows or more, would leave most of a device idle.
SOME_ROWS, MANY_KEYS = 512, 2048


def uses_rows_kernel(rows: int, keys: int) -> bool:
    """Whether the rows kernel runs: `rows` = T H // G query rows of a KV group, and `keys` that they may see."""
    return rows <= FEW_ROWS or (rows <= SOME_ROWS and keys > MANY_KEYS)


def default_config(
    architecture: str, itemsize: int, key_size: int, value_size: int, kernel: str, *, moving: bool = False
) -> Config:
    """The table's Config of a kernel for an architecture id, bytes of q's dtype, K and V; `moving` as in `flash`."""
    size = max(key_size, value_size)
    for row in ROWS:
        if (row.architecture, row.kernel, row.itemsize) == (architecture, kernel, itemsize) and size <= row.head_size:
            return config_of(row, moving)
    return ANY if size * itemsize <= 256 else ANY_LARGE


def for_window(config: Config, window: int | None) -> Config:
    """A Config of the table, for a window of so many keys: with more than four tiles, most need no mask."""
    few = window is not None and window <= 4 * config.block_k
    return config if few else dataclasses.replace(config, one_loop=False)


def default_block_keys(architecture: str, workgroups: int, keys: int) -> int:
    """Keys of a block for the rows kernel, with so many `workgroups` for each block.

    2048; or less where that would leave more than half of a device idle, but not less than 256, and not where one block
    holds all keys, since then no merge is needed.
    """
    size = 2048
    while keys > 2048 and size > 256 and 2 * workgroups * -(-keys // size) <= COMPUTE_UNITS.get(architecture, 1):
        size //= 2
    return size
