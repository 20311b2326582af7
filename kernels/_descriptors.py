# SPDX-License-Identifier: Apache-2.0
"""Host-made tensor descriptors of paged caches, kept per address.

A descriptor travels by value in the launch's parameters: safe in a captured graph as
long as the cache stays where it is, like any pointer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portable_backend.kernels._direct import Bindings, Launch


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


class CacheDescriptors:
    """Descriptors of a layer's two caches; layers differ in the addresses alone.

    Args:
        caches: keys and values, [num_blocks, block_size, num_kv_heads, head_size] each;
            only the layouts count.
        tile: tokens and elements that a load fetches from one block and head.
    """

    def __init__(
        self, caches: tuple[torch.Tensor, torch.Tensor], tile: tuple[int, int]
    ) -> None:
        self._layouts = [_cache_layout(cache) for cache in caches]
        self._dtype = caches[0].dtype
        self._tile = [1, 1, *tile]
        self._encoded = Bindings(1024)

    def describe(self, caches: tuple[Any, Any]) -> tuple[Any, ...]:
        """Of [num_blocks, num_kv_heads, block_size, head_size] of either cache."""
        return tuple(
            _describe(cache, shape, strides, self._tile)
            for cache, (shape, strides) in zip(caches, self._layouts, strict=True)
        )

    def encode(self, addresses: tuple[int, int], launch: Launch) -> tuple[Any, ...]:
        """As a direct `launch` takes those of the caches at these addresses."""
        found: tuple[Any, ...] | None = self._encoded.get(addresses)
        if found is None:
            key, value = addresses
            memory = (_Memory(key, self._dtype), _Memory(value, self._dtype))
            found = self._encoded[addresses] = launch.encode(self.describe(memory))
        return found


def _cache_layout(cache: torch.Tensor) -> tuple[list[int], list[int]]:
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    stride_block, stride_slot, stride_head, _ = cache.stride()
    shape = [num_blocks, num_kv_heads, block_size, head_size]
    return shape, [stride_block, stride_head, stride_slot, 1]


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


class NewTokenDescriptors:
    """Descriptors of a step's own keys and values, whose number changes each step.

    Args:
        new: keys and values, [num_tokens, num_kv_heads, head_size] each; only strides
            and heads count.
        tile: tokens and elements that a load fetches from one head.
    """

    def __init__(
        self, new: tuple[torch.Tensor, torch.Tensor], tile: tuple[int, int]
    ) -> None:
        self._layouts = [(list(x.shape[1:]), list(x.stride())) for x in new]
        self._dtype = new[0].dtype
        self._tile = [tile[0], 1, tile[1]]
        self._encoded = Bindings(1024)

    def describe(self, new: tuple[Any, Any], rows: tuple[int, int]) -> tuple[Any, ...]:
        """Of so many rows of keys and values, [rows, num_kv_heads, head_size]."""
        return tuple(
            _describe(base, [n, *heads], strides, self._tile)
            for base, n, (heads, strides) in zip(new, rows, self._layouts, strict=True)
        )

    def encode(
        self, addresses: tuple[int, int], rows: tuple[int, int], launch: Launch
    ) -> tuple[Any, ...]:
        """As a direct `launch` takes those of the rows at these addresses."""
        # Allocators hand the same memory to layer after layer.
        place = (addresses, rows)
        found: tuple[Any, ...] | None = self._encoded.get(place)
        if found is None:
            key, value = addresses
            memory = (_Memory(key, self._dtype), _Memory(value, self._dtype))
            found = launch.encode(self.describe(memory, rows))
            self._encoded[place] = found
        return found


def _describe(base: Any, shape: list[int], strides: list[int], tile: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, shape, strides, tile)
