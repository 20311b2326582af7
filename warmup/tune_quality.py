# SPDX-License-Identifier: Apache-2.0
"""How near records come to recorded sweeps' optima, and what a portfolio loses."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from portable_backend.warmup.compare import geometric_mean
from portable_backend.warmup.portfolio import Cover, cover_buckets
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.sweeps import Sweep
from portable_backend.warmup.tuning_tools import key_of


@dataclass(frozen=True)
class Quality:
    """A record beside the sweep of its key.

    Attributes:
        key: of both.
        best_us: the sweep's optimum, the least of many noisy medians.
        record: None where the key has none.
        time_us: the sweep's time of the record's config; the record's own where the
            sweep has none, which is of another run and so a few percent off.
        is_in_sweep: whether it is the sweep's.
        configs, timed: the sweep's rows, and those with a time.
        selection: which configs these are.
    """

    key: TuningKey
    best_us: float
    record: TuningRecord | None
    time_us: float | None
    is_in_sweep: bool
    configs: int
    timed: int
    selection: dict[str, Any]

    @property
    def loss(self) -> float | None:
        """The record's time over the optimum; below 1 if the sweep missed it."""
        return None if self.time_us is None else self.time_us / self.best_us

    def to_dict(self) -> dict[str, Any]:
        record = self.record
        return {
            "kernel": self.key.kernel,
            "key": self.key.to_dict(),
            "loss": self.loss,
            "best_us": self.best_us,
            "time_us": self.time_us,
            "is_in_sweep": self.is_in_sweep,
            "record_us": record and record.time_us,
            "default_us": record and record.default_us,
            "tried": record and record.trials,
            "config": record and record.config.to_dict(),
            "sweep": {
                "configs": self.configs,
                "timed": self.timed,
                "selection": self.selection,
            },
        }


def qualities(
    sweeps: Iterable[Sweep], records: Sequence[TuningRecord]
) -> list[Quality]:
    """Each sweep beside the record of its key and GPU.

    Where there are several, that of the sweep's kernel code and toolchain, then the
    best by the records' own order.
    """
    found = []
    for sweep in sweeps:
        key = key_of(sweep)
        times = {row.config: row.time_us for row in sweep.rows}

        def place(record: TuningRecord, sweep: Sweep = sweep) -> tuple[Any, ...]:
            other = record.kernel_digest != sweep.kernel_digest
            return other, dict(record.toolchain) != dict(sweep.toolchain), record.rank

        own = [
            r
            for r in records
            if r.key == key and r.gpu == sweep.device.name and r.unmeasured is None
        ]
        record = min(own, key=place, default=None)
        time_us = times.get(record.config) if record else None
        is_in_sweep = time_us is not None
        if record is not None and record.config not in times:
            time_us = record.time_us
        found.append(
            Quality(
                key,
                sweep.best_us,
                record,
                time_us,
                is_in_sweep,
                len(sweep.rows),
                sum(bool(row.times_us) for row in sweep.rows),
                dict(sweep.selection),
            )
        )
    return found


def portfolios(
    sweeps: Iterable[Sweep], max_configs: int
) -> dict[str, Cover[TuningKey]]:
    """For each kernel the few configs that lose least over its sweeps.

    Raises:
        ValueError: a sweep has no config with a time.
    """
    times: dict[str, dict[TuningKey, dict[Any, float]]] = defaultdict(dict)
    for sweep in sweeps:
        times[sweep.kernel][key_of(sweep)] = {
            row.config: row.time_us for row in sweep.rows if row.time_us is not None
        }
    return {
        kernel: cover_buckets(found, max_configs) for kernel, found in times.items()
    }


def report(
    sweeps: Sequence[Sweep],
    records: Sequence[TuningRecord],
    *,
    max_configs: int = 8,
    tuned: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All of it, as JSON can hold it.

    Args:
        sweeps: at least one.
        records: that `tune` wrote for the same keys.
        max_configs: of a kernel's portfolio.
        tuned: what `tune --json` printed, for its counts.
    """
    found = qualities(sweeps, records)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for quality in found:
        if quality.loss is not None:
            by_kernel[quality.key.kernel].append(quality.loss)
    every = [loss for losses in by_kernel.values() for loss in losses]
    covers = {
        kernel: {
            "configs": [config.to_dict() for config in cover.configs],
            "loss": cover.loss,
            "buckets": len(cover.losses),
            "worst_key": cover.worst_bucket.to_dict(),
            "worst_loss": cover.losses.get(cover.worst_bucket),
            "uncovered": [key.to_dict() for key in cover.uncovered],
        }
        for kernel, cover in portfolios(sweeps, max_configs).items()
    }
    counts = None
    if tuned is not None:
        counts = {"seconds": tuned["seconds"], **tuned["counts"]}
        counts["units"] = [
            {"kernel": unit["kernel"], "key": unit["key"], "seconds": unit["seconds"]}
            | unit["counts"]
            for unit in tuned["units"]
        ]
    return {
        "schema": 1,
        "synthetic": any(sweep.synthetic for sweep in sweeps),
        "units": [quality.to_dict() for quality in found],
        "loss": geometric_mean(every) if every else None,
        "loss_by_kernel": {k: geometric_mean(v) for k, v in by_kernel.items()},
        "without_record": sum(quality.record is None for quality in found),
        "without_time": sum(
            quality.record is not None and quality.loss is None for quality in found
        ),
        "portfolios": covers,
        "tuned": counts,
    }
