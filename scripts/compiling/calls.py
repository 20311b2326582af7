# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions for which every kernel is launched, and with what.

Tensors have no storage: launches are recorded, not run.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels import (
    AttentionOptions,
    PagedBatch,
    paged_attention,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels.attention_space import (
    DECODE_SPACE,
    MERGE_SPACE,
    PREFILL_SPACE,
    AttentionShape,
)
from portable_backend.kernels.config import AttentionConfig, KernelConfig
from portable_backend.kernels.plan import default_config
from portable_backend.warmup.compilation import in_graph, new_tensor


@dataclass(frozen=True)
class Shape:
    """Model geometry that kernels are compiled for."""

    name: str
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    features: bool = False  # window, softcap, ALiBi and sinks, all at once
    hidden_size: int = 4096
    every_step: bool = True  # or two steps that launch every kernel

    @property
    def problem(self) -> AttentionShape:
        return AttentionShape(
            num_queries_per_kv=self.heads[0] // self.heads[1],
            head_size=self.head_size,
            element_size=self.dtype.itemsize,
            block_size=self.block_size,
        )


@dataclass(frozen=True)
class Call:
    """One step or one call.

    Attributes:
        run: makes it, on tensors without storage.
        config: by its kernel; empty with defaults.
    """

    run: Callable[[], None]
    config: dict[str, KernelConfig] = field(default_factory=dict)


# (decodes, prefills, whether anything is cached): a step of each kind that gets a
# default config of its own somewhere.
STEPS = (
    (1, 0, True),
    (32, 0, True),
    (256, 0, True),
    (0, 2, True),
    (0, 2, False),
    (4, 2, True),
    (4, 2, False),
)
TWO_STEPS = ((1, 0, True), (4, 2, True))
SPACES = {"prefill": PREFILL_SPACE, "decode": DECODE_SPACE, "merge": MERGE_SPACE}
LLAMA = Shape("d128 page16")
BRIEF = replace(LLAMA, every_step=False)
SHAPES = {
    "two": (LLAMA, replace(BRIEF, name="d256", heads=(16, 8), head_size=256)),
}
SHAPES["few"] = (
    *SHAPES["two"],
    replace(LLAMA, name="d128 page64", block_size=64),
    replace(BRIEF, name="d64 fp32", head_size=64, dtype=torch.float32),
)
SHAPES["all"] = (
    *SHAPES["few"],
    replace(LLAMA, name="d256 all steps", heads=(16, 8), head_size=256),
    replace(LLAMA, name="d128 features", features=True),
    replace(LLAMA, name="d256 page64", heads=(16, 8), head_size=256, block_size=64),
    replace(LLAMA, name="d64 fp16 9:3", heads=(9, 3), head_size=64, hidden_size=576),
    replace(LLAMA, name="d80 page64", head_size=80, block_size=64, hidden_size=5120),
    replace(LLAMA, name="d128 48:1", heads=(48, 1)),
    replace(LLAMA, name="d128 fp32", dtype=torch.float32),
    replace(LLAMA, name="d256 fp32", head_size=256, dtype=torch.float32),
)
SHAPES["llama"] = (BRIEF,)
# Head sizes that models have, and the pages of 64 tokens that the back end asks for.
SHAPES["sizes"] = (
    BRIEF,
    replace(BRIEF, name="d64 page64", head_size=64, block_size=64),
    replace(BRIEF, name="d96 page64", heads=(64, 8), head_size=96, block_size=64),
    replace(BRIEF, name="d256 page64", heads=(16, 8), head_size=256, block_size=64),
)
NUM_TOKENS = 2048
MAX_DECODE_QUERY_LEN = 8  # AttentionPlanner's default
# More than 2 GB, as caches are: AMD's compiler then assumes no shorter reach.
NUM_BLOCKS = 1 << 20


def default_calls(shape: Shape) -> Iterator[Call]:
    """Every function with its defaults."""
    for step in STEPS if shape.every_step else TWO_STEPS:
        yield Call(partial(attend, shape, *step))
    # The other sizes compile what short and long calls use by default.
    for n in (NUM_TOKENS, 16, 8192) if shape == LLAMA else (NUM_TOKENS,):
        yield Call(partial(write, shape, n))
        yield Call(partial(normalise, shape, n))
        yield Call(partial(normalise, shape, n, of_heads=True))


def drawn_calls(shape: Shape, count: int, device: DeviceInfo) -> Iterator[Call]:
    """`count` configs of each attention kernel, others default; always the same."""
    base = base_config(shape, device)
    for name, space in SPACES.items():
        rng = random.Random(f"{device.arch} {shape.name}")
        for config in space.sample(count, rng, shape.problem, device):
            chosen = replace(base, **{name: config})
            cached = config.get("LOAD") != "new"
            # The longest decode has the most rows, and so takes the most.
            step = partial(
                attend, shape, 4, 2, cached, chosen, shape.problem.longest_decode
            )
            yield Call(step, {name: config})


def base_config(shape: Shape, device: DeviceInfo) -> AttentionConfig:
    """What those kernels run with whose config is not the one in question."""
    geometry: dict[str, Any] = vars(shape.problem) | {"dtype": shape.dtype}
    del geometry["element_size"], geometry["longest_decode"]
    return default_config(**geometry, device=device)


def attend(
    shape: Shape,
    num_decodes: int,
    num_prefills: int,
    cached: bool,
    config: AttentionConfig | None = None,
    query_len: int = 1,
) -> None:
    """One step with decodes of query_len tokens, outside a graph and in one."""
    num_heads, num_kv_heads = shape.heads

    def new(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return new_tensor(*size, dtype=dtype)

    key_cache, value_cache = caches(shape)
    options = AttentionOptions(scale=shape.head_size**-0.5)
    if shape.features:
        options = replace(
            options,
            sliding_window=1024,
            softcap=30.0,
            alibi_slopes=new(num_heads, dtype=torch.float32),
            sinks=new(num_heads),
        )
    query_lens = [query_len] * num_decodes + [1000] * num_prefills
    num_seqs = len(query_lens)
    batch = PagedBatch(
        query_start_loc=new(num_seqs + 1, dtype=torch.int32),
        seq_lens=new(num_seqs, dtype=torch.int32),
        block_table=new(num_seqs, 64, dtype=torch.int32),
        max_query_len=max(query_lens),
        max_seq_len=NUM_TOKENS,
        query_start_loc_cpu=torch.tensor([0, *query_lens]).cumsum(0).int(),
        no_context=not cached,
    )
    query = new(sum(query_lens), num_heads, shape.head_size)
    key = new(sum(query_lens), num_kv_heads, shape.head_size)
    for captured in (False, True):
        with in_graph(captured):
            paged_attention(
                query, key_cache, value_cache, batch, options,
                out=torch.empty_like(query), key=key, value=key, config=config,
            )  # fmt: skip


def write(shape: Shape, num_tokens: int, config: KernelConfig | None = None) -> None:
    """Write so many tokens into the cache."""
    key = new_tensor(num_tokens, shape.heads[1], shape.head_size, dtype=shape.dtype)
    slots = new_tensor(num_tokens, dtype=torch.int64)
    write_kv_cache(key, key, *caches(shape), slots, config=config)


def normalise(
    shape: Shape,
    num_tokens: int,
    config: KernelConfig | None = None,
    *,
    of_heads: bool = False,
) -> None:
    """RMSNorm of so many tokens, alone and with a residual; or of their queries."""
    size = (num_tokens, shape.hidden_size)
    if of_heads:  # q-norm
        size = (num_tokens, shape.heads[0], shape.head_size)
    x, weight = (new_tensor(*s, dtype=shape.dtype) for s in (size, size[-1:]))
    rms_norm(x, weight, 1e-6, config=config)
    if not of_heads:
        rms_norm(x, weight, 1e-6, residual=torch.empty_like(x), config=config)


def caches(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = (NUM_BLOCKS, 2, shape.block_size, shape.heads[1], shape.head_size)
    key_cache, value_cache = new_tensor(*sizes, dtype=shape.dtype).unbind(1)
    return key_cache, value_cache
