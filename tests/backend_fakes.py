# SPDX-License-Identifier: Apache-2.0
"""One layer, one group, one step, made by hand as vLLM would hand them over."""

import dataclasses
import functools
import types

import torch

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 16, 40
SCALE = HEAD_SIZE**-0.5
# Requests of one step: (query_len, seq_len). Prefill, chunk, verification, decode.
STEP = [(20, 20), (9, 41), (3, 33), (1, 50)]

# Logical axes of vLLM 0.25's cache: block, K or V, slot, head, element; and of later
# ones: block, head, slot, K beside V. Each with its possible orders in memory.
UNPACKED = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}
PACKED = {"BHNC": (0, 1, 2, 3), "BNHC": (0, 2, 1, 3), "HBNC": (1, 0, 2, 3)}
CACHE_FORMS = [*UNPACKED, *PACKED]


def modules():
    """What is under test, in one place; imported late, since it needs vLLM."""
    from portable_backend import backend, impl, metadata

    return types.SimpleNamespace(
        Backend=backend.PortableBackend,
        Impl=impl.PortableImpl,
        Builder=metadata.PortableMetadataBuilder,
        backend=backend,
        impl=impl,
        metadata=metadata,
    )


def in_memory(shape, order, device, dtype=torch.float32, pad=0):
    """A NaN tensor of logical `shape`, its axes laid out in memory in `order`.

    With `pad`, each index of the outermost axis is followed by that many elements, as
    where pages are padded or layers interleaved.
    """
    sizes = [shape[axis] for axis in order]
    rows = torch.Size(sizes[1:]).numel()
    memory = torch.full((sizes[0], rows + pad), float("nan"), dtype=dtype)
    memory = memory.to(device)[:, :rows].unflatten(1, sizes[1:])
    return memory.permute([order.index(axis) for axis in range(len(shape))])


def make_kv_cache(form, device, pad=0):
    make = functools.partial(in_memory, device=device, pad=pad)
    if form in UNPACKED:
        shape = (NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        return make(shape, UNPACKED[form])
    return make((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), PACKED[form])


def make_impl(pb, **options):
    """A layer's impl, made with positional arguments as vLLM's layer does."""
    values = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    positional = [options.pop(name, default) for name, default in values.items()]
    return pb.Impl(HEADS, HEAD_SIZE, SCALE, KV_HEADS, *positional, **options)


def make_spec(**changes):
    values = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    return types.SimpleNamespace(**(values | changes))


def make_vllm_config(
    impls, *, max_num_seqs=8, max_num_tokens=128, captured=(), drafts=None
):
    layers = {
        f"layer{i}": types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)
    }
    speculative = None
    if drafts is not None:
        speculative = types.SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False
        )
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(
            static_forward_context=layers, cudagraph_capture_sizes=list(captured)
        ),
        model_config=types.SimpleNamespace(
            max_model_len=1024,
            dtype=torch.float32,
            get_num_attention_heads=lambda _: HEADS,
        ),
        scheduler_config=types.SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative,
    )


def make_builder(pb, impls, device, *, cls=None, spec=None, **limits):
    names = [f"layer{i}" for i in range(len(impls))]
    config = make_vllm_config(impls, **limits)
    return (cls or pb.Builder)(spec or make_spec(), names, config, device)


@dataclasses.dataclass
class Step:
    """Inputs of one step, as vLLM's runner would have them."""

    common: object
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor


def make_step(device, requests=STEP, *, pad_tokens=0, pad_requests=0, seed=0):
    """Random queries over a random permutation of blocks; block 0 is nobody's."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    generator = torch.Generator().manual_seed(seed)
    query_lens = [q for q, _ in requests] + [0] * pad_requests
    seq_lens = [s for _, s in requests] + [0] * pad_requests
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_tokens = int(start[-1]) + pad_tokens
    width = -(-max(seq_lens) // BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1
    table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = -(-seq_len // BLOCK_SIZE)
        table[i, :count], order = order[:count], order[count:]
        position = torch.arange(seq_len - query_len, seq_len)
        block = table[i, position // BLOCK_SIZE].long()
        slots[start[i] : start[i + 1]] = block * BLOCK_SIZE + position % BLOCK_SIZE

    def rows(heads):
        values = torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator)
        return values.to(device)

    common = CommonAttentionMetadata(
        query_start_loc=start.to(device),
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        causal=True,
    )
    out = torch.full((num_tokens, HEADS, HEAD_SIZE), float("nan"), device=device)
    return Step(common, rows(HEADS), rows(KV_HEADS), rows(KV_HEADS), out)


def fill_context(step, kv_cache, seed=1):
    """Write random K and V of the tokens before this step; the rest stays NaN."""
    from portable_backend.impl import split_kv_cache

    generator = torch.Generator().manual_seed(seed)
    lens = step.common.seq_lens.tolist()
    start = step.common.query_start_loc.tolist()
    for cache in split_kv_cache(kv_cache, HEAD_SIZE):
        for i, seq_len in enumerate(lens):
            context = seq_len - (start[i + 1] - start[i])
            position = torch.arange(context, device=cache.device)
            block = step.common.block_table_tensor[i, position // BLOCK_SIZE].long()
            values = torch.randn(context, KV_HEADS, HEAD_SIZE, generator=generator)
            cache[block, position % BLOCK_SIZE] = values.to(cache.device)


def oracle(step, kv_cache, impl, seq_lens=None):
    from portable_backend.impl import split_kv_cache
    from portable_backend.kernels import PagedBatch
    from portable_backend.kernels.reference import paged_attention_reference

    common = step.common
    batch = PagedBatch(
        common.query_start_loc,
        common.seq_lens if seq_lens is None else seq_lens,
        common.block_table_tensor,
        common.max_query_len,
        common.max_seq_len,
    )
    caches = split_kv_cache(kv_cache, HEAD_SIZE)
    options = impl._make_options(step.query.device)
    return paged_attention_reference(step.query, *caches, batch, options)


def run_layer(impl, step, kv_cache, metadata):
    """The two calls that vLLM's layer makes."""
    impl.do_kv_cache_update(
        None, step.key, step.value, kv_cache, step.common.slot_mapping
    )
    return impl.forward(
        None, step.query, step.key, step.value, kv_cache, metadata, output=step.out
    )


def assert_matches(out, expected):
    """Equal to fp32 rounding where the oracle has rows; NaN rows are padding."""
    rows = ~expected.isnan().any(-1).any(-1)
    assert rows.any()
    torch.testing.assert_close(out[rows], expected[rows], atol=2e-6, rtol=2e-5)
