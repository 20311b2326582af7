# SPDX-License-Identifier: Apache-2.0
"""The measuring process and the pipes to it, as its parent sees them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import IO, Any

from portable_backend.errors import PortableBackendError
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.toolchain import child_environment

# Exit code of a child that gave its memory back to an engine that was busy for long.
RELEASED = 75
_CHILD = "portable_backend.warmup.measuring_child"
_POLL_S = 0.1
_MIB = 1 << 20


class MeasuringError(PortableBackendError):
    """No config can be measured: the child process does not even start."""


class Released(Exception):
    """The child has ended so that an engine gets its memory: ask another one."""


class Failure(Exception):
    """A request that failed: why, in whose stage, and whether the child is lost."""

    def __init__(self, invalid: str, reason: str, stage: str) -> None:
        super().__init__(reason)
        self.invalid, self.reason, self.stage = invalid, reason, stage


class Child:
    """One child process and the pipes to it.

    Args:
        options: of the child, as JSON can hold them.
        env: in addition to this process's own.
        activity: of the engine that the child waits for; that time does not count.
    """

    def __init__(
        self,
        options: dict[str, Any],
        env: Mapping[str, str],
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  until end()
        self.is_alive = True
        self.ready: dict[str, Any] = {}
        self._pending = b""
        self._unread: deque[dict[str, Any]] = deque()
        command = [sys.executable, "-P", "-m", _CHILD, json.dumps(options)]
        try:
            # A session of its own: Ctrl-C is the parent's to handle.
            self._process = subprocess.Popen(
                [*command, str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env={**child_environment(), **env},
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def start(self, limit_s: float, memory_mib: int) -> None:
        try:
            self.ready = self._wait("ready", limit_s, memory_mib)
        except Failure as failure:
            raise MeasuringError(
                f"the measuring process does not start: {failure.reason}"
            ) from None

    def send(self, request: dict[str, Any]) -> None:
        """Have it do something as soon as it is ready; one request at a time.

        Raises:
            Failure: the process is lost.
            Released: it has ended for the engine's sake.
        """
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise self._lost("candidate") from None

    def answer(self, limit_s: float, memory_mib: int) -> dict[str, Any]:
        """What came of the request, in `limit_s` from now.

        Raises:
            Failure: nothing, or the process is lost.
            Released: it has ended for the engine's sake.
        """
        return self._wait("result", limit_s, memory_mib)

    def has_ended(self) -> bool:
        """Whether the process is gone, even where nothing has been heard of that."""
        return not self.is_alive or self._process.poll() is not None

    def end(self) -> None:
        """Kill the process and all that it started."""
        if self._requests < 0:
            return
        self.is_alive = False
        os.close(self._requests)
        os.close(self._replies)
        self._requests = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # It may be held in the driver, and end when that lets go.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._stderr.close()

    def _wait(self, wanted: str, limit_s: float, memory_mib: int) -> dict[str, Any]:
        looked = time.monotonic()
        deadline = looked + limit_s
        stage = "candidate"
        while True:
            for message in self._messages():
                stage = message.get("stage", stage)
                if wanted in message:
                    result: dict[str, Any] = message[wanted]
                    return result
                if "failed" in message:
                    self.is_alive = not message["ends"]
                    raise Failure(message["failed"], message["reason"], stage)
            if not self.is_alive:
                raise self._lost(stage)
            before, looked = looked, time.monotonic()
            if self._activity is not None and self._activity.idle_in() > 0:
                deadline += looked - before
            if looked > deadline:
                self.is_alive = False
                reason = f"no answer within {limit_s:g} s"
                raise Failure("timeout", reason, stage)
            used = self._resident_mib()
            if used > memory_mib:
                self.is_alive = False
                reason = f"{used} MiB of host memory, {memory_mib} allowed"
                raise Failure("over-limit", reason, stage)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What has come by now; waits a moment for it. The unread is kept."""
        if not self._unread:
            self._read()
        while self._unread:
            yield self._unread.popleft()

    def _read(self) -> None:
        if not select.select([self._replies], [], [], _POLL_S)[0]:
            return
        data = os.read(self._replies, 65536)
        self.is_alive = bool(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._unread.extend(map(json.loads, lines))

    def _lost(self, stage: str) -> Failure:
        """Why the process is gone."""
        self.is_alive = False
        code = self._process.wait(10)
        if code == RELEASED:
            raise Released
        if code == -signal.SIGKILL:
            return Failure("over-limit", "killed, as the kernel does for memory", stage)
        if code < 0:
            return Failure("runtime", f"killed by {signal.Signals(-code).name}", stage)
        self._stderr.seek(0)
        lines = self._stderr.read()[-4096:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        return Failure("runtime", f"exit code {code}: {last.strip()[:200]}", stage)

    def _resident_mib(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                pages = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE") // _MIB
