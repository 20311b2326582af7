# SPDX-License-Identifier: Apache-2.0
"""What vLLM's config says of an engine's layers and of the steps they can meet."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from portable_backend.warmup.buckets import EngineLimits

# Requests with up to this many new tokens take the decode kernel.
MIN_DECODE_QUERY_LEN = 8


@dataclass(frozen=True)
class PlanKey:
    """What layers must share to use one plan."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None


def impls_of(vllm_config: Any, layer_names: Iterable[str] | None = None) -> list[Any]:
    """The PortableImpls of these layers, or of all, told by what only they have."""
    layers = vllm_config.compilation_config.static_forward_context
    names = list(layers) if layer_names is None else layer_names
    impls = (getattr(layers.get(name), "impl", None) for name in names)
    return [impl for impl in impls if hasattr(impl, "plan_key")]


def key_of_spec(vllm_config: Any, kv_cache_spec: Any) -> PlanKey:
    """For a builder whose layers are not registered, as in unit tests."""
    return PlanKey(
        vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
        kv_cache_spec.num_kv_heads,
        kv_cache_spec.head_size,
        getattr(kv_cache_spec, "sliding_window", None),
    )


def layer_of(key: PlanKey, vllm_config: Any) -> dict[str, Any]:
    """A kind of layer as keyword arguments of planners and of `tuned`."""
    return {**asdict(key), "dtype": vllm_config.model_config.dtype}


def limits_of(vllm_config: Any, block_size: int) -> EngineLimits:
    """What bounds the engine's steps, as tuning records have it."""
    scheduler, speculative = (
        vllm_config.scheduler_config,
        vllm_config.speculative_config,
    )
    return EngineLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=block_size,
        speculative_tokens=getattr(speculative, "num_speculative_tokens", None) or 0,
    )


def drafts_of(vllm_config: Any) -> int:
    """Tokens that a request of a decode can have beyond one."""
    speculative = vllm_config.speculative_config
    num_drafts: int = getattr(speculative, "num_speculative_tokens", None) or 0
    return num_drafts * (2 if getattr(speculative, "parallel_drafting", False) else 1)


def step_limits(vllm_config: Any, kv_cache_spec: Any = None) -> dict[str, int]:
    """The largest step a planner must hold, graph padding and drafts included.

    Args:
        vllm_config: the engine's.
        kv_cache_spec: of the layers; None: not known yet, an ordinary one.
    """
    scheduler = vllm_config.scheduler_config
    num_drafts = drafts_of(vllm_config)
    captured = max(vllm_config.compilation_config.cudagraph_capture_sizes or [0])
    max_num_seqs = max(scheduler.max_num_seqs, captured)
    max_num_tokens = max(scheduler.max_num_batched_tokens, captured)
    # Drafters append their slots to a full step.
    max_num_tokens += max_num_seqs * num_drafts
    # Chunked local attention cuts each request where it crosses a chunk.
    chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
    if chunk:
        max_num_seqs = 2 * max_num_seqs + max_num_tokens // chunk
    return {
        "max_num_seqs": max_num_seqs,
        "max_num_tokens": max_num_tokens,
        "max_decode_query_len": max(1 + num_drafts, MIN_DECODE_QUERY_LEN),
    }
