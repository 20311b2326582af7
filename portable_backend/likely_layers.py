# SPDX-License-Identifier: Apache-2.0
"""Planners as builders will make them, known when weights are loaded.

vLLM makes builders after its profile run. What they ask for follows from the layers and
the engine's limits, but for the block size, which vLLM sets in between where the user
gives none, and for cases such as chunked attention. A guess that is wrong costs time on
the host, and nothing else: builders ask again, with what is so.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from portable_backend.device import DeviceInfo
from portable_backend.engine_config import (
    PlanKey,
    impls_of,
    layer_of,
    limits_of,
    step_limits,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import StepKind
from portable_backend.settings import get_settings
from portable_backend.tuned import likely_lookup, model_of
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.serving_configs import default_of, recorded_for

# vLLM's, where nobody says otherwise.
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class LikelyLayers:
    """Layers that share a planner: what their kernels follow from.

    Attributes:
        num_query_heads, num_kv_heads, head_size, sliding_window, dtype, block_size,
        max_num_seqs, max_decode_query_len: as AttentionPlanner has them.
        limits: of the engine.
        info: what they run on.
        lookup: tuning records; None: defaults serve.
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    dtype: torch.dtype
    block_size: int
    max_num_seqs: int
    max_decode_query_len: int
    limits: EngineLimits
    info: DeviceInfo
    lookup: Lookup | None = field(compare=False)

    def config_for(self, kind: StepKind) -> AttentionConfig:
        """The config of steps of one kind."""
        model = model_of(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            sliding_window=self.sliding_window,
            dtype=self.dtype,
            limits=self.limits,
        )
        window = self.sliding_window or 0
        config = None
        if self.lookup is not None:
            config = recorded_for(
                self.lookup, model, self.limits, self.info, kind, window
            )
        return config or default_of(model, self.limits, self.info, kind, window)


def likely_layers(vllm_config: Any, info: DeviceInfo) -> dict[LikelyLayers, list[Any]]:
    """The engine's attention impls by the planner that they will share.

    Args:
        vllm_config: the engine's, its layers made.
        info: what they run on.
    """
    limits = limits_of(vllm_config, _block_size(vllm_config))
    bounds = step_limits(vllm_config)
    lookup = likely_lookup(info) if get_settings().tune != "off" else None
    impls: dict[PlanKey, list[Any]] = {}
    for impl in impls_of(vllm_config):
        impls.setdefault(impl.plan_key, []).append(impl)
    return {
        LikelyLayers(
            **layer_of(key, vllm_config),
            block_size=limits.block_size,
            max_num_seqs=bounds["max_num_seqs"],
            max_decode_query_len=bounds["max_decode_query_len"],
            limits=limits,
            info=info,
            lookup=lookup,
        ): some
        for key, some in impls.items()
    }


def _block_size(vllm_config: Any) -> int:
    """The user's, or what the back end asks for; vLLM may not have set it yet."""
    from portable_backend.backend import PortableBackend

    cache_config = vllm_config.cache_config
    size: int = cache_config.block_size or DEFAULT_BLOCK_SIZE
    if getattr(cache_config, "user_specified_block_size", False):
        return size
    return PortableBackend.get_preferred_block_size(size)
