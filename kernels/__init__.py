# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their wrappers: paged attention, KV-cache write, RMSNorm."""

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
