"""What users of gated delta kernels reported, as properties that any implementation must have.

Each function takes the implementation, with the signature of
`references.gated_delta.chunk_gated_delta_rule`, and asserts. Rows of the tracker that are a matter of
accuracy alone are cases of `references.cases` instead.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from references import accuracy
from references.cases import GatedDeltaCase, inputs

Rule = Callable[..., tuple[jax.Array, jax.Array | None]]

# two batch rows, three chunks of 16 and a tail
_PLAIN = GatedDeltaCase("plain", "", 2, 51, 1, 2, 16, 16)
# one sequence, a slow decay: what one part hands to the next matters
_SLOW = GatedDeltaCase("slow", "", 1, 51, 1, 2, 16, 16, gates=-1e-3)


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def changes_never_reach_back(rule: Rule) -> None:
    """fla 1242, 1244: no bit of an output depends on any later argument."""
    arguments = inputs(_PLAIN)
    P = 19
    o, _ = rule(**arguments)
    for name in ("q", "k", "v", "g", "beta"):
        changed = arguments[name].at[:, P:].multiply(0.5)
        other, _ = rule(**arguments | {name: changed})
        np.testing.assert_array_equal(_bits(other)[:, :P], _bits(o)[:, :P], err_msg=name)
        assert np.any(_bits(other)[:, P:] != _bits(o)[:, P:]), name


def nan_stays_in_its_row_and_later_chunks(rule: Rule) -> None:
    """NaN at token P reaches neither the chunks before P's (of at most 64 tokens) nor another batch row."""
    arguments = inputs(replace(_PLAIN, T=130))
    P = 70
    o, state = rule(**arguments)
    for name in ("q", "k", "v", "g", "beta"):
        poisoned = arguments[name].at[0, P].set(jnp.nan)
        other, other_state = rule(**arguments | {name: poisoned})
        np.testing.assert_array_equal(_bits(other)[0, :64], _bits(o)[0, :64], err_msg=name)
        np.testing.assert_array_equal(_bits(other)[1], _bits(o)[1], err_msg=name)
        np.testing.assert_array_equal(_bits(other_state)[1], _bits(state)[1], err_msg=name)


def nan_stays_in_its_sequence(rule: Rule) -> None:
    """The same for packed sequences that share a chunk's worth of tokens, and for tokens of no sequence."""
    cu_seqlens = (0, 20, 29, 45, 45)
    arguments = inputs(replace(_SLOW, cu_seqlens=cu_seqlens))
    o, state = rule(**arguments)
    other, other_state = rule(
        **arguments
        | {name: arguments[name].at[0, 20:29].set(jnp.nan).at[0, 45:].set(jnp.nan) for name in "kvg"}
        | {name: arguments[name].at[0, 45:].set(jnp.nan) for name in ("q", "beta")}
    )
    kept = np.r_[0:20, 29:51]
    np.testing.assert_array_equal(_bits(other)[0, kept], _bits(o)[0, kept])
    np.testing.assert_array_equal(_bits(other_state)[[0, 2, 3]], _bits(state)[[0, 2, 3]])


def splits_chain(rule: Rule) -> None:
    """transformers 46190: all tokens at once, or some and then the rest from the state they left."""
    arguments = inputs(replace(_SLOW, T=18))
    whole = tuple(np.asarray(x, np.float64) for x in rule(**arguments))
    for t in (9, 17):
        first = {name: arguments[name][:, :t] for name in ("q", "k", "v", "g", "beta")}
        rest = {name: arguments[name][:, t:] for name in ("q", "k", "v", "g", "beta")}
        o_first, state = rule(**arguments | first)
        o_rest, state = rule(**arguments | rest | {"initial_state": state})
        errors = accuracy.gated_delta_errors((jnp.concatenate([o_first, o_rest], axis=1), state), whole)
        assert max(errors) <= 4e-6, (t, errors)


def decays_before_the_error(rule: Rule) -> None:
    """fla 885: v - S^T k with the state before its decay is another rule, by percents."""
    arguments = inputs(replace(_SLOW, T=2, gates=-0.5))
    a = accuracy.as_float64(arguments)
    S = a["initial_state"]
    outputs = []
    for t in range(2):
        u = a["beta"][:, t, :, None] * (a["v"][:, t] - np.einsum("bk,bhkv->bhv", a["k"][:, t, 0], S))
        S = np.exp(a["g"][:, t])[..., None, None] * S + a["k"][:, t, 0][:, None, :, None] * u[:, :, None, :]
        outputs.append(16**-0.5 * np.einsum("bk,bhkv->bhv", a["q"][:, t, 0], S))
    wrong = np.stack(outputs, axis=1), S
    result = rule(**arguments)
    assert max(accuracy.gated_delta_errors(result, accuracy.gated_delta_truth(arguments))) <= 4e-6
    assert min(accuracy.gated_delta_errors(result, wrong)) > 1e-2


def zero_gates_are_the_plain_delta_rule(rule: Rule) -> None:
    """fla 104: with g = 0 nothing of the gate remains."""
    arguments = inputs(replace(_SLOW, gates=0.0))
    a = accuracy.as_float64(arguments)
    S = a["initial_state"]
    outputs = []
    for t in range(_SLOW.T):
        k = a["k"][:, t, 0]
        u = a["beta"][:, t, :, None] * (a["v"][:, t] - np.einsum("bk,bhkv->bhv", k, S))
        S = S + k[:, None, :, None] * u[:, :, None, :]
        outputs.append(16**-0.5 * np.einsum("bk,bhkv->bhv", a["q"][:, t, 0], S))
    errors = accuracy.gated_delta_errors(rule(**arguments), (np.stack(outputs, axis=1), S))
    assert max(errors) <= 4e-6, errors


def idle_tokens_leave_the_state_alone(rule: Rule) -> None:
    """sparkinfer 604: tokens with g = beta = 0 change nothing: the state is the last real token's."""
    arguments = inputs(replace(_SLOW, T=33))
    _, state = rule(**arguments)
    padded = {
        name: jnp.pad(arguments[name], ((0, 0), (0, 18)) + ((0, 0),) * (arguments[name].ndim - 2))
        for name in ("q", "k", "v", "g", "beta")
    }
    _, padded_state = rule(**arguments | padded)
    assert accuracy.relative_l2(padded_state, state) <= 1e-6


def no_token_returns_the_state(rule: Rule) -> None:
    """T = 0: no output, and the state as it came."""
    arguments = inputs(replace(_PLAIN, T=0))
    o, state = rule(**arguments)
    assert o.shape == (2, 0, 2, 16)
    np.testing.assert_array_equal(state, arguments["initial_state"])


def states_stay_in_fp32(rule: Rule) -> None:
    """ollama 15865: a state that nothing happens to comes back bit by bit, whatever the dtype of q, k, v."""
    arguments = inputs(replace(_PLAIN, dtype="bfloat16"))
    idle = {"g": jnp.zeros_like(arguments["g"]), "beta": jnp.zeros_like(arguments["beta"])}
    o, state = rule(**arguments | idle)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_array_equal(state, arguments["initial_state"])


def states_are_key_by_value(rule: Rule) -> None:
    """sgl-kernel-npu 640: one token writes beta k v^T as [K, V], or [V, K] where that is asked for.

    K = V here, so that no shape gives a wrong layout away.
    """
    arguments = inputs(GatedDeltaCase("outer", "", 1, 1, 1, 1, 16, 16, gates=0.0, beta=1.0, state=None))
    k, v = (np.asarray(arguments[name], np.float64)[0, 0, 0] for name in "kv")
    _, state = rule(**arguments)
    np.testing.assert_allclose(np.asarray(state)[0, 0], np.outer(k, v), rtol=1e-6, atol=1e-7)
    _, state = rule(**arguments | {"state_v_first": True})
    np.testing.assert_allclose(np.asarray(state)[0, 0], np.outer(v, k), rtol=1e-6, atol=1e-7)

    arguments = inputs(_PLAIN)
    o, state = rule(**arguments)
    transposed = jnp.swapaxes(arguments["initial_state"], -1, -2)
    o_v_first, state_v_first = rule(**arguments | {"initial_state": transposed, "state_v_first": True})
    assert accuracy.relative_l2(o_v_first, o) <= 2e-6
    assert accuracy.relative_l2(jnp.swapaxes(state_v_first, -1, -2), state) <= 2e-6


def large_states_stay_finite(rule: Rule) -> None:
    """attention-gym 464: fp16 q, k, v and a state entry of 65536, beyond fp16's range."""
    o, state = rule(**inputs(replace(_PLAIN, dtype="float16", state="large", gates=-1e-3)))
    assert np.isfinite(np.asarray(o)).all()
    assert np.isfinite(np.asarray(state)).all()
    # T tokens of a slow decay and small steps along one key leave much of it
    assert np.abs(np.asarray(state)).max() > 1e3


def resets_are_complete(rule: Rule) -> None:
    """lattice 235: after g = -inf at token 5 nothing of what came before is left, and nothing is NaN."""
    arguments = inputs(replace(_SLOW, gates="reset"))
    o, state = rule(**arguments)
    rest = {name: arguments[name][:, 5:] for name in ("q", "k", "v", "g", "beta")}
    o_rest, state_rest = rule(**arguments | rest | {"initial_state": None})
    assert np.isfinite(np.asarray(o)).all()
    assert accuracy.relative_l2(o[:, 5:], o_rest) <= 2e-6
    assert accuracy.relative_l2(state, state_rest) <= 2e-6


def packed_sequences_are_apart(rule: Rule) -> None:
    """transformers 46859 and others: a packed call equals one call for each sequence."""
    cu_seqlens = (0, 17, 17, 34, 51)
    arguments = inputs(replace(_SLOW, cu_seqlens=cu_seqlens))
    o, state = rule(**arguments)
    for r, (start, end) in enumerate(pairwise(cu_seqlens)):
        alone = {name: arguments[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        alone |= {"initial_state": arguments["initial_state"][r : r + 1], "cu_seqlens": None}
        o_alone, state_alone = rule(**arguments | alone)
        assert accuracy.relative_l2(o[:, start:end], o_alone) <= 4e-6, r
        assert accuracy.relative_l2(state[r : r + 1], state_alone) <= 4e-6, r


def empty_sequences_pass_the_state_on(rule: Rule) -> None:
    """flashinfer 3536: cu_seqlens = [0, 0, 5] returns the first state as it came; [0] holds no sequence."""
    arguments = inputs(GatedDeltaCase("empty", "", 1, 5, 1, 1, 16, 24, cu_seqlens=(0, 0, 5)))
    _, state = rule(**arguments)
    np.testing.assert_array_equal(state[0], arguments["initial_state"][0])
    assert np.any(np.asarray(state[1]) != np.asarray(arguments["initial_state"][1]))
    none = {"cu_seqlens": jnp.zeros(1, jnp.int32), "initial_state": None}
    o, state = rule(**arguments | none)
    np.testing.assert_array_equal(o, np.zeros((1, 5, 1, 24), np.float32))
    assert state.shape == (0, 1, 16, 24)


def tokens_of_no_sequence_give_zero(rule: Rule) -> None:
    """cu_seqlens may end before T."""
    o, _ = rule(**inputs(replace(_SLOW, cu_seqlens=(0, 13, 20, 20, 30))))
    np.testing.assert_array_equal(o[:, 30:], np.zeros((1, 21, 2, 16), np.float32))
    assert np.all(np.any(np.asarray(o[:, :30]) != 0, axis=(0, 2, 3)))


def heads_are_grouped(rule: Rule) -> None:
    """aprender 3527: value head h reads key head h // (H // G)."""
    case = GatedDeltaCase("heads", "", 1, 20, 2, 4, 16, 16, gates=-0.1, keys="one_hot", state=None)
    _, state = rule(**inputs(case))
    # Key head j holds the unit vector j, so only row j of a state that reads it is ever written.
    written = np.any(np.asarray(state)[0] != 0, axis=-1)
    expected = np.zeros((4, 16), bool)
    expected[[0, 1, 2, 3], [0, 0, 1, 1]] = True
    np.testing.assert_array_equal(written, expected)


def zero_vectors_stay_zero(rule: Rule) -> None:
    """With l2norm, a zero query reads 0, a zero key writes nothing, and neither makes a gradient NaN."""
    arguments = inputs(replace(_PLAIN, keys="raw", l2norm=True))
    zero = {"k": jnp.zeros_like(arguments["k"]), "g": jnp.zeros_like(arguments["g"])}
    _, state = rule(**arguments | zero)
    np.testing.assert_array_equal(state, arguments["initial_state"])
    o, _ = rule(**arguments)
    np.testing.assert_array_equal(o[:, ::7], np.zeros_like(o[:, ::7]))
    _assert_finite_gradients(rule, arguments)


def strong_gates_have_finite_gradients(rule: Rule) -> None:
    """fla 99, 111: T = 64, g = -20 everywhere."""
    _assert_finite_gradients(rule, inputs(replace(_SLOW, T=64, gates=-20.0)))


def resets_have_finite_gradients(rule: Rule) -> None:
    """lattice 235: the same for a gate of -inf."""
    _assert_finite_gradients(rule, inputs(replace(_SLOW, T=64, gates="reset")))


def _assert_finite_gradients(rule: Rule, arguments: dict) -> None:
    names = ("q", "k", "v", "g", "beta", "initial_state")

    def total(arrays):
        o, state = rule(**arguments | arrays)
        return jnp.sum(o * o) + jnp.sum(state * state)

    gradients = jax.grad(total)({name: arguments[name] for name in names})
    for name, gradient in gradients.items():
        assert np.isfinite(np.asarray(gradient)).all(), name
    assert np.any(np.asarray(gradients["v"]) != 0)


def two_runs_are_equal(rule: Rule) -> None:
    """No atomics: the same bits each time."""
    arguments = inputs(_PLAIN)
    for first, second in zip(rule(**arguments), rule(**arguments), strict=True):
        np.testing.assert_array_equal(_bits(first), _bits(second))


REPORTS = (
    changes_never_reach_back,
    nan_stays_in_its_row_and_later_chunks,
    nan_stays_in_its_sequence,
    splits_chain,
    decays_before_the_error,
    zero_gates_are_the_plain_delta_rule,
    idle_tokens_leave_the_state_alone,
    no_token_returns_the_state,
    states_stay_in_fp32,
    states_are_key_by_value,
    large_states_stay_finite,
    resets_are_complete,
    packed_sequences_are_apart,
    empty_sequences_pass_the_state_on,
    tokens_of_no_sequence_give_zero,
    heads_are_grouped,
    zero_vectors_stay_zero,
    strong_gates_have_finite_gradients,
    resets_have_finite_gradients,
    two_runs_are_equal,
)
