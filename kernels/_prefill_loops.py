# SPDX-License-Identifier: Apache-2.0
"""The prefill kernel's loops over keys: masked, unmasked, with values a step late."""

import triton.language as tl

from portable_backend.kernels._jit import device_function
from portable_backend.kernels._softmax import (
    alibi_terms,
    keys_in_range,
    load_tile,
    mask_scores,
    online_softmax,
    page_ids,
    past_the_end,
    shape_scores,
    tile_offsets,
)


@device_function
def attend_tiles(
    acc, m_i, l_i, q, key_cache, value_cache, block_table,
    lo, hi, start, end, last, first_row, query_pos, slopes, kv_head, window,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    qk_scale, cap_scale, cap_log2,
    MASK: tl.constexpr, LOAD: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Fold keys lo..hi (lo a multiple of BLOCK_N) into the running softmax.

    LOAD says where from: "pointer" or "descriptor" into the paged cache; "new" through
    descriptors of this step's own keys and values, the request's first in row
    `first_row`.
    """
    ids = 0
    if LOAD != "new":
        ids = page_ids(block_table, lo, start, last, BLOCK_N, BLOCK_SIZE)
    for pos in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
        key_pos = pos + tl.arange(0, BLOCK_N)
        in_range = keys_in_range(key_pos, start, end, HAS_WINDOW)
        # A tile at the end is loaded some rows earlier where those are harmless.
        SHIFT: tl.constexpr = MASK and LOAD == "descriptor" and not HAS_WINDOW
        if LOAD == "new":
            at = [first_row + pos, kv_head, 0]
            k = key_cache.load(at).reshape(BLOCK_N, HEAD_SIZE_PADDED)
        elif LOAD == "descriptor":
            shift = 0
            if SHIFT:
                shift = past_the_end(pos, end, BLOCK_N)
                key_pos -= shift
            at = [ids, kv_head, pos % BLOCK_SIZE - shift, 0]
            k = key_cache.load(at).reshape(BLOCK_N, HEAD_SIZE_PADDED)
        else:
            offsets = tile_offsets(
                ids, pos, kv_head, stride_k_block, stride_k_slot, stride_k_head,
                BLOCK_N, BLOCK_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            k = load_tile(
                key_cache, offsets, in_range, MASK, HEAD_SIZE, HEAD_SIZE_PADDED
            )
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        s = shape_scores(
            s, pos, key_pos, query_pos, slopes, qk_scale, cap_scale, cap_log2,
            SOFTCAP, ALIBI,
        )  # fmt: skip
        if MASK:
            if SHIFT:
                # Keys that the shifted tile repeats: out of everybody's sight.
                key_pos = tl.where(key_pos < pos, end, key_pos)
            # Behind the request's own new tokens may lie others', or garbage.
            s = mask_scores(
                s, pos, key_pos, query_pos, end, window, CAUSAL, HAS_WINDOW,
                LOAD != "new",
            )  # fmt: skip
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, qk_scale, SOFTCAP or ALIBI)
        l_i += tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if LOAD != "pointer":
            v = value_cache.load(at).reshape(BLOCK_N, HEAD_SIZE_PADDED)
            if MASK and not SHIFT:
                v = tl.where(in_range[:, None], v, 0.0)
        else:
            offsets = tile_offsets(
                ids, pos, kv_head, stride_v_block, stride_v_slot, stride_v_head,
                BLOCK_N, BLOCK_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            v = load_tile(
                value_cache, offsets, in_range, MASK, HEAD_SIZE, HEAD_SIZE_PADDED
            )
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        if LOAD != "new":
            ids = page_ids(block_table, pos + BLOCK_N, start, last, BLOCK_N, BLOCK_SIZE)
    return acc, m_i, l_i


@device_function
def _load_full_tile(
    cache, ids, pos, first_row, kv_head, stride_block, stride_slot, stride_head,
    LOAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr,
):  # fmt: skip
    """A K or V tile of which every key is seen; LOAD as for attend_tiles."""
    if LOAD == "new":
        tile = cache.load([first_row + pos, kv_head, 0])
        tile = tile.reshape(BLOCK_N, HEAD_SIZE_PADDED)
    elif LOAD == "descriptor":
        slot = 0 if BLOCK_N == BLOCK_SIZE else pos % BLOCK_SIZE
        tile = cache.load([ids, kv_head, slot, 0])
        tile = tile.reshape(BLOCK_N, HEAD_SIZE_PADDED)
    else:
        offsets = tile_offsets(
            ids, pos, kv_head, stride_block, stride_slot, stride_head,
            BLOCK_N, BLOCK_SIZE, HEAD_SIZE_PADDED,
        )  # fmt: skip
        all_keys = tl.arange(0, BLOCK_N) >= 0
        tile = load_tile(cache, offsets, all_keys, False, HEAD_SIZE, HEAD_SIZE_PADDED)
    return tile


@device_function
def _exponentials(
    s, pos, m_i, query_pos, slopes, qk_scale, cap_scale, cap_log2,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Probabilities of the scores of keys from `pos` on, relative to m_i."""
    key_pos = pos + tl.arange(0, s.shape[1])
    if ALIBI and SOFTCAP == 0:
        # The reference joins the row's part: two operations a score.
        rows, columns = alibi_terms(slopes, pos, key_pos, query_pos)
        bias = slopes[:, None] * columns[None, :] + (rows - m_i)[:, None]
        p = tl.math.exp2(s * qk_scale + bias)
    elif SOFTCAP or ALIBI:
        s = shape_scores(
            s, pos, key_pos, query_pos, slopes, qk_scale, cap_scale, cap_log2,
            SOFTCAP, ALIBI,
        )  # fmt: skip
        p = tl.math.exp2(s - m_i[:, None])
    else:
        p = tl.math.exp2(s * qk_scale - m_i[:, None])
    return p


@device_function
def _four_sums(p):
    """[rows, 4]: sums that stay in their lanes."""
    return tl.sum(tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@device_function
def _carried(p, dtype: tl.constexpr, DELAY_PV: tl.constexpr):
    """Probabilities as they travel to the next step: rounded, two in a register.

    Triton would carry 16-bit values one by one, in a register each. Only a single
    instruction both rounds and packs: with more, ptxas runs matrix instructions one by
    one.
    """
    if DELAY_PV == 1:
        even, odd = tl.split(p.reshape(p.shape[0], p.shape[1] // 2, 2))
        p = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;"
            if dtype == tl.bfloat16
            else "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        p = p.to(dtype)
    return p


@device_function
def _arrived(carried, dtype: tl.constexpr, DELAY_PV: tl.constexpr):
    """Probabilities from what `_carried` made of them."""
    p = carried
    if DELAY_PV == 1:
        even, odd = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [carried],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
        pairs = tl.join(even, odd)
        p = pairs.reshape(pairs.shape[0], pairs.shape[1] * 2).to(dtype, bitcast=True)
    return p


@device_function
def _attend_delayed(
    acc, sums, m_i, q, key_cache, value_cache, block_table, ids,
    lo, hi, start, last, first_row, first_row_ptr, query_pos, slopes, kv_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    qk_scale, cap_scale, cap_log2,
    LOAD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr, NUM_STAGES: tl.constexpr,
    DELAY_PV: tl.constexpr,
):  # fmt: skip
    """The loop of attend_unmasked with each tile's values a step late.

    So the matrix unit has a product to do while exponentials are computed. `sums` are
    zeros, `ids` the first tile's.
    """
    # The first step has zeros, and the values of a tile that every row sees.
    if DELAY_PV == 1:
        carried = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.int32)
    else:
        carried = tl.zeros([BLOCK_M, BLOCK_N], q.dtype)
    ids_v = ids
    for pos in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
        k = _load_full_tile(
            key_cache, ids, pos, first_row, kv_head,
            stride_k_block, stride_k_slot, stride_k_head,
            LOAD, BLOCK_SIZE, BLOCK_N, HEAD_SIZE, HEAD_SIZE_PADDED,
        )  # fmt: skip
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        v = _load_full_tile(
            value_cache, ids_v, tl.maximum(pos - BLOCK_N, lo), first_row, kv_head,
            stride_v_block, stride_v_slot, stride_v_head,
            LOAD, BLOCK_SIZE, BLOCK_N, HEAD_SIZE, HEAD_SIZE_PADDED,
        )  # fmt: skip
        p = _arrived(carried, q.dtype, DELAY_PV)
        acc = tl.dot(p, v.to(q.dtype), acc, input_precision="ieee")
        p = _exponentials(
            s, pos, m_i, query_pos, slopes,
            qk_scale, cap_scale, cap_log2, SOFTCAP, ALIBI,
        )  # fmt: skip
        sums += _four_sums(p)
        carried = _carried(p, q.dtype, DELAY_PV)
        if LOAD != "new":
            # A selection, always the first: passed on as it is, `ids` would keep the
            # loop from being pipelined.
            ids_v = tl.where(pos >= lo, ids, 0)
            ids = page_ids(block_table, pos + BLOCK_N, start, last, BLOCK_N, BLOCK_SIZE)
        elif HEAD_SIZE_PADDED > 128:
            # Read again for its place: before a load that the next step waits for,
            # ptxas issues products and copies ahead of the exponentials.
            first_row = tl.load(first_row_ptr, volatile=True)
    if lo < hi:
        v = _load_full_tile(
            value_cache, ids_v, hi - BLOCK_N, first_row, kv_head,
            stride_v_block, stride_v_slot, stride_v_head,
            LOAD, BLOCK_SIZE, BLOCK_N, HEAD_SIZE, HEAD_SIZE_PADDED,
        )  # fmt: skip
        p = _arrived(carried, q.dtype, DELAY_PV)
        acc = tl.dot(p, v.to(q.dtype), acc, input_precision="ieee")
    return acc, sums


@device_function
def attend_unmasked(
    acc, m_i, q, key_cache, value_cache, block_table,
    lo, hi, start, last, first_row, first_row_ptr, query_pos, slopes, kv_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    qk_scale, cap_scale, cap_log2,
    LOAD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr, NUM_STAGES: tl.constexpr,
    DELAY_PV: tl.constexpr,
):  # fmt: skip
    """Fold keys lo..hi, which every row sees, against the fixed reference m_i.

    Returns (acc, sums of the probabilities). Nothing is rescaled and no maximum looked
    for: probabilities are exact up to a factor of each row, whatever m_i is, as long as
    they and their sums stay finite; the caller looks at acc and the sums.
    """
    ids = 0
    if LOAD != "new":
        ids = page_ids(block_table, lo, start, last, BLOCK_N, BLOCK_SIZE)
    # One sum at the end.
    sums = tl.zeros([BLOCK_M, 4], tl.float32)
    if DELAY_PV:
        acc, sums = _attend_delayed(
            acc, sums, m_i, q, key_cache, value_cache, block_table, ids,
            lo, hi, start, last, first_row, first_row_ptr, query_pos, slopes, kv_head,
            stride_k_block, stride_k_slot, stride_k_head,
            stride_v_block, stride_v_slot, stride_v_head,
            qk_scale, cap_scale, cap_log2,
            LOAD, SOFTCAP, ALIBI, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            HEAD_SIZE, HEAD_SIZE_PADDED, NUM_STAGES, DELAY_PV,
        )  # fmt: skip
    else:
        for pos in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
            k = _load_full_tile(
                key_cache, ids, pos, first_row, kv_head,
                stride_k_block, stride_k_slot, stride_k_head,
                LOAD, BLOCK_SIZE, BLOCK_N, HEAD_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
            p = _exponentials(
                s, pos, m_i, query_pos, slopes,
                qk_scale, cap_scale, cap_log2, SOFTCAP, ALIBI,
            )  # fmt: skip
            sums += _four_sums(p)
            v = _load_full_tile(
                value_cache, ids, pos, first_row, kv_head,
                stride_v_block, stride_v_slot, stride_v_head,
                LOAD, BLOCK_SIZE, BLOCK_N, HEAD_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
            if LOAD != "new":
                ids = page_ids(
                    block_table, pos + BLOCK_N, start, last, BLOCK_N, BLOCK_SIZE
                )
    return acc, tl.sum(sums, 1)


@device_function
def tile_again(tiles_ptr, tile):
    """(first token, q_start, query_len, seq_len) of a tile, read anew.

    Keeping the first ones alive across the main loop costs registers that its
    accumulator needs; a volatile load is not merged with the earlier one.
    """
    first_token = tl.load(tiles_ptr + 8 * tile + 1, volatile=True)
    q_start = tl.load(tiles_ptr + 8 * tile + 2, volatile=True)
    query_len = tl.load(tiles_ptr + 8 * tile + 3, volatile=True)
    seq_len = tl.load(tiles_ptr + 8 * tile + 4, volatile=True)
    return first_token, q_start, query_len, seq_len
