# SPDX-License-Identifier: Apache-2.0
"""Every binary that serving a model can launch: complete, finite and few.

The kernels' own launch code runs on tensors without storage, once for each way in which
the back end can call it; what it would compile, less repeats, is the list. So there is
no second description of a launch that could differ from the first.

What a binary depends on, and why that ends:
- the config. It follows from the step's kind, of which there are 53 (requests in
  13 sizes, whether prefills have cached keys, whether decodes come with them), and
  most kinds share theirs; norms and cache writes have one for each bucket of rows.
- the kind of layer: with a window or without, soft cap, sinks and slopes as the model
  has them. All layers of a kind share their binaries.
- the step: whether it has prefills, whether prefills read the new tokens (only where
  nothing is cached), decode and prefill at once (then decode starts early), rows of a
  decode tile (16, 32 or 64, from up to 8 new tokens of a request), and whether parts of
  a decode are merged by a launch of their own, as in a captured graph.
- the layout: strides count by whether 16 divides them, which is so for all layouts of
  the cache unless head_size is an odd multiple of 8. Addresses are multiples of 16. On
  AMD a cache of more than 2 GiB is one more case. Norms of each head have two forms,
  since the rows of a single token lie evenly apart.
- numbers of tokens, requests, blocks and lengths: none. No kernel specialises on them.

With default configs on an H200 and vLLM's default limits: see docs/warmup.md.
Not listed, since no step of one engine makes them: micro-batches (unaligned slices of a
step), a drafter with other heads than the model's (list it as a model of its own).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels.attention import (
    AttentionOptions,
    PagedBatch,
    paged_attention,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.decode import block_m_for
from portable_backend.kernels.kv_cache import write_kv_cache
from portable_backend.kernels.plan import AttentionPlanner, StepKind
from portable_backend.kernels.rms_norm import rms_norm
from portable_backend.kernels.rms_norm_space import ROW_BUCKETS
from portable_backend.warmup.binary import Binary, binaries_of_launches
from portable_backend.warmup.buckets import (
    MIN_DECODE_QUERY_LEN,
    EngineLimits,
    all_keys,
)
from portable_backend.warmup.compilation import (
    KernelLaunch,
    in_graph,
    recording,
    target_of,
)
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.model_traits import ModelTraits
from portable_backend.warmup.serving_configs import ServingConfigs

_SPECIALISED = 16  # what Triton asks of strides
_FAR_BYTES = 1 << 31  # AMD's compiler is told which tensors are smaller
# Axes in memory of vLLM's caches: K and V of a block side by side, or of a slot.
_UNPACKED = ((0, 1, 2, 3, 4), (0, 1, 3, 2, 4))
_PACKED = ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3))


@dataclass(frozen=True)
class StepForm:
    """All of a step that decides which binaries its attention launches.

    Attributes:
        config: of its kernels.
        window: of the layers; 0: none.
        query_len: new tokens of its longest decode; 0: no decodes.
        has_prefill: whether there are prefills.
        no_context: whether nothing is cached of these.
        on_host: whether the host knows the lengths.
        captured: launches go into a graph.
    """

    config: AttentionConfig
    window: int
    query_len: int
    has_prefill: bool = False
    no_context: bool = False
    on_host: bool = False
    captured: bool = False


def binaries_of(
    model: ModelShape,
    traits: ModelTraits,
    limits: EngineLimits,
    device: DeviceInfo,
    configs: ServingConfigs | None = None,
) -> list[Binary]:
    """What serving `model` within `limits` on `device` can launch, without repeats.

    Args:
        configs: what steps may be launched with; None: the defaults alone.

    Raises:
        UnsupportedError: in the interpreter.
    """
    launches = serving_launches(model, traits, limits, device, configs)
    return list(binaries_of_launches(launches, device))


def serving_launches(
    model: ModelShape,
    traits: ModelTraits,
    limits: EngineLimits,
    device: DeviceInfo,
    configs: ServingConfigs | None = None,
) -> list[KernelLaunch]:
    """Launches that together need every binary of `binaries_of`; many repeat one.

    A model without windows has no attention layers, only norms.
    """
    target_of(device)  # raises for the interpreter
    configs = configs or ServingConfigs(model, limits, device)
    calls = _Calls(model, traits, limits, device, configs)
    with recording(device) as launches:
        for form in dict.fromkeys(step_forms(configs)):
            calls.attend(form)
        if model.windows:
            calls.write()
        for norm in model.norms:
            calls.normalise(norm)
    return launches


def step_forms(configs: ServingConfigs) -> Iterator[StepForm]:
    """The forms of all steps within the limits, with every config; some repeat.

    As the back end plans steps: graphs hold decodes of one length only; with drafts the
    host never knows the lengths, so that every request may be a decode, and every step
    with a long query may have both.
    """
    model, limits = configs.model, configs.limits
    longest = max(MIN_DECODE_QUERY_LEN, limits.decode_query_len)
    most = min(limits.max_num_batched_tokens, limits.model_len(model))
    for window in model.sliding_windows:
        for kind in _kinds(limits.max_num_seqs, no_context=False, mixed=False):
            for config in configs.attention(kind, window):
                for query_len in _query_lens(model, longest):
                    yield StepForm(config, window, query_len)
                for query_len in {1, limits.decode_query_len}:
                    yield StepForm(config, window, query_len, captured=True)
        if most <= longest:
            continue  # no query is long enough for the prefill kernel
        if limits.speculative_tokens:
            for kind in _kinds(limits.max_num_seqs, no_context=False, mixed=True):
                for config in configs.attention(kind, window):
                    yield StepForm(config, window, longest, has_prefill=True)
            continue
        rest = min(limits.max_num_seqs, limits.max_num_batched_tokens - longest) - 1
        for no_context in (False, True):
            # By the step's tokens: contexts may shrink from one builder to the next.
            alone = dict.fromkeys(
                StepKind.of(0, no_context, has_prefill=True, longest=length)
                for length in (1, limits.max_num_batched_tokens)
            )
            kinds = _kinds(rest, no_context, mixed=True) if rest > 0 else []
            for kind in (*alone, *kinds):
                lengths = _query_lens(model, longest) if kind.mixed else [0]
                for config, query_len in itertools.product(
                    configs.attention(kind, window), lengths
                ):
                    yield StepForm(
                        config, window, query_len, True, no_context, on_host=True
                    )


def _kinds(most: int, no_context: bool, mixed: bool) -> list[StepKind]:
    """Kinds of steps with up to `most` decodes."""
    return [
        kind
        for kind in StepKind.within(most)
        if kind.no_context == no_context and kind.mixed == mixed
    ]


def _query_lens(model: ModelShape, longest: int) -> list[int]:
    """The shortest decodes of each number of rows that a tile can have."""
    found: dict[int, int] = {}
    for query_len in range(1, longest + 1):
        rows = block_m_for(query_len * model.num_queries_per_kv)
        found.setdefault(rows, query_len)
    return list(found.values())


class _Calls:
    """Calls the kernels in each way in which the back end does."""

    def __init__(
        self,
        model: ModelShape,
        traits: ModelTraits,
        limits: EngineLimits,
        device: DeviceInfo,
        configs: ServingConfigs,
    ) -> None:
        self.model, self.traits, self.limits = model, traits, limits
        self.configs = configs
        self.dtype = DTYPES[model.dtype]
        self.sinks_dtype = torch.float32 if traits.fp32_sinks else self.dtype
        self.heads, self.kv_heads = model.num_query_heads, model.num_kv_heads
        self.max_decode_query_len = max(MIN_DECODE_QUERY_LEN, limits.decode_query_len)
        # Sizes count on AMD only, and there by whether 32-bit offsets reach the end.
        self.rows = [64, limits.max_num_tokens] if device.platform == "hip" else [64]
        caches = [*self._caches(1)]
        if device.platform == "hip":
            block = 2 * limits.block_size * self.kv_heads * model.head_size
            caches += self._caches(_FAR_BYTES // (block * self.dtype.itemsize) + 1)
        self.caches = _unlike(caches)

    def attend(self, form: StepForm) -> None:
        model, longest = self.model, self.max_decode_query_len
        num_decodes = 1 if form.query_len else 0
        lengths = [form.query_len] * num_decodes
        lengths += [longest + 1] * form.has_prefill
        starts = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)
        window = form.window or None
        planner = AttentionPlanner(
            num_query_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=model.head_size,
            dtype=self.dtype,
            block_size=self.limits.block_size,
            max_num_seqs=len(lengths),
            max_num_tokens=int(starts[-1]),
            max_decode_query_len=longest,
            sliding_window=window,
            device="meta",
            config=form.config,
        )
        batch = PagedBatch(
            query_start_loc=_new(len(lengths) + 1, dtype=torch.int32),
            seq_lens=_new(len(lengths), dtype=torch.int32),
            block_table=_new(len(lengths), 2, dtype=torch.int32),
            max_query_len=max(lengths),
            max_seq_len=longest + 1,
            query_start_loc_cpu=starts if form.on_host else None,
            no_context=form.no_context,
        )
        batch = planner.plan(batch, int(starts[-1]))
        options = AttentionOptions(
            scale=model.head_size**-0.5,
            sliding_window=window,
            softcap=self.traits.softcap or None,
            alibi_slopes=_new(self.heads, dtype=torch.float32)
            if self.traits.alibi
            else None,
            sinks=_new(self.heads, dtype=self.sinks_dtype)
            if self.traits.sinks
            else None,
        )
        with in_graph(form.captured):
            for (query, key, value), caches in itertools.product(
                self._new_tokens(), self.caches
            ):
                out = torch.empty(query.shape, dtype=query.dtype, device="meta")
                news: list[tuple[torch.Tensor | None, torch.Tensor | None]]
                news = [(key, value)]
                if self.traits.shares_cache:
                    news.append((None, None))
                for new_key, new_value in news:
                    paged_attention(
                        query, *caches, batch, options,
                        out=out, key=new_key, value=new_value,
                    )  # fmt: skip

    def write(self) -> None:
        for num_tokens in self._token_counts("kv_cache", "num_tokens", 1):
            slots = _new(num_tokens, dtype=torch.int64)
            for config in self.configs.cache_write(num_tokens):
                for (_, key, value), caches in itertools.product(
                    self._new_tokens(num_tokens), self.caches
                ):
                    write_kv_cache(key, value, *caches, slots, config=config)

    def normalise(self, norm: NormShape) -> None:
        dtype = torch.float32 if self.traits.fp32_norm_weight else self.dtype
        weight = _new(norm.row_size, dtype=dtype)
        of_heads = norm.rows_per_token > 1 or norm.row_size != self.model.hidden_size
        for num_tokens in self._token_counts(
            "rms_norm", "num_rows", norm.rows_per_token
        ):
            rows = num_tokens * norm.rows_per_token
            if of_heads:
                inputs = self._rows_of_heads(norm, num_tokens)
            else:
                inputs = [_new(num_tokens, norm.row_size, dtype=self.dtype)]
            for x, config in itertools.product(inputs, self.configs.norm(norm, rows)):
                if norm.fused_add:
                    residual = torch.empty_like(x)
                    rms_norm(
                        x, weight, 1e-6, residual=residual, out=x,
                        residual_out=residual, config=config,
                    )  # fmt: skip
                else:
                    rms_norm(x, weight, 1e-6, config=config)

    def _token_counts(self, kernel: str, size: str, per_token: int) -> list[int]:
        """Numbers of tokens on both sides of each step of the choice of a config."""
        steps = set(ROW_BUCKETS) if kernel == "rms_norm" else set()
        for key in all_keys(self.model, self.limits):
            if key.kernel == kernel:
                steps.add(dict(key.sizes)[size])
        counts = {1, 2, self.limits.max_num_tokens}
        for step in steps:
            counts |= {step // per_token, step // per_token + 1}
        return sorted(n for n in counts if 0 < n <= self.limits.max_num_tokens)

    def _new_tokens(
        self, num_tokens: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(query, key, value): parts of one projection, or tensors of their own."""
        found = []
        for rows in self.rows if num_tokens is None else [num_tokens]:
            heads = self.heads + 2 * self.kv_heads
            size = self.model.head_size
            parts = _new(rows, heads, size, dtype=self.dtype).split(
                [self.heads, self.kv_heads, self.kv_heads], dim=1
            )
            own = [
                torch.empty(part.shape, dtype=self.dtype, device="meta")
                for part in parts
            ]
            # Rotation leaves queries and keys where they are, or makes new ones.
            found += [parts, own, (own[0], own[1], parts[2])]
        return _unlike(found)

    def _rows_of_heads(self, norm: NormShape, num_tokens: int) -> list[torch.Tensor]:
        """One row for each head: in its place in a projection, or on its own."""
        heads = norm.rows_per_token
        width = max(self.heads + 2 * self.kv_heads, heads)
        projection = _new(num_tokens, width, norm.row_size, dtype=self.dtype)
        first = 0 if heads == self.heads else self.heads
        own = _new(num_tokens, heads, norm.row_size, dtype=self.dtype)
        return [projection[:, first : first + heads], own]

    def _caches(self, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(K, V) in each layout, [num_blocks, block_size, num_kv_heads, head_size]."""
        slots, heads, size = self.limits.block_size, self.kv_heads, self.model.head_size
        order: tuple[int, ...]
        for order in _UNPACKED:
            cache = self._in_memory((num_blocks, 2, slots, heads, size), order)
            key_cache, value_cache = cache.unbind(1)
            yield key_cache, value_cache
        for order in _PACKED:
            cache = self._in_memory((num_blocks, heads, slots, 2 * size), order)
            key_cache, value_cache = cache.transpose(1, 2).split(size, dim=-1)
            yield key_cache, value_cache

    def _in_memory(
        self, shape: tuple[int, ...], order: tuple[int, ...]
    ) -> torch.Tensor:
        memory = _new(*(shape[axis] for axis in order), dtype=self.dtype)
        return memory.permute([order.index(axis) for axis in range(len(shape))])


def _new(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


_Tensors = TypeVar("_Tensors", bound=tuple[torch.Tensor, ...])


def _unlike(groups: list[_Tensors]) -> list[_Tensors]:
    """Groups of tensors that a compiler can tell apart, one of each kind."""
    found: dict[object, _Tensors] = {}
    for group in groups:
        look = tuple(
            (
                tuple(stride % _SPECIALISED == 0 for stride in tensor.stride()),
                tensor.data_ptr() % _SPECIALISED,
                tensor.untyped_storage().nbytes() >= _FAR_BYTES,
            )
            for tensor in group
        )
        found.setdefault(look, group)
    return list(found.values())
