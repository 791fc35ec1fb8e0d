"""Check and time the ways of computing one case."""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from amdgpu.arch import current_arch
from benchmarks import timing
from benchmarks.candidate import Candidate, Program
from benchmarks.candidates import candidates, is_decode
from benchmarks.check import AttentionTruth, GatedDeltaTruth, is_green, truth_of
from benchmarks.peaks import peaks_of, roofline_share
from benchmarks.results import Result
from benchmarks.trace import device_seconds, write_trace
from gated_delta import prefill_scratch_bytes
from gated_delta.tuning import default_config
from references.cases import Case, FlashCase, GatedDeltaCase, GqaCase, bytes_moved, flops, inputs

# A case's timing is cut to fewer rounds (not below 3) where it would take longer than this.
TIMING_SECONDS = 30.0
# Another's result may be this much worse than ours has to be; beyond, it computes something else.
RIVALS_BOUND = 10.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """How cases are run: on a GPU or without, rounds of timing, a folder for traces or None.

    copy_rate: bytes that a large copy reads and writes in a second; None where it was not measured.
    peers: whether kernels of others run beside ours (`benchmarks.peers`).
    """

    gpu: bool
    rounds: int
    trace: pathlib.Path | None = None
    copy_rate: float | None = None
    peers: bool = False


def algorithm_of(case: Case) -> str:
    """The package that computes a case."""
    return {GatedDeltaCase: "gated_delta", FlashCase: "flash", GqaCase: "gqa"}[type(case)]


def shape_of(case: Case) -> dict[str, int | str | bool]:
    """The sizes of a case, its dtype and what else makes it a different curve in a plot."""
    sizes = ("B", "T", "S", "G", "H", "K", "V", "dtype", "causal", "window")
    shape = {name: getattr(case, name) for name in sizes if getattr(case, name, None) is not None}
    if isinstance(case, GatedDeltaCase):
        shape["phase"] = "decode" if is_decode(case) else "prefill"
        if case.cu_seqlens is not None:
            shape["R"] = len(case.cu_seqlens) - 1
    return shape


def free_bytes() -> int:
    """Memory of the default device that nothing uses yet."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run_case(
    case: Case,
    settings: Settings,
    *,
    timed: bool,
    only: Sequence[str] | None = None,
    arms_of: Callable[..., list[Candidate]] | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Check every way of computing a case, then time those that are right, side by side.

    Args:
      timed: False only checks (a small case in interpret mode).
      only: names of candidates to run, None for all.
      arms_of: `arms_of(case, arguments)` lists the candidates; by default `candidates` does.
      on_step: told what begins next (progress).

    Returns:
      One result per candidate, in the candidates' order.
    """
    on_step(f"{case.name}: inputs")
    arguments = inputs(case)
    results: list[Result] = []
    arms: list[timing.Arm] = []
    expected, expected_of = None, None
    if arms_of is None:
        arms_of = functools.partial(candidates, gpu=settings.gpu, with_peers=settings.peers)
    for candidate in arms_of(case, arguments):
        if only is not None and candidate.name not in only:
            continue
        on_step(f"{case.name}: {candidate.name}")
        result = Result(algorithm_of(case), case.name, candidate.name, shape_of(case), "checked")
        results.append(result)
        ran = _run_once(candidate, result)
        if ran is None:
            continue
        program, outputs = ran
        on_step(f"{case.name}: check {candidate.name}")
        # Candidates that compute the same thing hold the same dict.
        same_as = candidate.same_as or candidate.arguments
        if expected is None or expected_of is not same_as:
            expected, expected_of = truth_of(case, same_as, gpu=settings.gpu), same_as
        result.errors, result.bounds = _compare(case, candidate, expected, outputs)
        del outputs
        if not is_green(result.errors, result.bounds):
            if candidate.ours:
                result.status = "red"
                continue
            if not is_green(result.errors, {name: RIVALS_BOUND * x for name, x in result.bounds.items()}):
                result.status, result.note = "absent", f"wrong: {result.errors}, bounds {result.bounds}"
                continue
            result.note = "beyond the bound that holds for ours"
        if timed:
            result.note = result.note or (_scratch_note(case, candidate) if settings.gpu else "")
            arms.append(_arm(candidate, program, settings.gpu))
    if arms:
        measured = timing.time_arms(
            arms,
            rounds=settings.rounds,
            overlap=settings.gpu,
            limit_seconds=TIMING_SECONDS,
            on_sample=lambda arm: on_step(f"{case.name}: time {arm}"),
        )
        for result in results:
            if result.arm in measured.seconds:
                _fill(case, result, measured)
        if settings.gpu and isinstance(case, GqaCase) and case.T == 1:
            for arm in arms:
                on_step(f"{case.name}: profile {arm.name}")
                (result,) = (result for result in results if result.arm == arm.name)
                result.device = device_seconds(arm)
                if result.device is not None and settings.copy_rate is not None:
                    result.of_copy = bytes_moved(case) / result.device / settings.copy_rate
        if settings.trace is not None:
            on_step(f"{case.name}: trace")
            names = write_trace(settings.trace / algorithm_of(case) / case.name, arms)
            for result in results:
                if result.arm == "kernel" and names:
                    ours = [name for name in names if name.startswith(algorithm_of(case))]
                    result.note += "; " * bool(result.note) + f"in the trace: {', '.join(ours) or 'no kernel of ours'}"
    return results


def _run_once(candidate: Candidate, result: Result) -> tuple[Program, tuple] | None:
    """The program and its outputs. None where that cannot be; why goes into `result`."""
    start = time.perf_counter()
    try:
        program = candidate.compile()
        memory = program.memory_analysis()
        # None on a backend that does not say.
        result.scratch = None if memory is None else memory.temp_size_in_bytes
        needed = 0 if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
        if needed > free_bytes():
            result.status = "absent"
            result.note = f"results and scratch would take {needed / 2**30:.3g} GiB, more than is free"
            return None
        outputs = jax.block_until_ready(program(*_own_state(candidate, candidate.arrays())))
        result.first = time.perf_counter() - start
        return program, outputs
    except NotImplementedError as error:
        result.status, result.note = "absent", _first_line(error)
    except (ValueError, RuntimeError) as error:
        # From our functions these are faults.
        result.status, result.note = "red" if candidate.ours else "absent", _first_line(error)
    except Exception as error:
        # What another cannot do it may say in any way.
        if candidate.ours:
            raise
        result.status, result.note = "absent", f"{type(error).__name__}: {_first_line(error)}"
    return None


def _compare(
    case: Case, candidate: Candidate, expected: GatedDeltaTruth | AttentionTruth, outputs: tuple
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors and bounds by output."""
    if isinstance(expected, AttentionTruth):
        return expected.compare(outputs)
    # The decode kernel walks tokens; what the reference of a decode step does is its own affair.
    by_token = candidate.name == "token scan" or (candidate.name == "kernel" and is_decode(expected.case))
    C = default_config(current_arch(), case.dtype, case.V).chunk_size if candidate.name == "kernel" else 64
    return expected.compare(outputs, token_by_token=by_token, chunk_size=C)


def _own_state(candidate: Candidate, arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays, with a copy for the one that a call consumes."""
    names = candidate.array_names()
    return [jnp.copy(x) if name == candidate.state else x for name, x in zip(names, arrays, strict=True)]


def _arm(candidate: Candidate, program: Program, gpu: bool) -> timing.Arm:
    arrays = candidate.arrays()
    # Without a GPU calls take so long that caches hardly matter.
    input_sets = timing.rotate(arrays, cache_bytes=timing.CACHE_BYTES if gpu else 0)
    input_sets[0] = _own_state(candidate, input_sets[0])
    position = None if candidate.state is None else candidate.array_names().index(candidate.state)
    return timing.Arm(candidate.name, program, input_sets, position)


def _fill(case: Case, result: Result, measured: timing.Timing) -> None:
    """Figures of speed from the samples."""
    seconds = measured.median(result.arm)
    result.status = "timed"
    result.seconds, result.calls, result.median = (
        measured.seconds[result.arm],
        measured.calls[result.arm],
        seconds,
    )
    result.tflops, result.gbytes = flops(case) / seconds / 1e12, bytes_moved(case) / seconds / 1e9
    peaks = peaks_of(jax.devices()[0].device_kind)
    result.share = roofline_share(peaks, case.dtype, flops(case), bytes_moved(case), seconds)
    if "reference" in measured.seconds:
        result.ratio = measured.ratio(result.arm, to="reference")
    result.wins = measured.wins()[result.arm]


def _scratch_note(case: Case, candidate: Candidate) -> str:
    """What `prefill_scratch_bytes` says, beside what the compiler found."""
    if not isinstance(case, GatedDeltaCase) or candidate.name != "kernel" or is_decode(case):
        return ""
    config = default_config(current_arch(), case.dtype, case.V)
    rows = None if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    promised = prefill_scratch_bytes(
        case.B,
        case.T,
        case.H,
        case.K,
        case.V,
        dtype=case.dtype,
        config=config,
        num_sequences=rows,
        use_qk_l2norm_in_kernel=case.l2norm,
    )
    return f"prefill_scratch_bytes {promised / 2**20:.2f} MiB, {config}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def copy_rate(rounds: int, elements: int = 2**29) -> float:
    """Bytes per second that a GPU reads and writes where it changes the signs of bf16 numbers, by default of a GiB."""
    x = jnp.ones(elements, jnp.bfloat16)
    arm = timing.Arm("copy", jax.jit(jnp.negative), [[x]])
    return 2 * x.nbytes / timing.time_arms([arm], rounds=rounds).median("copy")


def probe_flops() -> float:
    """FLOP/s of a fp32 matrix product on the default device, to predict by."""
    side = 1024
    x = jnp.ones((side, side), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    start = time.perf_counter()
    for _ in range(5):
        product(x, x).block_until_ready()
    return 5 * 2 * side**3 / (time.perf_counter() - start)


def predicted_seconds(case: Case, rounds: int, matmul_flops: float) -> float:
    """Roughly how long the reference of a case takes on a CPU: making inputs, compiling, checking and timing.

    Measured on two cores: references reach a quarter of a large product's FLOP/s, or 0.3 GB/s where they only
    read; inputs are drawn at 60 MB/s; compilation takes some 5 s. The references do not skip keys left of a window.
    """
    work = case if not isinstance(case, GqaCase) else dataclasses.replace(case, window=None)
    call = flops(work) / (matmul_flops / 4) + bytes_moved(work) / 0.3e9
    return 5 + bytes_moved(work) / 60e6 + (rounds + 4) * call


def fitting(
    cases: Sequence[Case], rounds: int, budget_seconds: float, matmul_flops: float
) -> tuple[list[Case], list[tuple[Case, float]]]:
    """The cases that a CPU does within a time, quickest first served; the others with their predictions."""
    predicted = sorted((predicted_seconds(case, rounds, matmul_flops), i) for i, case in enumerate(cases))
    chosen, left, spent = set(), [], 0.0
    for seconds, i in predicted:
        if spent + seconds <= budget_seconds:
            chosen.add(i)
            spent += seconds
        else:
            left.append((cases[i], seconds))
    return [case for i, case in enumerate(cases) if i in chosen], left
