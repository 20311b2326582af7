# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their wrappers: paged attention, KV-cache write, RMSNorm.

Names load on first use: what only handles configs imports neither torch nor Triton.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable_backend.kernels._launch import launch_counts, reset_launch_counts
    from portable_backend.kernels.attention import (
        AttentionOptions,
        PagedBatch,
        paged_attention,
    )
    from portable_backend.kernels.config import AttentionConfig, KernelConfig
    from portable_backend.kernels.kv_cache import write_kv_cache
    from portable_backend.kernels.plan import AttentionPlan, AttentionPlanner
    from portable_backend.kernels.rms_norm import rms_norm

__all__ = [
    "AttentionConfig",
    "AttentionOptions",
    "AttentionPlan",
    "AttentionPlanner",
    "KernelConfig",
    "PagedBatch",
    "launch_counts",
    "paged_attention",
    "reset_launch_counts",
    "rms_norm",
    "write_kv_cache",
]
_MODULES = {
    "AttentionConfig": "config",
    "AttentionOptions": "attention",
    "AttentionPlan": "plan",
    "AttentionPlanner": "plan",
    "KernelConfig": "config",
    "PagedBatch": "attention",
    "launch_counts": "_launch",
    "paged_attention": "attention",
    "reset_launch_counts": "_launch",
    "rms_norm": "rms_norm",
    "write_kv_cache": "kv_cache",
}


class _Package(ModuleType):
    """Keeps `rms_norm` the function: its module of that name may be imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rms_norm" and isinstance(value, ModuleType):
            value = value.rms_norm
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = getattr(module, name)
    setattr(sys.modules[__name__], name, value)
    return value


sys.modules[__name__].__class__ = _Package
