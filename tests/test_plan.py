# SPDX-License-Identifier: Apache-2.0
"""The work plan covers each query row and key exactly once, within its buffers."""

import itertools
import random

import pytest
import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels import AttentionPlanner, PagedBatch
from portable_backend.kernels import plan as plan_module
from portable_backend.kernels.plan import default_config

HEADS = ((8, 2), (48, 1), (5, 1), (4, 4))
CAPACITY = 320


def make_planner(heads, device, *, window=None, causal=True, block_size=16, **config):
    default = default_config(
        num_queries_per_kv=heads[0] // heads[1],
        head_size=64,
        dtype=torch.bfloat16,
        block_size=block_size,
        device=DeviceInfo.detect(device),
    )
    decode = default.decode.replace(
        **{"BLOCK_N": 32, "CTAS_PER_UNIT": 32, "MIN_CHUNK": 1} | config
    )
    prefill = default.prefill.replace(BLOCK_M=64, BLOCK_N=32, PACK=1)
    return AttentionPlanner(
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=64,
        dtype=torch.bfloat16,
        block_size=block_size,
        max_num_seqs=CAPACITY,
        max_num_tokens=20000,
        sliding_window=window,
        causal=causal,
        device=device,
        config=type(default)(prefill=prefill, decode=decode, merge=default.merge),
    )


def plan(planner, seqs, device, *, host_starts=False, max_query_len=None):
    """Plan a batch; returns (plan, header, items, splits, tiles) as lists."""
    lens = torch.tensor(seqs, dtype=torch.int32).reshape(-1, 2)
    starts = torch.zeros(len(seqs) + 1, dtype=torch.int32)
    starts[1:] = lens[:, 0].cumsum(0)
    batch = PagedBatch(
        query_start_loc=starts.to(device),
        seq_lens=lens[:, 1].contiguous().to(device),
        block_table=torch.zeros(len(seqs), 1, dtype=torch.int32, device=device),
        max_query_len=max_query_len or max([q for q, _ in seqs], default=0),
        max_seq_len=max([s for _, s in seqs], default=0),
        query_start_loc_cpu=starts if host_starts else None,
    )
    # Whatever the last plan left must not be read as part of this one.
    for buffer in (planner.header, planner.items, planner.splits, planner.tiles):
        buffer.fill_(-7777)
    made = planner.plan(batch, int(starts[-1])).plan
    return (
        made,
        planner.header.tolist(),
        planner.items.tolist(),
        planner.splits.tolist(),
        planner.tiles.tolist(),
    )


def check(planner, seqs, device, **arguments):
    made, header, items, splits, tiles = plan(planner, seqs, device, **arguments)
    if not seqs:
        assert made.num_items == made.num_tiles == 0
        return
    num_items, num_tiles = header
    assert num_items <= min(made.num_items, len(items))
    assert num_tiles <= min(made.num_tiles, len(tiles))
    block_n = made.config.decode["BLOCK_N"]
    tile_tokens = made.config.prefill["BLOCK_M"] // made.config.prefill["PACK"]
    starts = [0, *itertools.accumulate(query_len for query_len, _ in seqs)]
    ranges = {}
    for seq, lo, hi, slot, *request in items[:num_items]:
        ranges.setdefault(seq, []).append((lo, hi, slot))
        assert request[:3] == [starts[seq], *seqs[seq]]
    for mine in ranges.values():
        mine.sort()
    sizes = [-(-(hi - lo) // block_n) for _, lo, hi, *_ in items[:num_items]]
    assert sizes == sorted(sizes, reverse=True), "items are not longest first"
    slots = []
    for i, (query_len, seq_len) in enumerate(seqs):
        mine = ranges.pop(i, [])
        if not 0 < query_len <= planner.max_decode_query_len:
            assert not mine, f"request {i} has no short query but items {mine}"
            assert splits[i][1] == 0
            continue
        first = 0
        if planner.sliding_window is not None:
            first = max(0, seq_len - query_len - planner.sliding_window + 1)
        # In order, without gap or overlap, from the first visible key's tile on.
        assert mine[0][0] == first // block_n * block_n
        assert mine[-1][1] == seq_len
        for (_, end, _), (start, _, _) in itertools.pairwise(mine):
            assert end == start
        assert all(lo < hi and lo % block_n == 0 for lo, hi, _ in mine) or seq_len == 0
        given = [slot for _, _, slot in mine]
        if len(mine) == 1:
            assert given == [-1]
            assert splits[i][1] == 0
        else:
            assert given == list(range(splits[i][0], splits[i][0] + len(mine)))
            assert splits[i][1] == len(mine)
            slots += given
    assert not ranges, f"items of requests that are not there: {ranges}"
    assert len(slots) == len(set(slots)), "two items share a slot"
    rows = made.row_blocks * made.block_m
    capacity = planner.lse.numel() // (planner.num_kv_heads * rows)
    assert max(slots, default=-1) < max(capacity, 0) or not slots
    expected = {
        (i, first)
        for i, (query_len, _) in enumerate(seqs)
        if query_len > planner.max_decode_query_len
        for first in range(0, query_len, tile_tokens)
    }
    assert len(expected) == num_tiles
    assert {(seq, first) for seq, first, *_ in tiles[:num_tiles]} == expected
    for seq, _, *request in tiles[:num_tiles]:
        assert request[:3] == [starts[seq], *seqs[seq]]
    if planner.causal:
        ends = [
            min(seqs[s][1], seqs[s][1] - seqs[s][0] + first + tile_tokens)
            for s, first, *_ in tiles[:num_tiles]
        ]
        assert ends == sorted(ends, reverse=True), "tiles are not longest first"


def draw_seqs(rng, num_seqs):
    seqs = []
    for _ in range(num_seqs):
        kind = rng.choice(("decode", "decode", "verify", "prefill", "chunk", "pad"))
        context = rng.choice((0, 1, 15, 16, 31, 32, 33, 97, 1328, 40000))
        query_len = {
            "decode": 1,
            "verify": rng.randint(2, 8),
            "prefill": rng.choice((9, 63, 64, 65, 130)),
            "chunk": rng.choice((9, 54, 200)),
            "pad": 0,
        }[kind]
        if kind == "pad":
            context = 0
        seqs.append((query_len, query_len + context * (kind != "prefill")))
    return seqs


@pytest.mark.parametrize(
    ("num_seqs", "window"), [(1, None), (2, 20), (7, None), (8, 20)]
)
def test_every_row_and_key_is_planned_once(num_seqs, window, device):
    rng = random.Random(num_seqs)
    planner = make_planner(HEADS[num_seqs % len(HEADS)], device, window=window)
    for round_ in range(4):
        seqs = draw_seqs(rng, num_seqs)
        check(planner, seqs, device, host_starts=round_ % 2 == 1)


def test_more_requests_than_one_step_of_a_loop_takes(device, monkeypatch):
    num_seqs = 258
    if device.type == "cpu":  # shorter steps instead, for the interpreter's sake
        num_seqs = 36
        monkeypatch.setattr(plan_module, "BLOCK_SEQS", 16)
        monkeypatch.setattr(plan_module, "RANK_SEQS", 16)
    seqs = draw_seqs(random.Random(num_seqs), num_seqs)
    check(make_planner((8, 2), device), seqs, device)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "seqs",
    [
        [],
        [(0, 0)],
        [(1, 0), (0, 0), (1, 1)],
        [(8, 8), (9, 9)],  # at the border between the kernels
        [(1, 100000)],
        [(1, 100000), (1, 5), (1, 5)],
        [(1, 64)] * 40,
        [(129, 129), (64, 5000), (1, 1), (65, 65)],
        [(200, 200), (200, 200), (200, 200)],  # equal lengths: no two share a place
    ],
)
def test_awkward_batches_are_planned_once(seqs, causal, device):
    check(make_planner((8, 2), device, causal=causal), seqs, device)


def test_loose_bounds_plan_the_same_work(device):
    seqs = [(1, 70), (3, 20), (12, 40), (0, 0)]
    planner = make_planner((8, 2), device)
    exact = plan(planner, seqs, device)
    loose = plan(planner, seqs, device, max_query_len=500)
    assert exact[1:] == loose[1:]
    assert loose[0].num_tiles >= exact[1][1]


# vllm#48076, #47520: whether to split was decided by the batch size alone.
def test_splitting_follows_lengths_and_batch_together(device):
    planner = make_planner((8, 2), device)
    made, header, *_ = plan(planner, [(1, 20000)], device)
    target = planner._target_items(made.config, 1)
    config = made.config.decode
    full = min(target, 20000 // config["BLOCK_N"] // config["MIN_CHUNK"])
    assert full // 2 <= header[0] <= target, "one long request fills the device"
    _, header, *_ = plan(planner, [(1, 32)] * 3, device)
    assert header[0] == 3, "short requests are not cut"
    _, header, *_ = plan(planner, [(1, 8192)] * 4, device)
    assert 4 < header[0] <= target, "a few long requests are cut to fit one wave"
    _, header, *_ = plan(planner, [(1, 512)] * 50, device)
    assert header[0] <= 50 + target
    lens = [(1, 20000)] + [(1, 100)] * 8
    _, header, items, *_ = plan(planner, lens, device)
    parts = [hi - lo for seq, lo, hi, *_ in items[: header[0]] if seq == 0]
    assert len(parts) > 4, "one long request among short ones is cut"


def test_a_step_larger_than_the_planner_is_refused(device):
    planner = make_planner((8, 2), device)
    seqs = [(1, 1)] * (CAPACITY + 1)
    with pytest.raises(ValueError, match=f"at most {CAPACITY} requests"):
        plan(planner, seqs, device)
    with pytest.raises(ValueError, match="20000 tokens"):
        plan(planner, [(20001, 20001)], device)


def test_buffers_stay_where_they_are(device):
    """Captured graphs hold their addresses."""
    planner = make_planner((8, 2), device)
    names = ("header", "items", "splits", "tiles", "partial", "lse", "counts")
    before = {name: getattr(planner, name).data_ptr() for name in names}
    for seqs in ([(1, 5)], [(30, 40)] * 20, [(4, 9000)] * 30):
        plan(planner, seqs, device)
    assert {name: getattr(planner, name).data_ptr() for name in names} == before
