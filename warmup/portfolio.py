# SPDX-License-Identifier: Apache-2.0
"""The few configs that serve most shapes well, for keys that nobody has measured."""

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from portable_backend.errors import RecordError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import (
    SCHEMA,
    SIZE_FIELDS,
    TuningKey,
    is_date,
    short,
)
from portable_backend.warmup.tables import parse_object

Bucket = TypeVar("Bucket", bound=Hashable)
# Sizes are rarely 2**64 times apart: a field that must match outweighs all of them.
_STRUCTURAL_STEP = 64.0


@dataclass(frozen=True)
class Cover(Generic[Bucket]):
    """Outcome of `cover_buckets`.

    Attributes:
        configs: the chosen configs, the most useful first.
        assignment: for each bucket the index of its fastest chosen config; buckets in
            which none of them ran are left out.
        losses: for each bucket its time over the best time measured there, 1 or more.
        loss: geometric mean of the losses.
        worst_bucket: where the loss is largest.
        uncovered: buckets in which no chosen config ran.
    """

    configs: tuple[KernelConfig, ...]
    assignment: Mapping[Bucket, int]
    losses: Mapping[Bucket, float]
    loss: float
    worst_bucket: Bucket
    uncovered: tuple[Bucket, ...]


def cover_buckets(
    times: Mapping[Bucket, Mapping[KernelConfig, float]], max_configs: int
) -> Cover[Bucket]:
    """Choose at most `max_configs` configs with the least geometric-mean loss.

    Greedy choice, then exchanges of one config for another while one helps. A bucket in
    which a config has no time is not served by it; leaving none unserved comes first.

    Args:
        times: for each bucket the time of each config that was right there.
        max_configs: how many may be chosen.

    Raises:
        ValueError: there is nothing to choose from, or a time is not above 0.
    """
    if max_configs < 1:
        raise ValueError(f"max_configs must be 1 or more, got {max_configs}")
    if not times or not all(times.values()):
        raise ValueError("times must hold at least one time in every bucket")
    columns = _loss_columns(times)
    chosen = _greedy(columns, max_configs)
    _exchange(columns, chosen)
    buckets = list(times)
    assignment, losses, uncovered = {}, {}, []
    for row, bucket in enumerate(buckets):
        cost, index = min((columns[c][row], i) for i, c in enumerate(chosen))
        if math.isinf(cost):
            uncovered.append(bucket)
        else:
            assignment[bucket], losses[bucket] = index, math.exp(cost)
    logs = [math.log(loss) for loss in losses.values()]
    worst = uncovered[0] if uncovered else max(losses, key=lambda b: losses[b])
    loss = math.exp(math.fsum(logs) / len(logs))
    return Cover(tuple(chosen), assignment, losses, loss, worst, tuple(uncovered))


def _loss_columns(
    times: Mapping[Bucket, Mapping[KernelConfig, float]],
) -> dict[KernelConfig, list[float]]:
    """Log loss of each config in each bucket, configs in fixed order."""
    every = {config for bucket in times.values() for config in bucket}
    columns: dict[KernelConfig, list[float]] = {
        config: [] for config in sorted(every, key=lambda c: json.dumps(c.to_dict()))
    }
    for bucket, row in times.items():
        if not all(math.isfinite(time) and time > 0 for time in row.values()):
            raise ValueError(f"times must be finite and above 0 in bucket {bucket}")
        best = min(row.values())
        for config, column in columns.items():
            known = config in row
            column.append(math.log(row[config] / best) if known else math.inf)
    return columns


def _cost(covered: list[float]) -> tuple[int, float]:
    """Buckets that nothing serves, then the summed log loss of the others."""
    finite = [cost for cost in covered if cost < math.inf]
    return len(covered) - len(finite), math.fsum(finite)


def _greedy(
    columns: Mapping[KernelConfig, list[float]], max_configs: int
) -> list[KernelConfig]:
    chosen: list[KernelConfig] = []
    covered = _covered(columns, [])
    while len(chosen) < max_configs:
        trials = {
            config: list(map(min, covered, column))
            for config, column in columns.items()
            if config not in chosen
        }
        if not trials:
            break
        best = min(trials, key=lambda config: _cost(trials[config]))
        if chosen and _cost(trials[best]) >= _cost(covered):
            break
        chosen.append(best)
        covered = trials[best]
    return chosen


def _exchange(
    columns: Mapping[KernelConfig, list[float]], chosen: list[KernelConfig]
) -> None:
    """Improve `chosen` in place until no exchange of one config helps."""
    best = _cost(_covered(columns, chosen))
    improved = True
    while improved:
        improved = False
        for place in range(len(chosen)):
            others = _covered(columns, chosen[:place] + chosen[place + 1 :])
            for config, column in columns.items():
                unserved, loss = _cost(list(map(min, others, column)))
                # A gain of rounding alone could be exchanged back and forth.
                if config not in chosen and (unserved, loss + 1e-12) < best:
                    chosen[place], best = config, (unserved, loss)
                    improved = True


def _covered(
    columns: Mapping[KernelConfig, list[float]], configs: list[KernelConfig]
) -> list[float]:
    """Log loss of the best of `configs` in each bucket."""
    covered = [math.inf] * len(next(iter(columns.values())))
    for config in configs:
        covered = list(map(min, covered, columns[config]))
    return covered


@dataclass(frozen=True)
class Portfolio:
    """A cover of tuned keys, with what a record says of code, GPU and toolchain.

    Attributes:
        configs: the most useful first.
        assignment: for each key that is covered the index of its fastest config.
        loss: geometric mean over these keys, 1 or more; None: unknown.
        worst_key: where most is lost, or which none of the configs is known to run in.
        worst_loss: what is lost there; None where no config is known to run.
        measured: ISO date.
    """

    kernel: str
    gpu: str
    arch: str
    kernel_digest: str
    toolchain: Mapping[str, str | None]
    configs: tuple[KernelConfig, ...]
    assignment: Mapping[TuningKey, int] = field(default_factory=dict)
    loss: float | None = None
    worst_key: TuningKey | None = None
    worst_loss: float | None = None
    measured: str | None = None

    @classmethod
    def of(
        cls,
        cover: Cover[TuningKey],
        *,
        gpu: str,
        arch: str,
        kernel_digest: str,
        toolchain: Mapping[str, str | None],
        measured: str | None = None,
    ) -> "Portfolio":
        kernel = cover.worst_bucket.kernel
        return cls(
            kernel,
            gpu,
            arch,
            kernel_digest,
            toolchain,
            cover.configs,
            cover.assignment,
            cover.loss,
            cover.worst_bucket,
            cover.losses.get(cover.worst_bucket),
            measured,
        )

    def __str__(self) -> str:
        text = (
            f"portfolio of {len(self.configs)} configs for {len(self.assignment)} keys"
        )
        if self.loss is not None:
            text += f" loses {self.loss - 1:.2%} (geometric mean)"
        if self.worst_key is not None and self.worst_loss is not None:
            text += f", at worst {self.worst_loss - 1:.2%} in {self.worst_key}"
        elif self.worst_key is not None:
            text += f", none of them known to run in {self.worst_key}"
        return text

    def configs_for(self, key: TuningKey) -> Iterator[KernelConfig]:
        """Every config once, that of the bucket most like `key` first."""
        ordered = sorted(
            self.assignment.items(), key=lambda item: _unlikeness(key, item[0])
        )
        indices = [index for _, index in ordered] + list(range(len(self.configs)))
        return (self.configs[index] for index in dict.fromkeys(indices))

    def to_text(self) -> str:
        header = {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "gpu": self.gpu,
            "arch": self.arch,
            "kernel_digest": self.kernel_digest,
            "toolchain": dict(sorted(self.toolchain.items())),
            "loss": self.loss,
            "worst_key": self.worst_key.to_dict() if self.worst_key else None,
            "worst_loss": self.worst_loss,
            "measured": self.measured,
        }
        configs = [config.to_dict() for config in self.configs]
        buckets = [
            {"key": key.to_dict(), "config": index}
            for key, index in sorted(self.assignment.items(), key=lambda i: str(i[0]))
        ]
        parts = [json.dumps(header, allow_nan=False)[:-1]]
        for name, rows in (("configs", configs), ("buckets", buckets)):
            lines = ",\n  ".join(json.dumps(row, sort_keys=True) for row in rows)
            parts.append(f'"{name}": [\n  {lines}\n]')
        return ",\n ".join(parts) + "}\n"


def _unlikeness(key: TuningKey, other: TuningKey) -> tuple[float, str]:
    wanted, stored = key.to_dict(), other.to_dict()
    steps = 0.0
    for name in sorted(wanted.keys() | stored.keys()):
        one, two = wanted.get(name), stored.get(name)
        if one == two:
            continue
        if isinstance(one, int) and isinstance(two, int) and min(one, two) >= 0:
            steps += abs(math.log2(one + 1) - math.log2(two + 1))
            steps += 0 if name in SIZE_FIELDS else _STRUCTURAL_STEP
        else:
            steps += 4 * _STRUCTURAL_STEP
    return steps, str(other)


def parse_portfolio(data: bytes, where: str, kernel: str, gpu: str) -> Portfolio:
    """Read a portfolio file; the arguments are those of `parse_table`.

    Raises:
        RecordError: it cannot be used; names the field.
    """
    held = parse_object(data, where, kernel, gpu)
    for name, kind in _FIELD_TYPES.items():
        if not isinstance(held.get(name), kind):
            given = short(held.get(name))
            raise RecordError(f"{where}: {name} must be a {kind.__name__}, got {given}")
    if not held["configs"]:
        raise RecordError(f"{where}: configs must hold at least one config, got none")
    try:
        configs = tuple(KernelConfig.from_dict(config) for config in held["configs"])
        assignment = {
            TuningKey.from_dict(kernel, bucket["key"]): _index(bucket, len(configs))
            for bucket in held.get("buckets", [])
        }
        worst = held.get("worst_key")
        return Portfolio(
            kernel,
            gpu,
            held["arch"],
            held["kernel_digest"],
            held["toolchain"],
            configs,
            assignment,
            _loss(held.get("loss")),
            TuningKey.from_dict(kernel, worst) if worst else None,
            _loss(held.get("worst_loss")),
            _date(held.get("measured")),
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RecordError(f"{where}: {error}") from None


_FIELD_TYPES = {"arch": str, "kernel_digest": str, "toolchain": dict, "configs": list}


def _index(bucket: Mapping[str, Any], count: int) -> int:
    index = bucket["config"]
    if not isinstance(index, int) or not 0 <= index < count:
        raise ValueError(f"config must be an index below {count}, got {short(index)}")
    return index


def _date(value: Any) -> str | None:
    if not is_date(value):
        raise ValueError(f"measured must be null or an ISO date, got {short(value)}")
    return value if value is None else str(value)


def _loss(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise ValueError(f"a loss must be 1 or more, got {short(value)}")
    return float(value)
