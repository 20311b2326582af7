# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` reads and writes what it may, and nothing else.

Every drawn case checks this too; here is one input for each way it went wrong.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    SENTINEL,
    Case,
    Tiles,
    assert_close,
    bits,
    call,
    check_case,
    check_inputs,
    make_inputs,
    references,
)

NAN, INF = float("nan"), float("inf")
TILES = (None, Tiles(block_m=32, block_n=32, decode_block_n=32))


def fill(inputs, request, positions, case, value, *, keys=True, values=True):
    """Overwrite cache slots of one request."""
    for position in positions:
        block = inputs.blocks[request][position // case.block_size]
        slot = position % case.block_size
        if keys:
            inputs.key_cache[block, slot] = value
        if values:
            inputs.value_cache[block, slot] = value


# vllm#30887: 0 * NaN leaked from V rows outside the window.
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("query_len", [1, 4, 30])
def test_values_left_of_the_window_never_leak(query_len, poison, tiles, device):
    """The blocks are still the request's: only the window keeps them out."""
    case = Case(1, ((query_len, 120),), window=20, tiles=tiles)
    inputs = make_inputs(case, device)
    inputs.batch.block_table[0, : len(inputs.blocks[0])] = torch.tensor(
        inputs.blocks[0], dtype=torch.int32, device=device
    )
    fill(inputs, 0, range(120 - query_len - 20 + 1), case, poison)
    check_inputs(inputs, case)


# vllm#44850: slots after seq_len in the last page.
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("seqs", [((1, 33),), ((3, 50),), ((20, 41),), ((17, 17),)])
def test_slots_past_seq_len_never_leak(seqs, poison, tiles, device):
    case = Case(2, seqs, tiles=tiles)
    inputs = make_inputs(case, device)
    seq_len = seqs[0][1]
    end = len(inputs.blocks[0]) * case.block_size
    fill(inputs, 0, range(seq_len, end), case, poison)
    check_inputs(inputs, case)


# vllm#44575, #44584: one KV tile too many is visited.
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("wild", [-(2**31), 2**31 - 1])
def test_table_entries_past_seq_len_are_never_used(wild, window, tiles, device):
    """Entries after the last page, and in the table's padding, are no pages at all."""
    case = Case(
        3,
        ((1, 64), (1, 47), (4, 48), (16, 64), (16, 16)),
        window=window,
        tiles=tiles,
        table_columns=2,
        table_stride_extra=3,
    )
    inputs = make_inputs(case, device)
    table = inputs.batch.block_table
    width = table.shape[1]
    whole = table.as_strided((table.shape[0], table.stride(0)), table.stride())
    whole[:, width:] = wild
    for i, blocks in enumerate(inputs.blocks):
        table[i, len(blocks) :] = wild
    check_inputs(inputs, case)


def test_table_entries_left_of_the_window_are_never_used(device):
    """vLLM's V2 runner frees those blocks and leaves whatever entry it likes."""
    case = Case(4, ((1, 120), (4, 100), (30, 128)), window=20, tiles=Tiles())
    inputs = make_inputs(case, device)
    expected = references(inputs)
    for i, (query_len, seq_len) in enumerate(case.seqs):
        first = (seq_len - query_len - 20 + 1) // case.block_size
        inputs.batch.block_table[i, :first] = 2**31 - 1
    assert_close(call(inputs), *expected, case)


# vllm#57017, #57094: padded requests under graph replay.
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "seqs",
    [
        ((1, 20), (1, 33), (0, 0), (0, 0), (0, 0)),
        ((0, 0), (0, 0)),
        ((0, 0), (12, 30), (0, 0), (3, 3)),
    ],
)
def test_padded_requests_write_nothing(seqs, planned, device):
    case = Case(
        5, seqs, spare_rows=5, planned=planned, loose_bounds=True, tiles=Tiles()
    )
    check_case(case, device)


def test_rows_without_keys_are_zero(device):
    """Requests of length 0, and rows before position 0: they attend to nothing."""
    seqs = ((1, 0), (3, 0), (20, 0), (1, 17), (4, 2), (20, 12))
    case = Case(6, seqs, heads=(2, 1), tiles=Tiles())
    inputs = make_inputs(case, device)
    check_inputs(inputs, case)
    out = call(inputs)
    for rows in (slice(0, 24), slice(25, 27), slice(29, 37)):
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
    for row in (24, 27, 28, *range(37, 49)):
        assert out[row].abs().max() > 0


@pytest.mark.parametrize("planned", [True, False])
def test_empty_batch_writes_nothing(planned, device):
    check_case(Case(7, (), spare_rows=3, planned=planned), device)
    check_case(Case(7, (), planned=planned), device)


@pytest.mark.parametrize("rows", ["qkv_slice", "odd_rows"])
@pytest.mark.parametrize("head_size", [64, 80])
def test_query_and_out_may_be_views(rows, head_size, device):
    """Gaps between the rows of `out` keep what they hold."""
    case = Case(
        8,
        ((1, 33), (20, 40), (5, 5)),
        head_size=head_size,
        query_rows=rows,
        out_rows=rows,
        spare_rows=2,
    )
    check_case(case, device)


def test_heads_may_be_strided(device):
    """Query, out and caches may be every second head of something larger."""
    case = Case(9, ((1, 33), (20, 40)), heads=(8, 4), out_rows="plain")
    inputs = make_inputs(case, device)
    inputs.query, inputs.out = inputs.query[:, ::2], inputs.out[:, ::2]
    inputs.key_cache = inputs.key_cache[:, :, ::2]
    inputs.value_cache = inputs.value_cache[:, :, ::2]
    inputs.out_buffer.fill_(SENTINEL)
    inputs.out[: case.num_tokens] = NAN
    check_inputs(inputs, case)


# vllm#44881 and its kind: V2's dummy runs give lengths shorter than the queries.
def test_seq_len_below_query_len_gives_finite_rows(device):
    inputs = make_inputs(Case(10, ((16, 16), (1, 1), (8, 8))), device)
    inputs.batch.seq_lens.fill_(1)
    oracle, _ = references(inputs)
    out = call(inputs)
    assert torch.isfinite(out[: inputs.batch.query_start_loc[-1]]).all()
    assert torch.isfinite(oracle).all()


@pytest.mark.parametrize("reference", ["running", "diagonal"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_whole_tiles_before_the_first_position_read_nothing(
    causal, window, reference, device
):
    """As above, with queries many tiles longer than their requests."""
    seqs = ((70, 0), (90, 3), (65, 20))
    case = Case(18, seqs, heads=(2, 1), window=window, causal=causal, tiles=Tiles())
    inputs = make_inputs(case, device)
    prefill = inputs.config.prefill.replace(REFERENCE=reference)
    inputs.config = replace(inputs.config, prefill=prefill)
    if device.type == "cpu":
        # What stands before the table is no block: in the interpreter it shows.
        table = inputs.batch.block_table
        wide = torch.full((4, 64 + table.shape[1]), 2**31 - 1, dtype=torch.int32)
        wide[1:, 64:] = table
        inputs.batch = replace(inputs.batch, block_table=wide[1:, 64:])
    check_inputs(inputs, case)


def test_poison_in_one_request_stays_there(device):
    """NaN in a request's own keys is its own affair: its neighbours stay clean."""
    case = Case(11, ((1, 40), (1, 33), (20, 40)), heads=(2, 1), tiles=Tiles())
    inputs = make_inputs(case, device)
    clean = call(inputs).clone()
    fill(inputs, 1, [5], case, NAN)
    inputs.out.fill_(NAN)
    out = call(inputs)
    assert torch.isnan(out[1]).all()
    for rows in (slice(0, 1), slice(2, 22)):
        assert torch.equal(bits(out[rows]), bits(clean[rows]))


@pytest.mark.parametrize("window", [None, 16])
def test_later_keys_of_the_same_request_stay_in_their_tiles(window, device):
    """A NaN that a request's own later token brings reaches no earlier tile.

    Within a tile it may: zero times a value that is not finite is none either.
    """
    tiles = Tiles(block_m=16, block_n=16, pack=2)
    case = Case(12, ((64, 64),), heads=(2, 1), window=window, tiles=tiles)
    inputs = make_inputs(case, device)
    expected = call(inputs).clone()
    fill(inputs, 0, range(48, 64), case, NAN)
    inputs.out.fill_(NAN)
    # Tiles of 8 tokens: rows before 48 belong to tiles that end before key 48.
    assert torch.equal(bits(call(inputs)[:48]), bits(expected[:48]))


def test_a_plan_for_more_tokens_than_there_are_writes_nothing_more(device):
    case = Case(13, ((1, 20), (12, 30)), planned=True, spare_rows=40, tiles=Tiles())
    inputs = make_inputs(case, device)
    inputs.batch = replace(inputs.batch, max_query_len=inputs.query.shape[0])
    check_inputs(inputs, case)
