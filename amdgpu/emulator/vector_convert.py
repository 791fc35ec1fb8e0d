"""Vector conversions, one row an opcode, in the form of `vector_int`; those of 8-bit floats are in `vector_fp8`."""

import numpy as np

from amdgpu.emulator.bitops import U32
from amdgpu.emulator.formats import bf16_to_f32, f32_to_bf16, f32_to_f16_toward_zero, float_to_int

F16, F32, F64 = np.float16, np.float32, np.float64


def _to_int(dtype, rounding=None):
    bounds = np.iinfo(dtype)

    def f(a):
        return float_to_int(rounding(a) if rounding else a, bounds.min, bounds.max).astype(dtype)

    return f


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """uint32 of two 16-bit values of any type."""
    bits = [np.ascontiguousarray(x).view(np.uint16).astype(U32) for x in (low, high)]
    return bits[0] | (bits[1] << U32(16))


def _pack_ints(dtype):
    convert = _to_int(dtype)
    return lambda a, b: pack(convert(a), convert(b))


def _pack_saturated(dtype):
    bounds = np.iinfo(dtype)
    return lambda a, b: pack(*[np.clip(x, bounds.min, bounds.max).astype(dtype) for x in (a, b)])


def _pack_bf16(low, high):
    return f32_to_bf16(low) | (f32_to_bf16(high) << U32(16))


def _pack_toward_zero(a, b):
    return pack(f32_to_f16_toward_zero(a), f32_to_f16_toward_zero(b))


CONVERT = {
    "cvt_f32_i32": ("f32", ("i32",), lambda a: a.astype(F32)),
    "cvt_f32_u32": ("f32", ("u32",), lambda a: a.astype(F32)),
    "cvt_i32_f32": ("i32", ("f32",), _to_int(np.int32)),
    "cvt_u32_f32": ("u32", ("f32",), _to_int(np.uint32)),
    "cvt_nearest_i32_f32": ("i32", ("f32",), _to_int(np.int32, lambda a: np.floor(a.astype(F64) + 0.5))),
    "cvt_floor_i32_f32": ("i32", ("f32",), _to_int(np.int32, np.floor)),
    "cvt_f16_f32": ("f16", ("f32",), lambda a: a.astype(F16)),
    "cvt_f32_f16": ("f32", ("f16",), lambda a: a.astype(F32)),
    "cvt_f32_bf16": ("f32", ("b16",), bf16_to_f32),
    "cvt_f64_f32": ("f64", ("f32",), lambda a: a.astype(F64)),
    "cvt_f32_f64": ("f32", ("f64",), lambda a: a.astype(F32)),
    "cvt_f64_i32": ("f64", ("i32",), lambda a: a.astype(F64)),
    "cvt_f64_u32": ("f64", ("u32",), lambda a: a.astype(F64)),
    "cvt_i32_f64": ("i32", ("f64",), _to_int(np.int32)),
    "cvt_u32_f64": ("u32", ("f64",), _to_int(np.uint32)),
    "cvt_f16_u16": ("f16", ("u16",), lambda a: a.astype(F16)),
    "cvt_f16_i16": ("f16", ("i16",), lambda a: a.astype(F16)),
    "cvt_u16_f16": ("u16", ("f16",), _to_int(np.uint16)),
    "cvt_i16_f16": ("i16", ("f16",), _to_int(np.int16)),
    "cvt_u32_u16": ("u32", ("u16",), lambda a: a.astype(U32)),
    "cvt_i32_i16": ("i32", ("i16",), lambda a: a.astype(np.int32)),
    "pack_b32_f16": ("u32", ("f16", "f16"), pack),
    "cvt_pk_f16_f32": ("u32", ("f32", "f32"), lambda a, b: pack(a.astype(F16), b.astype(F16))),
    "cvt_pk_rtz_f16_f32": ("u32", ("f32", "f32"), _pack_toward_zero),
    "cvt_pk_bf16_f32": ("u32", ("f32", "f32"), _pack_bf16),
    "cvt_pk_i16_f32": ("u32", ("f32", "f32"), _pack_ints(np.int16)),
    "cvt_pk_u16_f32": ("u32", ("f32", "f32"), _pack_ints(np.uint16)),
    "cvt_pk_i16_i32": ("u32", ("i32", "i32"), _pack_saturated(np.int16)),
    "cvt_pk_u16_u32": ("u32", ("u32", "u32"), _pack_saturated(np.uint16)),
}
for _i in range(4):
    CONVERT[f"cvt_f32_ubyte{_i}"] = ("f32", ("u32",), lambda a, i=_i: ((a >> U32(8 * i)) & U32(0xFF)).astype(F32))
CONVERT |= {
    "cvt_pkrtz_f16_f32": CONVERT["cvt_pk_rtz_f16_f32"],
    "cvt_rpi_i32_f32": CONVERT["cvt_nearest_i32_f32"],
    "cvt_flr_i32_f32": CONVERT["cvt_floor_i32_f32"],
}
