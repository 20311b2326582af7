# SPDX-License-Identifier: Apache-2.0
"""The process that tunes beside an engine that serves, while that has nothing to do.

    python -P -m portable_backend.warmup.background

Its first line of input, JSON, says what to do; the end of its input ends it. Each line
of output is JSON too: {"line": text, "level": name} for the engine's log, or a status.
It runs on CPUs that nobody else wants, writes records to the user's cache, one key
after the other, and ends when no key is left. One such process at a time works on a
GPU; others wait until it has ended.
"""

import contextlib
import fcntl
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_backend.warmup.activity import Activity
from portable_backend.warmup.compile_worker import end_with_parent
from portable_backend.warmup.layers import file_stem
from portable_backend.warmup.report import write_json
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuner import BREAKDOWNS, Tuner
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Event, Outcome, Task

SCHEMA = 1
PREFIX = "background."
# As start_tuning's: one key ends after so many configs, whatever time it takes.
OPTIONS = TuneOptions(trials=128, candidates=2048, patience=48)
# Keys in a row that fail before the rest is given up.
_MOST_FAILURES = 3
_TELL_S = 10.0  # between two statuses, while trials go on
_LOCK_S = 5.0  # between two looks whether another process has ended
_ROOM_BYTES = 1 << 16
_CONFLICTS = (BlockingIOError, PermissionError)


@dataclass
class Status:
    """How far it is; all of it goes to the engine and into a file beside the records.

    Attributes:
        gpu: model.
        keys: to tune.
        state: "waiting" for another process on the GPU, "tuning", "done" or "given up".
        done: keys that have a record now.
        trials: configs that were tried.
        key: that it is at.
        outcomes: of each key, as `Outcome.to_dict` has them, in short.
        pid: of the process.
    """

    gpu: str
    keys: int
    state: str = "waiting"
    done: int = 0
    trials: int = 0
    key: str = ""
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **vars(self)}


class CacheError(Exception):
    """Records cannot be kept, so none are made."""


class Background:
    """Tunes keys one after another beside an engine.

    Args:
        recipe: of the tools.
        tasks: the most valuable first.
        gpu: model, for messages.
        cache_dir, cache_layers: of records.
        beacon: where the engine marks its steps.
        out: file descriptor for lines to the engine.
    """

    def __init__(
        self,
        recipe: Recipe,
        tasks: Sequence[Task],
        *,
        gpu: str,
        cache_dir: Path,
        cache_layers: Sequence[Path],
        beacon: Path,
        out: int,
    ) -> None:
        self.recipe, self.tasks = recipe, tasks
        self.cache_dir, self.cache_layers = cache_dir, cache_layers
        self.beacon, self._out = beacon, out
        self.status = Status(gpu, len(tasks))
        self._activity = Activity(beacon)
        self._told_at = 0.0
        self._tried = 0  # configs of earlier keys

    def run(self) -> None:
        """Until no key is left, or nothing can be done."""
        try:
            _require_room(self.cache_dir)
            self.tell()
            with alone_on(self.beacon), self._tuner() as tuner:
                self.status.state = "tuning"
                self._tune(tuner)
        except CacheError as error:
            self._give_up(str(error))
        else:
            self.tell()

    def _tuner(self) -> Tuner:
        store = RecordStore.open(self.cache_dir, self.cache_layers)
        return Tuner(
            self.recipe,
            store,
            OPTIONS,
            log_root=self.cache_dir,
            on_event=self._on_event,
        )

    def _tune(self, tuner: Tuner) -> None:
        failures = 0
        for number, task in enumerate(self.tasks):
            self._activity.wait()
            self.status.key = str(task.key)
            self.tell()
            following = self.tasks[number + 1 : number + 2]
            outcome = self._unmeasured(tuner, task) or tuner.tune_unit(
                task, upcoming=following[0].key if following else None
            )
            self._note(outcome)
            if outcome.record is not None and outcome.state == "failed":
                raise CacheError(outcome.reason)
            failures = failures + 1 if outcome.state == "failed" else 0
            if failures == _MOST_FAILURES:
                self._give_up(outcome.reason)
                return
        self.status.state, self.status.key = "done", ""
        self.say(
            f"background tuning is done: {self.status.done} of {self.status.keys} keys "
            f"have records, {self.status.trials} trials; the next start serves them"
        )

    def _unmeasured(self, tuner: Tuner, task: Task) -> Outcome | None:
        """What becomes of a key that cannot be measured here; None: it can."""
        why_not = getattr(tuner.tools.measurer, "why_not", None)
        if why_not is None:
            return None
        try:
            reason = why_not(task.key)
        except BREAKDOWNS as error:
            tuner.tools.measurer.close()
            return Outcome(task.key, "failed", str(error))
        return reason and Outcome(task.key, "unreached", f"passed over: {reason}")

    def _note(self, outcome: Outcome) -> None:
        status = self.status
        self._tried += _tried(outcome)
        status.trials = self._tried
        status.done += outcome.state in ("tuned", "default", "known")
        shown = outcome.to_dict()
        names = ("kernel", "key", "state", "reason", "gain", "seconds")
        status.outcomes.append({name: shown[name] for name in names})
        gain = f", {outcome.gain:.2f} times the default's speed" if outcome.gain else ""
        reason = f": {outcome.reason}" if outcome.reason else ""
        self.say(
            f"background tuning: key {len(status.outcomes)} of {status.keys}, "
            f"{outcome.state}{gain}, {_tried(outcome)} trials, "
            f"{outcome.key}{reason}"
        )
        self.tell()

    def _give_up(self, reason: str) -> None:
        self.status.state = "given up"
        left = self.status.keys - len(self.status.outcomes)
        self.say(
            f"background tuning is given up, {left} keys are left as they were: "
            f"{reason}",
            level="WARNING",
        )
        self.tell()

    def _on_event(self, event: Event) -> None:
        if event.kind != "trial":
            return
        self.status.trials = self._tried + _tried(event)
        if time.monotonic() - self._told_at >= _TELL_S:
            self.tell()

    def say(self, text: str, level: str = "INFO") -> None:
        """Have the engine log a line."""
        self._send({"line": text, "level": level})

    def tell(self) -> None:
        """Tell the engine, and whoever reads the file, how far it is."""
        self._told_at = time.monotonic()
        status = self.status.to_dict()
        short = {name: status[name] for name in ("state", "keys", "done", "trials")}
        self._send({"status": short})
        with contextlib.suppress(OSError):  # where records cannot be kept, it is told
            write_json(status_path(self.cache_dir, self.status.gpu), status)

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]


def status_path(cache_dir: Path, gpu: str) -> Path:
    """Where the last status of tuning beside an engine on such a GPU lies."""
    return cache_dir / f"{PREFIX}{file_stem(gpu)}.json"


@contextlib.contextmanager
def alone_on(beacon: Path) -> Iterator[None]:
    """Waits until no other process tunes on the GPU; the lock ends with its process."""
    file = os.open(beacon, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            with contextlib.suppress(*_CONFLICTS):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_S)
        yield
    finally:
        os.close(file)


def be_humble() -> None:
    """Take CPUs and disks that nobody else wants; children do the same."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(ImportError, OSError, AttributeError):
        psutil = importlib.import_module("psutil")  # vLLM needs it itself
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _tried(counted: Event | Outcome) -> int:
    """Configs that got as far as the GPU or were found not to."""
    return counted.counts.timed + counted.counts.rejected.total()


def _require_room(cache_dir: Path) -> None:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except OSError as error:
        raise CacheError(f"{cache_dir} takes no records: {error}") from None


def _end_with_input(parent: int) -> None:
    """When nothing more comes, or the parent is another one, all of this ends."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(0)  # tools end with the pipes to them

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    for target in (watch, look):
        threading.Thread(target=target, daemon=True).start()


def main() -> int:
    end_with_parent()
    be_humble()
    # What libraries print must not mix with what the engine is told.
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as source:
        setup = json.loads(source.readline())
    _end_with_input(setup["parent"])
    background = Background(
        Recipe(**setup["recipe"]),
        [Task.from_dict(task) for task in setup["tasks"]],
        gpu=setup["gpu"],
        cache_dir=Path(setup["cache_dir"]),
        cache_layers=[Path(folder) for folder in setup["cache_layers"]],
        beacon=Path(setup["beacon"]),
        out=out,
    )
    background.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
