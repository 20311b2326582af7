# SPDX-License-Identifier: Apache-2.0
"""The parent's side of measuring: a config that hangs or crashes costs a child process.

Nothing here touches the GPU. The child is started when it is first needed, and again
after each time it was lost; what it was doing then becomes an invalid trial.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from portable_backend.device import ArchLimits, DeviceInfo
from portable_backend.errors import PortableBackendError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal, Trial

MAKE_WORKLOAD = "portable_backend.warmup.workloads:make_workload"
_CHILD = "portable_backend.warmup.measuring_child"
_POLL_S = 0.1
# To make a key's workload; then all its configs are given up.
_TRIES = 2
_MIB = 1 << 20


class MeasuringError(PortableBackendError):
    """No config can be measured: the child process does not even start."""


@dataclass(frozen=True)
class Confirmation:
    """What the winner of a search is worth, on data that it has not seen.

    Attributes:
        time_us: of one call; infinite where it did not run.
        default_us: the default config's, timed in turns with it; infinite likewise.
        noise: relative, how far the ratio of the two may be off; 95 % interval.
        error_ratio: our largest error over torch's; infinite where unknown.
        wrong: None, or why the config must not be used.
    """

    time_us: float
    default_us: float
    noise: float
    error_ratio: float
    wrong: str | None = None

    @property
    def is_better(self) -> bool:
        """Right, and faster than the default beyond noise."""
        limit = self.default_us * (1 - self.noise)
        return self.wrong is None and self.time_us < limit


class _Failure(Exception):
    """A request that failed: why, in whose stage, and whether the child is lost."""

    def __init__(self, invalid: str, reason: str, stage: str) -> None:
        super().__init__(reason)
        self.invalid, self.reason, self.stage = invalid, reason, stage


class MeasuringProcess:
    """Measures configs in a child process, one at a time.

    Args:
        device: torch device of the child, "cuda:0"; "cpu" interprets.
        make: function that makes a workload of (TuningKey, torch.device), as
            "module:name".
        limit_s: for one trial; a confirmation may take four times as long.
        start_limit_s: for the start of the child.
        prepare_limit_s: for making the workload of a key.
        host_memory_mib: resident memory the child may have; None: half the machine's.
        device_memory_share: of the GPU's memory, what the child may allocate.
        confirm_rounds: of timing in a confirmation.
        turn_us: length of a turn, of which a round has one each for the config and the
            incumbent. In short ones a chip does not settle on a clock.
        gives_up: whether what is clearly slower than the incumbent is timed for fewer
            rounds than proposed.
        env: of the child, in addition to this process's own.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        *,
        device: str = "cuda:0",
        make: str = MAKE_WORKLOAD,
        limit_s: float = 20.0,
        start_limit_s: float = 180.0,
        prepare_limit_s: float = 120.0,
        host_memory_mib: int | None = None,
        device_memory_share: float = 0.9,
        confirm_rounds: int = 15,
        turn_us: float = 10_000.0,
        gives_up: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if host_memory_mib is None:
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            host_memory_mib = pages // 2 // _MIB
        for name, value in (
            ("limit_s", limit_s),
            ("start_limit_s", start_limit_s),
            ("prepare_limit_s", prepare_limit_s),
            ("host_memory_mib", host_memory_mib),
            ("device_memory_share", device_memory_share),
            ("confirm_rounds", confirm_rounds),
            ("turn_us", turn_us),
        ):
            if not value > 0:
                raise bad_argument(name, "above 0", value, "leave it out")
        self.device, self.make = device, make
        self.limit_s, self.start_limit_s = limit_s, start_limit_s
        self.prepare_limit_s = prepare_limit_s
        self.host_memory_mib = host_memory_mib
        self.device_memory_share = device_memory_share
        self.confirm_rounds, self.turn_us = confirm_rounds, turn_us
        self.gives_up = gives_up
        self._env = dict(env or {})
        self._child: _Child | None = None
        self._prepared: TuningKey | None = None
        self._answers: dict[TuningKey, dict[str, Any]] = {}
        self._times: dict[tuple[TuningKey, KernelConfig], float] = {}
        self._unusable: set[tuple[TuningKey, KernelConfig]] = set()
        self._unready: dict[TuningKey, list[_Failure]] = {}
        self._count = 0

    def begin(self) -> None:
        """Start the child without waiting for it: its imports take seconds."""
        if self._child is None:
            self._child = self._new_child()

    def measure(
        self,
        key: TuningKey,
        proposals: Sequence[Proposal],
        incumbent: KernelConfig | None = None,
    ) -> Iterator[Trial]:
        """Check and time configs of `key`.

        Times of one key are on one scale, whatever the clock does meanwhile: they are
        taken in turns with the incumbent's.

        Args:
            key: what to measure for.
            proposals: in this order; nothing runs ahead of the trial that is asked for.
            incumbent: what to compare with; None: the default config.

        Returns:
            A trial for each proposal; invalid ones say why.

        Raises:
            MeasuringError: the child process does not start.
        """
        for proposal in proposals:
            start = time.monotonic()
            try:
                result = self._trial(key, proposal, incumbent)
            except _Failure as failure:
                yield Trial(
                    proposal.config,
                    proposal.rounds,
                    None,
                    failure.invalid,
                    failure.reason,
                    time.monotonic() - start,
                )
                continue
            time_us: float = result["time_us"]
            self._times.setdefault((key, proposal.config), time_us)
            yield Trial(
                proposal.config,
                proposal.rounds,
                time_us,
                seconds=time.monotonic() - start,
                times_us=tuple(result["times_us"]),
                timing_s=result["timing_s"],
            )

    def confirm(self, key: TuningKey, config: KernelConfig, seed: int) -> Confirmation:
        """Check a config on data no trial has seen, and time it beside the default.

        Args:
            key, config: what won.
            seed: of the data, 0 or more.

        Raises:
            ValueError: `seed` is negative.
            MeasuringError: the child process does not start.
        """
        if seed < 0:
            raise bad_argument("seed", "0 or more", seed, "pass another one")
        request = {
            "do": "confirm",
            "config": config.to_dict(),
            "seed": seed,
            "rounds": self.confirm_rounds,
        }
        try:
            default = self._default_of(key)
            for beside in (True, False):
                if beside and (key, default) in self._unusable:
                    continue
                try:
                    result = self._ask(
                        key, {**request, "beside": beside}, 4 * self.limit_s
                    )
                    return Confirmation(**result)
                except _Failure as failure:
                    if failure.stage != "incumbent":
                        raise
                    self._unusable.add((key, default))
            raise AssertionError("without the default none of it can fail")
        except _Failure as failure:
            inf, wrong = float("inf"), f"{failure.invalid}: {failure.reason}"
            return Confirmation(inf, inf, inf, inf, wrong)

    def recall(self, key: TuningKey, config: KernelConfig, time_us: float) -> None:
        """Keep to the scale of an earlier process, in which `config` took so long."""
        self._times[key, config] = time_us

    def roof_us(self, key: TuningKey) -> float | None:
        """The time that no config can beat; None if unknown.

        Raises:
            MeasuringError: the child process does not start.
        """
        try:
            self._prepare(key)
        except _Failure:
            return None
        roof: float | None = self._answers[key]["roof_us"]
        return roof

    def device_info(self) -> DeviceInfo:
        """The device, as the child sees it.

        Raises:
            MeasuringError: the child process does not start.
        """
        ready = self._running().ready
        return DeviceInfo(**{**ready, "limits": ArchLimits(**ready["limits"])})

    def close(self) -> None:
        """End the child; the next measurement starts another."""
        if self._child is not None:
            self._child.end()
            self._child = None
        self._prepared = None

    def __enter__(self) -> "MeasuringProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _trial(
        self, key: TuningKey, proposal: Proposal, incumbent: KernelConfig | None
    ) -> dict[str, Any]:
        self._count += 1
        rival: KernelConfig | None = incumbent or self._default_of(key)
        while True:
            if (key, rival) in self._unusable and rival != proposal.config:
                rival = None
            request = {
                "do": "trial",
                "config": proposal.config.to_dict(),
                "rounds": proposal.rounds,
                "seed": self._count,
                "incumbent": rival and rival.to_dict(),
                "incumbent_us": rival and self._times.get((key, rival)),
            }
            try:
                return self._ask(key, request, self.limit_s)
            except _Failure as failure:
                at_fault = failure.stage == "incumbent" and rival != proposal.config
                if not at_fault or rival is None:
                    raise
                self._unusable.add((key, rival))

    def _default_of(self, key: TuningKey) -> KernelConfig:
        if key not in self._answers:
            self._prepare(key)
        return KernelConfig.from_dict(self._answers[key]["default"])

    def _prepare(self, key: TuningKey) -> None:
        if self._prepared == key and self._child is not None:
            return
        failures = self._unready.setdefault(key, [])
        if len(failures) == _TRIES:
            raise failures[-1]
        try:
            request = {"do": "prepare"}
            self._answers[key] = self._send(key, request, self.prepare_limit_s)
        except _Failure as failure:
            failures.append(failure)
            raise
        failures.clear()
        self._prepared = key

    def _ask(
        self, key: TuningKey, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        self._prepare(key)
        return self._send(key, request, limit_s)

    def _send(
        self, key: TuningKey, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        """The reply's result. Whatever interrupts ends the child, so that no reply to
        this request can be taken for another's."""
        child = self._running()
        try:
            result = child.ask(
                {**request, "kernel": key.kernel, "fields": key.to_dict()},
                limit_s,
                self.host_memory_mib,
            )
        except _Failure:
            self._prepared = None
            if not child.is_alive:
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        return result

    def _running(self) -> "_Child":
        if self._child is None:
            self._child = self._new_child()
        child = self._child
        if not child.ready:
            try:
                child.start(self.start_limit_s, self.host_memory_mib)
            except BaseException:
                child.end()
                self._child = None
                raise
        return child

    def _new_child(self) -> "_Child":
        options = {
            "device": self.device,
            "make": self.make,
            "limit_s": self.limit_s,
            "turn_us": self.turn_us,
            "gives_up": self.gives_up,
            "device_memory_share": self.device_memory_share,
            "parent": os.getpid(),
        }
        return _Child(options, self._env)


class _Child:
    """One child process and the pipes to it."""

    def __init__(self, options: dict[str, Any], env: Mapping[str, str]) -> None:
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  until end()
        self.is_alive = True
        self.ready: dict[str, Any] = {}
        self._pending = b""
        command = [sys.executable, "-P", "-m", _CHILD, json.dumps(options)]
        try:
            # A session of its own: Ctrl-C is the parent's to handle.
            self._process = subprocess.Popen(
                [*command, str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env={**os.environ, **env},
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def start(self, limit_s: float, memory_mib: int) -> None:
        try:
            self.ready = self._wait("ready", limit_s, memory_mib)
        except _Failure as failure:
            raise MeasuringError(
                f"the measuring process does not start: {failure.reason}"
            ) from None

    def ask(
        self, request: dict[str, Any], limit_s: float, memory_mib: int
    ) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise self._lost("candidate") from None
        return self._wait("result", limit_s, memory_mib)

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
        deadline = time.monotonic() + limit_s
        stage = "candidate"
        while True:
            for message in self._messages():
                stage = message.get("stage", stage)
                if wanted in message:
                    result: dict[str, Any] = message[wanted]
                    return result
                if "failed" in message:
                    self.is_alive = not message["ends"]
                    raise _Failure(message["failed"], message["reason"], stage)
            if not self.is_alive:
                raise self._lost(stage)
            if time.monotonic() > deadline:
                self.is_alive = False
                reason = f"no answer within {limit_s:g} s"
                raise _Failure("timeout", reason, stage)
            used = self._resident_mib()
            if used > memory_mib:
                self.is_alive = False
                reason = f"{used} MiB of host memory, {memory_mib} allowed"
                raise _Failure("over-limit", reason, stage)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What has come by now; waits a moment for it."""
        if not select.select([self._replies], [], [], _POLL_S)[0]:
            return
        data = os.read(self._replies, 65536)
        self.is_alive = bool(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        yield from map(json.loads, lines)

    def _lost(self, stage: str) -> _Failure:
        """Why the process is gone."""
        self.is_alive = False
        code = self._process.wait(10)
        if code == -signal.SIGKILL:
            return _Failure(
                "over-limit", "killed, as the kernel does for memory", stage
            )
        if code < 0:
            return _Failure("runtime", f"killed by {signal.Signals(-code).name}", stage)
        self._stderr.seek(0)
        lines = self._stderr.read()[-4096:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        return _Failure("runtime", f"exit code {code}: {last.strip()[:200]}", stage)

    def _resident_mib(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                pages = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE") // _MIB
