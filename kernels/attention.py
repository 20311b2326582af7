# SPDX-License-Identifier: Apache-2.0
"""Paged attention for any mix of prefill, chunked prefill and decode in one call.

`paged_attention` validates, plans the step if nobody has, and launches up to three
kernels: decode (short queries, keys split), merge (of the splits), prefill (the rest).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from portable_backend.errors import bad_argument
from portable_backend.kernels._checks import (
    check_attention,
    check_contents,
    check_plan,
)
from portable_backend.kernels._softmax import LOG2E
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.decode import _decode_kernel, _merge_kernel
from portable_backend.kernels.plan import AttentionPlan, AttentionPlanner
from portable_backend.kernels.prefill import _prefill_kernel


@dataclass(frozen=True)
class PagedBatch:
    """One scheduler step; all tensors on one device unless said.

    Attributes:
        query_start_loc: [num_seqs + 1] int32, exclusive prefix sum of query lengths.
        seq_lens: [num_seqs] int32, cached + new tokens; 0 for a padded request.
        block_table: [num_seqs, max_blocks] int32; entries past seq_lens never read.
        max_query_len: longest query, or an upper bound.
        max_seq_len: upper bound of seq_lens; the device tensors decide.
        query_start_loc_cpu: optional host copy: grids become exact.
        plan: made by AttentionPlanner.plan; None plans (and allocates) in the call.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: torch.Tensor | None = None
    plan: AttentionPlan | None = None

    def with_plan(self, plan: AttentionPlan) -> PagedBatch:
        return replace(self, plan=plan)


@dataclass(frozen=True)
class AttentionOptions:
    """What is computed, apart from the batch.

    Attributes:
        scale: factor on the logits, > 0, usually head_size ** -0.5.
        causal: a query sees keys up to its own position.
        sliding_window: total window, the query's own position included.
        softcap: cap * tanh(score / cap), after scaling, before masking; None or 0: off.
        alibi_slopes: [num_query_heads] float32, times (key - query position).
        sinks: [num_query_heads], extra logit in the denominator.
        k_scale, v_scale: of fp8 caches; ignored for caches that are not quantised.
    """

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    out: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attend each query token to its request's paged KV cache.

    out[t, h] = softmax(scale * q[t, h] . K[h // num_queries_per_kv]^T) V, over the keys
    of t's request that options let it see. Rows that see none are zero.

    Args:
        query: [num_tokens, num_query_heads, head_size], fp16, bf16 or fp32, last stride
            1. Rows past query_start_loc[-1] are padding.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size],
            query's dtype, last stride 1, other strides free and unrelated.
        batch: the step. With batch.plan the call allocates nothing and can be captured
            in a CUDA or HIP graph.
        options: masks, scale and the like.
        out: like query; rows of the batch are written, padding is left alone.
        key, value: [num_tokens, num_kv_heads, head_size], this step's new tokens,
            already in the cache; a kernel may read them from here instead.
        config: launch parameters; None means the plan's, or default_config().

    Returns:
        out.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.

    Numerics: scores and sums in fp32, probabilities rounded to the value's dtype.
    Bitwise repeatable for one config and batch.
    Source: FlashAttention-2 (Dao, 2023); Flash-Decoding (Dao et al., 2023).
    """
    plan = batch.plan
    planned_before = plan is not None
    if plan is None:
        check_attention(query, key_cache, value_cache, batch, options, out)
        if query.device.type == "cpu":
            check_contents(query, key_cache, batch, options)
        batch = _plan_now(query, key_cache, batch, options, config)
        plan = batch.plan
        assert plan is not None
    elif config is not None and config != plan.planner.config:
        raise bad_argument(
            "config",
            "None or the one the plan was made with",
            config,
            "pass the config to AttentionPlanner instead",
        )
    planner = plan.planner
    if plan.num_seqs != batch.seq_lens.shape[0] or plan.num_tokens > query.shape[0]:
        raise bad_argument(
            "batch.plan",
            f"made for this step of {batch.seq_lens.shape[0]} requests and at most "
            f"{query.shape[0]} tokens",
            f"one for {plan.num_seqs} requests and {plan.num_tokens} tokens",
            "call AttentionPlanner.plan for each step",
        )
    signature = _signature(query, key_cache, value_cache, batch, options, out)
    if signature not in planner.checked:
        check_attention(query, key_cache, value_cache, batch, options, out)
        check_plan(query, key_cache, batch, options, planner)
        planner.checked.add(signature)
    if planned_before and planner.info.platform == "interpreter":
        check_contents(query, key_cache, batch, options)
    if plan.num_seqs == 0:
        return out
    common = _common_arguments(query, key_cache, value_cache, batch, options, out)
    if plan.num_items:
        _launch_decode(plan, common)
    if plan.num_tiles:
        _launch_prefill(plan, common)
    return out


@dataclass(frozen=True)
class _Common:
    """Arguments that the decode and prefill kernels share, in their order."""

    out: torch.Tensor
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: PagedBatch
    inputs: tuple[Any, ...]
    strides: tuple[int, ...]
    scalars: tuple[Any, ...]
    flags: dict[str, Any]


def _common_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    out: torch.Tensor,
) -> _Common:
    assert batch.plan is not None
    planner = batch.plan.planner
    window, softcap = options.sliding_window, options.softcap
    # Unused pointers still need a tensor; the flag keeps them unread.
    sinks = options.sinks if options.sinks is not None else planner.header
    slopes = options.alibi_slopes
    slopes = slopes if slopes is not None else planner.header
    return _Common(
        out=out,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        batch=batch,
        inputs=(
            batch.block_table, batch.query_start_loc, batch.seq_lens, sinks, slopes,
        ),
        strides=(
            *out.stride()[:2], *query.stride()[:2],
            *key_cache.stride()[:3], *value_cache.stride()[:3],
            batch.block_table.stride(0),
        ),
        scalars=(
            window or 0,
            float(options.scale * LOG2E),
            float(options.scale / softcap) if softcap else 0.0,
            float(softcap * LOG2E) if softcap else 0.0,
        ),
        flags={
            "CAUSAL": options.causal,
            "HAS_WINDOW": window is not None,
            "SOFTCAP": bool(softcap),
            "ALIBI": options.alibi_slopes is not None,
            "SINKS": options.sinks is not None,
            "NUM_QUERIES_PER_KV": planner.queries_per_kv,
            "BLOCK_SIZE": planner.block_size,
            "HEAD_SIZE": planner.head_size,
            "HEAD_SIZE_PADDED": planner.head_size_padded,
            "EMULATE_BF16": planner.emulate_bf16,
        },
    )  # fmt: skip


def _launch_decode(plan: AttentionPlan, common: _Common) -> None:
    planner = plan.planner
    config, merge = planner.config.decode, planner.config.merge
    num_rows = plan.row_blocks * plan.block_m
    _decode_kernel[(plan.num_items * planner.num_kv_heads, plan.row_blocks)](
        common.out, planner.partial, planner.lse,
        common.query, common.key_cache, common.value_cache, *common.inputs,
        planner.header, planner.items, planner.counts,
        *common.strides, num_rows, *common.scalars,
        **common.flags, NUM_KV_HEADS=planner.num_kv_heads, BLOCK_M=plan.block_m,
        BLOCK_N=config["BLOCK_N"], NUM_STAGES=config["num_stages"],
        **config.options(planner.info.platform),
    )  # fmt: skip
    if not plan.may_split:
        return
    rows = plan.decode_query_len * planner.num_query_heads
    _merge_kernel[(plan.num_seqs, rows)](
        common.out, planner.partial, planner.lse, common.batch.query_start_loc,
        planner.splits, planner.counts, *common.strides[:2], num_rows,
        NUM_KV_HEADS=planner.num_kv_heads, NUM_QUERIES_PER_KV=planner.queries_per_kv,
        HEAD_SIZE=planner.head_size, HEAD_SIZE_PADDED=planner.head_size_padded,
        EMULATE_BF16=planner.emulate_bf16, BLOCK_SPLITS=merge["BLOCK_SPLITS"],
        **merge.options(planner.info.platform),
    )  # fmt: skip


def _launch_prefill(plan: AttentionPlan, common: _Common) -> None:
    planner = plan.planner
    config = planner.config.prefill
    block_n, load = config["BLOCK_N"], config["LOAD"]
    key_cache: Any = common.key_cache
    value_cache: Any = common.value_cache
    if load == "descriptor" and not _fits_descriptors(key_cache, value_cache, block_n):
        load = "pointer"
    if load == "descriptor":
        key_cache = _descriptor(key_cache, block_n, planner.head_size_padded)
        value_cache = _descriptor(value_cache, block_n, planner.head_size_padded)
    pack = config["PACK"]
    _prefill_kernel[(plan.num_tiles, planner.num_query_heads // pack)](
        common.out, common.query, key_cache, value_cache, *common.inputs,
        planner.header, planner.tiles, planner.counts,
        *common.strides, *common.scalars,
        **common.flags, BLOCK_M=config["BLOCK_M"], BLOCK_N=block_n, PACK=pack,
        LOAD=load, NUM_STAGES=config["num_stages"],
        **config.options(planner.info.platform),
    )  # fmt: skip


def _fits_descriptors(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_n: int
) -> bool:
    """Whether descriptors can fetch K and V tiles: alignment, tile within a block."""
    if key_cache.shape[1] % block_n:
        return False
    for cache in (key_cache, value_cache):
        size = cache.element_size()
        if cache.data_ptr() % 16 or any(s * size % 16 for s in cache.stride()[:3]):
            return False
    return True


def _descriptor(cache: torch.Tensor, block_n: int, head_size_padded: int) -> Any:
    """Host-made descriptor of [num_blocks, num_kv_heads, block_size, head_size].

    It travels by value in the launch's parameters: safe in a captured graph as long as
    the cache stays where it is, like any pointer.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    stride_block, stride_slot, stride_head, _ = cache.stride()
    return TensorDescriptor(
        cache,
        [num_blocks, num_kv_heads, block_size, head_size],
        [stride_block, stride_head, stride_slot, 1],
        [1, 1, block_n, head_size_padded],
    )


def _plan_now(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    config: AttentionConfig | None,
) -> PagedBatch:
    num_tokens, num_query_heads, head_size = query.shape
    planner = AttentionPlanner(
        num_query_heads=num_query_heads,
        num_kv_heads=key_cache.shape[2],
        head_size=head_size,
        dtype=query.dtype,
        block_size=key_cache.shape[1],
        max_num_seqs=batch.seq_lens.shape[0],
        max_num_tokens=num_tokens,
        sliding_window=options.sliding_window,
        causal=options.causal,
        device=query.device,
        config=config,
    )
    return planner.plan(batch, num_tokens)


def _signature(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    out: torch.Tensor,
) -> tuple[object, ...]:
    """What the checks depend on; a plan's calls repeat it layer after layer."""
    sinks, slopes = options.sinks, options.alibi_slopes
    return (
        query.shape[1:], query.stride(), query.dtype, query.device,
        key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device,
        value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.device,
        out.shape[1:], out.stride(), out.dtype, out.device,
        out.shape[0] < query.shape[0],
        batch.block_table.dtype, batch.query_start_loc.dtype, batch.seq_lens.dtype,
        batch.seq_lens.shape[0] == batch.block_table.shape[0],
        batch.query_start_loc.shape[0] - batch.seq_lens.shape[0],
        batch.block_table.dim(), batch.block_table.stride(-1),
        batch.block_table.shape[-1] == 0,
        options.scale, options.causal, options.sliding_window, options.softcap,
        None if sinks is None else (sinks.shape, sinks.device, sinks.dtype),
        None if slopes is None else (slopes.shape, slopes.device, slopes.dtype),
    )  # fmt: skip
