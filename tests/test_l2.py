"""The model of private L2s: against what was measured, against small launches done by hand, and against the orders."""

import numpy as np
import pytest

from amdgpu import arch, l2
from flash import grid

# S = 65536, 64 heads of 128 in 16 bits, blocks of 256 rows, tiles of 64 keys, on the eight dies of an MI355X.
H, Q, TILES, DIES = 64, 65536 // 256, 65536 // 64, 8
TILE_BYTES = 64 * (128 + 128) * 2
CAPACITY = arch.facts("gfx950").l2_bytes // TILE_BYTES
LAUNCH = dict(dies=DIES, resident=arch.facts("gfx950").cus // DIES, capacity=CAPACITY)


def heads(order):
    return grid.ORDERS[order](np.arange(H * Q), 1, H, H, Q, DIES)[1]


def rate(order, spread):
    return l2.hit_rate(heads(order), np.full(H * Q, TILES), spread=spread, of_dies=(0,), **LAUNCH)


def test_the_launch_is_the_published_one():
    assert (LAUNCH["resident"], CAPACITY) == (32, 128)


@pytest.mark.parametrize(("order", "expected"), [("block_first", 3 / 4), ("head_first", 31 / 32)])
def test_in_lockstep_only_the_first_reader_of_a_tile_misses(order, expected):
    assert rate(order, 0) == expected


def test_apart_the_orders_are_as_different_as_measured():
    """Measured: 2.36 % and 93.62 %."""
    assert rate("block_first", 128) <= 0.12
    assert rate("head_first", 128) >= 0.85
    # The orders that give each die its own heads do no worse.
    assert rate("kv_group_first", 128) >= rate("head_first", 128)
    assert rate("swizzled_head_first", 128) == rate("kv_group_first", 128)
    # And for one spread both figures are within a percent of the measured ones.
    assert abs(rate("block_first", 124) - 0.0236) <= 0.01
    assert abs(rate("head_first", 124) - 0.9362) <= 0.01


def test_hbm_bytes_are_the_misses():
    tiles = np.full(H * Q, TILES)
    assert l2.hbm_bytes(1.0, tiles, TILE_BYTES) == 0
    # Lockstep, block first: of 64 heads each tile is read once by every group of 4 rows of blocks that a die runs.
    assert l2.hbm_bytes(0.75, tiles, TILE_BYTES) == H * Q * TILES * TILE_BYTES / 4


def test_two_workgroups_of_one_stream():
    """The second reads what the first has read. Its own old tiles stay recent too, so the cache must hold both."""
    for late in (0, 1, 3):
        for capacity in range(1, 10):
            hits = l2._hits([(0, 10), (0, 10)], [0, late], capacity)
            assert (hits == 10) == (capacity >= 2 * late + 1)


def test_a_full_cache_forgets_the_least_recently_used():
    # One place reads stream 0, stream 1, and stream 0 again, two tiles each.
    assert l2._hits([(0, 2), (1, 2), (0, 2)], [0], 4) == 2
    assert l2._hits([(0, 2), (1, 2), (0, 2)], [0], 3) == 0
    # A hit makes a tile recent: of (0, 0) (0, 0) (1, 0) (0, 0), two hit in a cache of two tiles.
    assert l2._hits([(0, 1), (0, 1), (1, 1), (0, 1)], [0], 2) == 2


def test_dies_share_nothing():
    streams, tiles = [0] * 4, [5] * 4
    options = dict(resident=4, capacity=64, spread=0)
    assert l2.hit_rate(streams, tiles, dies=1, **options) == 3 / 4
    assert l2.hit_rate(streams, tiles, dies=2, **options) == 1 / 2
    assert l2.hit_rate(streams, tiles, dies=4, **options) == 0
    assert list(l2.streams_per_die(streams, 4)) == [4]
    assert list(l2.streams_per_die([0, 1, 0, 1], 2)) == [1, 1]


def test_who_reads_nothing_hits_nothing():
    options = dict(dies=1, resident=2, capacity=4, spread=0)
    assert l2.hit_rate([0, 0, 1, 0], [2, 0, 0, 2], **options) == l2.hit_rate([0, 0], [2, 2], **options) == 1 / 2
    assert l2.hit_rate([0, 0], [0, 0], **options) == 0
    assert l2.makespan([0, 0], dies=1, resident=2) == 1


def test_work_per_die():
    assert list(l2.work_per_die([1, 2, 3, 4, 5], 2)) == [9, 6]


def test_makespan():
    assert l2.makespan([4, 4, 4, 4], dies=2, resident=2) == 1
    assert l2.makespan([1, 1, 1, 3], dies=1, resident=2) == 4 / 3
    assert l2.makespan([3, 1, 1, 1], dies=1, resident=2) == 1


@pytest.mark.parametrize(
    ("order", "heavy_first", "expected"),
    [("kv_group_first", True, 1.0), ("kv_group_first", False, 1.060), ("head_first", False, 1.185)],
)
def test_makespans_of_causal_attention(order, heavy_first, expected):
    """H 64, Q 64, 8 dies of 32 workgroups each."""
    _, _, q = grid.ORDERS[order](np.arange(64 * 64), 1, 64, 64, 64, 8)
    tiles = 64 - q if heavy_first else q + 1
    assert round(l2.makespan(tiles, dies=8, resident=32), 3) == expected
