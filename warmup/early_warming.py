# SPDX-License-Identifier: Apache-2.0
"""Compile binaries beside what a process does meanwhile, such as loading weights."""

import logging
import threading
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


class EarlyWarming:
    """One list of binaries, compiled by worker processes from now on.

    All that depends on this process's environment is read in the caller's thread: the
    caller may change it afterwards. What fails is left to whoever needs it.

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
        self.compiled = 0
        self._binaries = [(x, cache_entry(x, device)) for x in binaries]
        self._device, self._folder, self._turn = device, folder, turn
        self._workers, self._limit_s, self._command = workers, limit_s, command
        self._environment = child_environment(device) | {
            "TRITON_CACHE_DIR": str(folder)
        }
        self._thread = threading.Thread(
            target=self._run, name="portable_backend compiles", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all is done; after `timeout_s` at the latest."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._turn(self._folder):
                missing = [
                    binary
                    for binary, entry in self._binaries
                    if shared_bytes(self._folder, *entry) is None
                ]
                for _, failure in compile_all(
                    missing,
                    self._device,
                    workers=self._workers,
                    limit_s=self._limit_s,
                    command=self._command,
                    environment=self._environment,
                ):
                    self.compiled += failure is None
        except Exception as error:  # of any kind: who needs them compiles them
            logger.debug("kernels are not compiled early: %r", error)
