"""The benchmark command, `python -m benchmarks` from the root of a clone; what it measures: NOTES.md."""
