"""Scalar instructions: the s_ opcodes that compute. Branches, barriers and loads are in `control` and `vmem`.

SCALAR maps an opcode to (type of the result, types of the sources, function, SCC). The function takes and returns
arrays [waves, 1]. SCC is None where the instruction leaves it alone, NONZERO where it becomes "result != 0", and
CARRY where the function returns (result, scc).
"""

import numpy as np

from amdgpu.emulator.bitops import (
    bit_count,
    extract_field,
    first_one,
    leading_sign_bits,
    leading_zeros,
    multiply_high,
    reverse_bits,
    sign_extend,
)
from amdgpu.emulator.errors import EmulatorError
from amdgpu.emulator.floatops import COMPARE, maxnum, minnum
from amdgpu.emulator.formats import float_to_int, fma_f16, fma_f32
from amdgpu.emulator.operands import DTYPES, parse_operand
from amdgpu.emulator.registers import EXEC, NULL

NONZERO, CARRY = "nonzero", "carry"
U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def _add_carry(a, b):
    r = a + b
    return r, r < a


def _sub_borrow(a, b):
    return a - b, b > a


def _add_overflow(a, b):
    r = a + b
    return r, ((a ^ r) & (b ^ r)) < 0


def _sub_overflow(a, b):
    r = a - b
    return r, ((a ^ b) & (a ^ r)) < 0


def _shift_add(shift):
    def f(a, b):
        wide = (a.astype(U64) << U64(shift)) + b
        return wide.astype(U32), wide > 0xFFFFFFFF

    return f


def _bit_field(width, signed):
    unsigned = U32 if width == 32 else U64

    def f(a, b):
        offset, size = b & U32(width - 1), np.minimum((b >> U32(16)) & U32(0x7F), U32(width))
        return extract_field(a, offset.astype(unsigned), size.astype(unsigned), signed)

    return f


def _bit_mask(unsigned):
    def f(a, b):
        width = unsigned(unsigned(0).itemsize * 8 - 1)
        size, offset = (a & U32(width)).astype(unsigned), (b & U32(width)).astype(unsigned)
        return ((unsigned(1) << size) - unsigned(1)) << offset

    return f


SCALAR = {
    "add_u32": ("u32", ("u32", "u32"), _add_carry, CARRY),
    "sub_u32": ("u32", ("u32", "u32"), _sub_borrow, CARRY),
    "add_i32": ("i32", ("i32", "i32"), _add_overflow, CARRY),
    "sub_i32": ("i32", ("i32", "i32"), _sub_overflow, CARRY),
    "add_nc_u64": ("u64", ("u64", "u64"), lambda a, b: a + b, None),
    "sub_nc_u64": ("u64", ("u64", "u64"), lambda a, b: a - b, None),
    "mul_u64": ("u64", ("u64", "u64"), lambda a, b: a * b, None),
    "mul_i32": ("i32", ("i32", "i32"), lambda a, b: a * b, None),
    "mul_hi_u32": ("u32", ("u32", "u32"), multiply_high, None),
    "mul_hi_i32": ("i32", ("i32", "i32"), multiply_high, None),
    "min_i32": ("i32", ("i32", "i32"), lambda a, b: (np.minimum(a, b), a <= b), CARRY),
    "max_i32": ("i32", ("i32", "i32"), lambda a, b: (np.maximum(a, b), a >= b), CARRY),
    "min_u32": ("u32", ("u32", "u32"), lambda a, b: (np.minimum(a, b), a <= b), CARRY),
    "max_u32": ("u32", ("u32", "u32"), lambda a, b: (np.maximum(a, b), a >= b), CARRY),
    "absdiff_i32": ("i32", ("i32", "i32"), lambda a, b: np.abs(a - b), NONZERO),
    "pack_ll_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), None),
    "pack_lh_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), None),
    "pack_hl_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a >> U32(16)) | (b << U32(16)), None),
    "pack_hh_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), None),
    "abs_i32": ("i32", ("i32",), lambda a: np.abs(a), NONZERO),
    "sext_i32_i8": ("i32", ("i32",), lambda a: sign_extend(a, 8), None),
    "sext_i32_i16": ("i32", ("i32",), lambda a: sign_extend(a, 16), None),
    "cls_i32": ("i32", ("i32",), leading_sign_bits, None),
    "mov_b32": ("u32", ("u32",), lambda a: a, None),
    "mov_b64": ("u64", ("u64",), lambda a: a, None),
    # Scalar floats, gfx1150 and later.
    "add_f32": ("f32", ("f32", "f32"), lambda a, b: a + b, None),
    "sub_f32": ("f32", ("f32", "f32"), lambda a, b: a - b, None),
    "mul_f32": ("f32", ("f32", "f32"), lambda a, b: a * b, None),
    "min_f32": ("f32", ("f32", "f32"), minnum, None),
    "max_f32": ("f32", ("f32", "f32"), maxnum, None),
    "fmac_f32": ("f32", ("f32", "f32", "dst"), fma_f32, None),
    "fmaak_f32": ("f32", ("f32", "f32", "f32"), fma_f32, None),
    "fmamk_f32": ("f32", ("f32", "f32", "f32"), lambda a, k, b: fma_f32(a, k, b), None),
    "add_f16": ("f16", ("f16", "f16"), lambda a, b: a + b, None),
    "sub_f16": ("f16", ("f16", "f16"), lambda a, b: a - b, None),
    "mul_f16": ("f16", ("f16", "f16"), lambda a, b: a * b, None),
    "min_f16": ("f16", ("f16", "f16"), minnum, None),
    "max_f16": ("f16", ("f16", "f16"), maxnum, None),
    "fmac_f16": ("f16", ("f16", "f16", "dst"), fma_f16, None),
    "rndne_f32": ("f32", ("f32",), np.rint, None),
    "floor_f32": ("f32", ("f32",), np.floor, None),
    "ceil_f32": ("f32", ("f32",), np.ceil, None),
    "trunc_f32": ("f32", ("f32",), np.trunc, None),
    "cvt_f32_i32": ("f32", ("i32",), lambda a: a.astype(np.float32), None),
    "cvt_f32_u32": ("f32", ("u32",), lambda a: a.astype(np.float32), None),
    "cvt_i32_f32": ("i32", ("f32",), lambda a: float_to_int(a, -(2**31), 2**31 - 1).astype(I32), None),
    "cvt_u32_f32": ("u32", ("f32",), lambda a: float_to_int(a, 0, 2**32 - 1).astype(U32), None),
    "cvt_f32_f16": ("f32", ("f16",), lambda a: a.astype(np.float32), None),
    "cvt_f16_f32": ("f16", ("f32",), lambda a: a.astype(np.float16), None),
}
for _k in (1, 2, 3, 4):
    SCALAR[f"lshl{_k}_add_u32"] = ("u32", ("u32", "u32"), _shift_add(_k), CARRY)
for _w, _u, _s in ((32, "u32", "i32"), (64, "u64", "i64")):
    _mask = DTYPES[_u](_w - 1)
    SCALAR |= {
        f"and_b{_w}": (_u, (_u, _u), np.bitwise_and, NONZERO),
        f"or_b{_w}": (_u, (_u, _u), np.bitwise_or, NONZERO),
        f"xor_b{_w}": (_u, (_u, _u), np.bitwise_xor, NONZERO),
        f"nand_b{_w}": (_u, (_u, _u), lambda a, b: ~(a & b), NONZERO),
        f"nor_b{_w}": (_u, (_u, _u), lambda a, b: ~(a | b), NONZERO),
        f"xnor_b{_w}": (_u, (_u, _u), lambda a, b: ~(a ^ b), NONZERO),
        f"and_not1_b{_w}": (_u, (_u, _u), lambda a, b: a & ~b, NONZERO),
        f"or_not1_b{_w}": (_u, (_u, _u), lambda a, b: a | ~b, NONZERO),
        f"not_b{_w}": (_u, (_u,), np.invert, NONZERO),
        f"lshl_b{_w}": (_u, (_u, "u32"), lambda a, b, m=_mask: a << (b.astype(a.dtype) & m), NONZERO),
        f"lshr_b{_w}": (_u, (_u, "u32"), lambda a, b, m=_mask: a >> (b.astype(a.dtype) & m), NONZERO),
        f"ashr_i{_w}": (
            _s,
            (_s, "u32"),
            lambda a, b, m=_w - 1: a >> (b.astype(a.dtype) & a.dtype.type(m)),
            NONZERO,
        ),
        f"bfe_u{_w}": (_u, (_u, "u32"), _bit_field(_w, False), NONZERO),
        f"bfe_i{_w}": (_u, (_u, "u32"), _bit_field(_w, True), NONZERO),
        f"bfm_b{_w}": (_u, ("u32", "u32"), _bit_mask(DTYPES[_u]), None),
        f"brev_b{_w}": (_u, (_u,), reverse_bits, None),
        f"bcnt0_i32_b{_w}": ("i32", (_u,), lambda a: bit_count(~a).astype(I32), NONZERO),
        f"bcnt1_i32_b{_w}": ("i32", (_u,), lambda a: bit_count(a).astype(I32), NONZERO),
        f"ctz_i32_b{_w}": ("i32", (_u,), first_one, None),
        f"clz_i32_u{_w}": ("i32", (_u,), leading_zeros, None),
    }
#: Names that differ between generations.
_RENAMED = {
    "add_co_u32": "add_u32", "sub_co_u32": "sub_u32", "add_co_i32": "add_i32", "sub_co_i32": "sub_i32",
    "min_num_f32": "min_f32", "max_num_f32": "max_f32", "min_num_f16": "min_f16", "max_num_f16": "max_f16",
    "ff1_i32_b32": "ctz_i32_b32", "ff1_i32_b64": "ctz_i32_b64", "flbit_i32": "cls_i32",
    "flbit_i32_b32": "clz_i32_u32", "flbit_i32_b64": "clz_i32_u64",
    "andn2_b32": "and_not1_b32", "andn2_b64": "and_not1_b64", "orn2_b32": "or_not1_b32", "orn2_b64": "or_not1_b64",
}  # fmt: skip
SCALAR |= {new: SCALAR[old] for new, old in _RENAMED.items()}

#: s_<op>_saveexec: how EXEC and the source make the new EXEC.
SAVEEXEC = {
    "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e,
    "and_not1": lambda s, e: s & ~e, "or_not1": lambda s, e: s | ~e, "and_not0": lambda s, e: ~s & e,
    "or_not0": lambda s, e: ~s | e, "nand": lambda s, e: ~(s & e), "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
}  # fmt: skip
SAVEEXEC |= {"andn2": SAVEEXEC["and_not1"], "orn2": SAVEEXEC["or_not1"], "andn1": SAVEEXEC["and_not0"]}
SAVEEXEC |= {"orn1": SAVEEXEC["or_not0"]}

_CMP = {"eq", "lg", "gt", "ge", "lt", "le"}
_CMP_FLOAT = _CMP | {"o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt"}


def write_scalar(operand, kind):
    """Writer of [waves, 1] values to a scalar register (a pair for 64-bit types)."""
    if operand.kind != "s":
        raise EmulatorError("a scalar register is expected here")
    n = operand.index
    if n == NULL:
        return lambda w, x: None
    width = int(kind[1:])
    if width == 64 and operand.count == 1:
        raise EmulatorError("one scalar register where a pair is needed")
    unsigned = DTYPES[f"u{width}"]

    def put(w, x):
        (w.sgpr_u64 if width == 64 else w.sgpr_u32)[n][...] = np.asarray(x).view(unsigned)

    if n in (EXEC, EXEC + 1):

        def put_exec(w, x):
            put(w, x)
            w.exec_changed()

        return put_exec
    return put


def _signed16(text):
    value = int(text, 0) & 0xFFFF
    return value - 0x10000 if value & 0x8000 else value


def decode_scalar(inst, factory):
    """The step of a scalar instruction that computes; None for an opcode that is not of this class."""
    name, operands = inst.opcode[2:], [parse_operand(o) for o in inst.operands if not o.startswith("hwreg")]
    if name in SCALAR:
        return _table_step(SCALAR[name], operands, factory)
    for decoder in (
        _decode_compare,
        _decode_select,
        _decode_inline,
        _decode_saveexec,
        _decode_bits,
        _decode_carry,
    ):
        if step := decoder(name, operands, inst, factory):
            return step
    return None


def _table_step(entry, operands, factory):
    kind, sources, function, scc = entry
    put = write_scalar(operands[0], kind)
    given = [operands[0] if k == "dst" else o for k, o in zip(sources, operands[1:] + [None], strict=False)]
    reads = [factory.read(o, kind if k == "dst" else k) for k, o in zip(sources, given, strict=True)]
    if len(operands) - 1 != sum(k != "dst" for k in sources):
        raise EmulatorError("wrong number of operands")

    def compute(w):
        return function(*[read(w) for read in reads])

    if scc is None:
        return lambda w: put(w, compute(w))
    if scc == NONZERO:

        def step(w):
            r = compute(w)
            put(w, r)
            w.scc[...] = r != 0

        return step

    def step_carry(w):
        r, c = compute(w)
        put(w, r)
        w.scc[...] = c

    return step_carry


def _decode_compare(name, operands, inst, factory):
    prefix, _, rest = name.partition("_")
    relation, _, kind = rest.rpartition("_")
    if prefix not in ("cmp", "cmpk") or kind not in ("i32", "u32", "u64", "f32", "f16"):
        return None
    if relation not in (_CMP_FLOAT if kind[0] == "f" else _CMP):
        return None
    # "lg" of integers is "not equal"; of floats it is "less or greater".
    compare = COMPARE["ne" if relation == "lg" and kind[0] != "f" else relation]
    a = factory.read(operands[0], kind)
    if prefix == "cmpk":
        # The constant is 16 bits wide: sign-extended, or of unsigned comparisons zero-extended.
        k = _signed16(inst.operands[1]) if kind == "i32" else int(inst.operands[1], 0) & 0xFFFF
        constant = np.full((1, 1), k, DTYPES[kind])

        def step_constant(w):
            w.scc[...] = compare(a(w), constant)

        return step_constant
    b = factory.read(operands[1], kind)

    def step(w):
        w.scc[...] = compare(a(w), b(w))

    return step


def _decode_select(name, operands, inst, factory):
    kind = {"cselect_b32": "u32", "cselect_b64": "u64", "cmov_b32": "u32", "cmov_b64": "u64"}.get(name)
    if kind is None:
        return None
    put = write_scalar(operands[0], kind)
    a = factory.read(operands[1], kind)
    b = factory.read(operands[2] if name.startswith("cselect") else operands[0], kind)
    return lambda w: put(w, np.where(w.scc, a(w), b(w)))


def _decode_inline(name, operands, inst, factory):
    """Instructions with a 16-bit constant."""
    if name not in ("movk_i32", "addk_i32", "addk_co_i32", "mulk_i32", "cmovk_i32"):
        return None
    put, old = write_scalar(operands[0], "i32"), factory.read(operands[0], "i32")
    k = np.full((1, 1), _signed16(inst.operands[1]), I32)
    if name == "movk_i32":
        return lambda w: put(w, k)
    if name == "mulk_i32":
        return lambda w: put(w, old(w) * k)
    if name == "cmovk_i32":
        return lambda w: put(w, np.where(w.scc, k, old(w)))

    def step(w):
        r, overflow = _add_overflow(old(w), k)
        put(w, r)
        w.scc[...] = overflow

    return step


def _decode_saveexec(name, operands, inst, factory):
    operation, _, width = name.partition("_saveexec_b")
    if operation not in SAVEEXEC or width not in ("32", "64"):
        return None
    kind = f"u{width}"
    exec_register = parse_operand("exec" if width == "64" else "exec_lo")
    put, put_exec = write_scalar(operands[0], kind), write_scalar(exec_register, kind)
    source, current, function = (
        factory.read(operands[1], kind),
        factory.read(exec_register, kind),
        SAVEEXEC[operation],
    )

    def step(w):
        old = current(w).copy()
        new = function(source(w), old)
        put(w, old)
        put_exec(w, new)
        w.scc[...] = new != 0

    return step


def _decode_bits(name, operands, inst, factory):
    """s_bitcmp and s_bitset."""
    if name[:6] not in ("bitcmp", "bitset") or name[7:] not in ("_b32", "_b64") or name[6] not in "01":
        return None
    kind, wanted = f"u{name[-2:]}", int(name[6])
    dtype = DTYPES[kind]
    mask = U32(int(name[-2:]) - 1)
    a = factory.read(operands[0], kind)
    b = factory.read(operands[1], "u32")
    if name.startswith("bitcmp"):

        def step(w):
            w.scc[...] = ((a(w) >> (b(w) & mask).astype(dtype)) & dtype(1)) == wanted

        return step
    put = write_scalar(operands[0], kind)

    def step_set(w):
        bit = dtype(1) << (b(w) & mask).astype(dtype)
        put(w, a(w) | bit if wanted else a(w) & ~bit)

    return step_set


def _decode_carry(name, operands, inst, factory):
    sign = {"addc_u32": 1, "add_co_ci_u32": 1, "subb_u32": -1, "sub_co_ci_u32": -1}.get(name)
    if sign is None:
        return None
    put = write_scalar(operands[0], "u32")
    a, b = factory.read(operands[1], "u32"), factory.read(operands[2], "u32")

    def step(w):
        r = a(w).astype(I64) + sign * (b(w).astype(I64) + w.scc)
        put(w, (r & 0xFFFFFFFF).astype(U32))
        w.scc[...] = (r < 0) | (r > 0xFFFFFFFF)

    return step
