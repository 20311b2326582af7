# SPDX-License-Identifier: Apache-2.0
"""Drawing of attention cases, each from one integer, its seed.

The same seed gives the same case on every machine.
"""

import random

import torch
from kernel_cases import Case, Tiles

# The first five are ratios that in-tree kernels refused or got wrong (vllm#23424,
# sglang#23135); 9:3 is SmolLM2's, 32:8 Llama's.
HEADS = (
    (48, 1),
    (28, 4),
    (5, 1),
    (71, 1),
    (9, 3),
    (1, 1),
    (4, 4),
    (8, 2),
    (32, 8),
    (6, 2),
    (16, 1),
)
# 80, 96, 112, 120 and 192 are no powers of two (sglang#1281, vllm#4127).
HEAD_SIZES = (64, 80, 128, 96, 256, 112, 32, 192, 120)
LAYOUTS = (
    "nhd",
    "hnd",
    "pairs_nhd",
    "pairs_hnd",
    "packed_hnd",
    "packed_nhd",
    "padded",
    "planes",
)
DTYPES = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float16)
BLOCK_SIZES = (16, 32, 64, 16, 128, 528, 16)  # 528 is a hybrid model's
WORKLOADS = (
    "mixed",
    "decode",
    "prefill",
    "chunked",
    "multi_token_decode",
    "prefix_hit",
    "padded",
    "mixed",
    "ragged",
    "decode",
    "idle_rows",
    "mixed",
    "empty",
)
ROW_LAYOUTS = ("plain", "qkv_slice", "odd_rows", "plain", "odd_rows")
AWKWARD_LENS = (1, 2, 7, 15, 16, 17, 31, 33, 54, 64, 97, 127, 129)
LONG_LENS = (255, 300, 511, 528, 640, 1023, 1328, 2049, 4097)


def _lens(rng: random.Random, size: str) -> int:
    if size == "large" and rng.random() < 0.4:
        return rng.choice(LONG_LENS)
    return rng.choice(AWKWARD_LENS)


def _draw_seqs(
    rng: random.Random, workload: str, size: str, block_size: int
) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each request of a workload."""
    most = 12 if size == "large" else 4

    def request(kind: str) -> tuple[int, int]:
        n = _lens(rng, size)
        if kind == "prefill":
            return n, n
        if kind == "chunked":
            return rng.choice((5, 16, 33, 54, 80)), 0
        if kind == "multi_token_decode":
            return rng.randint(2, 8), 0
        return 1, n

    if workload == "empty":
        return []
    seqs = []
    for _ in range(rng.randint(1, most)):
        kind = workload
        if workload in ("mixed", "padded", "idle_rows", "ragged"):
            kind = rng.choice(("prefill", "chunked", "multi_token_decode", "decode"))
        if workload == "ragged":  # every length once, in no order
            kind = rng.choice(("multi_token_decode", "decode"))
        if workload == "prefix_hit":
            query_len = rng.choice((1, 3, 17, 40))
            blocks = rng.randint(1, 3 if block_size < 100 else 1)
            seqs.append((query_len, query_len + blocks * block_size))
            continue
        query_len, seq_len = request(kind)
        seqs.append((query_len, seq_len or query_len + _lens(rng, size)))
    if workload == "padded":  # as a captured graph's batch ends
        seqs += [(0, 0)] * rng.randint(1, 5)
    if workload == "idle_rows":  # query rows whose request has no keys: zeros
        seqs.insert(rng.randint(0, len(seqs)), (rng.choice((1, 2)), 0))
        seqs.insert(rng.randint(0, len(seqs)), (0, 0))
    return seqs


def _draw_tiles(rng: random.Random, queries_per_kv: int) -> Tiles:
    block_m = rng.choice((16, 32, 64))
    packs = [p for p in range(1, block_m + 1) if queries_per_kv % p == 0]
    return Tiles(
        block_m=block_m,
        block_n=rng.choice((16, 32, 64)),
        pack=rng.choice(packs),
        decode_block_n=rng.choice((16, 32)),
        programs_per_unit=rng.choice((0, 8, 64)),
        merge=rng.choice(("kernel", "last")),
    )


def draw_case(seed: int, *, size: str) -> Case:
    """The case of `seed`; "small" ones suit the interpreter.

    Head counts, head sizes, layouts and workloads rotate with coprime periods, so any
    run of seeds meets all of them; the rest is drawn.
    """
    rng = random.Random(seed * 7919 + (0 if size == "small" else 1))
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    seqs = _draw_seqs(rng, WORKLOADS[seed % len(WORKLOADS)], size, block_size)
    # Keep the oracle's score matrices within memory: 71 heads x 4097 x 4097 is not.
    heads = HEADS[seed % len(HEADS)]
    budget = 6e7 if size == "large" else 3e6
    while sum(q * s for q, s in seqs) * heads[0] > budget and len(seqs) > 1:
        seqs.remove(max(seqs, key=lambda qs: qs[0] * qs[1]))
    if sum(q * s for q, s in seqs) * heads[0] > budget:
        seqs = [(97, 129)]
    window = rng.choice((None, None, None, 1, 2, 16, 33, 128))
    return Case(
        seed=seed,
        seqs=tuple(seqs),
        heads=heads,
        head_size=HEAD_SIZES[seed % len(HEAD_SIZES)],
        dtype=DTYPES[seed % len(DTYPES)],
        block_size=block_size,
        layout=LAYOUTS[seed % len(LAYOUTS)],
        query_rows=rng.choice(ROW_LAYOUTS),
        out_rows=rng.choice(ROW_LAYOUTS),
        causal=rng.random() < 0.85,
        window=window,
        softcap=rng.choice((None, None, None, 5.0, 30.0)),
        alibi=rng.random() < 0.2,
        sinks=rng.random() < 0.25,
        sinks_dtype=rng.choice((torch.float32, torch.bfloat16)),
        spare_rows=rng.choice((0, 0, 1, 7)),
        table_columns=rng.choice((0, 1, 3)),
        table_stride_extra=rng.choice((0, 0, 5)),
        new_tokens_given=rng.random() < 0.4,
        host_starts_given=rng.random() < 0.5,
        loose_bounds=rng.random() < 0.3,
        planned=rng.random() < 0.5,
        # The interpreter's default tiles are larger than its cases.
        tiles=_draw_tiles(rng, heads[0] // heads[1])
        if rng.random() < (0.6 if size == "small" else 0.2)
        else None,
    )
