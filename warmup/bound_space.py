# SPDX-License-Identifier: Apache-2.0
"""A `ConfigSpace` for one problem on one device, as a search strategy sees it."""

import functools
import random
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import ConfigSpace, KernelConfig


class BoundSpace:
    """A `search.Space` of the members of a config space.

    Args:
        space: whatever its problem's type is.
        problem, device: what the configs are for.
    """

    def __init__(
        self, space: ConfigSpace[Any], problem: Any, device: DeviceInfo
    ) -> None:
        self.space, self.problem, self.device = space, problem, device

    @functools.cached_property
    def configs(self) -> tuple[KernelConfig, ...]:
        return tuple(self.space.configs(self.problem, self.device))

    def __len__(self) -> int:
        return self.space.count(self.problem, self.device)

    def sample(self, n: int, rng: random.Random) -> list[KernelConfig]:
        return self.space.sample(n, rng, self.problem, self.device)

    def neighbours(self, config: KernelConfig) -> list[KernelConfig]:
        return self.space.neighbours(config, self.problem, self.device)

    def mutate(self, config: KernelConfig, rng: random.Random) -> KernelConfig:
        return self.space.mutate(config, rng, self.problem, self.device)

    def crossover(
        self, a: KernelConfig, b: KernelConfig, rng: random.Random
    ) -> KernelConfig:
        return self.space.crossover(a, b, rng, self.problem, self.device)

    def why_not(self, config: KernelConfig) -> list[str]:
        """All reasons why config is no member; empty if it is one."""
        return self.space.why_not(config, self.problem, self.device)
