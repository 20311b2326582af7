# SPDX-License-Identifier: Apache-2.0
"""Compile lists of binaries into Triton's cache, in processes that may be lost."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.warmup.binary import Binary, cache_entry
from portable_backend.warmup.compile_pool import WORKER, CompileWorker
from portable_backend.warmup.triton_cache import shared_bytes

# Those that take longest come first, so that no worker is left with one at the end.
_SLOW_FIRST = ("prefill", "decode")
_LOOK_S = 0.1  # between looks at whether to stop


@dataclass
class Warmed:
    """What became of a list of binaries.

    Attributes:
        compiled: were compiled now.
        present: were there before.
        failures: (binary, why not), in one line each.
        seconds: it all took.
    """

    compiled: int = 0
    present: int = 0
    failures: list[tuple[Binary, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def binaries(self) -> int:
        return self.compiled + self.present + len(self.failures)


def warm_binaries(
    binaries: Iterable[Binary],
    device: DeviceInfo,
    *,
    workers: int,
    limit_s: float = 300.0,
    on_done: Callable[[Warmed, int], None] = lambda warmed, total: None,
    command: Sequence[str] = WORKER,
) -> Warmed:
    """Compile what TRITON_CACHE_DIR does not hold yet.

    However it ends, what is compiled by then stays, and no worker is left.

    Args:
        binaries: what to compile.
        device: what for; need not be at hand.
        workers: processes.
        limit_s: for one binary.
        on_done: called after each with what is done so far, and how many there are.
        command: starts a worker; replaced in tests.

    Raises:
        ValueError: workers is not positive, or TRITON_CACHE_DIR is not set.
    """
    if workers < 1:
        raise bad_argument("workers", "1 or more", workers, "correct it")
    folder = os.environ.get("TRITON_CACHE_DIR", "")
    if not folder:
        raise bad_argument("TRITON_CACHE_DIR", "set", "nothing", "set it to a folder")
    started = time.monotonic()
    warmed, missing = Warmed(), []
    wanted = list(dict.fromkeys(binaries))
    for binary in wanted:
        taken = shared_bytes(Path(folder), *cache_entry(binary, device))
        if taken is None:
            missing.append(binary)
        elif failure := _over_limit(taken, device):
            warmed.failures.append((binary, failure))
        else:
            warmed.present += 1
    on_done(warmed, len(wanted))
    for binary, failure in compile_all(
        missing, device, workers=workers, limit_s=limit_s, command=command
    ):
        if failure is None:
            warmed.compiled += 1
        else:
            warmed.failures.append((binary, failure))
        on_done(warmed, len(wanted))
    warmed.seconds = time.monotonic() - started
    return warmed


def missing_binaries(binaries: Iterable[Binary], device: DeviceInfo) -> list[Binary]:
    """Those that TRITON_CACHE_DIR does not hold."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    return [
        binary
        for binary in binaries
        if shared_bytes(folder, *cache_entry(binary, device)) is None
    ]


def compile_all(
    binaries: Sequence[Binary],
    device: DeviceInfo,
    *,
    workers: int,
    limit_s: float,
    command: Sequence[str] = WORKER,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Iterator[tuple[Binary, str | None]]:
    """Compile binaries, whether they are there or not.

    Args:
        environment: of the workers; None: this process's.
        stop: once it is set, what is not done is left.

    Yields:
        (binary, None or why not) of each, as they are done.
    """
    waiting: queue.SimpleQueue[Binary] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Binary, str | None]] = queue.SimpleQueue()
    for binary in sorted(binaries, key=lambda x: x.kernel not in _SLOW_FIRST):
        waiting.put(binary)
    processes = [
        CompileWorker(command, device, limit_s, None, environment=environment)
        for _ in range(min(workers, len(binaries)))
    ]

    def serve(process: CompileWorker) -> None:
        # The thread lives as long as its process, which ends with it.
        while True:
            try:
                binary = waiting.get_nowait()
            except queue.Empty:
                process.kill()
                return
            try:
                failure = _outcome(process, binary, device)
            except Exception as error:  # nobody else would answer for it
                failure = f"{type(error).__name__}: {error}"
            done.put((binary, failure))

    threads = [
        threading.Thread(target=serve, args=(p,), daemon=True) for p in processes
    ]
    try:
        for thread in threads:
            thread.start()
        remaining = len(binaries)
        while remaining and not (stop is not None and stop.is_set()):
            with contextlib.suppress(queue.Empty):
                yield done.get(timeout=_LOOK_S)
                remaining -= 1
    finally:
        while not waiting.empty():
            waiting.get_nowait()
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()


def _outcome(process: CompileWorker, binary: Binary, device: DeviceInfo) -> str | None:
    """None, or why the binary cannot be launched."""
    answer, failure = process.answer_to({"binary": binary.to_dict()})
    if answer is None:
        return failure
    if "shared_bytes" not in answer:
        return str(answer.get("failure"))
    return _over_limit(answer["shared_bytes"], device)


def _over_limit(taken: int, device: DeviceInfo) -> str | None:
    limit = device.limits.shared_bytes_per_block
    if taken > limit:
        return f"takes {taken} bytes of shared memory, the limit is {limit}"
    return None
