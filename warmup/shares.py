# SPDX-License-Identifier: Apache-2.0
"""How a budget in seconds is shared among units of work."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from portable_backend.errors import bad_argument
from portable_backend.warmup.tuning_report import Task

# In less than this nothing is compiled, checked, timed and confirmed: units that come
# last get none rather than all of them too little.
LEAST_S = 3.0
# In so much several batches compile: a unit that has it need not be spared the waits.
ENOUGH_S = 12.0


@dataclass(frozen=True)
class Waits:
    """Seconds for which a unit may wait without their counting as its own.

    Attributes:
        start_s: until compilers and measurer have started, which all units need.
        compile_s: for configs to compile.
    """

    start_s: float = 0.0
    compile_s: float = 0.0


NO_WAITS = Waits()


class Shares:
    """Grants seconds to units one by one; what a unit leaves over goes to the others.

    Half of what is left is shared equally, half by weight: no unit that is expected to
    matter little is left without.

    Args:
        tasks: all units.
        budget_s: seconds overall; None grants without limit.
        lanes: how many units are worked on at once.
        clock: seconds; replaced in tests.

    Raises:
        ValueError: the budget is negative.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        budget_s: float | None,
        *,
        lanes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_s is not None and not budget_s >= 0:
            raise bad_argument(
                "budget_s", "None or at least 0", budget_s, "pass a number of seconds"
            )
        self.budget_s, self._clock = budget_s, clock
        self._left = {task.key: max(task.weight, 0.0) for task in tasks}
        self._free_s = (budget_s or 0.0) * lanes
        self._granted: dict[object, float] = {}
        self._waits_s: dict[object, float] = {}
        self._started = clock()

    def grant(self, task: Task) -> float | None:
        """Seconds for a unit that begins now; 0 if there are none; None: no limit."""
        weight = self._left.pop(task.key, max(task.weight, 0.0))
        if self.budget_s is None:
            return None
        count, weights = 1 + len(self._left), weight + sum(self._left.values())
        by_weight = 0.5 * (weight / weights if weights else 1 / count)
        share = 0.5 / count + by_weight
        ends_in = self.budget_s - (self._clock() - self._started)
        seconds = min(max(self._free_s * share, LEAST_S), self._free_s, ends_in)
        if seconds < min(1.0, self.budget_s):  # a rest that serves nothing
            seconds = 0.0
        short_s = max(0.0, ENOUGH_S - seconds)
        self._waits_s[task.key] = min(self._free_s * by_weight, short_s)
        self._free_s -= seconds
        self._granted[task.key] = seconds
        return seconds

    def waits(self, task: Task) -> Waits:
        """How long a unit may wait beyond its grant, within the budget.

        For compilers as long as what it was granted for its weight, if that is little:
        what matters most is measured in the time that it has, and the others get
        their turns.
        """
        if self.budget_s is None:
            return NO_WAITS
        spent = self._clock() - self._started
        spare = max(0.0, self.budget_s - spent - self._granted.get(task.key, 0.0))
        return Waits(spare, min(self._waits_s.get(task.key, 0.0), spare))

    def settle(self, task: Task, seconds: float) -> None:
        """Take back what a unit has left over, or what it took beyond its grant."""
        if self.budget_s is not None:
            self._free_s += self._granted.pop(task.key, 0.0) - seconds
