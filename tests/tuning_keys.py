# SPDX-License-Identifier: Apache-2.0
"""Keys of every kernel, with the head geometry of Llama 8B unless told otherwise."""

from portable_backend.warmup.records import TuningKey

LLAMA = {
    "dtype": "bfloat16",
    "head_size": 128,
    "num_kv_heads": 8,
    "num_queries_per_kv": 4,
    "block_size": 64,
    "sliding_window": 0,
}


def prefill_key(num_seqs=1, query_len=2048, context_len=0, **changes):
    return TuningKey.of(
        "prefill", **LLAMA | changes, no_context=int(context_len == 0),
        num_seqs=num_seqs, query_len=query_len, context_len=context_len,
    )  # fmt: skip


def decode_key(num_seqs=32, query_len=1, seq_len=4096, **changes):
    return TuningKey.of(
        "decode", **LLAMA | changes, num_seqs=num_seqs, query_len=query_len,
        seq_len=seq_len,
    )  # fmt: skip


def norm_key(num_rows=16, row_size=4096, fused_add=1, dtype="bfloat16"):
    return TuningKey.of(
        "rms_norm", dtype=dtype, row_size=row_size, fused_add=fused_add,
        num_rows=num_rows,
    )  # fmt: skip


def write_key(num_tokens=256, num_kv_heads=8, head_size=128, dtype="bfloat16"):
    return TuningKey.of(
        "kv_cache", dtype=dtype, head_size=head_size, num_kv_heads=num_kv_heads,
        num_tokens=num_tokens,
    )  # fmt: skip
