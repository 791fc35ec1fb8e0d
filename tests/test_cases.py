"""The case tables and the rule for errors."""

from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest

from references import accuracy, cases
from references.cases import FlashCase, GatedDeltaCase, GqaCase

GATED_DELTA = cases.GATED_DELTA_SMALL + cases.GATED_DELTA_ODD
FLASH = cases.FLASH_SMALL + cases.FLASH_ODD
GQA = cases.GQA_SMALL + cases.GQA_ODD
EVERY = {
    "gated_delta": GATED_DELTA + cases.GATED_DELTA_REAL,
    "flash": FLASH + cases.FLASH_REAL,
    "gqa": GQA + cases.GQA_REAL,
}


def same(x, y):
    return x is y if x is None else np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("table", EVERY.values(), ids=EVERY.keys())
def test_names_are_unique_and_sources_given(table):
    assert len({case.name for case in table}) == len(table)
    assert all(case.source for case in table)


@pytest.mark.parametrize("case", GATED_DELTA + FLASH + GQA, ids=lambda case: f"{type(case).__name__}-{case}")
def test_inputs_are_what_the_case_says(case):
    arguments = cases.inputs(case)
    again = cases.inputs(case)
    for name, value in arguments.items():
        compared = np.asarray(value, np.float64) if hasattr(value, "astype") else value
        assert same(compared, np.asarray(again[name], np.float64) if hasattr(value, "astype") else again[name]), name
    kv_dtype = getattr(case, "kv_dtype", None) or case.dtype
    assert arguments["q"].dtype == jnp.dtype(case.dtype)
    assert arguments["k"].dtype == arguments["v"].dtype == jnp.dtype(kv_dtype)
    if isinstance(case, GatedDeltaCase):
        assert arguments["q"].shape == arguments["k"].shape == (case.B, case.T, case.G, case.K)
        assert arguments["v"].shape == (case.B, case.T, case.H, case.V)
        assert arguments["g"].shape == arguments["beta"].shape == (case.B, case.T, case.H)
        assert np.all(np.asarray(arguments["g"]) <= 0)
        assert np.all((np.asarray(arguments["beta"]) >= 0) & (np.asarray(arguments["beta"]) <= 2))
        if case.keys != "raw":
            norms = np.linalg.norm(np.asarray(arguments["k"], np.float64), axis=-1)
            np.testing.assert_allclose(norms, 1, atol=1e-2)
    else:
        assert arguments["q"].shape == (case.B, case.T, case.H, case.K)
        assert arguments["k"].shape == (case.B, case.S, case.G, case.K)
        assert arguments["v"].shape == (case.B, case.S, case.G, case.V)


@pytest.mark.parametrize("case", GATED_DELTA + FLASH + GQA, ids=lambda case: f"{type(case).__name__}-{case}")
def test_small_cases_are_small(case):
    # Interpret mode takes seconds for more; one query row may walk a few thousand keys.
    assert case.T <= 200
    assert case.B * case.T * getattr(case, "S", 1) * case.H <= 250_000
    assert max(case.K, case.V) <= 256


def test_real_cases_are_not_drawn_here_but_well_formed():
    for case in cases.GATED_DELTA_REAL + cases.FLASH_REAL + cases.GQA_REAL:
        assert case.H % case.G == 0, case
        assert cases.flops(case) > 0, case
        assert cases.bytes_moved(case) > 0, case


GATES = {case.gates: case for case in GATED_DELTA}


def test_gates():
    strong = np.asarray(cases.inputs(GATES["strong16"])["g"])
    assert np.all(strong[:, ::16] == -316)
    assert np.sum(strong == -316) == strong[:, ::16].size
    reset = np.asarray(cases.inputs(GATES["reset"])["g"])
    assert np.all(np.isneginf(reset[:, 5]))
    assert np.sum(np.isinf(reset)) == reset[:, 5].size
    sparse = np.asarray(cases.inputs(GATES["sparse"])["g"])
    assert 0.5 < np.mean(sparse == 0) < 0.8
    A_log, dt_bias = cases.gated_delta.gate_parameters(np.random.default_rng(0), 4096)
    A, step = np.exp(A_log), np.logaddexp(dt_bias, 0)
    # Uniform in (0, 16); log-uniform in (0.001, 0.1).
    np.testing.assert_allclose(np.quantile(A, (0, 0.25, 0.5, 0.75, 1)), (0, 4, 8, 12, 16), atol=0.3)
    np.testing.assert_allclose(
        np.quantile(np.log10(step), (0, 0.25, 0.5, 0.75, 1)), (-3, -2.5, -2, -1.5, -1), atol=0.05
    )
    # From heads that forget in a token to heads that remember thousands.
    model = np.asarray(cases.inputs(GatedDeltaCase("many_heads", "", 1, 64, 1, 512, 1, 1))["g"])
    mean = model.mean(axis=1)
    assert mean.min() < -1
    assert mean.max() > -1e-2


def test_keys():
    def cosines(keys):
        case = GatedDeltaCase("keys", "", 1, 100, 1, 1, 64, 1, keys=keys)
        k = np.asarray(cases.inputs(case)["k"])[0, :, 0]
        return (k @ k.T)[np.triu_indices(100, 1)]

    assert abs(cosines("unit").mean()) < 0.05
    assert 0.7 < cosines("correlated").mean() < 0.9
    np.testing.assert_allclose(cosines("repeated"), 1, atol=1e-6)


def test_large_arrays_are_drawn_on_the_device():
    # The same statistics as those that numpy draws.
    from references.cases import draw

    x = np.asarray(draw.normal(draw.generator("large", 0), (1 << 12, 1 << 11), "float32", 2.0))
    assert abs(x.mean()) < 1e-2
    assert abs(x.std() - 2) < 1e-2
    norms = np.linalg.norm(np.asarray(draw.unit(draw.generator("large", 0), (1 << 16, 128), "float32")), axis=-1)
    np.testing.assert_allclose(norms, 1, atol=1e-5)


def test_gated_delta_counts():
    # 32768 tokens, 16 key and 32 value heads of 128: q and k, v and o, g and beta, the state returned
    (case,) = (case for case in cases.GATED_DELTA_REAL if case.name == "qwen3_next_T32768")
    T = 32768
    assert cases.bytes_moved(case) == T * 16 * 256 * 2 + T * 32 * 256 * 2 + T * 32 * 2 * 4 + 32 * 128 * 128 * 4
    # K S, Q S, K^T U; T R, P U; and k k^T, q k^T once for each key head
    per_chunk = 32 * (3 * 64 * 128 * 128 + 2 * 64 * 64 * 128) + 16 * 2 * 64 * 64 * 128
    assert cases.flops(case) == 2 * per_chunk * T // 64
    with_state = replace(case, state="normal")
    assert cases.bytes_moved(with_state) - cases.bytes_moved(case) == 32 * 128 * 128 * 4


def brute_force(case, allowed):
    """flops and bytes from the mask of allowed (row, key) pairs `[B, T, S]`."""
    keys = allowed.any(axis=1).sum()
    item, kv_item = jnp.dtype(case.dtype).itemsize, jnp.dtype(getattr(case, "kv_dtype", None) or case.dtype).itemsize
    return (
        2 * case.H * allowed.sum() * (case.K + case.V),
        (case.B * case.T * case.H * item + keys * case.G * kv_item) * (case.K + case.V),
    )


@pytest.mark.parametrize(
    "case",
    [case for case in FLASH if case.q_segments is None and case.bias is None and case.T],
    ids=str,
)
def test_flash_counts(case):
    t, j = np.arange(case.T)[:, None], np.arange(case.S)
    length = np.asarray(case.kv_lengths or (case.S,) * case.B)[:, None, None]
    allowed = np.broadcast_to(j < length, (case.B, case.T, case.S))
    if case.causal:
        allowed = allowed & (j <= t + length - case.T)
    expected_flops, expected_bytes = brute_force(case, allowed)
    assert cases.flops(case) == expected_flops
    if not case.causal or (case.kv_lengths is None and case.S <= case.T):
        assert cases.bytes_moved(case) == expected_bytes


@pytest.mark.parametrize("case", GQA, ids=str)
def test_gqa_counts(case):
    t, j = np.arange(case.T)[:, None], np.arange(case.S)
    past = np.broadcast_to(case.S - case.T if case.past is None else np.asarray(case.past), case.B)
    length = np.broadcast_to(case.T if case.lengths is None else np.asarray(case.lengths), case.B)
    past, length = past[:, None, None], length[:, None, None]
    allowed = (j < past + length) & (t < length)
    if case.causal:
        allowed = allowed & (j <= past + t)
    if case.window is not None:
        allowed = allowed & (j > past + t - case.window)
    assert (cases.flops(case), cases.bytes_moved(case)) == brute_force(case, allowed)


@pytest.mark.parametrize("case", [case for case in FLASH + GQA if case.poison], ids=str)
def test_poison_lies_beyond_the_keys_in_use(case):
    arguments = cases.inputs(case)
    if isinstance(case, FlashCase):
        end = np.asarray(case.kv_lengths)
    else:
        end = np.asarray(case.past) + np.asarray(case.lengths or (case.T,) * case.B)
    for name in "kv":
        poisoned = np.isnan(np.asarray(arguments[name], np.float32)).all(axis=(2, 3))
        np.testing.assert_array_equal(poisoned, np.arange(case.S) >= end[:, None])


def test_rows_meet_a_wholly_masked_first_tile():
    # For tiles of n keys some row's window starts beyond the first tile that its query tile visits.
    for case in cases.GQA_ODD:
        if not case.name.startswith("masked_tile"):
            continue
        n = case.T // 2
        past = case.S - case.T
        first_key = np.maximum(past + np.arange(case.T) - case.window + 1, 0)
        first_tile_visited = first_key[:n].min() // n
        assert np.any(first_key[:n] >= (first_tile_visited + 1) * n), case


def test_cases_are_frozen_and_hashable():
    for kind in (GatedDeltaCase, FlashCase, GqaCase):
        assert {field.name for field in fields(kind)} >= {"name", "source", "B", "T", "G", "H", "K", "V", "dtype"}
    assert len(set(GATED_DELTA + FLASH + GQA)) == len(GATED_DELTA + FLASH + GQA)


# The rule for errors


def test_relative_l2():
    assert accuracy.relative_l2(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(4 / 3)
    assert accuracy.relative_l2(np.zeros(3), np.zeros(3)) == 0
    assert accuracy.relative_l2(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert accuracy.relative_l2(np.array([np.inf]), np.array([np.inf])) == float("inf")
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        accuracy.relative_l2(np.zeros(2), np.zeros(3))


def test_trailing_half_sees_what_the_whole_hides():
    # Large early outputs, a fault in the small late ones.
    o = np.concatenate([np.full((1, 50, 1, 1), 100.0), np.ones((1, 50, 1, 1))], axis=1)
    wrong = np.concatenate([o[:, :50], 0.99 * o[:, 50:]], axis=1)
    state = np.ones((1, 1, 1, 1))
    errors = accuracy.gated_delta_errors((wrong, state), (o, state))
    assert errors.o < 2e-4
    assert errors.trailing_half == pytest.approx(1e-2)
    assert errors.state == 0


def case_of(**changes):
    return replace(GatedDeltaCase("bounds", "", 1, 8, 1, 1, 16, 16), **changes)


@pytest.mark.parametrize(
    ("case", "bound"),
    [
        (case_of(), 2e-6),
        (case_of(gates="strong16"), 2e-6),
        (case_of(keys="repeated"), 2e-6),
        (case_of(gates=-1e-3), 4e-6),
        (case_of(beta=1.9), 2e-5),
        (case_of(beta="double", gates=0.0), 2e-5),
        (case_of(dtype="float16"), 1e-3),
        (case_of(dtype="float16", gates=-1e-3), 1e-3),
        (case_of(dtype="bfloat16"), 4e-3),
        (case_of(dtype="bfloat16", gates=-0.1), 4e-3),
        (case_of(dtype="bfloat16", gates=-1e-3), 5e-3),
        (case_of(dtype="bfloat16", gates="reset"), 4e-3),
    ],
)
def test_gated_delta_bounds_without_data(case, bound):
    assert accuracy.gated_delta_bounds(case, {}, ()) == (bound, bound, bound)


def test_gated_delta_bounds_of_correlated_keys_follow_the_rounded_reference():
    case = case_of(dtype="bfloat16", keys="repeated", T=40)
    arguments = cases.inputs(case)
    truth = accuracy.gated_delta_truth(arguments)
    bounds = accuracy.gated_delta_bounds(case, arguments, truth)
    assert all(1e-3 < bound < 1e-1 for bound in bounds)
    # a truth that is further away raises what is allowed, as an error of the data would
    further = accuracy.gated_delta_bounds(case, arguments, (1.1 * truth[0], truth[1]))
    assert further.o > 2 * bounds.o
    assert further.state == bounds.state


def test_recurrent_bounds():
    case = case_of(gates=-1e-3, T=500)
    assert accuracy.recurrent_gated_delta_bounds(case, cases.inputs(case)).state == pytest.approx(2e-6 + 4e-8 * 500)
    case = case_of(gates=-1e-1, T=500)
    assert accuracy.recurrent_gated_delta_bounds(case, cases.inputs(case)).state == pytest.approx(2e-6 + 4e-7)
    case = case_of(dtype="bfloat16", T=0)
    o, trailing_half, state = accuracy.recurrent_gated_delta_bounds(case, cases.inputs(case))
    assert o == trailing_half == pytest.approx(2**-8 + 2e-6)
    assert state == pytest.approx(2e-6)


def test_attention_bound():
    truth = np.array([[0.5, -3.0], [0.0, 100.0]])
    np.testing.assert_allclose(accuracy.attention_bound(truth, None, "float32"), [[2e-5, 6e-5], [2e-5, 2e-3]])
    low = np.array([[0.5, -3.01], [0.25, 100.0]])
    # a unit in the last place of 3 and of 100 is 2 / 128 and 64 / 128 in bf16, an eighth of that in fp16
    np.testing.assert_allclose(accuracy.attention_bound(truth, low, "bfloat16"), [[0.02 + 2 / 128], [0.5 + 64 / 128]])
    np.testing.assert_allclose(accuracy.attention_bound(truth, low, "float16"), [[0.02 + 2 / 1024], [0.5 + 64 / 1024]])


def test_truth_is_float64():
    arguments = cases.inputs(case_of(T=8))
    o, state = accuracy.gated_delta_truth(arguments)
    assert o.dtype == state.dtype == np.float64
    assert np.any(o.astype(np.float32) != o)
