# SPDX-License-Identifier: Apache-2.0
"""A search space that is a plain list of configs."""

import random
from collections import defaultdict
from collections.abc import Iterable

from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig


class ListedSpace:
    """A `search.Space` of given configs; neighbours differ in one parameter.

    Args:
        configs: at least one; repeated ones count once.

    Raises:
        ValueError: there is no config.
    """

    def __init__(self, configs: Iterable[KernelConfig]) -> None:
        self.configs = tuple(dict.fromkeys(configs))
        if not self.configs:
            raise bad_argument(
                "configs", "one config at least", "none", "widen the space"
            )
        self._near: dict[KernelConfig, list[KernelConfig]] = {}
        self._members = frozenset(self.configs)
        # Configs that agree in all but one parameter, by that parameter and the rest.
        self._groups: dict[object, list[KernelConfig]] = defaultdict(list)
        for config in self.configs:
            for group in self._groups_of(config):
                self._groups[group].append(config)

    def sample(self, n: int, rng: random.Random) -> list[KernelConfig]:
        return rng.sample(self.configs, min(n, len(self.configs)))

    def neighbours(self, config: KernelConfig) -> list[KernelConfig]:
        if config not in self._near:
            groups = [self._groups.get(g, ()) for g in self._groups_of(config)]
            self._near[config] = [c for group in groups for c in group if c != config]
        return self._near[config]

    def mutate(self, config: KernelConfig, rng: random.Random) -> KernelConfig:
        # Where constraints tie parameters together, one step more crosses the gap.
        for _ in range(1 + (rng.random() < 0.5)):
            near = self.neighbours(config)
            config = rng.choice(near or self.configs)
        return config

    def crossover(
        self, a: KernelConfig, b: KernelConfig, rng: random.Random
    ) -> KernelConfig:
        for _ in range(8):
            child = KernelConfig.from_dict(
                {name: rng.choice((a, b)).get(name) for name in {**a, **b}}
            )
            if child in self._members:
                return child
        return self.mutate(rng.choice((a, b)), rng)

    def _groups_of(self, config: KernelConfig) -> list[object]:
        items = config.items_
        return [(items[i][0], items[:i] + items[i + 1 :]) for i in range(len(items))]
