# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention: a paged cache with shuffled blocks, and its fp32 oracle."""

from dataclasses import dataclass

import torch

from portable_backend.bench.shapes import AttentionShape
from portable_backend.kernels import AttentionOptions, PagedBatch
from portable_backend.kernels.reference import paged_attention_reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# "split": K and V of a block one after the other (vLLM 0.25); "packed": K beside V for
# each head and slot (0.32 and later).
LAYOUTS = ("split", "packed")
_SPARE_BLOCKS = 16
_MAX_DECODE_QUERY_LEN = 8  # the planner's default
# Scores that the oracle holds at once, in elements.
_ORACLE_SCORES = 1 << 26

Caches = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Inputs:
    """One step's tensors, named and shaped as in `paged_attention`.

    Attributes:
        caches: (key_cache, value_cache), one pair for each layer; all hold the same.
        key, value: what the cache holds for the step's new tokens.
        unused: [n] flat slots of the cache that belong to no token.
    """

    shape: AttentionShape
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    caches: list[Caches]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    unused: torch.Tensor
    options: AttentionOptions

    @property
    def max_query_len(self) -> int:
        return max(self.shape.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.shape.seq_lens)

    def batch(self, *, lengths_on_host: bool) -> PagedBatch:
        """The step without a plan.

        Args:
            lengths_on_host: whether the host knows the query lengths of a step of
                decodes too; those of steps with prefills it knows in the back end.
        """
        prefills = [
            seq_len - query_len
            for query_len, seq_len in zip(
                self.shape.query_lens, self.shape.seq_lens, strict=True
            )
            if query_len > _MAX_DECODE_QUERY_LEN
        ]
        on_host = lengths_on_host or bool(prefills)
        return PagedBatch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc_cpu=self.query_start_loc.cpu() if on_host else None,
            no_context=bool(prefills) and not any(prefills),
        )

    def fill_unused(self, value: float) -> None:
        """Set what no kernel may let into its result, in the first layer's cache."""
        block_size = self.shape.block_size
        where = (self.unused // block_size, self.unused % block_size)
        for cache in self.caches[0]:
            cache[where] = value


def make_cache(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    like: torch.Tensor,
) -> tuple[torch.Tensor, Caches]:
    """An uninitialised cache of `like`'s dtype and device, and its two views.

    Returns:
        The memory, and (key_cache, value_cache), each [num_blocks, block_size,
        num_kv_heads, head_size].
    """
    if layout == "split":
        shape = (num_blocks, 2, block_size, num_kv_heads, head_size)
        memory = like.new_empty(shape)
    else:
        memory = like.new_empty(num_blocks, num_kv_heads, block_size, 2 * head_size)
    return memory, _views(memory, layout)


def _views(memory: torch.Tensor, layout: str) -> Caches:
    if layout == "split":
        key_cache, value_cache = memory.unbind(1)
    else:
        key_cache, value_cache = memory.transpose(1, 2).chunk(2, dim=-1)
    return key_cache, value_cache


def make_inputs(
    shape: AttentionShape,
    device: torch.device,
    *,
    layout: str = "split",
    num_layers: int = 1,
    seed: int = 0,
) -> Inputs:
    """Normally distributed inputs of `shape`.

    Args:
        shape: what to make.
        device: where.
        layout: one of LAYOUTS.
        num_layers: caches in different memory; 0 leaves caches, key and value out, for
            what only looks at lengths.
        seed: of the values and the order of blocks.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype, block_size = DTYPES[shape.dtype], shape.block_size
    num_query_heads, num_kv_heads = shape.heads
    query = torch.empty(
        shape.num_tokens, num_query_heads, shape.head_size, dtype=dtype, device=device
    ).normal_(generator=generator)

    counts = [-(-seq_len // block_size) for seq_len in shape.seq_lens]
    num_blocks = sum(counts) + _SPARE_BLOCKS
    order = torch.randperm(num_blocks, device=device, generator=generator).int()
    # Entries past a request's blocks name a spare block.
    block_table = order[-1].repeat(len(counts), max(counts))
    used_slots = torch.zeros(num_blocks, dtype=torch.int64, device=device)
    begin = 0
    for i, count in enumerate(counts):
        blocks = order[begin : begin + count]
        block_table[i, :count] = blocks
        used_slots[blocks] = block_size
        used_slots[blocks[-1]] = (shape.seq_lens[i] - 1) % block_size + 1
        begin += count
    offset = torch.arange(block_size, device=device)
    unused = (offset[None, :] >= used_slots[:, None]).flatten().nonzero()[:, 0]

    def ints(values: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    inputs = Inputs(
        shape=shape,
        query=query,
        key=None,
        value=None,
        caches=[],
        query_start_loc=ints((0, *shape.query_lens)).cumsum(0).int(),
        seq_lens=ints(shape.seq_lens),
        block_table=block_table,
        unused=unused,
        options=_options(shape, device, generator),
    )
    if num_layers:
        sizes = (num_blocks, block_size, num_kv_heads, shape.head_size)
        memory, caches = make_cache(layout, *sizes, query)
        memory.normal_(generator=generator)
        inputs.caches = [caches]
        inputs.caches += [_views(memory.clone(), layout) for _ in range(num_layers - 1)]
        inputs.key, inputs.value = (_new_tokens(inputs, cache) for cache in caches)
    return inputs


def _options(
    shape: AttentionShape, device: torch.device, generator: torch.Generator
) -> AttentionOptions:
    heads = shape.heads[0]
    slopes = sinks = None
    if shape.alibi:
        exponents = torch.arange(1, heads + 1, device=device, dtype=torch.float32)
        slopes = torch.pow(2.0, -8 * exponents / heads)
    if shape.sinks:
        sinks = torch.empty(heads, device=device, dtype=DTYPES[shape.dtype])
        sinks.normal_(generator=generator)
    return AttentionOptions(
        scale=shape.head_size**-0.5,
        sliding_window=shape.sliding_window,
        softcap=shape.softcap,
        alibi_slopes=slopes,
        sinks=sinks,
    )


def _new_tokens(inputs: Inputs, cache: torch.Tensor) -> torch.Tensor:
    """What `cache` holds for the step's tokens, one after the other."""
    block_size = inputs.shape.block_size
    rows = []
    for i, seq_len in enumerate(inputs.shape.seq_lens):
        first = seq_len - inputs.shape.query_lens[i]
        position = torch.arange(first, seq_len, device=cache.device)
        blocks = inputs.block_table[i, position // block_size].long()
        rows.append(cache[blocks, position % block_size])
    return torch.cat(rows)


def oracle(inputs: Inputs) -> torch.Tensor:
    """What attention must give, in fp32, a part of one request at a time.

    Returns:
        [num_tokens, num_query_heads, head_size] fp32.

    Raises:
        torch.OutOfMemoryError: even that does not fit.
    """
    shape = inputs.shape
    torch.set_float32_matmul_precision("highest")  # containers may have allowed TF32
    out = torch.empty_like(inputs.query, dtype=torch.float32)
    begin = 0
    for i, (query_len, seq_len) in enumerate(
        zip(shape.query_lens, shape.seq_lens, strict=True)
    ):
        context_len = seq_len - query_len
        step = max(1, _ORACLE_SCORES // (shape.heads[0] * seq_len))
        for first in range(0, query_len, step):
            # Under a causal mask the rows up to `last` are a step of their own.
            last = min(first + step, query_len)
            batch = PagedBatch(
                query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
                seq_lens=torch.tensor([context_len + last], dtype=torch.int32),
                block_table=inputs.block_table[i : i + 1],
                max_query_len=last - first,
                max_seq_len=context_len + last,
            )
            rows = slice(begin + first, begin + last)
            out[rows] = paged_attention_reference(
                inputs.query[rows], *inputs.caches[0], batch, inputs.options
            )
        begin += query_len
    return out
