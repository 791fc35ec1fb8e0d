"""How time and memory grow with the length: cases of the REAL tables at other lengths, and the table of `--growth`."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from benchmarks.results import Result, families
from benchmarks.table import duration, number, table
from references import cases

# Case -> lengths: a factor of four each, up to what ends in seconds.
LENGTHS = {
    "qwen3_next_T4096": (4096, 16384, 65536, 262144),
    "llama_3_8b": (4096, 16384, 65536),
    "gpt_oss_T16384_window": (4096, 16384, 65536, 262144),
    "gpt_oss_T16384_full": (4096, 16384, 65536),
}


def at_lengths(table_of_cases: Sequence[cases.Case]) -> list[cases.Case]:
    """Those of the cases that are named above, at each of their lengths; T, and S with it."""
    found = []
    for case in table_of_cases:
        for T in LENGTHS.get(case.name, ()):
            keys = {} if isinstance(case, cases.GatedDeltaCase) else {"S": T}
            found.append(dataclasses.replace(case, name=f"{case.name} at {T}", T=T, **keys))
    return found


HEADER = ("growth", "arm", "T", "time", "ns a token", "time grows as T^", "scratch MiB")


def as_text(results: Sequence[Result]) -> str:
    """Each curve from its shortest length on; the exponent is that between a length and the one before."""
    rows = []
    for members in families(results).values():
        for arm in dict.fromkeys(result.arm for result in members):
            curve = sorted((one for one in members if one.arm == arm), key=lambda one: one.shape["T"])
            for before, one in zip([None, *curve], curve, strict=False):
                T, scratch = one.shape["T"], "-" if one.scratch is None else number(one.scratch / 2**20)
                exponent = "-" if before is None else f"{_exponent(before, one):.2f}"
                per_token = number(statistics.median(one.seconds) / T * 1e9)
                rows.append([one.case, arm, str(T), duration(one.median), per_token, exponent, scratch])
    return table(HEADER, rows) if rows else ""


def _exponent(shorter: Result, longer: Result) -> float:
    """x, where the time is proportional to T^x between the two."""
    seconds = statistics.median(longer.seconds) / statistics.median(shorter.seconds)
    return math.log(seconds) / math.log(longer.shape["T"] / shorter.shape["T"])
