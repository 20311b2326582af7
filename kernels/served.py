# SPDX-License-Identifier: Apache-2.0
"""Configs for calls of `rms_norm` and `write_kv_cache` that name none.

A model's layers call them without a config. What an engine has chosen for its layers,
from tuning records, is put here once while it starts; all else gets the default.
"""

import bisect
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from portable_backend.kernels.config import KernelConfig


@dataclass(frozen=True)
class Steps:
    """A config for each size of a call; None: the default.

    Attributes:
        sizes: the most rows or tokens of each step, ascending; what is larger than all
            counts as the last.
        configs: of each step.
    """

    sizes: tuple[int, ...]
    configs: tuple[KernelConfig | None, ...]

    def at(self, size: int) -> KernelConfig | None:
        if not self.sizes:
            return None
        place = bisect.bisect_left(self.sizes, size)
        return self.configs[min(place, len(self.configs) - 1)]


NO_STEPS = Steps((), ())
# (dtype, row size, whether a residual is added), and (dtype, head size, KV heads).
NormKey = tuple[torch.dtype, int, bool]
WriteKey = tuple[torch.dtype, int, int]
_Key = TypeVar("_Key", NormKey, WriteKey)


@dataclass
class _Served:
    norms: dict[NormKey, Steps] = field(default_factory=dict)
    writes: dict[WriteKey, Steps] = field(default_factory=dict)
    version: int = 0


_served = _Served()


def serve(
    norms: Mapping[NormKey, Steps] | None = None,
    writes: Mapping[WriteKey, Steps] | None = None,
) -> None:
    """From the next call on, launch these configs where a call names none.

    Not while a graph is captured: what was bound before is bound anew.

    Args:
        norms: by (dtype, row size, whether a residual is added), in rows.
        writes: by (dtype, head size, number of KV heads), in tokens.
    """
    if _update(_served.norms, norms or {}):
        _forget("rms_norm")
    if _update(_served.writes, writes or {}):
        _forget("kv_cache")


def _update(held: dict[_Key, Steps], new: Mapping[_Key, Steps]) -> bool:
    """Whether anything changes."""
    changed = {key: x for key, x in new.items() if held.get(key, NO_STEPS) != x}
    held.update(changed)
    return bool(changed)


def version() -> int:
    """A number that differs once anything else is served."""
    return _served.version


def is_default() -> bool:
    """Whether nothing was chosen."""
    return not _served.norms and not _served.writes


def forget() -> None:
    """Serve defaults again."""
    _served.norms.clear()
    _served.writes.clear()
    for module in ("rms_norm", "kv_cache"):
        _forget(module)


def norm_config(
    dtype: torch.dtype, row_size: int, fused_add: bool, num_rows: int
) -> KernelConfig | None:
    """For a call of `rms_norm`; None: the default."""
    return _served.norms.get((dtype, row_size, fused_add), NO_STEPS).at(num_rows)


def write_steps(dtype: torch.dtype, head_size: int, num_kv_heads: int) -> Steps:
    """For calls of `write_kv_cache`, by their number of tokens."""
    return _served.writes.get((dtype, head_size, num_kv_heads), NO_STEPS)


def _forget(module: str) -> None:
    """Drop what was bound to other configs; compiled kernels stay."""
    _served.version += 1
    importlib.import_module(f"portable_backend.kernels.{module}").forget_bindings()
