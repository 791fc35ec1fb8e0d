"""How the gated delta kernels are cut: every program, every chunk and every byte, enumerated on the CPU."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gated_delta
from amdgpu import isa
from gated_delta import grid
from gated_delta.grid import Problem
from gated_delta.tuning import ANY, ROWS, Config, default_config

KERNELS = {f"gated_delta_{name}" for name in ("locals", "blocks", "solve", "scan", "outputs")}


THREE_CHUNKS = Config(16, 3, 2)


def problem(T=100, config=THREE_CHUNKS, B=2, G=2, H=4, K=32, V=32, dtype="float32", **facts):
    return Problem(B, T, G, H, K, V, jnp.dtype(dtype), config, **facts)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_programs_are_bijections(batch, heads, splits):
    chunks = 5
    assert {grid.chunk_program(i, batch, heads) for i in range(chunks * batch * heads)} == set(
        itertools.product(range(chunks), range(batch), range(heads))
    )
    assert {grid.scan_program(i, heads, splits) for i in range(batch * heads * splits)} == set(
        itertools.product(range(batch), range(heads), range(splits))
    )


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 3, 40])
def test_lanes_cover_every_column_of_every_chunk(chunk_size, window):
    p = problem(10000, Config(chunk_size, window, 1))
    (programs,) = grid.plan_blocks(p).grid
    seen = set()
    for program in range(programs):
        chunk, column = grid.block_columns(program, np.arange(grid.BLOCK_LANES), p)
        seen |= set(zip(*(np.asarray(x).tolist() for x in (*chunk, column)), strict=True))
    assert seen == set(itertools.product(range(window), range(p.batch), range(p.heads), range(chunk_size)))
    # None of the programs is without a lane of its own.
    assert (programs - 1) * grid.BLOCK_LANES < len(seen)


def test_heads_are_grouped():
    assert [grid.group_of(h, 6, 2) for h in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("T", [1, 15, 16, 17, 95, 96, 97, 18778])
@pytest.mark.parametrize("config", [Config(16, 1, 1), Config(16, 3, 1), Config(64, 16, 4), Config(16, 10000, 1)])
def test_windows_cover_every_chunk_once(T, config):
    p = problem(T, config)
    chunks = [w * p.window_chunks + i for w in range(p.windows) for i in range(p.window_chunks)]
    assert chunks[: p.chunks] == list(range(p.chunks))
    # No window is wholly beyond the end.
    assert (p.windows - 1) * p.window_chunks < p.chunks
    tokens = np.zeros(T, int)
    for n in range(p.chunks):
        tokens[n * config.chunk_size : (n + 1) * config.chunk_size] += 1
    assert (tokens == 1).all()


@pytest.mark.parametrize("T", [1, 95, 18778, 20000, 262144])
@pytest.mark.parametrize("window", [1, 2, 80, 104])
def test_windows_are_alike(T, window):
    p = problem(T, Config(32, window, 8))
    assert p.window_chunks <= window and p.windows == -(-p.chunks // window)
    # The last one lacks less than a chunk for each window.
    assert p.windows * p.window_chunks - p.chunks < p.windows


OVERLAP = Config(16, 2, 2, outputs_in_scan=True, overlap=True)


@pytest.mark.parametrize(("T", "windows"), [(32, 1), (33, 2), (65, 3)])
def test_only_two_windows_or_more_overlap(T, windows):
    p = problem(T, OVERLAP)
    assert (p.windows, p.overlaps) == (windows, windows > 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_windows_are_prepared_by_as_many_warps_alone_and_beside_the_scan(chunk_size, dtype):
    """Other numbers of warps may sum in another order, and then the length of a window changes bits."""
    p = problem(300, replace(OVERLAP, chunk_size=chunk_size, num_warps=1), dtype=dtype)
    assert grid.plan_prepare(p).num_warps == grid.beside([grid.plan_scan(p), grid.plan_prepare(p)]).num_warps == 1


@pytest.mark.parametrize("l2norm", [False, True])
def test_overlap_has_what_the_scan_reads_twice(l2norm):
    options = dict(dtype="bfloat16", use_qk_l2norm_in_kernel=l2norm)
    sizes = [
        gated_delta.prefill_scratch_bytes(1, 100, 4, 32, 32, config=replace(OVERLAP, overlap=overlap), **options)
        for overlap in (False, True)
    ]
    # For each of two chunks and four heads: `solve` and `score`, three factors of 16 tokens, or four with terms.
    chunk = (2 + 1) * 16 * 16 * 2 + 2 * 16 * 4 + 4 + (16 * 16 * 2 if l2norm else 0)
    assert sizes[1] - sizes[0] == 2 * 4 * chunk


def test_passes_side_by_side_see_their_own_blocks():
    p = problem(100, OVERLAP, keeps_states=True)
    plans = [grid.plan_scan(p), grid.plan_prepare(p)]
    (programs,), starts = grid.beside(plans).grid, grid.starts(plans)
    assert programs == sum(plan.grid[0] for plan in plans) and starts == [0, plans[0].grid[0]]
    for field in ("in_specs", "out_specs"):
        merged = getattr(grid.beside(plans), field)
        assert set(merged) == {(n, name) for n in (0, 1) for name in getattr(plans[n], field)}
        for (n, name), spec in merged.items():
            own = getattr(plans[n], field)[name]
            assert spec.block_shape == own.block_shape
            for program in range(programs):
                place = min(max(program - starts[n], 0), plans[n].grid[0] - 1)
                assert [int(i) for i in spec.index_map(program)] == list(own.index_map(place)), (n, name, program)


@pytest.mark.parametrize("lengths", [(5,), (0, 0, 16), (17, 0, 1, 33, 0), (1,) * 40, (0, 0), (100,)], ids=str)
@pytest.mark.parametrize("spare", [0, 7])
def test_chunk_table_covers_every_token_once(lengths, spare):
    offsets = np.cumsum((0, *lengths), dtype=np.int32)
    T = int(offsets[-1]) + spare
    if T == 0:
        return
    table = np.asarray(grid.chunk_table(jnp.asarray(offsets), T, 16))
    assert table.shape == (grid.num_chunks(T, 16, len(lengths)), 5)
    owner = np.full(T, -1)
    for start, length, sequence, _, _ in table:
        assert (owner[start : start + length] == -1).all()
        owner[start : start + length] = sequence
    expected = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(spare, -1)])
    np.testing.assert_array_equal(owner, expected)
    real = table[table[:, grid.LENGTH] > 0]
    for r, length in enumerate(lengths):
        rows = real[real[:, grid.SEQUENCE] == r]
        assert list(rows[:, grid.OPENS]) == [1, *[0] * (len(rows) - 1)][: len(rows)]
        assert list(rows[:, grid.CLOSES]) == [*[0] * (len(rows) - 1), 1][-len(rows) :] if length else len(rows) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_specs_stay_inside_their_arrays(l2norm, dtype):
    """The block that a program's specs name lies inside the array, for every program of every kernel."""
    p = problem(100, has_initial=True, keeps_states=True, l2norm=l2norm, dtype=dtype)
    token_arrays = {
        "q": (2, 100, 2, 32),
        "k": (2, 100, 2, 32),
        "v": (2, 100, 4, 32),
        "o": (2, 100, 4, 32),
        "g": (2, 100, 4),
        "beta": (2, 100, 4),
        "window": (1,),
    }
    states = {"initial_state": (2, 4, 32, 32), "carry": (2, 4, 32, 32)}
    prefill = token_arrays | states | {name: buffer.shape for name, buffer in grid.scratch(p).items()}
    whole = replace(p, config=replace(p.config, outputs_in_scan=True))
    plans = grid.plan_locals(p), grid.plan_blocks(p), grid.plan_solve(p), grid.plan_scan(p), grid.plan_outputs(p)
    for plan in plans:
        assert_blocks_inside(plan, prefill)
    prefill |= {name: buffer.shape for name, buffer in grid.scratch(whole).items()}
    for plan in (grid.plan_prepare(whole), grid.plan_scan(whole)):
        assert_blocks_inside(plan, prefill)
    assert_blocks_inside(grid.plan_decode(p), token_arrays | {"state": (2, 4, 32, 32)})


def assert_blocks_inside(plan, shapes):
    (programs,) = plan.grid
    for name, spec in (*plan.in_specs.items(), *plan.out_specs.items()):
        for program in range(programs):
            index = spec.index_map(program)
            for i, block, size in zip(index, spec.block_shape, shapes[name], strict=True):
                assert i >= 0 and (i + 1) * (block or 1) <= size, (name, program)


def arguments(B, T, G, H, K, V, dtype):
    shape = jax.ShapeDtypeStruct
    qk, v, gate = shape((B, T, G, K), dtype), shape((B, T, H, V), dtype), shape((B, T, H), jnp.float32)
    return dict(q=qk, k=qk, v=v, g=gate, beta=gate)


def triton_operations(operation):
    for region in operation.regions:
        for block in region:
            for inner in block:
                if "__gpu$xla.gpu.triton" in str(inner.attributes.get("call_target_name", "")):
                    yield inner
                yield from triton_operations(inner.operation)


def allocated(function, avals):
    """(bytes of the kernels' results that are not written in place, kernels) of the function lowered for ROCm."""
    module = isa.lower_rocm(function, avals, arch="gfx942").compiler_ir("stablehlo")
    total = kernels = 0
    for call in triton_operations(module.operation):
        kernels += 1
        aliases = str(call.attributes["output_operand_aliases"])
        in_place = {int(i or 0) for i in re.findall(r"output_tuple_indices = \[(\d*)\]", aliases)}
        for i, result in enumerate(call.results):
            if i not in in_place:
                total += math.prod(result.type.shape) * result.type.element_type.width // 8
    return total, kernels


def reused(B, T, G, H, K, V, dtype, config, **facts):
    """Bytes that serve twice: `solve` is the last to read what the locals leave for it, then the scan's results come.

    That is how XLA assigns buffers; tests/test_gated_delta_gpu.py asks it.
    """
    p = Problem(B, T, G, H, K, V, jnp.dtype(dtype), config, **facts)
    buffers = grid.scratch(p)
    sizes = (
        sum(math.prod(buffers[n].shape) * buffers[n].dtype.itemsize for n in names)
        for names in (("gram", "strength", "blocks"), grid.scan_to_outputs(p))
    )
    return min(sizes)


SEED_SHAPE = dict(B=1, G=32, H=32, K=128, V=128)


@pytest.mark.parametrize(("dtype", "limit_mib"), [("float16", 51), ("bfloat16", 51), ("float32", 83)])
def test_scratch_is_what_is_allocated_whatever_the_length(dtype, limit_mib):
    config = Config(16, 32, 4)
    answers = set()
    for T in (4096, 18778, 131072):
        answer = gated_delta.prefill_scratch_bytes(1, T, 32, 128, 128, dtype=dtype, config=config)
        answers.add(answer)
        function = partial(gated_delta.chunk_gated_delta_rule, output_final_state=False, config=config)
        written, calls = allocated(lambda a, f=function: f(**a), arguments(T=T, dtype=dtype, **SEED_SHAPE))
        assert calls == len(KERNELS)
        # Without a final state there is a carry of its own, which the scan writes in place.
        assert written - reused(T=T, dtype=dtype, config=config, **SEED_SHAPE) == answer - 32 * 128 * 128 * 4
    (answer,) = answers
    assert answer <= limit_mib * 2**20


@pytest.mark.parametrize("l2norm", [False, True])
def test_scratch_without_a_pass_of_outputs(l2norm):
    config = Config(32, 80, 8, 1, outputs_in_scan=True)
    options = dict(config=config, use_qk_l2norm_in_kernel=l2norm)
    answer = gated_delta.prefill_scratch_bytes(1, 18778, 32, 128, 128, dtype="bfloat16", **options)
    function = partial(gated_delta.chunk_gated_delta_rule, **options)
    written, calls = allocated(lambda a: function(**a)[0], arguments(T=18778, dtype="bfloat16", **SEED_SHAPE))
    assert calls == len(KERNELS) - 1
    assert written == answer - 32 * 128 * 128 * 4
    assert answer <= 64 * 2**20


def test_one_window_allocates_no_carry():
    config = Config(16, 32, 4)
    # 513 tokens are 33 chunks: two windows of 17, as large as one of 512 tokens in windows of 17 would be.
    one, two = (gated_delta.prefill_scratch_bytes(1, T, 2, 32, 64, dtype="float32", config=config) for T in (272, 513))
    assert two - one == 2 * 32 * 64 * 4
    one = gated_delta.prefill_scratch_bytes(1, 512, 2, 32, 64, dtype="float32", config=config)
    function = partial(gated_delta.chunk_gated_delta_rule, config=config)
    written, _ = allocated(lambda a: function(**a)[0], arguments(1, 512, 2, 2, 32, 64, "float32"))
    assert written - reused(1, 512, 2, 2, 32, 64, "float32", config) == one + 512 * 2 * 64 * 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scratch_of_packed_sequences(dtype):
    config = Config(16, 4, 2)
    avals = arguments(1, 300, 1, 2, 32, 64, dtype) | {"cu_seqlens": jax.ShapeDtypeStruct((6,), jnp.int32)}
    function = partial(gated_delta.chunk_gated_delta_rule, output_final_state=True, config=config)
    written, _ = allocated(lambda a: function(**a), avals)
    answer = gated_delta.prefill_scratch_bytes(1, 300, 2, 32, 64, dtype=dtype, config=config, num_sequences=5)
    chunks, carry = (300 + 5 * 15) // 16, 2 * 32 * 64 * 4
    # The final states are the carry, and the table of chunks comes from XLA.
    twice = reused(1, 300, 1, 2, 32, 64, dtype, config, sequences=5)
    assert answer == written - twice + carry + chunks * 5 * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": -5}, "seq_len must be an int >= 0, got -5"),
        ({"num_heads": 0}, "num_heads must be an int >= 1"),
        ({"key_size": 1.5}, "key_size must be an int >= 1, got 1.5"),
        ({"dtype": "int32"}, "dtype must be one of bfloat16.*got int32"),
        ({"dtype": "float64"}, "dtype must be one of bfloat16.*got float64"),
        ({"batch": 2, "num_sequences": 3}, "batch must be 1 .*got 2"),
        ({"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel must be a Python bool .*got 1"),
        ({"config": Config(16, 2, 3)}, "config.dv_splits must divide .*64, got 3"),
    ],
)
def test_scratch_refuses_bad_sizes(changed, message):
    sizes = dict(batch=1, seq_len=100, num_heads=2, key_size=32, value_size=64, dtype="float32")
    with pytest.raises(ValueError, match=message):
        gated_delta.prefill_scratch_bytes(**sizes | changed)
    with pytest.raises(NotImplementedError, match="K = 512"):
        gated_delta.prefill_scratch_bytes(**sizes | {"key_size": 512})


def test_no_copy_of_the_inputs_is_padded_or_transposed():
    function = partial(gated_delta.chunk_gated_delta_rule, output_final_state=True, config=Config(16, 32, 4))
    text = isa.lower_rocm(
        lambda a: function(**a), arguments(T=1001, dtype="bfloat16", **SEED_SHAPE), arch="gfx942"
    ).as_text()
    for operation in ("stablehlo.pad", "stablehlo.transpose", "stablehlo.concatenate", "stablehlo.gather"):
        assert operation not in text, operation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
def test_kernels_lower_for_rocm(arch, dtype):
    avals = arguments(1, 1001, 2, 4, 128, 128, dtype)

    def names(function):
        return {c.name for c in isa.triton_calls(isa.lower_rocm(lambda a: function(**a), avals, arch=arch))}

    assert names(gated_delta.chunk_gated_delta_rule) == KERNELS
    assert names(gated_delta.recurrent_gated_delta_rule) == {"gated_delta_decode"}


def test_overlap_shares_launches():
    avals = arguments(1, 100, 2, 4, 128, 128, "bfloat16")

    def names(**options):
        config = Config(16, 2, 8, 1, outputs_in_scan=True, **options)
        function = partial(gated_delta.chunk_gated_delta_rule, config=config)
        return {c.name for c in isa.triton_calls(isa.lower_rocm(lambda a: function(**a), avals, arch="gfx942"))}

    assert names() == KERNELS - {"gated_delta_outputs"}
    assert names(overlap=True) == {f"gated_delta_{name}" for name in ("prepare", "scan_prepare", "scan")}


def test_grids_have_one_axis_however_many_sequences():
    """fla 1077: a grid axis other than the first ends at 65535."""
    avals = arguments(1, 3000, 2, 32, 32, 32, "bfloat16") | {"cu_seqlens": jax.ShapeDtypeStruct((70001,), jnp.int32)}
    for function in (gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule):
        for call in isa.triton_calls(isa.lower_rocm(lambda a, f=function: f(**a), avals, arch="gfx942")):
            assert call.grid[1:] == (1, 1), call.name


@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
def test_offsets_of_huge_arrays_have_64_bits(function):
    """fla 1082, 1173: T G K above 2^31 elements."""
    avals = arguments(1, 2**31 // (4 * 128) + 1, 4, 4, 128, 128, "bfloat16")
    for call in isa.triton_calls(isa.lower_rocm(lambda a: function(**a), avals, arch="gfx942")):
        if call.name in ("gated_delta_blocks", "gated_delta_solve"):
            # Scratch alone, which does not grow with T.
            continue
        pointers = [line for line in call.ttir.splitlines() if "tt.addptr" in line and "!tt.ptr<bf16>" in line]
        assert any("i64" in line for line in pointers), call.name


def test_decode_updates_its_state_in_place():
    avals = arguments(2, 1, 2, 4, 32, 32, "bfloat16")
    state = jax.ShapeDtypeStruct((2, 4, 32, 32), jnp.float32)

    def step(state, a):
        return gated_delta.recurrent_gated_delta_rule(**a, initial_state=state, output_final_state=True)

    text = isa.lower_rocm(step, state, avals, arch="gfx942").as_text()
    assert "output_tuple_indices = [1], operand_index" in text


def test_the_architectures_row_is_used():
    avals = arguments(1, 4096, 2, 4, 128, 128, "float16")
    for row in ROWS:
        if row.itemsize == 2 and row.architecture.startswith("gfx"):
            lowered = isa.lower_rocm(lambda a: gated_delta.chunk_gated_delta_rule(**a), avals, arch=row.architecture)
            scan = next(c for c in isa.triton_calls(lowered) if c.name == "gated_delta_scan")
            assert scan.grid[0] == 4 * row.config.dv_splits
            assert scan.num_warps == row.config.num_warps


def test_kernels_count_in_int32_for_x64_users():
    with jax.enable_x64(True):
        avals = arguments(1, 1001, 2, 4, 32, 32, "float32")
        calls = isa.triton_calls(
            isa.lower_rocm(lambda a: gated_delta.chunk_gated_delta_rule(**a), avals, arch="gfx942")
        )
    for call in calls:
        assert "xi64>" not in call.ttir, call.name


@pytest.mark.parametrize("value_size", [8, 16, 24, 40, 48, 64, 96, 128, 160, 256])
def test_default_split_divides_v_into_wide_slices(value_size):
    for architecture in ("gfx1151", "gfx942", "sm_90", "unknown"):
        splits = default_config(architecture, "bfloat16", value_size).dv_splits
        assert value_size % splits == 0
        assert splits == 1 or value_size // splits >= 16
    assert default_config("unknown", "float32", 128) == ANY[4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_size", 8),
        ("chunk_size", 48),
        ("window_chunks", 0),
        ("dv_splits", 0),
        ("num_warps", 3),
        ("num_stages", 0),
        ("outputs_in_scan", 1),
        ("overlap", 1),
        ("overlap", True),  # without outputs_in_scan
    ],
)
def test_config_refuses_what_cannot_run(field, value):
    with pytest.raises(ValueError, match=rf"{field} .*{value}"):
        replace(ANY[2], **{field: value})
