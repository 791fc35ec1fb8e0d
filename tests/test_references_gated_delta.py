"""The forms of the gated delta rule against each other and against what users of such kernels reported."""

from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_reports import REPORTS
from jax.sharding import AxisType, PartitionSpec

from references import accuracy, gated_delta
from references.cases import GATED_DELTA_ODD, GATED_DELTA_SMALL, GatedDeltaCase, inputs

OPTIONS = ("scale", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first")
recurrent = jax.jit(gated_delta.recurrent_gated_delta_rule, static_argnames=OPTIONS)
chunk = jax.jit(gated_delta.chunk_gated_delta_rule, static_argnames=(*OPTIONS, "chunk_size", "operand_dtype"))


@partial(jax.jit, static_argnames=OPTIONS)
def affine_and_associative(**arguments):
    # In one program, which computes the maps that both compose only once.
    return tuple(gated_delta.affine_gated_delta_rule(**arguments, associative=flag) for flag in (False, True))


@cache
def truth(case):
    return accuracy.gated_delta_truth(inputs(case))


def assert_within(errors, bounds):
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)


@pytest.mark.parametrize("case", GATED_DELTA_SMALL + GATED_DELTA_ODD, ids=str)
def test_chunk_form_equals_the_float64_scan(case):
    arguments = inputs(case)
    result = chunk(**arguments)
    bounds = accuracy.gated_delta_bounds(case, arguments, truth(case))
    assert_within(accuracy.gated_delta_errors(result, truth(case)), bounds)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, recurrent(**arguments))


@pytest.mark.parametrize("case", GATED_DELTA_SMALL + GATED_DELTA_ODD, ids=str)
def test_affine_forms_equal_the_float64_scan(case):
    # 16-bit inputs are widened first: then even they are held to the fp32 bounds.
    arguments = inputs(case)
    arguments |= {name: arguments[name].astype(jnp.float32) for name in ("q", "k", "v")}
    bounds = accuracy.gated_delta_bounds(replace(case, dtype="float32"), arguments, truth(case))
    for result in affine_and_associative(**arguments):
        assert_within(accuracy.gated_delta_errors(result, truth(case)), bounds)


@pytest.mark.parametrize("case", GATED_DELTA_SMALL + GATED_DELTA_ODD, ids=str)
def test_fp32_scan_equals_the_float64_scan(case):
    arguments = inputs(case)
    errors = accuracy.gated_delta_errors(recurrent(**arguments), truth(case))
    assert_within(errors, accuracy.recurrent_gated_delta_bounds(case, arguments))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
@pytest.mark.parametrize("rule", [recurrent, chunk], ids=["recurrent", "chunk"])
def test_reports(rule, report):
    report(rule)


SLOW = GatedDeltaCase("slow", "", 1, 130, 2, 4, 16, 16, gates=-1e-3)


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_chunk_size_only_rounds(chunk_size):
    arguments = inputs(SLOW)
    result = chunk(**arguments, chunk_size=chunk_size)
    assert_within(
        accuracy.gated_delta_errors(result, truth(SLOW)),
        accuracy.gated_delta_bounds(SLOW, arguments, truth(SLOW)),
    )


def test_operand_dtype_rounds_by_the_mantissa():
    case = replace(SLOW, gates="model")
    arguments = inputs(case)
    fp16, bf16 = (
        accuracy.gated_delta_errors(chunk(**arguments, operand_dtype=dtype), truth(case)).state
        for dtype in ("float16", "bfloat16")
    )
    assert fp16 > 1e-4
    # three bits fewer
    assert 6 < bf16 / fp16 < 10


GRADIENTS = (
    replace(SLOW, gates="model", T=70),
    GatedDeltaCase("packed", "", 1, 40, 1, 2, 16, 24, keys="raw", l2norm=True, cu_seqlens=(0, 17, 17, 35)),
)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradient_equals_the_float64_scans(case):
    arguments = inputs(case)
    weight = np.random.default_rng(0).standard_normal((case.B, case.T, case.H, case.V), np.float32)
    options = {name: arguments.pop(name) for name in (*OPTIONS, "cu_seqlens")}

    def total(rule, arrays):
        o, state = rule(**arrays, **options)
        return jnp.sum(o * weight.astype(o.dtype)) + jnp.sum(state * state)

    gradient = jax.jit(jax.grad(partial(total, gated_delta.chunk_gated_delta_rule)))(arguments)
    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(partial(total, gated_delta.recurrent_gated_delta_rule)))(
            accuracy.as_float64(arguments)
        )
        expected = jax.tree.map(np.asarray, expected)
    for name in arguments:
        assert accuracy.relative_l2(gradient[name], expected[name]) <= 1e-5, name


def test_cu_seqlens_are_values_not_shapes():
    case = GatedDeltaCase("packed", "", 1, 40, 1, 1, 16, 16, cu_seqlens=(0, 10, 40))
    arguments = inputs(case)
    count = chex.assert_max_traces(gated_delta.chunk_gated_delta_rule, n=1)
    rule = jax.jit(count, static_argnames=OPTIONS)
    for cu_seqlens in ((0, 10, 40), (0, 0, 5), (0, 33, 33)):
        rule(**arguments | {"cu_seqlens": jnp.asarray(cu_seqlens, jnp.int32)})


@pytest.mark.parametrize("cu_seqlens", [(3, 50, 20), (0, 200, 300), (0, -5, 40)], ids=str)
def test_bad_offsets_read_nothing_out_of_range(cu_seqlens):
    # What comes out is unspecified; NaN would mean that jax filled in for a read beyond the array.
    arguments = inputs(GatedDeltaCase("packed", "", 1, 40, 1, 1, 16, 16, cu_seqlens=(0, 10, 40)))
    for rule in (recurrent, chunk):
        o, state = rule(**arguments | {"cu_seqlens": jnp.asarray(cu_seqlens, jnp.int32)})
        assert np.isfinite(np.asarray(o)).all()
        assert np.isfinite(np.asarray(state)).all()


def test_fp32_stays_fp32_under_x64():
    arguments = inputs(GatedDeltaCase("x64", "", 1, 20, 1, 2, 16, 16, l2norm=True))
    with jax.enable_x64(True):
        for rule in (recurrent, chunk):
            assert [x.dtype for x in rule(**arguments)] == [jnp.float32, jnp.float32]


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_chunk_form_and_its_gradient_lower_for_gpus(platform):
    # Until there are backward kernels, gradients on a GPU go through this form.
    arguments = inputs(GatedDeltaCase("lowered", "", 1, 20, 1, 2, 16, 16, cu_seqlens=(0, 7, 20)))

    def total(v):
        return jnp.sum(gated_delta.chunk_gated_delta_rule(**arguments | {"v": v})[0])

    jax.jit(jax.grad(total)).trace(arguments["v"]).lower(lowering_platforms=(platform,))


def test_vmap_equals_a_loop():
    case = GatedDeltaCase("vmapped", "", 3, 40, 1, 2, 16, 16)
    arguments = inputs(case)
    options = {name: arguments.pop(name) for name in (*OPTIONS, "cu_seqlens")}
    whole = chunk(**arguments, **options)
    one_row = {name: x[:, None] for name, x in arguments.items()}
    rows = jax.vmap(lambda arrays: chunk(**arrays, **options))(one_row)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[:, 0], rows), whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("rule", "state"), [(recurrent, None), (chunk, "normal")], ids=["recurrent", "chunk"])
def test_shard_map(rule, state):
    # One device is enough: jax checks which values vary over a mesh axis whatever its size. States do not.
    arguments = inputs(GatedDeltaCase("sharded", "", 1, 20, 2, 2, 16, 16, state=state))
    arrays = {name: arguments.pop(name) for name in ("q", "k", "v", "g", "beta")}
    batch = PartitionSpec("batch")
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda arrays: rule(**arrays, **arguments), mesh=mesh, in_specs=batch, out_specs=batch)
    chex.assert_trees_all_close(sharded(arrays), rule(**arrays, **arguments), rtol=0, atol=1e-6)


# Broken builds: each of these faults has been shipped by some implementation, and the comparison must see it.


def carry_scaled(arguments):
    early = {name: arguments[name][:, :65] for name in ("q", "k", "v", "g", "beta")}
    late = {name: arguments[name][:, 65:] for name in early}
    o1, state = chunk(**arguments | early)
    o2, state = chunk(**arguments | late | {"initial_state": 0.99 * state})
    return jnp.concatenate([o1, o2], axis=1), state


def heads_modulo_groups(arguments):
    # value heads 0, 1, 2, 3 read key heads 0, 1, 0, 1 instead of 0, 0, 1, 1
    swap = np.array([0, 2, 1, 3])
    swapped = {name: arguments[name][:, :, swap] for name in ("v", "g", "beta")}
    o, state = chunk(**arguments | swapped | {"initial_state": arguments["initial_state"][:, swap]})
    return o[:, :, swap], state[:, swap]


def error_before_decay(arguments):
    # beta (v - S^T k) with S before its decay is exp(-g) beta (exp(g) v - (exp(g) S)^T k)
    decay = jnp.exp(arguments["g"])
    return chunk(**arguments | {"v": arguments["v"] * decay[..., None], "beta": arguments["beta"] / decay})


def padding_that_decays(arguments):
    padded = {
        name: jnp.pad(arguments[name], ((0, 0), (0, 62)) + ((0, 0),) * (arguments[name].ndim - 2))
        for name in ("q", "k", "v", "g", "beta")
    }
    padded["g"] = padded["g"].at[:, 130:].set(-1e-3)
    o, state = chunk(**arguments | padded)
    return o[:, :130], state


@pytest.mark.parametrize(
    "broken",
    [carry_scaled, heads_modulo_groups, error_before_decay, padding_that_decays],
    ids=lambda f: f.__name__,
)
def test_broken_builds_are_seen(broken):
    arguments = inputs(SLOW)
    errors = accuracy.gated_delta_errors(broken(arguments), truth(SLOW))
    bounds = accuracy.gated_delta_bounds(SLOW, arguments, truth(SLOW))
    # the trailing half or the state, by ten times the bound
    assert max(errors.trailing_half / bounds.trailing_half, errors.state / bounds.state) > 10, errors


def one_sum(g):
    D = jnp.cumsum(jnp.maximum(g, -104.0), axis=-1)
    return D, D[..., :, None] - D[..., None, :]


def neumann_series(M):
    term = total = jnp.broadcast_to(jnp.eye(M.shape[-1], dtype=M.dtype), M.shape)
    for _ in range(M.shape[-1] - 1):
        term = -term @ M
        total = total + term
    return total


@pytest.mark.parametrize(
    ("name", "replacement", "case_name"),
    [("_gate_sums", one_sum, "strong_64"), ("_unit_lower_inverse", neumann_series, "aiter_4952")],
)
def test_inexact_steps_are_seen(monkeypatch, name, replacement, case_name):
    (case,) = (case for case in GATED_DELTA_ODD if case.name == case_name)
    arguments = inputs(case)
    monkeypatch.setattr(gated_delta, name, replacement)
    # Not `chunk`, which has been traced with the sound steps.
    result = jax.jit(partial(gated_delta.chunk_gated_delta_rule), static_argnames=OPTIONS)(**arguments)
    errors = accuracy.gated_delta_errors(result, truth(case))
    assert max(errors) > max(accuracy.gated_delta_bounds(case, arguments, truth(case)))
