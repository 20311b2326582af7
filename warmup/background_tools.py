# SPDX-License-Identifier: Apache-2.0
"""The tools of tuning beside an engine that serves; made for a `Recipe`.

Nothing here touches the GPU but the measuring process, and that only while the engine
has nothing to do.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from portable_backend.device import ArchLimits, DeviceInfo
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.measuring_process import MeasuringProcess
from portable_backend.warmup.tools import Compiler, Measurer, Recipe, Tools
from portable_backend.warmup.tuning_tools import SpaceCatalog, resource_model

# The longest turn, and so the most that an engine usually waits for: of confirmations;
# trials' are shorter.
TURN_US = 3000.0
# In turns this short one is noisier, so a confirmation has twice as many.
CONFIRM_ROUNDS = 31


def background_recipe(
    device: DeviceInfo, beacon: Path, *, workers: int, memory_mib: int
) -> Recipe:
    """Recipe of the tools.

    Args:
        device: that the process is to see alone.
        beacon: where the engines on it mark their steps.
        workers: processes that compile.
        memory_mib: of the GPU, to measure in.
    """
    options = {
        "device": asdict(device),
        "beacon": str(beacon),
        "workers": workers,
        "memory_mib": memory_mib,
    }
    return Recipe(f"{__name__}:background_tools", options)


def background_tools(
    *, device: dict[str, Any], beacon: str, workers: int, memory_mib: int
) -> Tools:
    """As `tuning_tools.gpu_tools`, without a look at the GPU."""
    info = DeviceInfo(**device | {"limits": ArchLimits(**device["limits"])})

    def make_measurer() -> Measurer:
        return MeasuringProcess(
            device="cuda:0",
            beacon=beacon,
            device_memory_mib=memory_mib,
            confirm_turn_us=TURN_US,
            confirm_rounds=CONFIRM_ROUNDS,
        )

    def make_compiler() -> Compiler:
        from portable_backend.warmup.compile_pool import CompilePool

        return CompilePool(info, workers=workers, activity=Activity(Path(beacon)))

    return Tools(
        device=info,
        environment=Environment(
            info.name, info.arch, current_digests(), current_toolchain()
        ),
        catalog=SpaceCatalog(info),
        make_measurer=make_measurer,
        make_compiler=make_compiler,
        prune=resource_model(),
    )
