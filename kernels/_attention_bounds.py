# SPDX-License-Identifier: Apache-2.0
"""What the spaces of attention's kernels share: the problem, parameters, bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import Constraint, Derived, Parameter

Config = Mapping[str, Any]


@dataclass(frozen=True)
class AttentionShape:
    """What bounds a config, beside the device.

    Attributes:
        num_queries_per_kv: query heads that share a KV head.
        head_size: elements per head.
        element_size: bytes per element of query and cache.
        block_size: tokens per KV block.
        longest_decode: query tokens that a request may have and still be a decode;
            steps without drafts have such requests, too, a prompt's last tokens.
    """

    num_queries_per_kv: int
    head_size: int
    element_size: int
    block_size: int
    longest_decode: int = field(default=8, kw_only=True)

    @property
    def padded(self) -> int:
        """Elements that a head takes in a tile."""
        size: int = triton.next_power_of_2(self.head_size)
        return max(16, size)


def on_gpu(device: DeviceInfo) -> bool:
    return device.platform != "interpreter"


def lanes(config: Config, device: DeviceInfo) -> int:
    return int(config["num_warps"]) * device.limits.warp_size


def stages(shape: AttentionShape, device: DeviceInfo) -> tuple[int, ...]:
    return {"cuda": (1, 2, 3, 4), "hip": (1, 2), "interpreter": (1,)}[device.platform]


def _descriptors_exist(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["LOAD"] == "pointer" or device.limits.has_tensor_descriptors


def _tile_within_block(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    divides: bool = shape.block_size % c["BLOCK_N"] == 0
    return divides or c["LOAD"] != "descriptor"


def _early_launch_exists(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["launch_pdl"] is None or device.limits.has_early_launch


EARLY_LAUNCH: Parameter[AttentionShape] = Parameter(
    "launch_pdl", (None, True), "a launch begins early or does not"
)
EARLY_LAUNCH_EXISTS = Constraint(
    "early_launch",
    "only NVIDIA GPUs from sm90 on begin a launch before the one ahead has ended",
    ("launch_pdl",),
    _early_launch_exists,
)
LOAD_CONSTRAINTS = (
    Constraint(
        "descriptor_exists",
        "the device must be able to fetch tiles by tensor descriptor",
        ("LOAD",),
        _descriptors_exist,
    ),
    Constraint(
        "tile_within_block",
        "a descriptor fetches from one KV block: tiles of keys must divide it",
        ("BLOCK_N", "LOAD"),
        _tile_within_block,
    ),
)
SMALL_MATRICES: Derived[AttentionShape] = Derived(
    "matrix_instr_nonkdim",
    16,
    "AMD's matrix instructions of 16 rows fit tiles of 16 rows",
)
