"""`python -m amdgpu`: arguments, tables, JSON, files, exit status."""

import contextlib
import dataclasses
import functools
import importlib
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amdgpu
from amdgpu import arch as architectures
from amdgpu import check, isa, shipped
from amdgpu.__main__ import find_function, main, parse_shapes, parse_static
from amdgpu.emulator import emulate

OWN = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def add_body(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def matmul_body(x_ref, y_ref, o_ref):
    o_ref[...] = plgpu.dot(x_ref[...], y_ref[...]).astype(o_ref.dtype)


def own(body, x, y, num_warps):
    parameters = plgpu.CompilerParams(num_warps=num_warps, num_stages=1)
    out = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(body, out_shape=out, compiler_params=parameters, name=body.__name__)(x, y)


@jax.jit
def add(x, y):
    return own(add_body, x, y, 2)


def add_and_multiply(x, y, *, num_warps=4, last="none"):
    assert last in ("none", "rows")
    return own(matmul_body, own(add_body, x, y, num_warps), y, num_warps)


def multiply(x, y):
    return own(matmul_body, x, y, 8)


def plain(x, y):
    return x + y


def twice(x, y):
    return x + 2 * y


def product(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_kernels.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_kernels", None)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16[1,4096,32,128]", [((1, 4096, 32, 128), "bfloat16")]),
        ("f32[] fp16[3]", [((), "float32"), ((3,), "float16")]),
        ("i32[2, 3]  u8[4]", [((2, 3), "int32"), ((4,), "uint8")]),
        ("float8_e4m3fn[8] bool[1]", [((8,), "float8_e4m3fn"), ((1,), "bool")]),
        ("none int32[0]", [None, ((0,), "int32")]),
        ("", []),
    ],
)
def test_shapes(text, expected):
    found = [None if s is None else (s.shape, s.dtype.name) for s in parse_shapes(text)]
    assert found == expected


@pytest.mark.parametrize(
    "text", ["bf16", "bf16[1,", "bf16[1,,2]", "[1,2]", "bf16[a]", "bf16(1,2)", "f99[1]", "bf16[-1]"]
)
def test_shapes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="shapes: ") as error:
        parse_shapes(f"f32[2] {text}")
    assert text[:4] in str(error.value)


def test_static():
    words = ["causal=True", "scale=0.5", "window=None", "name=rows", "size=(1, 2)", "url=a=b"]
    expected = {"causal": True, "scale": 0.5, "window": None, "name": "rows", "size": (1, 2), "url": "a=b"}
    assert parse_static(words) == expected
    for word in ("causal", "=3", "2x=1"):
        with pytest.raises(ValueError, match="expected name=value"):
            parse_static([word])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("own_kernels:nothing", "nothing"),
        ("own_kernels:number", "no function"),
    ],
)
def test_functions_that_do_not_exist(name, message):
    with pytest.raises(ValueError, match=message):
        find_function(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nonsense"],
            "target: got 'nonsense', expected one of gated_delta, flash, gqa, all, or module:function",
        ),
        (["flash", "--arch", "gfx90a"], "gfx942, gfx950, gfx1100, gfx1151, gfx1201"),
        (["flash", "--shapes", "f32[2]"], "--shapes"),
        (["own_kernels:add", "--shapes", "f32[2"], "'f32[2'"),
        (["own_kernels:nothing"], "nothing"),
        (["own_kernels:add", "--shapes", "f32[2]", "f32[2]", "--run"], "--reference"),
        ([], "target"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_triton_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit) as error:
        main(["own_kernels:add", "--shapes", "f32[64,64] f32[64,64]"])
    assert error.value.code == 2
    assert 'pip install "pallas-rocm-kernels[isa]"' in capsys.readouterr().err


# ---------------------------------------------------------------------- output

MULTIPLY = ["own_kernels:add_and_multiply", "--shapes", "bf16[64,64]", "bf16[64,64]"]


def rows_after(text, head, second):
    """The rows of each table whose first two columns are called so, as dictionaries of their first words."""
    tables, lines = [], iter(text.splitlines())
    for line in lines:
        if line.split()[:2] == [head, second]:
            rows = []
            for row in lines:
                if not row.strip():
                    break
                rows.append(dict(zip(line.split(), row.split(), strict=False)))
            tables.append(rows)
    return tables


def test_table_of_ones_own_function(capsys):
    assert main([*MULTIPLY, "--static", "num_warps=2", "last=rows", "--arch", "gfx942", "gfx1151"]) == 0
    out = capsys.readouterr().out
    assert "not a timing" in out
    tables = rows_after(out, "kernel", "grid")
    assert [[row["kernel"] for row in rows] for rows in tables] == [["add_body", "matmul_body"]] * 2
    for rows, arch in zip(tables, ("gfx942", "gfx1151"), strict=True):
        assert f"\n{arch}  own_kernels:add_and_multiply  bf16[64,64] bf16[64,64] num_warps=2 last" in out
        for row in rows:
            assert (row["grid"], row["warps"], row["spilled"]) == ("1x1x1", "2", "0")
            assert 0 < int(row["VGPR"]) <= architectures.facts(arch).vgprs_per_wave
    # The limiter in words, with the numbers, and per what.
    limits = re.findall(r"(registers|LDS|waves|barriers).*: .* (\d+) a (CU|WGP)\n", out)
    assert [unit for *_, unit in limits] == ["CU", "CU", "WGP", "WGP"]


def test_all_architectures_by_default(capsys):
    assert main(["own_kernels:add", "--shapes", "f32[64,64] f32[64,64]"]) == 0
    out = capsys.readouterr().out
    for arch in architectures.KNOWN:
        assert f"\n{arch}  own_kernels:add" in out


def test_json_file_and_machine_code(tmp_path, capsys):
    file, folder = tmp_path / "evidence.json", tmp_path / "code"
    assert main([*MULTIPLY, "--arch", "gfx950", "--json", str(file), "--asm", str(folder)]) == 0
    document = json.loads(file.read_text())
    assert document["jax"] == jax.__version__
    (result,) = document["results"]
    assert (result["arch"], result["target"]) == ("gfx950", "own_kernels:add_and_multiply")
    add, multiply = result["kernels"]
    # The table and the JSON say the same.
    ((_, row),) = rows_after(capsys.readouterr().out, "kernel", "grid")
    assert (row["kernel"], int(row["VGPR"]), int(row["SGPR"])) == (
        multiply["name"],
        multiply["vgprs"],
        multiply["sgprs"],
    )
    assert add["matrix_kinds"] == {} and sum(multiply["matrix_kinds"].values()) == multiply["counts"]["matrix"] > 0
    code = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.is_file())
    stem = "gfx950_own_kernels_add_and_multiply"
    assert code == [
        f"{stem}/{name}" for name in ("0_add_body.s", "0_add_body.ttir", "1_matmul_body.s", "1_matmul_body.ttir")
    ]
    assert "v_mfma_f32" in (folder / stem / "1_matmul_body.s").read_text()
    assert "tt.dot" in (folder / stem / "1_matmul_body.ttir").read_text()


def test_json_alone_on_stdout(capsys):
    assert main([*MULTIPLY, "--arch", "gfx1201", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [kernel["name"] for kernel in document["results"][0]["kernels"]] == ["add_body", "matmul_body"]


def test_function_without_kernels(capsys):
    assert main(["own_kernels:plain", "--shapes", "f32[4] f32[4]", "--arch", "gfx942"]) == 1
    assert "plain has no Pallas kernel" in capsys.readouterr().out


def test_kernel_that_does_not_fit(capsys):
    # Its operands go through LDS whole: 2 bytes x 128 x 512 of each.
    assert main(["own_kernels:multiply", "--shapes", "bf16[128,512] bf16[512,128]", "--arch", "gfx942"]) == 1
    assert "LDS: does not fit: 131,072 B of LDS asked, a workgroup may have 65,536" in capsys.readouterr().out


def test_faults_are_told_and_fail_the_command(capsys, monkeypatch):
    compile_call = isa.compile_call

    def spill(call, arch):
        kernel = compile_call(call, arch)
        text = "kernel:\n.LBB0_1:\n\tscratch_load_b32 v1, off, off\n\ts_cbranch_scc0 .LBB0_1\n\ts_endpgm\n"
        begin = kernel.amdgcn.index("\t.amdgpu_metadata")
        return dataclasses.replace(kernel, amdgcn=f"{text}.Lfunc_end0:\n{kernel.amdgcn[begin:]}")

    monkeypatch.setattr(isa, "compile_call", spill)
    add = ["own_kernels:add", "--shapes", "f32[64,64] f32[64,64]", "--arch", "gfx1100"]
    assert main(add) == 1
    assert "FAULT  add_body: loop .LBB0_1: 1 instructions touch scratch memory" in capsys.readouterr().out
    assert main([*add, "--json"]) == 1
    ((kernel,),) = (result["kernels"] for result in json.loads(capsys.readouterr().out)["results"])
    assert [fault.split(":")[0] for fault in kernel["faults"]] == ["loop .LBB0_1"]


def test_a_row_that_does_not_compile_is_told_and_the_others_go_on(capsys, monkeypatch):
    compile_call = isa.compile_call

    def refuse(call, arch):
        if arch == "gfx950":
            raise isa.CompileError(f"kernel {call.name!r} does not compile for {arch}: no such instruction")
        return compile_call(call, arch)

    monkeypatch.setattr(isa, "compile_call", refuse)
    add = ["own_kernels:add", "--shapes", "f32[64,64] f32[64,64]", "--arch", "gfx942", "gfx950", "gfx1100"]
    assert main(add) == 1
    out = capsys.readouterr().out
    assert "kernel 'add_body' does not compile for gfx950: no such instruction" in out
    assert len(rows_after(out, "kernel", "grid")) == 2


# ---------------------------------------------------------------------- what the package ships


@pytest.mark.parametrize("algorithm", shipped.ALGORITHMS)
def test_every_row_is_compiled_and_checked(algorithm):
    rows = importlib.import_module(f"{algorithm}.tuning").ROWS
    configs = {(row.architecture, str(row.config)) for row in rows if row.architecture.startswith("gfx")}
    works, checks = (ask(algorithm, architectures.KNOWN) for ask in (shipped.works, shipped.checks))
    assert {(work.arch, work.row) for work in works} == configs
    for found in ([(work.arch, work.name) for work in works], [(c.arch, c.name) for c in checks]):
        assert len(set(found)) == len(found)
    assert {c.arch for c in checks} == {arch for arch, _ in configs}


def test_unknown_algorithm():
    for ask in (shipped.works, shipped.checks):
        with pytest.raises(ValueError, match="gated_delta, flash, gqa"):
            ask("mamba", architectures.KNOWN)


def test_gated_delta_rows_of_one_architecture(capsys):
    from gated_delta.tuning import default_config

    assert main(["gated_delta", "--arch", "gfx942", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    expected = {
        f"{fn} {dtype}": str(default_config("gfx942", dtype, 128))
        for fn in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
        for dtype in ("float16", "bfloat16", "float32")
    }
    assert {result["name"]: result["row"] for result in results} == expected
    for result in results:
        kernels = [kernel["name"] for kernel in result["kernels"]]
        if result["name"].startswith("chunk"):
            assert kernels == [f"gated_delta_{name}" for name in ("locals", "blocks", "solve", "scan", "outputs")]
        else:
            assert kernels == ["gated_delta_decode"]
        assert result["reason"]


def test_flash_rows_of_one_architecture(capsys):
    from flash.tuning import default_config

    assert main(["flash", "--arch", "gfx1100", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    expected = {
        f"flash_attention {dtype} K={K} {kind}": str(default_config("gfx1100", dtype, K, K))
        for dtype in ("float16", "bfloat16")
        for K in (64, 128)
        for kind in ("full", "causal", "split")
    }
    assert {result["name"]: result["row"] for result in results} == expected
    for result in results:
        split = result["name"].endswith("split")
        kernels = ["flash_split_forward_kv_group_first", "flash_merge"] if split else ["flash_forward_kv_group_first"]
        assert [kernel["name"] for kernel in result["kernels"]] == kernels
        assert result["reason"]


def test_there_is_a_check_for_each_work():
    works = shipped.works("gated_delta", ("gfx942", "gfx1151"))
    checks = shipped.checks("gated_delta", ("gfx942", "gfx1151"))
    assert len(checks) == len(works)
    for one in works:
        assert any(c.arch == one.arch and c.name.startswith(one.name) for c in checks)


# ---------------------------------------------------------------------- --run


def emulator_that_runs(*kernels):
    @contextlib.contextmanager
    def pretend(arch):
        yield [types.SimpleNamespace(name=name, wave_instructions=n) for name, n in kernels]

    return pretend


@pytest.mark.parametrize(
    ("fn", "kernels", "equal"),
    [
        (lambda x: (x, x + 1), [("a", 10), ("a", 5)], True),
        (lambda x: (x * (1 + 9e-6), x + 1), [("a", 10)], True),
        (lambda x: (x, x + 1.0001), [("a", 10)], False),
        (lambda x: (x, jnp.full_like(x, jnp.nan)), [("a", 10)], False),
        # Right, but nothing ran as machine code.
        (lambda x: (x, x + 1), [], False),
    ],
)
def test_verdict(monkeypatch, fn, kernels, equal):
    monkeypatch.setitem(vars(amdgpu), "emulate", emulator_that_runs(*kernels))
    shapes = (jax.ShapeDtypeStruct((8, 8), "float32"),)
    result = check.run_check(check.own_check("case", "gfx942", fn, lambda x: (x, x + 1), shapes, {}))
    assert result.equal == equal
    assert result.kernels == tuple(name for name, _ in kernels)
    assert result.wave_instructions == sum(n for _, n in kernels)


def test_outputs_of_other_shapes_are_refused(monkeypatch):
    monkeypatch.setitem(vars(amdgpu), "emulate", emulator_that_runs(("a", 1)))
    shapes = (jax.ShapeDtypeStruct((8, 8), "float32"),)
    with pytest.raises(ValueError, match=r"\(8, 8\).*\(8,\)"):
        check.run_check(check.own_check("case", "gfx942", lambda x: x, lambda x: x[0], shapes, {}))


def test_drawn_inputs():
    shapes = tuple(parse_shapes("bf16[3,4] none i32[2] f32[]"))
    first, second = check.draw(shapes), check.draw(shapes)
    assert [x if x is None else (x.shape, x.dtype.name) for x in first] == [
        ((3, 4), "bfloat16"),
        None,
        ((2,), "int32"),
        ((), "float32"),
    ]
    assert np.all(np.asarray(first[2]) == 0) and np.ptp(np.asarray(first[0], np.float32)) > 0.1
    assert all(x is y is None or np.array_equal(x, y) for x, y in zip(first, second, strict=True))


MULTIPLY_64 = ["own_kernels:multiply", "--shapes", "bf16[64,64] bf16[64,64]", "--run"]


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
def test_run_ones_own_function_as_machine_code(arch, tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = [*MULTIPLY_64, "--arch", arch, "--reference", "own_kernels:product", "--json", str(file)]
    assert main(arguments) == 0
    (run,) = json.loads(file.read_text())["runs"]
    assert (run["arch"], run["equal"], run["kernels"]) == (arch, True, ["matmul_body"])
    error, bound = run["errors"]["output 0"]
    assert error <= bound == 1e-2
    assert f"equal      {arch}  own_kernels:multiply" in capsys.readouterr().out


def test_run_against_the_wrong_reference(capsys):
    assert main([*MULTIPLY_64, "--arch", "gfx942", "--reference", "own_kernels:twice"]) == 1
    assert "DIFFERENT  gfx942" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("instruction", "verdict"),
    [(r"(buffer|global)_store", "DIFFERENT"), ("s_barrier", "FAILED"), ("v_mfma", "DIFFERENT")],
)
def test_run_of_broken_machine_code(instruction, verdict, monkeypatch, capsys):
    def broken(program):
        return program.without(program.find(instruction)[0])

    monkeypatch.setitem(vars(amdgpu), "emulate", functools.partial(emulate, transform=broken))
    assert main([*MULTIPLY_64, "--arch", "gfx942", "--reference", "own_kernels:product"]) == 1
    out = capsys.readouterr().out
    assert f"{verdict:<9}  gfx942" in out
    if verdict == "FAILED":
        assert re.search(r"matmul_body, line \d+: .*barrier", out)
