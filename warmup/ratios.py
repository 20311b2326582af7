# SPDX-License-Identifier: Apache-2.0
"""What a config is to a device, in ratios to the device's limits.

No feature names a GPU or counts what only one kind of GPU has: occupancy, bytes in
flight by those that hide the memory's latency, waves of programs. What is learnt of
them on one GPU says something of another, as far as the resource model holds there.
"""

import math
from collections.abc import Sequence
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.resources import (
    LATENCY_US,
    Readout,
    estimate_us,
    programs_per_unit,
    unit_limits,
    work_of,
)

NAMES = (
    "estimate",
    "programs_fit",
    "warps",
    "programs",
    "waves",
    "uneven",
    "in_flight",
    "in_flight_of_program",
    "bytes_per_lane",
    "shared",
    "registers",
    "registers_in_use",
    "steps",
    "excess_reads",
    "work_of_program",
    "stages",
    "descriptor",
    "spills",
    "keys_per_warp",
)


def ratios(
    key: TuningKey,
    config: KernelConfig,
    device: DeviceInfo,
    readout: Readout | None = None,
) -> list[float] | None:
    """The features of a config, in the order of `NAMES`; ratios as log2.

    Args:
        key: what the config is for.
        config: a member of the key's space.
        device: what it would run on.
        readout: of the compiled config; None estimates what code takes.

    Returns:
        None where no unit can hold a program.

    Raises:
        ValueError: the key is no kernel's.
    """
    work, unit, limits = (
        work_of(key, config, device),
        unit_limits(device),
        device.limits,
    )
    num_warps = config["num_warps"]
    values: dict[str, Any] = config.to_dict()
    stages = values.get("num_stages", 1)
    shared, registers, spills = work.shared_bytes, work.registers, 0
    held = None
    if readout is not None:
        shared, spills = readout.shared_bytes, readout.spills or 0
        registers = readout.registers or registers
        held = readout.programs_per_unit
    if held is None:
        held = programs_per_unit(
            device, num_warps=num_warps, shared_bytes=shared, registers=registers
        )
    estimate = estimate_us(key, config, device, readout)
    if held < 1 or not math.isfinite(estimate):
        return None
    in_unit = work.programs / device.num_units
    resident = min(held, max(1.0, in_unit))
    hides = unit.bytes_per_us * LATENCY_US
    lanes = num_warps * limits.warp_size
    register_file = unit.registers * unit.quarters * limits.warp_size
    return [
        math.log(estimate),
        _log(held),
        _log(resident * num_warps / unit.warps),
        _log(in_unit),
        _log(in_unit / held),
        math.ceil(in_unit) / in_unit if in_unit < 64 else 1.0,
        _log(resident * work.flight_bytes / hides),
        _log(work.flight_bytes / hides),
        _log(work.flight_bytes / max(0.5, stages - 1) / lanes),
        _log(max(shared, 1024) / limits.shared_bytes_per_unit),
        registers / 255,
        _log(registers * lanes * held / register_file),
        _log(work.steps + 0.01),
        _log(work.tile_bytes / work.read_bytes),
        _log(work.flops / work.programs / 1e6),
        float(stages),
        float(config.get("LOAD") == "descriptor"),
        float(spills),
        _log(values.get("BLOCK_N", 16) / num_warps),
    ]


def centred(rows: Sequence[list[float]]) -> list[list[float]]:
    """With each estimate next to the median of the rows, which are of one key."""
    estimates = sorted(row[0] for row in rows)
    middle = estimates[len(estimates) // 2]
    return [[row[0] - middle, *row[1:]] for row in rows]


def _log(value: float) -> float:
    return math.log2(max(value, 1e-6))
