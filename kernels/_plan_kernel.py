# SPDX-License-Identifier: Apache-2.0
"""The kernel behind AttentionPlanner: a step's lengths in, its work plan out.

See plan.py for what items and tiles are for, and for the buffers.
"""

import triton
import triton.language as tl

from portable_backend.kernels._jit import device_function
from portable_backend.kernels._launch import COUNT_PLAN, count_launch

# Requests looked at together, candidate chunk sizes tried together, and tiles of one
# request placed together.
BLOCK_SEQS = 256
RANK_SEQS = 64
BLOCK_TILES = 64


@device_function
def _request(query_start_loc_ptr, seq_lens_ptr, i, num_seqs):
    """(query_len, seq_len) of requests i; zeros past num_seqs."""
    ok = i < num_seqs
    begin = tl.load(query_start_loc_ptr + i, mask=ok, other=0)
    query_len = tl.load(query_start_loc_ptr + i + 1, mask=ok, other=0) - begin
    seq_len = tl.load(seq_lens_ptr + i, mask=ok, other=0)
    return query_len, seq_len


@device_function
def _key_tiles(
    query_len, seq_len, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """(first, number) of the BLOCK_N-key tiles that a request's queries reach."""
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - query_len - window + 1, 0) // BLOCK_N
    return first, tl.cdiv(seq_len, BLOCK_N) - first


@triton.jit(
    do_not_specialize=["num_seqs", "decode_query_len", "window", "target_items"]
)
def _plan_kernel(
    # outputs
    header_ptr, items_ptr, splits_ptr, tiles_ptr, counts_ptr, arrivals_ptr,
    # inputs
    query_start_loc_ptr, seq_lens_ptr,
    # sizes; requests with at most decode_query_len query tokens are decodes
    num_seqs: tl.int32, decode_query_len: tl.int32, window: tl.int32,
    target_items: tl.int32,
    HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, PREFILL: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr, TILE_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr, RANK_SEQS: tl.constexpr, BLOCK_TILES: tl.constexpr,
    ARRIVALS: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs, blocks of BLOCK_TILES prefill tiles): one request each."""
    count_launch(counts_ptr, COUNT_PLAN)
    seq = tl.program_id(0)
    q_start = tl.load(query_start_loc_ptr + seq)
    query_len, seq_len = _request(query_start_loc_ptr, seq_lens_ptr, seq, num_seqs)
    lanes = tl.arange(0, BLOCK_SEQS)

    if tl.program_id(1) == 0:
        chunk = tl.full((), 1 << 30, tl.int32)
        if SPLIT:
            total = 0
            for s in range(0, num_seqs, BLOCK_SEQS):
                q, kv = _request(query_start_loc_ptr, seq_lens_ptr, s + lanes, num_seqs)
                _, tiles = _key_tiles(q, kv, window, BLOCK_N, HAS_WINDOW)
                short = (q > 0) & (q <= decode_query_len)
                total += tl.sum(tl.where(short, tiles, 0), 0)
            least = tl.maximum(tl.cdiv(total, target_items), MIN_CHUNK)
            # Rounding up per request overshoots one wave: take the smallest of 16
            # sizes up to twice as large that does not, else the plain quotient.
            steps = tl.arange(0, 16)
            sizes = least + (least * steps + 15) // 16
            items = tl.zeros([16], tl.int32)
            for s in range(0, num_seqs, BLOCK_SEQS):
                q, kv = _request(query_start_loc_ptr, seq_lens_ptr, s + lanes, num_seqs)
                _, tiles = _key_tiles(q, kv, window, BLOCK_N, HAS_WINDOW)
                short = (q > 0) & (q <= decode_query_len)
                parts = tl.maximum(tl.cdiv(tiles[None, :], sizes[:, None]), 1)
                items += tl.sum(tl.where(short[None, :], parts, 0), 1)
            fits = tl.min(tl.where(items <= target_items, sizes, 1 << 30), 0)
            chunk = tl.where(fits < (1 << 30), fits, least)

        # Every request has one last part and, if it is cut, whole chunks before it.
        # Whole chunks come first, then the last parts, longest first: what starts
        # late is short, so that no program runs on alone at the end.
        first, num_tiles = _key_tiles(query_len, seq_len, window, BLOCK_N, HAS_WINDOW)
        short = (query_len > 0) & (query_len <= decode_query_len)
        num_parts = tl.where(short, tl.maximum(tl.cdiv(num_tiles, chunk), 1), 0)
        last_tiles = num_tiles - (num_parts - 1) * chunk
        wholes_before = 0
        wholes_total = 0
        lasts_before = 0
        lasts_total = 0
        slots_before = 0
        tiles_total = 0
        for s in range(0, num_seqs, BLOCK_SEQS):
            i = s + lanes
            q, kv = _request(query_start_loc_ptr, seq_lens_ptr, i, num_seqs)
            _, tiles = _key_tiles(q, kv, window, BLOCK_N, HAS_WINDOW)
            is_short = (q > 0) & (q <= decode_query_len)
            parts = tl.where(is_short, tl.maximum(tl.cdiv(tiles, chunk), 1), 0)
            wholes = tl.maximum(parts - 1, 0)
            rest = tiles - wholes * chunk
            wholes_total += tl.sum(wholes, 0)
            wholes_before += tl.sum(tl.where(i < seq, wholes, 0), 0)
            longer = (rest > last_tiles) | ((rest == last_tiles) & (i < seq))
            lasts_before += tl.sum((is_short & longer).to(tl.int32), 0)
            lasts_total += tl.sum(is_short.to(tl.int32), 0)
            slots_before += tl.sum(tl.where((i < seq) & (parts > 1), parts, 0), 0)
            long_tiles = tl.cdiv(q, TILE_TOKENS)
            tiles_total += tl.sum(tl.where(q > decode_query_len, long_tiles, 0), 0)

        for p in range(0, num_parts, 32):
            part = p + tl.arange(0, 32)
            ok = part < num_parts
            lo = (first + part * chunk) * BLOCK_N
            hi = tl.minimum(lo + chunk.to(tl.int64) * BLOCK_N, seq_len).to(tl.int32)
            slot = tl.where(num_parts > 1, slots_before + part, -1)
            place = wholes_before + part
            place = tl.where(part < num_parts - 1, place, wholes_total + lasts_before)
            item = items_ptr + 8 * place
            tl.store(item, seq, mask=ok)
            tl.store(item + 1, lo, mask=ok)
            tl.store(item + 2, hi, mask=ok)
            tl.store(item + 3, slot, mask=ok)
            tl.store(item + 4, q_start, mask=ok)
            tl.store(item + 5, query_len, mask=ok)
            tl.store(item + 6, seq_len, mask=ok)
        # Left at zero by the last layer, unless something ended it half way.
        arrivals = tl.zeros([ARRIVALS], tl.int32)
        tl.store(arrivals_ptr + seq * ARRIVALS + tl.arange(0, ARRIVALS), arrivals)
        tl.store(splits_ptr + 2 * seq, slots_before)
        tl.store(splits_ptr + 2 * seq + 1, tl.where(num_parts > 1, num_parts, 0))
        if seq == num_seqs - 1:
            tl.store(header_ptr, wholes_total + lasts_total)
            tl.store(header_ptr + 1, tiles_total)

    if PREFILL:
        num_tiles = tl.cdiv(query_len, TILE_TOKENS)
        tile = tl.program_id(1) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
        if (query_len > decode_query_len) & (
            tl.program_id(1) * BLOCK_TILES < num_tiles
        ):
            # Place of a tile = number of tiles whose last key comes later, ties in
            # order of requests: a sort without sorting.
            end = tl.minimum(seq_len - query_len + (tile + 1) * TILE_TOKENS, seq_len)
            place = tl.zeros([BLOCK_TILES], tl.int32)
            rank_lanes = tl.arange(0, RANK_SEQS)
            for s in range(0, num_seqs, RANK_SEQS):
                i = s + rank_lanes
                q, kv = _request(query_start_loc_ptr, seq_lens_ptr, i, num_seqs)
                other_tiles = tl.where(q > decode_query_len, tl.cdiv(q, TILE_TOKENS), 0)
                threshold = end[:, None] - tl.where(i < seq, 1, 0)[None, :]
                beyond = tl.maximum(threshold - (kv - q)[None, :], 0) // TILE_TOKENS
                later = tl.maximum(other_tiles[None, :] - beyond, 0)
                later = tl.where(threshold < kv[None, :], later, 0)
                place += tl.sum(later, 1)
            ok = tile < num_tiles
            out = tiles_ptr + 8 * place
            tl.store(out, seq, mask=ok)
            tl.store(out + 1, tile * TILE_TOKENS, mask=ok)
            tl.store(out + 2, q_start, mask=ok)
            tl.store(out + 3, query_len, mask=ok)
            tl.store(out + 4, seq_len, mask=ok)
            tl.store(out + 5, q_start + query_len - seq_len, mask=ok)
