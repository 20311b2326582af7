# SPDX-License-Identifier: Apache-2.0
"""Rank the configs of a key on a GPU that nobody has measured.

A forest learns, from recorded sweeps, by what factor a config is slower or faster than
the resource model's estimate, from features that are ratios to a device's limits. Where
a GPU or shape is unlike all sweeps the forest says little and the estimate remains. A
kernel without sweeps is ranked by the estimate alone.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.ratios import centred, ratios
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.resources import Readout
from portable_backend.warmup.sweeps import Sweep

TREES, MIN_LEAF = 100, 2
ReadoutOf = Callable[[TuningKey, KernelConfig, DeviceInfo], Readout | None]


def no_readout(
    key: TuningKey, config: KernelConfig, device: DeviceInfo
) -> Readout | None:
    return None


@dataclass(frozen=True)
class Measured:
    """A sweep's configs with times, and the features of each; None: cannot run."""

    sweep: Sweep
    key: TuningKey
    configs: tuple[KernelConfig, ...]
    times_us: tuple[float, ...]
    features: tuple[list[float] | None, ...]


def measured(sweep: Sweep, readout_of: ReadoutOf = no_readout) -> Measured:
    """What of a sweep can be learned from; its key's fields must be its kernel's."""
    key = key_of(sweep)
    rows = [(row.config, row.time_us) for row in sweep.rows if row.time_us is not None]
    configs = tuple(config for config, _ in rows)
    features = features_of(key, configs, sweep.device, readout_of)
    return Measured(sweep, key, configs, tuple(time for _, time in rows), features)


def features_of(
    key: TuningKey,
    configs: Iterable[KernelConfig],
    device: DeviceInfo,
    readout_of: ReadoutOf,
) -> tuple[list[float] | None, ...]:
    return tuple(
        ratios(key, config, device, readout_of(key, config, device))
        for config in configs
    )


class Predictor:
    """Predicts how slow configs of one kernel are next to each other.

    Equal sweeps and read-outs give equal predictions.

    Args:
        sweeps: of one kernel; none leaves the resource model alone.

    Raises:
        ValueError: the sweeps are of several kernels.
        UnsupportedError: scikit-learn is not installed.
    """

    def __init__(self, sweeps: Sequence[Measured] = ()) -> None:
        kernels = sorted({item.sweep.kernel for item in sweeps})
        if len(kernels) > 1:
            raise bad_argument(
                "sweeps", "of one kernel", ", ".join(kernels), "make one for each"
            )
        self._forest: Any = None
        rows: list[list[float]] = []
        targets: list[float] = []
        for item in sweeps:
            pairs = zip(item.features, item.times_us, strict=True)
            known = [(row, time) for row, time in pairs if row is not None]
            if not known:
                continue
            found = centred([row for row, _ in known])
            middle = math.log(statistics.median(time for _, time in known))
            rows += found
            for row, (_, time) in zip(found, known, strict=True):
                targets.append(math.log(time) - middle - row[0])
        if rows:
            self._forest = _forest()
            self._forest.fit(rows, targets)

    @property
    def basis(self) -> str:
        """ "sweeps", or "resources" where nothing was measured."""
        return "sweeps" if self._forest is not None else "resources"

    def predict(self, features: Sequence[list[float] | None]) -> list[float]:
        """log(time) of configs of one key, up to a constant; infinite: cannot run.

        Args:
            features: what `features_of` gives.
        """
        known = [i for i, row in enumerate(features) if row is not None]
        predicted = [math.inf] * len(features)
        if not known:
            return predicted
        rows = centred([row for row in features if row is not None])
        slower = self._forest.predict(rows) if self._forest else [0.0] * len(rows)
        for i, row, more in zip(known, rows, slower, strict=True):
            predicted[i] = row[0] + float(more)
        return predicted


@dataclass(frozen=True)
class HeldOut:
    """How well a sweep is predicted from others.

    Attributes:
        sweep: what was held out.
        fitted_on: names of the others.
        first: time of the model's first choice over the optimum's, 1 or more.
        correlation: Spearman's, of predicted and measured times.
        estimate_first, estimate_correlation: of the resource model alone.
        gains: (predicted, measured) time of each config over the first choice's.
    """

    sweep: Sweep
    fitted_on: tuple[str, ...]
    first: float
    correlation: float
    estimate_first: float
    estimate_correlation: float
    gains: tuple[tuple[float, float], ...]


def held_out(item: Measured, others: Sequence[Measured]) -> HeldOut:
    """Predict a sweep from others, which must not be it.

    Raises:
        ValueError: it is among them, or none of its configs can run by the model.
    """
    from scipy.stats import spearmanr

    if item in others:
        raise bad_argument("others", "other sweeps", item.sweep.name, "leave it out")
    can_run = [i for i, row in enumerate(item.features) if row is not None]
    if not can_run:
        raise bad_argument(
            "item", "a sweep with a config that fits", item.sweep.name, "leave it out"
        )
    times = [item.times_us[i] for i in can_run]
    features = [item.features[i] for i in can_run]
    outcomes = []
    for used in ((), others):
        predicted = Predictor(used).predict(features)
        first = predicted.index(min(predicted))
        correlation = float(spearmanr(predicted, times).statistic)
        outcomes.append((times[first] / min(item.times_us), correlation))
    gains = tuple(
        (math.exp(value - predicted[first]), time / times[first])
        for i, (value, time) in enumerate(zip(predicted, times, strict=True))
        if i != first
    )
    names = tuple(other.sweep.name for other in others)
    return HeldOut(item.sweep, names, *outcomes[1], *outcomes[0], gains)


def leave_one_out(items: Sequence[Measured]) -> list[HeldOut]:
    """Each sweep predicted from all others of its kernel, where there are others."""
    return _from_others(items, lambda sweep, other: sweep is not other)


def across_heads(items: Sequence[Measured]) -> list[HeldOut]:
    """Each sweep predicted from those of its kernel with other heads alone."""

    def heads(sweep: Sweep) -> tuple[object, ...]:
        names = ("head_size", "num_kv_heads", "num_queries_per_kv", "row_size")
        return tuple(sweep.key.get(name) for name in names)

    return _from_others(items, lambda sweep, other: heads(sweep) != heads(other))


def _from_others(
    items: Sequence[Measured], is_other: Callable[[Sweep, Sweep], bool]
) -> list[HeldOut]:
    outcomes = []
    for item in items:
        others = [
            other
            for other in items
            if other.sweep.kernel == item.sweep.kernel
            and is_other(item.sweep, other.sweep)
        ]
        if others:
            outcomes.append(held_out(item, others))
    return outcomes


def margin(outcomes: Iterable[HeldOut]) -> float:
    """The predicted gain from which on the model may be believed.

    Every held-out config that it put so far behind its first choice, or farther, was
    slower when it was measured. Infinite where nothing was held out.
    """
    gains = [gain for outcome in outcomes for gain in outcome.gains]
    wrong = [predicted for predicted, measured in gains if measured < 1]
    return max([1.0, *wrong]) if gains else math.inf


def key_of(sweep: Sweep) -> TuningKey:
    """The sweep's key, whose fields must be its kernel's."""
    fields: dict[str, Any] = dict(sweep.key)
    return TuningKey.from_dict(sweep.kernel, fields)


def _forest() -> Any:
    try:
        from sklearn.ensemble import ExtraTreesRegressor
    except ImportError as error:
        raise UnsupportedError(
            f"predicting needs scikit-learn, which cannot be imported ({error}); "
            "pip install 'portable-backend[tune]'"
        ) from error
    return ExtraTreesRegressor(
        TREES,
        min_samples_leaf=MIN_LEAF,
        random_state=0,
        n_jobs=1,  # sums in fixed order
    )
