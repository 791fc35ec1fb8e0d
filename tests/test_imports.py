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
PALLAS_FILES = ("kernel.py", "decode.py", "prefill.py", "grid.py", "tiles.py", "inverse.py")

# What each package imports besides itself, the standard library, jax and numpy; a name stands for what is below it too.
ALLOWED = {
    "references": (),
    "gated_delta": ("amdgpu.arch", "amdgpu.launch"),
    "flash": ("amdgpu.arch", "amdgpu.launch"),
    "gqa": ("amdgpu.arch", "amdgpu.launch", "flash.arguments", "flash.grid", "flash.kernel", "flash.tuning"),
    # jaxlib and triton: the compilers that it drives.
    "amdgpu": ("jaxlib", "triton"),
}
# What single files may import beyond that. The last two serve the command, which shows and checks the shipped kernels.
ALSO = {
    "gated_delta/api.py": ("references.gated_delta",),
    "flash/api.py": ("references.flash",),
    "gqa/api.py": ("references.gqa",),
    "gqa/onnx.py": ("references.gqa",),
    "amdgpu/check.py": ("references",),
    "amdgpu/shipped.py": ("references", "gated_delta", "flash", "gqa"),
}


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere, and `a.b` of `from a import b`, be b a module or a name in one."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports(path):
    package, names = path.parts[0], imported(path)
    allowed = ("jax", "numpy", package, *ALLOWED[package], *ALSO.get(path.as_posix(), ()))
    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert not [name for name in others if not f"{name}.".startswith(tuple(f"{a}." for a in allowed))]
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
