# SPDX-License-Identifier: Apache-2.0
"""A device that answers measurements from a recorded sweep."""

import random
import statistics
from collections.abc import Iterator, Sequence

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import Proposal, Trial
from portable_backend.warmup.sweeps import Row, Sweep


class ReplayDevice:
    """Measures from a recorded sweep; pass `device.measure` to `search`.

    A trial of `r` rounds gets the median of `r` of the recorded rounds. Which ones
    depends on the seed, the config and `r` alone, so that a resumed search meets the
    same times in whatever order it asks.

    Args:
        sweep: what was recorded.
        seed: of the choice of rounds.
        round_s: seconds that a round of timing is taken to last.

    Attributes:
        trials: measurements answered.
        cost: the same in trials of full fidelity.
        compiled: different configs asked for.
        seconds: what the trials are taken to have lasted; a config compiles once.
    """

    def __init__(self, sweep: Sweep, *, seed: int = 0, round_s: float = 0.02) -> None:
        self.sweep, self.seed, self.round_s = sweep, seed, round_s
        self.rounds = sweep.rounds
        self.trials = 0
        self.cost = 0.0
        self.seconds = 0.0
        self._rows = {row.config: row for row in sweep.rows}
        self._names = {c: repr(sorted(c.items())) for c in self._rows}
        self._compiled: set[KernelConfig] = set()

    @property
    def exhaustive_s(self) -> float:
        """Seconds that trying everything at full fidelity would last."""
        timed = sum(bool(row.times_us) for row in self.sweep.rows)
        setup_s = sum(row.setup_s for row in self.sweep.rows)
        return setup_s + timed * self.rounds * self.round_s

    @property
    def compiled(self) -> int:
        return len(self._compiled)

    def measure(self, proposals: Sequence[Proposal]) -> Iterator[Trial]:
        """Yield a trial for each proposal.

        Raises:
            ValueError: a config was not recorded, or not for as many rounds.
        """
        for proposal in proposals:
            trial = self._trial(proposal)
            self.seconds += trial.seconds
            yield trial

    def _trial(self, proposal: Proposal) -> Trial:
        config, rounds = proposal.config, proposal.rounds
        row = self._rows.get(config)
        if row is None:
            raise bad_argument(
                "config", "one of the sweep", dict(config), "search the sweep's configs"
            )
        if not 1 <= rounds <= self.rounds:
            raise bad_argument(
                "rounds",
                f"between 1 and the {self.rounds} recorded",
                rounds,
                "make the strategy with rounds=device.rounds",
            )
        self.trials += 1
        self.cost += rounds / self.rounds
        seconds = 0.0 if config in self._compiled else row.setup_s
        self._compiled.add(config)
        if row.invalid is not None:
            return Trial(config, rounds, None, row.invalid, row.reason, seconds)
        time_us = statistics.median(self._drawn(row, rounds))
        return Trial(config, rounds, time_us, seconds=seconds + rounds * self.round_s)

    def _drawn(self, row: Row, rounds: int) -> list[float]:
        rng = random.Random(f"{self.seed} {rounds} {self._names[row.config]}")
        return rng.sample(row.times_us, rounds)
