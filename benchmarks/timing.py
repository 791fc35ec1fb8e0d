"""The one timing function of the project.

A GPU's clock, its temperature and its neighbours drift over seconds, so two programs timed one after the
other differ by more than what separates them. Here the arms take turns: one round is one sample of every arm,
the order is rotated from round to round, and arms are compared within a round only:

    ratio(a, b) = median over rounds r of  seconds[b][r] / seconds[a][r]      (> 1: a is faster)

A sample is a batch of calls between two clock readings with one wait at its end. On a GPU the host enqueues
the whole batch while the device works, so that the launch of a call hides behind the call before it; the
batch is long enough (`sample_seconds`) for the wait itself, some tens of microseconds, to vanish.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Buffers of one arm together exceed this, so that a call finds none of its inputs in a cache: twice the
# largest last-level cache in use, the 256 MiB of the MI300X (an H200's L2 holds 50 MB).
CACHE_BYTES = 512 * 2**20
MAX_INPUT_SETS = 256


@dataclasses.dataclass
class Arm:
    """One way of computing a case.

    Attributes:
      name: as printed.
      call: a compiled function; `call(*inputs)` returns its outputs without waiting for them.
      input_sets: argument lists of equal shapes, walked in turn; see `rotate`.
      state_argument: None, or the position of the argument that the call's last output replaces before the
        same set is used again: a decode step, whose state goes in and comes out. The call may donate that
        argument.
    """

    name: str
    call: Callable[..., Any]
    input_sets: list[list[Any]]
    state_argument: int | None = None
    enqueued: int = 0

    def enqueue(self, calls: int) -> Any:
        """Start `calls` calls, wait for none, return the outputs of the last."""
        outputs = None
        for _ in range(calls):
            inputs = self.input_sets[self.enqueued % len(self.input_sets)]
            outputs = self.call(*inputs)
            if self.state_argument is not None:
                inputs[self.state_argument] = outputs[-1]
            self.enqueued += 1
        return outputs


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of several arms.

    Attributes:
      seconds: `seconds[arm][round]` is the time of one call.
      calls: `calls[arm]` is the number of calls in a sample.
    """

    seconds: dict[str, list[float]]
    calls: dict[str, int]

    def median(self, arm: str) -> float:
        """Median time of one call, in seconds."""
        return statistics.median(self.seconds[arm])

    def ratio(self, arm: str, to: str) -> float:
        """How many times faster `arm` is than `to`: the median of the ratios within a round."""
        pairs = zip(self.seconds[arm], self.seconds[to], strict=True)
        return statistics.median(slow / fast for fast, slow in pairs)

    def wins(self) -> dict[str, int]:
        """Rounds in which each arm was the fastest; of arms that tie, the first named wins."""
        won = dict.fromkeys(self.seconds, 0)
        for times in zip(*self.seconds.values(), strict=True):
            won[min(zip(times, won, strict=True), key=lambda pair: pair[0])[1]] += 1
        return won


def rotation(arms: Sequence[Any], turn: int) -> list[Any]:
    """The arms in the order of round `turn`: each round begins one arm further on."""
    start = turn % len(arms)
    return [*arms[start:], *arms[:start]]


def rotate(inputs: Sequence[jax.Array], *, cache_bytes: int = CACHE_BYTES) -> list[list[jax.Array]]:
    """The list of arguments itself, and so many copies that all buffers together exceed `cache_bytes`."""
    size = sum(array.nbytes for array in inputs)
    sets = min(MAX_INPUT_SETS, max(1, math.ceil(cache_bytes / max(size, 1))))
    return [list(inputs), *([jnp.copy(array) for array in inputs] for _ in range(sets - 1))]


def time_arms(
    arms: Sequence[Arm],
    *,
    rounds: int,
    sample_seconds: float = 0.02,
    max_calls: int = 2000,
    overlap: bool = True,
    limit_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    on_sample: Callable[[str], None] = lambda arm: None,
) -> Timing:
    """Time arms side by side; see the head of this file.

    Args:
      arms: distinct names; each is called once before any clock is read, then until a sample is long enough.
      rounds: samples of each arm.
      sample_seconds: a sample lasts at least about this long, unless that takes more than `max_calls` calls.
      limit_seconds: fewer rounds are run, but never fewer than 3, where all of them would take longer than
        this.
      overlap: wait once per sample (a GPU runs calls in order). False waits after every call: XLA's CPU
        client may run calls that do not depend on each other at the same time.
      clock: seconds; another one in tests.
      on_sample: told the arm's name after each sample (progress).

    Returns:
      `Timing`, with equally many samples of each arm.

    Raises:
      ValueError: no arm, two arms of one name, or rounds < 1.
    """
    if len({arm.name for arm in arms}) != len(arms) or not arms:
        raise ValueError(f"arms must be one or more with distinct names, got {[arm.name for arm in arms]}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")

    def sample(arm: Arm, calls: int) -> float:
        """Seconds that `calls` calls take together."""
        start = clock()
        if overlap:
            jax.block_until_ready(arm.enqueue(calls))
        else:
            for _ in range(calls):
                jax.block_until_ready(arm.enqueue(1))
        return clock() - start

    calls, round_seconds = {}, 0.0
    for arm in arms:
        jax.block_until_ready(arm.enqueue(1))
        # Doubling until a sample is long enough also brings the clock of an idle GPU up.
        count = 1
        while (taken := sample(arm, count)) < sample_seconds and count < max_calls:
            wanted = math.ceil(count * sample_seconds / taken) if taken > 0 else max_calls
            count = min(max_calls, max(2 * count, wanted))
        calls[arm.name] = count
        round_seconds += taken
    if rounds > 3 and rounds * round_seconds > limit_seconds:
        rounds = max(3, int(limit_seconds / round_seconds))

    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(rounds):
        for arm in rotation(arms, turn):
            seconds[arm.name].append(sample(arm, calls[arm.name]) / calls[arm.name])
            on_sample(arm.name)
    return Timing(seconds=seconds, calls=calls)
