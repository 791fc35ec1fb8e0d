"""Vector instructions on floats, one row an opcode, in the form of `vector_int`.

Arithmetic is rounded once, to nearest even. The transcendental opcodes are computed in float64 and rounded once,
which is up to an ulp better than the hardware; of float32 they treat subnormal inputs as zeros and flush subnormal
results, whatever the mode.
"""

import numpy as np

from amdgpu.emulator.floatops import maximum, maxnum, median, minimum, minnum
from amdgpu.emulator.formats import flush_subnormal, fma_f16, fma_f32

F16, F32, F64 = np.float16, np.float32, np.float64


def _transcendental(function):
    """float32 -> float32 through float64, subnormals flushed on both sides."""
    return lambda a: flush_subnormal(function(flush_subnormal(a).astype(F64)).astype(F32))


def _half(function):
    return lambda a: function(a.astype(F64)).astype(F16)


def _turns(function):
    """sin and cos take turns, not radians; whole turns are taken off first, as 2 pi x is inexact."""

    def f(a):
        turns = a.astype(F64)
        return function(2 * np.pi * (turns - np.rint(turns))).astype(a.dtype)

    return f


def _fract(a):
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.minimum(a - np.floor(a), below_one)


def _ldexp(a, n):
    return np.ldexp(a.astype(F64), np.clip(n.astype(np.int32), -400, 400)).astype(a.dtype)


def _mantissa(a):
    return np.where(np.isfinite(a), np.frexp(a)[0], a).astype(a.dtype)


def _exponent(dtype):
    return lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(dtype)


def _mul_zero(a, b):
    """0 wins over NaN and infinity."""
    return np.where((a == 0) | (b == 0), F32(0), a * b)


#: Those that gfx12 also has for scalar registers.
TRANSCENDENTAL = {
    "rcp_f32": ("f32", ("f32",), _transcendental(lambda a: 1 / a)),
    "rsq_f32": ("f32", ("f32",), _transcendental(lambda a: 1 / np.sqrt(a))),
    "sqrt_f32": ("f32", ("f32",), _transcendental(np.sqrt)),
    "exp_f32": ("f32", ("f32",), _transcendental(np.exp2)),
    "log_f32": ("f32", ("f32",), _transcendental(np.log2)),
    "rcp_f16": ("f16", ("f16",), _half(lambda a: 1 / a)),
    "rsq_f16": ("f16", ("f16",), _half(lambda a: 1 / np.sqrt(a))),
    "sqrt_f16": ("f16", ("f16",), _half(np.sqrt)),
    "exp_f16": ("f16", ("f16",), _half(np.exp2)),
    "log_f16": ("f16", ("f16",), _half(np.log2)),
}
FLOAT = {
    **TRANSCENDENTAL,
    "mul_dx9_zero_f32": ("f32", ("f32", "f32"), _mul_zero),
    "fmaak_f32": ("f32", ("f32",) * 3, fma_f32),
    "fmamk_f32": ("f32", ("f32",) * 3, lambda a, k, b: fma_f32(a, k, b)),
    "fmaak_f16": ("f16", ("f16",) * 3, fma_f16),
    "fmamk_f16": ("f16", ("f16",) * 3, lambda a, k, b: fma_f16(a, k, b)),
    "frexp_exp_i32_f32": ("i32", ("f32",), _exponent(np.int32)),
    "frexp_exp_i16_f16": ("i16", ("f16",), _exponent(np.int16)),
    "frexp_exp_i32_f64": ("i32", ("f64",), _exponent(np.int32)),
    "frexp_mant_f64": ("f64", ("f64",), _mantissa),
    "ldexp_f32": ("f32", ("f32", "i32"), _ldexp),
    "ldexp_f16": ("f16", ("f16", "i16"), _ldexp),
    "ldexp_f64": ("f64", ("f64", "i32"), lambda a, n: np.ldexp(a, np.clip(n, -4200, 4200))),
    "add_f64": ("f64", ("f64", "f64"), np.add),
    "mul_f64": ("f64", ("f64", "f64"), np.multiply),
}
for _t, _fma in (("f32", fma_f32), ("f16", fma_f16)):
    FLOAT |= {
        f"add_{_t}": (_t, (_t, _t), np.add),
        f"sub_{_t}": (_t, (_t, _t), np.subtract),
        f"subrev_{_t}": (_t, (_t, _t), lambda a, b: b - a),
        f"mul_{_t}": (_t, (_t, _t), np.multiply),
        f"max_{_t}": (_t, (_t, _t), maxnum),
        f"min_{_t}": (_t, (_t, _t), minnum),
        f"maximum_{_t}": (_t, (_t, _t), maximum),
        f"minimum_{_t}": (_t, (_t, _t), minimum),
        f"max3_{_t}": (_t, (_t,) * 3, lambda a, b, c: maxnum(maxnum(a, b), c)),
        f"min3_{_t}": (_t, (_t,) * 3, lambda a, b, c: minnum(minnum(a, b), c)),
        f"med3_{_t}": (_t, (_t,) * 3, median),
        f"maxmin_{_t}": (_t, (_t,) * 3, lambda a, b, c: minnum(maxnum(a, b), c)),
        f"minmax_{_t}": (_t, (_t,) * 3, lambda a, b, c: maxnum(minnum(a, b), c)),
        f"maximum3_{_t}": (_t, (_t,) * 3, lambda a, b, c: maximum(maximum(a, b), c)),
        f"minimum3_{_t}": (_t, (_t,) * 3, lambda a, b, c: minimum(minimum(a, b), c)),
        f"maximumminimum_{_t}": (_t, (_t,) * 3, lambda a, b, c: minimum(maximum(a, b), c)),
        f"minimummaximum_{_t}": (_t, (_t,) * 3, lambda a, b, c: maximum(minimum(a, b), c)),
        f"fma_{_t}": (_t, (_t,) * 3, _fma),
        f"fmac_{_t}": (_t, (_t, _t, "D"), _fma),
        f"rndne_{_t}": (_t, (_t,), np.rint),
        f"floor_{_t}": (_t, (_t,), np.floor),
        f"ceil_{_t}": (_t, (_t,), np.ceil),
        f"trunc_{_t}": (_t, (_t,), np.trunc),
        f"fract_{_t}": (_t, (_t,), _fract),
        f"sin_{_t}": (_t, (_t,), _turns(np.sin)),
        f"cos_{_t}": (_t, (_t,), _turns(np.cos)),
        f"frexp_mant_{_t}": (_t, (_t,), _mantissa),
    }
    # gfx12 says which maximum it is.
    FLOAT |= {
        f"max_num_{_t}": FLOAT[f"max_{_t}"],
        f"min_num_{_t}": FLOAT[f"min_{_t}"],
        f"max3_num_{_t}": FLOAT[f"max3_{_t}"],
        f"min3_num_{_t}": FLOAT[f"min3_{_t}"],
        f"med3_num_{_t}": FLOAT[f"med3_{_t}"],
        f"maxmin_num_{_t}": FLOAT[f"maxmin_{_t}"],
        f"minmax_num_{_t}": FLOAT[f"minmax_{_t}"],
    }
FLOAT |= {"rcp_iflag_f32": FLOAT["rcp_f32"], "mul_legacy_f32": FLOAT["mul_dx9_zero_f32"]}
