# SPDX-License-Identifier: Apache-2.0
"""The suite `cache`: this step's keys and values into their slots."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from portable_backend.bench.inputs import DTYPES, LAYOUTS, Caches, make_cache
from portable_backend.bench.results import OURS, Job, Row
from portable_backend.bench.settings import Settings
from portable_backend.bench.shapes import (
    BLOCK_SIZES,
    CACHE_TOKENS,
    TINY_CACHE_TOKENS,
)
from portable_backend.bench.timing import Contestant, num_copies, race
from portable_backend.kernels import write_kv_cache

# Up to this many tokens are taken for a batch of decodes, one token per block.
_DECODES = 256
# key, value, slot_mapping of one call
New = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def portable(new: New, caches: Caches) -> Callable[[], object]:
    key, value, slot_mapping = new
    return partial(write_kv_cache, key, value, *caches, slot_mapping)


def vllm(new: New, caches: Caches) -> Callable[[], object]:
    """vLLM's compiled operator, with the unused scales that its layers pass."""
    from vllm import _custom_ops as ops

    one = torch.ones((), dtype=torch.float32, device=caches[0].device)
    key, value, slots = new
    write: Callable[..., object] = ops.reshape_and_cache_flash
    return partial(write, key, value, *caches, slots, "auto", one, one)


IMPLEMENTATIONS = {"vllm": vllm, OURS: portable}


@dataclass(frozen=True)
class CacheShape:
    num_tokens: int
    block_size: int
    layout: str
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bf16"

    @property
    def fields(self) -> dict[str, str | int]:
        return {
            "tokens": self.num_tokens,
            "block_size": self.block_size,
            "layout": self.layout,
            "dtype": self.dtype,
        }

    @property
    def num_bytes(self) -> int:
        """K and V read and written."""
        size = 4 if self.dtype == "fp32" else 2
        return 4 * size * self.num_tokens * self.num_kv_heads * self.head_size


def jobs(settings: Settings) -> Iterator[Job]:
    for layout in LAYOUTS:
        for block_size in BLOCK_SIZES:
            for num_tokens in TINY_CACHE_TOKENS if settings.tiny else CACHE_TOKENS:
                shape = CacheShape(num_tokens, block_size, layout)
                if settings.tiny:
                    shape = CacheShape(num_tokens, 16, layout, 2, 32, "fp32")
                    if block_size != BLOCK_SIZES[0]:
                        continue
                run = partial(measure, shape, settings)
                yield Job("cache", "cache write", shape.fields, run)


def measure(shape: CacheShape, settings: Settings) -> Row:
    device, dtype = settings.device, DTYPES[shape.dtype]
    generator = torch.Generator(device).manual_seed(0)
    sets = num_copies(shape.num_bytes, device)
    blocks_each = -(-shape.num_tokens // shape.block_size)
    if shape.num_tokens <= _DECODES:
        blocks_each = shape.num_tokens
    num_blocks = sets * blocks_each + 1
    order = torch.randperm(num_blocks, generator=generator, device=device)
    like = torch.empty(0, dtype=dtype, device=device)
    _, caches = make_cache(
        shape.layout,
        num_blocks,
        shape.block_size,
        shape.num_kv_heads,
        shape.head_size,
        like,
    )

    def new_tokens(index: int) -> New:
        position = torch.arange(shape.num_tokens, device=device)
        blocks = order[index * blocks_each : (index + 1) * blocks_each]
        if shape.num_tokens <= _DECODES:
            slots = blocks * shape.block_size + position % shape.block_size
        else:
            slots = blocks[position // shape.block_size] * shape.block_size
            slots += position % shape.block_size
        sizes = (2, shape.num_tokens, shape.num_kv_heads, shape.head_size)
        values = torch.empty(sizes, dtype=dtype, device=device)
        key, value = values.normal_(generator=generator)
        return key, value, slots

    news = [new_tokens(index) for index in range(sets)]

    def refill() -> None:
        for cache in caches:
            cache.fill_(float("nan"))

    def contestant(name: str) -> Contestant:
        calls = [IMPLEMENTATIONS[name](new, caches) for new in news]

        def verify() -> float:
            refill()
            calls[0]()
            return _error(news[:1], caches)

        return Contestant(calls, verify, refill, lambda: _error(news, caches))

    makers: dict[str, Callable[[], Contestant]] = {
        name: partial(contestant, name)
        for name in settings.chosen(list(IMPLEMENTATIONS))
    }
    results = race(makers, device=device, rounds=settings.rounds, limit=0.0)
    return Row(
        suite="cache",
        name="cache write",
        group=f"layout {shape.layout}",
        fields=shape.fields,
        num_bytes=shape.num_bytes,
        reference="oracle",
        results=results,
    )


def _error(news: list[New], caches: Caches) -> float:
    """Share of the elements that are wrong, untouched slots of NaN included."""
    wrong, total = 0, 0
    for index, cache in enumerate(caches):
        block_size = cache.shape[1]
        left = ~cache.isnan()
        for new in news:
            values, slots = new[index], new[2]
            where = (slots // block_size, slots % block_size)
            wrong += int((cache[where] != values).sum())
            left[where] = False
        wrong += int(left.sum())
        total += sum(new[index].numel() for new in news)
    return wrong / total
