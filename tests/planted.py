"""Modules with a fault in them: a test that is worth something fails on each."""

import types
from pathlib import Path


def broken(module: types.ModuleType, *edits: tuple[str, str]) -> types.ModuleType:
    """A module with pieces of its source replaced; each piece stands there exactly once."""
    source = Path(module.__file__).read_text()
    for right, wrong in edits:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    found = types.ModuleType(f"broken_{module.__name__}")
    exec(compile(source, found.__name__, "exec"), found.__dict__)
    return found
