"""How grouped-query attention is cut: every workgroup, every tile and every block of keys, enumerated on the CPU."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa
from amdgpu import isa
from flash.grid import with_lost
from gqa import Config, grid, tuning
from gqa.grid import Problem
from gqa.onnx import group_query_attention
from gqa.tuning import ANY, KERNELS, ROWS, default_block_keys, default_config, uses_rows_kernel


def problem(T=100, S=120, B=2, H=12, G=4, K=32, V=32, dtype="float32", config=None, **facts):
    config = config or Config(32, 16, block_keys=48)
    return Problem(B, T, S, H, G, K, V, jnp.dtype(dtype), config, **facts)


# Workgroups


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("xcds", [1, 4, 8])
def test_workgroups_of_the_prefill_are_a_bijection(xcds, causal):
    p = problem(xcds=xcds, causal=causal)
    (programs,) = grid.plan_prefill(p).grid
    cut = [grid.prefill_program(w, p) for w in range(programs)]
    assert sorted(cut) == list(itertools.product(range(2), range(12), range(4)))
    # All heads of a KV group on one die, where there are KV heads for all dies; heavy tiles first.
    dies = {}
    for w, (b, h, _) in enumerate(cut):
        dies.setdefault((b, h // 3), set()).add(w % xcds)
    assert all(len(die) == 1 for die in dies.values())
    tiles = [tile for w, (_, _, tile) in enumerate(cut) if w % xcds == 0]
    in_order = [tile for tile in range(4) for _ in range(3)] * (len(tiles) // 12)
    assert tiles == (in_order if not causal else [3 - tile for tile in in_order])


def test_workgroups_of_the_rows_kernel_are_a_bijection():
    p = problem(packed=True)
    assert (p.rows, p.row_tiles, p.key_blocks) == (300, 10, 3)
    (programs,) = grid.plan_rows(p).grid
    cut = [grid.rows_program(w, p) for w in range(programs)]
    assert sorted(cut) == list(itertools.product(range(2), range(4), range(10), range(3)))
    # KV heads of the same keys are neighbours.
    assert [g for _, g, _, _ in cut[:8]] == [0, 1, 2, 3] * 2
    (programs,) = grid.plan_merge(p).grid
    cut = [grid.merge_program(w, p) for w in range(programs)]
    assert sorted(cut) == list(itertools.product(range(2), range(4), range(300)))


# Tiles and blocks


def sees(p, past, new):
    """Which keys row t of a head sees, as the reference has it: bool [T, S]."""
    t, j = np.arange(p.queries)[:, None], np.arange(p.keys)[None, :]
    allowed = (j < past + new) & (t < new)
    if p.causal:
        allowed &= j <= past + t
    if p.window is not None:
        allowed &= j > past + t - p.window
    return allowed


POSITIONS = [(0, 100), (20, 100), (7, 41), (119, 1), (60, 0), (0, 1), (33, 64)]
# Known only at run time: beyond the cache, and before it.
WRONG = [(100, 100), (119, 3), (500, 100), (-30, 100), (-500, 2), (2**30, 50)]
FACTS = [
    dict(causal=causal, window=window)
    for causal in (True, False)
    for window in (None, 1, 5, 16, 17, 40, 100, 2**31 - 1)
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_tiles_cover_what_rows_see(facts):
    """Each key that a row sees is in one tile, and tiles without masks are seen whole."""
    p = problem(**facts, given=frozenset(["past", "lengths"]))
    for past, new in POSITIONS + WRONG:
        allowed = sees(p, past, new)
        for tile in range(p.row_tiles):
            of_tile = allowed[tile * p.block_q : (tile + 1) * p.block_q]
            start, free_start, free_stop, stop = map(int, grid.key_tiles(p, tile, past, new))
            assert 0 <= start <= free_start <= free_stop <= stop
            first, end = map(int, grid.keys_of_tile(p, tile, past, new))
            # A tile that is visited reads keys from first to end - 1 only: they exist.
            assert start == stop or (stop * p.block_k < p.keys + p.block_k and 0 <= first < end <= p.keys)
            there = of_tile[: max(new - tile * p.block_q, 0)]
            assert there[:, free_start * p.block_k : free_stop * p.block_k].all()
            assert free_start == free_stop or free_stop * p.block_k <= p.keys
            seen = np.flatnonzero(of_tile.any(axis=0))
            if seen.size and (past, new) not in WRONG:
                assert (first, end) == (seen[0], seen[-1] + 1)
                assert (start, stop) == (first // p.block_k, -(-end // p.block_k))
            assert all(start <= j // p.block_k < stop for j in seen)


@pytest.mark.parametrize("facts", FACTS, ids=str)
@pytest.mark.parametrize("T", [1, 7])
def test_blocks_cover_what_rows_see(facts, T):
    """Each key that a row of a tile sees is in one block, and few keys are visited that no row sees."""
    p = problem(T, packed=True, config=Config(16, 16, block_keys=32), **facts, given=frozenset(["past", "lengths"]))
    assert p.key_blocks == -(-p.reach // 32)
    for past, new in [(past, min(new, T)) for past, new in POSITIONS + WRONG]:
        allowed = np.repeat(sees(p, past, new), 3, axis=0)
        for tile in range(p.row_tiles):
            seen = np.flatnonzero(allowed[tile * p.block_q : (tile + 1) * p.block_q].any(axis=0))
            visits = np.zeros(p.keys, int)
            for block in range(p.key_blocks):
                first, end = map(int, grid.keys_of_block(p, block, tile, past, new))
                assert end - first <= 32
                if first < end:
                    assert first >= 0 and end <= p.keys
                    visits[first:end] += 1
            assert (visits <= 1).all() and (visits[seen] == 1).all()
            if seen.size:
                assert visits.sum() == seen[-1] + 1 - seen[0]
            else:
                # Rows without tokens, or keys: nothing is read.
                assert visits.sum() == 0 or (past, new) in WRONG or past < 0


def test_functions_of_positions_take_traced_values():
    for facts, packed in itertools.product(FACTS, (False, True)):
        p = problem(**facts, packed=packed, given=frozenset(["past", "lengths"]))

        def cut(tile, past, new, p=p, packed=packed):
            if packed:
                return grid.keys_of_block(p, tile % p.key_blocks, tile, past, new)
            return grid.key_tiles(p, tile, past, new)

        for tile, (past, new) in itertools.product((0, p.row_tiles - 1), POSITIONS[:3]):
            traced = jax.jit(cut)(jnp.int32(tile), jnp.int32(past), jnp.int32(new))
            assert [int(x) for x in traced] == [int(x) for x in cut(tile, past, new)]


def test_tiles_of_gpt_oss():
    """A chunk of 512 behind 8192 keys, in tiles of 32x32: 16 diagonal tiles need a mask."""
    p = problem(512, 8704, 1, 64, 8, 64, 64, "float16", Config(32, 32))
    assert grid.tiles_visited(p, 8192, 512) == (4232, 16)
    assert 16 / 4232 < 0.004
    visited, masked = grid.tiles_visited(replace(p, window=128), 8192, 512)
    assert (visited, masked) == (80, 32)


def test_the_plain_kernel_has_one_loop_less():
    """Its ranges start at 0, a Python int: the loop over tiles that a window cuts is not even built."""
    p = problem(given=frozenset(["past", "lengths"]))
    start, free_start, _, _ = grid.key_tiles(p, 0, jnp.int32(3), jnp.int32(5))
    assert start is free_start and start == 0
    # Nothing cuts the tiles of all keys.
    p = problem(128, 128, causal=False)
    assert grid.key_tiles(p, 1, 0, 128) == (0, 0, 8, 8)


def test_a_window_is_counted_in_blocks_from_the_row():
    """What a step sees through a window of 2048 is one block, wherever the row stands, and whatever the capacity."""
    p = problem(1, 10**6, config=Config(16, 64), packed=True, window=2048, given=frozenset(["past"]))
    assert p.key_blocks == 1
    for past in (0, 5, 2047, 2048, 2049, 12345, 10**6 - 1):
        assert grid.keys_of_block(p, 0, 0, past, 1) == (max(past - 2047, 0), past + 1)
    assert replace(p, queries=2).key_blocks == replace(p, window=2049).key_blocks == 2
    assert replace(p, window=None).key_blocks == 489


@pytest.mark.parametrize("S, blocks", [(1, 1), (2047, 1), (2048, 1), (2049, 2), (4096, 2), (4097, 3), (20000, 10)])
def test_blocks_of_2048_keys(S, blocks):
    p = problem(1, S, config=Config(16, 64), packed=True)
    assert p.key_blocks == blocks
    # A block beyond the valid keys reads none.
    for past in (0, 2047, 2048, S - 1):
        there = [grid.keys_of_block(p, i, 0, past, 1) for i in range(blocks)]
        assert sum(first < end for first, end in there) == min(-(-(past + 1) // 2048), blocks)


# What a program may read and write


EVERYTHING = dict(given=frozenset(["past", "lengths", "sinks"]), returns_lse=True)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("bias", [None, (1, 1, 1, 120), (2, 12, 100, 120), (2, 1, 100, 1), (1, 12, 1, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_specs_stay_inside_their_arrays(packed, bias, heads_first):
    """And what a program reads of k and v is the KV head that its query heads share."""
    p = problem(packed=packed, bias=bias, heads_first=heads_first, xcds=4, **EVERYTHING)
    cache = (2, 4, 120, 32) if heads_first else (2, 120, 4, 32)
    shapes = {"q": (2, 100, 12, 32), "k": cache, "v": cache, "past": (2,), "lengths": (2,), "sinks": (12,)}
    if bias is not None:
        shapes["bias"] = bias
    results = {"o": (2, 100, 12, 32), "lse": (2, 100, 12)}
    partials = {name: buffer.shape for name, buffer in grid.partials(p).items()}
    if packed:
        merged = partials | {name: shapes.pop(name) for name in ("sinks",)} | {"lengths": (2,)}
        plans = [(grid.plan_rows(p), shapes, partials), (grid.plan_merge(p), merged, results)]
    else:
        lost = {"lost": (p.batch, p.heads, p.row_tiles)}
        fixed = with_lost(grid.plan_prefill(p), lambda program: grid.prefill_program(program, p)[:2], p.row_tiles)
        plans = [(grid.plan_prefill(p), shapes, results), (fixed, shapes, results | lost)]
        plans.append((grid.plan_lost_blocks(p), shapes | results | lost, results))
    for plan, ins, outs in plans:
        for specs, arrays in ((plan.in_specs, ins), (plan.out_specs, outs)):
            assert specs.keys() == arrays.keys()
            for name, program in itertools.product(specs, range(0, plan.grid[0], 3)):
                index, block = specs[name].index_map(program), specs[name].block_shape
                for i, n, size in zip(index, block, arrays[name], strict=True):
                    assert i >= 0 and (i + 1) * (n or 1) <= size, (name, program)
    plan = plans[0][0]
    for program in range(plan.grid[0]):
        b, head, *_ = grid.rows_program(program, p) if packed else grid.prefill_program(program, p)
        g = head if packed else head // 3
        expected = (b, g, 0, 0) if heads_first else (b, 0, g, 0)
        assert plan.in_specs["k"].index_map(program) == plan.in_specs["v"].index_map(program) == expected


def test_one_past_serves_all_batch_rows():
    p = problem(given=frozenset(["past"]), one_past=True)
    assert {grid.plan_prefill(p).in_specs["past"].index_map(w) for w in range(96)} == {(0,)}


# What is lowered

ours = partial(gqa.grouped_query_attention, implementation="pallas")


def shapes(T=4096, S=8192, B=1, H=16, G=8, K=64, V=64, dtype="bfloat16"):
    shape = jax.ShapeDtypeStruct
    return shape((B, T, H, K), dtype), shape((B, S, G, K), dtype), shape((B, S, G, V), dtype)


def kernels(function, *avals, arch="gfx942", **keywords):
    return isa.triton_calls(isa.lower_rocm(function, *avals, arch=arch, **keywords))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_architectures_row_is_used(dtype):
    itemsize = jnp.dtype(dtype).itemsize
    for row in ROWS:
        if row.architecture.startswith("gfx") and row.itemsize == itemsize:
            T, window = (1 if row.kernel == "rows" else 512), (100 if row.kernel == "prefill_window" else None)
            call, *others = kernels(
                partial(ours, window=window),
                *shapes(T, K=row.head_size, V=row.head_size, dtype=dtype),
                arch=row.architecture,
            )
            if row.kernel == "rows":
                # 8 KV heads, 16 heads
                blocks = 8192 // default_block_keys(row.architecture, 8, 8192)
                assert (call.name, call.grid[0]) == ("gqa_rows_split", 8 * blocks)
                assert [(c.name, c.grid[0]) for c in others] == [("gqa_rows_merge", 16)]
            else:
                fixed = row.config.fixed_maximum and dtype == "bfloat16"
                assert [c.name for c in others] == (["gqa_lost_blocks"] if fixed else [])
                assert call.name == f"gqa_{row.kernel}"
                assert call.grid[0] == 16 * 512 // row.config.block_q
            assert (call.num_warps, call.num_stages) == (row.config.num_warps, row.config.num_stages)


@pytest.mark.parametrize(("window", "one_loop"), [(1, True), (128, True), (256, True), (257, False), (4096, False)])
def test_only_a_window_of_few_tiles_is_walked_in_one_loop(window, one_loop):
    row = default_config("sm_90", 2, 64, 64, "prefill_window")
    assert row.one_loop and tuning.for_window(row, window) == replace(row, one_loop=one_loop)


def operations(text):
    return [
        name
        for name in ("pad", "transpose", "concatenate", "gather", "broadcast_in_dim", "slice")
        if f".{name}" in text
    ]


@pytest.mark.parametrize("T", [1, 999])
def test_no_operand_is_padded_transposed_or_broadcast(T):
    bias, sinks, past = (
        jax.ShapeDtypeStruct(s, d) for s, d in (((16, 1, 1001), "float32"), ((16,), "bfloat16"), ((), "int32"))
    )

    def function(q, k, v, bias, sinks, past):
        return ours(q, k, v, bias=bias, sinks=sinks, past=past, softcap=3.0)

    text = isa.lower_rocm(function, *shapes(T, 1001, B=2), bias, sinks, past, arch="gfx942").as_text()
    assert not operations(text)


def test_a_node_reads_its_cache_as_it_is():
    """No transposed copy of a cache `[B, G, S, size]`: what is rearranged has the size of the new tokens."""
    shape = jax.ShapeDtypeStruct
    B, T, G, S, K = 2, 1, 8, 3000, 64

    def node(query, key, value, past_key, past_value, last, total):
        return group_query_attention(
            query, key, value, past_key, past_value, last, total, num_heads=16, kv_num_heads=G, implementation="pallas"
        )

    text = isa.lower_rocm(
        node,
        shape((B, T, 16 * K), "bfloat16"),
        *(shape((B, T, G * K), "bfloat16"),) * 2,
        *(shape((B, G, S, K), "bfloat16"),) * 2,
        shape((B,), "int32"),
        shape((), "int32"),
        arch="gfx942",
    ).as_text()
    assert "gqa_rows" in text
    for line in text.splitlines():
        if any(f"stablehlo.{name}" in line for name in ("transpose", "pad", "copy", "convert")):
            assert str(S) not in line, line


def test_large_caches_have_64_bit_offsets():
    for T in (1, 512):
        call, *_ = kernels(ours, *shapes(T, 2**21, B=4))
        assert "xi64>" in call.ttir
        call, *_ = kernels(ours, *shapes(T))
        assert "xi64>" not in call.ttir


@pytest.mark.parametrize("T", [1, 512])
def test_kernels_count_in_int32_for_x64_users(T):
    sinks = jax.ShapeDtypeStruct((16,), "float64")
    with jax.enable_x64(True):
        calls = kernels(lambda *x, sinks: ours(*x, sinks=sinks, window=3000, return_lse=True), *shapes(T), sinks=sinks)
    assert len(calls) == (2 if T == 1 else 1)
    for call in calls:
        assert "xi64>" not in call.ttir and "f64" not in call.ttir, call.name


def test_the_plain_kernel_carries_no_trace_of_a_window():
    """Nor of sinks, a bias or a cap: it is shorter by what each of them takes."""
    plain, *others = (
        len(kernels(partial(ours, **options, config=Config(64, 32)), *shapes(512), **arrays)[0].ttir.splitlines())
        for options, arrays in (
            ({}, {}),
            (dict(window=100), {}),
            (dict(softcap=1.0), {}),
            ({}, dict(sinks=jax.ShapeDtypeStruct((16,), "float32"))),
            ({}, dict(bias=jax.ShapeDtypeStruct((1, 1, 512, 8192), "float32"))),
        )
    )
    assert all(plain < other for other in others)


# Configurations


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1151", "sm_90", "unknown"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_size_has_a_config(architecture, itemsize):
    for K, V, kernel in itertools.product((8, 64, 65, 128, 160, 256), (8, 128, 256), KERNELS):
        config = default_config(architecture, itemsize, K, V, kernel)
        # Up to 2048 keys no merge runs, on any chip.
        assert config.block_keys == 2048
    assert default_config("unknown", 2, 128, 128, "rows") == ANY
    for row in ROWS:
        assert row.kernel in KERNELS


def test_blocks_are_smaller_where_a_device_would_be_idle():
    sizes = {
        (architecture, workgroups, keys): tuning.default_block_keys(architecture, workgroups, keys)
        for architecture in ("sm_90", "gfx942", "gfx1151", "unknown")
        for workgroups in (1, 8, 128, 5000)
        for keys in (1, 2047, 2048, 2049, 8192, 131072)
    }
    assert sizes["sm_90", 8, 8192] == 512 and sizes["gfx942", 8, 8192] == 256 and sizes["sm_90", 8, 131072] == 2048
    for (architecture, workgroups, keys), size in sizes.items():
        assert size in (256, 512, 1024, 2048)
        if keys <= 2048 or workgroups == 5000 or architecture == "unknown":
            assert size == 2048


def test_thresholds_of_the_dispatch():
    few, some, keys = tuning.FEW_ROWS, tuning.SOME_ROWS, tuning.MANY_KEYS
    assert keys == 2048
    for rows in (1, few - 1, few):
        assert all(uses_rows_kernel(rows, n) for n in (1, keys - 1, keys, keys + 1, 20000))
    for rows in (few + 1, some - 1, some):
        assert [uses_rows_kernel(rows, n) for n in (1, keys - 1, keys, keys + 1, 20000)] == [False] * 3 + [True] * 2
    for rows in (some + 1, 20000):
        assert not any(uses_rows_kernel(rows, n) for n in (1, keys, keys + 1, 20000))


def test_blocks_are_smaller_where_they_leave_a_device_idle():
    # 132 compute units: 8 KV heads by 4 blocks of 2048 keys would run on 32 of them.
    assert default_block_keys("sm_90", 8, 8192) == 512
    assert default_block_keys("sm_90", 1, 8192) == 256
    assert default_block_keys("sm_90", 8, 131072) == 2048
    assert default_block_keys("sm_90", 128, 2049) == 2048
    # One block needs no merge, however few workgroups there are.
    assert [default_block_keys("sm_90", 1, n) for n in (1, 2047, 2048)] == [2048] * 3
    assert default_block_keys("sm_90", 1, 2049) < 2048
    assert default_block_keys("unknown", 1, 10**6) == 2048


def test_short_inputs_take_small_tiles():
    p = problem(3, 20, config=Config(128, 64, 8))
    assert (p.block_q, p.block_k, p.num_warps) == (16, 32, 4)
    # Of the rows kernel the warps share the keys.
    p = problem(3, 20, config=Config(128, 64, 4), packed=True)
    assert (p.rows, p.block_q, p.block_k, p.num_warps) == (9, 16, 32, 4)
    # A window needs no more of a tile than it shows.
    assert problem(1, 5000, config=Config(16, 256), packed=True, window=20).block_k == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_q", 8),
        ("block_q", 512),
        ("block_k", 48),
        ("head_tile", 512),
        ("num_warps", 3),
        ("num_stages", 0),
        ("block_keys", 0),
        ("block_keys", 100),
        ("block_keys", 64.0),
        ("block_keys", True),
        ("block_q", 16.0),
    ],
)
def test_config_refuses_what_cannot_run(field, value):
    with pytest.raises(ValueError, match=rf"{field} must .*{value}"):
        replace(ANY, **{field: value})


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_every_combination_of_options_can_be_lowered(T, causal):
    """Interpret mode takes what the lowering to Triton does not."""
    B, H, S = 2, 4, 200
    arrays = {
        "past": jax.ShapeDtypeStruct((B,), "int32"),
        "lengths": jax.ShapeDtypeStruct((B,), "int32"),
        "sinks": jax.ShapeDtypeStruct((H,), "float32"),
        "bias": jax.ShapeDtypeStruct((H, 1, 1), "float32"),
    }
    for window, *given in itertools.product((None, 5, 150), *[(False, True)] * len(arrays)):
        chosen = {name: x for (name, x), there in zip(arrays.items(), given, strict=True) if there}
        assert kernels(partial(ours, window=window, causal=causal), *shapes(T, S, B=B, H=H, G=2), **chosen)
