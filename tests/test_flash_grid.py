"""How attention is cut into blocks and tiles, enumerated, and what a call is lowered to. Orders: test_flash_orders."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash
from amdgpu import isa
from flash import grid
from flash.grid import Problem
from flash.tuning import ANY, ORDERS, ROWS, Config, default_config, default_splits


def test_heads_are_grouped():
    assert [grid.group_of(h, 6, 2) for h in range(6)] == [0, 0, 0, 1, 1, 1]


def problem(T=100, S=120, B=2, H=4, G=2, K=32, V=32, dtype="float32", config=None, **facts):
    return Problem(B, T, S, H, G, K, V, jnp.dtype(dtype), config or Config(32, 16, splits=1), **facts)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_workgroups_are_a_bijection(order, splits, causal):
    p = problem(config=Config(32, 16, splits=splits, order=order), xcds=4, right=0 if causal else None)
    (programs,) = grid.plan_split_forward(p).grid if splits > 1 else grid.plan_forward(p).grid
    cut = [grid.workgroup(i, p) for i in range(programs)]
    assert sorted(cut) == list(itertools.product(range(2), range(4), range(4), range(splits)))
    if causal and order == "kv_group_first":
        # Heavy blocks first, and the splits of a block side by side.
        first_die = [(block, split) for i, (_, _, block, split) in enumerate(cut) if i % 4 == 0]
        assert first_die == [(block, split) for block in (3, 2, 1, 0) for split in range(splits) for _ in range(2)]


def test_programs_of_the_merge_are_a_bijection():
    p = problem(config=Config(32, 16, splits=2))
    (programs,) = grid.plan_merge(p).grid
    cut = [grid.merge_program(i, p) for i in range(programs)]
    assert sorted(cut) == list(itertools.product(range(2), range(4), range(4)))


POSITIONS = (
    dict(),
    dict(right=0),
    dict(right=0, bottom_right=True),
    dict(left=10, right=0),
    dict(left=7, right=3),
    dict(left=40, right=20),
    dict(left=3),
    dict(right=5),
    dict(left=-5, right=9),
    dict(left=2, right=-4),
)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(32, 32), (70, 70), (45, 100), (100, 33), (1, 50), (64, 16)])
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_cover_what_rows_see(positions, T, S, splits):
    """Each key that a row sees is in one tile of one split, and tiles without masks are seen whole."""
    p = problem(
        T, S, config=Config(32, 16, splits=splits), given=frozenset(["kv_lengths", "query_lengths"]), **positions
    )
    for length, rows in itertools.product((S, S - 1, S // 2, 0), (T, T - 1, T // 3)):
        t, j = np.arange(T)[:, None], np.arange(S)[None, :]
        shift = length - T if p.bottom_right else 0
        sees = (j < length) & (t < rows) & np.ones((T, S), bool)
        if p.left is not None:
            sees &= j >= t + shift - p.left
        if p.right is not None:
            sees &= j <= t + shift + p.right
        for block in range(p.blocks):
            of_block = sees[block * p.block_q : (block + 1) * p.block_q]
            visits = np.zeros(-(-S // p.block_k), int)
            first, end = grid.keys_of_block(p, block, length, rows)
            for split in range(splits):
                start, free_start, free_stop, stop = map(int, grid.key_tiles(p, block, split, length, rows))
                assert 0 <= start <= free_start <= free_stop <= stop
                # A tile that is visited reads keys from first to end - 1 only: they exist.
                assert stop == start or (stop <= visits.size and 0 <= int(first) <= int(end) - 1 < S)
                visits[start:stop] += 1
                free = of_block[: max(rows - block * p.block_q, 0), free_start * p.block_k : free_stop * p.block_k]
                assert free.all() and free.shape[1] == (free_stop - free_start) * p.block_k
            seen = of_block.any(axis=0)
            assert (visits <= 1).all()
            assert (visits[np.flatnonzero(seen) // p.block_k] == 1).all()
            if seen.any():
                assert (int(first), int(end)) == (np.flatnonzero(seen)[0], np.flatnonzero(seen)[-1] + 1)


def test_plain_attention_has_no_masked_tile():
    """And its ranges are Python ints, so that the loop over masked tiles is not even built."""
    assert grid.key_tiles(problem(S=128), 1, 0, 128, 100) == (0, 0, 8, 8)
    assert grid.key_tiles(problem(S=120), 1, 0, 120, 100) == (0, 0, 7, 8)


@pytest.mark.parametrize("size", [*range(1, 260), 320, 512, 576])
def test_parts_of_a_head(size):
    parts = grid.parts(size, 256)
    start = 0
    for i, (first, tile) in enumerate(parts):
        assert first == start and tile in (16, 32, 64, 128, 256)
        assert i == 0 or tile <= parts[i - 1][1]
        start += tile
    assert size <= start <= max(16, 2 * size)
    if size % 64 == 0:
        assert start == size or size in (448,)


def test_parts_of_common_sizes():
    tiles = {
        size: [tile for _, tile in grid.parts(size, 256)] for size in (63, 64, 80, 96, 112, 128, 160, 192, 256, 576)
    }
    assert tiles == {
        63: [64],
        64: [64],
        80: [64, 16],
        96: [64, 32],
        112: [128],
        128: [128],
        160: [128, 32],
        192: [128, 64],
        256: [256],
        576: [256, 256, 64],
    }
    assert grid.parts(160, 64) == [(0, 64), (64, 64), (128, 32)]


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 200])
def test_every_block_is_looked_after(blocks):
    heads = 3
    found = []
    for program in range(2 * heads * -(-blocks // grid.LOST_BLOCKS)):
        b, h, first = grid.lost_program(program, heads, blocks)
        found += [(b, h, block) for block in range(first, min(first + grid.LOST_BLOCKS, blocks))]
    assert found == list(itertools.product(range(2), range(heads), range(blocks)))


EVERYTHING = dict(
    bias=(1, 4, 1, 120),
    mask=(2, 1, 100, 120),
    given=frozenset(["q_segment_ids", "kv_segment_ids", "kv_lengths", "query_lengths", "logit_factor", "value_factor"]),
    returns_lse=True,
)


@pytest.mark.parametrize("splits", [1, 2])
def test_specs_stay_inside_their_arrays(splits):
    """The block that a program's specs name lies inside the array, for every program of every kernel."""
    p = problem(config=Config(32, 16, splits=splits), xcds=4, **EVERYTHING)
    shapes = {
        "q": (2, 100, 4, 32),
        "k": (2, 120, 2, 32),
        "v": (2, 120, 2, 32),
        "bias": p.bias,
        "mask": p.mask,
        "q_segment_ids": (2, 100),
        "kv_segment_ids": (2, 120),
        "kv_lengths": (2,),
        "query_lengths": (2,),
        "logit_factor": (1,),
        "value_factor": (1,),
    }
    results = {"o": (2, 100, 4, 32), "lse": (2, 100, 4)}
    partials = {name: buffer.shape for name, buffer in grid.partials(p).items()}
    lost = {"lost": (2, 4, p.blocks)}
    plans = [(grid.plan_forward(p), shapes, results), (grid.plan_lost_blocks(p), shapes | results | lost, results)]
    fixed = grid.with_lost(grid.plan_forward(p), lambda program: grid.workgroup(program, p)[:2], p.blocks)
    plans.append((fixed, shapes, results | lost))
    if splits > 1:
        factors = {name: (1,) for name in ("logit_factor", "value_factor")}
        plans = [(grid.plan_split_forward(p), shapes, partials), (grid.plan_merge(p), partials | factors, results)]
    for plan, ins, outs in plans:
        for specs, arrays in ((plan.in_specs, ins), (plan.out_specs, outs)):
            assert specs.keys() == arrays.keys()
            for name, program in itertools.product(specs, range(plan.grid[0])):
                index, block = specs[name].index_map(program), specs[name].block_shape
                for i, n, size in zip(index, block, arrays[name], strict=True):
                    assert i >= 0 and (i + 1) * (n or 1) <= size, (name, program)


# What is lowered


def shapes(B=1, T=4096, S=4096, H=16, G=16, K=128, V=128, dtype="bfloat16"):
    shape = jax.ShapeDtypeStruct
    return shape((B, T, H, K), dtype), shape((B, S, G, K), dtype), shape((B, S, G, V), dtype)


ours = partial(flash.flash_attention, implementation="pallas")


def kernels(function, *avals, arch="gfx942"):
    return isa.triton_calls(isa.lower_rocm(function, *avals, arch=arch))


def test_the_architectures_row_is_used():
    for row in ROWS:
        if row.architecture.startswith("gfx") and row.itemsize == 2 and row.head_size <= 256:
            call, *again = kernels(ours, *shapes(K=row.head_size, V=row.head_size), arch=row.architecture)
            blocks = 4096 // row.config.block_q
            assert call.grid[0] == 16 * blocks
            fixed = row.config.fixed_maximum
            assert [(c.name, c.grid[0]) for c in again] == (
                [("flash_lost_blocks", 16 * -(-blocks // 16))] if fixed else []
            )
            for c in (call, *again):
                assert (c.num_warps, c.num_stages) == (row.config.num_warps, row.config.num_stages)


def test_few_rows_and_many_keys_are_split():
    whole = kernels(ours, *shapes(T=4096, S=4096))
    assert [c.name for c in whole] == ["flash_forward_kv_group_first", "flash_lost_blocks"]
    forward, merge = kernels(ours, *shapes(T=16, S=8192))
    assert [forward.name, merge.name] == ["flash_split_forward_kv_group_first", "flash_merge"]
    # 304 compute units, 16 heads of one query block
    assert (forward.grid[0], merge.grid[0]) == (16 * 19, 16)
    # A split maximum is not fixed.
    fixed = Config(64, 64, 4, splits=3, fixed_maximum=True)
    assert [c.name for c in kernels(partial(ours, config=fixed), *shapes())] == [forward.name, merge.name]
    # No kernel is launched for an empty split.
    assert [c.name for c in kernels(ours, *shapes(T=16, S=128))] == ["flash_forward_kv_group_first"]


@pytest.mark.parametrize(("S", "window", "fixed"), [(2047, None, 0), (2048, None, 1), (4096, 1000, 0), (4096, 1960, 1)])
def test_a_maximum_is_fixed_where_a_block_sees_many_keys(S, window, fixed):
    """Of 128 rows."""
    attend = partial(
        flash.dot_product_attention,
        is_causal=True,
        local_window_size=window and (window, 0),
        implementation="pallas",
    )
    names = [c.name for c in kernels(attend, *shapes(T=4096, S=S))]
    assert names == ["flash_forward_kv_group_first", "flash_lost_blocks"][: 1 + fixed]


def test_default_splits():
    assert default_splits("gfx942", 304, 1000) == 1
    assert default_splits("gfx942", 153, 1000) == 1
    assert default_splits("gfx942", 152, 1000) == 2
    assert default_splits("gfx942", 1, 1000) == 64
    assert default_splits("gfx942", 1, 12) == 3
    assert default_splits("gfx942", 1, 3) == 1
    assert default_splits("unknown", 1, 1000) == 1
    assert default_splits("sm_90", 8, 1000) == 16


def test_no_operand_is_padded_transposed_or_broadcast():
    bias = jax.ShapeDtypeStruct((16, 1, 1001), jnp.float32)

    def function(q, k, v, bias):
        return ours(q, k, v, bias=bias, causal=True)

    text = isa.lower_rocm(function, *shapes(T=999, S=1001, G=4), bias, arch="gfx942").as_text()
    for operation in ("pad", "transpose", "concatenate", "gather", "broadcast_in_dim"):
        assert f"stablehlo.{operation}" not in text, operation


def test_large_arrays_have_64_bit_offsets():
    """flash-attention 2260: B T H K > 2^31."""
    for call in kernels(ours, *shapes(T=2**20, S=2**20, H=32, G=32)):
        assert "tensor<" in call.ttir and "xi64>" in call.ttir
    for call in kernels(ours, *shapes()):
        assert "xi64>" not in call.ttir


def test_kernels_count_in_int32_for_x64_users():
    with jax.enable_x64(True):
        calls = kernels(partial(ours, causal=True, return_lse=True), *shapes(T=16, S=8192))
    for call in calls:
        assert "xi64>" not in call.ttir and "f64" not in call.ttir, call.name


# Configurations


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1151", "sm_90", "unknown"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_every_size_has_a_config(architecture, dtype):
    for K, V in itertools.product((16, 64, 65, 128, 129, 256, 576), (16, 128, 512)):
        config = default_config(architecture, dtype, K, V)
        assert config.order == "kv_group_first" and config.splits is None
    assert default_config("unknown", dtype, 128, 128) == ANY


def test_short_inputs_take_small_blocks():
    p = problem(T=3, S=20, config=Config(128, 64, 8))
    assert (p.block_q, p.block_k, p.num_warps) == (16, 32, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_q", 8),
        ("block_q", 512),
        ("block_k", 48),
        ("head_tile", 512),
        ("num_warps", 3),
        ("num_stages", 0),
        ("splits", 0),
        ("splits", 65),
        ("splits", True),
        ("block_k", 32.0),
        ("num_warps", True),
        ("num_stages", 1.0),
        ("order", "head"),
    ],
)
def test_config_refuses_what_cannot_run(field, value):
    with pytest.raises(ValueError, match=rf"{field} must .*{value}"):
        replace(ANY, **{field: value})


def test_a_config_whose_order_does_not_exist_is_refused():
    config = Config(64, 32, order="swizzled_head_first")
    with pytest.raises(ValueError, match="multiple of X = 8 dies, got H = 12"):
        kernels(partial(ours, config=config), *shapes(H=12, G=12))
    (call,) = kernels(partial(ours, config=config), *shapes(H=12, G=12), arch="gfx1151")
    assert call.name == "flash_forward_swizzled_head_first"
