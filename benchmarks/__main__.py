"""`python -m benchmarks`: check, then time; see NOTES.md."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
from tqdm import tqdm

from benchmarks import candidates, gpt_oss, growth, minilm, orders, plot, real_input, sentences, static
from benchmarks.peaks import peaks_of
from benchmarks.results import Result, as_text, environment, steps_as_text, write_json
from benchmarks.run import Settings, copy_rate, fitting, probe_flops, run_case
from references import cases

TABLES = {
    "gated_delta": (cases.GATED_DELTA_SMALL, cases.GATED_DELTA_ODD, cases.GATED_DELTA_REAL),
    "flash": (cases.FLASH_SMALL, cases.FLASH_ODD, cases.FLASH_REAL),
    "gqa": (cases.GQA_SMALL, cases.GQA_ODD, cases.GQA_REAL),
}
# What each runs on real text.
REAL_RUNS = {"gated_delta": real_input, "flash": sentences, "gqa": gpt_oss}
ROUNDS_ON_GPU, ROUNDS_ON_CPU = 15, 3
# Options that say what is run, with those that have no part in it.
ALONE = {
    "real": ("case", "peers", "plot", "trace", "isa", "rounds"),
    "orders": ("real", "text", "full", "growth", "peers"),
    "growth": ("case", "real", "text", "full", "peers", "isa"),
}
# For the REAL cases of one algorithm, where there is no GPU.
CPU_SECONDS = 32.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises SystemExit(2) where it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Check kernels against the float64 truth, then time them side by side with references.",
    )
    parser.add_argument("algorithm", nargs="?", default="all", choices=(*TABLES, "all"))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these cases of references/cases")
    parser.add_argument("--real", action="store_true", help="only the runs on real text")
    parser.add_argument("--full", action="store_true", help="real text through layers of full size without a GPU too")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="the real text (default: LICENSE, README.md)")
    parser.add_argument(
        "--orders",
        action="store_true",
        help="only flash's orders of workgroups: modelled for AMD chips of several dies, and timed on a GPU",
    )
    parser.add_argument("--growth", action="store_true", help="only how the kernels' time grows with the length")
    parser.add_argument("--peers", action="store_true", help="also kernels of others that are installed, on a GPU")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of timing (15; 3 without a GPU)")
    parser.add_argument("--isa", action="store_true", help="also what the AMD rows compile to (extra isa; no timing)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="write pictures: time against T, or orders")
    parser.add_argument("--trace", type=pathlib.Path, metavar="DIR", help="write XLA profiler traces")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: no file {options.text}")
    if options.text is not None and not options.text.read_text(errors="replace").strip():
        parser.error(f"--text: {options.text} holds no text")
    known = {case.name for name in _algorithms(options) for table in TABLES[name] for case in table}
    unknown = [name for name in options.case or () if name not in known]
    if unknown:
        parser.error(f"--case: no {', '.join(unknown)} in {options.algorithm}; there are {', '.join(sorted(known))}")
    if options.orders and options.algorithm != "flash":
        parser.error(f"--orders goes with flash, got {options.algorithm}")
    for name, others in ALONE.items():
        if getattr(options, name):
            clash = [other for other in others if getattr(options, other)]
            if clash:
                parser.error(f"--{name} and --{clash[0]} exclude each other")
    if options.isa and "gated_delta" not in _algorithms(options):
        parser.error(f"--isa goes with gated_delta or all, got {options.algorithm}")
    return options


def _algorithms(options: argparse.Namespace) -> list[str]:
    return list(TABLES) if options.algorithm == "all" else [options.algorithm]


def plan(
    options: argparse.Namespace, algorithm: str, gpu: bool, rounds: int
) -> tuple[list[tuple[cases.Case, bool]], str]:
    """What to run of an algorithm: cases, each with whether it is timed; and a line on what is left out.

    With a GPU: REAL cases, timed. Without: SMALL ones, checked, and REAL ones for which there is time. Under --growth
    the REAL ones are those of `growth`, and no others. Cases that were asked for by name are run in any case.
    """
    small, odd, real = TABLES[algorithm]
    if options.growth:
        real = growth.at_lengths(real)
    if options.case:
        checked = [(case, gpu) for case in (*small, *odd) if case.name in options.case]
        return [*checked, *((case, True) for case in real if case.name in options.case)], ""
    if gpu:
        return [(case, True) for case in real], ""
    chosen, left = fitting(real, rounds, CPU_SECONDS, probe_flops())
    names = ", ".join(f"{case.name} ({seconds:.0f} s)" for case, seconds in left)
    line = f"{algorithm}, skipped for the time they would take here: {names}" if left else ""
    checked = () if options.growth else small
    return [*((case, False) for case in checked), *((case, True) for case in chosen)], line


def run_cases(options: argparse.Namespace, gpu: bool) -> list[Result]:
    """Run what `plan` says, print a table per algorithm. What is measured is on disk after each case."""
    rounds = options.rounds or (ROUNDS_ON_GPU if gpu else ROUNDS_ON_CPU)
    copied = copy_rate(rounds) if gpu and "gqa" in _algorithms(options) else None
    if copied is not None:
        print(f"a copy moves {copied / 1e9:.0f} GB/s here")
    settings = Settings(gpu, rounds, options.trace, copied, peers=gpu and options.peers)
    results: list[Result] = []
    for algorithm in _algorithms(options):
        todo, left_out = plan(options, algorithm, gpu, rounds)
        found: list[Result] = []
        # disable=None: a bar on a terminal only; in a file it would be a page of lines.
        with tqdm(todo, desc=algorithm, unit="case", disable=None, leave=False) as bar:
            for case, timed in bar:
                # Interpret mode takes hours for a REAL case and says nothing about speed.
                only = ("kernel",) if options.growth or not timed else None
                if not gpu and timed:
                    only = ("reference",)
                found += run_case(case, settings, timed=timed, only=only, on_step=bar.set_postfix_str)
                if options.json:
                    write_json(options.json, [*results, *found], None, [])
        grown = growth.as_text(found) if options.growth else ""
        for text in (as_text(found), steps_as_text(found), grown, left_out):
            if text:
                print(f"\n{text}", flush=True)
        results += found
    return results


def run_static() -> list[static.Evidence] | None:
    """What the rows for AMD chips compile to, printed. None where triton is not installed, after saying so."""
    try:
        with tqdm(desc="machine code", disable=None, leave=False) as bar:
            found = static.gated_delta(on_step=bar.set_postfix_str)
    except ImportError as missing:
        print(f"\nskipped: {missing}")
        return None
    print(f"\n{static.as_text(found)}", flush=True)
    return found


def run_real(options: argparse.Namespace, gpu: bool) -> dict[str, dict]:
    """The runs on real text by algorithm, printed; none without the encoder, after saying how to get it."""
    files = [options.text] if options.text else [path for path in real_input.DEFAULT_TEXTS if path.is_file()]
    print(f"\nreal input: {', '.join(path.name for path in files)}")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    found = {}
    try:
        for name in _algorithms(options):
            with tqdm(desc=f"real input, {name}", disable=None, leave=False) as bar:
                found[name] = REAL_RUNS[name].run(texts, gpu=gpu, full=options.full, on_step=bar.set_postfix_str)
            print(f"{name}\n{REAL_RUNS[name].as_text(found[name])}", flush=True)
    except minilm.PackageMissing as missing:
        print(f"skipped: {missing}")
    return found


def run_orders(options: argparse.Namespace, gpu: bool) -> tuple[list[orders.OrderCost], list[Result]]:
    """What the orders of workgroups would cost on AMD chips, and what they take on this GPU, printed; with pictures."""
    every = [case for table in TABLES["flash"] for case in table]
    chosen = [case for case in every if case.name in options.case] if options.case else cases.FLASH_REAL
    with tqdm(desc="orders", disable=None, leave=False) as bar:
        found, left_out = orders.run(chosen, on_step=bar.set_postfix_str)
    for text in (orders.as_text(found), left_out):
        if text:
            print(f"\n{text}", flush=True)
    for path in orders.write_plots(options.plot, chosen) if options.plot else ():
        print(f"wrote {path}")
    settings = Settings(gpu, options.rounds or ROUNDS_ON_GPU, options.trace)
    timed = []
    with tqdm(chosen if gpu else (), desc="orders, timed", unit="case", disable=None, leave=False) as bar:
        for case in bar:
            timed += run_case(case, settings, timed=True, arms_of=candidates.orders, on_step=bar.set_postfix_str)
    if timed:
        print(f"\n{as_text(timed)}")
    return found, timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where a check failed, or nothing of what was asked for could run."""
    options = parse(arguments)
    gpu = jax.default_backend() in ("gpu", "cuda", "rocm")
    if options.orders:
        costs, results = run_orders(options, gpu)
        if options.json:
            write_json(options.json, results, None, [], costs)
            print(f"wrote {options.json}")
        return 1 if _reds(results) else 0
    device = environment()
    print(f"device: {device['device_kind']}; jax {device['versions']['jax']}")
    if gpu and peaks_of(device["device_kind"]) is None:
        print("the peaks of this device are not in benchmarks/peaks.py: no share of the roofline")
    if options.peers and not gpu:
        print("--peers: no GPU, so no kernels of others")
    if not gpu:
        print("no GPU: kernels are checked in interpret mode on small cases, references are timed on real ones")

    results = [] if options.real else run_cases(options, gpu)
    evidence = run_static() if options.isa else []
    # The main job ends on real text; a choice of cases does not.
    with_text = options.real or options.text or not (options.case or options.growth)
    found = run_real(options, gpu) if with_text else {}

    if options.plot:
        for path in plot.write_plots(options.plot, results):
            print(f"wrote {path}")
    if options.json:
        write_json(options.json, results, found or None, evidence or [])
        print(f"wrote {options.json}")
    red = _reds(results)
    wrong = [name for name, one in found.items() if not one["green"]]
    for name in wrong:
        print(f"CHECK FAILED: {name}, real input")
    # What was asked for by name.
    asked = options.real or options.case or options.growth
    ran = found if options.real else [result for result in results if result.status != "absent"]
    return 1 if red or wrong or (asked and not ran) or evidence is None else 0


def _reds(results: Sequence[Result]) -> list[Result]:
    """The results beyond their bounds, printed."""
    red = [result for result in results if result.status == "red"]
    for result in red:
        print(f"CHECK FAILED: {result.algorithm} {result.case}, {result.arm}")
    return red


if __name__ == "__main__":
    sys.exit(main())
