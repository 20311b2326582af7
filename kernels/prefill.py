# SPDX-License-Identifier: Apache-2.0
"""Attention for long queries: prefill and chunked prefill over a paged KV cache.

out[t, h] = softmax(scale * q[t, h] . K^T + mask) V, keys read through the block table.

A program takes one tile of the plan: BLOCK_M rows, which are BLOCK_M // PACK tokens
times PACK query heads of one KV head, so that one K/V tile serves several heads. The
edges run masked and first; tiles that every row sees in full run in a loop without
masks. The block ids of the next tile travel in a loop variable, since a table load
inside the iteration would eat pipeline stages.

With REFERENCE "diagonal" that loop looks for no maximum and rescales nothing: it takes
exponentials relative to the maximum that each row met in the edges, where it met
itself. That is a third of the instructions less, and no wait between the two products.
Where scores lie so far above that something overflows, which sums and accumulator tell,
the tile is computed again with a running maximum.

Source: FlashAttention-2 (Dao, 2023), algorithm 1; paging after Kwon et al. (2023).
"""

import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.kernels._launch import (
    COUNT_PREFILL,
    count_launch,
    wait_for_earlier,
)
from portable_backend.kernels._numerics import round_to
from portable_backend.kernels._prefill_loops import (
    attend_tiles,
    attend_unmasked,
    tile_again,
)
from portable_backend.kernels._softmax import initial_state
from portable_backend.kernels.config import KernelConfig

# Rows per tile, keys per tile, warps: sizes that fit each architecture at head size
# 128. Chosen from compile-time read-outs (registers, spills, shared memory); sm90 has
# more to choose from, see below, chosen from timings (docs/kernels.md).
_TILES: dict[str, tuple[int, int, int]] = {
    "sm80": (128, 64, 8),
    "sm90": (128, 64, 8),
    "sm100": (128, 64, 8),
    "gfx90a": (128, 64, 8),
    "gfx942": (128, 64, 8),
    "gfx950": (128, 64, 8),
    "gfx1100": (64, 16, 4),
    "gfx1201": (128, 32, 8),
    "interpreter": (256, 256, 1),
}
_SMALL_TILE = (64, 32, 4)


def default_config(
    *,
    num_queries_per_kv: int,
    head_size: int,
    element_size: int,
    block_size: int,
    device: DeviceInfo,
    no_context: bool = False,
    long_prompts: bool = False,
) -> KernelConfig:
    """A config that is right everywhere and sensible on the architectures we know.

    Args:
        num_queries_per_kv: query heads that share a KV head.
        head_size: elements per head.
        element_size: bytes per element of query and cache.
        block_size: tokens per KV block.
        device: what the kernel will run on.
        no_context: nothing is cached; the step's own keys and values are all there is.
        long_prompts: nothing is cached, and prompts have thousands of tokens.
    """
    padded = triton.next_power_of_2(head_size)
    block_m, block_n, num_warps = _TILES.get(device.arch, _SMALL_TILE)
    num_stages = 2 if device.platform == "cuda" else 1
    pack = max(p for p in (1, 2, 4) if num_queries_per_kv % p == 0)
    load, query, maxnreg, delay_pv = "pointer", "shared", None, False
    if device.platform == "interpreter":
        pack = num_queries_per_kv if num_queries_per_kv <= block_m else 1
    elif element_size == 4:
        # fp32 dots run on the plain ALUs, fully unrolled: only small tiles avoid
        # spills and minutes of compile time.
        block_m, block_n = {64: (32, 32), 128: (32, 16)}.get(max(padded, 64), (16, 16))
        num_warps, num_stages = 4, 1
    elif padded > 128 and device.arch == "sm100":
        block_n = 32  # 64 spill
    elif padded > 128 and device.arch != "sm90":
        block_m, block_n, num_warps = 64, min(block_n, 32), 4
        if device.arch == "gfx1201":
            block_n = 16  # 32 spill a hundred registers
        elif device.arch == "gfx1100":
            num_warps = 8  # 4 spill 362 registers, 8 spill 143
    elif device.arch == "sm90":
        if block_size % block_n == 0 and (not no_context or padded > 128):
            load = "descriptor"
        elif no_context:
            load = "new"
        if padded > 128:
            pack = min(pack, 2)
            delay_pv = load != "pointer"
            if load == "pointer":
                block_n, num_stages = 32, 3  # 64 keys' addresses spill
        elif load == "pointer":
            # Addresses cost registers: more warps, as many as let two programs of a
            # unit take turns.
            block_n, num_stages, maxnreg = 32, 3, 128
        else:
            # One warp group to a program, several programs to a unit: the matrix unit
            # serves one while others compute exponentials.
            block_m, num_warps = 64, 4
            if padded <= 64:
                pass
            elif no_context and not long_prompts:
                block_n, maxnreg, pack = 32, 128, min(pack, 2)  # four programs
            else:
                # Two, which leave room for one of decode's.
                num_stages, delay_pv = 3, True
    limit = device.limits.shared_bytes_per_block
    while (
        shared_elements(block_m, block_n, padded, num_stages, device) * element_size
        > limit
    ):
        if num_stages > 1:
            num_stages -= 1
        elif block_n > 16:
            block_n //= 2
        elif block_m > 16:
            block_m //= 2
        else:
            break
    if pack > block_m:
        pack = 1
    hip = {}
    if device.platform == "hip":
        hip = {"waves_per_eu": 2 if device.arch == "gfx1100" else 0}
    return KernelConfig.of(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PACK=pack,
        LOAD=load,
        REFERENCE="diagonal" if device.arch in ("sm90", "interpreter") else "running",
        QUERY=query,
        DELAY_PV=delay_pv,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=maxnreg,
        matrix_instr_nonkdim=16,
        launch_pdl=device.limits.has_early_launch or None,
        **hip,
    )


def shared_elements(
    block_m: int, block_n: int, padded: int, num_stages: int, device: DeviceInfo
) -> int:
    """Upper estimate: the query tile, and every stage's K and V tile.

    AMD's compiler keeps queries in registers, so that tiles take turns.
    """
    tiles = 2 * block_n * num_stages
    if device.platform == "hip":
        return padded * max(block_m, tiles)
    return padded * (block_m + tiles) + 512


@triton.jit(do_not_specialize=["stride_table", "window"])
def _prefill_kernel(
    # output and inputs; the caches are pointers, or descriptors of
    # [num_blocks, num_kv_heads, block_size, head_size]; with LOAD "new" descriptors of
    # this step's own keys and values, [num_tokens, num_kv_heads, head_size]
    out_ptr, query_ptr, key_cache, value_cache,
    block_table_ptr, sinks_ptr, slopes_ptr,
    # plan
    header_ptr, tiles_ptr, counts_ptr,
    # strides, in elements
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    stride_table: tl.int64,
    # options
    window: tl.int32, qk_scale, cap_scale, cap_log2,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr,
    # sizes
    NUM_QUERIES_PER_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    # arithmetic
    EMULATE_BF16: tl.constexpr,
    # tile
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACK: tl.constexpr,
    LOAD: tl.constexpr, REFERENCE: tl.constexpr, QUERY: tl.constexpr,
    DELAY_PV: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(EARLY_START)
    count_launch(counts_ptr, COUNT_PREFILL)
    if OVERLAP:
        # The decode launch behind this one may take what these programs leave free.
        tl.extra.cuda.gdc_launch_dependents()
    if SAME_STRIDES:  # so one set of offsets serves both caches
        stride_v_block = stride_k_block
        stride_v_slot = stride_k_slot
        stride_v_head = stride_k_head
    tile = tl.program_id(0)
    # All that the first loads need stands in the tile: one wait instead of three.
    num_tiles = tl.load(header_ptr + 1)
    seq = tl.load(tiles_ptr + 8 * tile)
    first_token = tl.load(tiles_ptr + 8 * tile + 1)
    q_start = tl.load(tiles_ptr + 8 * tile + 2)
    query_len = tl.load(tiles_ptr + 8 * tile + 3)
    seq_len = tl.load(tiles_ptr + 8 * tile + 4)
    if tile >= num_tiles:
        return
    TOKENS: tl.constexpr = BLOCK_M // PACK

    context_len = seq_len - query_len
    first_head = tl.program_id(1) * PACK
    kv_head = first_head // NUM_QUERIES_PER_KV

    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    token = first_token + rows // PACK
    head = first_head + rows % PACK
    row_mask = (token < query_len) & (rows < TOKENS * PACK)
    io_mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_rows = (q_start + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q = tl.load(query_ptr + q_rows[:, None] + offs_d[None, :], mask=io_mask, other=0.0)
    if EMULATE_BF16:
        q = q.to(tl.float32)
    if QUERY == "registers":
        # Anything between load and product keeps an operand out of shared memory.
        q = tl.where(row_mask[:, None], q, 0.0)
    query_pos = context_len + token
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=row_mask, other=0.0)
        slopes = slopes.to(tl.float32) * 1.4426950408889634
    m_i, l_i = initial_state(sinks_ptr, head, row_mask, True, SINKS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)

    # Key ranges: [lo, lo_full) and [full, end) need masks, what lies between does not.
    first_pos = context_len + first_token
    last_pos = tl.minimum(first_pos + TOKENS, seq_len) - 1
    end = seq_len
    full = seq_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = last_pos + 1
        # Not + 1, though the first row would see that tile in full: it has to meet its
        # own key in the edges.
        full = tl.minimum(tl.maximum(first_pos, 0) // BLOCK_N * BLOCK_N, full)
    start = 0
    lo = 0
    lo_full = 0
    if HAS_WINDOW:
        start = tl.maximum(first_pos - window + 1, 0)
        lo = start // BLOCK_N * BLOCK_N
        lo_full = tl.cdiv(tl.maximum(last_pos - window + 1, 0), BLOCK_N) * BLOCK_N
        if not CAUSAL:
            end = tl.minimum(end, last_pos + window)
            full = tl.minimum(full, (first_pos + window) // BLOCK_N * BLOCK_N)
    # Rows of a query longer than its request stand before position 0 and see nothing.
    end = tl.maximum(end, 0)
    lo_full = tl.minimum(tl.maximum(lo_full, lo), tl.cdiv(end, BLOCK_N) * BLOCK_N)
    full = tl.maximum(full, lo_full)
    last = tl.maximum(end - 1, 0)
    block_table = block_table_ptr + seq.to(tl.int64) * stride_table
    # With LOAD "new": where the request's first key stands among the new tokens.
    first_row = q_start - context_len

    # The masked edges first: there each row meets itself, so that its maximum so far is
    # a fair reference for the rest.
    if HAS_WINDOW:
        acc, m_i, l_i = attend_tiles(
            acc, m_i, l_i, q, key_cache, value_cache, block_table,
            lo, lo_full, start, end, last, first_row,
            query_pos, slopes, kv_head, window,
            stride_k_block, stride_k_slot, stride_k_head,
            stride_v_block, stride_v_slot, stride_v_head,
            qk_scale, cap_scale, cap_log2,
            True, LOAD, CAUSAL, HAS_WINDOW, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_N,
            HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES,
        )  # fmt: skip
    acc, m_i, l_i = attend_tiles(
        acc, m_i, l_i, q, key_cache, value_cache, block_table,
        full, end, start, end, last, first_row, query_pos, slopes, kv_head, window,
        stride_k_block, stride_k_slot, stride_k_head,
        stride_v_block, stride_v_slot, stride_v_head,
        qk_scale, cap_scale, cap_log2,
        True, LOAD, CAUSAL, HAS_WINDOW, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_N,
        HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES,
    )  # fmt: skip
    FIXED: tl.constexpr = REFERENCE == "diagonal" and CAUSAL
    FP16: tl.constexpr = query_ptr.dtype.element_ty == tl.float16
    # Up to here with a running maximum, then against the fixed reference.
    main_lo = full
    if FIXED:
        main_lo = lo_full
        if FP16:
            # Probabilities end at 65504 there. The first keys often draw the highest
            # scores, so they join the reference.
            main_lo = tl.minimum(lo_full + BLOCK_N, full)
    if FP16 or not FIXED:
        acc, m_i, l_i = attend_tiles(
            acc, m_i, l_i, q, key_cache, value_cache, block_table,
            lo_full, main_lo, start, end, last, first_row,
            query_pos, slopes, kv_head, window,
            stride_k_block, stride_k_slot, stride_k_head,
            stride_v_block, stride_v_slot, stride_v_head,
            qk_scale, cap_scale, cap_log2,
            False, LOAD, CAUSAL, HAS_WINDOW, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_N,
            HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES,
        )  # fmt: skip
    if FIXED:
        acc, sums = attend_unmasked(
            acc, m_i, q, key_cache, value_cache, block_table,
            main_lo, full, start, last,
            first_row, tiles_ptr + 8 * tile + 5, query_pos, slopes, kv_head,
            stride_k_block, stride_k_slot, stride_k_head,
            stride_v_block, stride_v_slot, stride_v_head,
            qk_scale, cap_scale, cap_log2,
            LOAD, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES, DELAY_PV,
        )  # fmt: skip
        l_i += sums
        # With small values sums can overflow, or have no reciprocal, before acc does.
        bad_row = tl.where(l_i < 1.0e37, 0, 1)
        bad = tl.where(tl.abs(acc) < float("inf"), 0, 1)
        if tl.max(tl.maximum(tl.max(bad, 1), bad_row), 0) > 0:
            # Scores far above the reference, or NaN: once more, with a running maximum.
            first_token, q_start, query_len, seq_len = tile_again(tiles_ptr, tile)
            first_pos = seq_len - query_len + first_token
            query_pos = first_pos + tl.arange(0, BLOCK_M) // PACK
            end = tl.minimum(first_pos + TOKENS, seq_len)
            last = tl.maximum(end - 1, 0)
            first_row = q_start + query_len - seq_len
            m_i, l_i = initial_state(sinks_ptr, head, row_mask, True, SINKS, BLOCK_M)
            acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)
            acc, m_i, l_i = attend_tiles(
                acc, m_i, l_i, q, key_cache, value_cache, block_table,
                lo, end, start, end, last, first_row,
                query_pos, slopes, kv_head, window,
                stride_k_block, stride_k_slot, stride_k_head,
                stride_v_block, stride_v_slot, stride_v_head,
                qk_scale, cap_scale, cap_log2,
                True, LOAD, CAUSAL, HAS_WINDOW, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_N,
                HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES,
            )  # fmt: skip
    first_token, q_start, query_len, seq_len = tile_again(tiles_ptr, tile)

    scale = tl.where(l_i > 0, 1.0 / l_i, 0.0)
    if LOAD == "new":
        # Cached keys were promised not to exist. Where they do, nothing but NaN may
        # come out.
        scale = tl.where(seq_len <= query_len, scale, float("nan"))
    acc = acc * scale[:, None]
    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // PACK
    head = tl.program_id(1) * PACK + rows % PACK
    row_mask = (token < query_len) & (rows < TOKENS * PACK)
    io_mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
    rows_out = (q_start + token).to(
        tl.int64
    ) * stride_out_token + head * stride_out_head
    tl.store(
        out_ptr + rows_out[:, None] + offs_d[None, :],
        round_to(acc, out_ptr.dtype.element_ty, EMULATE_BF16),
        mask=io_mask,
    )
