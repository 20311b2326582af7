# SPDX-License-Identifier: Apache-2.0
"""Tuning that ends in time, whatever happens: for an engine that starts.

It runs in a process of its own, so that nothing of it is left in the engine's, neither
memory nor modules. Where that process does not come to an end by itself, it is killed:
records that it has written stay.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.spread import GpuCrew, Lost, spread
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Event, Outcome, Task

# Grades below these are worth tuning for.
GOOD_GRADES = ("exact", "nearest")
# Shares of the budget: what units are promised, when the process is told to end, and
# how long that may take, twice. A unit exceeds its promise by a compilation or so; what
# is cut off has no record.
_PLANNED, _LIMIT, _GRACE = 0.92, 1.03, 0.02
_MAX_GRACE_S = 1.0
# Below this a process does not even come up.
LEAST_BUDGET_S = 1.0


@dataclass
class TimedTuning:
    """What came of it.

    Attributes:
        outcomes: of each task, in their order.
        problem: why it ended before its time.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    problem: str | None = None

    @property
    def done(self) -> int:
        """Units that have a record now."""
        states = ("tuned", "default", "known")
        return sum(x.state in states or x.record is not None for x in self.outcomes)


def missing(
    tasks: Sequence[Task], lookup: Lookup, good: Collection[str] = GOOD_GRADES
) -> list[Task]:
    """Those whose records are of no grade that is `good`, the most valuable first."""
    found = [t for t in tasks if lookup.choose(t.key).grade not in good]
    return sorted(found, key=lambda task: -task.weight)


def tune_in_time(
    tasks: Sequence[Task],
    recipe: Recipe,
    options: TuneOptions,
    *,
    gpu: str,
    cache_dir: Path,
    cache_layers: Sequence[Path] = (),
    budget_s: float,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> TimedTuning:
    """Tune the first tasks that there is time for; takes 10 % more than that at most.

    Args:
        tasks: the most valuable first.
        recipe, options: of the tuner.
        gpu: as CUDA_VISIBLE_DEVICES has it.
        cache_dir, cache_layers: of records.
        budget_s: seconds; with less than `LEAST_BUDGET_S` nothing is tuned.
        on_outcome: told as units are done.

    Raises:
        KeyboardInterrupt: somebody else's.
    """
    began = time.monotonic()
    if not tasks or budget_s < LEAST_BUDGET_S:
        return TimedTuning([Outcome(t.key, "unreached", "no budget") for t in tasks])
    crew = GpuCrew(
        [gpu],
        recipe,
        options,
        cache_dir=cache_dir.absolute(),
        cache_layers=[folder.absolute() for folder in cache_layers],
        restarts=0,
        grace_s=min(_MAX_GRACE_S, _GRACE * budget_s),
    )
    timed = _Timed(crew, began + _LIMIT * budget_s)
    with contextlib.closing(crew):
        outcomes = spread(
            tasks, timed, budget_s=_PLANNED * budget_s, on_outcome=on_outcome
        )
    interrupted = any("interrupted" in (x.state, x.reason) for x in outcomes)
    if interrupted and timed.problem is None:
        raise KeyboardInterrupt
    return TimedTuning(outcomes, timed.problem)


class _Timed:
    """A crew that is stopped at a time, and with its first worker that is lost."""

    def __init__(self, crew: GpuCrew, ends: float) -> None:
        self.crew, self.ends = crew, ends
        self.problem: str | None = None
        self.idle, self.alive, self.close = crew.idle, crew.alive, crew.close
        self.start, self.interrupt = crew.start, crew.interrupt

    def poll(self, timeout_s: float) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        left = self.ends - time.monotonic()
        if left <= 0:
            self._stop("it did not end in time")
        for worker, message in self.crew.poll(max(0.0, min(timeout_s, left))):
            if isinstance(message, Lost):
                self._stop(message.reason)
            yield worker, message

    def _stop(self, problem: str) -> None:
        self.problem = problem
        raise KeyboardInterrupt  # as `spread` is stopped
