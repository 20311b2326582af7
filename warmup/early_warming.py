# SPDX-License-Identifier: Apache-2.0
"""Compile binaries beside what a process does meanwhile, such as loading weights."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from portable_backend.device import DeviceInfo
from portable_backend.warmup.binary import Binary, cache_entry
from portable_backend.warmup.compile_pool import WORKER
from portable_backend.warmup.toolchain import child_environment
from portable_backend.warmup.triton_cache import shared_bytes
from portable_backend.warmup.warming import compile_all

logger = logging.getLogger("vllm.portable_backend.early_warming")
_STOP_S = 10.0  # workers that are killed end sooner


class EarlyWarming:
    """One list of binaries, compiled by worker processes from now on.

    All that depends on this process's environment is read in the caller's thread: the
    caller may change it afterwards.

    Attributes:
        binaries: the list.
        compiled: those that these workers have compiled so far.
        failures: those that cannot be, and why, so far.

    Args:
        binaries: what to compile; what another process compiles first is left out.
        device: what for.
        folder: Triton's cache.
        workers: processes.
        turn: held while they compile, so that processes do not do the same work.
        limit_s: for one binary.
        command: starts a worker; replaced in tests.
    """

    def __init__(
        self,
        binaries: Sequence[Binary],
        device: DeviceInfo,
        *,
        folder: Path,
        workers: int,
        turn: Callable[[Path], AbstractContextManager[None]],
        limit_s: float = 300.0,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.binaries = frozenset(binaries)
        self.compiled: set[Binary] = set()
        self.failures: dict[Binary, str] = {}
        self._entries = [(x, cache_entry(x, device)) for x in binaries]
        self._device, self._folder, self._turn = device, folder, turn
        self._workers, self._limit_s, self._command = workers, limit_s, command
        self._environment = child_environment(device) | {
            "TRITON_CACHE_DIR": str(folder)
        }
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, name="portable_backend compiles", daemon=True
        )
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Whether all is done; until `limit_s` after the beginning, at the latest."""
        self._thread.join(max(0.0, self._began + limit_s - time.monotonic()))
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Leave what is not done, and whoever waits for the turn to it."""
        self._stop.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            with self._turn(self._folder):
                missing = [
                    binary
                    for binary, entry in self._entries
                    if shared_bytes(self._folder, *entry) is None
                ]
                for binary, failure in compile_all(
                    missing,
                    self._device,
                    workers=self._workers,
                    limit_s=self._limit_s,
                    command=self._command,
                    environment=self._environment,
                    stop=self._stop,
                ):
                    if failure is None:
                        self.compiled.add(binary)
                    elif not self._stop.is_set():
                        self.failures[binary] = failure
        except Exception as error:  # of any kind: who needs them compiles them
            logger.debug("kernels are not compiled early: %r", error)
