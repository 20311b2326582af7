# SPDX-License-Identifier: Apache-2.0
"""What `paged_attention` looks up its launches by, split by how often it changes.

Checks and launches depend on layouts, dtypes, devices and options, not on addresses and
numbers of tokens. Of a layer's caches and options that part stays, so it is made once;
of query and output it is made anew at every call.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import TYPE_CHECKING, Any

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


class _Look:
    """Layouts, dtypes and devices of tensors, to compare others with."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._looks = [_look(tensor) for tensor in tensors]

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether so many other tensors look the same."""
        return [_look(tensor) for tensor in tensors] == self._looks


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def look_of(*tensors: torch.Tensor) -> Any:
    """Something whose `check(*others)` says whether others look like these.

    Shapes, strides, dtypes and devices count. It is compared with the step's layer
    before, in a fraction of the time that a signature takes.
    """
    guards = _tensor_guards()
    if guards is None:
        return _Look(tensors)
    return guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


@functools.cache
def _tensor_guards() -> Any:
    """What torch.compile compares tensors with, at a quarter of our own time.

    None where torch has it no longer, or takes other arguments.
    """
    row = torch.empty(2, 3)
    try:
        made: Any = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        guards = made(row, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
        others = (row[:1], row.double(), torch.empty(3, 2).t())
        if not guards.check(row) or any(guards.check(other) for other in others):
            return None
    except Exception:  # a private interface: whatever it does, ours will do
        return None
    return made


def unusual(
    layer: AttentionLayer, address_bits: int, tensors: tuple[torch.Tensor, ...]
) -> tuple[object, ...]:
    """What launches depend on beside that: empty unless something is out of the way.

    Args:
        layer: its sinks and slopes, and its caches' alignment.
        address_bits: the addresses of `tensors`, or'ed.
        tensors: query, output, and what else the step reads.
    """
    found: tuple[object, ...] = ()
    key_ptr, value_ptr = layer.addresses
    if _direct.ON_HIP or (address_bits | key_ptr | value_ptr) & 15:
        tensors = (*tensors, layer.key_cache, layer.value_cache)
        found = tuple(map(pointer_class, tensors))
    if layer.per_head:
        options = layer.options
        found = (*found, *map(_per_head, (options.sinks, options.alibi_slopes)))
    return found


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
