"""`Config.overlap`: the scan of a window beside the kernel that prepares the next one, and what it needs for that; in
interpret mode, as AMD machine code, and with faults in it.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from attention_truth import bits
from planted import broken

import gated_delta
from amdgpu import emulate, isa
from gated_delta import api, kernel, prefill
from references import accuracy
from references.cases import GatedDeltaCase, inputs

# Seven chunks in four windows: two in a turn of the loop, one after it, and the last, which is ragged.
CASE = GatedDeltaCase("overlap", "", 1, 105, 1, 1, 16, 16, "bfloat16")
CONFIG = gated_delta.Config(16, 2, 1, 1, 1, outputs_in_scan=True, overlap=True)


@pytest.mark.parametrize(
    ("T", "window", "dtype", "cu_seqlens", "final"),
    [
        (60, 2, "bfloat16", None, True),  # two windows
        (85, 2, "bfloat16", None, True),  # three
        (105, 2, "float16", None, False),  # four, the last of them ragged
        (75, 1, "bfloat16", (0, 3, 40, 40, 75), False),  # eight, three turns of the loop
    ],
)
def test_it_changes_no_bit(T, window, dtype, cu_seqlens, final):
    """In interpret mode. On a GPU pass (a) runs with other numbers of warps, which may sum in another order."""
    case = replace(CASE, T=T, H=2, V=32, dtype=dtype, cu_seqlens=cu_seqlens)
    arguments = inputs(case) | {"output_final_state": final, "implementation": "pallas"}
    config = replace(CONFIG, window_chunks=window, dv_splits=2)
    one, other = (
        gated_delta.chunk_gated_delta_rule(**arguments, config=replace(config, overlap=overlap))
        for overlap in (False, True)
    )
    assert bits(one) == bits(other)


# With blocks below the diagonal, and query factors as terms: what the row of sm_90 has.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_changes_no_bit_in_chunks_of_32(dtype):
    case = replace(CASE, T=85, H=2, dtype=dtype, keys="raw", l2norm=True)
    arguments = inputs(case)
    truth = accuracy.gated_delta_truth(arguments)
    config = replace(CONFIG, chunk_size=32, window_chunks=1)
    one, other = (
        gated_delta.chunk_gated_delta_rule(
            **arguments, implementation="pallas", config=replace(config, overlap=overlap)
        )
        for overlap in (False, True)
    )
    assert bits(one) == bits(other)
    bounds = accuracy.gated_delta_bounds(case, arguments, truth, 32)
    assert all(e <= b for e, b in zip(accuracy.gated_delta_errors(other, truth), bounds, strict=True))


@pytest.mark.usefixtures("fresh_traces")
def test_columns_that_are_not_inverted_are_seen(monkeypatch):
    fault = ("lax.iota(jnp.int32, p.config.chunk_size)", "lax.iota(jnp.int32, grid.BLOCK)")
    monkeypatch.setattr(prefill, "kernel", broken(kernel, fault))
    with pytest.raises(AssertionError):
        test_it_changes_no_bit_in_chunks_of_32("bfloat16")


def test_barriers_stand_where_launches_end():
    """Waves of the emulator run in step, and interpret mode has none: the program's text has to show them."""
    avals = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs(CASE).items() if hasattr(x, "shape")}
    function = functools.partial(gated_delta.chunk_gated_delta_rule, config=replace(CONFIG, chunk_size=32))
    calls = isa.triton_calls(isa.lower_rocm(lambda a: function(**a), avals, arch="gfx942"))
    assert {call.name: call.ttir.count("gpu.barrier") for call in calls} == {
        "gated_delta_prepare": 2,
        "gated_delta_scan_prepare": 2,
        "gated_delta_scan": 0,
    }


def as_machine_code(arch="gfx942", config=CONFIG):
    """(result, names of the kernels that ran, the largest error over its bound)."""
    jax.clear_caches()
    arguments = inputs(CASE)
    truth = accuracy.gated_delta_truth(arguments)
    with emulate(arch) as ran:
        result = jax.tree.map(np.asarray, gated_delta.chunk_gated_delta_rule(**arguments, config=config))
    errors, bounds = (
        accuracy.gated_delta_errors(result, truth),
        accuracy.gated_delta_bounds(CASE, arguments, truth, config.chunk_size),
    )
    return result, [run.name for run in ran], max(e / b for e, b in zip(errors, bounds, strict=True))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
def test_machine_code(arch):
    """With the bounds of every buffer checked: of the factors that are loaded ahead, too."""
    plain, _, excess = as_machine_code(arch, replace(CONFIG, overlap=False))
    assert excess <= 1
    result, ran, excess = as_machine_code(arch)
    assert excess <= 1 and bits(result) == bits(plain)
    assert ran == [f"gated_delta_{name}" for name in ("prepare", *3 * ("scan_prepare",), "scan")]


def the_window_itself_prepared():
    return api, "prefill", broken(prefill, ("(prepare, place + 1, operands)", "(prepare, place, operands)")).prefill


def a_turn_that_starts_late():
    return api, "prefill", broken(prefill, ("numbers = 2 * i +", "numbers = 2 * i + 1 +")).prefill


FAULTS = (the_window_itself_prepared, a_turn_that_starts_late)


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(monkeypatch, fault):
    monkeypatch.setattr(*fault())
    _, _, excess = as_machine_code()
    assert excess > 1


@pytest.mark.usefixtures("fresh_traces")
def test_factors_of_the_chunk_before_are_seen(monkeypatch):
    monkeypatch.setattr(prefill, "kernel", broken(kernel, ("ahead(i + 1)", "ahead(i)")))
    _, _, excess = as_machine_code()
    assert excess > 1


@pytest.mark.usefixtures("fresh_traces")
def test_factors_beyond_the_window_are_seen(monkeypatch):
    monkeypatch.setattr(prefill, "kernel", broken(kernel, ("jnp.minimum(i, p.window_chunks - 1)", "i")))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gated_delta_scan.*out of bounds"):
        as_machine_code()
