# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the cache write: the default, and what is worth timing.

VECTORS: 16-byte vectors of a program. launch_pdl: the launch begins before the one
ahead of it has ended, and waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import (
    ConfigSpace,
    Constraint,
    Derived,
    KernelConfig,
    Parameter,
)

# The default config depends on a call's size through this step only, so that
# default_configs() lists all that is compiled: up to so many vectors, and more.
VECTOR_BUCKET = 1 << 18
_LANES = (64, 128, 256, 512)
_VECTORS_PER_LANE = (1, 2, 4)


@dataclass(frozen=True)
class KVCacheProblem:
    """What bounds a config, beside the device.

    Attributes:
        num_vectors: of all new keys, 16 bytes each.
    """

    num_vectors: int


def default_config(*, num_vectors: int, device: DeviceInfo) -> KernelConfig:
    """Vectors per program, and warps.

    One vector of K and of V per lane while the device can hold all lanes at once, two
    beyond; the interpreter wants few, large programs.

    Args:
        num_vectors: of all new keys, 16 bytes each; counts as its bucket only.
        device: what the kernel will run on.
    """
    if device.platform == "interpreter":
        return KernelConfig.of(VECTORS=8192, num_warps=1)
    small = num_vectors <= VECTOR_BUCKET
    return KernelConfig.of(
        VECTORS=128 if small else 256,
        num_warps=128 // device.limits.warp_size,
        launch_pdl=(small and device.limits.has_early_launch) or None,
    )


def default_configs(*, device: DeviceInfo) -> list[KernelConfig]:
    """Each config that default_config() can return, without repeats."""
    sizes = (VECTOR_BUCKET, VECTOR_BUCKET + 1)
    return list(
        dict.fromkeys(default_config(num_vectors=n, device=device) for n in sizes)
    )


def candidate_configs(*, num_vectors: int, device: DeviceInfo) -> list[KernelConfig]:
    """Configs worth timing: those of SPACE, the default first.

    In the interpreter, those of an ordinary GPU.
    """
    if device.platform == "interpreter":
        device = DeviceInfo.for_arch("sm80")
    default = default_config(num_vectors=num_vectors, device=device)
    space = SPACE.configs(KVCacheProblem(num_vectors), device)
    return list(dict.fromkeys([default, *space]))


Config = Mapping[str, Any]


def _is_default(c: Config, problem: KVCacheProblem, device: DeviceInfo) -> bool:
    default = default_config(num_vectors=problem.num_vectors, device=device)
    return all(c[name] == default[name] for name in ("VECTORS", "num_warps"))


def _lanes_are_even(c: Config, problem: KVCacheProblem, device: DeviceInfo) -> bool:
    lanes = c["num_warps"] * device.limits.warp_size
    return c["VECTORS"] in [lanes * n for n in _VECTORS_PER_LANE] or _is_default(
        c, problem, device
    )


def _programs_remain(c: Config, problem: KVCacheProblem, device: DeviceInfo) -> bool:
    one_each = c["VECTORS"] <= c["num_warps"] * device.limits.warp_size
    enough = problem.num_vectors >= 2 * device.num_units * c["VECTORS"]
    return bool(one_each or enough) or _is_default(c, problem, device)


def _warp_values(problem: KVCacheProblem, device: DeviceInfo) -> list[int]:
    if device.platform == "interpreter":
        return [1]
    return [lanes // device.limits.warp_size for lanes in _LANES]


def _vector_values(problem: KVCacheProblem, device: DeviceInfo) -> list[int]:
    if device.platform == "interpreter":
        return [8192]
    return sorted({lanes * n for lanes in _LANES for n in _VECTORS_PER_LANE})


def _launch_pdl(c: Config, problem: KVCacheProblem, device: DeviceInfo) -> bool | None:
    few = problem.num_vectors <= VECTOR_BUCKET
    return (few and device.limits.has_early_launch) or None


SPACE: ConfigSpace[KVCacheProblem] = ConfigSpace(
    "kv_cache",
    (
        Parameter(
            "num_warps",
            _warp_values,
            "64 to 512 lanes: programs share nothing, so more only start later",
        ),
        Parameter("VECTORS", _vector_values, "16-byte vectors of a program"),
    ),
    (
        Constraint(
            "lanes_are_even",
            "each lane has one, two or four vectors",
            ("num_warps", "VECTORS"),
            _lanes_are_even,
        ),
        Constraint(
            "programs_remain",
            "more than one vector to a lane only where two programs per unit remain, "
            "or in the default",
            ("num_warps", "VECTORS"),
            _programs_remain,
        ),
    ),
    (
        Derived(
            "launch_pdl",
            _launch_pdl,
            "a launch that begins early hides its latency, where programs are few",
            platforms=("cuda", "hip"),
        ),
    ),
)
