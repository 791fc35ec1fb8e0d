"""XLA profiler traces, and the names of the kernels in them."""

import gzip
import json
import pathlib
from collections.abc import Sequence

import jax

from benchmarks.timing import Arm


def write_trace(folder: pathlib.Path, arms: Sequence[Arm]) -> list[str]:
    """Three calls of each arm under the profiler, each arm's under its name.

    Returns:
      The names of the kernels that ran on a GPU, in order of appearance; none on a CPU.
    """
    with jax.profiler.trace(str(folder)):
        for arm in arms:
            with jax.profiler.TraceAnnotation(arm.name):
                jax.block_until_ready(arm.enqueue(3))
    latest = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(latest, "rt") as file:
        return kernel_names(json.load(file)["traceEvents"])


def kernel_names(events: Sequence[dict]) -> list[str]:
    """Distinct names of what ran on GPU streams, in a trace of Chrome's trace event format.

    A stream is a thread called "Stream #13(Compute)" of a process called "/device:GPU:0"; its other threads
    repeat the same time under names of XLA modules and operations.
    """
    devices, streams = set(), set()
    for event in events:
        name = event.get("args", {}).get("name", "")
        if event.get("name") == "process_name" and "/device:GPU" in name:
            devices.add(event["pid"])
        if event.get("name") == "thread_name" and name.startswith("Stream"):
            streams.add((event["pid"], event["tid"]))
    return list(
        dict.fromkeys(
            event["name"]
            for event in events
            if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams
        )
    )
