# SPDX-License-Identifier: Apache-2.0
"""Device helpers that prefill and decode share: scores, masks, online softmax.

All state is in the log2 domain, so that exp2 serves: m_i is a running maximum of
score * log2(e), l_i the sum of exp2(score * log2(e) - m_i).
"""

import triton.language as tl

from portable_backend.kernels._jit import device_function

LOG2E = 1.4426950408889634
# Finite stand-ins for -inf. A running maximum never falls below LOWEST, which lies far
# above a masked score times any scale: so exp2(masked - maximum) is 0 even for a row
# that has seen no key, and no difference is NaN.
MASKED = tl.constexpr(-1.0e30)
LOWEST = tl.constexpr(-1.0e20)


@device_function
def page_ids(
    block_table, pos, start, last, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Block ids of keys pos..pos+BLOCK_N-1, clamped to the keys start..last.

    Entries of the table outside that range may be stale and are never read. One id
    where a tile lies within a block, one per key otherwise.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        idx = tl.minimum(pos, last)
    else:
        idx = tl.minimum(tl.maximum(pos + tl.arange(0, BLOCK_N), start), last)
    return tl.load(block_table + idx // BLOCK_SIZE)


@device_function
def tile_offsets(
    ids,
    pos,
    head,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
):
    """Offsets [BLOCK_N, HEAD_SIZE_PADDED] of a K or V tile; int64, pools are large."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    blocks = ids.to(tl.int64) * stride_block + head.to(tl.int64) * stride_head
    if BLOCK_SIZE % BLOCK_N == 0:
        first_row = blocks + (pos % BLOCK_SIZE) * stride_slot
        rows = first_row + (offs_n * stride_slot)[:, None]
    else:
        rows = (blocks + ((pos + offs_n) % BLOCK_SIZE) * stride_slot)[:, None]
    return rows + offs_d[None, :]


@device_function
def load_tile(
    base,
    offsets,
    in_range,
    MASK_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
):
    """Load a K or V tile; rows out of range are not read and give zeros."""
    in_head = (tl.arange(0, HEAD_SIZE_PADDED) < HEAD_SIZE)[None, :]
    in_range = in_range[:, None]
    if MASK_ROWS and HEAD_SIZE != HEAD_SIZE_PADDED:
        tile = tl.load(base + offsets, mask=in_range & in_head, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(base + offsets, mask=in_range, other=0.0)
    elif HEAD_SIZE != HEAD_SIZE_PADDED:
        tile = tl.load(base + offsets, mask=in_head, other=0.0)
    else:
        tile = tl.load(base + offsets)
    return tile


@device_function
def past_the_end(pos, end, BLOCK_N: tl.constexpr):
    """How many keys of the tile at pos lie at or past `end`.

    A descriptor loads that tile so many rows earlier: rows before the block read as
    zeros, those within it are earlier keys of the request, and nothing past the end,
    which may be NaN, is touched. The tile's keys then start at pos minus this.
    """
    return tl.maximum(pos + BLOCK_N - end, 0)


@device_function
def fast_tanh(x):
    """One instruction of NVIDIA's from sm75 on; relative error at most 2^-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@device_function
def alibi_terms(slopes, pos, key_pos, query_pos):
    """(r [rows], c [keys]): slope times distance is r + slope * c.

    A conversion to fp32 for each score would cost as much as its exponential.
    """
    rows = slopes * (pos - query_pos).to(tl.float32)
    return rows, (key_pos - pos).to(tl.float32)


@device_function
def shape_scores(
    scores,
    pos,
    key_pos,
    query_pos,
    slopes,
    qk_scale,
    cap_scale,
    cap_log2,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Apply soft cap and ALiBi, leaving scores in the log2 domain.

    Without either the scores stay raw: qk_scale is then folded into exp2's argument.
    `pos` is near key_pos, whose distances to it are small.
    """
    if SOFTCAP == 1:
        # cap * tanh(x) = cap - 2 cap / (1 + exp(2 x)), within 2^-22 of the cap: zero
        # and infinity saturate. The reciprocal as a square is one operation.
        root = tl.math.rsqrt(
            1.0 + tl.math.exp2(2.8853900817779268 * cap_scale * scores)
        )
        scores = cap_log2 - 2.0 * cap_log2 * root * root
    elif SOFTCAP == 3:
        scores = cap_log2 * fast_tanh(scores * cap_scale)
    elif SOFTCAP == 2:
        # tanh by exp2 of a non-positive number: saturates instead of overflowing.
        t = scores * cap_scale
        e = tl.math.exp2(-2.8853900817779268 * tl.abs(t))
        tanh = (1.0 - e) / (1.0 + e)
        tanh = tl.where(t < 0, -tanh, tanh)
        # Near 0 the difference cancels; two terms of the series do not.
        tanh = tl.where(tl.abs(t) < 0.02, t - t * t * t * 0.33333333, tanh)
        scores = tanh * cap_log2
    elif ALIBI:
        scores = scores * qk_scale
    if ALIBI:
        rows, columns = alibi_terms(slopes, pos, key_pos, query_pos)
        scores += slopes[:, None] * columns[None, :] + rows[:, None]
    return scores


@device_function
def keys_in_range(key_pos, start, end, HAS_WINDOW: tl.constexpr):
    """[keys] bool: may any row of this program see the key?

    Values of other keys must not even be multiplied by zero: they may be NaN.
    """
    ok = key_pos < end
    if HAS_WINDOW:
        ok = ok & (key_pos >= start)
    return ok


@device_function
def visible_keys(
    key_pos,
    query_pos,
    end,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUERY_BEFORE_END: tl.constexpr,
):
    """[rows, keys] bool: key before `end` and inside this row's causal window.

    QUERY_BEFORE_END says that every row that counts has query_pos < end, so that the
    causal test alone is enough.
    """
    if CAUSAL:
        ok = key_pos[None, :] <= query_pos[:, None]
        if not QUERY_BEFORE_END:
            ok = ok & (key_pos < end)[None, :]
    else:
        ok = (key_pos < end)[None, :]
    if HAS_WINDOW:
        ok = ok & (query_pos[:, None] - key_pos[None, :] < window)
        if not CAUSAL:
            ok = ok & (key_pos[None, :] - query_pos[:, None] < window)
    return ok


@device_function
def mask_scores(
    scores,
    pos,
    key_pos,
    query_pos,
    end,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Scores of keys that a row may not see become hugely negative.

    Rows that count have query_pos < end. `pos` is near key_pos and query_pos. CLEAN
    promises that no score is NaN but for NaN in what the row's request holds.
    """
    if CAUSAL and CLEAN and not HAS_WINDOW:
        # A bound linear in the distance, at least 5e29 for keys up to the query and at
        # most -5e29 after it: two float operations a score, where a comparison and a
        # selection cost predicate registers and the packing of them.
        row = (query_pos - pos).to(tl.float32) * 1.0e30 + 0.5e30
        column = (key_pos - pos).to(tl.float32) * 1.0e30
        scores = tl.minimum(
            scores, row[:, None] - column[None, :], propagate_nan=tl.PropagateNan.ALL
        )
    else:
        ok = visible_keys(key_pos, query_pos, end, window, CAUSAL, HAS_WINDOW, True)
        scores = tl.where(ok, scores, MASKED)
    return scores


@device_function
def online_softmax(scores, m_i, l_i, qk_scale, SCALED: tl.constexpr):
    """One step: returns (probabilities, rescale factor, m_i, l_i without this tile)."""
    if SCALED:
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        probs = tl.math.exp2(scores - m_new[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)
        probs = tl.math.exp2(scores * qk_scale - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    return probs, alpha, m_new, l_i * alpha


@device_function
def initial_state(
    sinks_ptr, heads, rows_mask, use_sink, SINKS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(m_i, l_i) before the first key; a sink is a logit without a value."""
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + heads, mask=rows_mask, other=0.0).to(tl.float32)
        sink = tl.maximum(
            sink * 1.4426950408889634, LOWEST, propagate_nan=tl.PropagateNan.ALL
        )
        m_i = tl.where(use_sink, sink, m_i)
        l_i = tl.where(use_sink, l_i + 1.0, l_i)
    return m_i, l_i
