# SPDX-License-Identifier: Apache-2.0
"""What the code may know about a GPU: the only place that asks "which one?".

Kernels never branch on a vendor. They are launched with a config, and configs are
chosen from the numbers below.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArchLimits:
    """Limits of one architecture, from the vendors' programming guides.

    Attributes:
        platform: "cuda", "hip" or "interpreter"; selects per-platform parameters.
        warp_size: lanes of a warp (NVIDIA) or wave (AMD).
        shared_bytes_per_block: most shared memory (LDS) one block can ask for.
        shared_bytes_per_unit: shared memory of one SM or CU.
        has_tensor_descriptors: tiles can be fetched by descriptor (TMA).
        has_early_launch: a launch can begin before the one ahead of it has ended
            (programmatic dependent launch).
    """

    platform: str
    warp_size: int
    shared_bytes_per_block: int
    shared_bytes_per_unit: int
    has_tensor_descriptors: bool = False
    has_early_launch: bool = False


_KIB = 1024
ARCH_LIMITS: dict[str, ArchLimits] = {
    "sm80": ArchLimits("cuda", 32, 163 * _KIB, 164 * _KIB),
    "sm86": ArchLimits("cuda", 32, 99 * _KIB, 100 * _KIB),
    "sm89": ArchLimits("cuda", 32, 99 * _KIB, 100 * _KIB),
    "sm90": ArchLimits("cuda", 32, 227 * _KIB, 228 * _KIB, True, True),
    "sm100": ArchLimits("cuda", 32, 227 * _KIB, 228 * _KIB, True, True),
    "sm120": ArchLimits("cuda", 32, 99 * _KIB, 100 * _KIB, False, True),
    "gfx90a": ArchLimits("hip", 64, 64 * _KIB, 64 * _KIB),
    "gfx942": ArchLimits("hip", 64, 64 * _KIB, 64 * _KIB),
    "gfx950": ArchLimits("hip", 64, 160 * _KIB, 160 * _KIB),
    "gfx1100": ArchLimits("hip", 32, 64 * _KIB, 128 * _KIB),
    "gfx1201": ArchLimits("hip", 32, 64 * _KIB, 128 * _KIB),
    "interpreter": ArchLimits("interpreter", 32, 1 << 30, 1 << 30),
}
# An architecture that is not listed is treated like the smallest of its vendor.
_SMALLEST = {"cuda": "sm86", "hip": "gfx1100"}


@dataclass(frozen=True)
class DeviceInfo:
    """One device as the kernels see it.

    Attributes:
        name: canonical name, e.g. "nvidia_h200"; key of tuning records.
        arch: "sm90", "gfx942", ... or "interpreter".
        num_units: streaming multiprocessors or compute units.
        limits: what the architecture allows.
    """

    name: str
    arch: str
    num_units: int
    limits: ArchLimits

    @property
    def platform(self) -> str:
        return self.limits.platform

    @classmethod
    def for_arch(cls, arch: str, num_units: int = 108) -> "DeviceInfo":
        """Describe an architecture that is not at hand, for cross-compilation."""
        if arch not in ARCH_LIMITS:
            arch_list = ", ".join(ARCH_LIMITS)
            raise ValueError(f"arch must be one of {arch_list}, got {arch}")
        return cls(arch, arch, num_units, ARCH_LIMITS[arch])

    @classmethod
    def detect(cls, device: Any) -> "DeviceInfo":
        """Describe a torch device (cuda, also ROCm's) or the CPU interpreter.

        Args:
            device: torch.device or its string form.

        Raises:
            ValueError: a CPU device without TRITON_INTERPRET=1, or another type.
        """
        import torch

        device = torch.device(device)
        index = device.index
        if device.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        return _detect(device.type, index)


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


@functools.cache
def _detect(kind: str, index: int | None) -> DeviceInfo:
    import torch

    if kind == "cpu":
        if not interpreting():
            raise ValueError(
                "a CPU tensor needs Triton's interpreter, which is off; set "
                "TRITON_INTERPRET=1 in the environment before Python starts"
            )
        return DeviceInfo("interpreter", "interpreter", 1, ARCH_LIMITS["interpreter"])
    if kind != "cuda":
        raise ValueError(
            f"device must be cuda (NVIDIA or AMD) or cpu, got {kind}; "
            "move the tensors to such a device"
        )
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch, vendor = props.gcnArchName.split(":")[0], "hip"
    else:
        arch, vendor = f"sm{props.major}{props.minor}", "cuda"
    limits = ARCH_LIMITS.get(arch, ARCH_LIMITS[_SMALLEST[vendor]])
    name = "_".join(props.name.lower().replace("(tm)", "").split())
    return DeviceInfo(name, arch, props.multi_processor_count, limits)
