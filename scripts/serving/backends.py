# SPDX-License-Identifier: Apache-2.0
"""Which attention back ends there are, and what this machine can run."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBE = Path(__file__).with_name("probe.py")


class ProbeError(RuntimeError):
    """vLLM could not be asked."""


@dataclass(frozen=True)
class Backend:
    """A contestant.

    Attributes:
        name: vLLM's, for --attention-backend.
        platforms: of vLLM that have it: cuda, rocm, cpu.
        module: Python module that it needs beside vLLM, if any.
        environment: what its servers get.
        by_default: whether it takes part without being named.
    """

    name: str
    platforms: tuple[str, ...]
    module: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    by_default: bool = True


_EVERYWHERE = ("cuda", "rocm", "cpu")
_NORM = "PORTABLE_BACKEND_RMS_NORM"
BACKENDS = {
    "PORTABLE": Backend("PORTABLE", _EVERYWHERE),
    "PORTABLE, norm off": Backend(
        "PORTABLE", _EVERYWHERE, environment={_NORM: "off"}, by_default=False
    ),
    "FLASH_ATTN": Backend("FLASH_ATTN", ("cuda",)),
    "FLASHINFER": Backend("FLASHINFER", ("cuda",), "flashinfer", by_default=False),
    "TRITON_ATTN": Backend("TRITON_ATTN", ("cuda", "rocm")),
    "ROCM_ATTN": Backend("ROCM_ATTN", ("rocm",)),
    "ROCM_SEGMENTED_ATTN": Backend("ROCM_SEGMENTED_ATTN", ("rocm",), by_default=False),
    "ROCM_AITER_FA": Backend("ROCM_AITER_FA", ("rocm",), "aiter"),
    "ROCM_AITER_UNIFIED_ATTN": Backend("ROCM_AITER_UNIFIED_ATTN", ("rocm",), "aiter"),
    "CPU_ATTN": Backend("CPU_ATTN", ("cpu",)),
}
OURS = "PORTABLE"


def left_out(names: list[str], probe: dict[str, Any]) -> dict[str, str]:
    """Those of `names` that do not exist here, and why."""
    reasons = {}
    for name in names:
        backend = BACKENDS[name]
        if probe["platform"] not in backend.platforms:
            have = " and ".join(backend.platforms)
            reasons[name] = f"vLLM has it on {have}, this is {probe['platform']}"
        elif backend.name not in probe["backends"]:
            reasons[name] = f"vLLM {probe['vllm']} does not know {backend.name}"
            if backend.name == OURS:
                reasons[name] += "; install portable-backend into this environment"
        elif backend.module and backend.module not in probe["modules"]:
            reasons[name] = f"the module {backend.module} is not installed"
    return reasons


def ask_vllm(model: str, modules: list[str], limit_s: float) -> dict[str, Any]:
    """Ask this environment's vLLM, in a process of its own, which frees the GPU.

    Args:
        model: hub id or folder.
        modules: whose presence to tell.
        limit_s: seconds to wait.

    Returns:
        What `probe.py` prints.

    Raises:
        ProbeError: with the reason, such as a model that cannot be found.
    """
    command = [sys.executable, "-P", str(PROBE), model, ",".join(modules)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"vLLM did not say within {limit_s:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise ProbeError("\n".join(done.stderr.splitlines()[-5:]))
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
