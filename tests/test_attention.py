# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` gives what its equation says: drawn cases, then one claim each."""

import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    Case,
    Tiles,
    assert_close,
    bits,
    call,
    check_case,
    check_inputs,
    make_inputs,
    references,
    with_seqs,
)
from kernel_draws import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_SIZES,
    HEADS,
    LAYOUTS,
    WORKLOADS,
    draw_case,
)

from portable_backend.kernels import launch_counts, paged_attention, prefill

# Decode, verification of several tokens, a chunk with context, a prefill: one batch.
MIXED = ((1, 33), (3, 18), (20, 36), (9, 9))


def test_drawn_case_matches_the_oracle(drawn_case, device):
    """One drawn case; `pytest --case-seed N` runs it alone."""
    check_case(drawn_case, device)


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_first_40_seeds_meet_every_choice(size):
    cases = [draw_case(seed, size=size) for seed in range(40)]
    assert {c.heads for c in cases} == set(HEADS)
    assert {c.head_size for c in cases} == set(HEAD_SIZES)
    assert {c.layout for c in cases} == set(LAYOUTS)
    assert {c.dtype for c in cases} == set(DTYPES)
    assert {c.block_size for c in cases} == set(BLOCK_SIZES)
    for name in (
        "alibi",
        "sinks",
        "causal",
        "new_tokens_given",
        "host_starts_given",
        "loose_bounds",
        "planned",
    ):
        assert {getattr(c, name) for c in cases} == {True, False}, name
    for name in ("window", "softcap", "tiles"):
        assert {getattr(c, name) is None for c in cases} == {True, False}, name
    for name in ("query_rows", "out_rows"):
        assert {getattr(c, name) for c in cases} == {"plain", "qkv_slice", "odd_rows"}
    kinds = {
        "empty batch": lambda c: not c.seqs,
        "padded request": lambda c: (0, 0) in c.seqs,
        "row without keys": lambda c: any(q and not s for q, s in c.seqs),
        "single-token decode": lambda c: any(q == 1 < s for q, s in c.seqs),
        "multi-token decode": lambda c: any(1 < q <= 8 and q < s for q, s in c.seqs),
        "prefill": lambda c: any(q == s > 8 for q, s in c.seqs),
        "chunk with context": lambda c: any(8 < q < s for q, s in c.seqs),
        "both kernels": lambda c: len({q > 8 for q, s in c.seqs if s}) == 2,
        "prefix hit": lambda c: any(q < s and not (s - q) % 16 for q, s in c.seqs),
        "spare rows": lambda c: c.spare_rows > 0,
        "split keys": lambda c: bool(c.tiles and c.tiles.programs_per_unit),
    }
    for kind, occurs in kinds.items():
        assert any(occurs(c) for c in cases), kind
    assert len(WORKLOADS) <= 40


# vllm#23424, sglang#23135: 48 query heads on 1, 28 on 4, 5 on 1, 71 on 1.
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}on{h[1]}")
def test_any_number_of_query_heads_per_kv_head(heads, device):
    check_case(Case(1, ((1, 33), (2, 18), (9, 9)), heads=heads), device)


# sglang#1281, vllm#4127: head sizes that are no power of two.
@pytest.mark.parametrize("head_size", sorted(HEAD_SIZES))
def test_any_head_size_from_32_to_256(head_size, device):
    check_case(Case(2, MIXED, head_size=head_size, tiles=Tiles(32, 32)), device)


# aiter#3498, #3492, #3640: K and V interleaved per page; vLLM's layouts of all builds.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_cache_strides(layout, device):
    check_case(Case(3, MIXED, layout=layout, heads=(6, 2), block_size=32), device)


# vllm#38502: a block size of 2048 was taken as the tile; 528 and 48 are no powers of
# two.
@pytest.mark.parametrize("block_size", [16, 48, 528, 2048])
@pytest.mark.parametrize("tiles", [None, Tiles(block_n=32, decode_block_n=32)])
def test_any_block_size_with_any_tile(block_size, tiles, device):
    case = Case(4, ((1, 600), (5, 70), (30, 90)), block_size=block_size, tiles=tiles)
    check_case(case, device)


@pytest.mark.parametrize("pack", [1, 2, 3, 6])
def test_any_pack_of_heads_gives_the_same_result(pack, device):
    case = Case(5, ((20, 42), (16, 16)), heads=(6, 1), tiles=Tiles(pack=pack))
    check_case(case, device)


# sglang#32087: keys j with i - j < W, so W keys, the query's own included.
@pytest.mark.parametrize("window", [1, 2, 16, 33])
@pytest.mark.parametrize("query_len", [1, 3, 24])
def test_window_counts_the_querys_own_position(window, query_len, device):
    """Equal scores: the output is the mean of the last W values, here positions."""
    seq_len = 70
    case = Case(
        6, ((query_len, seq_len),), heads=(2, 1), dtype=torch.float32, window=window
    )
    inputs = make_inputs(case, device)
    inputs.key_cache.zero_()
    for position in range(seq_len):
        block = inputs.blocks[0][position // case.block_size]
        inputs.value_cache[block, position % case.block_size] = position
    out = call(inputs)
    for row in range(query_len):
        last = seq_len - query_len + row
        seen = range(max(0, last - window + 1), last + 1)
        expected = sum(seen) / len(seen)
        torch.testing.assert_close(
            out[row].cpu(), torch.full((2, 64), expected), rtol=1e-6, atol=0
        )


def test_window_without_causal_reaches_both_ways(device):
    case = Case(7, ((20, 60), (3, 50), (1, 40)), causal=False, window=9)
    check_case(replace(case, tiles=Tiles(block_n=16)), device)


def test_without_causal_every_row_sees_every_key(device):
    check_case(Case(8, MIXED, causal=False, tiles=Tiles()), device)


# vllm#22368, #28589: sinks on a GPU no kernel was written for.
def test_sink_takes_its_share_of_the_denominator(device):
    """Equal scores: n keys and a sink s give the values' mean times n / (n + e^s)."""
    case = Case(9, ((1, 40), (12, 12)), heads=(4, 2), dtype=torch.float32, sinks=True)
    inputs = make_inputs(case, device)
    inputs.query[: case.num_tokens] = 0
    sinks = torch.tensor([-50.0, 0.0, 1.5, 60.0], device=device)
    inputs.options = replace(inputs.options, sinks=sinks)
    unsunk = replace(inputs.options, sinks=None)
    out = call(inputs).clone()
    inputs.options = unsunk
    mean = call(inputs)
    counts = torch.tensor([40.0, *range(1, 13)], device=device)[:, None]
    share = counts / (counts + sinks.exp()[None, :])
    torch.testing.assert_close(out, mean * share[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tiles", [None, Tiles(programs_per_unit=64)])
def test_sink_counts_once_however_keys_are_split(tiles, device):
    case = Case(10, ((1, 129), (2, 90), (1, 0)), sinks=True, tiles=tiles)
    check_case(case, device)


# flashinfer#5101, #1606, vllm#945: slopes of this rank's heads.
def test_alibi_uses_the_slopes_it_is_given(device):
    """Half the heads with half the slopes give half of what all heads give."""
    case = Case(11, MIXED, heads=(8, 4), dtype=torch.float32, alibi=True)
    whole = make_inputs(case, device)
    assert whole.options.alibi_slopes is not None
    full = call(whole).clone()
    for rank in range(2):
        half = make_inputs(case, device)
        heads = slice(4 * rank, 4 * rank + 4)
        half.query, half.out = half.query[:, heads], half.out[:, heads]
        half.key_cache = half.key_cache[:, :, 2 * rank : 2 * rank + 2]
        half.value_cache = half.value_cache[:, :, 2 * rank : 2 * rank + 2]
        slopes = whole.options.alibi_slopes[heads].contiguous()
        half.options = replace(half.options, alibi_slopes=slopes)
        torch.testing.assert_close(call(half), full[:, heads], rtol=1e-5, atol=1e-6)


def test_alibi_distance_starts_at_the_querys_own_position(device):
    """Equal scores and a slope of ln 2: each step back halves a key's weight."""
    case = Case(12, ((1, 37), (3, 9)), heads=(1, 1), head_size=32, dtype=torch.float32)
    inputs = make_inputs(case, device)
    inputs.query[: case.num_tokens] = 0
    slopes = torch.full((1,), 0.6931471805599453, device=device)
    inputs.options = replace(inputs.options, alibi_slopes=slopes)
    for i, (_, seq_len) in enumerate(case.seqs):
        for position in range(seq_len):
            block = inputs.blocks[i][position // case.block_size]
            inputs.value_cache[block, position % case.block_size] = position
    out = call(inputs)
    for row, last in enumerate((36, 6, 7, 8)):
        weights = torch.tensor([0.5 ** (last - j) for j in range(last + 1)])
        expected = (weights * torch.arange(last + 1)).sum() / weights.sum()
        assert abs(out[row, 0, 5].item() - expected.item()) < 2e-5 * expected


@pytest.mark.parametrize("tiles", [None, Tiles()])
def test_softcap_saturates_without_nan(tiles, device):
    """Scores of several thousand: tanh is 1 there, not inf / inf."""
    case = Case(13, MIXED, dtype=torch.float32, softcap=20.0, tiles=tiles)
    inputs = make_inputs(case, device)
    inputs.query[: case.num_tokens] *= 1000
    check_inputs(inputs, case)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 256.0, 5000.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_and_large_caps(dtype, softcap, device):
    """Tanh is exact to a part of the cap, or of its result, as dtype and cap need."""
    check_case(Case(14, MIXED, dtype=dtype, softcap=softcap), device)


def test_a_bound_of_the_longest_query_may_be_far_too_high(device):
    inputs = make_inputs(Case(16, MIXED), device)
    inputs.batch = replace(inputs.batch, max_query_len=10**9)
    check_inputs(inputs, inputs.batch)


def test_heads_of_the_cache_may_be_far_apart(device):
    """More than 2**31 elements from the first to the last: one cache for each head."""
    case = Case(15, MIXED, heads=(3, 3), head_size=32, dtype=torch.float16)
    inputs = make_inputs(case, device)
    cache, stride = inputs.key_cache, 1 << 30
    size = 2 * stride + cache.shape[0] * cache.shape[1] * 32
    # Offsets that wrapped would stay within the storage, and find other keys there.
    storage = torch.empty(2 * stride + size, dtype=cache.dtype, device=device)
    blocks, slots = cache.shape[:2]
    far = storage[2 * stride :].as_strided(cache.shape, (slots * 32, 32, stride, 1))
    for block in range(blocks):
        far[block] = cache[block]
    inputs.key_cache = far
    check_inputs(inputs, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_do_not_overflow(dtype, device):
    case = Case(14, MIXED, dtype=dtype, tiles=Tiles())
    inputs = make_inputs(case, device)
    inputs.query[: case.num_tokens] *= 500
    check_inputs(inputs, case)


@pytest.mark.parametrize("excess", [60.0, 86.0, 87.5, 90.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_early_keys_that_score_far_above_the_latest(dtype, excess, device):
    """Past any fixed reference: sums overflow, with small values before the output."""
    case = Case(
        19, ((150, 200),), heads=(2, 1), head_size=64, dtype=dtype,
        tiles=Tiles(block_m=32, block_n=32),
    )  # fmt: skip
    inputs = make_inputs(case, device)
    inputs.query[: case.num_tokens] = 1.0
    for i, block in enumerate(inputs.blocks[0][:4]):
        # 64 elements at scale 1/8.
        inputs.key_cache[block] = excess / 8 - i / 16
        inputs.value_cache[block] *= 1e-3
    check_inputs(inputs, case)


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("context", [0, 30, 31, 32, 63, 64, 95])
def test_ordinary_scores_need_no_second_pass(context, pack, device, monkeypatch):
    """Every row meets itself in the edges, wherever the context ends."""
    if device.type != "cpu":
        pytest.skip("counts calls of a device function in the interpreter")
    passes = []

    def counted(*arguments):
        passes.append(1)
        return attend_tiles(*arguments)

    attend_tiles = prefill.attend_tiles
    monkeypatch.setattr(prefill, "attend_tiles", counted)
    case = Case(
        20, ((100, 100 + context),), heads=(2, 1), dtype=torch.bfloat16,
        tiles=Tiles(block_m=32, block_n=32, pack=pack),
    )  # fmt: skip
    check_case(case, device)
    programs = -(-100 // (32 // pack)) * (2 // pack)
    assert len(passes) == programs


def test_a_sink_that_is_nan_shows(device):
    case = Case(21, ((1, 20), (40, 40)), sinks=True, tiles=Tiles())
    inputs = make_inputs(case, device)
    inputs.options.sinks[0] = float("nan")
    out = call(inputs)[: case.num_tokens]
    assert out[:, 0].isnan().all()
    assert not out[:, 1:].isnan().any()


# vllm#34759, #36914, #42580, #42916: scales apply to quantised caches only.
def test_scales_of_an_unquantised_cache_are_ignored(device):
    inputs = make_inputs(Case(15, MIXED), device)
    expected = call(inputs).clone()
    scale = torch.tensor(0.25, device=device)
    inputs.options = replace(inputs.options, k_scale=scale, v_scale=scale)
    inputs.out.fill_(float("nan"))
    assert torch.equal(call(inputs), expected)


def test_repeating_a_call_gives_the_same_bits(device):
    inputs = make_inputs(Case(16, MIXED, tiles=Tiles()), device)
    expected = call(inputs).clone()
    for _ in range(2):
        inputs.out.fill_(float("nan"))
        assert torch.equal(bits(call(inputs)), bits(expected))


@pytest.mark.parametrize("merge", ["kernel", "last"])
@pytest.mark.parametrize("queries_per_kv", [1, 5, 48])
def test_splitting_the_keys_does_not_change_the_result(queries_per_kv, merge, device):
    """Same batch whole and cut into as many parts as there are tiles."""
    seqs = ((1, 120), (2, 90), (1, 16), (1, 0), (1, 33))
    whole = Case(17, seqs, heads=(queries_per_kv, 1), tiles=Tiles(programs_per_unit=0))
    cut = replace(whole, tiles=Tiles(programs_per_unit=4096, merge=merge))
    results = []
    for case in (whole, cut):
        inputs = make_inputs(case, device)
        before = launch_counts(device)["merge"]
        results.append(call(inputs).clone())
        merges = launch_counts(device)["merge"] - before
        assert merges == (1 if case is cut and merge == "kernel" else 0)
    oracle, same_dtype = references(make_inputs(whole, device))
    for result in results:
        assert_close(result, oracle, same_dtype, "whole, then cut")


@pytest.mark.parametrize("in_graph", [False, True])
def test_captured_merges_launch_a_kernel_only_in_a_graph(in_graph, device, monkeypatch):
    module = sys.modules[paged_attention.__module__]
    monkeypatch.setattr(module, "capturing", lambda: in_graph)
    case = Case(17, ((1, 150), (1, 77)), tiles=Tiles(merge="captured"))
    before = launch_counts(device)["merge"]
    check_case(case, device)
    assert launch_counts(device)["merge"] - before == in_graph


def test_merges_of_captured_graphs_are_decided_without_a_gpu_as_well(device):
    check_case(Case(17, ((1, 150), (1, 77)), tiles=Tiles(merge="captured")), device)


def test_whoever_merges_the_result_has_the_same_bits(device):
    """The order of the parts is fixed, that of their arrival is not."""
    on_cpu = device.type == "cpu"
    longest = ((1, 200), (3, 300)) if on_cpu else ((1, 700), (3, 1000))
    seqs = (*longest, (2, 123), (1, 0), *((1, 90),) * (2 if on_cpu else 9))
    case = Case(18, seqs, heads=(8, 2), tiles=Tiles(merge="last"), planned=True)
    inputs = make_inputs(case, device)
    expected = call(inputs).clone()
    for _ in range(2 if on_cpu else 300):
        inputs.out.fill_(float("nan"))
        assert torch.equal(bits(call(inputs)), bits(expected))
    assert not inputs.planner.arrivals.any()
    check_inputs(inputs, case)


def test_arrivals_that_a_dead_launch_left_count_for_nothing(device):
    case = Case(18, ((1, 300), (1, 200)), tiles=Tiles(merge="last"), planned=True)
    inputs = make_inputs(case, device)
    inputs.planner.arrivals.fill_(1)
    check_inputs(inputs, case)


# vllm#44652, #32671: verification of several tokens missed the split path.
@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_short_queries_take_the_decode_kernel_alone(query_len, device):
    case = Case(18, ((query_len, 100),) * 2, heads=(2, 1), tiles=Tiles())
    before = launch_counts(device)
    check_case(case, device)
    after = launch_counts(device)
    launched = {k: after[k] - before[k] for k in after if after[k] != before[k]}
    assert launched == {"plan": 1, "decode": 1, "merge": 1}


def test_long_queries_take_the_prefill_kernel_alone(device):
    case = Case(19, ((30, 100), (9, 9)), host_starts_given=True, tiles=Tiles())
    before = launch_counts(device)
    check_case(case, device)
    after = launch_counts(device)
    launched = {k: after[k] - before[k] for k in after if after[k] != before[k]}
    assert launched == {"plan": 1, "prefill": 1}


def test_new_tokens_may_be_left_out(device):
    """`key` and `value` repeat what the cache holds: with or without, same result."""
    case = Case(20, MIXED, new_tokens_given=True, query_rows="qkv_slice")
    inputs = make_inputs(case, device)
    assert inputs.key is not None
    given = call(inputs).clone()
    torch.testing.assert_close(call(inputs, key=None, value=None), given)


def test_one_planner_serves_batch_after_batch(device):
    """The buffers of the previous, larger plan must not show through."""
    base = Case(21, (), heads=(2, 1), planned=True, tiles=Tiles())
    batches = (
        ((1, 100), (1, 90), (4, 70), (40, 90), (30, 30)),
        ((1, 5),),
        (),
        ((17, 40), (1, 65)),
        ((0, 0), (1, 64), (0, 0)),
        ((2, 50), (1, 0), (33, 33), (1, 1), (1, 130)),
    )
    planner = None
    for seqs in batches:
        case = with_seqs(base, *seqs)
        inputs = make_inputs(case, device)
        if planner is None:
            planner = inputs.planner
        inputs.planner = planner
        check_inputs(inputs, case)


def test_one_plan_serves_every_layer(device):
    """Softcap, ALiBi, sinks and scale are a layer's own; the plan is shared."""
    case = Case(22, MIXED, planned=True, dtype=torch.float32)
    inputs = make_inputs(case, device)
    assert inputs.planner is not None
    batch = inputs.planner.plan(inputs.batch, inputs.query.shape[0])
    before = launch_counts(device)["plan"]
    for changes in (
        {},
        {"scale": 0.3},
        {"softcap": 10.0},
        {"sinks": torch.ones(4, device=device)},
        {"alibi_slopes": torch.full((4,), 0.1, device=device)},
    ):
        layer = replace(inputs, options=replace(inputs.options, **changes))
        oracle, same_dtype = references(layer)
        out = paged_attention(
            layer.query,
            layer.key_cache,
            layer.value_cache,
            batch,
            layer.options,
            out=layer.out,
        )
        assert_close(out, oracle, same_dtype, changes)
    assert launch_counts(device)["plan"] == before
