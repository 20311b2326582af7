# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of `paged_attention`: size, graphs, allocation, time."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    SENTINEL,
    Case,
    assert_close,
    call,
    check_inputs,
    first_readable,
    make_caches,
    make_inputs,
    make_planner,
    references,
    with_seqs,
)

from portable_backend.kernels import attention, launch_counts, paged_attention

pytestmark = pytest.mark.gpu
LLAMA = Case(1, (), heads=(32, 8), head_size=128)


def attend(inputs, batch):
    return paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        batch,
        inputs.options,
        out=inputs.out,
    )


@pytest.mark.parametrize("seqs", [((1, 16384),), ((1328, 16384),), ((4, 16000),) * 3])
def test_long_contexts(seqs, device):
    case = replace(LLAMA, seqs=seqs, heads=(8, 2))
    check_inputs(make_inputs(case, device), case)


# vllm#47671, sglang#20389: a pool of more than 2^31 elements, and its last blocks.
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("layout", ["planes", "pairs_nhd", "hnd", "packed_hnd"])
def test_blocks_past_2_to_the_31_elements(layout, block_size, device):
    """Offsets need 64 bits; on HIP a pool beyond 2 GB also takes other loads."""
    seqs = ((1, 700), (5, 300), (200, 520), (64, 64))
    case = replace(LLAMA, seqs=seqs, layout=layout, block_size=block_size)
    small = make_inputs(case, device)
    num_blocks = 2**31 // (block_size * 8 * 128) + 2048
    caches = make_caches(
        num_blocks,
        block_size,
        8,
        128,
        layout=layout,
        dtype=case.dtype,
        device=device,
    )
    used = small.key_cache.shape[0]
    for cache, numbers in zip(
        caches, (small.key_cache, small.value_cache), strict=True
    ):
        cache[num_blocks - used :] = numbers
    oracle, same_dtype = references(small)
    small.key_cache, small.value_cache = caches
    small.batch.block_table.add_(num_blocks - used)
    assert_close(call(small), oracle, same_dtype, f"{layout}, page {block_size}")


@pytest.mark.slow
@pytest.mark.parametrize("seqs", [((1, 40),) * 3, ((3, 40),), ((12, 12), (30, 50))])
def test_rows_of_query_and_out_past_2_to_the_31_elements(seqs, device):
    case = replace(LLAMA, seqs=seqs, heads=(4, 2))
    inputs = make_inputs(case, device)
    oracle, same_dtype = references(inputs)
    stride = 2**31 // (case.num_tokens - 1) + 2048
    for name in ("query", "out"):
        buffer = torch.full(
            (case.num_tokens * stride,), SENTINEL, dtype=case.dtype, device=device
        )
        view = buffer.as_strided(inputs.query.shape, (stride, 128, 1))
        view.copy_(getattr(inputs, name))
        setattr(inputs, name, view)
    assert_close(call(inputs), oracle, same_dtype, case)


def fill_from(static, fresh):
    """Overwrite the tensors that a captured graph reads."""
    static.query.copy_(fresh.query)
    static.batch.query_start_loc.copy_(fresh.batch.query_start_loc)
    static.batch.seq_lens.copy_(fresh.batch.seq_lens)
    columns = fresh.batch.block_table.shape[1]
    static.batch.block_table[:, :columns].copy_(fresh.batch.block_table)
    blocks = fresh.key_cache.shape[0]
    static.key_cache.fill_(float("nan"))
    static.value_cache.fill_(float("nan"))
    static.key_cache[:blocks].copy_(fresh.key_cache)
    static.value_cache[:blocks].copy_(fresh.value_cache)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("plan_in_graph", [True, False])
def test_a_captured_decode_replays_with_other_lengths(plan_in_graph, window, device):
    """As FULL graphs do: captured at length 1, replayed padded and long."""
    base = replace(LLAMA, window=window, sinks=True)
    largest = with_seqs(base, *[(1, 3000)] * 8)
    static = make_inputs(largest, device)
    # Capture as a runner does: every request at its shortest.
    static.batch.seq_lens.fill_(1)
    planner = make_planner(largest, device)
    rows = static.query.shape[0]
    planned = planner.plan(static.batch, rows)
    attend(static, planned)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan_in_graph:
            planned = planner.plan(static.batch, rows)
        attend(static, planned)
    for seqs in (
        [(1, 3000)] * 8,
        [(1, 1), (1, 17), (1, 2999), (1, 64), (1, 300), (0, 0), (0, 0), (0, 0)],
        [(1, 2500)] + [(0, 0)] * 7,
        [(1, 5)] * 8,
    ):
        case = with_seqs(base, *seqs)
        fresh = make_inputs(case, device)
        fresh.options = static.options
        oracle, same_dtype = references(fresh)
        tokens = case.num_tokens
        fresh.query = torch.cat([fresh.query, static.query[tokens:]])
        fill_from(static, fresh)
        static.out.fill_(SENTINEL)
        if not plan_in_graph:
            planner.plan(static.batch, rows)
        graph.replay()
        assert_close(static.out[:tokens], oracle, same_dtype, seqs)
        assert bool((static.out[tokens:] == SENTINEL).all()), "padding was written"


def test_a_captured_mixed_batch_replays_with_another_mix(device):
    """Captured with the bounds of a mixed FULL graph: max_query_len = num_tokens."""
    captured = with_seqs(LLAMA, (60, 700), (1, 700), (1, 700), (2, 700))
    static = make_inputs(captured, device)
    static.batch = replace(static.batch, max_query_len=captured.num_tokens)
    planner = make_planner(captured, device)
    rows = static.query.shape[0]
    planned = planner.plan(static.batch, rows)
    attend(static, planned)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned = planner.plan(static.batch, rows)
        attend(static, planned)
    for seqs in (
        [(1, 600), (1, 33), (5, 500), (57, 57)],
        [(20, 650), (20, 30), (20, 20), (4, 4)],
        [(1, 700), (1, 1), (0, 0), (0, 0)],
    ):
        case = with_seqs(LLAMA, *seqs)
        fresh = make_inputs(case, device)
        fresh.options = static.options
        oracle, same_dtype = references(fresh)
        tokens = case.num_tokens
        fresh.query = torch.cat([fresh.query, static.query[tokens:]])
        fill_from(static, fresh)
        static.out.fill_(SENTINEL)
        graph.replay()
        assert_close(static.out[:tokens], oracle, same_dtype, seqs)
        assert bool((static.out[tokens:] == SENTINEL).all()), "padding was written"


def test_graph_replays_are_counted(device):
    inputs = make_inputs(with_seqs(LLAMA, (1, 900), (1, 50)), device)
    planner = make_planner(with_seqs(LLAMA, (1, 900), (1, 50)), device)
    planned = planner.plan(inputs.batch, 2)
    attend(inputs, planned)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(inputs, planned)
    before = launch_counts(device)
    for _ in range(5):
        graph.replay()
    after = launch_counts(device)
    assert after["decode"] - before["decode"] == 5
    assert after["merge"] - before["merge"] == 5
    assert after["prefill"] == before["prefill"]


def test_a_planned_call_allocates_nothing_and_never_waits(device):
    case = with_seqs(LLAMA, (1, 900), (4, 50), (100, 300))
    inputs = make_inputs(case, device)
    planner = make_planner(case, device)
    attend(inputs, planner.plan(inputs.batch, case.num_tokens))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(inputs, planner.plan(inputs.batch, case.num_tokens))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def time_us(inputs, planner, rows):
    """Median time of a call inside a graph, planned beforehand."""
    planned = planner.plan(inputs.batch, rows)
    attend(inputs, planned)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            attend(inputs, planned)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 5)
    return sorted(times)[len(times) // 2]


# vllm#53147: tiles left of the window were visited.
@pytest.mark.slow
@pytest.mark.parametrize("seqs", [((1, 32768),) * 8, ((2048, 65536),)])
def test_time_follows_the_window_not_the_context(seqs, device):
    times = {}
    for window in (None, 1024):
        case = replace(LLAMA, seqs=seqs, window=window)
        inputs = make_inputs(case, device)
        planner = make_planner(case, device)
        times[window] = time_us(inputs, planner, case.num_tokens)
    visible = 1024 + seqs[0][0]
    share = visible / seqs[0][1]
    assert times[1024] < times[None] * (share + 0.15), times


@pytest.mark.parametrize("cap", [30.0, 50.0])
@pytest.mark.parametrize("spread", [1, 4, 16, 64])
def test_the_fast_tanh_is_as_near_the_oracle(spread, cap, device, monkeypatch):
    """Prefill's soft cap by one instruction, with scores far beyond the cap, too."""
    case = replace(LLAMA, seqs=((1024, 1024), (300, 1500)), softcap=cap)
    errors, outs = {}, {}
    for fast in (False, True):
        if not fast:
            monkeypatch.setattr(attention, "_FAST_TANH_CAP", 0)
        inputs = make_inputs(case, device)
        inputs.query[: case.num_tokens] *= spread
        oracle, _ = references(inputs)
        outs[fast] = call(inputs)[: case.num_tokens].float()
        error = outs[fast] - oracle[: case.num_tokens].float()
        errors[fast] = float(error.norm() / oracle[: case.num_tokens].float().norm())
        monkeypatch.undo()
    if torch.version.cuda and spread > 1:
        assert not torch.equal(outs[False], outs[True]), "the same kernel ran twice"
    assert errors[True] < 1.05 * errors[False] < 0.01, errors


def test_first_readable_key_is_the_windows_first():
    case = replace(LLAMA, window=4)
    assert first_readable(case, 1, 10) == 6
    assert first_readable(case, 3, 10) == 4
    assert first_readable(case, 3, 5) == 0
