# SPDX-License-Identifier: Apache-2.0
"""Attention cases, their poisoned inputs, and the comparison with the oracle.

A case is plain data; kernel_draws.py draws some. Everything a kernel may not read is
poison (NaN), everything it may not write is a sentinel that must survive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels import (
    AttentionOptions,
    AttentionPlanner,
    PagedBatch,
    paged_attention,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import default_config
from portable_backend.kernels.reference import paged_attention_reference

# A value that no computation here produces and every dtype stores exactly.
SENTINEL = 7776.0


@dataclass(frozen=True)
class Tiles:
    """Tile sizes that make many tiles, packs and splits out of few tokens."""

    block_m: int = 16
    block_n: int = 16
    pack: int = 1
    decode_block_n: int = 16
    programs_per_unit: int = 64  # 0: keys are never split
    merge: str = "kernel"

    def config(self, default: AttentionConfig) -> AttentionConfig:
        return AttentionConfig(
            prefill=default.prefill.replace(
                BLOCK_M=self.block_m,
                BLOCK_N=self.block_n,
                PACK=self.pack,
                LOAD="pointer",
                num_warps=4,
                num_stages=1,
            ),
            decode=default.decode.replace(
                BLOCK_N=self.decode_block_n,
                CTAS_PER_UNIT=self.programs_per_unit,
                MERGE=self.merge,
                MIN_CHUNK=1,
                num_warps=4,
                num_stages=1,
            ),
            merge=default.merge.replace(BLOCK_SPLITS=2),
        )


@dataclass(frozen=True)
class Case:
    """One call of `paged_attention`; `seqs` lists (query_len, seq_len)."""

    seed: int
    seqs: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    layout: str = "nhd"
    query_rows: str = "plain"
    out_rows: str = "plain"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    sinks_dtype: torch.dtype = torch.float32
    spare_rows: int = 0  # query rows past the last request
    table_columns: int = 1  # columns past the longest request
    table_stride_extra: int = 0
    new_tokens_given: bool = False
    host_starts_given: bool = False
    loose_bounds: bool = False  # max_query_len, max_seq_len are not exact
    planned: bool = False
    tiles: Tiles | None = None  # None: the default config

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.seqs)

    def __str__(self) -> str:
        return f"seed{self.seed}"


def make_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    fill: float = float("nan"),
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches, [num_blocks, block_size, num_kv_heads, head_size] views."""
    n, b, h, d = num_blocks, block_size, num_kv_heads, head_size

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    def padded(pad: int) -> torch.Tensor:
        store = full(n * (b * h * d + pad))
        return store.as_strided((n, b, h, d), (b * h * d + pad, h * d, d, 1))

    if layout == "nhd":
        return full(n, b, h, d), full(n, b, h, d)
    if layout == "hnd":
        return full(n, h, b, d).transpose(1, 2), full(n, h, b, d).transpose(1, 2)
    if layout == "planes":
        return full(2, n, b, h, d).unbind(0)
    if layout == "pairs_nhd":
        return full(n, 2, b, h, d).unbind(1)
    if layout == "pairs_hnd":
        return full(n, 2, h, b, d).transpose(2, 3).unbind(1)
    if layout == "packed_hnd":
        return full(n, h, b, 2 * d).transpose(1, 2).split(d, -1)
    if layout == "packed_nhd":
        return full(n, b, h, 2 * d).split(d, -1)
    if layout == "padded":  # K and V differ in their block strides
        return padded(24), padded(136)
    raise ValueError(f"unknown cache layout {layout}")


def make_rows(
    num_rows: int,
    heads: int,
    head_size: int,
    *,
    rows: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer full of the sentinel, its [num_rows, heads, head_size] view)."""
    width = heads * head_size
    # A slice of a fused qkv projection; a stride that is odd, so only 2-byte aligned.
    stride = {"plain": width, "qkv_slice": 3 * width, "odd_rows": width + 3}[rows]
    offset = {"plain": 0, "qkv_slice": width, "odd_rows": 1}[rows]
    buffer = torch.full(
        (offset + max(num_rows, 1) * stride,), SENTINEL, dtype=dtype, device=device
    )
    view = buffer.as_strided(
        (num_rows, heads, head_size), (stride, head_size, 1), offset
    )
    return buffer, view


@dataclass
class Inputs:
    """Tensors of one call, and what surrounds them."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: PagedBatch
    options: AttentionOptions
    out: torch.Tensor
    out_buffer: torch.Tensor
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    planner: AttentionPlanner | None = None
    config: AttentionConfig | None = None
    blocks: list[list[int]] = field(default_factory=list)


def first_readable(case: Case, query_len: int, seq_len: int) -> int:
    """Position of the first key that any query row of a request may see."""
    if case.window is None:
        return 0
    return min(max(0, seq_len - query_len - case.window + 1), seq_len)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Poisoned inputs of a case: only readable slots of the cache hold numbers."""
    gen = torch.Generator().manual_seed(case.seed)
    num_heads, num_kv_heads = case.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(device, case.dtype)

    # Pages in random order; at least two belong to nobody. Block 0 is one of those:
    # table entries that no kernel may use point to it or to another foreign page.
    needed = [math.ceil(seq_len / case.block_size) for _, seq_len in case.seqs]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=gen) + 1).tolist()
    free = [0, *order[sum(needed) :]]
    columns = max([1, *needed]) + case.table_columns
    stale = torch.randint(len(free), (len(needed), columns), generator=gen)
    table = torch.tensor(free, dtype=torch.int32)[stale]
    key_cache, value_cache = make_caches(
        num_blocks,
        case.block_size,
        num_kv_heads,
        case.head_size,
        layout=case.layout,
        dtype=case.dtype,
        device=device,
    )
    rows = case.num_tokens + case.spare_rows
    new = [
        make_rows(
            rows,
            num_kv_heads,
            case.head_size,
            rows=case.query_rows,
            dtype=case.dtype,
            device=device,
        )[1]
        for _ in range(2)
    ]
    taken, blocks, start = 0, [], 0
    for i, (query_len, seq_len) in enumerate(case.seqs):
        mine = order[taken : taken + needed[i]]
        taken += needed[i]
        blocks.append(mine)
        lo = first_readable(case, query_len, seq_len)
        for column, block in enumerate(mine):
            # Blocks that the window has left are freed: their entries go stale too.
            if (column + 1) * case.block_size > lo:
                table[i, column] = block
        position = torch.arange(lo, seq_len)
        where = torch.tensor(mine, dtype=torch.long)[position // case.block_size]
        where, slot = where.to(device), (position % case.block_size).to(device)
        for cache, given in zip((key_cache, value_cache), new, strict=True):
            numbers = normal(seq_len - lo, num_kv_heads, case.head_size)
            cache[where, slot] = numbers
            fresh = min(query_len, seq_len - lo)
            given[start + query_len - fresh : start + query_len] = numbers[
                seq_len - lo - fresh :
            ]
        start += query_len

    _, query = make_rows(
        rows,
        num_heads,
        case.head_size,
        rows=case.query_rows,
        dtype=case.dtype,
        device=device,
    )
    query[:] = float("nan")
    query[: case.num_tokens] = normal(case.num_tokens, num_heads, case.head_size)
    out_buffer, out = make_rows(
        rows,
        num_heads,
        case.head_size,
        rows=case.out_rows,
        dtype=case.dtype,
        device=device,
    )
    out[: case.num_tokens] = float("nan")

    wide = torch.full(
        (len(needed), columns + case.table_stride_extra), 0, dtype=torch.int32
    )
    wide[:, :columns] = table
    starts = torch.zeros(len(needed) + 1, dtype=torch.int32)
    lens = torch.tensor(case.seqs, dtype=torch.int32).reshape(-1, 2)
    starts[1:] = lens[:, 0].cumsum(0)
    max_query_len, max_seq_len = lens.amax(0).tolist() if needed else (0, 0)
    if case.loose_bounds:
        max_query_len, max_seq_len = case.num_tokens, max_seq_len + 1000
    slopes = 2.0 ** -(torch.arange(1, num_heads + 1) * 8 / num_heads)
    sinks = torch.randn(num_heads, generator=gen) * 2
    return Inputs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        batch=PagedBatch(
            query_start_loc=starts.to(device),
            seq_lens=lens[:, 1].contiguous().to(device),
            block_table=wide.to(device)[:, :columns],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=starts if case.host_starts_given else None,
            no_context=case.new_tokens_given
            and all(
                query_len in (seq_len, *range(9)) for query_len, seq_len in case.seqs
            ),
        ),
        options=AttentionOptions(
            scale=case.head_size**-0.5,
            causal=case.causal,
            sliding_window=case.window,
            softcap=case.softcap,
            alibi_slopes=slopes.to(device) if case.alibi else None,
            sinks=sinks.to(device, case.sinks_dtype) if case.sinks else None,
        ),
        out=out,
        out_buffer=out_buffer,
        key=new[0] if case.new_tokens_given else None,
        value=new[1] if case.new_tokens_given else None,
        planner=make_planner(case, device) if case.planned else None,
        config=config_for(case, device),
        blocks=blocks,
    )


def config_for(case: Case, device: torch.device) -> AttentionConfig | None:
    """The config of the case's tiles; None is the default, chosen by the kernels."""
    if case.tiles is None:
        return None
    default = default_config(
        num_queries_per_kv=case.heads[0] // case.heads[1],
        head_size=case.head_size,
        dtype=case.dtype,
        block_size=case.block_size,
        device=DeviceInfo.detect(device),
    )
    return case.tiles.config(default)


def make_planner(case: Case, device: torch.device, **changes) -> AttentionPlanner:
    """A planner that fits the case."""
    return AttentionPlanner(
        **dict(
            num_query_heads=case.heads[0],
            num_kv_heads=case.heads[1],
            head_size=case.head_size,
            dtype=case.dtype,
            block_size=case.block_size,
            max_num_seqs=max(1, len(case.seqs)),
            max_num_tokens=max(1, case.num_tokens + case.spare_rows),
            sliding_window=case.window,
            causal=case.causal,
            device=device,
            config=config_for(case, device),
        )
        | changes
    )


def call(inputs: Inputs, **changes) -> torch.Tensor:
    """Run `paged_attention` on the inputs, planned beforehand if they say so."""
    batch = inputs.batch
    if inputs.planner is not None:
        batch = inputs.planner.plan(batch, inputs.query.shape[0])
    return paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        batch,
        inputs.options,
        **dict(
            out=inputs.out,
            key=inputs.key,
            value=inputs.value,
            config=None if inputs.planner else inputs.config,
        )
        | changes,
    )


def references(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(oracle, what plain torch makes of it in the inputs' own dtype)."""
    arguments = (
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.batch,
        inputs.options,
    )
    # An fp32 oracle cannot judge fp32 kernels.
    dtype = inputs.query.dtype
    precise = torch.float64 if dtype is torch.float32 else torch.float32
    return (
        paged_attention_reference(*arguments, dtype=precise),
        paged_attention_reference(*arguments, dtype=dtype),
    )


def assert_close(
    ours: torch.Tensor, oracle: torch.Tensor, same_dtype: torch.Tensor, label: object
) -> None:
    """max|ours - oracle| <= 2 max|same_dtype - oracle| + 2 rounding steps of oracle.

    The rule is flash-attention's: no worse than twice what torch does in this dtype.
    In fp32 the products of a head are summed one after the other, where torch sums in
    blocks: one more step for each 64 of them.
    """
    if oracle.numel() == 0:
        return
    precise = oracle.dtype
    error = (ours.to(precise) - oracle).abs()
    torch_error = (same_dtype.to(precise) - oracle).abs().max().item()
    step = torch.finfo(ours.dtype).eps * oracle.abs().max().item()
    # NaN compares as false: make it the largest error there is.
    error = torch.where(error.isnan(), float("inf"), error)
    worst = error.max().item()
    steps = 2 + (oracle.shape[-1] / 64 if ours.dtype == torch.float32 else 0)
    allowed = 2 * torch_error + steps * step
    if not worst <= allowed:
        where = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        bad = int((error > allowed).sum())
        raise AssertionError(
            f"{label}\n"
            f"our error {worst:.3e} at {where}, allowed {allowed:.3e} "
            f"(torch in {ours.dtype}: {torch_error:.3e}); "
            f"{bad} of {error.numel()} elements are off\n"
            f"ours {ours[tuple(where)].item()}, oracle {oracle[tuple(where)].item()}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that NaN compares equal to itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kind[tensor.element_size()])


def check_case(case: Case, device: torch.device) -> Inputs:
    """Run a case and compare: result, guard rows, and that inputs stayed as given."""
    inputs = make_inputs(case, device)
    check_inputs(inputs, label=repr(case))
    return inputs


def check_inputs(inputs: Inputs, label: object, **changes) -> None:
    """Run prepared inputs and compare, as `check_case` does."""
    num_tokens = int(inputs.batch.query_start_loc[-1]) if inputs.query.numel() else 0
    given = {
        name: getattr(inputs, name)
        for name in ("query", "key_cache", "value_cache", "key", "value")
        if getattr(inputs, name) is not None
    }
    given |= {
        name: getattr(inputs.batch, name)
        for name in ("query_start_loc", "seq_lens", "block_table")
    }
    before = {name: bits(tensor).clone() for name, tensor in given.items()}
    oracle, same_dtype = references(inputs)
    returned = call(inputs, **changes)
    assert returned is inputs.out, f"{label}: out was not returned"
    assert_close(
        inputs.out[:num_tokens], oracle[:num_tokens], same_dtype[:num_tokens], label
    )
    inputs.out[:num_tokens] = SENTINEL
    touched = int((inputs.out_buffer != SENTINEL).sum())
    assert touched == 0, f"{label}: {touched} elements around the output were written"
    for name, tensor in given.items():
        changed = int((bits(tensor) != before[name]).sum())
        assert changed == 0, f"{label}: {changed} elements of {name} were modified"


def with_seqs(case: Case, *seqs: tuple[int, int]) -> Case:
    """The same case over other requests."""
    return replace(case, seqs=tuple(seqs))
