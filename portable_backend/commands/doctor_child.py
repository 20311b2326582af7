# SPDX-License-Identifier: Apache-2.0
"""What `doctor` tries in a process of its own: it may crash, hang or print anything.

Run as `python -P -m portable_backend.commands.doctor_child TASK`; the result is the
line of stdout that begins with MARKER.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

MARKER = "portable-backend-doctor:"


def ask_vllm() -> dict[str, Any]:
    """What vLLM makes of the plug-in, as a server would load it."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from portable_backend.plugin import NAME

    load_general_plugins()
    member = AttentionBackendEnum._member_map_.get(NAME)
    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "member": None if member is None else member.value,
    }
    if member is not None:
        try:
            found["class"] = member.get_class().__qualname__
        except Exception as error:
            # Whatever importing the back end and the kernels raises is the finding.
            found["failure"] = _line(error)
    return found


def run_kernel() -> dict[str, Any]:
    """Normalise a few rows and compare them with the fp32 oracle."""
    import torch

    from portable_backend.kernels import rms_norm
    from portable_backend.kernels.reference import rms_norm_reference

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(5, 576, device=device)
    weight = torch.randn(576, device=device)
    expected, _ = rms_norm_reference(x, weight, 1e-6)
    given: Any = rms_norm(x, weight, 1e-6)
    return {"device": device, "error": float((given - expected).abs().max())}


TASKS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "vllm": ask_vllm,
    "kernel": run_kernel,
}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def main(task: str) -> None:
    try:
        found = TASKS[task]()
    except Exception as error:
        # The parent reports it.
        found = {"failure": _line(error)}
    print(f"\n{MARKER}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
