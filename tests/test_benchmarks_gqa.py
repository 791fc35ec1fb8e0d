"""`python -m benchmarks gqa`: its cases and arms, the time on the device, the share of a copy."""

import dataclasses

import numpy as np
import pytest

from benchmarks import candidates, check, results, run, timing, trace
from references import cases

STEP = cases.GqaCase("step", "", 2, 1, 300, 8, 2, 16, 16, sinks="uniform")
REAL = {case.name: case for case in cases.GQA_REAL}


def test_cases_of_the_model():
    """Prompts of 16384 tokens and steps, all with 64 heads on 8 of size 64, and sinks."""
    prompts = {name: REAL[f"gpt_oss_T16384_{name}"] for name in ("window", "full")}
    assert [case.window for case in prompts.values()] == [128, None]
    lengths = {1: (8192, 131072), 16: (2048, 2049, 2560, 4096, 8192, 131072)}
    steps = [REAL[f"gpt_oss_decode_B{B}_{S}"] for B in lengths for S in lengths[B]]
    assert [(case.B, case.S) for case in steps] == [(B, S) for B in lengths for S in lengths[B]]
    for case in (*prompts.values(), *steps):
        assert (case.H, case.G, case.K, case.V, case.dtype, case.sinks) == (64, 8, 64, 64, "bfloat16", "uniform")


@pytest.mark.parametrize(
    "changes, others",
    [
        ({}, True),
        ({"T": 300}, True),
        ({"T": 300, "window": 20}, True),
        # jax.nn aligns its mask and its window at the top left.
        ({"T": 20}, False),
        ({"window": 20}, False),
        ({"softcap": 3.0}, False),
    ],
)
def test_arms(changes, others):
    case = dataclasses.replace(STEP, **changes)
    arms = [arm.name for arm in candidates.candidates(case, cases.inputs(case), gpu=True)]
    assert arms == ["kernel", "reference", *(["jax.nn xla, no sinks", "jax.nn cudnn, no sinks"] if others else [])]


def test_a_step_has_its_time_on_the_device(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**16)
    monkeypatch.setattr(run, "device_seconds", lambda arm: {"kernel": 2e-6}.get(arm.name, 8e-6))
    settings = run.Settings(gpu=True, rounds=2, copy_rate=1e12)
    found = {result.arm: result for result in run.run_case(STEP, settings, timed=True)}
    assert found.keys() == {"kernel", "reference", "jax.nn xla, no sinks", "jax.nn cudnn, no sinks"}
    kernel, xla = found["kernel"], found["jax.nn xla, no sinks"]
    assert (kernel.status, xla.status, found["jax.nn cudnn, no sinks"].status) == ("timed", "timed", "absent")
    moved = cases.bytes_moved(STEP)
    assert (kernel.device, xla.device, found["jax.nn cudnn, no sinks"].device) == (2e-6, 8e-6, None)
    assert kernel.of_copy == pytest.approx(moved / 2e-6 / 1e12) and xla.of_copy == pytest.approx(kernel.of_copy / 4)

    header, _, *rows = results.steps_as_text([*found.values()]).splitlines()
    assert header.split("  ")[0] == "decode step" and len(rows) == 3
    # 2 us for 600 keys.
    assert rows[0].split() == [
        *("step", "kernel", "600", "2.00", "us", results.number(moved / 2e-6 / 1e9)),
        *(f"{100 * kernel.of_copy:.1f}", "%", "3.33"),
    ]

    (prompt, *_) = run.run_case(dataclasses.replace(STEP, T=2, softcap=3.0), settings, timed=True)
    assert prompt.status == "timed" and prompt.device is None
    assert results.steps_as_text([prompt]) == ""


def test_without_a_gpu_no_device_was_busy():
    arm = timing.Arm("add", lambda x: x + 1, [[np.ones(4)]])
    assert trace.device_seconds(arm, calls=2) is None


def test_busy_seconds_are_those_on_gpu_streams():
    def event(name, pid, tid, phase="X", /, **args):
        return {"name": name, "pid": pid, "tid": tid, "ph": phase, "dur": 10.0, "args": args}

    events = [
        event("process_name", 1, 0, "M", name="/device:GPU:0"),
        event("process_name", 2, 0, "M", name="/host:CPU"),
        event("thread_name", 1, 10, "M", name="Stream #13(Compute)"),
        event("thread_name", 1, 11, "M", name="XLA Modules"),
        event("gqa_rows_split", 1, 10),
        event("gqa_rows_merge", 1, 10) | {"dur": 2.5},
        event("jit_kernel", 1, 11),
        event("python", 2, 10),
    ]
    assert trace.busy_seconds(events) == pytest.approx(12.5e-6)


def test_the_copy_counts_what_it_reads_and_writes(monkeypatch):
    def half_a_second(arms, **options):
        return timing.Timing({arm.name: [0.5] for arm in arms}, {arm.name: 1 for arm in arms})

    monkeypatch.setattr(timing, "time_arms", half_a_second)
    assert run.copy_rate(3, elements=1000) == 2 * 2 * 1000 / 0.5


def test_large_batches_are_checked_in_their_first_and_last_kv_head(monkeypatch):
    monkeypatch.setattr(check, "WHOLE_TO", 20)
    truth = check.AttentionTruth(STEP, cases.inputs(STEP))
    assert [block.heads for block in truth.blocks] == [slice(0, 4), slice(4, 8)]
    monkeypatch.setattr(check, "WHOLE_TO", 25)
    assert len(check.AttentionTruth(STEP, cases.inputs(STEP)).blocks) == 1
