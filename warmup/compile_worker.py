# SPDX-License-Identifier: Apache-2.0
"""The process that compiles for `compile_pool`: one JSON line in, one out.

It starts on its own: `python -m portable_backend.warmup.compile_worker`. The first line
describes the device, each further one a candidate, a binary or another device. It ends
with its parent.
"""

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any

from portable_backend.device import ArchLimits, DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 300


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    # Elsewhere than on Linux, and where it has ended already: see lines_of.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lines_of(stream: IO[str]) -> "queue.Queue[str]":
    """Lines as they come; when there are no more, this process and its tools end."""
    lines: queue.Queue[str] = queue.Queue()

    def pump() -> None:
        for line in stream:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=pump, daemon=True).start()
    return lines


def one_line(error: BaseException) -> str:
    """What a compiler raised: its type, and the line that says most."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Triton quotes the source first and ends with what is wrong; ptxas' errors end with
    # how to run it again.
    errors = [line for line in text if "error" in line.lower()]
    message = (errors or text or [""])[-1]
    return f"{type(error).__name__}: {message}"[:_MAX_MESSAGE]


def answer(request: dict[str, Any], device: DeviceInfo) -> dict[str, Any]:
    """The read-out of a candidate or what became of a binary, or why it failed."""
    if "binary" in request:
        return _compile_binary(request["binary"], device)
    from portable_backend.warmup.compilation import compile_config, compile_parts

    key = TuningKey.from_dict(request["kernel"], request["fields"])
    try:
        config = KernelConfig.from_dict(request["config"])
        if request.get("parts"):
            (_, readout), *others = compile_parts(key, config, device)
        else:
            readout, others = compile_config(key, config, device), []
    except Exception as error:  # whatever a compiler raises
        return {"failure": one_line(error)}
    return {"readout": vars(readout), "others": [(n, vars(r)) for n, r in others]}


def _compile_binary(data: dict[str, Any], device: DeviceInfo) -> dict[str, Any]:
    from portable_backend.warmup.binary import Binary, compile_binary

    try:
        shared_bytes = compile_binary(Binary.from_dict(data), device)
    except Exception as error:  # whatever a compiler raises
        return {"failure": one_line(error)}
    return {"shared_bytes": shared_bytes}


def main() -> int:
    end_with_parent()
    os.nice(10)
    # What compilers print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = lines_of(sys.stdin)
    device = _device(json.loads(lines.get()))
    importlib.import_module("portable_backend.warmup.compilation")  # before any limit

    said: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(said), file=answers, flush=True)
        request = json.loads(lines.get())
        if "device" in request:
            device, said = _device(request["device"]), {"ready": True}
        else:
            said = answer(request, device)


def _device(described: dict[str, Any]) -> DeviceInfo:
    limits = ArchLimits(**described.pop("limits"))
    return DeviceInfo(**described, limits=limits)


if __name__ == "__main__":
    sys.exit(main())
