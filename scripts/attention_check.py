# SPDX-License-Identifier: Apache-2.0
"""Attend over a paged cache and compare with torch; exit 1 where they differ."""

import sys

import torch

from portable_backend.kernels import (
    AttentionOptions,
    PagedBatch,
    paged_attention,
    write_kv_cache,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
num_tokens, block_size = 37, 16
query = torch.randn(num_tokens, 4, 64, device=device)
key, value = (torch.randn(num_tokens, 2, 64, device=device) for _ in range(2))
cache = torch.full((2, 5, block_size, 2, 64), float("nan"), device=device)
pages = torch.tensor([[3, 0, 4]], dtype=torch.int32, device=device)
tokens = torch.arange(num_tokens, device=device)
slots = pages[0].long()[tokens // block_size] * block_size + tokens % block_size
write_kv_cache(key, value, cache[0], cache[1], slots)
batch = PagedBatch(
    query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
    seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
    block_table=pages,
    max_query_len=num_tokens,
    max_seq_len=num_tokens,
)
out = torch.empty_like(query)
options = AttentionOptions(scale=64**-0.5)
paged_attention(query, cache[0], cache[1], batch, options, out=out)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
).transpose(0, 1)
error = float((out - expected).abs().max())
print(f"largest difference from torch on {device}: {error:.2g}")
sys.exit(not error < 1e-4)
