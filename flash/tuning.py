"""How the flash attention kernels are cut on each architecture."""

import dataclasses

ORDERS = ("block_first", "head_first", "swizzled_head_first", "kv_group_first")


@dataclasses.dataclass(frozen=True)
class Config:
    """Static shape of one attention call.

    Attributes:
      block_q: query rows of a workgroup; a power of two, 16 to 256. Short inputs take fewer.
      block_k: keys of a tile; a power of two, 16 to 256. Short inputs take fewer.
      num_warps: wavefronts (warps) in a workgroup; a power of two, 1 to 16.
      num_stages: depth of the software pipeline of the loads of keys and values.
      head_tile: most elements of a head in one tile, a power of two from 16 to 512; heads of more are walked in parts.
      splits: workgroups that share the keys of one query block; None: as many as fill the device.
      order: the order of workgroups, a name in `flash.grid.ORDERS`.

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

    def __post_init__(self):
        for name in ("block_q", "block_k"):
            if getattr(self, name) not in (16, 32, 64, 128, 256):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {getattr(self, name)!r}")
        if self.head_tile not in (16, 32, 64, 128, 256, 512):
            raise ValueError(f"head_tile must be 16, 32, 64, 128, 256 or 512, got {self.head_tile!r}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps!r}")
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ValueError(f"num_stages must be an int >= 1, got {self.num_stages!r}")
        if self.splits is not None and not (isinstance(self.splits, int) and 1 <= self.splits <= 64):
            raise ValueError(f"splits must be None or an int from 1 to 64, got {self.splits!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
