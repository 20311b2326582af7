# SPDX-License-Identifier: Apache-2.0
"""Which program does what: the work plan of one scheduler step, made on the device.

A small kernel reads query_start_loc and seq_lens and writes
- work items for the decode kernel: requests with short queries, their keys cut so that
  all items together fill the device once (one wave) whatever the lengths are;
- tiles for the prefill kernel: the other requests' queries, longest key range first.

The host never sees a length, so nothing waits, and a captured graph replays with the
lengths of each step: only buffers at fixed addresses change. Grids are upper bounds;
programs past the counts in the header return at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels import decode, prefill
from portable_backend.kernels._checks import (
    DTYPES,
    check_config,
    check_host_lengths,
    check_lengths,
    check_numbers,
    check_window,
)
from portable_backend.kernels._direct import (
    Bindings,
    Launch,
    cdiv,
    gate_for,
    pointer_class,
)
from portable_backend.kernels._launch import counters
from portable_backend.kernels._plan_kernel import (
    BLOCK_SEQS,
    BLOCK_TILES,
    RANK_SEQS,
    _plan_kernel,
)
from portable_backend.kernels.config import AttentionConfig

if TYPE_CHECKING:
    from portable_backend.kernels.attention import PagedBatch

HEAD_SIZES = (32, 256)  # smallest, largest
# Tokens from which on a prompt of which nothing is cached pays for larger tiles.
LONG_PROMPT = 4096


def decode_batch(num_decodes: int) -> int:
    """A number of requests, rounded up: what configs of decode are told apart by.

    To a power of two or, from 24 on, three quarters of one: 17 to 24 requests with 8 KV
    heads must be cut to fill an H200, 25 to 32 must not.
    """
    power = 1 << max(num_decodes - 1, 0).bit_length()
    between = power * 3 // 4
    return between if power >= 32 and num_decodes <= between else power


def decode_batches(max_num_seqs: int) -> list[int]:
    """Every result of `decode_batch` for 1 to max_num_seqs requests, ascending."""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(decode_batch(sizes[-1] + 1))
    return sizes


@dataclass(frozen=True)
class StepKind:
    """What the choice of a config may look at; few kinds, known before serving.

    Attributes:
        max_decodes: requests that take the decode kernel, as `decode_batch` rounds.
        no_context: as in PagedBatch.
        mixed: the step has prefills and decodes.
        long_prompts: nothing is cached, all are prefills, and one has LONG_PROMPT
            tokens or more. Where only the device knows lengths, a step that may have
            decodes is mixed instead.
    """

    max_decodes: int = 1
    no_context: bool = False
    mixed: bool = False
    long_prompts: bool = False

    @classmethod
    def of(
        cls,
        num_decodes: int,
        no_context: bool,
        has_prefill: bool,
        longest: int = 0,
    ) -> StepKind:
        """The kind of a step with these numbers; `longest` in new tokens."""
        alone = has_prefill and num_decodes == 0
        return cls(
            max_decodes=decode_batch(num_decodes),
            no_context=no_context,
            mixed=has_prefill and num_decodes > 0,
            long_prompts=alone and no_context and longest >= LONG_PROMPT,
        )

    @classmethod
    def within(cls, max_num_seqs: int) -> list[StepKind]:
        """Every kind that steps of at most max_num_seqs requests have."""
        kinds = [
            cls(size, no_context, mixed)
            for size in decode_batches(max_num_seqs)
            for no_context in (False, True)
            for mixed in (False, True)
        ]
        return [*kinds, cls(no_context=True, long_prompts=True)]


class Buffers(NamedTuple):
    """A planner's device buffers: the tensors, or their addresses."""

    header: Any
    items: Any
    splits: Any
    tiles: Any
    counts: Any
    arrivals: Any
    partial: Any
    lse: Any


@dataclass(eq=False)
class Choice:
    """A config, and what a planner derives from it.

    Attributes:
        number: small and unique within the planner, to look things up by.
        tile_tokens: query tokens of one prefill tile.
        can_split: whether requests are ever cut.
        grids: by the longest decode, (programs, rows of each) for one item's query rows
            and the items that fill the device.
    """

    number: int
    config: AttentionConfig
    tile_tokens: int
    can_split: bool
    grids: dict[int, tuple[int, int, int]]


@dataclass
class AttentionPlan:
    """The plan of one step: buffers the kernels read, and the grids they run with."""

    planner: AttentionPlanner
    choice: Choice
    num_seqs: int
    num_tokens: int  # 0 where only the device knows
    decode_query_len: int
    num_items: int  # upper bounds
    num_tiles: int
    merger: str | None  # as the config's MERGE; None where nothing is cut
    row_blocks: int
    block_m: int
    no_context: bool
    number: int  # of the planner's plans

    @property
    def config(self) -> AttentionConfig:
        """What the step's kernels are launched with."""
        return self.choice.config


class AttentionPlanner:
    """Persistent device buffers for one head geometry and window, and their filler.

    All layers that share heads, head size, window and requests share a planner. What
    a plan points to is overwritten by the next one, in stream order; a call with an
    older plan is refused.

    Args:
        num_query_heads, num_kv_heads: of this rank.
        head_size: elements per head.
        dtype: of query and cache.
        block_size: tokens per KV block.
        max_num_seqs, max_num_tokens: the largest step.
        max_decode_query_len: requests with at most this many query tokens take the
            decode kernel.
        sliding_window: total window or None.
        causal: as in AttentionOptions.
        device: torch device of the buffers.
        config: of every step; None: by its kind.
        configs: by kind of step; others get default_config()'s.

    Raises:
        ValueError: a number is out of range, or the config does not fit the heads.
    """

    def __init__(
        self,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_decode_query_len: int = 8,
        sliding_window: int | None = None,
        causal: bool = True,
        device: torch.device | str,
        config: AttentionConfig | None = None,
        configs: Mapping[StepKind, AttentionConfig] | None = None,
    ) -> None:
        check_numbers(
            {
                "num_query_heads": (num_query_heads, 1, None),
                "num_kv_heads": (num_kv_heads, 1, None),
                "head_size": (head_size, *HEAD_SIZES),
                "block_size": (block_size, 16, None),
                "max_num_seqs": (max_num_seqs, 0, None),
                "max_num_tokens": (max_num_tokens, 0, None),
                "max_decode_query_len": (max_decode_query_len, 1, None),
            }
        )
        check_window(sliding_window)
        if block_size % 16:
            raise bad_argument(
                "block_size", "a multiple of 16", block_size, "choose another one"
            )
        if dtype not in DTYPES:
            raise bad_argument(
                "dtype", "float16, bfloat16 or float32", dtype, "convert the model"
            )
        if num_query_heads % num_kv_heads:
            raise bad_argument(
                "num_query_heads",
                "a multiple of num_kv_heads",
                f"{num_query_heads} and {num_kv_heads}",
                "check the tensor-parallel split",
            )
        self.device = torch.device(device)
        info = DeviceInfo.detect(self.device)
        self.info = info
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.queries_per_kv = num_query_heads // num_kv_heads
        self.head_size = head_size
        self.head_size_padded = max(16, triton.next_power_of_2(head_size))
        self.dtype = dtype
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.causal = causal
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.max_decode_query_len = max_decode_query_len
        self._fixed = config
        self._by_kind = configs or {}
        self._made: dict[AttentionConfig, Choice] = {}
        self._choices: dict[StepKind, Choice] = {}
        # The interpreter computes with bf16 as if it were an integer.
        self.emulate_bf16 = info.platform == "interpreter" and dtype == torch.bfloat16
        self.counts = counters(self.device)
        self._allocate()
        self.device = self.header.device  # with its index
        self.gate = gate_for(self.device, info.platform)
        self._launches: dict[object, Launch] = {}
        self.num_plans = 0
        # What paged_attention has checked and prepared, by signature.
        self.bindings = Bindings()

    def choice_for(self, kind: StepKind) -> Choice:
        """The config of such steps and what follows from it."""
        if kind not in self._choices:
            config = self._fixed or self._by_kind.get(kind)
            if config is None:
                config = default_config(
                    num_queries_per_kv=self.queries_per_kv,
                    num_kv_heads=self.num_kv_heads,
                    head_size=self.head_size,
                    dtype=self.dtype,
                    block_size=self.block_size,
                    device=self.info,
                    kind=kind,
                    has_window=self.sliding_window is not None,
                )
            self._choices[kind] = self._choose(config)
        return self._choices[kind]

    def config_for(self, kind: StepKind) -> AttentionConfig:
        """The config of such steps."""
        return self.choice_for(kind).config

    def configs(self) -> list[AttentionConfig]:
        """Every config that a step within this planner's limits can get."""
        kinds = StepKind.within(self.max_num_seqs)
        return list(dict.fromkeys(self.config_for(kind) for kind in kinds))

    def _choose(self, config: AttentionConfig) -> Choice:
        """What follows from a config, made once for each."""
        if config in self._made:
            return self._made[config]
        check_config(config)
        pack = config.prefill["PACK"]
        if self.queries_per_kv % pack or pack > config.prefill["BLOCK_M"]:
            raise bad_argument(
                "config.prefill PACK",
                f"a divisor of {self.queries_per_kv} query heads per KV head, "
                f"at most BLOCK_M",
                pack,
                "choose another config",
            )
        grids = {}
        for query_len in range(1, self.max_decode_query_len + 1):
            num_rows = query_len * self.queries_per_kv
            block_m = decode.block_m_for(num_rows)
            row_blocks = cdiv(num_rows, block_m)
            target = self._target_items(config, row_blocks)
            grids[query_len] = (row_blocks, block_m, target)
        choice = Choice(
            number=len(self._made),
            config=config,
            tile_tokens=config.prefill["BLOCK_M"] // pack,
            can_split=config.decode["CTAS_PER_UNIT"] > 0,
            grids=grids,
        )
        self._made[config] = choice
        return choice

    def _target_items(self, config: AttentionConfig, row_blocks: int) -> int:
        """Items per KV head that fill the device once."""
        programs: int = self.info.num_units * config.decode["CTAS_PER_UNIT"]
        return max(1, programs // (self.num_kv_heads * row_blocks))

    def _allocate(self) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        choices = [self._choose(config) for config in self.configs()]
        most_targets = rows = 0
        for choice in choices:
            if not choice.can_split:
                continue
            for row_blocks, block_m, target in choice.grids.values():
                most_targets = max(most_targets, target)
                # A request that is cut has at least two items, and whole chunks in
                # all but one of them: never more than 2 * target slots.
                slots = 2 * target * self.num_kv_heads
                rows = max(rows, slots * row_blocks * block_m)
        self.header = ints(2)
        self.items = ints(max(1, most_targets + self.max_num_seqs), 8)
        self.splits = ints(self.max_num_seqs, 2)
        # Parts of a request's heads and rows that are done, for whoever merges them.
        row_blocks = max(n for c in choices for n, _, _ in c.grids.values())
        places = triton.next_power_of_2(self.num_kv_heads * row_blocks)
        self.arrivals = ints(self.max_num_seqs, places)
        most_tiles = max(
            self.max_num_tokens // choice.tile_tokens + self.max_num_seqs
            for choice in choices
        )
        self.tiles = ints(max(1, most_tiles), 8)
        self.partial = torch.empty(
            rows * self.head_size_padded, dtype=torch.float32, device=self.device
        )
        self.lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        self.buffers = Buffers(
            self.header, self.items, self.splits, self.tiles, self.counts,
            self.arrivals, self.partial, self.lse,
        )  # fmt: skip
        self.addresses = Buffers(*(buffer.data_ptr() for buffer in self.buffers))

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this planner holds."""
        buffers = [self.header, self.items, self.splits, self.tiles]
        buffers += [self.arrivals, self.partial, self.lse]
        return sum(t.numel() * t.element_size() for t in buffers)

    def plan(self, batch: PagedBatch, num_tokens: int) -> PagedBatch:
        """Plan one step: one kernel launch, no wait for the device.

        Args:
            batch: the step; query_start_loc_cpu, if given, makes the grids exact.
            num_tokens: query tokens, or an upper bound.

        Returns:
            batch with .plan set.

        Raises:
            ValueError: the step is larger than the planner was made for.
        """
        num_seqs = check_lengths(batch, self.device)
        if num_seqs > self.max_num_seqs or num_tokens > self.max_num_tokens:
            raise bad_argument(
                "batch",
                f"at most {self.max_num_seqs} requests, {self.max_num_tokens} tokens",
                f"{num_seqs} requests, {num_tokens} tokens",
                "make the AttentionPlanner with larger limits",
            )
        longest = min(batch.max_query_len, num_tokens)
        decode_query_len = min(max(longest, 1), self.max_decode_query_len)
        has_prefill = longest > self.max_decode_query_len
        num_decodes, exact_tokens = num_seqs, 0
        long_lens: list[int] | None = None
        host_starts = batch.query_start_loc_cpu
        if host_starts is None and self.info.platform == "interpreter":
            check_host_lengths(batch.query_start_loc, batch, num_seqs, num_tokens)
        if host_starts is not None:
            lens, exact_tokens = check_host_lengths(
                host_starts, batch, num_seqs, num_tokens
            )
            limit = self.max_decode_query_len
            short_lens = [n for n in lens if 0 < n <= limit]
            num_decodes = len(short_lens)
            decode_query_len = max(short_lens, default=1)
            long_lens = [n for n in lens if n > limit]
            has_prefill = bool(long_lens)
            longest = max(lens, default=0)
        # Lengths have no say: a captured graph of decodes is replayed with others.
        choice = self.choice_for(
            StepKind.of(num_decodes, batch.no_context, has_prefill, longest)
        )
        tile_tokens, can_split = choice.tile_tokens, choice.can_split
        num_tiles = 0
        if long_lens is not None:
            num_tiles = sum(cdiv(n, tile_tokens) for n in long_lens)
        elif has_prefill:
            num_tiles = num_tokens // tile_tokens + num_seqs
        row_blocks, block_m, target = choice.grids[decode_query_len]
        plan = AttentionPlan(
            planner=self,
            choice=choice,
            num_seqs=num_seqs,
            num_tokens=exact_tokens,
            decode_query_len=decode_query_len,
            num_items=num_decodes + target if can_split else num_decodes,
            num_tiles=num_tiles,
            merger=choice.config.decode["MERGE"] if can_split else None,
            row_blocks=row_blocks,
            block_m=block_m,
            no_context=batch.no_context,
            number=self.num_plans + 1,
        )
        self.num_plans += 1  # what the buffers held is gone
        if num_decodes == 0:
            plan.num_items, plan.merger = 0, None
        if num_seqs:
            tile_blocks = 1
            if has_prefill:
                most = cdiv(longest, tile_tokens)
                tile_blocks = cdiv(most, BLOCK_TILES)
            self._launch(batch, plan, target, has_prefill, tile_blocks)
        return batch.with_plan(plan)

    def _launch(
        self,
        batch: PagedBatch,
        plan: AttentionPlan,
        target: int,
        has_prefill: bool,
        tile_blocks: int,
    ) -> None:
        starts, lens = batch.query_start_loc, batch.seq_lens
        key = (
            plan.choice.number, has_prefill, pointer_class(starts), pointer_class(lens)
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            launch = self._make_launch(plan.choice, has_prefill)
            self._launches[key] = launch
        stream = self.gate.stream() if launch.ready else None
        buffers: Any = self.buffers
        inputs: tuple[Any, Any] = (starts, lens)
        if stream is not None:
            buffers = self.addresses
            inputs = (starts.data_ptr(), lens.data_ptr())
        # What separates decodes from prefills is the fixed limit, not the longest
        # decode of this step: a request may only ever land on one side.
        sizes = (
            plan.num_seqs, self.max_decode_query_len, self.sliding_window or 0, target
        )  # fmt: skip
        launch(
            stream, plan.num_seqs, tile_blocks,
            (*buffers[:6], *inputs, *sizes),
        )  # fmt: skip

    def _make_launch(self, choice: Choice, has_prefill: bool) -> Launch:
        decode_config = choice.config.decode
        constants = {
            "HAS_WINDOW": self.sliding_window is not None,
            "SPLIT": choice.can_split,
            "PREFILL": has_prefill,
            "BLOCK_N": decode_config["BLOCK_N"],
            "MIN_CHUNK": decode_config["MIN_CHUNK"],
            "TILE_TOKENS": choice.tile_tokens,
            "BLOCK_SEQS": BLOCK_SEQS,
            "RANK_SEQS": RANK_SEQS,
            "BLOCK_TILES": BLOCK_TILES,
            "ARRIVALS": self.arrivals.shape[1],
        }
        return Launch(_plan_kernel, constants, {}, self.gate)


def default_config(
    *,
    num_queries_per_kv: int,
    head_size: int,
    dtype: torch.dtype,
    block_size: int,
    device: DeviceInfo,
    num_kv_heads: int = 1,
    kind: StepKind | None = None,
    has_window: bool = False,
) -> AttentionConfig:
    """The safe default of every kernel that `paged_attention` launches.

    Args:
        num_queries_per_kv, head_size, dtype, block_size: of the layers.
        device: what the kernels will run on.
        num_kv_heads: of this rank.
        kind: of the step; None: one decode, requests with cached tokens.
        has_window: the layers see a sliding window.
    """
    kind = kind or StepKind()
    element_size = torch.empty((), dtype=dtype).element_size()
    return AttentionConfig(
        prefill=prefill.default_config(
            num_queries_per_kv=num_queries_per_kv,
            head_size=head_size,
            element_size=element_size,
            block_size=block_size,
            device=device,
            no_context=kind.no_context,
            # Their larger tiles cost fp16 3 % where bf16 was level (4 x 4096, H200).
            long_prompts=kind.long_prompts and dtype != torch.float16,
        ),
        decode=decode.default_config(
            head_size=head_size,
            element_size=element_size,
            block_size=block_size,
            device=device,
            num_programs=kind.max_decodes * num_kv_heads,
            with_prefill=kind.mixed,
            has_window=has_window,
        ),
        merge=decode.default_merge_config(device=device),
    )
