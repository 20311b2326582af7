# SPDX-License-Identifier: Apache-2.0
"""Our kernels behind the interface of an attention benchmark: `make_call(x, out)`.

Each call plans its step and attends, as one layer of a step by itself would; a model's
other layers reuse the plan, which PORTABLE_CALL_PLAN=once shows. Made ahead is what an
engine has anyway: on the host the lengths of steps with prefills, on the device the
step's new keys and values.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from portable_backend.kernels import (
    AttentionOptions,
    AttentionPlanner,
    PagedBatch,
    paged_attention,
)


def make_call(x: dict[str, Any], out: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function without arguments that attends once.

    Args:
        x: q [num_tokens, num_query_heads, head_size]; k, v [num_blocks, block_size,
            num_kv_heads, head_size]; cu, sl, bt: query_start_loc, seq_lens and
            block_table; mq, mk: longest query and sequence; scale.
        out: like q.
    """
    query, key_cache, value_cache = x["q"], x["k"], x["v"]
    num_tokens, num_query_heads, head_size = query.shape
    planner = AttentionPlanner(
        num_query_heads=num_query_heads,
        num_kv_heads=key_cache.shape[2],
        head_size=head_size,
        dtype=query.dtype,
        block_size=key_cache.shape[1],
        max_num_seqs=x["sl"].shape[0],
        max_num_tokens=num_tokens,
        device=query.device,
    )
    query_lens, seq_lens = torch.diff(x["cu"]).cpu(), x["sl"].cpu()
    prefills = query_lens > planner.max_decode_query_len
    no_context = bool(prefills.any() and (seq_lens <= query_lens)[prefills].all())
    key = value = None
    if no_context:
        key, value = (_new_tokens(cache, x) for cache in (key_cache, value_cache))
    batch = PagedBatch(
        query_start_loc=x["cu"],
        seq_lens=x["sl"],
        block_table=x["bt"],
        max_query_len=x["mq"],
        max_seq_len=x["mk"],
        query_start_loc_cpu=x["cu"].cpu(),
        no_context=no_context,
    )
    options = AttentionOptions(scale=x["scale"])
    plan_once = os.environ.get("PORTABLE_CALL_PLAN") == "once"
    planned = planner.plan(batch, num_tokens)

    def call() -> torch.Tensor:
        step = planned if plan_once else planner.plan(batch, num_tokens)
        return paged_attention(
            query, key_cache, value_cache, step, options, out=out, key=key, value=value
        )

    return call


def _new_tokens(cache: torch.Tensor, x: dict[str, Any]) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_size]: what the layer has just written there."""
    query_lens = torch.diff(x["cu"]).long()
    seq = torch.repeat_interleave(query_lens)
    first = (x["sl"] - query_lens - x["cu"][:-1])[seq]
    position = first + torch.arange(len(seq), device=seq.device)
    block_size = cache.shape[1]
    blocks = x["bt"][seq, position // block_size].long()
    return cache[blocks, position % block_size]
