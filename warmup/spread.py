# SPDX-License-Identifier: Apache-2.0
"""Units of work spread over workers: a queue, a budget, and lost workers' units.

`spread` neither knows nor cares whether its crew are processes of this host, one for
each GPU, or actors of a Ray cluster.
"""

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from portable_backend.errors import bad_argument
from portable_backend.warmup.shares import Shares
from portable_backend.warmup.toolchain import child_environment
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Event, Outcome, Task, parse_message

logger = logging.getLogger("vllm.portable_backend.tuner")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# How long interrupted workers may take to say what they have.
GRACE_S = 10.0


@dataclass(frozen=True)
class Lost:
    """A worker that ended with a unit at hand."""

    reason: str


class Crew(Protocol):
    """Workers with numbers, each with one unit at a time."""

    def idle(self) -> Sequence[int]:
        """Workers that can take a unit; one that was lost comes back a few times."""

    def alive(self) -> int:
        """How many workers are there, or will come back."""

    def start(
        self,
        worker: int,
        task: Task,
        seconds: float | None,
        upcoming: Task | None = None,
    ) -> None:
        """Have a worker begin a unit; it may prepare what is likely to come next."""

    def poll(self, timeout_s: float) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        """Yield what workers say: at once if they do, else within the time."""

    def interrupt(self) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        """Stop all, and yield what they still say."""

    def close(self) -> None: ...


def spread(
    tasks: Sequence[Task],
    crew: Crew,
    *,
    budget_s: float | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    retries: int = 1,
    poll_s: float = 1.0,
) -> list[Outcome]:
    """Have a crew tune units; an outcome for each, in their order.

    Args:
        tasks: the units, the most valuable first.
        crew: closed by the caller.
        budget_s: seconds overall, shared like those of `tune`.
        on_event, on_outcome: told as things happen.
        retries: how often a lost worker's unit is given to another.
        poll_s: how long to wait for news at a time.
    """
    board = _Board(tasks, crew, budget_s, on_event, on_outcome, retries)
    try:
        while board.goes_on():
            board.hand_out()
            for worker, message in crew.poll(poll_s):
                board.take(worker, message)
    except KeyboardInterrupt:
        board.stop()
    return board.outcomes()


class _Board:
    """Which unit is where."""

    def __init__(
        self,
        tasks: Sequence[Task],
        crew: Crew,
        budget_s: float | None,
        on_event: Callable[[Event], None],
        on_outcome: Callable[[Outcome], None],
        retries: int,
    ) -> None:
        self.tasks, self.crew, self.retries = list(tasks), crew, retries
        self.on_event, self.on_outcome = on_event, on_outcome
        lanes = max(1, min(crew.alive(), len(tasks)))
        self.shares = Shares(tasks, budget_s, lanes=lanes)
        self.queue = deque(self.tasks)
        self.running: dict[int, tuple[Task, float]] = {}
        self.upcoming: dict[int, Task] = {}  # what each prepares meanwhile
        self.lost: dict[Task, list[int]] = {}
        self.done: dict[Task, Outcome] = {}

    def goes_on(self) -> bool:
        return bool(self.queue or self.running)

    def hand_out(self) -> None:
        begun: list[tuple[int, Task, float | None]] = []
        for worker in self.crew.idle():
            task = self._next_for(worker)
            while task is not None:
                seconds = self.shares.grant(task)
                if seconds != 0.0:
                    self.running[worker] = task, time.monotonic()
                    begun.append((worker, task, seconds))
                    break
                self._finish(task, Outcome(task.key, "unreached", "no time was left"))
                task = self._next_for(worker)
        for worker, task, seconds in begun:
            self.crew.start(worker, task, seconds, self._reserve(worker))
        if not self.running and self.queue and not self.crew.alive():
            for task in self.queue:
                self._finish(task, Outcome(task.key, "failed", "no worker is left"))
            self.queue.clear()

    def take(self, worker: int, message: Event | Outcome | Lost) -> None:
        if isinstance(message, Event):
            self.on_event(replace(message, worker=str(worker)))
            return
        if worker not in self.running:
            return
        task, started = self.running.pop(worker)
        if isinstance(message, Outcome):
            self.shares.settle(task, message.seconds)
            self._finish(task, message, worker)
            return
        self.shares.settle(task, time.monotonic() - started)
        lost = self.lost.setdefault(task, [])
        lost.append(worker)
        logger.warning("%s: worker %d was lost: %s", task.key, worker, message.reason)
        if len(lost) > self.retries:
            reason = f"its workers were lost: {message.reason}"
            self._finish(task, Outcome(task.key, "failed", reason), worker)
        else:
            self.queue.appendleft(task)

    def stop(self) -> None:
        """After Ctrl-C: take what is still said, and leave the rest."""
        for worker, message in self.crew.interrupt():
            if isinstance(message, Outcome) and worker in self.running:
                self._finish(self.running.pop(worker)[0], message, worker)
        for task, _ in self.running.values():
            self._finish(task, Outcome(task.key, "interrupted"))
        for task in self.queue:
            self.done.setdefault(task, Outcome(task.key, "unreached", "interrupted"))

    def outcomes(self) -> list[Outcome]:
        unknown = "nothing was heard of it"
        return [
            self.done.get(task, Outcome(task.key, "failed", unknown))
            for task in self.tasks
        ]

    def _reserve(self, worker: int) -> Task | None:
        """What a worker may prepare: the first unit that no other one prepares."""
        taken = set(self.upcoming.values())
        upcoming = next((task for task in self.queue if task not in taken), None)
        if upcoming is not None:
            self.upcoming[worker] = upcoming
        return upcoming

    def _next_for(self, worker: int) -> Task | None:
        """The first unit that this worker was not lost with, if another can take it.

        What it has prepared comes before, what others prepare after all else.
        """
        if worker in self.running:
            return None
        own = self.upcoming.pop(worker, None)
        others = set(self.upcoming.values())
        by_turn = sorted(self.queue, key=lambda task: (task != own, task in others))
        for task in by_turn:
            lost = set(self.lost.get(task, ()))
            if worker not in lost or len(lost) >= self.crew.alive():
                self.queue.remove(task)
                return task
        return None

    def _finish(self, task: Task, outcome: Outcome, worker: int | None = None) -> None:
        self.done[task] = outcome
        self.on_outcome(outcome)
        name = "" if worker is None else str(worker)
        event = Event("finished", task.key, outcome.counts, outcome=outcome)
        self.on_event(replace(event, worker=name))


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    answers: int  # file descriptor
    pending: bytes = b""
    is_busy: bool = False


class GpuCrew:
    """A process for each GPU, which sees no other.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES has them, one for each worker.
        recipe, options: of the tuners.
        cache_dir: the one user cache, which all write.
        cache_layers: read-only folders of records.
        restarts: how often a worker that was lost is started again.
        grace_s: how long a worker that is told to end may take.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        recipe: Recipe,
        options: TuneOptions,
        *,
        cache_dir: Path,
        cache_layers: Sequence[Path] = (),
        restarts: int = 2,
        grace_s: float = GRACE_S,
    ) -> None:
        if not gpus:
            raise bad_argument("gpus", "one GPU at least", "none", "name some")
        self.gpus = list(gpus)
        self._setup = {
            "recipe": recipe.to_dict(),
            "options": asdict(options),
            "cache_dir": str(cache_dir),
            "cache_layers": [str(folder) for folder in cache_layers],
        }
        self._starts_left = [1 + restarts] * len(self.gpus)
        self._grace_s = grace_s
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def idle(self) -> list[int]:
        return [
            n
            for n in range(len(self.gpus))
            if (n in self._workers and not self._workers[n].is_busy)
            or (n not in self._workers and self._starts_left[n] > 0)
        ]

    def alive(self) -> int:
        return sum(
            n in self._workers or self._starts_left[n] > 0
            for n in range(len(self.gpus))
        )

    def start(
        self,
        worker: int,
        task: Task,
        seconds: float | None,
        upcoming: Task | None = None,
    ) -> None:
        if worker not in self._workers:
            self._launch(worker)
        self._workers[worker].is_busy = True
        # A worker that died meanwhile is noticed by poll.
        with contextlib.suppress(OSError):
            about: dict[str, Any] = {"seconds": seconds, "sent": time.monotonic()}
            about["upcoming"] = upcoming and upcoming.to_dict()
            _send(self._workers[worker], task.to_dict() | about)

    def poll(self, timeout_s: float) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        for selected, _ in self._selector.select(timeout_s):
            number = selected.data
            worker = self._workers[number]
            data = os.read(worker.answers, 1 << 16)
            if not data:
                yield number, self._end(number)
                continue
            *lines, worker.pending = (worker.pending + data).split(b"\n")
            for line in lines:
                message = parse_message(line)
                if isinstance(message, Outcome):
                    worker.is_busy = False
                yield number, message

    def interrupt(self) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                _stdin(worker).close()  # which the worker takes for Ctrl-C
        ends = time.monotonic() + self._grace_s
        while self._workers and time.monotonic() < ends:
            yield from self.poll(0.1)

    def close(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                _stdin(worker).close()
        ends = time.monotonic() + self._grace_s
        for number in list(self._workers):
            process = self._workers[number].process
            try:
                process.wait(max(0.01, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            self._end(number)
        self._selector.close()

    def _launch(self, number: int) -> None:
        self._starts_left[number] -= 1
        ours, theirs = os.pipe()
        environ = child_environment() | dict.fromkeys(VISIBLE, self.gpus[number])
        command = [sys.executable, "-P", "-m", "portable_backend.warmup.spread_worker"]
        try:
            process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                pass_fds=(theirs,),
                env=environ,
            )
        finally:
            os.close(theirs)
        worker = _Worker(process, ours)
        self._workers[number] = worker
        self._selector.register(ours, selectors.EVENT_READ, number)
        with contextlib.suppress(OSError):
            _send(worker, self._setup | {"worker": str(number)})

    def _end(self, number: int) -> Lost:
        """Clear up after a worker that has ended."""
        worker = self._workers.pop(number)
        self._selector.unregister(worker.answers)
        os.close(worker.answers)
        with contextlib.suppress(OSError):
            _stdin(worker).close()
        try:
            code = worker.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Lost(f"the process for GPU {self.gpus[number]} ended with {how}")


def visible_gpus(count: int) -> list[str]:
    """Names of the first `count` GPUs that this process sees."""
    for variable in VISIBLE:
        if named := os.environ.get(variable):
            return [name.strip() for name in named.split(",")][:count]
    return [str(n) for n in range(count)]


def _send(worker: _Worker, data: dict[str, Any]) -> None:
    _stdin(worker).write(json.dumps(data).encode() + b"\n")
    _stdin(worker).flush()


def _stdin(worker: _Worker) -> IO[bytes]:
    assert worker.process.stdin is not None
    return worker.process.stdin


def _has_fileno(stream: Any) -> bool:
    try:
        return int(stream.fileno()) >= 0
    except (OSError, AttributeError, ValueError):
        return False
