# SPDX-License-Identifier: Apache-2.0
"""The search loop, and the words that everything around it shares.

A strategy proposes configs (`ask`), the loop has them measured, writes each result to
the log and hands it back (`tell`). The loop owns budget and log, the strategy owns
nothing but its choice, so that every strategy can be budgeted, resumed and replayed.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig

INVALID_REASONS = (
    "resources",
    "compile",
    "runtime",
    "correctness",
    "timeout",
    "over-limit",
)


@dataclass(frozen=True)
class Proposal:
    """A config to measure, and how many rounds of timing to spend on it."""

    config: KernelConfig
    rounds: int


@dataclass(frozen=True)
class Trial:
    """What became of a proposal.

    Attributes:
        config: what was tried.
        rounds: rounds of timing behind `time_us`: the fidelity.
        time_us: median time; None for an invalid config.
        invalid: None, or one of `INVALID_REASONS`.
        reason: the message that goes with `invalid`, for people.
        seconds: what the trial took, compilation and checks included.
        times_us: of each round, on the scale of `time_us`, where the measurer tells.
        timing_s: of `seconds`, what the rounds took.
    """

    config: KernelConfig
    rounds: int
    time_us: float | None
    invalid: str | None = None
    reason: str = ""
    seconds: float = 0.0
    times_us: tuple[float, ...] = ()
    timing_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise bad_argument(
                "rounds", "at least 1", self.rounds, "a trial takes a round of timing"
            )
        if self.invalid is None:
            if self.time_us is None or not 0 < self.time_us < float("inf"):
                raise bad_argument(
                    "time_us",
                    "positive and finite for a valid trial",
                    self.time_us,
                    "name the reason in invalid where a config has no time",
                )
        elif self.invalid not in INVALID_REASONS:
            raise bad_argument(
                "invalid",
                f"None or one of {', '.join(INVALID_REASONS)}",
                self.invalid,
                "choose the nearest and say more in reason",
            )
        elif self.time_us is not None:
            raise bad_argument(
                "time_us",
                "None for an invalid trial",
                self.time_us,
                "an invalid config has no time that counts",
            )


@dataclass(frozen=True)
class Budget:
    """When to stop; None means without limit.

    Attributes:
        seconds: of measuring and choosing, those of the resumed log included.
        trials: in trials of full fidelity; one of fewer rounds costs its fraction.
    """

    seconds: float | None = None
    trials: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("trials", self.trials)):
            if value is not None and not value >= 0:
                raise bad_argument(name, "None or at least 0", value, "pass a number")


class Space(Protocol):
    """What a strategy needs to know about the configs to search."""

    @property
    def configs(self) -> Sequence[KernelConfig]:
        """Every config, in a fixed order, each once."""

    def sample(self, n: int, rng: random.Random) -> list[KernelConfig]:
        """Return up to `n` different configs, drawn evenly."""

    def neighbours(self, config: KernelConfig) -> list[KernelConfig]:
        """Return the configs one step from `config`, in a fixed order."""

    def mutate(self, config: KernelConfig, rng: random.Random) -> KernelConfig:
        """Return a config near `config`."""

    def crossover(
        self, a: KernelConfig, b: KernelConfig, rng: random.Random
    ) -> KernelConfig:
        """Return a config that takes each parameter from one of two."""


class Strategy(Protocol):
    """How to choose what to try next; the same choices for the same seed and trials."""

    rounds: int

    def ask(self, n: int = 1) -> list[Proposal]:
        """Return up to `n` proposals; none once nothing is left to try.

        May also be none while proposals are still to be told.
        """

    def tell(self, trial: Trial) -> None:
        """Take in a result; one that was never asked for is welcome too."""

    def best(self) -> Trial | None:
        """Return the fastest valid trial, of full fidelity if there is one."""


class Log(Protocol):
    """What the loop needs of `trial_log.TrialLog`."""

    trials: list[Trial]

    def append(self, trial: Trial) -> None: ...


# Measures a batch and yields one trial per proposal, in their order, while there is
# time.
Measure = Callable[[Sequence[Proposal]], Iterable[Trial]]


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the fastest valid trial, or None.
        trials: every trial, the resumed ones included, in order.
        stopped: "budget", "exhausted", "condition" or "interrupted".
        cost: what the trials cost, in trials of full fidelity.
        seconds: what the search took, the resumed trials included.
    """

    best: Trial | None
    trials: tuple[Trial, ...]
    stopped: str
    cost: float
    seconds: float


def search(
    strategy: Strategy,
    measure: Measure,
    budget: Budget,
    log: Log | None = None,
    *,
    batch: int = 1,
    stop: Callable[[Trial], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Search until the budget is spent, the space is, or `stop` says so.

    Trials that `log` already holds are told to the strategy as it asks for them, and
    not measured again: a search that was killed goes on as if it never stopped, given
    the same strategy, seed, warm start and `batch`. Logged trials that the strategy
    does not ask for, because one of those differs, are told to it as soon as that
    shows: their measurements still count, only the order differs.

    Args:
        strategy: fresh, even when resuming.
        measure: takes a batch of proposals, yields a trial for each in their order;
            once the time is out it may leave some out. What it raises passes through;
            the trials yielded before are in the log.
        budget: kept to the trial: none is begun that `budget.trials` cannot pay, and
            none after `budget.seconds` have passed.
        log: where trials are read from and appended to.
        batch: how many proposals to measure at once.
        stop: called with the best trial so far; True ends the search.
        clock: seconds; replaced in tests.

    Returns:
        The best trial and everything tried. KeyboardInterrupt returns as well, with
        `stopped="interrupted"`.

    Raises:
        ValueError: `batch` is not positive.
        RuntimeError: `measure` yields a trial that does not fit its proposal.
    """
    if batch < 1:
        raise bad_argument(
            "batch", "at least 1", batch, "leave it out to measure singly"
        )
    loop = _Loop(strategy, measure, budget, log, stop, clock)
    try:
        stopped = loop.run(batch)
    except KeyboardInterrupt:
        stopped = "interrupted"
    loop.take_rest_of_log()
    return SearchResult(
        strategy.best(), tuple(loop.done), stopped, loop.cost, loop.seconds
    )


class _Loop:
    """State of one `search`."""

    def __init__(
        self,
        strategy: Strategy,
        measure: Measure,
        budget: Budget,
        log: Log | None,
        stop: Callable[[Trial], bool] | None,
        clock: Callable[[], float],
    ) -> None:
        self.strategy, self.measure, self.budget = strategy, measure, budget
        self.log, self.stop, self.clock = log, stop, clock
        self.done: list[Trial] = []
        self.cost = 0.0
        self._started = clock()
        self._logged_s = 0.0
        self._measured_s = 0.0
        self._known: dict[Proposal, Trial] = {}
        for trial in log.trials if log else ():
            self._known.setdefault(Proposal(trial.config, trial.rounds), trial)

    @property
    def seconds(self) -> float:
        # Replayed trials report more than the clock saw, slow strategies less.
        here = max(self._measured_s, self.clock() - self._started)
        return self._logged_s + here

    def run(self, batch: int) -> str:
        while True:
            if self._spent():
                return "budget"
            asked = self.strategy.ask(batch)
            if not asked:
                return "exhausted"
            known = [p for p in asked if p in self._known]
            new = [p for p in asked if p not in self._known]
            for proposal in known:
                self._take(self._known.pop(proposal), resumed=True)
            if new:
                self.take_rest_of_log()
            if self._reached():
                return "condition"
            affordable = self._affordable(new)
            for trial in self._measured(affordable):
                if self.log is not None:
                    self.log.append(trial)
                self._take(trial)
                if self._reached():
                    return "condition"
                if self._out_of_time():
                    return "budget"
            if len(affordable) < len(new):
                return "budget"

    def take_rest_of_log(self) -> None:
        for trial in self._known.values():
            self._take(trial, resumed=True)
        self._known.clear()

    def _measured(self, proposals: Sequence[Proposal]) -> Iterable[Trial]:
        if not proposals or self._out_of_time():
            return
        missing = list(proposals)
        for trial in self.measure(proposals):
            if not missing or Proposal(trial.config, trial.rounds) != missing[0]:
                raise RuntimeError(
                    f"measure must yield one trial per proposal in their order, got "
                    f"{trial} for {missing[0] if missing else 'none'}; yield an "
                    "invalid trial for a config that cannot run"
                )
            missing.pop(0)
            yield trial
        if missing and not self._out_of_time():
            raise RuntimeError(
                f"measure must yield one trial per proposal, got none for {missing}; "
                "yield an invalid trial for a config that cannot run"
            )

    def _take(self, trial: Trial, resumed: bool = False) -> None:
        self.strategy.tell(trial)
        self.done.append(trial)
        self.cost += self._price(trial.rounds)
        if resumed:
            self._logged_s += trial.seconds
        else:
            self._measured_s += trial.seconds

    def _price(self, rounds: int) -> float:
        return rounds / self.strategy.rounds

    def _affordable(self, proposals: list[Proposal]) -> list[Proposal]:
        if self.budget.trials is None:
            return proposals
        cost = self.cost
        for i, proposal in enumerate(proposals):
            cost += self._price(proposal.rounds)
            if cost > self.budget.trials + 1e-9:  # sums of fractions round
                return proposals[:i]
        return proposals

    def _spent(self) -> bool:
        limit = self.budget.trials
        return (limit is not None and self.cost >= limit) or self._out_of_time()

    def _out_of_time(self) -> bool:
        limit = self.budget.seconds
        return limit is not None and self.seconds >= limit

    def _reached(self) -> bool:
        best = self.strategy.best()
        return self.stop is not None and best is not None and self.stop(best)
