# SPDX-License-Identifier: Apache-2.0
"""PORTABLE_BACKEND_TUNE=background: tune what this engine lacks while it serves.

Each metadata builder says what its layers look up, and marks its steps for whoever
measures. Once the worker is ready to serve, graphs captured, one process starts that
tunes while the engine has nothing to do (`warmup/background.py`); what it records
serves from the next start. Of a tensor-parallel group the first rank alone has one.
Whatever fails costs a warning, and the engine serves on.
"""

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from portable_backend import ranks, start_tuning, tuned
from portable_backend.device import DeviceInfo
from portable_backend.metrics import publish_trials
from portable_backend.settings import get_settings
from portable_backend.warmup.activity import Beacon, beacon_path
from portable_backend.warmup.background_tools import background_recipe
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.spread import VISIBLE
from portable_backend.warmup.timed_tuning import missing
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_report import Task
from portable_backend.warmup.tuning_tools import available_cpus

logger = logging.getLogger("vllm.portable_backend.tuned")
_COMMAND = ("-P", "-m", "portable_backend.warmup.background")
# vLLM calls it on each worker when all else is done, graphs captured.
_LAST_STEP_OF_START = "compile_or_warm_up_model"
# Processes that compile; they are stopped while the engine is busy.
_MOST_WORKERS, _CPUS_PER_WORKER = 4, 4
# Of the GPU memory that is free when the engine is ready, what may be used, and what a
# process takes on top before its first allocation.
_FREE_SHARE, _CONTEXT_MIB = 0.5, 600
_LEAST_MIB = 512


@dataclass
class _State:
    """What this process knows of its tuning, for all builders together."""

    beacon: Beacon | None = None
    device: torch.device | None = None
    tasks: dict[TuningKey, Task] = field(default_factory=dict)
    begun: bool = False
    warned: bool = False
    status: dict[str, Any] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def beacon_for(
    models: Mapping[ModelShape, int],
    limits: EngineLimits,
    max_num_seqs: int,
    device: torch.device,
) -> Beacon | None:
    """Have what these layers lack tuned once the engine is ready; never raises.

    Args:
        models: kinds of layers as `tuned.model_of` describes them, and how many.
        limits: of the engine, its max_model_len known.
        max_num_seqs: requests of the largest step, graph padding included.
        device: where they run.

    Returns:
        To mark each step with; None where nothing will be tuned.
    """
    try:
        if not ranks.decides():
            return None
        with _state.lock:
            return _prepare(models, limits, max_num_seqs, device)
    except Exception:  # of any kind: the engine serves all the same
        _warn("nothing is tuned in the background, the engine serves without", True)
        return None


def begin() -> None:
    """Start tuning, once; never raises. Called when the engine is ready to serve."""
    try:
        with _state.lock:
            if not _state.begun and _state.beacon is not None:
                _state.begun = True
                _begin()
    except MemoryError as error:
        _warn(f"nothing is tuned in the background: {error}")
    except Exception:  # of any kind: the engine serves all the same
        _warn("nothing is tuned in the background, the engine serves without", True)


def status() -> dict[str, Any]:
    """How far it is: "state", "keys", "done" and "trials"; empty before it begins."""
    return dict(_state.status)


def _prepare(
    models: Mapping[ModelShape, int],
    limits: EngineLimits,
    max_num_seqs: int,
    device: torch.device,
) -> Beacon | None:
    if not start_tuning._can_tune(DeviceInfo.detect(device)):
        _warn(
            "PORTABLE_BACKEND_TUNE=background needs a GPU: records are loaded, nothing "
            "is tuned"
        )
        return None
    if _state.beacon is None:
        _state.beacon = Beacon(beacon_path(_gpu_id(device)))
        _state.device = device
        _call_when_ready(begin)
    for task in start_tuning._tasks(models, limits, max_num_seqs):
        _state.tasks.setdefault(task.key, task)
    return _state.beacon


def _begin() -> None:
    assert _state.beacon is not None and _state.device is not None
    device, settings = _state.device, get_settings()
    info = DeviceInfo.detect(device)
    tasks = missing([*_state.tasks.values()], tuned._lookup(info), good=("exact",))
    counts = f"{len(tasks)} of {len(_state.tasks)} keys lack records of their own"
    if not tasks:
        _state.status = {"state": "done", "keys": 0, "done": 0, "trials": 0}
        logger.info("background tuning: %s, nothing is to be done", counts)
        return
    logger.info(
        "background tuning: %s; they are tuned while nothing is served, for the next "
        "start",
        counts,
    )
    setup = {
        "parent": os.getpid(),
        "recipe": _recipe(info, device, _state.beacon).to_dict(),
        "tasks": [task.to_dict() for task in tasks],
        "gpu": info.name,
        "cache_dir": str(settings.cache_dir.absolute()),
        "cache_layers": [str(folder.absolute()) for folder in settings.cache_layers],
        "beacon": str(_state.beacon.path),
    }
    with start_tuning._caching():
        environ = os.environ | dict.fromkeys(
            VISIBLE, start_tuning._visible_name(device)
        )
    environ["OMP_NUM_THREADS"] = "1"
    _state.status = {"state": "waiting", "keys": len(tasks), "done": 0, "trials": 0}
    # The thread that starts the process stays: the kernel ends the one with the other.
    threading.Thread(
        target=_attend, args=(setup, environ), name="portable-tuning", daemon=True
    ).start()


def _attend(setup: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Start the process, and pass on what it says until it ends."""
    try:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
            _state.process = process
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(setup).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its exit code says more
            for line in process.stdout:
                _take(json.loads(line))
            if code := process.wait():
                _state.status["state"] = "given up"
                _warn(
                    f"background tuning has ended, the engine serves on: "
                    f"{_how_it_ended(code, errors)}"
                )
    except Exception:  # of any kind: the engine serves all the same
        _warn("background tuning has ended, the engine serves on", True)


def _take(message: Mapping[str, Any]) -> None:
    if "status" in message:
        trials = message["status"]["trials"] - _state.status.get("trials", 0)
        _state.status = message["status"]
        publish_trials(max(0, trials))
    elif message["level"] == "WARNING":
        _warn(message["line"])
    else:
        logger.info("%s", message["line"])


def _how_it_ended(code: int, errors: IO[bytes]) -> str:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    errors.seek(0)
    lines = errors.read()[-4096:].decode(errors="replace").strip().splitlines()
    return ": ".join([how, *(line[:200] for line in lines[-1:])])


def _recipe(info: DeviceInfo, device: torch.device, beacon: Beacon) -> Recipe:
    """Of what is free of the GPU's memory now, a part.

    What vLLM frees later, as when it sleeps, it wants back: that is not counted.

    Raises:
        MemoryError: too little is free.
    """
    free_mib = torch.cuda.mem_get_info(device)[0] >> 20
    memory_mib = int(_FREE_SHARE * (free_mib - _CONTEXT_MIB))
    if memory_mib < _LEAST_MIB:
        least = int(_LEAST_MIB / _FREE_SHARE) + _CONTEXT_MIB
        raise MemoryError(
            f"{free_mib} MiB of GPU memory are free beside the engine, {least} are "
            "needed; lower --gpu-memory-utilization"
        )
    workers = max(1, min(_MOST_WORKERS, available_cpus() // _CPUS_PER_WORKER))
    return background_recipe(info, beacon.path, workers=workers, memory_mib=memory_mib)


def _gpu_id(device: torch.device) -> str:
    """A name that no other GPU of the host has, the same in all processes."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(uuid or start_tuning._visible_name(device))


def _call_when_ready(call: Callable[[], None]) -> None:
    """Have `call` called after the last step of a worker's start, whatever its class.

    Builders are made in that start, so the classes exist by now.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    classes: list[type] = [WorkerBase]
    for cls in classes:
        classes += cls.__subclasses__()
        original = cls.__dict__.get(_LAST_STEP_OF_START)
        if original is None or hasattr(original, "__wrapped__"):
            continue

        def wrapper(
            *args: Any, _original: Callable[..., Any] = original, **kwargs: Any
        ) -> Any:
            result = _original(*args, **kwargs)
            call()
            return result

        setattr(cls, _LAST_STEP_OF_START, functools.wraps(original)(wrapper))


def _warn(text: str, is_error: bool = False) -> None:
    """One warning for the process, whatever happens; the rest for those who debug."""
    level = logging.DEBUG if _state.warned else logging.WARNING
    _state.warned = True
    logger.log(level, "%s", text, exc_info=is_error)
