# SPDX-License-Identifier: Apache-2.0
"""Host-made tensor descriptors of paged caches, kept per address.

A descriptor travels by value in the launch's parameters: safe in a captured graph as
long as the cache stays where it is, like any pointer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portable_backend.kernels._direct import Bindings


def fits_descriptors(cache: torch.Tensor, block_n: int) -> bool:
    """Whether descriptors can fetch tiles: alignment, tile within a block."""
    size = cache.element_size()
    return (
        cache.shape[1] % block_n == 0
        and cache.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 for stride in cache.stride()[:3])
    )


@dataclass(frozen=True)
class _Memory:
    """What a descriptor must know of its tensor, without keeping it alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class DescriptorMaker:
    """Descriptors of caches that differ in their address alone.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_size]; only the layout
            counts.
        tile: tokens and elements that a load fetches from one block and head.
    """

    def __init__(self, cache: torch.Tensor, tile: tuple[int, int]) -> None:
        num_blocks, block_size, num_kv_heads, head_size = cache.shape
        stride_block, stride_slot, stride_head, _ = cache.stride()
        self._shape = [num_blocks, num_kv_heads, block_size, head_size]
        self._strides = [stride_block, stride_head, stride_slot, 1]
        self._tile = [1, 1, *tile]
        self._dtype = cache.dtype
        self._made = Bindings(1024)

    def __call__(self, cache: torch.Tensor | int) -> Any:
        """Describe [num_blocks, num_kv_heads, block_size, head_size] of one cache.

        Args:
            cache: the tensor, or its address for a direct launch.
        """
        if isinstance(cache, torch.Tensor):
            return self._describe(cache)
        descriptor = self._made.get(cache)
        if descriptor is None:
            descriptor = self._describe(_Memory(cache, self._dtype))
            self._made[cache] = descriptor
        return descriptor

    def _describe(self, base: Any) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, self._shape, self._strides, self._tile)


def fits_new_descriptors(new: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether descriptors can fetch tiles of a step's own keys or values."""
    size = new.element_size()
    return (
        new.dtype == cache.dtype
        and new.device == cache.device
        and new.shape[1:] == cache.shape[2:]
        and new.stride(2) == 1
        and new.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 for stride in new.stride()[:2])
    )


class NewTokenDescriptorMaker:
    """Descriptors of a step's own keys or values, whose number changes each step.

    Args:
        new: [num_tokens, num_kv_heads, head_size]; only its strides and heads count.
        tile: tokens and elements that a load fetches from one head.
    """

    def __init__(self, new: torch.Tensor, tile: tuple[int, int]) -> None:
        self._heads = list(new.shape[1:])
        self._strides = list(new.stride())
        self._tile = [tile[0], 1, tile[1]]
        self._made = Bindings(1024)

    def __call__(self, new: torch.Tensor, direct: bool) -> Any:
        """Describe [num_tokens, num_kv_heads, head_size].

        Args:
            new: the tensor.
            direct: for a direct launch, which needs its address only.
        """
        if not direct:
            return self._describe(new, new.shape[0])
        # Allocators hand the same memory to layer after layer.
        key = (new.data_ptr(), new.shape[0])
        descriptor = self._made.get(key)
        if descriptor is None:
            descriptor = self._describe(_Memory(key[0], new.dtype), key[1])
            self._made[key] = descriptor
        return descriptor

    def _describe(self, base: Any, num_tokens: int) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape = [num_tokens, *self._heads]
        return TensorDescriptor(base, shape, self._strides, self._tile)
