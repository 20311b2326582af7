# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and the write into the KV cache, whose work is rows of memory."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from portable_backend.bench.inputs import Caches, make_cache
from portable_backend.bench.results import ERROR_LIMITS
from portable_backend.bench.timing import (
    MAX_CALLS,
    Call,
    Contestant,
    num_copies,
    relative_error,
)
from portable_backend.device import DeviceInfo
from portable_backend.kernels import rms_norm, write_kv_cache
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.reference import rms_norm_reference
from portable_backend.warmup.attention_workload import SHORT_DTYPES
from portable_backend.warmup.gate import (
    DISTRIBUTIONS,
    NAN,
    SENTINEL,
    Check,
    Distribution,
    bits,
    draw_length,
    judge,
    untouched,
    worst_of,
)
from portable_backend.warmup.kernel_specs import DTYPES, KERNEL_SPECS
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.roofs import roof_us

EPS = 1e-6
_TINY = Distribution("tiny", *[lambda x: x * 1e-4] * 3)
_ROW_DISTRIBUTIONS = (*DISTRIBUTIONS, _TINY)
# Keeps rows as divisible as they are, so that the same binary runs.
_GAP = 64
_SPARE_ROWS = 3
# Rows or tokens of a check.
_LIMIT = 1024
# Rows of at most so many elements may be heads in a projection, a few of each token.
_LARGEST_HEAD = 256
_HEADS = 3
# The key does not name it: the write hardly depends on it.
_BLOCK_SIZE = 64
# Up to this many tokens are taken for a batch of decodes, one token per block.
_DECODES = 256


def _length_of_two(key: TuningKey, size: int, seed: int, case: int) -> int:
    """Rows of a case and of its neighbour, where results kept by shape are wrong."""
    return draw_length(random.Random(f"{key} {seed} {case // 2}"), size, _LIMIT)


def _roof(num_bytes: int, copies: int, device: torch.device) -> float | None:
    """None where one set of inputs may stay in the L2 cache."""
    return roof_us(device, num_bytes=num_bytes) if copies > 1 else None


class RMSNormWorkload:
    """A `Workload` of "rms_norm"; with fused_add in place, as vLLM's layers run it."""

    def __init__(self, key: TuningKey, device: torch.device) -> None:
        self.key, self.device = key, device
        fields: dict[str, Any] = key.to_dict()
        self.dtype, self.row_size = DTYPES[fields["dtype"]], fields["row_size"]
        self.num_rows, self.fused = fields["num_rows"], bool(fields["fused_add"])
        self.default: KernelConfig = KERNEL_SPECS[key.kernel].default(
            key, DeviceInfo.detect(device)
        )
        self.error_limit = ERROR_LIMITS[SHORT_DTYPES[fields["dtype"]]]
        num_bytes = self.num_rows * self.row_size * self.dtype.itemsize
        num_bytes *= 4 if self.fused else 2
        copies = min(num_copies(num_bytes, device), MAX_CALLS)
        self.roof_us = _roof(num_bytes, copies, device)
        generator = torch.Generator(device).manual_seed(0)
        self.x = self._normal((self.num_rows, self.row_size), generator)
        self.residual = self._normal(self.x.shape, generator)
        self.weight = self._normal((self.row_size,), generator)
        self.normed, self.total = rms_norm_reference(
            self.x, self.weight, EPS, self.residual if self.fused else None
        )
        # (x, residual, out) of each call.
        self.sets = [
            tuple(torch.empty_like(self.x) for _ in range(3)) for _ in range(copies)
        ]

    def draw_ahead(self) -> None:
        pass

    def check(self, config: KernelConfig, seed: int, *, reuse: bool = False) -> Check:
        # Rows are drawn as fast as they are compared: nothing is kept.
        return worst_of(
            check
            for i, (distribution, variant) in enumerate(self._cases(all_=not reuse))
            for check in self._check_case(
                config,
                distribution,
                _length_of_two(self.key, self.num_rows, seed, i),
                random.Random(f"{self.key} {seed} {i}").getrandbits(32),
                variant,
            )
        )

    def _cases(self, *, all_: bool) -> Iterator[tuple[Distribution, str]]:
        """What rows are like, and what else is special: "", "heads" or "fp32 weight".

        Args:
            all_: whether cases are among them that need binaries of their own. Trials
                do without: compiling takes longer than all else, and what serves is
                checked once more.
        """
        yield from ((distribution, "") for distribution in _ROW_DISTRIBUTIONS)
        if all_ and self.dtype != torch.float32:
            yield DISTRIBUTIONS[0], "fp32 weight"
        if all_ and not self.fused and self.row_size <= _LARGEST_HEAD:
            yield from ((distribution, "heads") for distribution in DISTRIBUTIONS[:2])

    def contestant(self, config: KernelConfig) -> Contestant:
        calls: list[Call] = [self._call(config, *buffers) for buffers in self.sets]

        def refill() -> None:
            for x, residual, out in self.sets:
                x.copy_(self.x)
                residual.copy_(self.residual)
                out.fill_(NAN)

        def error(sets: int) -> float:
            errors = []
            for x, residual, out in self.sets[:sets]:
                errors.append(relative_error(x if self.fused else out, self.normed))
                if self.total is not None:
                    errors.append(relative_error(residual, self.total))
            return float(torch.tensor(errors).max())  # keeps a NaN

        def verify() -> float:
            refill()
            for call in calls:
                call()
            return error(len(calls))

        recheck = None if self.fused else partial(error, len(calls))
        return Contestant(calls, verify, refill, recheck)

    def _call(
        self,
        config: KernelConfig,
        x: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
        weight: torch.Tensor | None = None,
    ) -> Call:
        weight = self.weight if weight is None else weight
        call = partial(rms_norm, x, weight, EPS, config=config)
        if self.fused:
            return partial(call, residual=residual, out=x, residual_out=residual)
        return partial(call, out=out)

    def _normal(
        self, shape: tuple[int, ...], generator: torch.Generator
    ) -> torch.Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(generator=generator)

    def _check_case(
        self,
        config: KernelConfig,
        distribution: Distribution,
        num_rows: int,
        seed: int,
        variant: str,
    ) -> Iterator[Check]:
        label = f"{distribution.name} inputs, {num_rows} rows"
        label += f", {variant}" if variant else ""
        weight = self.weight.float() if variant == "fp32 weight" else self.weight
        generator = torch.Generator(self.device).manual_seed(seed)

        def rows(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
            """A buffer of `fill`, and rows in it with gaps between and rows after."""
            sizes: tuple[int, ...] = (num_rows + _SPARE_ROWS, self.row_size + _GAP)
            if variant == "heads":
                tokens = -(-num_rows // _HEADS)
                sizes = (tokens + _SPARE_ROWS, _HEADS + 2, self.row_size)
            buffer = torch.full(sizes, fill, dtype=self.dtype, device=self.device)
            if variant == "heads":
                return buffer, buffer[:tokens, 1 : 1 + _HEADS]
            return buffer, buffer[:num_rows, : self.row_size]

        x_buffer, x = rows(NAN)
        residual_buffer, residual = rows(NAN)
        out_buffer, out = rows(SENTINEL)
        x.copy_(distribution.rows(self._normal(x.shape, generator)))
        residual.copy_(distribution.value(self._normal(x.shape, generator)))
        out.fill_(NAN)
        given = x.clone(), residual.clone() if self.fused else None
        normed, total = rms_norm_reference(given[0], weight, EPS, given[1])
        same_normed, same_total = _plain(given[0], weight, given[1])
        self._call(config, x, residual, out, weight)()

        written = [(x if self.fused else out, x_buffer if self.fused else out_buffer)]
        yield judge(written[0][0], normed, same_normed, label)
        if total is not None:
            written.append((residual, residual_buffer))
            yield judge(residual, total, same_total, f"sum of {label}")
        else:
            yield untouched(x, given[0], f"x, {label}")
        for part, buffer in written:
            fill = SENTINEL if buffer is out_buffer else NAN
            part.fill_(fill)
            whole = torch.full_like(buffer, fill)
            yield untouched(buffer, whole, f"around the rows of {label}")


def _plain(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer as models write it: (normed, x + residual), in x's dtype."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed.to(x.dtype) * weight).to(x.dtype), total


class KVCacheWorkload:
    """A `Workload` of "kv_cache"; a copy, so every bit must be right."""

    error_limit = 0.0

    def __init__(self, key: TuningKey, device: torch.device) -> None:
        self.key, self.device = key, device
        fields: dict[str, Any] = key.to_dict()
        self.dtype, self.num_tokens = DTYPES[fields["dtype"]], fields["num_tokens"]
        self.heads = (fields["num_kv_heads"], fields["head_size"])
        self.default: KernelConfig = KERNEL_SPECS[key.kernel].default(
            key, DeviceInfo.detect(device)
        )
        token_bytes = self.heads[0] * self.heads[1] * self.dtype.itemsize
        num_bytes = 4 * self.num_tokens * token_bytes
        copies = min(num_copies(num_bytes, device), MAX_CALLS)
        self.roof_us = _roof(num_bytes, copies, device)
        generator = torch.Generator(device).manual_seed(0)
        together = 1 if self.num_tokens <= _DECODES else _BLOCK_SIZE
        blocks = -(-self.num_tokens // together)
        order = torch.randperm(copies * blocks + 1, generator=generator, device=device)
        self.caches = self._cache(len(order))
        position = torch.arange(self.num_tokens, device=device)
        # (key, value, slot_mapping) of each call.
        self.sets = []
        for i in range(copies):
            mine = order[i * blocks : (i + 1) * blocks]
            slots = mine[position // together] * _BLOCK_SIZE + position % _BLOCK_SIZE
            self.sets.append((*self._tokens(self.num_tokens, generator), slots))

    def draw_ahead(self) -> None:
        pass

    def check(self, config: KernelConfig, seed: int, *, reuse: bool = False) -> Check:
        # Rows are drawn as fast as they are compared: nothing is kept.
        return worst_of(
            check
            for i in range(3)
            for check in self._check_case(
                config,
                _length_of_two(self.key, self.num_tokens, seed, i),
                random.Random(f"{self.key} {seed} {i}").getrandbits(32),
            )
        )

    def contestant(self, config: KernelConfig) -> Contestant:
        calls: list[Call] = [
            partial(write_kv_cache, key, value, *self.caches, slots, config=config)
            for key, value, slots in self.sets
        ]

        def refill() -> None:
            for cache in self.caches:
                cache.fill_(NAN)

        def wrong_share() -> float:
            wrong, total = 0, 0
            for index, cache in enumerate(self.caches):
                left = ~cache.isnan()
                for new in self.sets:
                    where = _where(new[2])
                    wrong += int((bits(cache[where]) != bits(new[index])).sum())
                    left[where] = False
                    total += new[index].numel()
                wrong += int(left.sum())
            return wrong / total

        def verify() -> float:
            refill()
            for call in calls:
                call()
            return wrong_share()

        return Contestant(calls, verify, refill, wrong_share)

    def _cache(self, num_blocks: int) -> Caches:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        _, caches = make_cache("split", num_blocks, _BLOCK_SIZE, *self.heads, like)
        for cache in caches:
            cache.fill_(NAN)
        return caches

    def _tokens(
        self, count: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (2, count, *self.heads)
        values = torch.empty(sizes, dtype=self.dtype, device=self.device)
        key, value = values.normal_(generator=generator)
        return key, value

    def _check_case(
        self, config: KernelConfig, count: int, seed: int
    ) -> Iterator[Check]:
        generator = torch.Generator(self.device).manual_seed(seed)
        # Rows past the slots are padding.
        key, value = self._tokens(count + _SPARE_ROWS, generator)
        key[0, 0, 0], value[0, 0, 0] = float("inf"), -0.0
        key[count:], value[count:] = SENTINEL, SENTINEL
        num_blocks = -(-count // _BLOCK_SIZE) + 2
        slots = torch.randperm(
            num_blocks * _BLOCK_SIZE, generator=generator, device=self.device
        )[:count]
        skipped = torch.rand(count, generator=generator, device=self.device) < 0.1
        slots = torch.where(skipped, -1, slots)
        caches = self._cache(num_blocks)
        kept = slots >= 0
        expected = [cache.clone() for cache in caches]
        for cache, new in zip(expected, (key, value), strict=True):
            cache[_where(slots[kept])] = new[:count][kept]
        write_kv_cache(key, value, *caches, slots, config=config)
        for name, cache, right in zip(
            ("key cache", "value cache"), caches, expected, strict=True
        ):
            wrong = int((bits(cache) != bits(right)).sum())
            if wrong:
                text = f"{name}, {count} tokens: {wrong} elements are off"
                yield Check(float("inf"), text)


def _where(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // _BLOCK_SIZE, slots % _BLOCK_SIZE
