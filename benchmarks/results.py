"""What a run found: one `Result` per case and arm; its table and its JSON."""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.orders import OrderCost
from benchmarks.static import Evidence
from benchmarks.table import duration, number, table

# What became of an arm. "red" differs from the reference by more than the bound and has no time; "absent"
# cannot run here (the note says why).
STATUSES = ("timed", "checked", "red", "absent")
SCHEMA = 3


@dataclasses.dataclass
class Result:
    """One arm of one case.

    Attributes:
      algorithm: "gated_delta", "flash" or "gqa".
      case: name in `references.cases`. arm: name of the way it was computed.
      shape: letters of the case to sizes, and its dtype.
      status: one of STATUSES. note: one line for a reader, often empty.
      errors, bounds: what was compared to the reference ("o", "state", ...) to its error and to the most
        allowed.
      first: seconds of the first call: tracing, compiling, running.
      seconds: time of one call, a sample per round. calls: calls in a sample.
      median: of `seconds`. tflops: TFLOP/s. gbytes: GB/s. share: of the roofline. ratio: times faster than
        the reference arm. wins: rounds won. scratch: bytes of temporary memory of the compiled program.
      device: of a decode step of attention: seconds that the GPU computes for one call. of_copy: the share of a large
        copy's bytes per second that it moves in that time.
    """

    algorithm: str
    case: str
    arm: str
    shape: dict[str, Any]
    status: str
    note: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    first: float | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    calls: int | None = None
    median: float | None = None
    tflops: float | None = None
    gbytes: float | None = None
    share: float | None = None
    ratio: float | None = None
    wins: int | None = None
    scratch: int | None = None
    device: float | None = None
    of_copy: float | None = None

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {STATUSES}, got {self.status!r}")


HEADER = (
    "case",
    "arm",
    "time",
    "TFLOP/s",
    "GB/s",
    "roofline",
    "x reference",
    "rounds won",
    "scratch MiB",
    "first call",
    "error / bound",
)


def row(result: Result) -> list[str]:
    """The cells of a result under HEADER; an arm that was not timed shows its status instead of figures."""
    pairs = [(result.errors[name], bound) for name, bound in result.bounds.items()]
    # An output without elements has the error 0 and the bound 0.
    worst = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0, default=None)
    check = "-" if worst is None else f"{worst[0]:.1e} / {worst[1]:.1e}"
    scratch = "-" if result.scratch is None else number(result.scratch / 2**20)
    name = f"{result.algorithm} {result.case}"
    if result.status != "timed":
        shown = {"checked": "check ok", "red": "CHECK FAILED"}.get(result.status, result.status)
        return [name, result.arm, shown, *["-"] * 6, duration(result.first), check]
    rounds = f"{result.wins}/{len(result.seconds)}"
    share = "-" if result.share is None else f"{100 * result.share:.1f} %"
    figures = [number(result.tflops), number(result.gbytes), share, number(result.ratio)]
    return [name, result.arm, duration(result.median), *figures, rounds, scratch, duration(result.first), check]


def as_text(results: Sequence[Result]) -> str:
    """Results as a table, the notes below it; arms that cannot run here only have a note."""
    notes: dict[str, list[str]] = {}
    for result in results:
        if result.note:
            label = "absent: " if result.status == "absent" else ""
            note = f"{result.algorithm}, {result.arm}, {label}{result.note}"
            notes.setdefault(note, []).append(result.case)
    lines = [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in notes.items()]
    rows = [row(result) for result in results if result.status != "absent"]
    return "\n".join([*([table(HEADER, rows)] if rows else []), *lines])


STEP_HEADER = ("decode step", "arm", "keys", "time on the device", "GB/s", "of a copy", "ns a key")


def steps_as_text(results: Sequence[Result]) -> str:
    """What the device does in the decode steps among the results, by case; empty where it was not measured."""
    rows = []
    for result in results:
        if result.device is None or result.gbytes is None or result.median is None:
            continue
        gbytes = result.gbytes * result.median / result.device
        share = "-" if result.of_copy is None else f"{100 * result.of_copy:.1f} %"
        keys = result.shape["B"] * result.shape["S"]
        per_key = number(result.device / keys * 1e9)
        figures = [str(keys), duration(result.device), number(gbytes), share, per_key]
        rows.append([result.case, result.arm, *figures])
    return table(STEP_HEADER, rows) if rows else ""


def families(results: Sequence[Result]) -> dict[tuple, list[Result]]:
    """Timed results that belong in one picture: of one algorithm and, but for the length, of one shape.

    Keys are (algorithm, letter of the length, (letter, size), ...). The length is T, and S with it; where T
    and S differ (attention of a few new rows over a cache) T is part of the shape and S the length.
    """
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        if result.status == "timed":
            shape = result.shape
            length = "T" if shape.get("S", shape["T"]) == shape["T"] else "S"
            grows = ("T", "S") if length == "T" else ("S",)
            fixed = ((letter, size) for letter, size in shape.items() if letter not in grows)
            groups.setdefault((result.algorithm, length, *fixed), []).append(result)
    return groups


def environment() -> dict[str, Any]:
    """The device and the versions that the numbers belong to."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "backend": device.client.platform_version.splitlines()[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    }


def write_json(
    path: pathlib.Path,
    results: Sequence[Result],
    real: dict[str, Any] | None,
    static: Sequence[Evidence],
    orders: Sequence[OrderCost] = (),
) -> None:
    """Everything that was measured, each sample included.

    {"schema": 3, "environment": {...}, "results": [fields of Result, ...], "real_input": {algorithm: {...}} or null,
     "static": [fields of Evidence, ...], "orders": [fields of OrderCost, ...]}

    JSON has no inf and no NaN: null stands for them (the error of an output that is not finite).
    """
    document = {
        "schema": SCHEMA,
        "environment": environment(),
        "results": [_finite(dataclasses.asdict(result)) for result in results],
        "real_input": _finite(real),
        "static": [dataclasses.asdict(evidence) for evidence in static],
        "orders": [dataclasses.asdict(cost) for cost in orders],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The same nest of dicts and lists, None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
