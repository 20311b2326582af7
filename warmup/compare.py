# SPDX-License-Identifier: Apache-2.0
"""How fast strategies find the optimum of recorded sweeps."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.replay import ReplayDevice
from portable_backend.warmup.search import Budget, Trial, search
from portable_backend.warmup.strategies import make_strategy
from portable_backend.warmup.sweeps import Sweep


@dataclass(frozen=True)
class Point:
    """Where a search stood when its answer changed.

    Attributes:
        share: trials so far, as a share of an exhaustive search's.
        compiled: configs tried so far, as a share of all.
        quality: the optimum's time over that of the answer, by the whole record.
    """

    share: float
    compiled: float
    quality: float


@dataclass(frozen=True)
class Run:
    """One strategy with one seed on one sweep.

    Attributes:
        sweep, strategy, seed: what ran.
        points: each change of the answer, in order.
        seconds: time taken, as a share of an exhaustive search's.
    """

    sweep: str
    strategy: str
    seed: int
    points: tuple[Point, ...]
    seconds: float

    def quality_at(self, share: float) -> float:
        """Quality of the answer once that share of trials is spent; 0 without one."""
        # The last answer, not the best: noise may make an answer worse.
        quality = 0.0
        for point in self.points:
            if point.share <= share + 1e-9:
                quality = point.quality
        return quality

    def share_to(self, quality: float) -> float:
        """Share of trials after which the answer is that good; inf if it never is."""
        reached = (p.share for p in self.points if p.quality >= quality)
        return next(reached, math.inf)

    def compiled_to(self, quality: float) -> float:
        """The same in configs tried: what counts where compiling takes the time."""
        reached = (p.compiled for p in self.points if p.quality >= quality)
        return next(reached, math.inf)


def replay(
    sweep: Sweep,
    strategy: str,
    *,
    share: float,
    seed: int = 0,
    ranking: Sequence[KernelConfig] = (),
    incumbent: KernelConfig | None = None,
    space: ListedSpace | None = None,
) -> Run:
    """Search a recorded sweep within a share of its trials.

    Args:
        sweep: what was recorded.
        strategy: name in the registry.
        share: budget, as a share of the trials of an exhaustive search.
        seed: of the strategy and of the rounds that low fidelities see.
        ranking, incumbent: warm start, as for every strategy.
        space: of the sweep's configs; saves making it for each run.
    """
    space = space or ListedSpace(sweep.configs)
    device = ReplayDevice(sweep, seed=seed)
    chosen = make_strategy(
        strategy,
        space,
        seed=seed,
        rounds=device.rounds,
        ranking=ranking,
        incumbent=incumbent,
    )
    times = {row.config: row.time_us for row in sweep.rows}
    best_us, count = sweep.best_us, len(sweep.rows)
    points: list[Point] = []
    answer: KernelConfig | None = None

    def watch(best: Trial) -> bool:
        nonlocal answer
        if best.config != answer:
            answer = best.config
            time_us = times[answer]
            assert time_us is not None, f"{strategy} let an invalid config win"
            shares = device.cost / count, device.compiled / count
            points.append(Point(*shares, best_us / time_us))
        return False

    search(chosen, device.measure, Budget(trials=share * count), stop=watch)
    return Run(
        sweep.name,
        strategy,
        seed,
        tuple(points),
        seconds=device.seconds / device.exhaustive_s,
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; 0 if a value is."""
    values = list(values)
    return statistics.geometric_mean(values) if all(values) else 0.0
