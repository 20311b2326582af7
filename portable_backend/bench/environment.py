# SPDX-License-Identifier: Apache-2.0
"""Where a run took place: the header of every table."""

import contextlib
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "vllm", "portable-backend")


def describe(
    device: torch.device,
    arguments: list[str],
    commit: str | None = None,
    *,
    source: str = __file__,
) -> dict[str, str]:
    """Date, GPU, driver, versions, commit and command, as text.

    Args:
        device: that the run uses.
        arguments: of the command line.
        commit: where the package does not lie in its repository; else found out.
        source: a file of the repository whose commit counts.
    """
    gpu, driver = f"none, {platform.machine()} CPU in Triton's interpreter", ""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _amd_driver() if torch.version.hip else _nvidia_driver()
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {_version(name)}" for name in PACKAGES]
    if torch.version.cuda or torch.version.hip:
        versions.append(
            f"HIP {torch.version.hip}"
            if torch.version.hip
            else f"CUDA {torch.version.cuda}"
        )
    header = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": gpu,
        "driver": driver,
        "versions": ", ".join(versions),
        "commit": commit or _commit(Path(source).resolve()),
        "command": shlex.join(["python", "-m", "portable_backend.bench", *arguments]),
    }
    return {name: text for name, text in header.items() if text}


def _version(package: str) -> str:
    # A module knows itself even where it was not installed as a package.
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded:
        return str(loaded)
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "not installed"


def _nvidia_driver() -> str:
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    return told.splitlines()[-1] if told else ""


def _amd_driver() -> str:
    """The module's version; one that came with the kernel has none of its own."""
    try:
        version = Path("/sys/module/amdgpu/version").read_text().strip()
    except OSError:
        version = f"of Linux {platform.release()}"
    return f"amdgpu {version}"


def _commit(here: Path) -> str:
    """The commit that `here` belongs to, if it lies in a repository that tracks it."""
    git = ["git", "-C", str(here.parent)]
    if not _output(*git, "ls-files", here.name):
        return ""
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if changed else "")


def _output(*command: str) -> str:
    """What `command` prints; nothing if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
