# SPDX-License-Identifier: Apache-2.0
"""Units of work on the workers of a Ray cluster.

Each worker is an actor with one GPU. What goes to and fro is JSON as bytes, which Ray
hands over as they are; records are merged where the cluster is driven from.
"""

import contextlib
import dataclasses
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portable_backend.errors import UnsupportedError
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.spread import Lost
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tables import parse_line
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuner import Tuner
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import (
    Event,
    Outcome,
    Task,
    format_message,
    parse_message,
)


class RayWorker:
    """What an actor runs.

    Args:
        setup: recipe, options and the folder for trial logs, as JSON.
    """

    def __init__(self, setup: bytes) -> None:
        held = json.loads(setup)
        folder = Path(held["log_root"])
        self._tuner = Tuner(
            Recipe(**held["recipe"]),
            RecordStore(),
            TuneOptions(**held["options"]),
            log_root=folder,
        )

    def tune(self, data: bytes) -> bytes:
        """Tune a unit; it and its outcome as JSON."""
        held = json.loads(data)
        for line in held["records"]:
            place = json.loads(line)
            where = "a record of the cluster's driver"
            record = parse_line(line.encode(), where, place["kernel"], place["gpu"])
            self._tuner.store.put(record)
        task = Task.from_dict(held)
        return format_message(self._tuner.tune_unit(task, held["seconds"]))


class RayCrew:
    """Actors of a Ray cluster, as many as it has room for.

    Args:
        address: of the cluster; "": one that runs here, else a new one.
        recipe, options: of the tuners.
        store: gets the records, and has those that workers start from.
        log_root: folder of the trial logs, on each worker's own host.
        num_gpus: GPUs of a worker; 0 with recorded sweeps.
        most: no more workers than that.
        restarts: how often a worker that was lost is replaced.

    Raises:
        UnsupportedError: Ray is not installed, or the cluster has no room for a worker.
    """

    def __init__(
        self,
        address: str,
        recipe: Recipe,
        options: TuneOptions,
        *,
        store: RecordStore,
        log_root: Path,
        num_gpus: int = 1,
        most: int = 64,
        restarts: int = 2,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise UnsupportedError(
                f"--ray needs Ray, which cannot be imported ({error}); "
                "pip install 'portable-backend[ray]', or use --gpus on one host"
            ) from error
        self._ray: Any = ray
        self._owns = not ray.is_initialized()
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}
        if self._owns:
            # Workers get this folder first on their path: from a checkout it would hide
            # the package that is installed.
            with contextlib.chdir("/"):
                ray.init(address=address or None, log_to_driver=False)
        self._store = store
        self._setup = json.dumps(
            {
                "recipe": recipe.to_dict(),
                "options": dataclasses.asdict(options),
                "log_root": str(log_root),
            }
        ).encode()
        self._actor = ray.remote(
            num_gpus=num_gpus, num_cpus=1, max_restarts=0, max_task_retries=0
        )(RayWorker)
        room = ray.cluster_resources().get("GPU" if num_gpus else "CPU", 0)
        count = min(most, int(room) // max(1, num_gpus))
        if count < 1:
            self.close()
            raise UnsupportedError(
                f"the Ray cluster at {address or socket.gethostname()} has no GPU; "
                "start its nodes with --num-gpus, or use --gpus on one host"
            )
        self._starts_left = [1 + restarts] * count

    def idle(self) -> list[int]:
        busy = set(self._running.values())
        return [n for n in self._numbers() if n not in busy]

    def alive(self) -> int:
        return len(self._numbers())

    def start(
        self,
        worker: int,
        task: Task,
        seconds: float | None,
        upcoming: Task | None = None,
    ) -> None:
        if worker not in self._actors:
            self._starts_left[worker] -= 1
            self._actors[worker] = self._actor.remote(self._setup)
        records = [r.to_line() for r in self._near(task)]
        data = task.to_dict() | {"seconds": seconds, "records": records}
        answer = self._actors[worker].tune.remote(json.dumps(data).encode())
        self._running[answer] = worker

    def poll(self, timeout_s: float) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        if not self._running:
            return
        ready, _ = self._ray.wait(list(self._running), timeout=timeout_s)
        for answer in ready:
            worker = self._running.pop(answer)
            try:
                message = parse_message(self._ray.get(answer))
            except self._ray.exceptions.RayError as error:
                self._actors.pop(worker, None)
                yield worker, Lost(str(error).strip().splitlines()[-1])
                continue
            yield worker, message

    def interrupt(self) -> Iterator[tuple[int, Event | Outcome | Lost]]:
        """End the actors; their trial logs stay on their hosts."""
        self._end_actors()
        yield from ()

    def close(self) -> None:
        self._end_actors()
        if self._owns:
            self._ray.shutdown()

    def merge(self, outcome: Outcome) -> None:
        """Put a worker's record into the store; for `spread`'s `on_outcome`."""
        if outcome.record is not None and outcome.state in ("tuned", "default"):
            self._store.put(outcome.record)

    def _end_actors(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()

    def _numbers(self) -> list[int]:
        counts = enumerate(self._starts_left)
        return [n for n, left in counts if n in self._actors or left > 0]

    def _near(self, task: Task, limit: int = 32) -> list[TuningRecord]:
        """Records that a worker looks up or starts from, the nearest keys first."""
        self._store.refresh()
        found = [record for _, record in self._store.records(task.key.kernel)]
        return sorted(found, key=lambda r: task.key.distance(r.key))[:limit]
