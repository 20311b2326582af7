# SPDX-License-Identifier: Apache-2.0
"""Which configs to try first: what served neighbours, and what a model makes of it."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.cost_model import (
    Sample,
    rank_configs,
    samples_of_trials,
)
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.search import Trial
from portable_backend.warmup.trial_log import LogMismatchError, read_trials

logger = logging.getLogger("vllm.portable_backend.tuner")
# Of a forest, which is the steadier on few samples; more of them cost seconds.
MODEL = "forest"
MAX_SAMPLES = 4000
LIMIT = 64
FROM_RECORDS = 8
FROM_ESTIMATES = 4
# Configs that are compiled already, from so many that the model ranks highest.
FROM_READY = 24
LOOKED_AT = 512
# A field that must match, and does not, counts like so many doublings of a size.
MISMATCH = 4.0


def sure_starts(
    key: TuningKey,
    configs: Collection[KernelConfig],
    device: DeviceInfo,
    *,
    records: Iterable[TuningRecord] = (),
    estimated: Sequence[KernelConfig] = (),
) -> list[KernelConfig]:
    """The head of `warm_ranking`, which needs no cost model: to compile meanwhile."""
    members = frozenset(configs)
    served = _served_near(key, device, records)
    first = list(islice((c for c in served if c in members), FROM_RECORDS))
    return list(dict.fromkeys((*first, *estimated[:FROM_ESTIMATES])))


def warm_ranking(
    key: TuningKey,
    configs: Sequence[KernelConfig],
    device: DeviceInfo,
    *,
    records: Iterable[TuningRecord] = (),
    log_folder: Path | None = None,
    estimated: Sequence[KernelConfig] = (),
    ready: Callable[[Sequence[KernelConfig]], list[KernelConfig]] | None = None,
    limit: int = LIMIT,
) -> list[KernelConfig]:
    """Rank what is worth trying first, at most `limit` configs.

    Args:
        key: what is to be tuned.
        configs: of the space that is searched.
        device: where.
        records: of this kernel; near keys come first, this GPU's before others'.
        log_folder: trial logs of this kernel and GPU; a cost model learns from them.
        estimated: the resource model's order, best first.
        ready: which of some configs are compiled already; these can be tried for next
            to nothing, so the best of them come early.
    """
    members = frozenset(configs)
    served = _served_near(key, device, records)
    first = list(islice((c for c in served if c in members), FROM_RECORDS))
    learned: list[KernelConfig] = []
    samples = _samples(key, device, log_folder)
    if samples:
        try:
            learned = rank_configs(
                MODEL, samples, configs, key.to_dict(), device, limit=LOOKED_AT
            )
        except (UnsupportedError, ValueError) as error:
            logger.debug("no cost model for %s: %s", key, error)
    share = FROM_ESTIMATES if learned else limit // 2
    quick = ready(learned)[:FROM_READY] if ready and learned else ()
    ranking = dict.fromkeys((*first, *quick, *estimated[:share], *learned))
    return list(ranking)[:limit]


def _served_near(
    key: TuningKey, device: DeviceInfo, records: Iterable[TuningRecord]
) -> Iterator[KernelConfig]:
    """Verified configs, each once, the nearest first."""

    def place(record: TuningRecord) -> tuple[bool, bool, float, str]:
        foreign = record.gpu != device.name
        far = record.arch != device.arch
        return far, foreign, _distance(key, record.key), record.content

    near = sorted((r for r in records if r.verified), key=place)
    yield from dict.fromkeys(record.config for record in near)


def _distance(key: TuningKey, other: TuningKey) -> float:
    """Like `TuningKey.distance`, but finite where a field differs that must match."""
    ours, theirs = dict(key.structure), dict(other.structure)
    names = ours.keys() | theirs.keys()
    mismatches = sum(ours.get(name) != theirs.get(name) for name in names)
    sizes = dict(other.sizes)
    both = [(n, sizes[name]) for name, n in key.sizes if name in sizes]
    doublings = sum(abs(math.log2(max(a, 0.5) / max(b, 0.5))) for a, b in both)
    return MISMATCH * mismatches + doublings


def _samples(key: TuningKey, device: DeviceInfo, folder: Path | None) -> list[Sample]:
    """Trials of other keys from the logs, those of the nearest keys first."""
    logs = []
    for path in sorted(folder.glob("*.jsonl")) if folder else ():
        try:
            header, trials = read_trials(path)
            other = TuningKey.from_dict(header.kernel, header.key)
        except (OSError, ValueError, LogMismatchError) as error:
            logger.debug("%s: not learned from: %s", path, error)
            continue
        if other != key and other.kernel == key.kernel:
            logs.append((_distance(key, other), path.name, other, _best_known(trials)))
    logs.sort(key=lambda log: log[:2])
    samples: list[Sample] = []
    for _, _, other, trials in logs:
        if len(samples) + len(trials) > MAX_SAMPLES:
            break
        samples += samples_of_trials(trials, other.to_dict(), device)
    return samples


def _best_known(trials: Iterable[Trial]) -> list[Trial]:
    """Of each config the trial of most rounds."""
    found = {trial.config: trial for trial in sorted(trials, key=lambda t: t.rounds)}
    return list(found.values())
