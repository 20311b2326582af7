# SPDX-License-Identifier: Apache-2.0
"""The process that owns the GPU and may be killed: runs what `MeasuringProcess` asks.

Started as `python -m portable_backend.warmup.measuring_child OPTIONS IN OUT`: options
as JSON, two file descriptors. Requests and replies are lines of JSON. The process ends
when requests do, so none is left behind by a parent that is gone.
"""

import gc
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from portable_backend.bench.timing import FAILURES
from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.compile_worker import end_with_parent
from portable_backend.warmup.idle_gate import OPEN, TooLongError, gate_of
from portable_backend.warmup.measuring import (
    Bench,
    WrongResultError,
    load_maker,
    no_confirmation,
)
from portable_backend.warmup.measuring_pipe import RELEASED
from portable_backend.warmup.measuring_process import CONFIRM_TURN_US
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal

_COMPILER_FAILURES = ("PassManager::run failed", "Failed to compile", "failed to legal")
_NEVER_RAN = ("resources", "compile")
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Beside an engine: an engine that is busy for longer gets the memory back.
_HOLD_S = 120.0
# Of what is free when this process starts; the rest stays free for the engine.
_FREE_SHARE = 0.5
# With less, no inputs worth measuring fit.
_LEAST_MEMORY = 256 << 20


def failure_of(error: BaseException) -> tuple[str, str]:
    """One of `search.INVALID_REASONS`, and the message that goes with it."""
    lines = str(error).strip().splitlines() or [""]
    message = f"{type(error).__name__}: {lines[0]}"[:300]
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, WrongResultError):
        return "correctness", str(error)[:300]
    if isinstance(error, TooLongError):
        return "timeout", str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "over-limit", message
    if "OutOfResources" in names:
        return "resources", message
    if isinstance(error, triton.TritonError):
        return "compile", message
    if any(text in message for text in _OUT_OF_MEMORY):
        return "over-limit", message
    if any(text in message for text in _COMPILER_FAILURES):
        return "compile", message
    return "runtime", message


class _Child:
    def __init__(
        self, options: dict[str, Any], out: int, activity: Activity | None = None
    ) -> None:
        self._out = out
        self.device = torch.device(options["device"])
        self.limit_s: float = options["limit_s"]
        self.turn_us: float = options["turn_us"]
        self.confirm_turn_us: float = options.get("confirm_turn_us", CONFIRM_TURN_US)
        self.gives_up: bool = options.get("gives_up", True)
        self.make = load_maker(options["make"])
        self.gate = gate_of(activity, self.device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UnsupportedError(
                    f"torch sees no GPU, {self.device} was asked for; run this on a "
                    "machine with one, and look at CUDA_VISIBLE_DEVICES or "
                    "HIP_VISIBLE_DEVICES"
                )
            self.gate.wait()
            torch.cuda.set_device(self.device)
            torch.cuda.set_per_process_memory_fraction(_memory_share(options))
        self._key: TuningKey | None = None
        self._bench: Bench | None = None

    def say(self, **message: Any) -> None:
        os.write(self._out, json.dumps(message).encode() + b"\n")

    def say_ready(self) -> None:
        info = DeviceInfo.detect(self.device)
        self.say(ready=asdict(info))

    def serve(self, request: dict[str, Any]) -> None:
        """Answer one request; the process ends where the GPU no longer answers."""
        key = TuningKey.from_dict(request["kernel"], request["fields"])
        # The parent kills what is late; this is for when the parent is gone.
        signal.alarm(int(4 * self.limit_s) + 600)
        try:
            self.say(result=self._answer(request, key))
        except (*FAILURES, MemoryError, WrongResultError, ArithmeticError) as error:
            reason, message = failure_of(error)
            is_harmless = reason in _NEVER_RAN or isinstance(error, TooLongError)
            del error
            broken = not self._answers()
            self.say(failed=reason, reason=message, ends=broken)
            if broken:
                os._exit(1)
            if not is_harmless:
                # It may have written where it should not: no input is kept.
                self._key = self._bench = None
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        finally:
            signal.alarm(0)

    def _answer(self, request: dict[str, Any], key: TuningKey) -> dict[str, Any]:
        if self._bench is None or self._key != key:
            self._key = self._bench = None  # its memory goes before the next's comes
            with self.gate.paced():
                workload = self.make(key, self.device)
            self._bench = Bench(
                workload,
                self.device,
                lambda s: self.say(stage=s),
                self.turn_us,
                self.gives_up,
                self.gate,
                self.confirm_turn_us,
            )
            if self.gate is not OPEN:
                self._bench.require_short()
            self._key = key
        bench, workload = self._bench, self._bench.workload
        if request["do"] == "prepare":
            with self.gate.paced():
                workload.draw_ahead()
            default = workload.default.to_dict()
            return {"default": default, "roof_us": workload.roof_us}
        config = KernelConfig.from_dict(request["config"])
        if request["do"] == "confirm":
            try:
                confirmation = bench.confirm(
                    config,
                    seed=request["seed"],
                    rounds=request["rounds"],
                    beside=request["beside"],
                )
            except WrongResultError as error:
                self._key = self._bench = None
                confirmation = no_confirmation(str(error)[:300])
            return vars(confirmation)
        incumbent = request["incumbent"]
        trial = bench.trial(
            Proposal(config, request["rounds"]),
            seed=request["seed"],
            incumbent=incumbent and KernelConfig.from_dict(incumbent),
            incumbent_us=request["incumbent_us"],
        )
        return {
            "time_us": trial.time_us,
            "times_us": trial.times_us,
            "timing_s": trial.timing_s,
        }

    def _answers(self) -> bool:
        """Whether the GPU still works; an illegal access spoils all that follows."""
        if self.device.type != "cuda":
            return True
        try:
            self.gate.wait()
            torch.cuda.synchronize(self.device)
            return bool(torch.ones(1, device=self.device).item() == 1)
        except FAILURES:
            return False


def _memory_share(options: Mapping[str, Any]) -> float:
    """Of the GPU's memory, what this process may allocate.

    Raises:
        UnsupportedError: beside an engine, that is too little.
    """
    share: float = options["device_memory_share"]
    most_mib = options.get("device_memory_mib")
    if most_mib is None:
        return share
    free, total = torch.cuda.mem_get_info()
    limit = min(share * total, most_mib << 20, _FREE_SHARE * free)
    if limit < _LEAST_MEMORY:
        raise UnsupportedError(
            f"{free >> 20} MiB of GPU memory are free beside the engine, "
            f"{_LEAST_MEMORY / _FREE_SHARE / 2**20:.0f} are needed; lower "
            "--gpu-memory-utilization"
        )
    return float(limit / total)


def _read(
    source: int,
    lines: "queue.Queue[bytes]",
    parent: int,
    activity: Activity | None = None,
    hold_s: float = _HOLD_S,
) -> None:
    """Pass lines on; end the process with the requests, or with the parent.

    With an engine, also once that was busy for so long: the memory is the engine's.
    """
    pending = b""
    idle_at = time.monotonic()
    while True:
        now = time.monotonic()
        if activity is None or not activity.idle_in():
            idle_at = now
        elif now - idle_at > hold_s:
            os._exit(RELEASED)
        if select.select([source], [], [], 1.0)[0]:
            data = os.read(source, 65536)
            if not data:
                os._exit(0)
            *whole, pending = (pending + data).split(b"\n")
            for line in whole:
                lines.put(line)
        elif os.getppid() != parent:
            os._exit(0)


def main() -> None:
    options, source, out = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    lines: queue.Queue[bytes] = queue.Queue()
    beacon, activity = options.get("beacon"), None
    if beacon is not None:
        end_with_parent()
        activity = Activity(Path(beacon))
    hold_s = options.get("hold_s", _HOLD_S)
    watch = threading.Thread(
        target=_read,
        args=(source, lines, options["parent"], activity, hold_s),
        daemon=True,
    )
    watch.start()
    child = _Child(options, out, activity)
    child.say_ready()
    while True:
        child.serve(json.loads(lines.get()))


if __name__ == "__main__":
    main()
