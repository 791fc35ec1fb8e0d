"""What may import what, and that every package is shipped."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("gated_delta", "flash", "gqa", "references", "amdgpu")
FILES = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PALLAS_FILES = ("kernel.py", "decode.py", "grid.py")


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere, `from a import b` as both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports(path):
    names = imported(path)
    roots = {name.split(".")[0] for name in names}
    assert not roots & {"tests", "benchmarks"}
    if path.parts[0] == "references":
        assert roots <= {*sys.stdlib_module_names, "jax", "numpy", "references"}
    if path.name not in PALLAS_FILES and path.parts[:2] != ("amdgpu", "emulator"):
        assert not [name for name in names if "pallas" in name.split(".")]


def test_packages_import_without_the_extras():
    modules = [".".join(path.with_suffix("").parts) for path in FILES if path.name != "__main__.py"]
    code = f"""
import sys
for name in ("chex", "absl", "triton", "matplotlib", "tqdm", "safetensors", "tokenizers", "pytest"):
    sys.modules[name] = None  # importing it raises ImportError
for name in {modules!r}:
    __import__(name.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    # An editable install finds what is not listed, a wheel does not.
    assert set(listed) == {".".join(path.parent.parts) for path in FILES}
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
