# SPDX-License-Identifier: Apache-2.0
"""Portfolios of what was tuned: computed from the records and trial logs at hand."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.layers import PORTFOLIO, WritableLayer
from portable_backend.warmup.portfolio import Cover, Portfolio, cover_buckets
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.trial_log import LogMismatchError, log_name, read_trials
from portable_backend.warmup.tuner import trial_folder
from portable_backend.warmup.tuning_report import Outcome

logger = logging.getLogger("vllm.portable_backend.tuner")
MAX_CONFIGS = 8
Times = dict[TuningKey, dict[KernelConfig, float]]


@dataclass(frozen=True)
class Written:
    """A portfolio that was written, and what it is made of.

    Attributes:
        portfolio: as the file holds it.
        cover: with the loss of each bucket.
        path: of the file.
    """

    portfolio: Portfolio
    cover: Cover[TuningKey]
    path: Path

    def to_dict(self) -> dict[str, Any]:
        cover = self.cover
        return {
            "kernel": self.portfolio.kernel,
            "gpu": self.portfolio.gpu,
            "configs": [config.to_dict() for config in cover.configs],
            "buckets": len(cover.losses),
            "loss": cover.loss,
            "worst_key": cover.worst_bucket.to_dict(),
            "worst_loss": cover.losses.get(cover.worst_bucket),
            "uncovered": [key.to_dict() for key in cover.uncovered],
            "path": str(self.path),
        }

    def __str__(self) -> str:
        cover = self.cover
        worst = max(cover.losses, key=lambda key: cover.losses[key])
        text = (
            f"{self.portfolio.kernel}: portfolio of {len(cover.configs)} configs for "
            f"{len(cover.losses)} keys loses {cover.loss - 1:.2%} (geometric mean), at "
            f"worst {cover.losses[worst] - 1:.2%} in {worst}"
        )
        if not cover.uncovered:
            return text
        return f"{text}; none is known to run in {len(cover.uncovered)} other keys"


def write_portfolios(
    outcomes: Iterable[Outcome],
    store: RecordStore,
    layer: WritableLayer,
    *,
    max_configs: int = MAX_CONFIGS,
) -> list[Written]:
    """Write a portfolio for each kernel and GPU of which some unit has a record.

    It takes the place of an earlier one, whatever made that.

    Args:
        outcomes: of the units; their records say for which code, GPU and toolchain.
        store: whose records are covered, those of earlier runs among them.
        layer: where the trial logs are and portfolios go.
        max_configs: of a portfolio.

    Raises:
        OSError: one cannot be written.
    """
    store.refresh()
    latest: dict[tuple[str, str], TuningRecord] = {}
    for outcome in outcomes:
        if outcome.record is not None and outcome.record.verified:
            latest[outcome.key.kernel, outcome.record.gpu] = outcome.record
    found = []
    for (kernel, gpu), example in sorted(latest.items()):
        times = known_times(example, store, layer.root)
        if not times:
            continue
        cover = cover_buckets(times, max_configs)
        portfolio = Portfolio.of(
            cover,
            gpu=gpu,
            arch=example.arch,
            kernel_digest=example.kernel_digest,
            toolchain=example.toolchain,
            measured=date.today().isoformat(),
        )
        layer.write_file(kernel, gpu, PORTFOLIO, portfolio.to_text().encode())
        found.append(Written(portfolio, cover, layer.path(kernel, gpu, PORTFOLIO)))
    return found


def known_times(example: TuningRecord, store: RecordStore, root: Path) -> Times:
    """Times of configs, for each key with a record of the same code and toolchain.

    The configs are those that verified records hold; a trial was checked against the
    oracle, a winner once more on data that no trial has seen. What failed for any key
    is left out for all.

    Args:
        example: a record for the kernel, of the environment in question.
        store: where records are.
        root: of the trial logs.
    """
    kernel = example.key.kernel
    records = [
        record
        for _, record in store.records(kernel)
        if record.verified and record.environment == example.environment
    ]
    refuted = {record.config for _, record in store.refuted(kernel)}
    configs = {record.config for record in records} - refuted
    times: Times = defaultdict(dict)
    bad: set[KernelConfig] = set()
    for record in sorted(records, key=lambda record: record.rank):
        assert record.time_us is not None
        times[record.key].setdefault(record.config, record.time_us)
    for key, logged, failed in _logged(example, root):
        bad |= failed
        if key in times:
            # Of one run, so that they compare; records' are of others.
            times[key] |= logged
    kept = configs - bad
    rows = {
        key: {config: time_us for config, time_us in row.items() if config in kept}
        for key, row in times.items()
    }
    return {key: row for key, row in rows.items() if row}


def _logged(
    example: TuningRecord, root: Path
) -> Iterator[tuple[TuningKey, dict[KernelConfig, float], set[KernelConfig]]]:
    """(key, times of full trials, what failed) of each key's log of most trials."""
    logs: dict[TuningKey, dict[KernelConfig, float]] = {}
    failed: dict[TuningKey, set[KernelConfig]] = defaultdict(set)
    folder = trial_folder(root, example.key.kernel, example.gpu)
    for path in sorted(folder.glob("*.jsonl")):
        try:
            header, trials = read_trials(path)
            key = TuningKey.from_dict(header.kernel, header.key)
        except (OSError, ValueError, LogMismatchError) as error:
            logger.debug("%s: not used for a portfolio: %s", path, error)
            continue
        if path.stem != log_name(header, example.kernel_digest, example.toolchain):
            continue  # of other code or another toolchain
        full = [trial for trial in trials if trial.rounds >= header.rounds]
        times = {t.config: t.time_us for t in full if t.time_us is not None}
        failed[key] |= {t.config for t in trials if t.invalid is not None}
        if len(times) > len(logs.get(key, ())):
            logs[key] = times
    for key in logs.keys() | failed.keys():
        yield key, logs.get(key, {}), failed[key]
