"""The Pallas kernels of the gated delta rule (interpret mode) against the float64 token scan."""

from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_reports import REPORTS

import gated_delta
from gated_delta.tuning import default_config
from references import accuracy
from references import gated_delta as reference
from references.cases import GATED_DELTA_ODD, GATED_DELTA_SMALL, GatedDeltaCase, inputs

CASES = GATED_DELTA_SMALL + GATED_DELTA_ODD
ARRAYS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


@cache
def truth(case):
    return accuracy.gated_delta_truth(inputs(case))


def small_windows(case, chunk_size=16, window_chunks=2):
    """The default V split, and windows so short that most cases cross a boundary."""
    config = default_config("any", case.dtype, case.V)
    return replace(config, chunk_size=chunk_size, window_chunks=window_chunks)


def assert_within(errors, bounds):
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)


def prefill(case, config):
    return gated_delta.chunk_gated_delta_rule(**inputs(case), implementation="pallas", config=config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_equals_the_float64_scan(case):
    errors = accuracy.gated_delta_errors(prefill(case, small_windows(case)), truth(case))
    assert_within(errors, accuracy.gated_delta_bounds(case, inputs(case), truth(case), chunk_size=16))
    if case.dtype != "float32":
        # The same rounding at the same points, but for bf16's second terms, which only help.
        twin = reference.chunk_gated_delta_rule(**inputs(case), chunk_size=16, operand_dtype=case.dtype)
        assert_within(errors, [1.5 * e for e in accuracy.gated_delta_errors(twin, truth(case))])


LARGE_CHUNKS = [
    c for c in CASES if c.T > 32 and (c.name.startswith(("size_128", "T_1", "strong", "aiter", "packed_l2")))
]


@pytest.mark.parametrize("case", LARGE_CHUNKS, ids=str)
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunk_size_only_rounds(case, chunk_size):
    errors = accuracy.gated_delta_errors(prefill(case, small_windows(case, chunk_size, 1)), truth(case))
    assert_within(errors, accuracy.gated_delta_bounds(case, inputs(case), truth(case), chunk_size))


EXTRA = [
    # The largest chunk, once; gates and step sizes in 16 bits, as mixed-precision models have them; decode in fp16.
    GatedDeltaCase("chunks_of_128", "", 1, 150, 1, 2, 16, 16),
    GatedDeltaCase("chunks_of_128_bf16", "", 1, 150, 1, 2, 16, 16, "bfloat16", "strong64"),
]


@pytest.mark.parametrize("case", EXTRA, ids=str)
def test_chunks_of_128(case):
    errors = accuracy.gated_delta_errors(prefill(case, small_windows(case, 128, 1)), truth(case))
    assert_within(errors, accuracy.gated_delta_bounds(case, inputs(case), truth(case), 128))


@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
@pytest.mark.parametrize("gate_dtype", ["bfloat16", "float16"])
def test_gates_of_16_bits_are_widened(function, gate_dtype):
    arguments = inputs(GatedDeltaCase("gates", "", 1, 20, 1, 2, 16, 16))
    arguments |= {name: arguments[name].astype(gate_dtype) for name in ("g", "beta")}
    widened = arguments | {name: arguments[name].astype("float32") for name in ("g", "beta")}
    function = partial(function, implementation="pallas", config=gated_delta.Config(16, 1, 1))
    chex.assert_trees_all_equal(function(**arguments), function(**widened))


@pytest.mark.parametrize("cu_seqlens", [None, (0, 20, 20, 61)], ids=str)
def test_without_a_final_state_the_output_is_the_same(cu_seqlens):
    """Then a carry of its own takes the state from window to window."""
    arguments = inputs(GatedDeltaCase("carry", "", 1, 70, 1, 2, 16, 16, gates=-1e-3, cu_seqlens=cu_seqlens))
    function = partial(gated_delta.chunk_gated_delta_rule, implementation="pallas", config=gated_delta.Config(16, 2, 1))
    o, _ = function(**arguments)
    alone, none = function(**arguments | {"output_final_state": False})
    assert none is None
    assert bits(alone) == bits(o)


WITHOUT_OUTPUTS = ("size_128", "packed_", "v_first", "strong", "aiter", "l2norm", "K_")


@pytest.mark.parametrize("case", [c for c in CASES if c.T > 16 and c.name.startswith(WITHOUT_OUTPUTS)], ids=str)
def test_the_scan_may_compute_the_outputs(case):
    config = replace(small_windows(case, 16, 2), outputs_in_scan=True)
    assert_within(
        accuracy.gated_delta_errors(prefill(case, config), truth(case)),
        accuracy.gated_delta_bounds(case, inputs(case), truth(case), 16),
    )


NAMED = ("v_first", "l2norm", "K_", "packed_", "heads_", "one_token", "attention_gym", "size_128_fp16")
DECODED = [c for c in CASES if c.T <= 5 or c.name.startswith(NAMED)]


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_decode_equals_the_float64_scan(case):
    result = gated_delta.recurrent_gated_delta_rule(**inputs(case), implementation="pallas")
    assert_within(
        accuracy.gated_delta_errors(result, truth(case)),
        accuracy.recurrent_gated_delta_bounds(case, inputs(case)),
    )


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
def test_reports(function, report):
    report(partial(function, implementation="pallas", config=gated_delta.Config(16, 2, 1)))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_window_length_changes_no_bit(dtype):
    case = GatedDeltaCase("windows", "", 1, 85, 1, 2, 16, 32, dtype, gates=-1e-3)
    results = [bits(prefill(case, gated_delta.Config(16, window, 2))) for window in (1, 2, 6)]
    assert all(result == results[0] for result in results)


def test_splits_of_v_agree():
    case = GatedDeltaCase("splits", "", 1, 70, 1, 1, 16, 64, gates=-1e-3)
    one, *others = (prefill(case, gated_delta.Config(16, 2, splits)) for splits in (1, 2, 4))
    for other in others:
        for x, y in zip(other, one, strict=True):
            assert accuracy.relative_l2(x, np.asarray(y, np.float64)) <= 1e-6


@pytest.mark.parametrize("cu_seqlens", [(0, 5, 5), (0, 20, 20, 20), (0, 0, 1, 1, 34, 90, 90)], ids=str)
@pytest.mark.parametrize("window_chunks", [1, 2, 3, 32])
def test_states_of_empty_sequences_at_the_end_pass_through(cu_seqlens, window_chunks):
    """Chunks that are not needed stand at the end of the last window, whatever its length."""
    case = GatedDeltaCase("empty_at_the_end", "", 1, cu_seqlens[-1], 1, 2, 16, 16, cu_seqlens=cu_seqlens)
    errors = accuracy.gated_delta_errors(prefill(case, gated_delta.Config(16, window_chunks, 1)), truth(case))
    assert_within(errors, accuracy.gated_delta_bounds(case, inputs(case), truth(case), 16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [1000.0, 20000.0])
def test_large_later_values_change_no_earlier_bit(dtype, factor):
    """Powers of two that fp16 operands are relative to must not come from later tokens of the chunk."""
    arguments = inputs(GatedDeltaCase("causal", "", 1, 20, 1, 2, 16, 16, dtype))
    function = partial(gated_delta.chunk_gated_delta_rule, implementation="pallas", config=gated_delta.Config(16, 2, 1))
    o, _ = function(**arguments)
    later, _ = function(**arguments | {"v": arguments["v"].at[:, 12:].multiply(factor)})
    assert bits(later[:, :12]) == bits(o[:, :12])
    assert bits(later[:, 12:]) != bits(o[:, 12:])


def fp16_case(change):
    """An fp16 case whose operands have no power of two in common: see `test_fp16_mixed_magnitudes`."""
    case = GatedDeltaCase("mixed", "", 1, 40, 1, 2, 16, 16, "float16")
    arguments = inputs(case)
    if change == "small scale":
        arguments |= {"scale": 1e-6, "v": (arguments["v"] * 1000).astype(jnp.float16)}
    if change == "large scale":
        arguments |= {"scale": 1e4, "v": (arguments["v"] * 0.01).astype(jnp.float16)}
    if change == "a large value that is not written":
        arguments |= {"v": arguments["v"].at[:, 20].set(6e4), "beta": arguments["beta"].at[:, 20].set(0)}
    if change == "a last token that only decays":
        arguments |= {"beta": arguments["beta"].at[:, 39].set(0), "g": arguments["g"].at[:, 39].set(-12)}
    return case, arguments


@pytest.mark.parametrize(
    "change", ["small scale", "large scale", "a large value that is not written", "a last token that only decays"]
)
def test_fp16_mixed_magnitudes(change):
    case, arguments = fp16_case(change)
    result = gated_delta.chunk_gated_delta_rule(
        **arguments, implementation="pallas", config=gated_delta.Config(16, 2, 1)
    )
    expected = accuracy.gated_delta_truth(arguments)
    assert_within(accuracy.gated_delta_errors(result, expected), accuracy.gated_delta_bounds(case, arguments, expected))


@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
def test_forward_mode_and_second_derivatives(function):
    arguments = inputs(GatedDeltaCase("forward", "", 1, 4, 1, 1, 3, 2))
    v = arguments.pop("v")

    def total(v):
        o, state = function(v=v, **arguments)
        return jnp.sum(o**3) + jnp.sum(state**3)

    chex.assert_trees_all_close(jax.jacfwd(total)(v), jax.grad(total)(v), rtol=1e-5, atol=1e-5)
    assert np.isfinite(np.asarray(jax.hessian(total)(v))).all()


def test_two_runs_are_bit_equal():
    case = GatedDeltaCase("twice", "", 1, 50, 1, 2, 16, 16, "bfloat16")
    assert bits(prefill(case, small_windows(case))) == bits(prefill(case, small_windows(case)))


# factors on v and the initial state; on k, which l2norm takes out again
@pytest.mark.parametrize(("factor", "key_factor"), [(1e-3, 1e-2), (1e4, 1e3), (1.0, 1e-3)])
def test_fp16_keeps_its_precision_at_any_scale(factor, key_factor):
    """Values, states and raw keys far from 1: fp16's exponent is not the kernel's."""
    case = GatedDeltaCase("scaled", "", 1, 70, 1, 2, 32, 32, "float16", keys="raw", l2norm=True)
    arguments = inputs(case)
    arguments["initial_state"] = factor * arguments["initial_state"]
    for name, by in (("v", factor), ("k", key_factor)):
        arguments[name] = (arguments[name].astype(jnp.float32) * by).astype(jnp.float16)
    if factor < 1:
        # o itself would be denormal in fp16.
        arguments["scale"] = 1 / factor
    result = gated_delta.chunk_gated_delta_rule(
        **arguments, implementation="pallas", config=gated_delta.Config(16, 2, 2)
    )
    expected = accuracy.gated_delta_truth(arguments)
    assert_within(accuracy.gated_delta_errors(result, expected), accuracy.gated_delta_bounds(case, arguments, expected))


def small_arguments(dtype="float32"):
    arguments = inputs(GatedDeltaCase("small", "", 2, 20, 1, 2, 16, 16, dtype))
    return {n: arguments[n] for n in ARRAYS if arguments[n] is not None}


@pytest.fixture(params=["chunk_gated_delta_rule", "recurrent_gated_delta_rule"])
def pallas(request):
    function = getattr(gated_delta, request.param)
    return partial(function, output_final_state=True, implementation="pallas", config=gated_delta.Config(16, 1, 1))


@pytest.mark.parametrize("shared", [(), ("q", "k", "initial_state")], ids=["all sharded", "keys shared"])
@pytest.mark.parametrize("windows", [1, 3])
def test_shard_map_over_heads(pallas, windows, shared):
    """Kernels under interpret mode, whose own padding jax refuses with check_vma (a limit README names)."""
    arrays = small_arguments()
    if not shared:
        arrays |= {n: jnp.concatenate([arrays[n]] * 2, axis=2) for n in ("q", "k")}
    if windows > 1:
        pallas = partial(pallas, config=gated_delta.Config(16, 1, 1))
    check_shard_map(pallas, arrays, shared, check_vma=False)


@pytest.mark.parametrize("shared", [(), ("q", "k")], ids=["all sharded", "keys shared"])
@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
def test_default_shard_map_traces_the_kernels(function, shared):
    """Without a GPU the reference runs, but the branches with the kernels are traced, check_vma and all."""
    arrays = small_arguments()
    if not shared:
        arrays |= {n: jnp.concatenate([arrays[n]] * 2, axis=2) for n in ("q", "k")}
    function = partial(function, output_final_state=True, config=gated_delta.Config(16, 1, 1))
    check_shard_map(function, arrays, shared, check_vma=True)


def check_shard_map(function, arrays, shared, check_vma):
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, states, whole = (jax.P(None, None, "heads"), jax.P(None, "heads"), jax.P())
    specs = {n: whole if n in shared else states if n == "initial_state" else tokens for n in arrays}
    sharded = jax.shard_map(
        lambda a: function(**a), mesh=mesh, in_specs=(specs,), out_specs=(tokens, states), check_vma=check_vma
    )
    chex.assert_trees_all_close(jax.jit(sharded)(arrays), function(**arrays), rtol=0, atol=2e-6)


def test_vmap_equals_a_loop(pallas):
    arrays = small_arguments()
    batched = {n: x[:, None] for n, x in arrays.items()}
    expected = pallas(**arrays)
    result = jax.tree.map(lambda x: x[:, 0], jax.vmap(lambda a: pallas(**a))(batched))
    chex.assert_trees_all_close(result, expected, rtol=0, atol=2e-6)


def test_gradient_is_the_references(pallas):
    arrays = small_arguments()

    def total(function, arrays):
        o, state = function(**arrays)
        return jnp.sum(o * o) + jnp.sum(state * state)

    rule = partial(reference.chunk_gated_delta_rule, output_final_state=True)
    expected = jax.jit(jax.grad(partial(total, rule)))(arrays)
    for transform in (lambda f: f, jax.checkpoint):
        gradient = jax.jit(jax.grad(transform(partial(total, pallas))))(arrays)
        chex.assert_trees_all_close(gradient, expected, rtol=2e-5, atol=2e-5)


def test_derivative_keeps_only_the_inputs():
    """What the forward pass leaves for the backward pass is no larger than the arguments."""
    arrays = small_arguments()
    function = partial(gated_delta.chunk_gated_delta_rule, output_final_state=True)
    _, backward = jax.vjp(lambda a: function(**a), arrays)
    # Masks of one chunk are constants, not residuals.
    kept = [x for x in jax.tree.leaves(backward) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert sum(x.size for x in kept) <= sum(x.size for x in arrays.values())


def test_scan_over_calls_chains_the_state(pallas):
    arrays = small_arguments()
    state = arrays.pop("initial_state")
    whole, final = pallas(**arrays, initial_state=state)
    pieces = {n: jnp.moveaxis(x.reshape(2, 4, 5, *x.shape[2:]), 1, 0) for n, x in arrays.items()}

    def step(state, piece):
        o, state = pallas(**piece, initial_state=state)
        return state, o

    state, o = jax.lax.scan(step, state, pieces)
    chex.assert_trees_all_close(jnp.moveaxis(o, 0, 1).reshape(whole.shape), whole, rtol=0, atol=2e-6)
    chex.assert_trees_all_close(state, final, rtol=0, atol=2e-6)


def test_offsets_are_values_not_shapes(pallas):
    arguments = inputs(GatedDeltaCase("packed", "", 1, 20, 1, 1, 16, 16, cu_seqlens=(0, 10, 20), state=None))
    arrays = {n: arguments[n] for n in ARRAYS[:5]}
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda a, offsets: pallas(**a, cu_seqlens=offsets), n=1))
    for offsets in ((0, 10, 20), (0, 0, 5), (0, 17, 17)):
        traced(arrays, jnp.asarray(offsets, jnp.int32))


@pytest.mark.parametrize("offsets", [(3, 15, 9), (0, 200, 300), (0, -5, 18)], ids=str)
def test_bad_offsets_read_nothing_out_of_range(pallas, offsets):
    arguments = inputs(GatedDeltaCase("packed", "", 1, 20, 1, 1, 16, 16, cu_seqlens=(0, 10, 20)))
    arrays = {n: arguments[n] for n in ARRAYS[:6]}
    o, state = pallas(**arrays, cu_seqlens=jnp.asarray(offsets, jnp.int32))
    assert np.isfinite(np.asarray(o)).all()
    assert np.isfinite(np.asarray(state)).all()


def test_without_a_gpu_the_default_is_the_chunked_reference():
    arguments = inputs(GatedDeltaCase("default", "", 1, 70, 1, 2, 16, 16))
    options = {n: arguments.pop(n) for n in ("scale", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")}
    for function in (gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule):
        text = jax.jit(partial(function, **options)).lower(**arguments).compile().as_text()
        expected = jax.jit(partial(reference.chunk_gated_delta_rule, **options)).lower(**arguments).compile().as_text()
        # As many loops as the chunked reference: one over chunks, none over tokens.
        assert text.count(" while(") == expected.count(" while(")
