# SPDX-License-Identifier: Apache-2.0
"""What the kernels must compute, in plain fp32 torch: the oracle of every check.

Pure functions, one request at a time, no code shared with the kernels. They read only
what a kernel may read, so poison elsewhere never reaches the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from portable_backend.kernels.attention import AttentionOptions, PagedBatch


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attend each query token to its request's paged KV cache.

    Args:
        query: [num_tokens, num_query_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size].
        batch, options: as for `paged_attention`.
        dtype: precision of all arithmetic: fp32 for the oracle, fp64 where the inputs
            are fp32 themselves, the query's own dtype for the error that a plain torch
            implementation would make.

    Returns:
        [num_tokens, num_query_heads, head_size] in `dtype`; rows that belong to no
        request are NaN, rows that see no key are zero.
    """
    num_tokens, num_query_heads, head_size = query.shape
    out = torch.full(
        (num_tokens, num_query_heads, head_size),
        float("nan"),
        dtype=dtype,
        device=query.device,
    )
    starts = batch.query_start_loc.tolist()
    seq_lens = batch.seq_lens.tolist()
    for i, seq_len in enumerate(seq_lens):
        rows = slice(starts[i], starts[i + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        keys = _gather(key_cache, batch.block_table[i], seq_len).to(dtype)
        values = _gather(value_cache, batch.block_table[i], seq_len).to(dtype)
        visible = _visible(query_len, seq_len, options, query.device)
        # A key that no row may see must not touch the result, even as 0 * NaN.
        seen = visible.any(0)
        values = torch.where(seen[:, None, None], values, 0)
        keys = torch.where(seen[:, None, None], keys, 0)
        out[rows] = _attend(query[rows].to(dtype), keys, values, visible, options)
    return out


def _gather(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Rows 0..seq_len-1 of one request: [seq_len, num_kv_heads, head_size]."""
    block_size = cache.shape[1]
    position = torch.arange(seq_len, device=cache.device)
    return cache[blocks[position // block_size].long(), position % block_size]


def _visible(
    query_len: int, seq_len: int, options: AttentionOptions, device: torch.device
) -> torch.Tensor:
    """[query_len, seq_len] bool: may this query see that key?"""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)[None, :]
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    if options.causal:
        visible &= key_pos <= query_pos
    if options.sliding_window is not None:
        visible &= (query_pos - key_pos).abs() < options.sliding_window
    return visible


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    query_len, num_query_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    repeats = num_query_heads // num_kv_heads
    keys = keys.repeat_interleave(repeats, 1)
    values = values.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        query_pos = torch.arange(seq_len - query_len, seq_len, device=query.device)
        key_pos = torch.arange(seq_len, device=query.device)
        distance = (key_pos[None, :] - query_pos[:, None]).to(scores.dtype)
        scores = (
            scores + options.alibi_slopes.to(scores.dtype)[:, None, None] * distance
        )
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[:, None, None]
        scores = torch.cat([scores, sinks.expand(-1, query_len, 1)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probs = torch.softmax(scores.to(wide), -1).to(scores.dtype)
    if options.sinks is None:  # a row that sees nothing gives zeros
        probs = torch.where(visible.any(-1, keepdim=True), probs, 0)
    return torch.einsum("hqk,khd->qhd", probs[..., :seq_len], values)


def write_kv_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of both caches with the new tokens in their slots.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size]; rows past slot_mapping's
            length are ignored.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size].
        slot_mapping: [<= num_tokens] int64 flat slots; negative ones are skipped.
    """
    block_size = key_cache.shape[1]
    new_caches = []
    for new, cache in ((key, key_cache), (value, value_cache)):
        copy = cache.clone()
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                copy[slot // block_size, slot % block_size] = new[token].to(cache.dtype)
        new_caches.append(copy)
    return new_caches[0], new_caches[1]


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (+ residual) / rms over the last axis, times weight, all in fp32.

    Returns:
        (normed, x + residual or None), fp32, shaped like x.
    """
    total = x.float()
    if residual is not None:
        total = total + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    return normed, (total if residual is not None else None)
