# SPDX-License-Identifier: Apache-2.0
"""How to tune: what can be chosen, and what follows from it."""

import importlib.util
import math
from dataclasses import dataclass

from portable_backend.errors import bad_argument
from portable_backend.warmup.strategies import STRATEGIES, Halving

# "auto": over the synthetic sweeps bayesian compiles the fewest configs to within 1 %
# of the optimum (3.4 % of the space, evolutionary 3.8 %, halving 4.2 %), and compiling
# is what takes the time; evolutionary where Optuna is missing.
AUTO = "auto"
# Configs that halving tries for the price of one trial of full fidelity.
_SCREENED = 1 / (1 / 9 + 1 / Halving.REDUCTION / 3 + 1 / Halving.REDUCTION**2)
# What the resource model keeps, per config that may be tried.
_KEPT_PER_TRIAL, _LEAST_KEPT = 4, 256


@dataclass(frozen=True)
class TuneOptions:
    """How to tune.

    Attributes:
        strategy: a name of `STRATEGIES`, or "auto".
        seed: of the strategy and of the data that configs are confirmed on.
        trials: configs to try for each unit; None: as many as the seconds allow.
        candidates: search no more than so many, the best by the resource model's
            estimate; None: all that it leaves.
        patience: a search ends after so many configs in a row that were no faster.
        warm_start: whether to try first what neighbours and a cost model suggest.
        again: whether to tune what has a record.
        batch: configs measured, and as many compiled ahead, before choosing anew.
        finalists: how many of the fastest are confirmed.
        min_gain: the least share of the default's time to save, whatever the noise.
        attempts: how often a unit is tried where tools break.
    """

    strategy: str = AUTO
    seed: int = 0
    trials: int | None = 128
    candidates: int | None = 2048
    patience: int | None = None
    warm_start: bool = True
    again: bool = False
    batch: int = 16
    finalists: int = 3
    min_gain: float = 0.01
    attempts: int = 2

    def __post_init__(self) -> None:
        if self.strategy not in (AUTO, *STRATEGIES):
            raise bad_argument(
                "strategy",
                f"one of {', '.join((AUTO, *STRATEGIES))}",
                self.strategy,
                "choose one of them",
            )
        counts = ("batch", "finalists", "attempts", "trials", "candidates", "patience")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_argument(name, "at least 1", value, "pass a count")

    @property
    def chosen(self) -> str:
        """The strategy that "auto" stands for here."""
        if self.strategy != AUTO:
            return self.strategy
        return "bayesian" if importlib.util.find_spec("optuna") else "evolutionary"

    @property
    def cost(self) -> float | None:
        """`trials` in trials of full fidelity, which is how a search counts."""
        if self.trials is None or self.chosen != "halving":
            return self.trials
        return self.trials / _SCREENED

    @property
    def patience_in_trials(self) -> float:
        """`patience` for trials of whatever fidelity."""
        per_config = _SCREENED if self.chosen == "halving" else 1.0
        return math.inf if self.patience is None else self.patience * per_config

    @property
    def keep(self) -> int:
        """How many configs the resource model leaves."""
        if self.trials is None:
            return 1 << 30
        return max(_LEAST_KEPT, _KEPT_PER_TRIAL * self.trials)
