"""`emulate`: what runs where, with jax's transformations around it, and broken builds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator_kernels import call
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import amdgpu
from amdgpu.emulator import EmulatorError, emulate, load_program, run_kernel
from amdgpu.lowering import compile_call, lower_rocm, triton_calls

ARCH = "gfx942"
X = np.linspace(-2, 2, 64, dtype=np.float32).reshape(4, 16)


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2 + 1


def double(x, name="double", interpret=False):
    return call(double_kernel, x.shape, x.dtype, warps=1, name=name, interpret=interpret)(x)


@jax.jit
def public(x):
    """As the package's functions choose: a kernel on ROCm and CUDA, the reference elsewhere."""
    return lax.platform_dependent(
        x,
        rocm=functools.partial(double, name="for_rocm"),
        cuda=functools.partial(double, name="for_cuda"),
        default=lambda x: x * 2 + 1,
    )


def test_runs_the_rocm_branch_as_machine_code():
    np.testing.assert_array_equal(public(X), X * 2 + 1)
    with amdgpu.emulate(ARCH) as ran:
        # The same shapes were traced outside a moment ago.
        np.testing.assert_array_equal(public(X), X * 2 + 1)
        assert [r.name for r in ran] == ["for_rocm"]
        assert ran[0].grid == (1, 1, 1) and ran[0].wave_instructions > 10
        public(X)
        assert len(ran) == 2
    # Outside again, the reference.
    np.testing.assert_array_equal(public(X), X * 2 + 1)
    assert len(ran) == 2


def test_everything_is_restored_after_an_error():
    before = pl.pallas_call, jax.lax.platform_dependent
    with pytest.raises(RuntimeError, match="from the body"), emulate(ARCH):
        raise RuntimeError("from the body")
    assert (pl.pallas_call, jax.lax.platform_dependent) == before


def test_unknown_architecture():
    with pytest.raises(EmulatorError, match="gfx90a"), emulate("gfx90a"):
        pass


def test_interpret_mode_is_refused():
    with emulate(ARCH), pytest.raises(EmulatorError, match="interpret"):
        double(X, interpret=True)


def test_platform_without_a_rocm_branch():
    with emulate(ARCH), pytest.raises(EmulatorError, match="without a rocm branch"):
        lax.platform_dependent(X, cuda=double)


def test_vmap_runs_the_batched_kernel():
    with emulate(ARCH) as ran:
        got = jax.vmap(jax.vmap(double))(jnp.asarray(np.stack([X, X + 1]).reshape(2, 2, 2, 16)))
        np.testing.assert_array_equal(np.asarray(got).reshape(2, 4, 16), np.stack([X, X + 1]) * 2 + 1)
        # One launch, whose grid has the batch, and not one a batch entry.
        assert [r.grid for r in ran] == [(2, 2, 1)]


def two_results(scale, x):
    def kernel(s_ref, x_ref, y_ref, sum_ref):
        y_ref[...] = x_ref[...] * s_ref[0]
        sum_ref[...] = jnp.sum(x_ref[...], 1)

    out = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], x.dtype)]
    return pl.pallas_call(kernel, out_shape=out, compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1))(
        scale, x
    )


def test_vmap_with_an_operand_that_is_not_batched():
    with emulate(ARCH) as ran:
        xs = np.stack([X, X + 1, X * 3])
        y, total = jax.vmap(two_results, in_axes=(None, 0))(jnp.array([3.0], jnp.float32), jnp.asarray(xs))
        np.testing.assert_array_equal(y, xs * 3)
        np.testing.assert_allclose(total, xs.sum(2), rtol=1e-5, atol=1e-6)
        assert [r.grid for r in ran] == [(3, 1, 1)]


def add_window(state, window, x):
    """Adds rows window, window + 1 of x to the state's; the other rows keep what they hold."""

    def kernel(w_ref, x_ref, s_ref, o_ref):
        i = w_ref[0] + pl.program_id(0)
        row = pl.ds(i, 1)
        o_ref[row, :] = s_ref[row, :] + x_ref[row, :]

    whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
    in_specs = [pl.BlockSpec((1,), lambda i: (0,)), whole, whole]
    return call(kernel, x.shape, x.dtype, grid=(2,), warps=1, in_specs=in_specs, out_specs=whole,
                input_output_aliases={2: 0})(window, x, state)  # fmt: skip


def test_aliased_buffers_in_a_loop_over_windows():
    @jax.jit
    def run(x):
        def body(i, state):
            return add_window(state, jnp.reshape(2 * i, (1,)), x)

        return lax.fori_loop(0, 2, body, jnp.full(x.shape, 10.0, x.dtype))

    with emulate(ARCH) as ran:
        np.testing.assert_array_equal(run(X), X + 10)
        assert len(ran) == 2


def test_vmap_of_an_aliased_kernel():
    with emulate(ARCH) as ran:
        window, xs = jnp.array([1], jnp.int32), np.stack([X, -X])
        got = jax.vmap(add_window, in_axes=(None, None, 0))(jnp.full(X.shape, 10.0, X.dtype), window, jnp.asarray(xs))
        want = np.full(xs.shape, 10.0, np.float32)
        want[:, 1:3] += xs[:, 1:3]
        np.testing.assert_array_equal(got, want)
        assert len(ran) == 1


@jax.custom_jvp
def square(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]

    return call(kernel, x.shape, x.dtype, warps=1)(x)


@square.defjvp
def _square_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return square(x), 2 * x * t


@jax.custom_vjp
def cube(x):
    return square(x) * x


def _cube_forward(x):
    return cube(x), x


def _cube_backward(x, t):
    return (3 * square(x) * t,)


cube.defvjp(_cube_forward, _cube_backward)


def test_gradients_through_custom_rules():
    with emulate(ARCH) as ran:
        np.testing.assert_allclose(jax.grad(lambda x: square(x).sum())(X), 2 * X, rtol=1e-6)
        assert len(ran) == 1
        np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: cube(x).sum()))(X), 3 * X * X, rtol=1e-6)
        assert len(ran) == 3
        f = jax.checkpoint(lambda x: square(x).sum())
        np.testing.assert_allclose(jax.jit(jax.grad(f))(X), 2 * X, rtol=1e-6)


def test_scan_and_conditionals():
    with emulate(ARCH) as ran:

        @jax.jit
        def run(x):
            y, _ = lax.scan(lambda c, i: (lax.cond(i < 2, double, lambda x: x, c), None), x, jnp.arange(3))
            return y

        np.testing.assert_array_equal(run(X), (X * 2 + 1) * 2 + 1)
        assert len(ran) == 2


def test_unwritten_results_are_poison():
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 1), :] = x_ref[pl.ds(0, 1), :]

    with emulate(ARCH):
        got = np.asarray(call(kernel, X.shape, X.dtype, warps=1)(X))
    np.testing.assert_array_equal(got[0], X[0])
    assert np.isnan(got[1:]).all()


def test_errors_name_kernel_line_and_instruction():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(i_ref[0], 4), :]

    with emulate(ARCH) as ran:
        f = call(kernel, X.shape, X.dtype, warps=1, name="reader")
        np.testing.assert_array_equal(f(jnp.array([0], jnp.int32), X), X)
        with pytest.raises(Exception, match=r"reader, line \d+: global_load.*out of bounds: buffer 1"):
            jax.block_until_ready(f(jnp.array([1], jnp.int32), X))
        assert len(ran) == 1


def exchange_kernel(x_ref, o_ref):
    o_ref[...] = jnp.cumsum(x_ref[...], 1)


@pytest.mark.parametrize(
    "arch, pattern",
    [
        ("gfx942", r"^v_add_f32"),
        ("gfx942", r"^ds_write"),
        ("gfx942", r"^s_barrier$"),
        ("gfx1151", r"row_shr:1|row_xmask|ds_bpermute"),
        ("gfx1151", r"^global_store|^buffer_store"),
        ("gfx1201", r"^s_barrier_signal"),
    ],
)
def test_a_kernel_without_one_instruction_fails(arch, pattern):
    """Of every broken build: a wrong result, or an error."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    want = np.cumsum(x.astype(np.float64), 1)

    def error(transform):
        with emulate(arch, transform=transform) as ran:
            try:
                got = np.asarray(call(exchange_kernel, x.shape, x.dtype, warps=4)(x))
            except Exception as failure:
                assert "EmulatorError" in str(failure)
                return np.inf
            assert len(ran) == 1
        return np.nan_to_num(np.abs(got - want).max(), nan=np.inf)

    found = []

    def note(program):
        found.extend(program.find(pattern))
        return program

    assert error(note) < 1e-4
    assert found
    assert error(lambda p: p.without(found[0])) > 1e-2


def test_run_kernel_without_jax_around_it():
    (kernel,) = triton_calls(lower_rocm(double, jax.ShapeDtypeStruct(X.shape, X.dtype), arch=ARCH))
    compiled = compile_call(kernel, ARCH)
    program = load_program(compiled.amdgcn, ARCH)
    (result,), executed = run_kernel(compiled, program, [X], [(X.shape, X.dtype)], {})
    np.testing.assert_array_equal(result, X * 2 + 1)
    assert executed == len(program.listing.instructions)
