# SPDX-License-Identifier: Apache-2.0
"""The configs that attention's kernels may run with, for a problem on its device.

A config never changes what is computed of finite scores beyond the last bits, so every
member of these spaces is right for every input; they differ in speed alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from portable_backend.device import DeviceInfo
from portable_backend.kernels._attention_bounds import AttentionShape
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.decode_space import DECODE_SPACE, MERGE_SPACE
from portable_backend.kernels.prefill_space import PREFILL_SPACE

__all__ = [
    "DECODE_SPACE",
    "MERGE_SPACE",
    "PREFILL_SPACE",
    "AttentionProblem",
    "AttentionShape",
    "decode_configs",
    "merge_configs",
    "prefill_configs",
]


@dataclass(frozen=True)
class AttentionProblem(AttentionShape):
    """A shape, and the device its kernels run on."""

    device: DeviceInfo


def prefill_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every prefill config that fits the problem."""
    return PREFILL_SPACE.configs(problem, problem.device)


def decode_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every decode config that fits the problem."""
    return DECODE_SPACE.configs(problem, problem.device)


def merge_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every merge config."""
    return MERGE_SPACE.configs(problem, problem.device)
