# SPDX-License-Identifier: Apache-2.0
"""Attention over keys that lie in one piece: torch's two, and the flash_attn package.

They know no pages: each gets its keys and values gathered from the cache beforehand,
which costs them nothing here and would cost a server its time and memory.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from portable_backend.bench.inputs import Inputs
from portable_backend.errors import UnsupportedError


@dataclass
class Dense:
    """An implementation bound to inputs.

    Attributes:
        call: gives the result, in its own layout.
        rows: turns that into [num_tokens, num_query_heads, head_size], a view.
    """

    call: Callable[[], torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor]


def gathered(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of each request, each [seq_len, num_kv_heads, head_size]."""
    block_size = inputs.shape.block_size
    pairs = []
    for i, seq_len in enumerate(inputs.shape.seq_lens):
        position = torch.arange(seq_len, device=inputs.query.device)
        blocks = inputs.block_table[i, position // block_size].long()
        where = (blocks, position % block_size)
        key_cache, value_cache = inputs.caches[0]
        pairs.append((key_cache[where], value_cache[where]))
    return pairs


def _stacked(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values, each [num_seqs, heads, length, head_size]."""
    shape = inputs.shape
    if len(set(shape.query_lens)) > 1 or len(set(shape.seq_lens)) > 1:
        raise UnsupportedError("requests of different lengths, where it takes a batch")
    pairs = gathered(inputs)
    query = inputs.query.unflatten(0, (len(pairs), -1))
    keys = torch.stack([key for key, _ in pairs])
    values = torch.stack([value for _, value in pairs])
    query, keys, values = (
        x.transpose(1, 2).contiguous() for x in (query, keys, values)
    )
    return query, keys, values


def _rows_of_stacked(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def torch_sdpa(inputs: Inputs) -> Dense:
    """torch's scaled_dot_product_attention, with whatever kernel it picks.

    Raises:
        UnsupportedError: soft caps, sinks, or requests of different lengths.
    """
    shape, options = inputs.shape, inputs.options
    if options.softcap or options.sinks is not None:
        raise UnsupportedError("SDPA has neither soft caps nor sinks")
    query, keys, values = _stacked(inputs)
    query_len, seq_len = shape.query_lens[0], shape.seq_lens[0]
    plain = options.sliding_window is None and options.alibi_slopes is None
    mask: torch.Tensor | None = None
    if plain and 1 < query_len < seq_len:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(query_len, seq_len)
    elif not plain:
        mask = _mask(inputs, query.dtype)

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=plain and 1 < query_len == seq_len,
            scale=options.scale,
            enable_gqa=True,
        )

    return Dense(call, _rows_of_stacked)


def _mask(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """[query_len, seq_len] bool, or with ALiBi [num_query_heads, ...] to be added."""
    options = inputs.options
    query_len, seq_len = inputs.shape.query_lens[0], inputs.shape.seq_lens[0]
    device = inputs.query.device
    rows = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    distance = rows - torch.arange(seq_len, device=device)
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    if options.alibi_slopes is None:
        return seen
    bias = -options.alibi_slopes[:, None, None] * distance
    return bias.masked_fill(~seen, float("-inf")).to(dtype)


def flex_attention(inputs: Inputs) -> Dense:
    """torch's FlexAttention; compiled on a GPU, for this shape alone.

    Raises:
        UnsupportedError: requests of different lengths.
    """
    from torch.nn.attention import flex_attention as flex

    options = inputs.options
    query, keys, values = _stacked(inputs)
    query_len, seq_len = inputs.shape.query_lens[0], inputs.shape.seq_lens[0]
    offset, window = seq_len - query_len, options.sliding_window
    softcap, slopes, sinks = options.softcap, options.alibi_slopes, options.sinks

    def seen(batch: Any, head: Any, row: Any, column: Any) -> Any:
        distance = row + offset - column
        if window is None:
            return distance >= 0
        return (distance >= 0) & (distance < window)

    def score(value: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        if softcap:
            value = softcap * torch.tanh(value / softcap)
        if slopes is not None:
            value = value - slopes[head] * (row + offset - column)
        return value

    mask = flex.create_block_mask(
        seen, None, None, query_len, seq_len, device=query.device
    )
    settings: dict[str, Any] = {"scale": options.scale, "enable_gqa": True}
    if softcap or slopes is not None:
        settings["score_mod"] = score

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if sinks is None:
            out: torch.Tensor = flex.flex_attention(
                query, keys, values, block_mask=mask, **settings
            )
            return out
        # A sink is one more logit below the line: it scales the result.
        out, aux = flex.flex_attention(
            query,
            keys,
            values,
            block_mask=mask,
            return_aux=flex.AuxRequest(lse=True),
            **settings,
        )
        share = torch.sigmoid(aux.lse - sinks.float()[:, None])
        return (out * share[..., None]).to(query.dtype)

    run: Callable[..., torch.Tensor] = attend
    if query.device.type == "cuda":
        torch._dynamo.reset()  # or torch would give up after eight shapes
        run = torch.compile(attend, fullgraph=True, dynamic=False)
    return Dense(lambda: run(query, keys, values), _rows_of_stacked)


def flash_attn(inputs: Inputs) -> Dense:
    """The flash_attn package, FlashAttention-2 on CUDA and on ROCm.

    Raises:
        UnsupportedError: it is not installed, or has no sinks.
    """
    if importlib.util.find_spec("flash_attn") is None:
        raise UnsupportedError("the package flash_attn is not installed")
    from flash_attn import flash_attn_varlen_func

    shape, options = inputs.shape, inputs.options
    if options.sinks is not None:
        raise UnsupportedError("flash_attn has no sinks")
    pairs = gathered(inputs)
    keys, values = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    starts = torch.zeros_like(inputs.query_start_loc)
    starts[1:] = inputs.seq_lens.cumsum(0)
    window = options.sliding_window

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            inputs.query,
            keys,
            values,
            inputs.query_start_loc,
            starts,
            max(shape.query_lens),
            max(shape.seq_lens),
            softmax_scale=options.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.softcap or 0.0,
            alibi_slopes=options.alibi_slopes,
        )
        return out

    return Dense(call, lambda out: out)


DENSE: dict[str, Callable[[Inputs], Dense]] = {
    "torch_sdpa": torch_sdpa,
    "flex_attention": flex_attention,
    "flash_attn": flash_attn,
}
