"""Shapes and inputs, for tests and benchmarks alike: one table per algorithm and size.

    *_SMALL   ordinary shapes, small enough for Pallas' interpret mode on a CPU
    *_ODD     ragged lengths, unequal sizes, extreme values; as small
    *_REAL    layers of published models; for a GPU

A case is a frozen dataclass that says everything about its inputs; `inputs(case)` makes them, the same ones
each time, as the keyword arguments of the public function: `chunk_gated_delta_rule(**inputs(case))`.
"""

import jax

from references.cases import flash, gated_delta, gqa
from references.cases.flash import FLASH_ODD, FLASH_REAL, FLASH_SMALL, FlashCase
from references.cases.gated_delta import (
    GATED_DELTA_ODD,
    GATED_DELTA_REAL,
    GATED_DELTA_SMALL,
    GatedDeltaCase,
)
from references.cases.gqa import GQA_ODD, GQA_REAL, GQA_SMALL, GqaCase

__all__ = [
    "FLASH_ODD",
    "FLASH_REAL",
    "FLASH_SMALL",
    "GATED_DELTA_ODD",
    "GATED_DELTA_REAL",
    "GATED_DELTA_SMALL",
    "GQA_ODD",
    "GQA_REAL",
    "GQA_SMALL",
    "FlashCase",
    "GatedDeltaCase",
    "GqaCase",
    "bytes_moved",
    "flops",
    "inputs",
]

Case = GatedDeltaCase | FlashCase | GqaCase
_MODULES = {GatedDeltaCase: gated_delta, FlashCase: flash, GqaCase: gqa}


def inputs(case: Case) -> dict[str, jax.Array | float | bool | None]:
    """The arguments of the public function: arrays of the case's dtypes, and options."""
    return _MODULES[type(case)].inputs(case)


def flops(case: Case) -> int:
    """Floating point operations that the case needs, an addition and a multiplication counted as two."""
    return _MODULES[type(case)].flops(case)


def bytes_moved(case: Case) -> int:
    """Bytes that any implementation must move: every input read once, every output written once."""
    return _MODULES[type(case)].bytes_moved(case)
