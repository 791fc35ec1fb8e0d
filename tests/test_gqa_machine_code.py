"""The kernels of grouped-query attention as AMD machine code, run on the CPU, against float64."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from attention_truth import assert_close, fp32_bound, gqa_rows

import gqa
from amdgpu import emulate, shipped
from amdgpu.check import run_check
from gqa import Config, tuning
from gqa.onnx import group_query_attention
from references import accuracy
from references import gqa as reference
from references.cases import GqaCase, inputs

ours = partial(gqa.grouped_query_attention, implementation="pallas")

# Tiles of 16 keys, of which several are masked, free and hidden; ragged rows and keys.
PREFILL = Config(32, 16, 2)
# Three blocks of 32 keys.
ROWS = Config(16, 16, 2, block_keys=32)
SPLIT = ["gqa_rows_split", "gqa_rows_merge"]

CASES = [
    (
        GqaCase("prompt fp16", "", 1, 70, 70, 2, 1, 32, 32, "float16", sinks="uniform"),
        PREFILL,
        ["gqa_prefill"],
    ),
    (
        GqaCase("chunk bf16", "", 1, 66, 90, 1, 1, 16, 48, "bfloat16", past=(20,), lengths=(65,), window=33),
        PREFILL,
        ["gqa_prefill_window"],
    ),
    (
        GqaCase("biased fp32", "", 1, 66, 70, 1, 1, 16, 16, past=0, bias="full", softcap=5.0, sinks="uniform"),
        PREFILL,
        ["gqa_prefill"],
    ),
    (
        GqaCase("step fp16", "", 2, 1, 90, 6, 2, 24, 40, "float16", past=(70, 5), sinks="uniform", poison=True),
        ROWS,
        SPLIT,
    ),
    (
        GqaCase("rows bf16", "", 1, 4, 90, 3, 1, 32, 16, "bfloat16", lengths=(3,), past=(80,), sinks="uniform"),
        ROWS,
        SPLIT,
    ),
    (
        GqaCase("window of rows", "", 1, 3, 90, 2, 1, 16, 16, "float32", "float16", window=20, sinks="uniform"),
        ROWS,
        ["gqa_rows_window"],
    ),
    (
        GqaCase("biased rows", "", 1, 3, 60, 2, 1, 16, 16, "float16", bias="full", softcap=5.0),
        Config(16, 16, 2),
        ["gqa_rows"],
    ),
]


def each(cases):
    return pytest.mark.parametrize("case, config, names", cases, ids=[str(case) for case, _, _ in cases])


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
@each(CASES)
def test_machine_code_equals_float64(arch, case, config, names):
    arguments = inputs(case)
    o64, lse64 = gqa_rows(**arguments)
    low = reference.dense(**arguments)
    with emulate(arch) as ran:
        o, lse = jax.tree.map(np.asarray, ours(**arguments, config=config, return_lse=True))
    assert [run.name for run in ran] == names
    assert_close(o, o64, accuracy.attention_bound(o64, low, case.dtype))
    assert_close(lse, lse64, fp32_bound(lse64))


@pytest.mark.parametrize("arch", ["gfx950", "gfx1100", "gfx1201"])
@each(CASES[1:6:2])
def test_other_chips(arch, case, config, names):
    test_machine_code_equals_float64(arch, case, config, names)


# `python -m amdgpu gqa --run` runs every row and dtype.
CHECKS = [
    check
    for check in shipped.checks("gqa", ("gfx942", "gfx950", "gfx1151"))
    if re.match(r"grouped_query_attention (float16 .*K=V=128|bfloat16 .*K=V=64|float32 prefill .*K=V=128)$", check.name)
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.arch} {check.name}")
def test_shipped_rows(check):
    result = run_check(check)
    _, dtype, kernel = check.name.split()[:3]
    size = int(check.name.rpartition("=")[2])
    fixed = tuning.default_config(check.arch, 2, size, size, kernel).fixed_maximum and dtype == "bfloat16"
    prefill = (f"gqa_{kernel}", "gqa_lost_blocks") if fixed else (f"gqa_{kernel}",)
    assert result.kernels == (tuple(SPLIT) if kernel == "rows" else prefill)
    assert result.errors.keys() == {"o", "lse"}
    for part, (error, bound) in result.errors.items():
        assert error <= bound, part


@pytest.mark.parametrize("arch", ["gfx942", "gfx1151"])
@pytest.mark.parametrize("T", [1, 40])
def test_heads_first_caches(arch, T):
    """A node of an ONNX graph: the cache `[B, G, S, size]` is read as it is."""
    B, G, r, K, past = 2, 2, 2, 16, 9
    case = GqaCase("node", "", B, T, past + T, r * G, G, K, K, sinks="uniform")
    a = inputs(case)
    flat = {name: a[name].reshape(B, past + T, -1)[:, past:] for name in "kv"}
    with emulate(arch) as ran:
        output, *_ = group_query_attention(
            a["q"].reshape(B, T, -1),
            flat["k"],
            flat["v"],
            *(np.swapaxes(np.asarray(a[name])[:, :past], 1, 2) for name in "kv"),
            seqlens_k=np.full(B, past + T - 1, np.int32),
            total_sequence_length=past + T,
            head_sink=a["sinks"],
            num_heads=r * G,
            kv_num_heads=G,
            implementation="pallas",
        )
        output = np.asarray(output)
    assert [run.name for run in ran] == ["gqa_rows" if T == 1 else "gqa_prefill"]
    o64, _ = gqa_rows(**a)
    assert_close(output.reshape(o64.shape), o64, fp32_bound(o64))
