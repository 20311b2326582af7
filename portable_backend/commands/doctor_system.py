# SPDX-License-Identifier: Apache-2.0
"""What `doctor` asks of the machine, in one place: tests put another one in its stead.

Nothing here imports torch or vLLM before it is asked.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_backend.commands.doctor_child import MARKER
from portable_backend.device import DeviceInfo

# vLLM imports half of Python's ecosystem; a first launch compiles.
CHILD_LIMIT_S = 180.0


class ChildFailed(Exception):
    """A child process gave no result; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU that torch sees.

    Attributes:
        info: as the kernels see it.
        count: how many there are.
        runtime: what torch was built for: "CUDA 13.0", "HIP 7.0".
        driver: version of the kernel module; None: unknown.
        capability: NVIDIA's compute capability; None: another vendor's.
    """

    info: DeviceInfo
    count: int
    runtime: str
    driver: str | None
    capability: tuple[int, int] | None


def find_gpu() -> Gpu | str:
    """The GPU, or why there is none.

    Raises:
        Exception: whatever a broken torch raises.
    """
    import torch

    hip = torch.version.hip
    runtime = f"HIP {hip}" if hip else f"CUDA {torch.version.cuda}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if not is_there:
        if not (hip or torch.version.cuda):
            return f"torch {torch.__version__} was built for CPUs only"
        reasons = [str(w.message).split("\n")[0] for w in caught]
        return "; ".join([f"torch, built for {runtime}, finds none", *reasons])
    return Gpu(
        info=DeviceInfo.detect("cuda"),
        count=torch.cuda.device_count(),
        runtime=runtime,
        driver=driver_version(),
        capability=None if hip else torch.cuda.get_device_capability(),
    )


def driver_version(root: Path = Path("/")) -> str | None:
    for name in ("proc/driver/nvidia/version", "sys/module/amdgpu/version"):
        try:
            text = (root / name).read_text()
        except OSError:
            continue
        found = re.search(r"\d+\.\d+(\.\d+)?", text)
        if found:
            return found[0]
    return None


def version_of(names: Sequence[str]) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def requirements_of(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def entry_points(group: str) -> list[Any]:
    return list(importlib.metadata.entry_points(group=group))


def origin_of(module: str) -> Path | None:
    """Where a top-level module would be imported from; None: nowhere."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return Path(places[0])


def run_child(task: str) -> dict[str, Any]:
    """Run a task of `doctor_child`.

    Raises:
        ChildFailed: it crashed, hung, or could not be started.
    """
    command = [sys.executable, "-P", "-m", "portable_backend.commands.doctor_child"]
    try:
        done = subprocess.run(
            [*command, task],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer within {CHILD_LIMIT_S:g} s") from None
    except OSError as error:
        raise ChildFailed(f"cannot be started: {error}") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARKER):
            found: dict[str, Any] = json.loads(line.removeprefix(MARKER))
            return found
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    raise ChildFailed(f"ended with code {done.returncode}: {last[:400]}")


@dataclass(frozen=True)
class System:
    """The machine and its Python; each attribute is the function of that name."""

    gpu: Callable[[], Gpu | str] = find_gpu
    version: Callable[[Sequence[str]], str | None] = version_of
    requirements: Callable[[str], list[str]] = requirements_of
    entry_points: Callable[[str], list[Any]] = entry_points
    origin: Callable[[str], Path | None] = origin_of
    child: Callable[[str], dict[str, Any]] = run_child
