"""XLA profiler traces: the names of the kernels in them, and the time that a device spends on a call."""

import gzip
import json
import pathlib
import tempfile
from collections.abc import Sequence

import jax

from benchmarks.timing import Arm

# Calls of a profile that is taken for the time on the device.
PROFILED_CALLS = 50


def write_trace(folder: pathlib.Path, arms: Sequence[Arm]) -> list[str]:
    """Three calls of each arm under the profiler, each arm's under its name.

    Returns:
      The names of the kernels that ran on a GPU, in order of appearance; none on a CPU.
    """
    return kernel_names(_profile(folder, arms, 3))


def device_seconds(arm: Arm, calls: int = PROFILED_CALLS) -> float | None:
    """Seconds that a GPU computes for one call of an arm, what the host needs to launch it left out; None on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        busy = busy_seconds(_profile(pathlib.Path(folder), [arm], calls))
    return busy / calls or None


def kernel_names(events: Sequence[dict]) -> list[str]:
    """Distinct names of what ran on GPU streams, in a trace of Chrome's trace event format."""
    return list(dict.fromkeys(event["name"] for event in _on_streams(events)))


def busy_seconds(events: Sequence[dict]) -> float:
    """The durations, microseconds in such a trace, of everything that ran on GPU streams."""
    return sum(event["dur"] for event in _on_streams(events)) / 1e6


def _profile(folder: pathlib.Path, arms: Sequence[Arm], calls: int) -> list[dict]:
    with jax.profiler.trace(str(folder)):
        for arm in arms:
            with jax.profiler.TraceAnnotation(arm.name):
                jax.block_until_ready(arm.enqueue(calls))
    latest = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(latest, "rt") as file:
        return json.load(file)["traceEvents"]


def _on_streams(events: Sequence[dict]) -> list[dict]:
    """A stream is a thread called "Stream #13(Compute)" of a process called "/device:GPU:0"; its other threads repeat
    the same time under names of XLA modules and operations."""
    devices, streams = set(), set()
    for event in events:
        name = event.get("args", {}).get("name", "")
        if event.get("name") == "process_name" and "/device:GPU" in name:
            devices.add(event["pid"])
        if event.get("name") == "thread_name" and name.startswith("Stream"):
            streams.add((event["pid"], event["tid"]))
    return [
        event
        for event in events
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams
    ]
