# SPDX-License-Identifier: Apache-2.0
"""Record sweeps: every config of a space, or a sample, checked and timed in full.

Keys whose kernels compile to the same binaries go side by side: each binary is compiled
once, ahead of the measuring, and timed for all of them. Configs come in an order drawn
at random, the default and its neighbours first, so that what an early end leaves is a
sample. Each row is kept as soon as it is there (`row_log`).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig, Value
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.row_log import RowLog
from portable_backend.warmup.search import Proposal, Trial
from portable_backend.warmup.sweeps import Row, Sweep, write_sweep
from portable_backend.warmup.tools import Tools

DIGITS = 4  # of a recorded time; noise is far above
MAX_REASON = 120


@dataclass(frozen=True)
class Selection:
    """Which configs of a space to record.

    Attributes:
        sample: so many at random; None: all.
        best: so many more, those that the resource model puts first.
        fixed: parameters that have one value; other configs are left out.
        seed: of sample and order.
    """

    sample: int | None = None
    best: int = 0
    fixed: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("sample", self.sample), ("best", self.best)):
            if value is not None and value < 0:
                raise bad_argument(name, "0 or more", value, "pass a count")

    def describe(self, members: int) -> dict[str, Any]:
        """For the sweep's file."""
        said: dict[str, Any] = {"members": members, "of": "all"}
        if self.fixed:
            said["fixed"] = dict(self.fixed)
        if self.sample is not None:
            said |= {"of": "default, its neighbours, best by estimate, sample"}
            said |= {"best": self.best, "sample": self.sample, "seed": self.seed}
        return said

    def key_choice(self, key: TuningKey, tools: Tools) -> "Choice":
        """The configs of one key.

        Raises:
            ValueError: no config has the fixed values.
        """
        members = [
            config
            for config in tools.catalog.configs(key)
            if all(config.get(name) == value for name, value in self.fixed.items())
        ]
        if not members:
            fixed = ", ".join(f"{name}={value}" for name, value in self.fixed.items())
            raise bad_argument(
                "fixed", f"values of {key}", fixed, "fix fewer or others"
            )
        default = tools.catalog.default(key)
        near = ListedSpace([default, *members]).neighbours(default)
        if self.sample is None:
            return Choice(key, default, len(members), [default, *near], members)
        rng = random.Random(f"{self.seed} {key.kernel} {key.structure}")
        chosen = rng.sample(members, min(self.sample, len(members)))
        if self.best and tools.prune is not None:
            kept, _ = tools.prune(key, members, tools.device, keep=self.best)
            chosen += kept[: self.best]
        return Choice(key, default, len(members), [default, *near], chosen)


@dataclass(frozen=True)
class Choice:
    """What is recorded for a key: `first`, then `rest`; `members` has its space."""

    key: TuningKey
    default: KernelConfig
    members: int
    first: Sequence[KernelConfig]
    rest: Sequence[KernelConfig]


@dataclass
class Progress:
    """How far recording is.

    Attributes:
        done, total: rows of all keys.
        key: of the latest row.
        row: that row.
        stopped: "", "budget" or "interrupted".
    """

    done: int = 0
    total: int = 0
    key: TuningKey | None = None
    row: Row | None = None
    stopped: str = ""


class _Key:
    """One key: what there is to do, and its log."""

    def __init__(
        self,
        choice: Choice,
        selection: Selection,
        tools: Tools,
        folder: Path,
        wanted: frozenset[KernelConfig],
    ) -> None:
        self.choice, self.key, self.default = choice, choice.key, choice.default
        members = frozenset(tools.catalog.configs(self.key))
        self.configs = frozenset(c for c in wanted if c in members) | {self.default}
        environment = tools.environment
        digest = (environment.digests or {}).get(self.key.kernel, "")
        empty = Sweep(
            self.key.kernel,
            self.key.to_dict(),
            tools.device,
            (),
            dict(environment.toolchain),
            selection=selection.describe(choice.members),
            kernel_digest=digest,
        )
        self.sweep = empty
        about = {
            "kernel": empty.kernel,
            "key": dict(empty.key),
            "gpu": tools.device.name,
            "toolchain": dict(empty.toolchain),
            "kernel_digest": digest,
            "rounds": tools.rounds,
        }
        self.log = RowLog(folder / f"{empty.name}.rows.jsonl", about)

    @property
    def missing(self) -> int:
        return len(self.configs - self.log.rows.keys())

    def write(self, folder: Path) -> Path | None:
        """The sweep of what is there; None where no config ran."""
        rows = [row for config, row in self.log.rows.items() if config in self.configs]
        if not any(row.times_us for row in rows):
            return None
        said = {**self.sweep.selection, "chosen": len(self.configs)}
        found = Sweep(
            self.sweep.kernel,
            self.sweep.key,
            self.sweep.device,
            tuple(sorted(rows, key=lambda row: repr(row.config.items_))),
            self.sweep.toolchain,
            selection=said,
            kernel_digest=self.sweep.kernel_digest,
        )
        return write_sweep(found, folder)


class Recorder:
    """Records the sweeps of several keys into a folder.

    Args:
        keys: what to record, each once.
        tools: whose measurer times every round and says what each took.
        folder: of the sweeps; beside each its rows so far, from which the same call
            goes on after whatever ended it.
        selection: which configs; keys that share binaries share the choice.
        batch: configs that are compiled ahead, and measured for one key in a row.

    Raises:
        ValueError: a key is no kernel's, there is none, or `selection` leaves nothing.
        LogMismatchError: rows at hand are of other code or another GPU.
    """

    def __init__(
        self,
        keys: Sequence[TuningKey],
        tools: Tools,
        folder: Path,
        selection: Selection | None = None,
        *,
        batch: int = 64,
    ) -> None:
        if not keys:
            raise bad_argument("keys", "at least one", "none", "pass what to record")
        if batch < 1:
            raise bad_argument("batch", "at least 1", batch, "pass a count")
        self.tools, self.folder, self.batch = tools, folder, batch
        selection = selection or Selection()
        folder.mkdir(parents=True, exist_ok=True)
        together: dict[object, list[Choice]] = {}
        for key in dict.fromkeys(keys):
            place = key.kernel, key.structure
            together.setdefault(place, []).append(selection.key_choice(key, tools))
        self._groups: list[tuple[list[KernelConfig], list[_Key]]] = []
        self.keys: list[_Key] = []
        for choices in together.values():
            order = _order(choices, selection.seed)
            wanted = frozenset(order)
            group = [_Key(c, selection, tools, folder, wanted) for c in choices]
            self._groups.append((order, group))
            self.keys += group
        self.progress = Progress(total=sum(len(key.configs) for key in self.keys))
        self.progress.done = self.progress.total - sum(k.missing for k in self.keys)

    def run(
        self,
        budget_s: float | None = None,
        on_row: Callable[[Progress], None] = lambda progress: None,
    ) -> list[Path]:
        """Measure what is missing, then write the sweeps.

        Args:
            budget_s: of this call, writing left out; no row is begun after it.
            on_row: told of each row.

        Returns:
            The sweeps' files, of all keys that have a row with a time. An interruption
            returns as well; `progress.stopped` says so.

        Raises:
            PortableBackendError: nothing can be measured. What there is was written.
        """
        clock = self.tools.clock
        ends = None if budget_s is None else clock() + budget_s
        try:
            self._recall()
            for key, row in self._rows():
                key.log.append(row)
                self.progress.done += 1
                self.progress.key, self.progress.row = key.key, row
                on_row(self.progress)
                if ends is not None and clock() >= ends:
                    self.progress.stopped = "budget" if self._missing() else ""
                    break
        except KeyboardInterrupt:
            self.progress.stopped = "interrupted"
        finally:
            paths = [key.write(self.folder) for key in self.keys]
        return [path for path in paths if path is not None]

    def close(self) -> None:
        """Close the logs; the tools are the caller's."""
        for key in self.keys:
            key.log.close()

    def _recall(self) -> None:
        """Have new rows timed on the scale of those at hand."""
        for key in self.keys:
            known = key.log.rows.get(key.default)
            recall = getattr(self.tools.measurer, "recall", None)
            if known is not None and known.time_us is not None and recall is not None:
                recall(key.key, key.default, known.time_us)

    def _missing(self) -> int:
        return sum(key.missing for key in self.keys)

    def _rows(self) -> Iterator[tuple[_Key, Row]]:
        """Rows as they come: a batch of each group's configs in turn, for its keys."""
        batches = list(self._batches())
        for number, (configs, group) in enumerate(batches):
            for following in batches[number : number + 2]:
                self._submit(*following)
            for key in group:
                for row in self._measured(key, _open(key, configs)):
                    yield key, row

    def _batches(self) -> Iterator[tuple[list[KernelConfig], list[_Key]]]:
        most = max(len(order) for order, _ in self._groups)
        for start in range(0, most, self.batch):
            for order, group in self._groups:
                configs = order[start : start + self.batch]
                if any(_open(key, configs) for key in group):
                    yield configs, group

    def _submit(self, configs: Iterable[KernelConfig], group: Iterable[_Key]) -> None:
        compiler = self.tools.compiler
        if compiler is not None:
            for key in group:
                compiler.submit(key.key, _open(key, configs))

    def _measured(self, key: _Key, configs: Sequence[KernelConfig]) -> Iterator[Row]:
        tools = self.tools
        if tools.compiler is None:
            for config in configs:
                yield self._timed(key, config, 0.0)
            return
        for compiled in tools.compiler.wait(key.key, configs):
            readout = compiled.readout
            setup_s = float(readout.seconds) if readout is not None else 0.0
            if compiled.failure is None:
                yield self._timed(key, compiled.config, setup_s)
                continue
            invalid = "compile" if readout is None else "resources"
            reason = compiled.failure[:MAX_REASON]
            yield Row(compiled.config, (), invalid, reason, round(setup_s, 3))

    def _timed(self, key: _Key, config: KernelConfig, setup_s: float) -> Row:
        proposals = [Proposal(config, self.tools.rounds)]
        (trial,) = self.tools.measurer.measure(key.key, proposals, key.default)
        return _row_of(trial, setup_s)


def _open(key: _Key, configs: Iterable[KernelConfig]) -> list[KernelConfig]:
    return [c for c in configs if c in key.configs and c not in key.log.rows]


def _order(choices: Sequence[Choice], seed: int) -> list[KernelConfig]:
    """All that some key wants: defaults and neighbours, then the rest, shuffled."""
    first = dict.fromkeys(config for choice in choices for config in choice.first)
    rest = dict.fromkeys(config for choice in choices for config in choice.rest)
    others = [config for config in rest if config not in first]
    random.Random(seed).shuffle(others)
    return [*first, *others]


def _row_of(trial: Trial, compile_s: float) -> Row:
    setup_s = round(compile_s + max(0.0, trial.seconds - trial.timing_s), 3)
    if trial.invalid is not None:
        return Row(trial.config, (), trial.invalid, trial.reason[:MAX_REASON], setup_s)
    assert trial.time_us is not None
    times = trial.times_us or (trial.time_us,)
    rounded = tuple(float(f"{time_us:.{DIGITS}g}") for time_us in times)
    return Row(trial.config, rounded, setup_s=setup_s)
