# SPDX-License-Identifier: Apache-2.0
"""What no kernel can beat on a device: its memory's bandwidth and its product rate."""

import torch

from portable_backend.device import DeviceInfo

# Dense 16-bit products and sums of one unit in one clock, twice that in flops; from the
# vendors' data sheets, the higher figure where variants of an architecture differ.
_FLOPS_PER_CLOCK = {
    "sm80": 2048,
    "sm86": 1024,
    "sm89": 1024,
    "sm90": 4096,
    "sm100": 8192,
    "sm120": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
    "gfx1100": 512,
    "gfx1201": 1024,
}


def roof_us(
    device: torch.device, *, num_bytes: float = 0.0, flops: float = 0.0
) -> float | None:
    """The least time for so many bytes of memory and flops of 16-bit products.

    Returns:
        Microseconds; None where neither limit is known.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    limits = []
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    if clock_khz and width_bits:
        # Two transfers per clock.
        bytes_per_us = 2 * clock_khz * 1e-3 * width_bits / 8
        limits.append(num_bytes / bytes_per_us)
    info = DeviceInfo.detect(device)
    per_clock = _FLOPS_PER_CLOCK.get(info.arch)
    clock_khz = getattr(properties, "clock_rate", 0)
    if per_clock and clock_khz:
        limits.append(flops / (per_clock * info.num_units * clock_khz * 1e-3))
    return max(limits, default=0.0) or None
