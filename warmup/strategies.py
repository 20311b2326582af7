# SPDX-License-Identifier: Apache-2.0
"""Search strategies, by name.

All of them try the incumbent first and a given ranking next, never leave the space,
and never propose a config twice at the same fidelity. They differ in what follows.

| name         | proposes                                             | fidelity |
|--------------|------------------------------------------------------|----------|
| exhaustive   | every config in the order of the space               | full     |
| random       | every config in random order                         | full     |
| evolutionary | children and neighbours of the fastest               | full     |
| bayesian     | what a model of fast and slow configs prefers        | full     |
| halving      | many at one round, the fastest again at more and more | rising   |
"""

import bisect
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import Proposal, Space, Strategy, Trial

FULL_ROUNDS = 9


class BaseStrategy(ABC):
    """What the strategies have in common: warm start, bookkeeping, the best.

    Args:
        space: the configs to search.
        seed: of every random choice.
        rounds: the rounds of a trial of full fidelity.
        incumbent: what is in use today; tried before all else, at full fidelity.
        ranking: configs to try next, the most promising first: a cost model's, a
            neighbouring bucket's, another GPU's. Those outside the space are skipped.
            All are tried, so the caller cuts it to what is worth trying.

    Raises:
        ValueError: `rounds` is not positive, or `incumbent` is not in the space.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        rounds: int = FULL_ROUNDS,
        incumbent: KernelConfig | None = None,
        ranking: Sequence[KernelConfig] = (),
    ) -> None:
        if rounds < 1:
            raise bad_argument("rounds", "at least 1", rounds, "time a config once")
        self.space, self.rounds = space, rounds
        self.members = frozenset(space.configs)
        if incumbent is not None and incumbent not in self.members:
            raise bad_argument(
                "incumbent",
                "a member of the space",
                dict(incumbent),
                "leave it out, or add it to the space",
            )
        self.rng = random.Random(seed)
        self.trials: list[Trial] = []
        self._best: Trial | None = None
        self._seen: set[Proposal] = set()
        self._incumbent = incumbent
        self._ranking = iter([c for c in ranking if c in self.members])
        self._shuffled: list[KernelConfig] | None = None

    def ask(self, n: int = 1) -> list[Proposal]:
        asked: list[Proposal] = []
        while len(asked) < n:
            proposal = self._first() or self._next()
            if proposal is None:
                break
            self._note(proposal)
            asked.append(proposal)
        return asked

    def tell(self, trial: Trial) -> None:
        if trial.config not in self.members:
            raise bad_argument(
                "trial.config",
                "a member of the space",
                dict(trial.config),
                "tell trials of this space alone",
            )
        self._note(Proposal(trial.config, trial.rounds))
        self.trials.append(trial)
        if trial.invalid is None and (
            self._best is None or self._rank(trial) < self._rank(self._best)
        ):
            self._best = trial
        self._learn(trial)

    def best(self) -> Trial | None:
        return self._best

    def seen(self, config: KernelConfig, rounds: int | None = None) -> bool:
        """Whether the config was proposed or told at that fidelity (None: full)."""
        return Proposal(config, rounds or self.rounds) in self._seen

    def unseen_at_random(self, rounds: int | None = None) -> KernelConfig | None:
        """Return a config not yet seen at that fidelity, or None if all were."""
        if self._shuffled is None:
            self._shuffled = self.space.sample(len(self.space.configs), self.rng)
        for i in range(len(self._shuffled) - 1, -1, -1):
            if not self.seen(self._shuffled[i], rounds):
                # Those passed over stay seen, so they need no second look.
                del self._shuffled[i + 1 :]
                return self._shuffled[i]
        return None

    def _rank(self, trial: Trial) -> tuple[bool, float]:
        assert trial.time_us is not None
        return trial.rounds < self.rounds, trial.time_us

    def _first(self) -> Proposal | None:
        if self._incumbent is not None:
            config, self._incumbent = self._incumbent, None
            if not self.seen(config):
                return Proposal(config, self.rounds)
        for config in self._ranking:
            proposal = self._ranked(config)
            if proposal not in self._seen:
                return proposal
        return None

    def _ranked(self, config: KernelConfig) -> Proposal:
        """The proposal for a config of the ranking."""
        return Proposal(config, self.rounds)

    def _note(self, proposal: Proposal) -> None:
        self._seen.add(proposal)

    @abstractmethod
    def _next(self) -> Proposal | None:
        """The proposal after the warm start, new at its fidelity; None: no more."""

    def _learn(self, trial: Trial) -> None:  # noqa: B027  most need not
        """Take in a trial, beyond the bookkeeping."""


class Exhaustive(BaseStrategy):
    """Every config, in the order of the space."""

    _rest: Iterator[KernelConfig] | None = None

    def _next(self) -> Proposal | None:
        self._rest = self._rest or iter(self.space.configs)
        for config in self._rest:
            if not self.seen(config):
                return Proposal(config, self.rounds)
        return None


class Random(BaseStrategy):
    """Every config, in random order: what the others have to beat."""

    def _next(self) -> Proposal | None:
        config = self.unseen_at_random()
        return None if config is None else Proposal(config, self.rounds)


class Evolutionary(BaseStrategy):
    """Children of the fastest configs, and the neighbours of the very fastest.

    Half of the proposals cross two parents, each the fastest of a few drawn from the
    population, and mutate the child; the other half climb, trying the neighbours of
    the leaders one by one, so that the search ends in an optimum of its own
    neighbourhood. A population of the fastest, rather than of the youngest, never
    forgets a config that is hard to come by.
    """

    FOUNDERS = 32
    POPULATION = 32
    DRAWN = 3
    LEADERS = 8
    CLIMB = 0.6
    MUTATE = 0.7

    def __init__(self, space: Space, **kwargs: Any) -> None:
        super().__init__(space, **kwargs)
        # Every valid config by its time of highest fidelity, the fastest first.
        self._order: list[tuple[float, int]] = []
        self._times: dict[KernelConfig, Trial] = {}
        self._position = {c: i for i, c in enumerate(space.configs)}

    @property
    def entry_rounds(self) -> int:
        """The fidelity at which a new config is first tried."""
        return self.rounds

    def _next(self) -> Proposal | None:
        config = None
        if len(self.trials) >= self.FOUNDERS:
            config = self._descendant()
        config = config or self.unseen_at_random(self.entry_rounds)
        return None if config is None else Proposal(config, self.entry_rounds)

    def _learn(self, trial: Trial) -> None:
        known = self._times.get(trial.config)
        if trial.time_us is None or (known and known.rounds > trial.rounds):
            return
        position = self._position[trial.config]
        if known and known.time_us is not None:
            self._order.remove((known.time_us, position))
        bisect.insort(self._order, (trial.time_us, position))
        self._times[trial.config] = trial

    def _descendant(self) -> KernelConfig | None:
        """A new config from the fastest ones, or None if none was found."""
        elite = [self.space.configs[i] for _, i in self._order[: self.POPULATION]]
        if not elite:
            return None
        climbed = self._climb(elite) if self.rng.random() < self.CLIMB else None
        return climbed or self._child(elite)

    def _climb(self, elite: list[KernelConfig]) -> KernelConfig | None:
        for leader in elite[: self.LEADERS]:
            near = self.space.neighbours(leader)
            new = [c for c in near if self._is_new(c)]
            if new:
                return self.rng.choice(new)
        return None

    def _child(self, elite: list[KernelConfig]) -> KernelConfig | None:
        for _ in range(20):
            a, b = (
                elite[min(self.rng.randrange(len(elite)) for _ in range(self.DRAWN))]
                for _ in range(2)
            )
            child = self.space.crossover(a, b, self.rng)
            if self.rng.random() < self.MUTATE or not self._is_new(child):
                child = self.space.mutate(child, self.rng)
            if self._is_new(child):
                return child
        return None

    def _is_new(self, config: KernelConfig) -> bool:
        return config in self.members and not self.seen(config, self.entry_rounds)


class Halving(Evolutionary):
    """Screen at one round, then time the fastest again at more and more rounds.

    Successive halving without its barriers (after ASHA, Li et al., 2018): a config
    rises to the next rung as soon as it is among the fastest of its own, so that the
    search has finalists whenever its budget ends. New configs are drawn at random and,
    every other time, from the fastest so far. A low rung spares rounds of timing but
    no compilation, so this pays where timing is what costs.

    Once the whole space is screened, the finals of each rung are completed and the
    search ends.
    """

    REDUCTION = 8
    FINALISTS = 16
    GUIDED = 0.5

    def __init__(self, space: Space, **kwargs: Any) -> None:
        super().__init__(space, **kwargs)
        rungs = [self.rounds]
        while rungs[-1] > 1:
            rungs.append(max(1, rungs[-1] // 3))
        self._rungs = rungs[::-1]
        self._results: dict[int, list[tuple[float, int]]] = {r: [] for r in rungs}
        self._asked: dict[int, set[int]] = {r: set() for r in rungs}

    @property
    def entry_rounds(self) -> int:
        return self._rungs[0]

    def _ranked(self, config: KernelConfig) -> Proposal:
        return Proposal(config, self.entry_rounds)

    def _next(self) -> Proposal | None:
        config = None
        promoted = self._promotion(finals=False)
        if promoted is not None:
            return promoted
        if len(self.trials) >= self.FOUNDERS and self.rng.random() < self.GUIDED:
            config = self._descendant()
        config = config or self.unseen_at_random(self.entry_rounds)
        if config is not None:
            return Proposal(config, self.entry_rounds)
        return self._promotion(finals=True)

    def _note(self, proposal: Proposal) -> None:
        super()._note(proposal)
        if proposal.rounds in self._asked:
            self._asked[proposal.rounds].add(self._position[proposal.config])

    def _learn(self, trial: Trial) -> None:
        super()._learn(trial)
        if trial.time_us is not None and trial.rounds in self._results:
            entry = (trial.time_us, self._position[trial.config])
            bisect.insort(self._results[trial.rounds], entry)

    def _promotion(self, finals: bool) -> Proposal | None:
        """The fastest config of the highest rung that has earned the next."""
        for rung, above in reversed(list(itertools.pairwise(self._rungs))):
            results = self._results[rung]
            quota = len(results) // self.REDUCTION
            if finals:
                quota = max(quota, self.FINALISTS)
            for _, position in results[:quota]:
                if position not in self._asked[above]:
                    return Proposal(self.space.configs[position], above)
        return None


def _bayesian(space: Space, **kwargs: Any) -> Strategy:
    from portable_backend.warmup.bayesian import Bayesian

    return Bayesian(space, **kwargs)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "exhaustive": Exhaustive,
    "random": Random,
    "evolutionary": Evolutionary,
    "bayesian": _bayesian,
    "halving": Halving,
}


def make_strategy(
    name: str,
    space: Space,
    *,
    seed: int = 0,
    rounds: int = FULL_ROUNDS,
    incumbent: KernelConfig | None = None,
    ranking: Sequence[KernelConfig] = (),
) -> Strategy:
    """Return a fresh strategy; arguments as for `BaseStrategy`.

    Raises:
        ValueError: no strategy has that name, or an argument does not fit.
        UnsupportedError: "bayesian" without Optuna.
    """
    if name not in STRATEGIES:
        raise bad_argument(
            "strategy", f"one of {', '.join(STRATEGIES)}", name, "choose one of them"
        )
    return STRATEGIES[name](
        space, seed=seed, rounds=rounds, incumbent=incumbent, ranking=ranking
    )
