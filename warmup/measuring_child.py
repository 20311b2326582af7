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
from dataclasses import asdict
from typing import Any

import torch
import triton

from portable_backend.bench.timing import FAILURES
from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.measuring import (
    Bench,
    WrongResultError,
    load_maker,
    no_confirmation,
)
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal

_COMPILER_FAILURES = ("PassManager::run failed", "Failed to compile", "failed to legal")
_NEVER_RAN = ("resources", "compile")
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def failure_of(error: BaseException) -> tuple[str, str]:
    """One of `search.INVALID_REASONS`, and the message that goes with it."""
    lines = str(error).strip().splitlines() or [""]
    message = f"{type(error).__name__}: {lines[0]}"[:300]
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, WrongResultError):
        return "correctness", str(error)[:300]
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
    def __init__(self, options: dict[str, Any], out: int) -> None:
        self._out = out
        self.device = torch.device(options["device"])
        self.limit_s: float = options["limit_s"]
        self.turn_us: float = options["turn_us"]
        self.gives_up: bool = options.get("gives_up", True)
        self.make = load_maker(options["make"])
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UnsupportedError(
                    f"torch sees no GPU, {self.device} was asked for; run this on a "
                    "machine with one, and look at CUDA_VISIBLE_DEVICES or "
                    "HIP_VISIBLE_DEVICES"
                )
            torch.cuda.set_device(self.device)
            torch.cuda.set_per_process_memory_fraction(options["device_memory_share"])
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
            del error
            broken = not self._answers()
            self.say(failed=reason, reason=message, ends=broken)
            if broken:
                os._exit(1)
            if reason not in _NEVER_RAN:
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
            workload = self.make(key, self.device)
            self._bench = Bench(
                workload,
                self.device,
                lambda s: self.say(stage=s),
                self.turn_us,
                self.gives_up,
            )
            self._key = key
        bench, workload = self._bench, self._bench.workload
        if request["do"] == "prepare":
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
            torch.cuda.synchronize(self.device)
            return bool(torch.ones(1, device=self.device).item() == 1)
        except FAILURES:
            return False


def _read(source: int, lines: "queue.Queue[bytes]", parent: int) -> None:
    """Pass lines on; end the process with the requests, or with the parent."""
    pending = b""
    while True:
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
    watch = threading.Thread(
        target=_read, args=(source, lines, options["parent"]), daemon=True
    )
    watch.start()
    child = _Child(options, out)
    child.say_ready()
    while True:
        child.serve(json.loads(lines.get()))


if __name__ == "__main__":
    main()
