# SPDX-License-Identifier: Apache-2.0
"""Search by Optuna's tree-structured Parzen estimator, kept inside the space.

Optuna draws each parameter from its own list of values, while a space also has
constraints between them and must not be walked twice. So Optuna only suggests: the
config tried is the unseen member of the space nearest to its suggestion, and that is
what Optuna is told about.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig, Value
from portable_backend.warmup.search import Proposal, Space, Trial
from portable_backend.warmup.strategies import BaseStrategy


class Bayesian(BaseStrategy):
    """Optuna's multivariate TPE over categorical parameters.

    Arguments as for `BaseStrategy`. Invalid trials are told as failed: the model
    learns nothing from them but is not shown a made-up time.

    Raises:
        UnsupportedError: Optuna is not installed.
    """

    STARTUP = 32
    CANDIDATES = 16

    def __init__(self, space: Space, *, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(space, seed=seed, **kwargs)
        try:
            import numpy as np
            import optuna
        except ImportError as error:
            raise UnsupportedError(
                f"strategy bayesian needs Optuna, which cannot be imported ({error}); "
                "pip install 'portable-backend[tune]', or choose another strategy"
            ) from error
        self._np, self._optuna = np, optuna
        self._values = _values(space)
        self._indices = {
            name: {value: i for i, value in enumerate(found)}
            for name, found in self._values.items()
        }
        # Optuna sees positions in these lists, of whatever type the values are.
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(tuple(range(len(found))))
            for name, found in self._values.items()
        }
        self._codes = np.array([self._encode(c) for c in space.configs])
        self._ordered = np.array([_is_ordered(v) for v in self._values.values()])
        self._open = np.ones(len(space.configs), dtype=bool)
        self._position = {c: i for i, c in enumerate(space.configs)}
        with warnings.catch_warnings(), _quiet(optuna):
            # Optuna 4 calls both options experimental.
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=seed,
                n_startup_trials=0,
                n_ei_candidates=self.CANDIDATES,
                gamma=_good_trials,
                multivariate=True,
            )
            self._study = optuna.create_study(sampler=sampler)

    def _next(self) -> Proposal | None:
        if not self._open.any():
            return None
        if len(self.trials) < self.STARTUP:
            config = self.unseen_at_random()
        else:
            config = self._suggested()
        return None if config is None else Proposal(config, self.rounds)

    def _suggested(self) -> KernelConfig:
        """The unseen config nearest to what Optuna suggests."""
        np = self._np
        suggestion = self._study.ask(self._distributions)
        wanted = np.array([suggestion.params[name] for name in self._values])
        self._study.tell(suggestion, state=self._optuna.trial.TrialState.FAIL)
        steps = np.abs(self._codes - wanted)
        # An unordered parameter differs or not; an ordered one by steps, but never
        # by more than that, lest far-off values count as several parameters.
        far = np.where(self._ordered, 1 - 0.5**steps, steps > 0).sum(axis=1)
        far[~self._open] = np.inf
        nearest: list[int] = np.flatnonzero(far <= far.min() + 1e-9).tolist()
        return self.space.configs[self.rng.choice(nearest)]

    def _note(self, proposal: Proposal) -> None:
        super()._note(proposal)
        if proposal.rounds == self.rounds:
            self._open[self._position[proposal.config]] = False

    def _learn(self, trial: Trial) -> None:
        state = self._optuna.trial.TrialState
        codes = dict(zip(self._values, self._encode(trial.config), strict=True))
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state.FAIL if trial.time_us is None else state.COMPLETE,
                params=codes,
                distributions=self._distributions,
                value=trial.time_us,
            )
        )

    def _encode(self, config: KernelConfig) -> list[int]:
        return [self._indices[name][config.get(name)] for name in self._values]


def _good_trials(count: int) -> int:
    """How many of the trials count as fast; Optuna's tenth narrows too early here."""
    return min(50, count // 5 + 1)


def _values(space: Space) -> dict[str, list[Value]]:
    """The values of each parameter that has more than one, the numbers in order."""
    names = dict.fromkeys(name for config in space.configs for name in config)
    found: dict[str, list[Value]] = {}
    for name in names:
        values = {config.get(name) for config in space.configs}
        if len(values) > 1:
            found[name] = sorted(values, key=_sort_key)
    return found


def _sort_key(value: Value) -> tuple[str, float, str]:
    number = float(value) if isinstance(value, int) else 0.0
    return type(value).__name__, number, str(value)


def _is_ordered(values: list[Value]) -> bool:
    return all(type(v) is int for v in values)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
