# SPDX-License-Identifier: Apache-2.0
"""What tuning says about itself: units, events, outcomes; all of it as JSON too.

Workers in other processes and on other machines answer in JSON, never in pickles.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.search import Trial
from portable_backend.warmup.tables import parse_line

# What can become of a unit; the first four are done.
STATES = {
    "tuned": "a config that beats the default beyond noise",
    "default": "nothing does, which is recorded as well",
    "known": "a record of this code, GPU and toolchain was there",
    "elsewhere": "another process is tuning it",
    "unreached": "the budget ended first",
    "interrupted": "stopped half-way; what was measured is kept",
    "failed": "see the reason",
}


@dataclass(frozen=True)
class Task:
    """A unit of work: a key, and its share of the expected time."""

    key: TuningKey
    weight: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        fields = {"kernel": self.key.kernel, "key": self.key.to_dict()}
        return fields | {"weight": self.weight}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Task":
        return cls(TuningKey.from_dict(data["kernel"], data["key"]), data["weight"])


@dataclass
class Counts:
    """How many configs got how far.

    Attributes:
        considered: members of the space.
        pruned: dropped by the resource model, never compiled.
        compiled: compiled; without a compiler, those that launched.
        timed: timed, after their output was found right.
        rejected: by reason; "confirmation" is the last check, on unseen data.
    """

    considered: int = 0
    pruned: int = 0
    compiled: int = 0
    timed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, considered: int, pruned: int, trials: Iterable[Trial]) -> "Counts":
        """Counts of a search; a config counts once, however often it was timed."""
        reasons = {trial.config: trial.invalid for trial in trials}
        rejected = Counter(reason for reason in reasons.values() if reason is not None)
        timed = len(reasons) - rejected.total()
        compiled = len(reasons) - rejected["compile"] - rejected["resources"]
        return cls(considered, pruned, compiled, timed, rejected)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.considered + other.considered,
            self.pruned + other.pruned,
            self.compiled + other.compiled,
            self.timed + other.timed,
            self.rejected + other.rejected,
        )

    def to_dict(self) -> dict[str, Any]:
        rejected = {name: n for name, n in sorted(self.rejected.items()) if n}
        return {
            "considered": self.considered,
            "pruned": self.pruned,
            "compiled": self.compiled,
            "timed": self.timed,
            "rejected": rejected,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Counts":
        return cls(**{**data, "rejected": Counter(data["rejected"])})


@dataclass(frozen=True)
class Outcome:
    """What became of a unit.

    Attributes:
        key: of the unit.
        state: one of `STATES`.
        reason: why it failed, or what should be known besides.
        record: what was written, or was there already.
        counts: how many configs got how far.
        stopped: why the search ended, as in `SearchResult`.
        seconds: what the unit took.
    """

    key: TuningKey
    state: str
    reason: str = ""
    record: TuningRecord | None = None
    counts: Counts = field(default_factory=Counts)
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def gain(self) -> float | None:
        """The default's time over the config's; None where either is unknown."""
        record = self.record
        if record is None or not record.default_us or record.time_us is None:
            return None
        return record.default_us / record.time_us

    def to_dict(self) -> dict[str, Any]:
        """For people's scripts: what `tune --json` prints for a unit."""
        record = self.record
        return {
            "kernel": self.key.kernel,
            "key": self.key.to_dict(),
            "state": self.state,
            "reason": self.reason,
            "gpu": record and record.gpu,
            "config": record and record.config.to_dict(),
            "time_us": record and record.time_us,
            "default_us": record and record.default_us,
            "gain": self.gain,
            "counts": self.counts.to_dict(),
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
        }

    def to_message(self) -> dict[str, Any]:
        return {
            "type": "outcome",
            "kernel": self.key.kernel,
            "key": self.key.to_dict(),
            "state": self.state,
            "reason": self.reason,
            "record": self.record and self.record.to_line(),
            "counts": self.counts.to_dict(),
            "stopped": self.stopped,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Event:
    """Progress: `kind` is "started", "trial", "note" or "finished".

    Attributes:
        key: of the unit.
        counts: so far.
        best_us: the fastest config's time so far.
        note: for people, of a "note".
        outcome: of a "finished".
        worker: who works on it; empty if there is but one.
    """

    kind: str
    key: TuningKey
    counts: Counts = field(default_factory=Counts)
    best_us: float | None = None
    note: str = ""
    outcome: Outcome | None = None
    worker: str = ""

    def to_message(self) -> dict[str, Any]:
        return {
            "type": "event",
            "kind": self.kind,
            "kernel": self.key.kernel,
            "key": self.key.to_dict(),
            "counts": self.counts.to_dict(),
            "best_us": self.best_us,
            "note": self.note,
        }


def format_message(message: Event | Outcome) -> bytes:
    """One line of JSON, without its end."""
    return json.dumps(message.to_message(), separators=(",", ":")).encode()


def parse_message(data: bytes) -> Event | Outcome:
    """The reverse of `format_message`.

    Raises:
        ValueError: it is no such line.
    """
    try:
        held = json.loads(data)
        key = TuningKey.from_dict(held["kernel"], held["key"])
        counts = Counts.from_dict(held["counts"])
        if held["type"] == "event":
            best_us, note = held["best_us"], held["note"]
            return Event(held["kind"], key, counts, best_us, note)
        line, record = held["record"], None
        if line is not None:
            gpu = json.loads(line)["gpu"]
            record = parse_line(line.encode(), "a worker's record", key.kernel, gpu)
        return Outcome(
            key,
            held["state"],
            held["reason"],
            record,
            counts,
            held["stopped"],
            held["seconds"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a worker's message lacks {error}: {data[:80]!r}") from None


def total(outcomes: Iterable[Outcome]) -> Counts:
    """The sum of the counts."""
    return sum((outcome.counts for outcome in outcomes), Counts())


def describe(config: KernelConfig) -> str:
    """A config on one line."""
    return " ".join(f"{name}={value}" for name, value in config.items_)
