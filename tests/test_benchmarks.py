"""The benchmark command: arithmetic of the timing, the check before it, what is printed and written."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import check, peaks, results, run, table, timing, trace
from benchmarks.candidate import Candidate
from references import cases

# Arithmetic of the samples


def timing_of(**seconds):
    return timing.Timing(seconds=seconds, calls=dict.fromkeys(seconds, 1))


def test_ratio_is_the_median_of_ratios_within_rounds():
    # b takes twice as long as a in the same round, but the machine is slower in some rounds than in others,
    # and in the last round something else got in a's way.
    measured = timing_of(a=[1.0, 10.0, 3.0, 1.0, 40.0], b=[2.0, 20.0, 6.0, 2.0, 4.0])
    assert measured.ratio("a", to="b") == 2.0
    assert measured.ratio("b", to="a") == 0.5
    # What comparing medians would say.
    assert measured.median("b") / measured.median("a") == 4.0 / 3.0


def test_rounds_won():
    assert timing_of(a=[1.0, 5.0, 1.0], b=[2.0, 4.0, 2.0], c=[3.0, 3.0, 3.0]).wins() == {
        "a": 2,
        "b": 0,
        "c": 1,
    }
    assert timing_of(a=[1.0], b=[1.0]).wins() == {"a": 1, "b": 0}


@pytest.mark.parametrize(("turn", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc")])
def test_rotation(turn, order):
    assert timing.rotation("abc", turn) == list(order)


# Taking the samples


class Clock:
    """Seconds that pass only while a call runs."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def arm(self, name, *costs, **fields):
        """An arm whose calls take `costs`, the last of them from then on."""
        left = list(costs)

        def call(*inputs):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.calls.append(name)
            return inputs

        return timing.Arm(name, call, **{"input_sets": [[0]], **fields})


def test_samples_take_turns_and_exclude_the_first_call():
    clock = Clock()
    sampled = []
    # The first call compiles.
    arms = [clock.arm("a", 100.0, 2.0), clock.arm("b", 100.0, 3.0), clock.arm("c", 100.0, 1.0)]
    measured = timing.time_arms(arms, rounds=4, clock=clock, on_sample=sampled.append)
    assert measured.seconds == {"a": [2.0] * 4, "b": [3.0] * 4, "c": [1.0] * 4}
    assert sampled == list("abcbcacababc")
    # One compiling call and one sample long enough, then the rounds.
    assert clock.calls == [*"aabbcc", *sampled]


@pytest.mark.parametrize(("cost", "calls"), [(1.0, 1), (0.5, 2), (0.01, 100), (1e-6, 500)])
def test_samples_are_long_enough(cost, calls):
    clock = Clock()
    measured = timing.time_arms(
        [clock.arm("a", cost)], rounds=2, sample_seconds=1.0, max_calls=500, clock=clock, overlap=False
    )
    # Adding up a hundredth may take one call more.
    assert calls <= measured.calls["a"] <= calls + 1
    chex.assert_trees_all_close(np.array(measured.seconds["a"]), np.array([cost] * 2), rtol=1e-6)


def test_long_cases_get_fewer_rounds():
    clock = Clock()
    arms = [clock.arm("a", 5.0), clock.arm("b", 2.0)]
    assert len(timing.time_arms(arms, rounds=10, clock=clock, limit_seconds=30.0).seconds["a"]) == 4
    assert len(timing.time_arms(arms, rounds=10, clock=clock, limit_seconds=1.0).seconds["a"]) == 3
    assert len(timing.time_arms(arms, rounds=2, clock=clock, limit_seconds=1.0).seconds["a"]) == 2


@pytest.mark.parametrize("names", ["", "aa"])
def test_arms_have_distinct_names(names):
    clock = Clock()
    with pytest.raises(ValueError, match="distinct names"):
        timing.time_arms([clock.arm(name, 1.0) for name in names], rounds=1, clock=clock)


def test_at_least_one_round():
    clock = Clock()
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        timing.time_arms([clock.arm("a", 1.0)], rounds=0, clock=clock)


def test_state_goes_from_call_to_call_of_the_same_inputs():
    # Donated, as a decode step does: using a state twice would raise.
    step = jax.jit(lambda x, state: (x, state + x), donate_argnums=1)
    sets = [[jnp.float32(x), jnp.zeros(4)] for x in (1.0, 10.0)]
    arm = timing.Arm("decode", step, sets, state_argument=1)
    x, state = arm.enqueue(5)
    assert (float(x), float(state[0])) == (1.0, 3.0)
    assert float(arm.input_sets[1][1][0]) == 20.0


def test_input_sets_outgrow_the_cache():
    array = jnp.arange(256, dtype=jnp.float32)
    sets = timing.rotate([array, array], cache_bytes=9000)
    assert len(sets) == 5
    assert len({leaf.unsafe_buffer_pointer() for inputs in sets for leaf in inputs}) == 2 * 5 - 1
    chex.assert_trees_all_equal(*sets)
    assert timing.rotate([array], cache_bytes=0) == [[array]]
    assert len(timing.rotate([jnp.float32(0)], cache_bytes=2**40)) == timing.MAX_INPUT_SETS


# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1.0, "1.00"),
        (12345.6, "12300"),
        (0.012345, "0.0123"),
        (9.999, "10.0"),
        (49.07, "49.1"),
    ],
)
def test_number(value, text):
    assert table.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (2.5, "2.50 s"), (1.11e-3, "1.11 ms"), (72e-6, "72.0 us"), (0.282, "282 ms")],
)
def test_duration(seconds, text):
    assert table.duration(seconds) == text


def test_table_is_aligned():
    text = table.table(["case", "time"], [["a", "1.0 ms"], ["longer", "10.0 ms"]], left=1)
    assert text.splitlines() == ["case       time", "------  -------", "a        1.0 ms", "longer  10.0 ms"]
    with pytest.raises(ValueError, match="2 cells, the header 1"):
        table.table(["case"], [["a", "b"]])


def test_roofline():
    h200 = peaks.peaks_of("NVIDIA H200")
    # 989.5 TFLOP take a second in bf16, 4.8 TB take a second; whichever is longer is the roofline.
    assert peaks.roofline_share(h200, "bfloat16", 989.5e12, 2.4e12, 2.0) == pytest.approx(0.5)
    assert peaks.roofline_share(h200, "bfloat16", 1e12, 4.8e12, 4.0) == pytest.approx(0.25)
    assert peaks.roofline_share(h200, "float32", 67e12, 0, 1.0) == pytest.approx(1.0)
    assert peaks.peaks_of("cpu") is None
    assert peaks.roofline_share(None, "bfloat16", 1e12, 1e12, 1.0) is None


# The check


@pytest.mark.parametrize(
    "case",
    [
        cases.FlashCase("full", "", 1, 40, 40, 4, 2, 16, 16),
        cases.FlashCase("causal", "", 2, 40, 72, 4, 4, 16, 16, causal=True),
        cases.GqaCase("window", "", 1, 40, 56, 6, 2, 16, 16, "bfloat16", window=5, sinks="uniform"),
        cases.GqaCase("step", "", 1, 1, 56, 6, 2, 16, 16, sinks="uniform"),
    ],
    ids=str,
)
def test_blocks_of_attention_equal_the_whole(case, monkeypatch):
    arguments = cases.inputs(case)
    (whole,) = check.AttentionTruth(case, arguments).blocks
    monkeypatch.setattr(check, "WHOLE_TO", 4)
    monkeypatch.setattr(check, "BLOCK", 8)
    truth = check.AttentionTruth(case, arguments)
    assert len(truth.blocks) == (2 if case.T == 1 else 6)
    for block in truth.blocks:
        chex.assert_trees_all_close(block.truth, whole.truth[:, block.rows, block.heads], rtol=1e-12, atol=1e-14)
    assert check.is_green(*truth.compare((whole.truth,)))
    spoilt = whole.truth.copy()
    spoilt[0, -1, -1, -1] += 1.0
    errors, bounds = truth.compare((spoilt,))
    assert errors["o"] == pytest.approx(1.0)
    assert not check.is_green(errors, bounds)
    assert not check.is_green(*truth.compare((np.full_like(spoilt, np.nan),)))


def test_a_gated_delta_check_without_a_gpu_looks_at_the_first_and_last_heads(monkeypatch):
    case = cases.GatedDeltaCase("heads", "", 1, 40, 4, 8, 16, 16)
    arguments = cases.inputs(case)
    o, state = check.truth_of(case, arguments, gpu=True).truth
    monkeypatch.setattr(check, "WHOLE_TO", 16)
    truth = check.truth_of(case, arguments, gpu=False)
    assert list(truth.heads) == [0, 1, 6, 7]
    assert check.is_green(*truth.compare((o, state), token_by_token=False, chunk_size=64))
    o = np.where(np.arange(8)[:, None] == 7, 1.01 * o, o)
    errors, bounds = truth.compare((o, state), token_by_token=False, chunk_size=64)
    assert errors["o"] > bounds["o"] and errors["trailing_half"] > bounds["trailing_half"]
    assert errors["state"] <= bounds["state"]


SMALL = cases.GATED_DELTA_SMALL[0]


def spoil(monkeypatch, name, factor):
    """Make the candidate of that name return `factor` times its o."""
    real = run.candidates

    def candidates(*args, **options):
        def wrong(function):
            def call(**arguments):
                o, state = function(**arguments)
                return o * jnp.asarray(factor, o.dtype), state

            return call

        return [
            dataclasses.replace(found, function=wrong(found.function)) if found.name == name else found
            for found in real(*args, **options)
        ]

    monkeypatch.setattr(run, "candidates", candidates)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_red_check_has_no_time_and_fails_the_command(factor, monkeypatch, capsys, tmp_path):
    spoil(monkeypatch, "reference", factor)
    settings = run.Settings(gpu=False, rounds=2)
    (red,) = run.run_case(SMALL, settings, timed=True, only=("reference",))
    assert red.status == "red"
    assert (red.seconds, red.median, red.tflops, red.gbytes, red.ratio) == ([], None, None, None, None)
    assert results.row(red)[2:-1] == ["CHECK FAILED", *["-"] * 6, table.duration(red.first)]

    spoil(monkeypatch, "kernel", factor)
    path = tmp_path / "red.json"
    assert command.main(["gated_delta", "--case", SMALL.name, "--json", str(path)]) == 1
    assert f"CHECK FAILED: gated_delta {SMALL.name}, kernel" in capsys.readouterr().out
    # inf is no JSON.
    (written,) = json.loads(path.read_text(), parse_constant=pytest.fail)["results"]
    assert written["status"] == "red" and written["median"] is None
    assert (written["errors"]["o"] is None) == np.isnan(factor)


def test_a_command_that_is_stopped_has_written_the_cases_before(monkeypatch, tmp_path):
    def run_case(case, *arguments, **options):
        if case.name == "second":
            raise KeyboardInterrupt
        return [results.Result("gated_delta", case.name, "kernel", {}, "checked")]

    monkeypatch.setattr(command, "run_case", run_case)
    monkeypatch.setattr(command, "plan", lambda *_: ([(dataclasses.replace(SMALL, name=n), False) for n in names], ""))
    names, path = ("first", "second"), tmp_path / "stopped.json"
    with pytest.raises(KeyboardInterrupt):
        command.main(["gated_delta", "--json", str(path)])
    assert [one["case"] for one in json.loads(path.read_text())["results"]] == ["first"]


def test_an_arm_that_cannot_do_the_case_is_absent(monkeypatch):
    def refuse(**arguments):
        raise NotImplementedError("no kernel for that yet")

    def crash(**arguments):
        raise ValueError("cuDNN is not here\nsecond line")

    arguments = cases.inputs(SMALL)
    found = [
        Candidate("kernel", refuse, arguments),
        Candidate("jax.nn", crash, arguments, ours=False),
    ]
    found.append(Candidate("reference", crash, arguments))
    monkeypatch.setattr(run, "candidates", lambda *args, **options: found)
    kernel, theirs, ours = run.run_case(SMALL, run.Settings(gpu=False, rounds=1), timed=True)
    assert (kernel.status, kernel.note) == ("absent", "no kernel for that yet")
    assert (theirs.status, theirs.note) == ("absent", "cuDNN is not here")
    # The same from our own function is a fault.
    assert (ours.status, ours.note) == ("red", "cuDNN is not here")
    assert results.as_text([kernel]) == f"gated_delta, kernel, absent: no kernel for that yet ({SMALL.name})"


def test_as_on_a_gpu_all_arms_are_timed_side_by_side(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**16)
    settings = run.Settings(gpu=True, rounds=2)
    step = cases.GatedDeltaCase("step", "", 1, 1, 1, 2, 16, 16, "bfloat16")
    kernel, reference = run.run_case(step, settings, timed=True)
    assert (kernel.arm, kernel.status, reference.arm, reference.status) == (
        "kernel",
        "timed",
        "reference",
        "timed",
    )
    assert kernel.wins + reference.wins == 2 and reference.ratio == 1.0
    assert kernel.ratio == pytest.approx(
        np.median([slow / fast for slow, fast in zip(reference.seconds, kernel.seconds, strict=True)])
    )

    window = cases.GqaCase("window", "", 1, 32, 32, 4, 2, 16, 16, window=5, sinks="uniform")
    found = {result.arm: result for result in run.run_case(window, settings, timed=True)}
    assert list(found) == ["kernel", "reference", "jax.nn xla, no sinks", "jax.nn cudnn, no sinks"]
    # It has no sinks, its window is written another way, and it agrees.
    assert found["jax.nn xla, no sinks"].status == "timed"
    assert found["jax.nn cudnn, no sinks"].status == "absent"


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "invalid choice: 'softmax'"),
        (["flash", "--case", "T16384_ful"], "no T16384_ful in flash; there are"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--text", "no/such/file"], "--text: no file no/such/file"),
        (["--real", "--case", "one_head"], "--real and --case exclude each other"),
        (["flash", "--isa"], "--isa goes with gated_delta or all, got flash"),
        (["gqa", "--orders"], "--orders goes with flash, got gqa"),
        (["--orders"], "--orders goes with flash, got all"),
        (["flash", "--orders", "--real"], "--real exclude each other"),
        (["flash", "--orders", "--peers"], "--orders and --peers exclude each other"),
        (["gqa", "--growth", "--case", "prompt"], "--growth and --case exclude each other"),
        (["gqa", "--growth", "--peers"], "--growth and --peers exclude each other"),
        (["gqa", "--real", "--trace", "t"], "--real and --trace exclude each other"),
        (["gqa", "--real", "--case", "prompt"], "--real and --case exclude each other"),
    ],
)
def test_bad_command_lines(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_that_could_run_is_a_failure(monkeypatch, capsys):
    def refuse(**arguments):
        raise NotImplementedError("not that")

    monkeypatch.setattr(run, "candidates", lambda case, arguments, **options: [Candidate("kernel", refuse, arguments)])
    assert command.main(["gated_delta", "--case", SMALL.name, "--peers"]) == 1
    printed = capsys.readouterr().out
    assert "absent: not that" in printed and "--peers: no GPU" in printed


def test_a_text_holds_text(tmp_path, capsys):
    path = tmp_path / "blank"
    path.write_text(" \n")
    with pytest.raises(SystemExit):
        command.parse(["--text", str(path)])
    assert f"--text: {path} holds no text" in capsys.readouterr().err


def test_command_line():
    options = command.parse(["gqa", "--case", "prompt", "decode", "--rounds", "7", "--plot", "p", "--trace", "t"])
    assert (options.algorithm, options.case, options.rounds) == ("gqa", ["prompt", "decode"], 7)
    assert (options.plot.name, options.trace.name, options.json, options.real) == ("p", "t", None, False)
    assert command.parse([]).algorithm == "all"


@pytest.mark.parametrize("algorithm", command.TABLES)
def test_plan(algorithm):
    small, _, real = command.TABLES[algorithm]
    everything = command.parse([algorithm])
    assert command.plan(everything, algorithm, True, 15) == ([(case, True) for case in real], "")
    todo, left_out = command.plan(everything, algorithm, False, 3)
    assert [case for case, timed in todo if not timed] == list(small)
    chosen = [case for case, timed in todo if timed]
    assert all(case.name in left_out for case in real if case not in chosen)
    named = command.parse([algorithm, "--case", small[0].name, real[0].name])
    assert command.plan(named, algorithm, False, 3) == ([(small[0], False), (real[0], True)], "")


def test_cases_that_take_too_long_are_left_out():
    quick, slow = cases.GATED_DELTA_SMALL[0], cases.GATED_DELTA_REAL[0]
    chosen, left = run.fitting([slow, quick], rounds=3, budget_seconds=20.0, matmul_flops=1e11)
    assert chosen == [quick]
    ((case, seconds),) = left
    assert case is slow and seconds > 20.0


def test_without_a_gpu_kernels_are_checked_and_real_cases_timed(tmp_path, capsys):
    names = [cases.GATED_DELTA_SMALL[1].name, "jax_24491"]
    path, pictures, traces = tmp_path / "a" / "b.json", tmp_path / "plots", tmp_path / "traces"
    options = ["--json", str(path), "--plot", str(pictures), "--trace", str(traces), "--rounds", "2"]
    assert command.main(["all", "--case", *names, *options]) == 0
    printed = capsys.readouterr().out
    assert "no GPU: kernels are checked in interpret mode" in printed

    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(document) == {"schema", "environment", "results", "real_input", "static", "orders"}
    assert document["static"] == []
    assert document["environment"]["platform"] == "cpu" and document["real_input"] is None
    assert set(document["environment"]["versions"]) == {"jax", "jaxlib", "numpy"}
    fields = {field.name for field in dataclasses.fields(results.Result)}
    assert all(set(result) == fields for result in document["results"])
    by_arm = {(result["case"], result["arm"]): result for result in document["results"]}
    checked = by_arm[names[0], "kernel"]
    assert (checked["status"], checked["seconds"]) == ("checked", [])
    assert checked["errors"].keys() == checked["bounds"].keys() == {"o", "trailing_half", "state"}
    timed = by_arm["jax_24491", "reference"]
    assert timed["status"] == "timed" and len(timed["seconds"]) == 2 and timed["wins"] == 2
    assert timed["ratio"] == 1.0 and timed["share"] is None and timed["scratch"] > 0
    assert timed["median"] == pytest.approx(sum(timed["seconds"]) / 2)
    flops = cases.flops(next(case for case in cases.FLASH_REAL if case.name == "jax_24491"))
    assert timed["tflops"] == pytest.approx(flops / timed["median"] / 1e12)
    row = next(line for line in printed.splitlines() if line.startswith("flash jax_24491"))
    assert table.duration(timed["median"]) in row and "2/2" in row

    (picture,) = pictures.iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(traces.glob("flash/jax_24491/plugins/profile/*/*.xplane.pb"))


# Pictures and traces


def timed_result(**shape):
    return results.Result("gqa", "c", "kernel", shape, "timed", seconds=[1.0], median=1.0)


def test_pictures_follow_the_length():
    found = [timed_result(B=1, T=T, S=T, window=128) for T in (64, 128)]
    found += [timed_result(B=1, T=1, S=S) for S in (512, 1024)]
    found += [dataclasses.replace(found[0], status="red")]
    families = results.families(found)
    assert list(families) == [("gqa", "T", ("B", 1), ("window", 128)), ("gqa", "S", ("B", 1), ("T", 1))]
    assert [len(members) for members in families.values()] == [2, 2]


def test_kernel_names_are_those_on_gpu_streams():
    def event(name, pid, tid, phase="X", /, **args):
        return {"name": name, "pid": pid, "tid": tid, "ph": phase, "args": args}

    events = [
        event("process_name", 1, 0, "M", name="/device:GPU:0"),
        event("process_name", 2, 0, "M", name="/host:CPU"),
        event("thread_name", 1, 10, "M", name="Stream #13(Compute)"),
        event("thread_name", 1, 11, "M", name="XLA Modules"),
        event("thread_name", 2, 10, "M", name="Stream of another kind"),
        event("gated_delta_scan", 1, 10),
        event("gated_delta_outputs", 1, 10),
        event("gated_delta_scan", 1, 10),
        event("jit_kernel", 1, 11),
        event("python", 2, 10),
    ]
    assert trace.kernel_names(events) == ["gated_delta_scan", "gated_delta_outputs"]
