# SPDX-License-Identifier: Apache-2.0
"""Attention for short queries: decode and speculative verification, KV split.

A program takes one item of the plan: a range of one request's keys, for the query rows
of one KV head (query tokens times heads, BLOCK_M at a time). Requests whose keys are
cut into several items leave normalised partial results and their log-sum-exp; the merge
kernel weighs them. Which requests are cut, and where, the plan decides on the device.

Source: split KV after Flash-Decoding (Dao et al., 2023); online softmax after
FlashAttention-2 (Dao, 2023); paging after Kwon et al. (2023).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.kernels._jit import device_function
from portable_backend.kernels._launch import (
    COUNT_DECODE,
    COUNT_MERGE,
    count_launch,
    wait_for_earlier,
)
from portable_backend.kernels._numerics import round_to
from portable_backend.kernels._softmax import (
    MASKED,
    initial_state,
    keys_in_range,
    load_tile,
    online_softmax,
    page_ids,
    past_the_end,
    shape_scores,
    tile_offsets,
    visible_keys,
)
from portable_backend.kernels.config import KernelConfig

# Query rows of one program at most: more would spill, so further rows get programs of
# their own and read the keys again.
MAX_BLOCK_M = 64
# Keys of a tile at head sizes up to 64, up to 128 and above: products' operands lie in
# 256 registers, in gfx11's twice, beside addresses where caches are larger than 2 GiB.
_RDNA_KEYS = {"gfx1100": (32, 16, 16), "gfx1201": (64, 32, 16)}


def block_m_for(num_rows: int) -> int:
    """Rows of one program for `num_rows` query rows per KV head."""
    padded: int = triton.next_power_of_2(num_rows)
    return min(max(16, padded), MAX_BLOCK_M)


def default_config(
    *,
    head_size: int,
    element_size: int,
    block_size: int,
    device: DeviceInfo,
    num_programs: int = 1,
    with_prefill: bool = False,
    has_window: bool = False,
) -> KernelConfig:
    """A config that is right everywhere and sensible on the architectures we know.

    Args:
        head_size: elements per head.
        element_size: bytes per element of query and cache.
        block_size: tokens per KV block.
        device: what the kernel will run on.
        num_programs: requests times KV heads, before any of them is cut.
        with_prefill: the step has prefills, too, whose programs share the units.
        has_window: keys before a sliding window must not be read.
    """
    if device.platform == "interpreter":
        return KernelConfig.of(
            BLOCK_N=256,
            LOAD="pointer",
            CTAS_PER_UNIT=0,
            MIN_CHUNK=1,
            MERGE="kernel",
            num_warps=1,
            num_stages=1,
        )
    padded = triton.next_power_of_2(head_size)
    if element_size == 4:  # dots run unrolled on plain ALUs
        fast = _Fast(16 if padded >= 128 else 32)
    elif device.platform == "hip":
        keys = _RDNA_KEYS.get(device.arch, (64, 64, 64))
        fast = _Fast(keys[(padded > 64) + (padded > 128)])
    elif device.arch == "sm90":
        fast = _fast_on_sm90(
            head_size=head_size,
            block_size=block_size,
            programs_per_unit=num_programs / device.num_units,
            with_prefill=with_prefill,
            has_window=has_window,
        )
    else:
        fast = _Fast(64 if padded <= 128 else 32)
    block_n, num_stages, ctas = fast.block_n, fast.num_stages, fast.ctas
    if device.platform == "hip":
        num_stages = 1
    # Two programs per unit keep enough bytes in flight; both must fit. All stages but
    # one are held in shared memory, beside queries and probabilities.
    limit = device.limits.shared_bytes_per_unit // min(ctas, 2)
    limit = min(limit, device.limits.shared_bytes_per_block) - 1024
    while element_size * shared_elements(block_n, padded, num_stages) > limit:
        if num_stages > 2:
            num_stages -= 1
        elif block_n > 16:
            block_n //= 2
        elif num_stages > 1:
            num_stages -= 1
        else:
            break
    return KernelConfig.of(
        BLOCK_N=block_n,
        LOAD=fast.load,
        CTAS_PER_UNIT=ctas,
        MIN_CHUNK=1 if block_n == 128 else 2,
        MERGE=fast.merge,
        num_warps=fast.num_warps,
        num_stages=num_stages,
        matrix_instr_nonkdim=16,
        launch_pdl=fast.early or None,
    )


class _Fast(NamedTuple):
    """What depends on architecture, head size and number of programs."""

    block_n: int = 64
    num_stages: int = 3
    ctas: int = 2
    load: str = "pointer"
    merge: str = "kernel"
    num_warps: int = 4
    early: bool = False


def _fast_on_sm90(
    *,
    head_size: int,
    block_size: int,
    programs_per_unit: float,
    with_prefill: bool,
    has_window: bool,
) -> _Fast:
    """The fastest in sweeps on an H200, nearly; docs/kernels.md has the numbers.

    Programs that all run at once want deep pipelines, since little else hides the
    latency. Where more are waiting, numbers that fill whole waves of four a unit want
    shallow ones; any others three a unit, whose last wave runs at almost full rate. For
    a launch that begins early a unit must have room for as many as were planned, and no
    more: else units that are free first get more than their share.

    A kernel merges parts in less time than the program that is last, which alone needs
    3 us for many. Outside graphs a second launch costs the host more.
    """
    padded = triton.next_power_of_2(head_size)
    few = programs_per_unit <= 1 / 2 and not with_prefill
    # Three a unit cut each request in two parts at least, of equal length; whole
    # requests, or halves, would leave up to a half idle.
    some = programs_per_unit <= 3 / 2 and not with_prefill
    many = programs_per_unit > 2 or with_prefill
    # Four programs a unit, all of one length, leave few units idle in the last wave.
    full = programs_per_unit > 0.9 * 4 * math.ceil(programs_per_unit / 4)
    fits = block_size % 64 == 0  # a descriptor's tile of 64 keys
    load = "descriptor" if fits and not has_window else "pointer"
    if padded > 128:
        if some and not few:
            block_n = 64 if load == "descriptor" else 32
            return _Fast(block_n, 2, 3, load, "captured", early=True)
        if not few and not with_prefill:
            if programs_per_unit <= 2 or (full and programs_per_unit <= 12):
                return _Fast(64, 2, 2, merge="last", early=True)
            if programs_per_unit <= 4:
                return _Fast(32, 2, 3, merge="last", early=True)
        merge = "captured" if few else "last"
        return _Fast(32, 3, 2, merge=merge, early=many)
    if with_prefill:
        load = "descriptor" if fits else "pointer"
        return _Fast(64, 2, 6, load, "last", early=True)
    if head_size < padded == 128:
        # Rows that end within 128 bytes are fetched more slowly, which more programs
        # make up for.
        if programs_per_unit > 8:
            return _Fast(64, 3, 6, merge="last", early=True)
        num_stages, ctas = (3, 2) if few else (2, 4)
        return _Fast(64, num_stages, ctas, load, "captured", early=True)
    if few and padded == 128:
        if load == "descriptor":
            return _Fast(64, 4, 1, load, "captured", early=True)
        return _Fast(128, 3, 1, load, "captured", num_warps=8, early=True)
    if few:
        return _Fast(64, 4, 2, merge="captured", early=True)
    if some:
        load = load if padded == 128 else "pointer"
        return _Fast(64, 3, 3, load, "captured", early=True)
    if many:
        # In the first wave it counts that units which are free first take no more
        # than their share.
        early = programs_per_unit > 4
        if padded == 128:
            if full and programs_per_unit <= 12:
                return _Fast(64, 2, 6, merge="last", early=True)
            return _Fast(64, 3, 3, load, "last", early=early)
        if not fits or programs_per_unit > 12:
            return _Fast(64, 3, 3, merge="last", early=early)
        return _Fast(64, 2, 6, merge="last", early=early)
    return _Fast(64 if padded == 128 else 128, 4, 2, merge="last", early=True)


def shared_elements(block_n: int, padded: int, num_stages: int) -> int:
    """Estimate for 32 query rows: queries, K and V tiles, probabilities."""
    return padded * (32 + 2 * max(1, num_stages - 1) * block_n) + 32 * block_n


def default_merge_config(*, device: DeviceInfo) -> KernelConfig:
    """The merge kernel's config: splits read at once, and warps."""
    # Of one warp: programs that wait early must leave room for decode's.
    early = device.limits.has_early_launch
    return KernelConfig.of(BLOCK_SPLITS=8, num_warps=1, launch_pdl=early or None)


@device_function
def _merge_rows(
    partial_ptr, lse_ptr, first_slot, num_splits, kv_head, num_rows, row, row_mask,
    NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, HEAD_SIZE_PADDED] results of rows whose parts all lie in memory.

    Past the first-level cache, which knows nothing of what other units wrote.
    """
    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    m_i = tl.full([BLOCK_M], MASKED, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)
    for slot in tl.range(first_slot, first_slot + num_splits, loop_unroll_factor=4):
        part = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * num_rows + row
        lse = tl.load(lse_ptr + part, mask=row_mask, other=MASKED, cache_modifier=".cg")
        values = tl.load(
            partial_ptr + part[:, None] * HEAD_SIZE_PADDED + offs_d[None, :],
            mask=row_mask[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m_i, lse)
        # A part in which the row saw nothing has lse MASKED and weighs nothing.
        weight = tl.where(lse > MASKED, tl.math.exp2(lse - m_new), 0.0)
        alpha = tl.math.exp2(m_i - m_new)
        acc = acc * alpha[:, None] + values * weight[:, None]
        l_i = l_i * alpha + weight
        m_i = m_new
    return acc * tl.where(l_i > 0, 1.0 / l_i, 0.0)[:, None]


@triton.jit(do_not_specialize=["stride_table", "window", "num_rows"])
def _decode_kernel(
    # outputs
    out_ptr, partial_ptr, lse_ptr,
    # inputs; the caches are pointers, or descriptors of
    # [num_blocks, num_kv_heads, block_size, head_size]
    query_ptr, key_cache, value_cache,
    block_table_ptr, sinks_ptr, slopes_ptr,
    # plan
    header_ptr, items_ptr, splits_ptr, arrivals_ptr, counts_ptr,
    # strides, in elements
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head,
    stride_table: tl.int64,
    # options
    num_rows: tl.int32, window: tl.int32, qk_scale, cap_scale, cap_log2,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr,
    # sizes
    NUM_KV_HEADS: tl.constexpr, NUM_QUERIES_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    # arithmetic
    EMULATE_BF16: tl.constexpr,
    # tile
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOAD: tl.constexpr,
    MERGE: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(EARLY_START)
    count_launch(counts_ptr, COUNT_DECODE)
    if OVERLAP:  # noqa: SIM102  a constexpr must stand alone
        # What comes after this launch counts on the prefill kernel's results too: its
        # last program, which has the least to do, ends after prefill.
        if (tl.program_id(0) == tl.num_programs(0) - 1) & (
            tl.program_id(1) == tl.num_programs(1) - 1
        ):
            tl.extra.cuda.gdc_wait()
    DESCRIPTOR: tl.constexpr = LOAD == "descriptor"
    if SAME_STRIDES:  # so one set of offsets serves both caches
        stride_v_block = stride_k_block
        stride_v_slot = stride_k_slot
        stride_v_head = stride_k_head
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # All that the first loads need stands in the item: one wait instead of three.
    num_items = tl.load(header_ptr)
    seq = tl.load(items_ptr + 8 * item)
    lo = tl.load(items_ptr + 8 * item + 1)
    hi = tl.load(items_ptr + 8 * item + 2)
    slot = tl.load(items_ptr + 8 * item + 3)
    q_start = tl.load(items_ptr + 8 * item + 4)
    query_len = tl.load(items_ptr + 8 * item + 5)
    seq_len = tl.load(items_ptr + 8 * item + 6)
    if item >= num_items:
        return
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(1) * BLOCK_M >= query_len * NUM_QUERIES_PER_KV:
        return

    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    token = row // NUM_QUERIES_PER_KV
    head = kv_head * NUM_QUERIES_PER_KV + row % NUM_QUERIES_PER_KV
    row_mask = token < query_len
    io_mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_rows = (q_start + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q = tl.load(query_ptr + q_rows[:, None] + offs_d[None, :], mask=io_mask, other=0.0)
    if EMULATE_BF16:
        q = q.to(tl.float32)
    query_pos = seq_len - query_len + token
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=row_mask, other=0.0)
        slopes = slopes.to(tl.float32) * 1.4426950408889634
    # The first keys a row of this request may see; the sink goes with them.
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(seq_len - query_len - window + 1, 0)
    m_i, l_i = initial_state(sinks_ptr, head, row_mask, lo <= start, SINKS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)
    block_table = block_table_ptr + seq.to(tl.int64) * stride_table
    last = tl.maximum(hi - 1, 0)

    ids = page_ids(block_table, lo, start, last, BLOCK_N, BLOCK_SIZE)
    for pos in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
        if DESCRIPTOR:
            shift = past_the_end(pos, hi, BLOCK_N)
            key_pos = pos - shift + tl.arange(0, BLOCK_N)
            at = [ids, kv_head, pos % BLOCK_SIZE - shift, 0]
            k = key_cache.load(at).reshape(BLOCK_N, HEAD_SIZE_PADDED)
            v = value_cache.load(at).reshape(BLOCK_N, HEAD_SIZE_PADDED)
        else:
            key_pos = pos + tl.arange(0, BLOCK_N)
            in_range = keys_in_range(key_pos, start, hi, HAS_WINDOW)
            k_offsets = tile_offsets(
                ids, pos, kv_head, stride_k_block, stride_k_slot, stride_k_head,
                BLOCK_N, BLOCK_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            k = load_tile(
                key_cache, k_offsets, in_range, True, HEAD_SIZE, HEAD_SIZE_PADDED
            )
            v_offsets = tile_offsets(
                ids, pos, kv_head, stride_v_block, stride_v_slot, stride_v_head,
                BLOCK_N, BLOCK_SIZE, HEAD_SIZE_PADDED,
            )  # fmt: skip
            v = load_tile(
                value_cache, v_offsets, in_range, True, HEAD_SIZE, HEAD_SIZE_PADDED
            )
        ids = page_ids(block_table, pos + BLOCK_N, start, last, BLOCK_N, BLOCK_SIZE)
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        s = shape_scores(
            s, pos, key_pos, query_pos, slopes, qk_scale, cap_scale, cap_log2,
            SOFTCAP, ALIBI,
        )  # fmt: skip
        ok = visible_keys(key_pos, query_pos, hi, window, CAUSAL, HAS_WINDOW, False)
        if DESCRIPTOR:
            ok = ok & (key_pos >= pos)[None, :]
        s = tl.where(ok, s, MASKED)
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, qk_scale, SOFTCAP or ALIBI)
        l_i += tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")

    acc = acc * tl.where(l_i > 0, 1.0 / l_i, 0.0)[:, None]
    finished = slot < 0
    if slot >= 0:
        part = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * num_rows + row
        tl.store(
            partial_ptr + part[:, None] * HEAD_SIZE_PADDED + offs_d[None, :],
            acc,
            mask=row_mask[:, None],
        )
        lse = tl.where(l_i > 0, m_i + tl.math.log2(tl.maximum(l_i, 1.0e-38)), MASKED)
        tl.store(lse_ptr + part, lse, mask=row_mask)
        if MERGE == "last":
            # Whoever comes last merges, always in the order of the parts. All of this
            # program's stores are behind the barrier, and so ahead of the release.
            tl.debug_barrier()
            first_slot = tl.load(splits_ptr + 2 * seq)
            num_splits = tl.load(splits_ptr + 2 * seq + 1)
            place = (seq * NUM_KV_HEADS + kv_head) * tl.num_programs(1)
            place += tl.program_id(1)
            arrived = tl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu")
            finished = arrived == num_splits - 1
            if finished:
                tl.store(arrivals_ptr + place, 0)  # for the next layer
                acc = _merge_rows(
                    partial_ptr, lse_ptr, first_slot, num_splits, kv_head, num_rows,
                    row, row_mask, NUM_KV_HEADS, BLOCK_M, HEAD_SIZE_PADDED,
                )  # fmt: skip
    if finished:
        rows_out = (q_start + token).to(tl.int64) * stride_out_token
        rows_out += head * stride_out_head
        tl.store(
            out_ptr + rows_out[:, None] + offs_d[None, :],
            round_to(acc, out_ptr.dtype.element_ty, EMULATE_BF16),
            mask=io_mask,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    # output
    out_ptr,
    # inputs: partial results and their log2-sum-exp2
    partial_ptr, lse_ptr, query_start_loc_ptr,
    # plan
    splits_ptr, counts_ptr,
    # strides, in elements
    stride_out_token, stride_out_head,
    # sizes
    num_rows: tl.int32,
    NUM_KV_HEADS: tl.constexpr, NUM_QUERIES_PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_PADDED: tl.constexpr,
    EMULATE_BF16: tl.constexpr,
    # tile
    BLOCK_SPLITS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs, query heads times query tokens): one program per output row."""
    count_launch(counts_ptr, COUNT_MERGE)
    seq = tl.program_id(0)
    NUM_QUERY_HEADS: tl.constexpr = NUM_KV_HEADS * NUM_QUERIES_PER_KV
    token = tl.program_id(1) // NUM_QUERY_HEADS
    head = tl.program_id(1) % NUM_QUERY_HEADS
    # The plan is older than the decode launch, whose results alone need the wait.
    first_slot = tl.load(splits_ptr + 2 * seq)
    num_splits = tl.load(splits_ptr + 2 * seq + 1)
    q_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - q_start
    wait_for_earlier(EARLY_START)
    if (num_splits == 0) | (token >= query_len):
        return
    kv_head = head // NUM_QUERIES_PER_KV
    row = token * NUM_QUERIES_PER_KV + head % NUM_QUERIES_PER_KV

    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    offs_s = tl.arange(0, BLOCK_SPLITS)
    m_i = MASKED
    l_i = 0.0
    acc = tl.zeros([HEAD_SIZE_PADDED], tl.float32)
    for split in range(0, num_splits, BLOCK_SPLITS):
        ok = split + offs_s < num_splits
        slot = first_slot + split + offs_s
        part = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * num_rows + row
        lse = tl.load(lse_ptr + part, mask=ok, other=MASKED)
        values = tl.load(
            partial_ptr + part[:, None] * HEAD_SIZE_PADDED + offs_d[None, :],
            mask=ok[:, None],
            other=0.0,
        )
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        # A split in which the row saw nothing has lse MASKED and weighs nothing.
        weight = tl.where(lse > MASKED, tl.math.exp2(lse - m_new), 0.0)
        alpha = tl.math.exp2(m_i - m_new)
        acc = acc * alpha + tl.sum(values * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    acc = acc * tl.where(l_i > 0, 1.0 / l_i, 0.0)
    offset = (q_start + token).to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(
        out_ptr + offset + offs_d,
        round_to(acc, out_ptr.dtype.element_ty, EMULATE_BF16),
        mask=offs_d < HEAD_SIZE,
    )
