# SPDX-License-Identifier: Apache-2.0
"""Whether the engines of a GPU have work: told through a few bytes of shared memory.

An engine marks each step in a small file that it maps, which costs it no system call;
whoever tunes beside it looks there. Engines that share a GPU share the file, and it
stays when they end: one more that starts must find it.
"""

import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# An engine counts as idle this long after its last step: a client that streams one
# answer after another leaves gaps of tenths of a second.
IDLE_S = 0.5
# What a token of a step may take at most before the step is thought to be over: a step
# is marked when it is planned, and a long prompt keeps the GPU busy until long after.
TOKEN_S = 0.25e-3
# Shared memory, so that no disk ever writes it back while an engine writes it.
_SHARED_MEMORY = Path("/dev/shm")
_SIZE = mmap.PAGESIZE
_LOOK_S = 0.02  # between looks at an engine that is busy
_LAST, _UNTIL = 0, 1  # doubles: time of the last step, and when all are over


class Beacon:
    """The engine's side: marks steps. Never waits, and needs no system call.

    Args:
        path: as `beacon_path` gives it; made where it is missing.

    Raises:
        OSError: it cannot be made, or is not this user's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._times = _mapped(path, for_writing=True)
        # An earlier boot's clock may have been ahead.
        self._times[_UNTIL] = 0.0
        self.step(0)

    def step(self, num_tokens: int) -> None:
        """Mark a step that begins now.

        Args:
            num_tokens: that it computes.
        """
        now = time.monotonic()
        times = self._times
        times[_LAST] = now
        until = now + num_tokens * TOKEN_S
        if until > times[_UNTIL]:
            times[_UNTIL] = until


class Activity:
    """The tuner's side: reads what engines have marked.

    Args:
        path: of a beacon that exists.
        idle_s: how long after the last step an engine counts as idle.
        clock, sleep: time.monotonic and time.sleep, or a test's.

    Raises:
        OSError: it does not exist, or is not this user's own.
    """

    def __init__(
        self,
        path: Path,
        idle_s: float = IDLE_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._times = _mapped(path, for_writing=False)
        self._idle_s, self._clock, self._sleep = idle_s, clock, sleep

    def last_step(self) -> float:
        """When the last step was marked; another value means another step."""
        last: float = self._times[_LAST]
        return last

    def idle_in(self) -> float:
        """Seconds until the engine counts as idle, if no step comes; 0: it does."""
        busy_until: float = max(self._times[_LAST], self._times[_UNTIL])
        return max(0.0, busy_until + self._idle_s - self._clock())

    def wait(self) -> None:
        """Return as soon as the engine counts as idle."""
        while (left_s := self.idle_in()) > 0:
            self._sleep(min(left_s, _LOOK_S))


def beacon_path(gpu: str) -> Path:
    """Where the engines of this user on a GPU mark their steps.

    Args:
        gpu: a name that no other GPU of the host has.
    """
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    name = re.sub(r"[^\w-]", "_", gpu)
    return folder / f"portable_backend.{os.getuid()}.{name}"


def _mapped(path: Path, *, for_writing: bool) -> Any:
    """The file's doubles, as a memoryview."""
    flags = os.O_RDWR | os.O_CREAT if for_writing else os.O_RDONLY
    # The folder is everybody's: neither links nor other users' files are followed.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(file)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not this user's own file; remove it")
        if for_writing and status.st_size < _SIZE:
            # Not a hole: without room for it, the engine's first write would kill it.
            os.posix_fallocate(file, 0, _SIZE)
        access = mmap.ACCESS_WRITE if for_writing else mmap.ACCESS_READ
        try:
            return memoryview(mmap.mmap(file, _SIZE, access=access)).cast("d")
        except ValueError as error:  # shorter than a page
            raise OSError(f"{path}: {error}; remove it") from error
    finally:
        os.close(file)
