# SPDX-License-Identifier: Apache-2.0
"""The parent's side of measuring: a config that hangs or crashes costs a child process.

Nothing here touches the GPU. The child is started when it is first needed, and again
after each time it was lost; what it was doing then becomes an invalid trial.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from portable_backend.device import ArchLimits, DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.measuring_pipe import Child, Failure, Released
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal, Trial

# Of a turn of a trial: two or three spans of a graph. A search makes 100 trials of
# a key and confirms three configs, so its trials are short; sweeps have turns of 2 ms.
TRIAL_TURN_US = 2500.0
# Of a confirmation, which decides what serves: in short turns a chip does not settle on
# the clock that a config's power allows.
CONFIRM_TURN_US = 10_000.0
MAKE_WORKLOAD = "portable_backend.warmup.workloads:make_workload"
# To make a key's workload; then all its configs are given up.
_TRIES = 2
_MIB = 1 << 20


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
        beacon: of an engine on that GPU: the child works only while that has nothing to
            do, time spent waiting for it counts for no limit, and keys whose default
            config takes longer than a slice are given up.
        device_memory_mib: beside an engine, what the child may allocate at most; never
            more than half of what is free when it starts.
        hold_s: beside an engine, how long the child keeps its memory while that is
            busy; None: the child's own.
        confirm_rounds: of timing in a confirmation.
        turn_us: length of a turn of a trial, of which a round has one each for the
            config and the incumbent. What one call takes is the least.
        confirm_turn_us: of a confirmation.
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
        beacon: str | None = None,
        device_memory_mib: int | None = None,
        hold_s: float | None = None,
        confirm_rounds: int = 15,
        turn_us: float = TRIAL_TURN_US,
        confirm_turn_us: float = CONFIRM_TURN_US,
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
            ("confirm_turn_us", confirm_turn_us),
        ):
            if not value > 0:
                raise bad_argument(name, "above 0", value, "leave it out")
        self.device, self.make = device, make
        self.limit_s, self.start_limit_s = limit_s, start_limit_s
        self.prepare_limit_s = prepare_limit_s
        self.host_memory_mib = host_memory_mib
        self.device_memory_share = device_memory_share
        self.confirm_rounds, self.turn_us = confirm_rounds, turn_us
        self.confirm_turn_us = confirm_turn_us
        self.gives_up = gives_up
        self._beside: dict[str, Any] = {}
        self._activity: Activity | None = None
        if beacon is not None:
            self._activity = Activity(Path(beacon))
            self._beside = {"beacon": beacon, "device_memory_mib": device_memory_mib}
            if hold_s is not None:
                self._beside["hold_s"] = hold_s
        self._env = dict(env or {})
        self._child: Child | None = None
        self._prepared: TuningKey | None = None
        self._begun: dict[str, Any] | None = None  # asked for, and not answered yet
        self._answers: dict[TuningKey, dict[str, Any]] = {}
        self._times: dict[tuple[TuningKey, KernelConfig], float] = {}
        self._unusable: set[tuple[TuningKey, KernelConfig]] = set()
        self._unready: dict[TuningKey, list[Failure]] = {}
        self._count = 0

    def begin(self, key: TuningKey | None = None) -> None:
        """Start the child without waiting for it: its imports take seconds.

        Args:
            key: whose workload it makes as soon as it is ready, likewise; what fails
                shows when that key is measured.
        """
        if self._child is None:
            self._child = self._new_child()
        if key is None or self._begun is not None or self._prepared == key:
            return
        if len(self._unready.get(key, ())) == _TRIES:
            return
        request = _request(key, do="prepare")
        self._prepared = None
        try:
            self._child.send(request)
            self._begun = request
        except (Failure, Released):
            self.close()

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
            except Failure as failure:
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
                except Failure as failure:
                    if failure.stage != "incumbent":
                        raise
                    self._unusable.add((key, default))
            raise AssertionError("without the default none of it can fail")
        except Failure as failure:
            inf, wrong = float("inf"), f"{failure.invalid}: {failure.reason}"
            return Confirmation(inf, inf, inf, inf, wrong)

    def why_not(self, key: TuningKey) -> str | None:
        """Why nothing can be measured for a key; None: it can.

        Raises:
            MeasuringError: the child process does not start.
        """
        try:
            self._prepare(key)
        except Failure as failure:
            return failure.reason
        return None

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
        except Failure:
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
        self._prepared = self._begun = None

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
            except Failure as failure:
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
        except Failure as failure:
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
        request = _request(key, **request)
        while True:
            try:
                return self._send_once(request, limit_s)
            except Released:
                assert self._activity is not None
                self._activity.wait()

    def _send_once(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        child = self._running()
        begun, self._begun = self._begun, None
        if begun is not None and begun != request:
            # It is for another key, whose turn does not come.
            with contextlib.suppress(Failure):
                child.answer(self.prepare_limit_s, self.host_memory_mib)
            if child.has_ended():
                self.close()
                child = self._running()
        try:
            if begun != request:
                child.send(request)
            result = child.answer(limit_s, self.host_memory_mib)
        except Failure:
            self._prepared = None
            if not child.is_alive:
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        return result

    def _running(self) -> Child:
        if self._child is None:
            self._child = self._new_child()
        child = self._child
        if not child.ready:
            try:
                child.start(self.start_limit_s, self.host_memory_mib)
            except BaseException:
                self.close()
                raise
        return child

    def _new_child(self) -> Child:
        options = {
            "device": self.device,
            "make": self.make,
            "limit_s": self.limit_s,
            "turn_us": self.turn_us,
            "confirm_turn_us": self.confirm_turn_us,
            "gives_up": self.gives_up,
            "device_memory_share": self.device_memory_share,
            "parent": os.getpid(),
            **self._beside,
        }
        return Child(options, self._env, self._activity)


def _request(key: TuningKey, **request: Any) -> dict[str, Any]:
    return {**request, "kernel": key.kernel, "fields": key.to_dict()}
