# SPDX-License-Identifier: Apache-2.0
"""In a worker of vLLM: note each kernel that Triton compiles, or loads from its cache.

A server finds this module by PYTHONPATH and `--worker-extension-cls`. Lines of JSON go
to the file that STARTUP_CHECK_EVENTS names, one for each kernel: Unix time, function,
module, seconds, and whether the cache had it. They are there also when the engine dies.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from portable_backend.worker_extension import PortableWorkerExtension

VARIABLE = "STARTUP_CHECK_EVENTS"
EXTENSION = "startup_events.StartupCheckExtension"


def listen(path: Path) -> None:
    """Have Triton tell what it compiles in this process."""
    from triton import knobs

    before = knobs.compilation.listener

    def note(**event: Any) -> None:
        function = getattr(event["src"], "fn", None)
        line = {
            "at": time.time(),
            "kernel": str(getattr(event["src"], "name", function)),
            "module": str(getattr(function, "__module__", "")),
            "seconds": round(event["times"].total / 1e6, 3),
            "cached": bool(event["cache_hit"]),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if before is not None:
            before(**event)

    knobs.compilation.listener = note


class StartupCheckExtension(PortableWorkerExtension):
    """What startup_check.py asks workers for."""

    def startup_check_memory(self) -> dict[str, int]:
        """Bytes that torch has given out and keeps, and that the GPU has free."""
        import torch

        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used_on_gpu": total - free,
        }


if VARIABLE in os.environ:
    listen(Path(os.environ[VARIABLE]))
