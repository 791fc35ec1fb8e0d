"""Matrix instructions: every element of A, B, C and D where AMD's documents put it, products rounded once.

The register layouts are written here as functions from (row, column) to (lane, element), the way of AMD's matrix
instruction calculator; the emulator has them the other way round.
"""

import ml_dtypes
import numpy as np
import pytest
from emulator_harness import CDNA3, CDNA4, GFX9, GFX11, GFX12, RDNA, assembles, run_lines

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.matrix import MFMA, WMMA, WMMA_GFX12, round_to_xf32

DTYPES = {
    "f32": np.float32, "xf32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8,
    "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2,
    "fp8_fnuz": ml_dtypes.float8_e4m3fnuz, "bf8_fnuz": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def random_matrix(rng, shape, kind):
    if kind in ("i8", "u8"):
        return rng.integers(-128 if kind == "i8" else 0, 128 if kind == "i8" else 256, shape).astype(DTYPES[kind])
    return rng.standard_normal(shape).astype(DTYPES[kind])


def fill(matrix, place, lanes):
    """uint32 [registers, lanes] of a matrix whose element [index] goes to every (lane, element) in place(index)."""
    per_lane = 1 + max(e for index in np.ndindex(matrix.shape) for _, e in place(index))
    elements = np.zeros((lanes, per_lane), matrix.dtype)
    for index in np.ndindex(matrix.shape):
        for lane, element in place(index):
            elements[lane, element] = matrix[index]
    return np.ascontiguousarray(elements).view(np.uint32).T


def registers(first, count):
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def values(matrix, kind):
    x = matrix.astype(np.float32) if kind in ("bf16", "fp8", "bf8", "fp8_fnuz", "bf8_fnuz") else matrix
    x = round_to_xf32(x) if kind == "xf32" else x
    return x.astype(np.int64 if kind in ("i8", "u8") else np.float64)


NEW_IN_CDNA4 = (
    "32x32x16_f16",
    "32x32x16_bf16",
    "16x16x32_f16",
    "16x16x32_bf16",
    "32x32x32_i8",
    "16x16x64_i8",
    "f8f6f4",
)


def chips(name):
    if name.endswith("xf32"):
        return CDNA3
    return CDNA4 if name.endswith(NEW_IN_CDNA4) else GFX9


@pytest.mark.parametrize("constant_c", [False, True])
@pytest.mark.parametrize("name", MFMA)
def test_mfma(name, constant_c):
    shape = MFMA[name]
    m, depth, blocks = shape.rows, shape.depth, shape.blocks
    groups = 64 // (m * blocks)
    n = depth // groups

    def place(index):
        """A[block][i][k], and B[block][k][j] as [block][j][k]."""
        b, i, k = index
        return [(i + m * (b if blocks > 1 else k // n), k if blocks > 1 else k % n)]

    def result(b, i, j):
        if m == 4:
            return j + 4 * b, i
        lane_groups = 64 // m
        return j + m * (i // 4 % lane_groups), m * m // 64 * b + 4 * (i // (4 * lane_groups)) + i % 4

    rng = np.random.default_rng(0)
    for arch in chips(name):
        a_kind, b_kind, modifiers = shape.a, shape.b, ""
        if shape.a == "f8f6f4":
            a_kind, b_kind, modifiers = "fp8", "bf8", " blgp:1"
        if arch == "gfx942" and a_kind in ("fp8", "bf8"):
            a_kind, b_kind = a_kind + "_fnuz", b_kind + "_fnuz"
        a, b = random_matrix(rng, (blocks, m, depth), a_kind), random_matrix(rng, (blocks, m, depth), b_kind)
        ra, rb = fill(a, place, 64), fill(b, place, 64)
        count = m * m * blocks // 64
        integers = shape.result == "i32"
        c = np.zeros((blocks, m, m), np.int64 if integers else np.float32)
        if not constant_c:
            c = rng.integers(-1000, 1000, c.shape) if integers else rng.standard_normal(c.shape).astype(np.float32)
        rc = np.zeros((count, 64), np.uint32)
        for index in np.ndindex(c.shape):
            lane, register = result(*index)
            rc[register, lane] = np.array(c[index], np.int32 if integers else np.float32).view(np.uint32)
        operands = (registers(64, count), registers(0, len(ra)), registers(16, len(rb)))
        source_c = "0" if constant_c else registers(32, count)
        line = f"v_mfma_{name} {', '.join(operands)}, {source_c}{modifiers}"
        assembles(line, arch)
        # MFMA takes no notice of EXEC.
        w = run_lines([line], arch, [*enumerate(ra), *((16 + i, r) for i, r in enumerate(rb)),
                                     *((32 + i, r) for i, r in enumerate(rc))],
                      [(126, 0x0F0F0F0F), (127, 0)], num_vgprs=96)  # fmt: skip
        product = values(a, a_kind) @ values(b, b_kind).swapaxes(1, 2) + c
        want = product.astype(np.int32 if integers else np.float32)
        got = np.empty_like(want)
        for index in np.ndindex(want.shape):
            lane, register = result(*index)
            got[index] = w.vgpr_u32[64 + register][0].view(want.dtype)[lane]
        if integers:
            np.testing.assert_array_equal(got, want)
        else:
            # Both sum in float64, in an order of their own.
            np.testing.assert_allclose(got, want, rtol=1.2e-7, atol=1e-12)


def wmma_places(arch):
    if arch in GFX11:
        return lambda ik: [(ik[0], ik[1]), (ik[0] + 16, ik[1])], lambda i, j: (j + 16 * (i % 2), i // 2)
    return lambda ik: [(ik[0] + 16 * (ik[1] // 8), ik[1] % 8)], lambda i, j: (j + 16 * (i // 8), i % 8)


def run_wmma(arch, name, a, b, rc, modifiers="", results=8):
    place, _ = wmma_places(arch)
    ra, rb = fill(a, place, 32), fill(b, place, 32)
    source_c = registers(32, results) if rc is not None else "0"
    sources = f"{registers(0, len(ra))}, {registers(16, len(rb))}, {source_c}"
    line = f"v_wmma_{name} {registers(64, results)}, {sources}{modifiers}"
    assembles(line, arch)
    vgprs = [*enumerate(ra), *((16 + i, r) for i, r in enumerate(rb)), *((64 + i, 0xA5A5A5A5) for i in range(results))]
    if rc is not None:
        vgprs += [(32 + i, r) for i, r in enumerate(rc)]
    return run_lines([line], arch, vgprs, num_vgprs=80)


@pytest.mark.parametrize("constant_c", [False, True])
@pytest.mark.parametrize("name", ["f32_16x16x16_f16", "f32_16x16x16_bf16", *WMMA_GFX12])
def test_wmma(name, constant_c):
    _, a_kind, b_kind = (WMMA | WMMA_GFX12)[name]
    rng = np.random.default_rng(1)
    for arch in GFX12 if name in WMMA_GFX12 else RDNA:
        _, result = wmma_places(arch)
        a, b = random_matrix(rng, (16, 16), a_kind), random_matrix(rng, (16, 16), b_kind)
        c = rng.standard_normal((16, 16)).astype(np.float32) * (not constant_c)
        rc = np.zeros((8, 32), np.uint32)
        for i, j in np.ndindex(16, 16):
            lane, register = result(i, j)
            rc[register, lane] = c[i, j].view(np.uint32)
        w = run_wmma(arch, name, a, b, None if constant_c else rc)
        want = (values(a, a_kind) @ values(b, b_kind).T + c).astype(np.float32)
        for i, j in np.ndindex(16, 16):
            lane, register = result(i, j)
            np.testing.assert_allclose(w.vgpr_f32[64 + register][0, lane], want[i, j], rtol=1.2e-7, atol=1e-12)


@pytest.mark.parametrize("a_kind", ["i8", "u8"])
@pytest.mark.parametrize("b_kind", ["i8", "u8"])
@pytest.mark.parametrize("arch", ["gfx1151", "gfx1201"])
def test_wmma_integers(a_kind, b_kind, arch):
    """neg_lo says which of A and B is signed."""
    rng = np.random.default_rng(2)
    _, result = wmma_places(arch)
    a, b = random_matrix(rng, (16, 16), a_kind), random_matrix(rng, (16, 16), b_kind)
    modifiers = f" neg_lo:[{int(a_kind == 'i8')},{int(b_kind == 'i8')},0]"
    w = run_wmma(arch, "i32_16x16x16_iu8", a, b, None, modifiers)
    want = a.astype(np.int64) @ b.astype(np.int64).T
    for i, j in np.ndindex(16, 16):
        lane, register = result(i, j)
        assert w.vgpr_i32[64 + register][0, lane] == want[i, j]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("high", [0, 1])
def test_wmma_with_16_bit_results_on_gfx11(kind, high):
    """C and D are the low halves of eight registers, or with op_sel the high halves; the others are kept."""
    rng = np.random.default_rng(3)
    _, result = wmma_places("gfx1151")
    a, b, c = (random_matrix(rng, (16, 16), kind) for _ in range(3))
    rc = np.zeros((8, 32, 2), np.uint16)
    for i, j in np.ndindex(16, 16):
        lane, register = result(i, j)
        rc[register, lane, high] = c[i, j].view(np.uint16)
    w = run_wmma("gfx1151", f"{kind}_16x16x16_{kind}", a, b, rc.view(np.uint32)[..., 0], f" op_sel:[0,0,{high}]")
    want = (values(a, kind) @ values(b, kind).T + values(c, kind)).astype(np.float32).astype(DTYPES[kind])
    for i, j in np.ndindex(16, 16):
        lane, register = result(i, j)
        assert w.vgpr_u16[64 + register][high][0, lane] == want[i, j].view(np.uint16)
        assert w.vgpr_u16[64 + register][1 - high][0, lane] == 0xA5A5


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wmma_with_16_bit_results_on_gfx12(kind):
    """Two rows in each of four registers."""
    rng = np.random.default_rng(4)
    a, b, c = (random_matrix(rng, (16, 16), kind) for _ in range(3))
    rc = np.zeros((4, 32, 2), np.uint16)
    for i, j in np.ndindex(16, 16):
        rc[i % 8 // 2, j + 16 * (i // 8), i % 2] = c[i, j].view(np.uint16)
    w = run_wmma("gfx1201", f"{kind}_16x16x16_{kind}", a, b, rc.view(np.uint32)[..., 0], results=4)
    want = (values(a, kind) @ values(b, kind).T + values(c, kind)).astype(np.float32).astype(DTYPES[kind])
    for i, j in np.ndindex(16, 16):
        assert w.vgpr_u16[64 + i % 8 // 2][i % 2][0, j + 16 * (i // 8)] == want[i, j].view(np.uint16)


def test_every_opcode_has_a_case():
    tested = {"f32_16x16x16_f16", "f32_16x16x16_bf16", "i32_16x16x16_iu8", "f16_16x16x16_f16", "bf16_16x16x16_bf16"}
    assert set(WMMA) == tested


def test_gfx11_wmma_needs_both_copies_of_its_operands():
    line = "v_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[8:15], 0"
    v = [(i, 0x3C003C00) for i in range(16)]
    run_lines([line], "gfx1151", v)
    with pytest.raises(EmulatorError, match="lanes 16 to 31 do not repeat"):
        run_lines([line], "gfx1151", [*v, (3, np.where(np.arange(32) == 20, 0, 0x3C003C00))])


def test_wmma_needs_all_lanes():
    line = "v_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[8:15], 0"
    with pytest.raises(EmulatorError, match="inactive lanes"):
        run_lines([line], "gfx1151", [(i, 0) for i in range(16)], [(126, 0xFFFF)])


@pytest.mark.parametrize(
    "line, arch, message",
    [
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[16:19], v[20:21], 0", "gfx942", "operand 1 has 4 registers"),
        ("v_mfma_f32_32x32x8_f16 v[0:7], v[16:17], v[20:21], 0", "gfx942", "D has 8 registers"),
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[20:21], v[24:31]", "gfx942", "C has 8 registers"),
        ("v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, 0 cbsz:1", "gfx942", "matrix modifier cbsz"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0 cbsz:4", "gfx950", "6-bit and 4-bit"),
        ("v_wmma_f32_16x16x16_f16 v[16:23], v[0:7], v[8:15], 0 neg_lo:[1,0,0]", "gfx1151", "matrix modifier neg_lo"),
        ("v_wmma_f32_16x16x16_fp8_fp8 v[16:23], v[0:1], v[8:9], 0", "gfx1151", "unknown opcode"),
        ("v_swmmac_f32_16x16x32_f16 v[0:7], v[8:11], v[12:19], v20", "gfx1201", "unknown opcode"),
    ],
)
def test_what_is_not_modelled_is_refused(line, arch, message):
    with pytest.raises(EmulatorError, match=message):
        assemble([line, "s_endpgm"], arch)


def test_xf32_keeps_ten_bits():
    x = np.array([1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -3.14159274], np.float32)
    assert round_to_xf32(x).tolist() == [1 + 2.0**-10, 1.0, 1 + 2.0**-9, -3.140625]
