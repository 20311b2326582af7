# SPDX-License-Identifier: Apache-2.0
"""Which compiler this process and its workers use: the same, or their kernels differ.

Triton's cache has an entry for each version of ptxas and each libdevice. Triton asks
ptxas for its version once in a process. PyTorch's compiler names another ptxas in the
environment as soon as it compiles, and may set another libdevice in its process alone.
A worker that starts after that compiles for entries that its parent never looks for.
"""

import importlib
import logging
import os
import re
from typing import Any

from portable_backend.device import DeviceInfo

logger = logging.getLogger("vllm.portable_backend")
_PTXAS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
_settled: list[DeviceInfo] = []  # the one that this process launches on, if any


def settle(device: DeviceInfo) -> None:
    """Have this process use the ptxas that it would use now, whatever is named later.

    Never raises: where ptxas cannot be asked, Triton says so when it compiles.
    """
    if device in _settled:
        return
    _settled[:] = [device]
    try:
        _version(device)
    except Exception as error:  # of the tool or of Triton's own modules
        logger.debug("ptxas was not asked for its version: %r", error)


def child_environment(device: DeviceInfo | None = None) -> dict[str, str]:
    """This process's environment, changed so that a child compiles for its entries.

    Args:
        device: what is compiled for; None: what this process has settled on. Without
            either nothing is changed.
    """
    environment = dict(os.environ)
    device = device or next(iter(_settled), None)
    if device is None or device.platform != "cuda":
        return environment
    try:
        libdevice = importlib.import_module("triton").knobs.nvidia.libdevice_path
        if libdevice:
            environment["TRITON_LIBDEVICE_PATH"] = str(libdevice)
        kept, now = _version(device), _version(device, anew=True)
    except Exception as error:  # as above
        logger.debug("ptxas was not asked for its version: %r", error)
        return environment
    if kept != now:
        for name in _PTXAS:
            environment.pop(name, None)
    return environment


def ptxas_version(device: DeviceInfo) -> str | None:
    """Of the ptxas that Triton takes for this NVIDIA device; None where none answers.

    AMD's code comes from the LLVM that is part of Triton.
    """
    try:
        found = re.search(r"\bV(\d[\d.]*)", str(_version(device)))
    except Exception as error:  # as above
        logger.debug("ptxas was not asked for its version: %r", error)
        return None
    return found.group(1) if found else None


def _version(device: DeviceInfo, *, anew: bool = False) -> Any:
    """What Triton takes for the version of ptxas; asked anew or as it was first."""
    if device.platform != "cuda":
        return None
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    ask = compiler.get_ptxas_version
    if anew:
        ask = getattr(ask, "__wrapped__", ask)
    return ask(int(device.arch.removeprefix("sm")))
