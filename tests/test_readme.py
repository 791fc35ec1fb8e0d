"""README.md is true: its commands, its examples, and everything that it names."""

import importlib
import operator
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import references.flash
import references.gqa
from amdgpu import isa
from references import accuracy

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(heading: str) -> str:
    """The text under a heading of level 2 or 3, up to the next of them."""
    match = re.search(rf"^###? {re.escape(heading)}\n(.*?)(?=^###? |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match, f"no section {heading!r}"
    return match[1]


def blocks(heading: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the section's table, without its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def find(module: str, name: str):
    """The object `name` of a module; a field without a default is found in its dataclass."""
    *path, last = name.split(".")
    owner = importlib.import_module(module)
    if path:
        owner = operator.attrgetter(".".join(path))(owner)
    fields = getattr(owner, "__dataclass_fields__", {})
    return fields[last] if last in fields else getattr(owner, last)


# The commands


def test_ci_runs_the_command_for_the_tests():
    main_job, tests = blocks("Two commands", "sh")
    assert main_job.strip().endswith("-m benchmarks") and "-m pytest" in tests
    # Both install the same.
    assert main_job.split(" && ")[:-1] == tests.split(" && ")[:-1]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == tests.strip()


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r'"\.\[([\w,]+)\]"', README) for name in group.split(",")}
    assert {"test", "cuda", "rocm", "isa", "dev"} <= named <= extras.keys()


def test_sections_that_other_files_name_exist():
    named = re.findall(r'see "(.*?)" in README\.md', (ROOT / "pyproject.toml").read_text())
    assert named
    for heading in (*named, *re.findall(r'see "(.*?)"', README)):
        assert section(heading)


# The examples


def test_the_example_decodes_what_the_prompt_left():
    found = {}
    exec(blocks("Example", "python")[0], found)
    names = ("q", "k", "v", "g", "beta")
    arguments = dict(zip(names, found["inputs"], strict=True)) | {"use_qk_l2norm_in_kernel": True}
    truth = accuracy.gated_delta_truth(arguments)
    o = jnp.concatenate([found["prompt"], found["token"]], axis=1)
    errors = accuracy.gated_delta_errors((o, found["state"]), truth)
    assert max(errors) < 4e-3
    assert accuracy.relative_l2(found["token"], truth[0][:, -1:]) < 4e-3


def test_the_attention_example():
    found = {}
    exec(blocks("Example", "python")[1], found)
    q, k, v = (np.asarray(found[name]).astype(np.float32) for name in ("q", "k_new", "v_new"))
    seen = references.gqa.dense(q, k, v, window=2, sinks=jnp.zeros(found["H"]))
    assert accuracy.relative_l2(found["o"], seen) < 4e-3
    assert accuracy.relative_l2(found["causal"], references.flash.dense(q, k, v, causal=True)) < 4e-3
    for cache, new in ((found["cache_k"], k), (found["cache_v"], v)):
        assert np.array_equal(np.asarray(cache[:, : found["T"]]).astype(np.float32), new)


def test_a_kernel_of_ones_own(tmp_path):
    (code,) = blocks("AMD without an AMD GPU", "python")
    (printed,) = blocks("AMD without an AMD GPU", "text")
    (tmp_path / "my_kernels.py").write_text(code)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    # A script and no link: Python would take a link for an environment of its own.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    _, *commands = blocks("AMD without an AMD GPU", "sh")
    run = [
        subprocess.run(c, shell=True, cwd=tmp_path, env=environment, check=True, text=True, capture_output=True).stdout
        for c in commands
    ]
    for text in run:
        # The numbers are the compiler's affair, the columns and the kernel are ours.
        assert [line.split() for line in printed.splitlines()[:2]] == [
            line.split() for line in text.splitlines() if line.startswith(("gfx942", "  kernel "))
        ][:2]
        assert re.findall(r"^  softmax +4x1x1 +4 ", text, re.MULTILINE) == ["  softmax  4x1x1      4 "] * 2
    assert re.findall(r"^  equal +(\w+)", run[1], re.MULTILINE) == ["gfx942", "gfx1151"]


# What it names


@pytest.mark.parametrize(("function", "reference"), [row[:2] for row in rows("Functions")])
def test_functions_exist(function, reference):
    for span in (function, reference):
        (name,) = spans(span)
        assert callable(find(*name.rsplit(".", 1)))


def test_every_public_function_is_listed():
    listed = {spans(row[0])[0] for row in rows("Functions")} | {"gated_delta.prefill_scratch_bytes"}
    for package in ("gated_delta", "flash", "gqa"):
        module = importlib.import_module(package)
        public = {f"{package}.{name}" for name in module.__all__ if not isinstance(getattr(module, name), type)}
        assert public <= listed


@pytest.mark.parametrize(("what", "file", "names"), rows("Where is ...?"))
def test_places_exist(what, file, names):
    (path,) = spans(file)
    assert (ROOT / path).is_file(), what
    module = ".".join(pathlib.Path(path).with_suffix("").parts)
    for name in spans(names):
        find(module, name)


def test_files_that_the_text_names_exist():
    named = re.findall(r"`((?:\.ci|tests|references|benchmarks|amdgpu)/[\w./]*|\w+\.md)`", README)
    assert len(set(named)) > 5
    for name in named:
        assert (ROOT / name).exists(), name


def shapes(function: str) -> dict:
    """Arguments of a small call."""

    def heads(n):
        return jax.ShapeDtypeStruct((1, 32, n, 16), "float16")

    if function.startswith("gated_delta"):
        gate = jax.ShapeDtypeStruct((1, 32, 2), "float32")
        return {"q": heads(1), "k": heads(1), "v": heads(2), "g": gate, "beta": gate}
    if function == "gqa.append_kv":
        past = jax.ShapeDtypeStruct((), "int32")
        return {"cache_k": heads(1), "cache_v": heads(1), "k_new": heads(1), "v_new": heads(1), "past": past}
    names = ("query", "key", "value") if function == "flash.dot_product_attention" else ("q", "k", "v")
    return dict(zip(names, (heads(2), heads(1), heads(1)), strict=True))


@pytest.mark.parametrize(("function", "rocm", "cuda", "cpu"), rows("What runs where")[:-1])
def test_what_runs_where(function, rocm, cuda, cpu):
    (name,) = spans(function)
    fn = find(*name.rsplit(".", 1))
    lowered = isa.lower_rocm(fn, **shapes(name), arch="gfx942")
    assert rocm == cuda == ("Pallas" if isa.triton_calls(lowered) else "reference")
    assert cpu == "reference"
