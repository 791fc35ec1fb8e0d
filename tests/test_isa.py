"""Kernel reports: occupancy, small kernels on five chips, lowering, bad input."""

import dataclasses
import functools
import json
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from amdgpu import arch as architectures
from amdgpu import isa

# ---------------------------------------------------------------------- kernels


def matmul_body(a_ref, b_ref, o_ref, *, step):
    def body(i, acc):
        a = plgpu.load(a_ref.at[:, pl.ds(i * step, step)])
        b = plgpu.load(b_ref.at[pl.ds(i * step, step), :])
        return acc + plgpu.dot(a, b)

    acc = jax.lax.fori_loop(0, a_ref.shape[1] // step, body, jnp.zeros(o_ref.shape, jnp.float32))
    o_ref[...] = acc.astype(o_ref.dtype)


def matmul(a, b, *, tile=64, step=32, num_warps=4):
    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        functools.partial(matmul_body, step=step),
        grid=(m // tile, n // tile),
        in_specs=[pl.BlockSpec((tile, k), lambda i, j: (i, 0)), pl.BlockSpec((k, tile), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        name="small_matmul",
    )(a, b)


def softmax_body(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - jnp.max(x, axis=1)[:, None])
    o_ref[...] = e / jnp.sum(e, axis=1)[:, None]


def softmax(x, *, rows=4):
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_body,
        grid=(x.shape[0] // rows,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        name="small_softmax",
    )(x)


def nested_body(n_ref, x_ref, o_ref):
    def inner(j, x):
        return jnp.where(x > 0.5, x * x, x + j.astype(jnp.float32))

    def outer(i, x):
        return jax.lax.fori_loop(0, n_ref[i], inner, x + plgpu.load(x_ref.at[i]))

    # Bounds that are known only at run time are never unrolled away.
    o_ref[...] = jax.lax.fori_loop(0, n_ref[0], outer, jnp.zeros(o_ref.shape, jnp.float32))


def nested(n, x):
    return pl.pallas_call(
        nested_body,
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        name="nested",
    )(n, x)


def shape(*sizes, dtype="float16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


@functools.cache
def matmul_report(arch):
    (report,) = isa.compile_for(matmul, shape(128, 1024), shape(1024, 128), arch=arch)
    return report


@functools.cache
def softmax_report(arch):
    (report,) = isa.compile_for(softmax, shape(16, 256, dtype="float32"), arch=arch)
    return report


# ---------------------------------------------------------------------- occupancy


@pytest.mark.parametrize(
    ("arch", "asked", "groups", "limiter"),
    [
        ("gfx942", dict(num_warps=4, vgprs=128), 4, "registers"),
        ("gfx942", dict(num_warps=4, vgprs=129), 3, "registers"),
        ("gfx942", dict(num_warps=8, vgprs=170), 1, "registers"),
        ("gfx942", dict(num_warps=4, vgprs=64), 8, "registers and waves"),
        ("gfx942", dict(num_warps=4, vgprs=32), 8, "waves"),
        ("gfx942", dict(num_warps=4, vgprs=32, sgprs=100), 7, "registers"),
        ("gfx942", dict(num_warps=4, vgprs=64, lds_bytes=16 * 1024), 4, "LDS"),
        ("gfx942", dict(num_warps=4, vgprs=128, lds_bytes=16 * 1024), 4, "registers and LDS"),
        ("gfx942", dict(num_warps=4, vgprs=128, lds_bytes=64 * 1024), 1, "LDS"),
        ("gfx942", dict(num_warps=4, vgprs=128, lds_bytes=64 * 1024 + 1), 0, "LDS"),
        ("gfx950", dict(num_warps=4, vgprs=128, lds_bytes=64 * 1024 + 1), 2, "LDS"),
        ("gfx942", dict(num_warps=2, vgprs=32), 16, "waves and barriers"),
        ("gfx942", dict(num_warps=1, vgprs=32), 32, "waves"),
        ("gfx942", dict(num_warps=16, vgprs=256), 0, "registers"),
        ("gfx1151", dict(num_warps=4, vgprs=192, wgp_mode=True), 4, "registers"),
        ("gfx1151", dict(num_warps=4, vgprs=193, wgp_mode=True), 3.5, "registers"),
        ("gfx1151", dict(num_warps=4, vgprs=193), 3, "registers"),
        ("gfx1151", dict(num_warps=4, vgprs=96, lds_bytes=16 * 1024, wgp_mode=True), 4, "LDS"),
        ("gfx1151", dict(num_warps=4, vgprs=96, lds_bytes=24 * 1024, wgp_mode=True), 2.5, "LDS"),
        ("gfx1151", dict(num_warps=4, vgprs=96, lds_bytes=65 * 1024, wgp_mode=True), 0, "LDS"),
        ("gfx1151", dict(num_warps=4, vgprs=264, wgp_mode=True), 0, "registers"),
    ],
)
def test_occupancy(arch, asked, groups, limiter):
    found = isa.occupancy(arch, **asked)
    assert found.workgroups_per_cu == groups
    assert found.limiter == limiter
    assert ("fit" in found.reason) == (groups == 0)
    simds = architectures.facts(arch).simds_per_cu
    assert found.waves_per_simd == groups * asked["num_warps"] / simds


@pytest.mark.parametrize("arch", architectures.KNOWN)
@pytest.mark.parametrize("make", [matmul_report, softmax_report])
def test_occupancy_by_registers_is_the_compilers(arch, make):
    report = make(arch)
    # The compiler knows nothing of the LDS asked for at launch.
    ours = isa.occupancy(
        arch,
        num_warps=report.num_warps,
        vgprs=report.vgprs,
        sgprs=report.sgprs,
        wgp_mode=not arch.startswith("gfx9"),
    )
    theirs = re.search(r"^; Occupancy: (\d+)", report.kernel.amdgcn, re.MULTILINE)
    assert ours.waves_per_simd == int(theirs[1])


# ---------------------------------------------------------------------- real kernels


@pytest.mark.parametrize("arch", architectures.KNOWN)
def test_matmul_report(arch):
    r = matmul_report(arch)
    assert (r.name, r.arch, r.grid, r.num_warps, r.num_stages) == ("small_matmul", arch, (2, 2, 1), 4, 1)
    assert 0 < r.vgprs <= architectures.facts(arch).vgprs_per_wave
    assert r.sgprs > 0
    assert (r.agprs, r.spilled_vgprs, r.spilled_sgprs, r.scratch_bytes) == (0, 0, 0, 0)
    assert r.lds_bytes >= 64 * 32 * 2
    assert r.occupancy.workgroups_per_cu >= 1
    (loop,) = [loop for loop in r.inner_loops if loop.counts["matrix"]]
    prefix = "v_mfma_f32_" if arch.startswith("gfx9") else "v_wmma_f32_16x16x16_f16"
    assert all(kind.startswith(prefix) for kind in loop.matrix_kinds)
    assert sum(loop.matrix_kinds.values()) == loop.counts["matrix"]
    assert loop.counts["lds"] and loop.counts["global"] and not loop.counts["scratch"]
    assert loop.instructions == sum(loop.counts.values()) > loop.counts["matrix"]
    assert r.counts["matrix"] >= loop.counts["matrix"]
    assert sum(r.counts.values()) > loop.instructions
    assert r.scratch_in_loops == 0


@pytest.mark.parametrize("arch", architectures.KNOWN)
def test_softmax_report(arch):
    r = softmax_report(arch)
    assert (r.name, r.grid, r.num_warps) == ("small_softmax", (4, 1, 1), 2)
    assert r.matrix_kinds == {} and r.counts["matrix"] == 0
    # exp, for 4 x 256 elements on 2 waves.
    assert r.counts["transcendental"] >= 4 * 256 // (2 * architectures.facts(arch).wave_size)
    assert r.loops == ()


def loops_by_the_compilers_comments(text):
    """{label: depth} as LLVM annotates its own loops, on the line of the label or below it."""
    found, label = {}, None
    for line in text.splitlines():
        label = (re.match(r"(\.LBB\w+):", line) or [None, label])[1]
        depth = re.search(r"Loop Header: Depth=(\d+)", line)
        if depth:
            found[label] = int(depth[1])
    return found


@pytest.mark.parametrize("arch", architectures.KNOWN)
def test_loops_are_those_the_compiler_tells_of(arch):
    (report,) = isa.compile_for(nested, shape(4, dtype="int32"), shape(4, 128, dtype="float32"), arch=arch)
    for r in (report, matmul_report(arch), softmax_report(arch)):
        assert {loop.label: loop.depth for loop in r.loops} == loops_by_the_compilers_comments(r.kernel.amdgcn)
    assert max(loop.depth for loop in report.loops) == 2
    for loop in report.loops:
        assert loop.innermost == (loop.depth == 2)
        assert loop.counts["vector"] > 0
        # The rows of x are loaded in the outer loop only.
        assert bool(loop.counts["global"]) == (loop.depth == 1)


def test_spills_are_seen():
    a, b = shape(256, 512), shape(512, 256)
    (r,) = isa.compile_for(matmul, a, b, arch="gfx1201", tile=128, num_warps=2)
    assert r.vgprs == architectures.facts("gfx1201").vgprs_per_wave
    assert r.spilled_vgprs > 0 and r.scratch_bytes > 0
    assert r.scratch_in_loops > 0
    assert r.counts["scratch"] >= r.scratch_in_loops


@pytest.mark.parametrize("arch", architectures.KNOWN)
def test_matrix_instructions_are_made_from_the_dot(arch):
    r = matmul_report(arch)
    lines = r.kernel.call.ttir.splitlines()
    made_from = {i.source for loop in r.loops for i in loop.code if i.opcode.startswith(("v_mfma", "v_wmma"))}
    assert made_from == {n for n, line in enumerate(lines, 1) if "tt.dot" in line} != set()
    assert r.faults == ()


def rewritten(r, pattern, replacement):
    """The report of the same kernel with its machine code changed."""
    text, n = re.subn(pattern, replacement, r.kernel.amdgcn)
    assert n > 0
    return isa.report(dataclasses.replace(r.kernel, amdgcn=text))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
def test_a_product_without_matrix_instructions_is_a_fault(arch):
    r = rewritten(matmul_report(arch), r"v_(mfma|wmma)\w+", "v_fma_f32")
    (loop,) = [loop for loop in r.loops if any(i.opcode == "v_fma_f32" for i in loop.code)]
    (fault,) = r.faults
    assert re.fullmatch(
        rf"loop {re.escape(loop.label)}: no matrix instruction for the product of 64x32 and 32x64 f16 "
        r"\(line \d+ of the Triton IR\)",
        fault,
    )


@pytest.mark.parametrize(("arch", "matrix"), [("gfx942", True), ("gfx1151", False), ("gfx1201", False)])
def test_fp32_products_need_matrix_instructions_where_the_chip_has_them(arch, matrix):
    shapes = shape(64, 256, dtype="float32"), shape(256, 64, dtype="float32")
    (r,) = isa.compile_for(matmul, *shapes, arch=arch, step=16)
    assert r.faults == ()
    assert bool(r.counts["matrix"]) == architectures.facts(arch).fp32_matrix == matrix


def test_spills_in_loops_are_a_fault():
    r = matmul_report("gfx942")
    spilling = rewritten(r, r"(\tv_mfma)", r"\tscratch_load_dword v0, off, off\n\1")
    (fault,) = spilling.faults
    label = spilling.inner_loops[0].label
    assert fault == (
        f"loop {label}: {spilling.scratch_in_loops} instructions touch scratch memory "
        "(0 vector registers spilled, 0 B of scratch a lane)"
    )


def test_what_does_not_fit_is_a_fault():
    r = isa.report(dataclasses.replace(matmul_report("gfx942").kernel, lds_bytes=64 * 1024 + 1))
    assert r.faults == (r.occupancy.reason,)
    assert r.faults[0].startswith("does not fit: 65,537 B of LDS asked")


def test_report_as_json():
    r = matmul_report("gfx942")
    read = json.loads(json.dumps(r.as_dict()))
    fields = {f.name for f in dataclasses.fields(r)} - {"kernel"}
    assert set(read) == fields | {"faults"}
    assert read["faults"] == []
    assert "code" not in read["loops"][0]
    assert read["vgprs"] == r.vgprs
    assert read["occupancy"]["reason"] == r.occupancy.reason
    assert [loop["label"] for loop in read["loops"]] == [loop.label for loop in r.loops]
    assert read["loops"][0]["instructions_per_matrix"] == r.loops[0].instructions_per_matrix


# ---------------------------------------------------------------------- lowering


def test_kernels_in_loops_and_branches_are_found_in_order():
    def model(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: softmax(x), x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: softmax(x, rows=8), jnp.sin, x)

    lowered = isa.lower_rocm(model, shape(16, 256, dtype="float32"), arch="gfx942")
    assert [call.grid for call in isa.triton_calls(lowered)] == [(4, 1, 1), (2, 1, 1)]


def test_equal_kernels_are_reported_once():
    reports = isa.compile_for(lambda x: softmax(softmax(x)), shape(16, 256, dtype="float32"), arch="gfx1151")
    assert [r.name for r in reports] == ["small_softmax"]


def test_branch_for_rocm_is_taken():
    def f(x):
        return jax.lax.platform_dependent(x, rocm=softmax, cuda=functools.partial(softmax, rows=8), default=jnp.sin)

    (call,) = isa.triton_calls(isa.lower_rocm(f, shape(16, 256, dtype="float32"), arch="gfx942"))
    assert call.grid == (4, 1, 1)


@jax.jit
def softmax_by_architecture(x):
    return softmax(x, rows=architectures.xcds(architectures.current_arch()))


def test_a_cached_trace_of_another_architecture_is_not_used():
    found = [
        isa.triton_calls(isa.lower_rocm(softmax_by_architecture, shape(16, 256, dtype="float32"), arch=arch))[0].grid
        for arch in ("gfx942", "gfx1151", "gfx942")
    ]
    assert found == [(2, 1, 1), (16, 1, 1), (2, 1, 1)]


def test_arrays_are_traced_and_other_keywords_are_static():
    @functools.partial(jax.jit, static_argnames=("rows", "option"))
    def f(x, *, bias, rows, option=None):
        assert option is None and isinstance(rows, int)
        return softmax(x + bias["b"], rows=rows)

    # Concrete arrays stand for their shapes.
    x, bias = jnp.zeros((16, 256)), {"b": jnp.zeros((256,))}
    (call,) = isa.triton_calls(isa.lower_rocm(f, x, arch="gfx942", bias=bias, rows=8, option=None))
    assert call.grid == (2, 1, 1)


def test_a_kernel_compiled_before_is_found_in_tritons_cache():
    """The cache's key is the kernel's text, which must not hold the name of a folder made for one call."""
    (call,) = isa.triton_calls(isa.lower_rocm(softmax, shape(16, 256, dtype="float32"), arch="gfx942"))
    first, second = (isa.compile_call(call, "gfx942") for _ in range(2))
    assert first == second
    assert '.file\t1 "kernel.ttir"' in first.amdgcn


def test_lowering_is_silent_where_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isa.compile_for(softmax, shape(16, 256, dtype="float32"), arch="gfx942")


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("arch", ["gfx90a", "sm_90", "MI300X"])
def test_unknown_architecture(arch):
    x = shape(16, 256, dtype="float32")
    with pytest.raises(ValueError, match="known architectures are gfx942, gfx950, gfx1100, gfx1151, gfx1201"):
        isa.compile_for(softmax, x, arch=arch)
    (call,) = isa.triton_calls(isa.lower_rocm(softmax, x, arch="gfx942"))
    with pytest.raises(ValueError, match=repr(arch)):
        isa.compile_call(call, arch)
    with pytest.raises(ValueError, match=repr(arch)):
        isa.occupancy(arch, num_warps=4, vgprs=64)


def plain_function(x):
    return jnp.sin(x)


def test_function_without_pallas_kernels():
    with pytest.raises(isa.NoPallasKernel, match=r"plain_function has no Pallas kernel .* ROCm \(gfx942\)"):
        isa.compile_for(plain_function, shape(4, 4), arch="gfx942")


def nonsense_body(x_ref, o_ref):
    (o_ref[...],) = plgpu.elementwise_inline_asm(
        "v_nonsense_f32 $0, $1",
        args=[x_ref[...]],
        constraints="=v,v",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x_ref.shape, x_ref.dtype)],
    )


def test_kernel_that_does_not_compile():
    def f(x):
        return pl.pallas_call(
            nonsense_body,
            out_shape=x,
            compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
            name="nonsense",
        )(x)

    with pytest.raises(isa.CompileError) as error:
        isa.compile_for(f, shape(16, 16, dtype="float32"), arch="gfx1151")
    for part in ("'nonsense'", "num_warps 2", "num_stages 1", "gfx1151", "v_nonsense_f32"):
        assert part in str(error.value)


def test_triton_is_not_installed(monkeypatch):
    # None in sys.modules makes `import` raise, as for a module that is not there.
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r'pip install "pallas-rocm-kernels\[isa\]"'):
        isa.compile_for(softmax, shape(16, 256, dtype="float32"), arch="gfx942")
    # Lowering needs no triton.
    assert isa.triton_calls(isa.lower_rocm(softmax, shape(16, 256, dtype="float32"), arch="gfx942"))
