"""Bad arguments of the gated delta rule: refused at trace time, by name, value and what is allowed."""

import jax
import jax.numpy as jnp
import pytest

import gated_delta


def good(**changed):
    z = jnp.zeros
    arguments = dict(q=z((2, 20, 2, 16)), k=z((2, 20, 2, 16)), v=z((2, 20, 4, 24)), g=z((2, 20, 4)), beta=z((2, 20, 4)))
    return arguments | changed


def packed(**changed):
    z = jnp.zeros
    return (
        dict(
            q=z((1, 20, 2, 16)),
            k=z((1, 20, 2, 16)),
            v=z((1, 20, 4, 24)),
            g=z((1, 20, 4)),
            beta=z((1, 20, 4)),
            cu_seqlens=jnp.array([0, 20], jnp.int32),
        )
        | changed
    )


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


head_first = dict(q=zeros(2, 2, 20, 16), k=zeros(2, 2, 20, 16), v=zeros(2, 2, 20, 24))

BAD = [
    (good(q=zeros(2, 20, 16)), r"q must be .*rank 4.*\(2, 20, 16\)"),
    (good(v=zeros(20, 4, 24)), r"v must be .*rank 4.*\(20, 4, 24\)"),
    (good(k=zeros(2, 20, 2, 8)), r"k must be .*\(2, 20, 2, 16\).*got shape \(2, 20, 2, 8\)"),
    (good(k=zeros(2, 20, 1, 16)), r"k must be .*got shape \(2, 20, 1, 16\)"),
    (good(v=zeros(2, 19, 4, 24)), r"v must be .*\(2, 20\).*got shape \(2, 19, 4, 24\)"),
    (good(v=zeros(3, 20, 4, 24)), r"v must be .*got shape \(3, 20, 4, 24\)"),
    (good(v=zeros(2, 20, 3, 24), g=zeros(2, 20, 3), beta=zeros(2, 20, 3)), r"v must be .*multiple.*G = 2.*H = 3"),
    (good(g=zeros(2, 20, 2)), r"g must be .*\(2, 20, 4\).*got shape \(2, 20, 2\)"),
    (good(beta=zeros(2, 20)), r"beta must be .*\(2, 20, 4\).*got shape \(2, 20\)"),
    (good(beta=zeros(2, 4, 20)), r"beta must be .*tokens before heads.*got shape \(2, 4, 20\)"),
    (good(**head_first), r"g must be .*\(2, 2, 20\).*got shape \(2, 20, 4\)"),
    (good(q=zeros(2, 20, 2, 16, dtype="int32")), r"q must be one of bfloat16.*got int32"),
    (good(q=zeros(2, 20, 2, 16, dtype="float16")), r"k must be of q's dtype float16, got float32"),
    (good(v=zeros(2, 20, 4, 24, dtype="bfloat16")), r"v must be of q's dtype float32, got bfloat16"),
    (good(g=zeros(2, 20, 4, dtype="int32")), r"g must be of a float dtype of at least 16 bits, got int32"),
    (good(beta=zeros(2, 20, 4, dtype="bool")), r"beta must be of a float dtype of at least 16 bits, got bool"),
    (good(initial_state=zeros(2, 4, 24, 16)), r"initial_state must be .*K, V\] = \(2, 4, 16, 24\).*got shape"),
    (good(initial_state=zeros(2, 4, 16, 24), state_v_first=True), r"initial_state must be .*V, K\] = \(2, 4, 24, 16\)"),
    (good(initial_state=zeros(2, 4, 16, 24, dtype="int32")), r"initial_state must be of a float dtype"),
    (good(cu_seqlens=jnp.array([0, 20], jnp.int32)), r"q must be of B = 1 where cu_seqlens is given, got B = 2"),
    (packed(cu_seqlens=jnp.array([0.0, 20.0])), r"cu_seqlens must be int32 .*got float32"),
    (packed(cu_seqlens=jnp.zeros((0,), jnp.int32)), r"cu_seqlens must be int32 .*got int32 \(0,\)"),
    (packed(initial_state=zeros(2, 4, 16, 24)), r"initial_state must be .*\(1, 4, 16, 24\)"),
    (good(q=None), r"q must be an array, got None"),
    (good(output_final_state="no"), r"output_final_state must be a Python bool .*'no'"),
    (good(use_qk_l2norm_in_kernel=1), r"use_qk_l2norm_in_kernel must be a Python bool .*got 1"),
    (good(g=zeros(2, 20, 4, dtype="float8_e4m3fn")), r"g must be of a float dtype of at least 16 bits"),
    (good(scale="big"), r"scale must be a Python number.*'big'"),
    (good(implementation="triton"), r"implementation must be None.*'triton'"),
    (good(config=(16, 2, 1)), r"config must be a gated_delta.Config"),
    (good(config=gated_delta.Config(16, 2, 5)), r"config.dv_splits must divide .*24, got 5"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m[:24] for _, m in BAD])
@pytest.mark.parametrize("function", [gated_delta.chunk_gated_delta_rule, gated_delta.recurrent_gated_delta_rule])
def test_bad_arguments_are_refused_by_name(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: function(**arrays, **static), arrays)


def test_good_arguments_are_not_refused():
    gated_delta.chunk_gated_delta_rule(**good())
    gated_delta.chunk_gated_delta_rule(**packed())


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="head_first"):
        gated_delta.chunk_gated_delta_rule(**good(), head_first=True)


def test_what_pallas_cannot_do_is_refused_or_left_to_the_reference():
    wide = good(q=zeros(2, 20, 2, 512), k=zeros(2, 20, 2, 512))
    with pytest.raises(NotImplementedError, match="K = 512"):
        gated_delta.chunk_gated_delta_rule(**wide, implementation="pallas")
    o, _ = gated_delta.chunk_gated_delta_rule(**wide)
    assert o.shape == (2, 20, 4, 24)
