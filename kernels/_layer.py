# SPDX-License-Identifier: Apache-2.0
"""What `paged_attention` looks up its launches by, split by how often it changes.

Checks and launches depend on layouts, dtypes, devices and options, not on addresses and
numbers of tokens. Of a layer's caches and options that part stays, so it is made once;
of query and output it is made anew at every call.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from portable_backend.kernels import _direct
from portable_backend.kernels._direct import Bindings, pointer_class

if TYPE_CHECKING:
    from portable_backend.kernels.attention import AttentionOptions

_KINDS = Bindings()
_NEXT_KIND = itertools.count()


class AttentionLayer:
    """One layer's caches and options, for callers that use them again and again.

    Whoever moves a cache or changes its layout in place makes another one. What sinks
    and slopes hold, and where, may change.

    Args:
        key_cache, value_cache, options: as for `paged_attention`, which checks them.
    """

    __slots__ = (
        "addresses", "key_cache", "kind", "options", "per_head", "value_cache",
    )  # fmt: skip

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        self.key_cache = key_cache
        self.value_cache = value_cache
        self.options = options
        self.addresses = (key_cache.data_ptr(), value_cache.data_ptr())
        self.per_head = options.sinks is not None or options.alibi_slopes is not None
        look = (
            key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device,
            value_cache.shape, value_cache.stride(), value_cache.dtype,
            value_cache.device, options.scale, options.causal, options.sliding_window,
            options.softcap,
        )  # fmt: skip
        kind = _KINDS.get(look)
        if kind is None:
            kind = _KINDS[look] = next(_NEXT_KIND)
        # A number of its own for each look: quicker to compare than the look.
        self.kind: int = kind


def look_of(
    query: torch.Tensor,
    out: torch.Tensor,
    layer: AttentionLayer,
    addresses: tuple[int, int],
    new: tuple[torch.Tensor, torch.Tensor] | None,
    new_addresses: tuple[int, int],
) -> tuple[object, ...]:
    """What checks and launches depend on beside the step and the layer's kind.

    It is compared with that of the step's layer before, not hashed: made in a third of
    the time of a signature. The tensors' sizes are part of it.

    Args:
        addresses: of out and query.
        new: this step's keys and values, where they are read.
        new_addresses: theirs.
    """
    key_ptr, value_ptr = layer.addresses
    look: tuple[object, ...] = (
        query.shape, query.stride(), query.dtype, query.device,
        out.shape, out.stride(), out.dtype, out.device,
    )  # fmt: skip
    if _direct.ON_HIP or (addresses[0] | addresses[1] | key_ptr | value_ptr) & 15:
        tensors = (out, query, layer.key_cache, layer.value_cache)
        look = (*look, *map(pointer_class, tensors))
    if layer.per_head:
        options = layer.options
        look = (*look, *map(_per_head, (options.sinks, options.alibi_slopes)))
    if new is not None:
        key, value = new
        look = (
            *look, key.shape, key.stride(), key.dtype, key.device,
            value.shape, value.stride(), value.dtype, value.device,
            (new_addresses[0] | new_addresses[1]) & 15 == 0,
        )  # fmt: skip
    return look


def signature_of(
    query: torch.Tensor,
    out: torch.Tensor,
    layer: AttentionLayer,
    step_kinds: tuple[object, ...],
    merges: bool,
) -> tuple[tuple[object, ...], int, int]:
    """What checks and launches depend on, and the rows of query and out.

    Steps repeat it: the numbers of tokens and of requests are no part of it.

    Args:
        step_kinds: all of the step that decides which binaries are launched.
        merges: whether the merge kernel is.
    """
    # No name for the shapes' other axes: tensors of another rank get here too.
    num_tokens, *query_axes = query.shape or (0,)
    out_tokens, *out_axes = out.shape or (0,)
    tensors = (out, query, layer.key_cache, layer.value_cache)
    signature: tuple[object, ...] = (
        *query_axes, query.stride(), query.dtype, query.device, num_tokens == 0,
        *out_axes, out.stride(), out.dtype, out.device, out_tokens == 0,
        layer.kind, step_kinds, merges, *map(pointer_class, tensors),
    )  # fmt: skip
    if layer.per_head:
        options = layer.options
        signature = (*signature, *map(_per_head, (options.sinks, options.alibi_slopes)))
    return signature, num_tokens, out_tokens


def _per_head(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    kind = pointer_class(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, kind


def new_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Of this step's keys or values; the number of tokens is no part of it."""
    aligned = tensor.data_ptr() % 16 == 0
    return tensor.stride(), tensor.shape[1:], tensor.dtype, tensor.device, aligned
