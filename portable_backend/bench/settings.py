# SPDX-License-Identifier: Apache-2.0
"""What every suite of a run needs to know."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from portable_backend.bench.inputs import LAYOUTS
from portable_backend.bench.providers import ON_REQUEST


@dataclass(frozen=True)
class Settings:
    """What every suite needs to know.

    Attributes:
        device: cuda or cpu; the latter gets tiny shapes and no times.
        rounds: timed spans of each implementation and row.
        impls: chosen by name; None: all that are not on request only.
        absent: implementations that cannot run here, and why.
        every: geometries at both block sizes.
        cold: attention finds no layer's keys in the L2 cache.
        layout: of the cache, one of LAYOUTS.
    """

    device: torch.device
    rounds: int = 12
    impls: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    every: bool = False
    cold: bool = False
    layout: str = LAYOUTS[0]

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are wanted and can run."""
        wanted = self.impls
        return [
            name
            for name in names
            if name not in self.absent
            and (name not in ON_REQUEST if wanted is None else name in wanted)
        ]
