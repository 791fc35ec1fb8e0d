"""`python -m benchmarks --isa`: what the rows for AMD chips compile to, beside the timings."""

import json
import sys

from benchmarks import __main__ as command
from benchmarks import table
from gated_delta import tuning
from references import cases

SMALL = cases.GATED_DELTA_SMALL[0]


def gfx950_only(monkeypatch):
    rows = [row for row in tuning.ROWS if row.architecture in ("gfx950", "sm_90")]
    monkeypatch.setattr(tuning, "ROWS", rows)
    return {2: ["float16", "bfloat16"], 4: ["float32"]}


def test_amd_rows_beside_the_timings(monkeypatch, capsys, tmp_path):
    dtypes = gfx950_only(monkeypatch)
    path = tmp_path / "static.json"
    assert command.main(["gated_delta", "--case", SMALL.name, "--isa", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(path.read_text())["static"]
    assert [(one["architecture"], one["dtype"]) for one in document] == [
        ("gfx950", dtype) for dtype in (*dtypes[2], *dtypes[4])
    ]
    # Under the table of the cases, one line a row, each saying what it is.
    lines = printed[printed.index("AMD row of gated_delta") :].splitlines()[2:]
    for one, line in zip(document, lines, strict=False):
        assert one["kernels"] == [f"gated_delta_{name}" for name in ("locals", "blocks", "solve", "scan", "outputs")]
        assert one["note"] == "static, compiled for gfx950, not a timing"
        assert line.startswith("gfx950, C ") and line.endswith(one["note"])
        for figures in (one["vgprs"], one["spilled"], one["lds_bytes"], one["workgroups_per_cu"]):
            assert len(figures) == len(one["kernels"])
            assert " / ".join(f"{figure:g}" for figure in figures) in line
        assert table.number(one["scan_ratio"]) in line
        assert min(one["vgprs"]) > 0 and one["scan_ratio"] > 1 and one["faults"] == []


def test_amd_rows_without_triton(monkeypatch, capsys):
    gfx950_only(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert command.main(["gated_delta", "--case", SMALL.name, "--isa"]) == 1
    assert "skipped: AMD machine code needs the Triton compiler" in capsys.readouterr().out
