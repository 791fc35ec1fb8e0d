"""Small Pallas kernels that between them use what Triton's AMD backend emits, with what they compute in numpy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

F16, BF16, F32, I32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32
HIGHEST = lax.Precision.HIGHEST
# gfx1100 has gfx1151's instructions but for the scalar floats: it runs the float16 kernels only.
ARCHS = ("gfx942", "gfx950", "gfx1151", "gfx1201")
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """build() gives a function of arrays that is one pallas_call; arguments(rng) its inputs; reference in float64.

    tolerance: relative L2 of a float result; None for exact results.
    """

    name: str
    build: Callable
    arguments: Callable
    reference: Callable
    tolerance: float | None
    archs: tuple[str, ...] = ARCHS

    def __str__(self):
        return self.name


def call(kernel, shape, dtype, *, grid=(), warps=4, stages=1, **options):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        **options,
    )


def normal(*specs):
    """Arguments: one array of standard normals per (shape, dtype)."""
    return lambda rng: [jnp.asarray(rng.standard_normal(s), d) for s, d in specs]


def wide(x):
    return np.asarray(x).astype(np.float64)


def matmul(m, n, k, dtype, *, step=None, turn=(False, False), precision=None, out=F32, **options):
    """a @ b, in one dot or summed over steps of k; `turn` transposes the operands in the kernel."""

    def kernel(a_ref, b_ref, o_ref):
        def dot(a, b):
            return jnp.dot(a, b, precision=precision, preferred_element_type=F32)

        if step is None:
            a, b = (x[...].T if t else x[...] for x, t in zip((a_ref, b_ref), turn, strict=True))
            o_ref[...] = dot(a, b).astype(out)
            return

        def body(i, total):
            return total + dot(a_ref[:, pl.ds(i * step, step)], b_ref[pl.ds(i * step, step), :])

        o_ref[...] = lax.fori_loop(0, k // step, body, jnp.zeros((m, n), F32)).astype(out)

    shapes = ((k, m) if turn[0] else (m, k), (n, k) if turn[1] else (k, n))

    def reference(a, b):
        return (wide(a).T if turn[0] else wide(a)) @ (wide(b).T if turn[1] else wide(b))

    return lambda: call(kernel, (m, n), out, **options), normal((shapes[0], dtype), (shapes[1], dtype)), reference


def attention(tokens, size, tile, dtype, *, native_exp2, warps=4, stages=1):
    """Causal online softmax with a loop whose bound depends on the program, in base 2."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        q, block = q_ref[...], pl.program_id(0)

        def exp2(x):
            if not native_exp2:
                return jnp.exp2(x)
            shape = jax.ShapeDtypeStruct(x.shape, F32)
            return plgpu.elementwise_inline_asm(
                "v_exp_f32 $0, $1", args=[x], constraints="=v,v", pack=1, result_shape_dtypes=[shape]
            )[0]

        def body(j, carry):
            acc, m, l = carry
            k, v = k_ref[pl.ds(j * tile, tile), :], v_ref[pl.ds(j * tile, tile), :]
            s = jnp.dot(q, k.T, preferred_element_type=F32) * 0.125
            row = block * tile + lax.broadcasted_iota(I32, (tile, tile), 0)
            s = jnp.where(j * tile + lax.broadcasted_iota(I32, (tile, tile), 1) <= row, s, -1e30)
            top = jnp.maximum(m, jnp.max(s, 1))
            p, old = exp2(s - top[:, None]), exp2(m - top)
            acc = acc * old[:, None] + jnp.dot(p.astype(dtype), v, preferred_element_type=F32)
            return acc, top, l * old + jnp.sum(p, 1)

        carry = jnp.zeros((tile, size), F32), jnp.full((tile,), -1e30, F32), jnp.zeros((tile,), F32)
        acc, _, l = lax.fori_loop(0, block + 1, body, carry)
        o_ref[...] = (acc / l[:, None]).astype(dtype)

    tiled, whole = pl.BlockSpec((tile, size), lambda i: (i, 0)), pl.BlockSpec((tokens, size), lambda i: (0, 0))

    def build():
        return call(kernel, (tokens, size), dtype, grid=(tokens // tile,), warps=warps, stages=stages,
                    in_specs=[tiled, whole, whole], out_specs=tiled)  # fmt: skip

    def reference(q, k, v):
        s = np.where(np.tri(tokens), wide(q) @ wide(k).T * 0.125, -np.inf)
        p = np.exp2(s - s.max(1, keepdims=True))
        return p @ wide(v) / p.sum(1, keepdims=True)

    return build, normal(*[((tokens, size), dtype)] * 3), reference


def gated_scan(chunks, size, dtype, warps=4):
    """A chunked gated linear attention: cumulative sums, masked exponents, dots on a carried state, a ragged end."""
    c = 16

    def kernel(length_ref, q_ref, k_ref, v_ref, g_ref, o_ref, s_ref):
        length = length_ref[0]

        def body(i, state):
            at = i * c
            inside = at + lax.broadcasted_iota(I32, (c, size), 0) < length

            def rows(ref):
                return plgpu.load(ref.at[pl.ds(at, c), :], mask=inside, other=jnp.zeros((), ref.dtype))

            q, k, v = rows(q_ref), rows(k_ref), rows(v_ref)
            steps = at + lax.broadcasted_iota(I32, (c,), 0)
            g = plgpu.load(g_ref.at[pl.ds(at, c)], mask=steps < length, other=jnp.float32(0))
            d = jnp.cumsum(g)
            lower = lax.broadcasted_iota(I32, (c, c), 0) >= lax.broadcasted_iota(I32, (c, c), 1)
            decay = jnp.exp2(jnp.where(lower, d[:, None] - d[None, :], -jnp.inf))
            scores = jnp.dot(q, k.T, preferred_element_type=F32) * decay
            o = jnp.dot(scores.astype(dtype), v, preferred_element_type=F32)
            o += jnp.exp2(d)[:, None] * jnp.dot(q, state.astype(dtype), preferred_element_type=F32)
            plgpu.store(o_ref.at[pl.ds(at, c), :], o.astype(o_ref.dtype), mask=inside)
            last = jnp.sum(g)
            keys = (k.astype(F32) * jnp.exp2(last - d)[:, None]).astype(dtype)
            return jnp.exp2(last) * state + jnp.dot(keys.T, v, preferred_element_type=F32)

        s_ref[...] = lax.fori_loop(0, (length + c - 1) // c, body, jnp.zeros((size, size), F32))

    tokens = chunks * c - 5
    shapes = [jax.ShapeDtypeStruct((tokens, size), F32), jax.ShapeDtypeStruct((size, size), F32)]

    def build():
        return pl.pallas_call(kernel, out_shape=shapes,
                              compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1))  # fmt: skip

    def arguments(rng):
        q, k, v = (jnp.asarray(rng.standard_normal((tokens, size)) * size**-0.5, dtype) for _ in range(3))
        g = jnp.asarray(-rng.random(tokens), F32)
        return [jnp.array([tokens], I32), q, k, v, g]

    def reference(length, q, k, v, g):
        state, out = np.zeros((size, size)), []
        for qt, kt, vt, gt in zip(wide(q), wide(k), wide(v), wide(g), strict=True):
            state = np.exp2(gt) * state + np.outer(kt, vt)
            out.append(qt @ state)
        return np.array(out), state

    return build, arguments, reference


def elementwise(function, shape, *dtypes, warps=4):
    """A function of whole arrays."""

    def kernel(*refs):
        *inputs, o_ref = refs
        o_ref[...] = function(*[r[...] for r in inputs])

    def build():
        out = jax.eval_shape(function, *[jax.ShapeDtypeStruct(shape, d) for d in dtypes])
        return call(kernel, out.shape, out.dtype, warps=warps)

    return build


def softmax(x):
    e = jnp.exp(x - jnp.max(x, 1, keepdims=True))
    return e / jnp.sum(e, 1, keepdims=True)


def integers(a, b):
    q = a // b
    return (
        q * 3 + a % b + lax.div(a, b) - lax.rem(a, b) + jnp.minimum(a, b) + (a << 3) + (a >> 2) + jnp.where(a < b, a, b)
    )


def integers_in_numpy(a, b):
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    cut = np.trunc(a / b).astype(np.int64)
    r = a // b * 3 + a % b + cut - (a - cut * b) + np.minimum(a, b) + (a << 3) + (a >> 2) + np.where(a < b, a, b)
    return r.astype(np.int32)


def draw_integers(rng):
    a = rng.integers(-(2**27), 2**27, (16, 64))
    b = rng.integers(1, 1000, (16, 64)) * rng.choice([-1, 1], (16, 64))
    return [jnp.asarray(a, I32), jnp.asarray(b, I32)]


def transcendentals(x):
    return (
        jnp.tanh(x) + jnp.exp(-x * x) + jnp.log1p(jnp.abs(x)) + jnp.sqrt(jnp.abs(x)) + lax.rsqrt(1 + x * x) + jnp.sin(x)
    )


def transcendentals_in_numpy(x):
    x = wide(x)
    return np.tanh(x) + np.exp(-x * x) + np.log1p(abs(x)) + np.sqrt(abs(x)) + 1 / np.sqrt(1 + x * x) + np.sin(x)


def conversions(x):
    """Through every narrow type and back; the order keeps each step visible in the result."""
    a = x.astype(F16).astype(F32)
    b = (x * 3).astype(BF16).astype(F32)
    c = (x * 100).astype(jnp.int8).astype(F32)
    d = (x * 1000).astype(jnp.int16).astype(BF16).astype(F32)
    return a + b * 4 + c * 16 + d * 64


def conversions_in_numpy(x):
    x = np.asarray(x)
    f = np.float32
    a = x.astype(np.float16).astype(f)
    b = (x * f(3)).astype(jnp.bfloat16).astype(f)
    c = np.trunc(x * f(100)).astype(np.int8).astype(f)
    d = np.trunc(x * f(1000)).astype(np.int16).astype(jnp.bfloat16).astype(f)
    return (a + b * f(4) + c * f(16)) + d * f(64)


def _kernels():
    for dtype, name, archs in ((F16, "fp16", (*ARCHS, "gfx1100")), (BF16, "bf16", ARCHS)):
        e, eps = 2.0**-20, EPS[jnp.dtype(dtype).name]
        for kernel, (build, arguments, reference), tolerance in (
            ("matmul_1_warp", matmul(16, 16, 16, dtype, warps=1), e),
            ("matmul_k32", matmul(32, 32, 32, dtype, warps=2), e),
            ("matmul_k128_8_warps", matmul(64, 64, 128, dtype, warps=8), e),
            ("matmul_transposed", matmul(64, 32, 64, dtype, turn=(True, True)), e),
            ("matmul_loop_2_stages", matmul(64, 64, 256, dtype, step=64, stages=2, out=dtype), eps),
            ("attention", attention(64, 32, 32, dtype, native_exp2=False), 2 * eps),
            ("attention_2_stages", attention(96, 64, 32, dtype, native_exp2=True, stages=2), 2 * eps),
            ("gated_scan", gated_scan(3, 32, dtype), 2 * eps),
        ):
            yield Kernel(f"{kernel}_{name}", build, arguments, reference, tolerance, archs)
    yield Kernel("matmul_fp32_highest", *matmul(32, 32, 32, F32, precision=HIGHEST), 1e-6)
    yield Kernel("matmul_fp32_highest_loop", *matmul(32, 32, 64, F32, step=32, precision=HIGHEST, warps=8), 1e-6)
    six = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    yield Kernel("matmul_fp32_bf16x6", *matmul(32, 32, 32, F32, precision=six), 1e-6)
    yield Kernel("matmul_fp32_default_is_xf32", *matmul(32, 32, 32, F32), 5e-4, ("gfx942",))
    for name, archs in (("float8_e4m3fn", ("gfx950", "gfx1201")), ("float8_e5m2", ("gfx950", "gfx1201"))):
        yield Kernel(f"matmul_{name}", *matmul(32, 32, 64, getattr(jnp, name)), 1e-6, archs)
    yield Kernel("softmax", elementwise(softmax, (16, 64), F32), normal(((16, 64), F32)), lambda x: _softmax64(x), 3e-7)
    yield Kernel("softmax_1_warp", elementwise(softmax, (16, 64), F32, warps=1), normal(((16, 64), F32)),
                 lambda x: _softmax64(x), 3e-7)  # fmt: skip
    for warps in (1, 4):
        yield Kernel(f"cumsum_{warps}_warps", elementwise(lambda x: jnp.cumsum(x, 1), (16, 64), F32, warps=warps),
                     normal(((16, 64), F32)), lambda x: np.cumsum(wide(x), 1), 3e-7)  # fmt: skip
    yield Kernel("reductions", elementwise(lambda x: jnp.max(x, 0) + jnp.sum(x, 0) * jnp.min(x, 0), (64, 32), F32),
                 normal(((64, 32), F32)), lambda x: wide(x).max(0) + wide(x).sum(0) * wide(x).min(0), 1e-6)  # fmt: skip
    yield Kernel("argmax", elementwise(lambda x: jnp.argmax(x, 1).astype(I32), (16, 64), F32), normal(((16, 64), F32)),
                 lambda x: np.argmax(np.asarray(x), 1), None)  # fmt: skip
    yield Kernel("transpose", elementwise(lambda x: x.T, (16, 64), F16), normal(((16, 64), F16)),
                 lambda x: np.asarray(x).T, None)  # fmt: skip
    yield Kernel("integers", elementwise(integers, (16, 64), I32, I32), draw_integers, integers_in_numpy, None)
    yield Kernel("transcendentals", elementwise(transcendentals, (16, 64), F32), normal(((16, 64), F32)),
                 transcendentals_in_numpy, 3e-7)  # fmt: skip
    yield Kernel("conversions", elementwise(conversions, (16, 64), F32),
                 lambda rng: [jnp.asarray(rng.uniform(-1, 1, (16, 64)), F32)], conversions_in_numpy, 1e-7)  # fmt: skip


def _softmax64(x):
    e = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


KERNELS = tuple(_kernels())
