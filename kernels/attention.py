# SPDX-License-Identifier: Apache-2.0
"""Paged attention for any mix of prefill, chunked prefill and decode in one call.

`paged_attention` validates, plans the step if nobody has, and launches up to three
kernels: prefill (long queries), decode (the rest, keys split), merge (of the splits).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from portable_backend.errors import bad_argument
from portable_backend.kernels._checks import (
    check_attention,
    check_batch,
    check_contents,
    check_plan,
)
from portable_backend.kernels._descriptors import (
    CacheDescriptors,
    NewTokenDescriptors,
    fits_descriptors,
    fits_new_descriptors,
)
from portable_backend.kernels._direct import (
    Gate,
    Launch,
    pointer_class,
)
from portable_backend.kernels._layer import (
    AttentionLayer,
    look_of,
    new_layout,
    signature_of,
    unusual,
)
from portable_backend.kernels._softmax import LOG2E
from portable_backend.kernels.config import AttentionConfig, KernelConfig
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
        no_context: promise that no request with more new tokens than a decode has keys
            in the cache from before this step; prefill may then read `key` and `value`
            instead of the cache. A broken promise gives NaN.
        plan: made by AttentionPlanner.plan; None plans (and allocates) in the call.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: torch.Tensor | None = None
    no_context: bool = False
    plan: AttentionPlan | None = None
    # Made by the step's first call; a copy with other tensors starts without.
    _step: _Step | None = field(default=None, init=False, repr=False, compare=False)

    def with_plan(self, plan: AttentionPlan) -> PagedBatch:
        planned = object.__new__(PagedBatch)  # as replace() does it in 3 us
        planned.__dict__.update(self.__dict__, plan=plan, _step=None)
        return planned


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
    of t's request that options let it see. Rows that see none are zero. Scores are
    taken to be finite and above -1e20: an infinite one may come out as a large one.

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
            already in the cache; a kernel may read them from here instead, if it can:
            other layouts than the cache's dtype and heads are passed over.
        config: launch parameters; None means the plan's, or default_config().

    Returns:
        out.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.

    Numerics: scores and sums in fp32, probabilities rounded to the value's dtype.
    Bitwise repeatable for one config and batch.
    Source: FlashAttention-2 (Dao, 2023); Flash-Decoding (Dao et al., 2023).
    """
    layer = AttentionLayer(key_cache, value_cache, options)
    return attend(query, layer, batch, out=out, key=key, value=value, config=config)


def attend(
    query: torch.Tensor,
    layer: AttentionLayer,
    batch: PagedBatch,
    *,
    out: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """`paged_attention` for a layer that was looked at before: less host time."""
    key_cache, value_cache, options = layer.key_cache, layer.value_cache, layer.options
    plan = batch.plan
    planned_before = plan is not None
    if plan is None:
        check_attention(query, key_cache, value_cache, batch, options, out)
        if query.device.type == "cpu":
            check_contents(query, key_cache, batch, options)
        batch = _plan_now(query, key_cache, batch, options, config)
        plan = batch.plan
        assert plan is not None
    elif config is not None and config != plan.config:
        raise bad_argument(
            "config",
            "None or the one the plan was made with",
            config,
            "pass the config to AttentionPlanner instead",
        )
    planner = plan.planner
    if plan.number != planner.num_plans:
        raise bad_argument(
            "batch.plan",
            f"its planner's latest, number {planner.num_plans}",
            f"number {plan.number}, whose buffers are overwritten",
            "plan each step right before its layers, or use two planners",
        )
    step = batch._step
    if step is None:
        step = _Step(batch, plan, query.device)
        object.__setattr__(batch, "_step", step)
    merger = plan.merger
    merges = merger == "kernel" or (merger == "captured" and capturing())
    addresses = out_ptr, query_ptr = out.data_ptr(), query.data_ptr()
    tensors: tuple[torch.Tensor, ...] = (query, out)
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    new_addresses = key_ptr, value_ptr = 0, 0
    if step.reads_new and key is not None and value is not None:
        new = (key, value)
        new_addresses = key_ptr, value_ptr = key.data_ptr(), value.data_ptr()
        tensors = (query, out, key, value)
    beside = unusual(layer, out_ptr | query_ptr | key_ptr | value_ptr, tensors)
    kind = (layer.kind, merges, len(tensors))
    seen = step.seen.get(kind)
    if seen is None or seen.beside != beside or not seen.look.check(*tensors):
        binding = _binding_for(query, layer, batch, plan, step, out, new, merges)
        seen = step.seen[kind] = _Seen(tensors, beside, binding)
    binding = seen.binding
    if plan.num_seqs == 0:
        return out
    if planned_before and planner.info.platform == "interpreter":
        check_contents(query, key_cache, batch, options)
    sinks, slopes = options.sinks, options.alibi_slopes
    stream = planner.gate.stream() if binding.ready else None
    if stream is None:
        _launch(
            binding,
            _Rest(binding, plan, step, new, direct=False),
            None, (out, query), (key_cache, value_cache), new,
            (sinks, slopes) if layer.per_head else None,
        )  # fmt: skip
        binding.ready = all(launch.ready for launch in binding.launches)
        return out
    rest = seen.rest
    if rest is None:
        rest = seen.rest = _Rest(binding, plan, step, new, direct=True)
    per_head = None
    if layer.per_head:
        per_head = (
            None if sinks is None else sinks.data_ptr(),
            None if slopes is None else slopes.data_ptr(),
        )
    _launch(binding, rest, stream, addresses, layer.addresses, new_addresses, per_head)
    return out


def _binding_for(
    query: torch.Tensor,
    layer: AttentionLayer,
    batch: PagedBatch,
    plan: AttentionPlan,
    step: _Step,
    out: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    merges: bool,
) -> _Binding:
    """The launches for tensors of this look, checked once in the planner's life."""
    signature, num_tokens, out_tokens = signature_of(
        query, out, layer, step.kinds, merges
    )
    if new is not None:
        needed = plan.num_tokens or num_tokens
        for name, tensor in zip(("key", "value"), new, strict=True):
            if tensor.dim() != 3 or tensor.shape[0] < needed:
                raise bad_argument(
                    name,
                    f"[at least {needed} tokens, num_kv_heads, head_size]",
                    list(tensor.shape),
                    "pass the step's new tokens, or None",
                )
        signature = (*signature, *map(new_layout, new))
    bindings = plan.planner.bindings
    binding: _Binding | None = bindings.get(signature)
    if binding is None or out_tokens < num_tokens or plan.num_tokens > num_tokens:
        # Raises where a tensor has too few rows, whatever is bound already.
        binding = _bind(query, layer, batch, out, new, merges)
        bindings[signature] = binding
    return binding


# Up to here the machine's own tanh was compared with the exact one (docs/kernels.md).
_FAST_TANH_CAP = 50


def _softcap_by(softcap: float | None, dtype: torch.dtype) -> int:
    """How exact tanh must be: to a part of its result, or only of the cap.

    An error of 2^-22 of the cap is lost in the rounding of 16-bit probabilities up to
    caps of hundreds; models use 20 to 50.
    """
    if not softcap:
        return 0
    return 1 if dtype.itemsize == 2 and softcap <= 256 else 2


def _delay_by(
    config: KernelConfig, causal: bool, dtype: torch.dtype, platform: str
) -> int:
    """How probabilities travel to the next tile: 0 not, 1 in pairs, 2 as they are.

    Without a fixed reference, and in calls that are not causal, there is no such loop.
    """
    if not config["DELAY_PV"] or config["REFERENCE"] == "running" or not causal:
        return 0
    return 1 if platform == "cuda" and dtype.itemsize == 2 else 2


def capturing() -> bool:
    """Whether launches go into a graph now instead of to the device."""
    return _gpu_is_there() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _gpu_is_there() -> bool:
    return torch.cuda.is_available()


class _Seen:
    """The look of a layer's tensors in a step, its launches, and their arguments."""

    __slots__ = ("beside", "binding", "look", "rest")

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        beside: tuple[object, ...],
        binding: _Binding,
    ) -> None:
        self.look = look_of(*tensors)
        self.beside = beside
        self.binding = binding
        self.rest: _Rest | None = None  # with addresses, for direct launches


class _Step:
    """A planned batch as every layer of the step sees it."""

    __slots__ = (
        "addresses", "kinds", "reads_new", "seen", "stride_table", "tensors",
    )  # fmt: skip

    def __init__(
        self, batch: PagedBatch, plan: AttentionPlan, device: torch.device
    ) -> None:
        check_batch(batch, device)
        if plan.num_seqs != batch.seq_lens.shape[0]:
            raise _another_step(batch, plan)
        self.tensors = (batch.block_table, batch.query_start_loc)
        table, starts = self.tensors
        self.addresses = (table.data_ptr(), starts.data_ptr())
        self.stride_table = batch.block_table.stride(0)
        self.reads_new = (
            plan.num_tiles > 0
            and plan.no_context
            and plan.config.prefill["LOAD"] == "new"
        )
        # By kind of layer, who merges, and the number of tensors.
        self.seen: dict[tuple[int, bool, int], _Seen] = {}
        # All of the step that decides which binaries are launched.
        self.kinds = (
            plan.choice.number, plan.num_items > 0,
            plan.num_tiles > 0, plan.block_m,
            *(pointer_class(tensor) for tensor in self.tensors),
        )  # fmt: skip


def _another_step(
    batch: PagedBatch, plan: AttentionPlan, num_tokens: int | None = None
) -> ValueError:
    at_most = "" if num_tokens is None else f" and at most {num_tokens} tokens"
    return bad_argument(
        "batch.plan",
        f"made for this step of {batch.seq_lens.shape[0]} requests{at_most}",
        f"one for {plan.num_seqs} requests and {plan.num_tokens} tokens",
        "call AttentionPlanner.plan for each step",
    )


class _Binding:
    """A signature that passed the checks, and its launches."""

    __slots__ = (
        "decode", "decode_descriptors", "launches", "merge", "new_descriptors",
        "prefill", "prefill_descriptors", "ready", "scalars", "strides",
    )  # fmt: skip

    def __init__(
        self,
        strides: tuple[int, ...],
        scalars: tuple[Any, ...],
        launches: tuple[Launch, Launch, Launch],
        needed: tuple[bool, bool, bool],
        decode_descriptors: CacheDescriptors | None,
        prefill_descriptors: CacheDescriptors | None,
        new_descriptors: NewTokenDescriptors | None,
    ) -> None:
        self.strides = strides
        self.scalars = scalars
        self.decode, self.merge, self.prefill = (
            launch if need else None
            for launch, need in zip(launches, needed, strict=True)
        )
        self.launches = [x for x in (self.decode, self.merge, self.prefill) if x]
        self.decode_descriptors = decode_descriptors
        self.prefill_descriptors = prefill_descriptors
        self.new_descriptors = new_descriptors
        self.ready = False


def _bind(
    query: torch.Tensor,
    layer: AttentionLayer,
    batch: PagedBatch,
    out: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    merges: bool,
) -> _Binding:
    """Check everything and fix what the layers of one signature share."""
    key_cache, value_cache, options = layer.key_cache, layer.value_cache, layer.options
    plan = batch.plan
    assert plan is not None
    planner = plan.planner
    check_attention(query, key_cache, value_cache, batch, options, out)
    if plan.num_tokens > query.shape[0]:
        raise _another_step(batch, plan, query.shape[0])
    check_plan(query, key_cache, batch, options, planner)
    window, softcap = options.sliding_window, options.softcap
    config, platform = plan.config, planner.info.platform
    caches = (key_cache, value_cache)
    padded = planner.head_size_padded
    # A descriptor cannot leave out keys before a window, whose values may be NaN; in
    # prefill they are set to zero afterwards.
    decode_load, decode_descriptors = _how_to_load(
        caches, config.decode, padded, "pointer" if window is not None else None
    )
    prefill_load, prefill_descriptors = _how_to_load(caches, config.prefill, padded)
    new_descriptors = None
    if new is not None and all(
        fits_new_descriptors(tensor, key_cache) for tensor in new
    ):
        prefill_load = "new"
        tile = (config.prefill["BLOCK_N"], padded)
        new_descriptors = NewTokenDescriptors(new, tile)
    decode_options = config.decode.options(platform)
    merge_options = config.merge.options(platform)
    prefill_options = config.prefill.options(platform)
    overlap = bool(
        plan.num_tiles and plan.num_items and decode_options.get("launch_pdl")
    )
    softcap_by = _softcap_by(softcap, planner.dtype)
    sizes = {
        "NUM_QUERIES_PER_KV": planner.queries_per_kv,
        "HEAD_SIZE": planner.head_size,
        "HEAD_SIZE_PADDED": planner.head_size_padded,
        "EMULATE_BF16": planner.emulate_bf16,
    }
    common = sizes | {
        "CAUSAL": options.causal,
        "HAS_WINDOW": window is not None,
        "SOFTCAP": softcap_by,
        "ALIBI": options.alibi_slopes is not None,
        "SINKS": options.sinks is not None,
        "BLOCK_SIZE": planner.block_size,
        "SAME_STRIDES": key_cache.stride() == value_cache.stride(),
    }
    decode = common | {
        "NUM_KV_HEADS": planner.num_kv_heads,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": config.decode["BLOCK_N"],
        "LOAD": decode_load,
        "MERGE": "last" if plan.merger and not merges else "kernel",
        "NUM_STAGES": config.decode["num_stages"],
        "OVERLAP": overlap,
        "EARLY_START": bool(decode_options.get("launch_pdl")) and not overlap,
    }
    merge = sizes | {
        "NUM_KV_HEADS": planner.num_kv_heads,
        "BLOCK_SPLITS": config.merge["BLOCK_SPLITS"],
        "EARLY_START": bool(merge_options.get("launch_pdl")),
    }
    can_be_fast = platform == "cuda" and planner.dtype == torch.bfloat16
    if softcap_by == 1 and can_be_fast and (softcap or 0) <= _FAST_TANH_CAP:
        softcap_by = 3  # prefill computes more than it reads
    prefill = common | {
        "SOFTCAP": softcap_by,
        "BLOCK_M": config.prefill["BLOCK_M"],
        "BLOCK_N": config.prefill["BLOCK_N"],
        "PACK": config.prefill["PACK"],
        "LOAD": prefill_load,
        "REFERENCE": config.prefill["REFERENCE"],
        "QUERY": config.prefill["QUERY"],
        "DELAY_PV": _delay_by(config.prefill, options.causal, planner.dtype, platform),
        "NUM_STAGES": config.prefill["num_stages"],
        "OVERLAP": overlap,
        "EARLY_START": bool(prefill_options.get("launch_pdl")),
    }
    gate = planner.gate
    launches = (
        Launch(_decode_kernel, decode, decode_options, gate),
        Launch(_merge_kernel, merge, merge_options, gate),
        Launch(_prefill_kernel, prefill, prefill_options, gate),
    )
    return _Binding(
        strides=(
            *out.stride()[:2], *query.stride()[:2],
            *key_cache.stride()[:3], *value_cache.stride()[:3],
        ),
        scalars=(
            window or 0,
            float(options.scale * LOG2E),
            float(options.scale / softcap) if softcap else 0.0,
            float(softcap * LOG2E) if softcap else 0.0,
        ),
        launches=launches,
        needed=(plan.num_items > 0, merges, plan.num_tiles > 0),
        decode_descriptors=decode_descriptors,
        prefill_descriptors=prefill_descriptors,
        new_descriptors=new_descriptors,
    )  # fmt: skip


def _how_to_load(
    caches: tuple[torch.Tensor, torch.Tensor],
    config: KernelConfig,
    head_size_padded: int,
    forced: str | None = None,
) -> tuple[str, CacheDescriptors | None]:
    """LOAD for tiles of the cache, and the descriptors it needs.

    "new" falls back to descriptors of the cache where the new tokens cannot be read.
    """
    block_n = config["BLOCK_N"]
    if (
        forced == "pointer"
        or config["LOAD"] == "pointer"
        or not all(fits_descriptors(cache, block_n) for cache in caches)
    ):
        return "pointer", None
    return "descriptor", CacheDescriptors(caches, (block_n, head_size_padded))


class _Rest:
    """Grids, and all arguments that the layers of a step share.

    Args:
        binding, plan, step: what is launched.
        new: the step's keys and values; only their numbers count.
        direct: with addresses instead of tensors.
    """

    __slots__ = (
        "decode", "decode_grid", "merge", "merge_grid", "new_rows", "partial",
        "prefill", "prefill_grid",
    )  # fmt: skip

    def __init__(
        self,
        binding: _Binding,
        plan: AttentionPlan,
        step: _Step,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        direct: bool,
    ) -> None:
        planner = plan.planner
        table, starts = step.addresses if direct else step.tensors
        buffers = planner.addresses if direct else planner.buffers
        header, items, splits, tiles, counts, arrivals, partial, lse = buffers
        # Unused pointers still need a tensor; a flag keeps them unread.
        per_head = (header, header)
        numbers = (*binding.strides, step.stride_table)
        num_rows = plan.row_blocks * plan.block_m
        self.prefill = (
            table, *per_head, header, tiles, counts, *numbers, *binding.scalars
        )  # fmt: skip
        self.prefill_grid = (
            plan.num_tiles, planner.num_query_heads // plan.config.prefill["PACK"]
        )  # fmt: skip
        self.partial = (partial, lse)
        self.decode = (
            table, *per_head, header, items, splits, arrivals, counts, *numbers,
            num_rows, *binding.scalars,
        )  # fmt: skip
        self.decode_grid = (plan.num_items * planner.num_kv_heads, plan.row_blocks)
        self.new_rows = (0, 0) if new is None else (new[0].shape[0], new[1].shape[0])
        self.merge = (starts, splits, counts, *binding.strides[:2], num_rows)
        self.merge_grid = (
            plan.num_seqs, plan.decode_query_len * planner.num_query_heads
        )  # fmt: skip


def _launch(
    binding: _Binding,
    rest: _Rest,
    stream: int | None,
    out_and_query: tuple[Any, Any],
    caches: tuple[Any, Any],
    new: Any,
    per_head: tuple[Any, Any] | None,
) -> None:
    """Launch what the step needs, with addresses if there is a stream, else tensors.

    So are out and query, the caches, the new keys and values, sinks and slopes.

    Decode waits for nothing that prefill does: it may start where that leaves room.
    """
    out, query = out_and_query
    prefill, decode, merge = binding.prefill, binding.decode, binding.merge
    if prefill is not None:
        tiles: tuple[Any, ...] = caches
        if binding.new_descriptors is not None:
            of_new, rows = binding.new_descriptors, rest.new_rows
            if stream is None:
                tiles = of_new.describe(new, rows)
            else:
                tiles = of_new.encode(new, rows, prefill)
        elif binding.prefill_descriptors is not None:
            descriptors = binding.prefill_descriptors
            if stream is None:
                tiles = descriptors.describe(caches)
            else:
                tiles = descriptors.encode(caches, prefill)
        tail = rest.prefill if per_head is None else _with(rest.prefill, per_head)
        prefill(stream, *rest.prefill_grid, (out, query, *tiles, *tail))
    if decode is not None:
        tiles = caches
        if binding.decode_descriptors is not None:
            descriptors = binding.decode_descriptors
            if stream is None:
                tiles = descriptors.describe(caches)
            else:
                tiles = descriptors.encode(caches, decode)
        tail = rest.decode if per_head is None else _with(rest.decode, per_head)
        decode(stream, *rest.decode_grid, (out, *rest.partial, query, *tiles, *tail))
        if merge is not None:
            merge(stream, *rest.merge_grid, (out, *rest.partial, *rest.merge))


def _with(tail: tuple[Any, ...], per_head: tuple[Any, Any]) -> tuple[Any, ...]:
    """A kernel's last arguments with a layer's sinks and slopes, where it has them."""
    table, *unused = tail[:3]
    given = (
        other if own is None else own
        for own, other in zip(per_head, unused, strict=True)
    )
    return (table, *given, *tail[3:])


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
    planner.gate = Gate()  # its handles would serve one call
    return planner.plan(batch, num_tokens)
