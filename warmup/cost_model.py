# SPDX-License-Identifier: Apache-2.0
"""Rank configs for a key that nobody has tuned, from those that somebody has.

The model learns how fast a config is next to the others of its own key, so that keys
of microseconds and of milliseconds count alike and a new key needs no time of its own.
"""

import contextlib
import importlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import Trial
from portable_backend.warmup.sweeps import Key, Sweep

MODELS = ("off", "boosting", "forest")
Feature = float | str
FIT_THREADS = 4
# Half precision, unless the key names an element size.
_ELEMENT_SIZE = 2


@dataclass(frozen=True)
class Sample:
    """One config of one key: its time, or None where it is invalid."""

    config: KernelConfig
    key: Key
    device: DeviceInfo
    time_us: float | None


def samples_of(sweep: Sweep) -> list[Sample]:
    """Return a recorded sweep as samples."""
    return [Sample(r.config, sweep.key, sweep.device, r.time_us) for r in sweep.rows]


def samples_of_trials(
    trials: Iterable[Trial], key: Key, device: DeviceInfo
) -> list[Sample]:
    """Return a search's trials as samples."""
    return [Sample(t.config, key, device, t.time_us) for t in trials]


def features(config: KernelConfig, key: Key, device: DeviceInfo) -> dict[str, Feature]:
    """Describe a config on a device for a key: numbers by their logarithm, the rest
    as strings, and what follows from both about tiles, traffic and occupancy."""
    found: dict[str, Feature] = {}
    for prefix, values in (("config", config), ("key", key)):
        for name, value in values.items():
            found[f"{prefix}.{name}"] = _feature(value)
    limits = device.limits
    found["device.arch"] = device.arch
    found["device.num_units"] = math.log2(device.num_units)
    found["device.shared"] = math.log2(limits.shared_bytes_per_unit)
    return found | _derived(config, key, device)


def _feature(value: object) -> Feature:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.log2(value) if value > 0 else float(value) - 1
    return str(value)


def _derived(config: KernelConfig, key: Key, device: DeviceInfo) -> dict[str, Feature]:
    def number(values: Mapping[str, Any], name: str, default: float) -> float:
        value = values.get(name)
        return float(value) if isinstance(value, int | float) and value else default

    head_size = number(key, "head_size", 128)
    block_m = number(config, "BLOCK_M", 16)
    block_n = number(config, "BLOCK_N", 16)
    num_warps = number(config, "num_warps", 4)
    lanes = num_warps * device.limits.warp_size
    # Keys and values of a stage, besides the queries.
    stage_bytes = 2 * block_n * head_size * _ELEMENT_SIZE
    in_flight = stage_bytes * max(1, number(config, "num_stages", 2) - 1)
    shared = in_flight + block_m * head_size * _ELEMENT_SIZE
    registers = block_m * (head_size + block_n) / lanes
    by_shared = device.limits.shared_bytes_per_unit / shared
    by_registers = 65536 / (min(255, registers + 48) * lanes)
    programs = max(1.0, min(by_shared, by_registers, 64 / num_warps))
    work = number(key, "num_seqs", 1) * number(key, "num_kv_heads", 8)
    work *= number(key, "seq_len", 1024)
    return {
        "tile_elements": math.log2(block_m * block_n),
        "bytes_in_flight": math.log2(in_flight),
        "registers_per_lane": math.log2(registers),
        "programs_per_unit": math.log2(programs),
        "warps_per_unit": math.log2(programs * num_warps),
        "tiles_per_unit": math.log2(max(1e-3, work / block_n / device.num_units)),
    }


class CostModel:
    """Predicts how slow configs are next to each other.

    Args:
        model: "boosting" (gradient-boosted trees) or "forest" (extremely randomised
            trees: slower and rougher, but steadier on few samples).
        seed: of the model; equal samples and seeds give equal rankings.

    Raises:
        ValueError: no such model.
        UnsupportedError: scikit-learn is not installed.
    """

    def __init__(self, model: str = "boosting", *, seed: int = 0) -> None:
        if model not in MODELS[1:]:
            raise bad_argument(
                "model", f"one of {', '.join(MODELS[1:])}", model, "choose one of them"
            )
        self._columns: dict[str, int] = {}
        self._fitted = False
        self._regressor = _regressor(model, seed)

    def fit(self, samples: Iterable[Sample]) -> "CostModel":
        """Learn from samples of one or more keys; returns itself.

        An invalid config counts as twice as slow as the slowest valid one of its key.

        Raises:
            ValueError: no key has two samples, one of them valid.
        """
        groups: dict[object, list[Sample]] = defaultdict(list)
        for sample in samples:
            key = tuple(sorted(sample.key.items()))
            groups[(key, sample.device)].append(sample)
        rows: list[dict[str, Feature]] = []
        targets: list[float] = []
        for group in groups.values():
            times = [s.time_us for s in group if s.time_us is not None]
            if not times or len(group) < 2:
                continue  # nothing to compare
            middle, worst = statistics.median(times), 2 * max(times)
            rows += [features(s.config, s.key, s.device) for s in group]
            targets += [math.log((s.time_us or worst) / middle) for s in group]
        if not rows:
            raise bad_argument(
                "samples",
                "two or more of one key, with a valid one",
                f"{len(groups)} keys without",
                "tune one key first, or switch the cost model off",
            )
        self._columns = {}
        for row in rows:
            for name, value in row.items():
                self._columns.setdefault(_column(name, value), len(self._columns))
        with _one_thread():
            # However many threads grow the trees, they are the same; but predictions
            # are summed in any order, so those have one.
            parameters = self._regressor.get_params()
            if "n_jobs" in parameters:
                self._regressor.set_params(n_jobs=FIT_THREADS)
            self._regressor.fit(self._matrix(rows), targets)
            if "n_jobs" in parameters:
                self._regressor.set_params(n_jobs=1)
        self._fitted = True
        return self

    def predict(
        self, configs: Sequence[KernelConfig], key: Key, device: DeviceInfo
    ) -> list[float]:
        """Return log(time / median time of the key's configs) for each config.

        Raises:
            ValueError: the model has not been fitted.
        """
        if not self._fitted:
            raise bad_argument("model", "fitted", "one that is not", "call fit first")
        rows = [features(config, key, device) for config in configs]
        with _one_thread():
            return [float(x) for x in self._regressor.predict(self._matrix(rows))]

    def rank(
        self, configs: Sequence[KernelConfig], key: Key, device: DeviceInfo
    ) -> list[KernelConfig]:
        """Return the configs, those predicted fastest first; a strategy's ranking."""
        predicted = self.predict(configs, key, device)
        order = sorted(range(len(configs)), key=predicted.__getitem__)
        return [configs[i] for i in order]

    def _matrix(self, rows: Sequence[Mapping[str, Feature]]) -> Any:
        import numpy as np

        matrix = np.zeros((len(rows), len(self._columns)))
        for i, row in enumerate(rows):
            for name, value in row.items():
                column = self._columns.get(_column(name, value))
                if column is not None:  # a category that was never seen
                    matrix[i, column] = 1.0 if isinstance(value, str) else value
        return matrix


def rank_configs(
    model: str,
    samples: Iterable[Sample],
    configs: Sequence[KernelConfig],
    key: Key,
    device: DeviceInfo,
    *,
    limit: int,
    seed: int = 0,
) -> list[KernelConfig]:
    """Return the `limit` most promising configs for a key; none if `model` is "off".

    Raises:
        ValueError, UnsupportedError: as `CostModel` and its `fit`.
    """
    if model == "off":
        return []
    fitted = CostModel(model, seed=seed).fit(samples)
    return fitted.rank(configs, key, device)[:limit]


def _one_thread() -> AbstractContextManager[object]:
    """Keep scikit-learn to one thread: several that wait for a busy CPU cost more."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def _column(name: str, value: Feature) -> str:
    return f"{name}={value}" if isinstance(value, str) else name


def preload() -> None:
    """Import what models need, where it is there: that takes a second."""
    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.ensemble")


def _regressor(model: str, seed: int) -> Any:
    try:
        from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
    except ImportError as error:
        raise UnsupportedError(
            f"the cost model needs scikit-learn, which cannot be imported ({error}); "
            "pip install 'portable-backend[tune]', or switch the cost model off"
        ) from error
    if model == "forest":
        return ExtraTreesRegressor(
            n_estimators=100, min_samples_leaf=2, random_state=seed
        )
    return HistGradientBoostingRegressor(max_iter=200, random_state=seed)
