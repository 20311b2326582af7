# SPDX-License-Identifier: Apache-2.0
"""The oracles themselves: against torch's attention, formulas, and sums by hand."""

import math

import pytest
import torch
from kernel_cases import Case, make_inputs

from portable_backend.kernels import AttentionOptions, PagedBatch
from portable_backend.kernels.reference import (
    paged_attention_reference,
    rms_norm_reference,
    write_kv_cache_reference,
)

MIXED = ((1, 33), (4, 40), (20, 55), (17, 17))


def paged_batch(seqs, table):
    lens = torch.tensor(seqs, dtype=torch.int32)
    starts = torch.zeros(len(seqs) + 1, dtype=torch.int32)
    starts[1:] = lens[:, 0].cumsum(0)
    return PagedBatch(
        query_start_loc=starts,
        seq_lens=lens[:, 1].contiguous(),
        block_table=torch.tensor(table, dtype=torch.int32),
        max_query_len=int(lens[:, 0].max()),
        max_seq_len=int(lens[:, 1].max()),
    )


def keys_and_values(inputs, request, seq_len):
    """One request's keys and values, found slot by slot: [heads, seq_len, size]."""
    block_size = inputs.key_cache.shape[1]
    caches = (inputs.key_cache, inputs.value_cache)
    rows = [
        [
            cache[inputs.blocks[request][j // block_size], j % block_size]
            for j in range(seq_len)
        ]
        for cache in caches
    ]
    return [torch.stack(r, 1).float() for r in rows]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_attention_equals_torch_with_an_explicit_mask(heads, causal, window):
    case = Case(1, MIXED, heads, dtype=torch.float32, causal=causal, window=window)
    inputs = make_inputs(case, torch.device("cpu"))
    inputs.key_cache.nan_to_num_(nan=7.0)  # torch multiplies what it masks
    inputs.value_cache.nan_to_num_(nan=7.0)
    ours = paged_attention_reference(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.batch,
        inputs.options,
    )
    start = 0
    for i, (query_len, seq_len) in enumerate(case.seqs):
        lo = 0
        if window is not None:  # pages left of the window are not the request's
            lo = max(0, seq_len - query_len - window + 1)
        k, v = keys_and_values(inputs, i, seq_len)
        rows = [seq_len - query_len + t for t in range(query_len)]
        mask = torch.tensor(
            [
                [
                    j >= lo
                    and (j <= i_ or not causal)
                    and (window is None or abs(i_ - j) < window)
                    for j in range(seq_len)
                ]
                for i_ in rows
            ]
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            inputs.query[start : start + query_len].transpose(0, 1),
            k,
            v,
            attn_mask=mask,
            scale=case.head_size**-0.5,
            enable_gqa=True,
        )
        torch.testing.assert_close(
            ours[start : start + query_len], expected.transpose(0, 1)
        )
        start += query_len


@pytest.mark.parametrize("feature", ["alibi", "softcap", "sinks"])
def test_attention_equals_the_formula_row_by_row(feature):
    case = Case(
        2,
        ((3, 20), (1, 7)),
        (4, 2),
        dtype=torch.float32,
        alibi=feature == "alibi",
        softcap=3.0 if feature == "softcap" else None,
        sinks=feature == "sinks",
    )
    inputs = make_inputs(case, torch.device("cpu"))
    options = inputs.options
    ours = paged_attention_reference(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, options
    )
    row = 0
    for i, (query_len, seq_len) in enumerate(case.seqs):
        k, v = keys_and_values(inputs, i, seq_len)
        for t in range(query_len):
            position = seq_len - query_len + t
            for head in range(4):
                weights, total = [], 0.0
                for j in range(position + 1):
                    score = float(inputs.query[row, head] @ k[head // 2, j]) / 8
                    if feature == "softcap":
                        score = 3.0 * math.tanh(score / 3.0)
                    if feature == "alibi":
                        score += float(options.alibi_slopes[head]) * (j - position)
                    weights.append(math.exp(score))
                total = sum(weights)
                if feature == "sinks":
                    total += math.exp(float(options.sinks[head]))
                expected = sum(
                    w / total * v[head // 2, j] for j, w in enumerate(weights)
                )
                torch.testing.assert_close(ours[row, head], expected)
            row += 1


def test_two_keys_by_hand():
    """Scores ln 3 and 0: weights 3/4 and 1/4, of values 8 and 16."""
    keys = torch.full((1, 16, 1, 32), float("nan"))
    values = keys.clone()
    keys[0, 0], keys[0, 1] = 0.0, 0.0
    keys[0, 0, 0, 0] = math.log(3) / 2
    values[0, 0], values[0, 1] = 8.0, 16.0
    query = torch.ones(1, 1, 32)
    out = paged_attention_reference(
        query, keys, values, paged_batch([(1, 2)], [[0]]), AttentionOptions(scale=2.0)
    )
    torch.testing.assert_close(out, torch.full((1, 1, 32), 10.0))


def test_blocks_are_found_through_the_table():
    """Equal scores: the mean of the positions' values, wherever the pages lie."""
    caches = torch.zeros(2, 5, 16, 1, 32)
    for column, block in enumerate((3, 0, 4)):
        for slot in range(16):
            caches[1, block, slot] = 16 * column + slot
    batch = paged_batch([(1, 41)], [[3, 0, 4]])
    out = paged_attention_reference(
        torch.ones(1, 1, 32), *caches, batch, AttentionOptions(scale=1.0)
    )
    torch.testing.assert_close(out, torch.full((1, 1, 32), 20.0))


def test_rows_without_a_request_are_nan_and_rows_without_keys_zero():
    caches = torch.ones(2, 1, 16, 1, 32)
    batch = paged_batch([(2, 0), (1, 1)], [[0], [0]])
    out = paged_attention_reference(
        torch.ones(5, 1, 32), *caches, batch, AttentionOptions(scale=1.0)
    )
    assert torch.equal(out[:2], torch.zeros(2, 1, 32))
    assert torch.equal(out[2], torch.ones(1, 32))
    assert torch.isnan(out[3:]).all()


def test_attention_leaves_its_inputs_alone():
    inputs = make_inputs(Case(3, MIXED, sinks=True), torch.device("cpu"))
    given = (inputs.query, inputs.key_cache, inputs.value_cache)
    before = [t.clone() for t in given]
    paged_attention_reference(*given, inputs.batch, inputs.options)
    for tensor, was in zip(given, before, strict=True):
        torch.testing.assert_close(tensor, was, equal_nan=True, rtol=0, atol=0)


def test_cache_write_by_hand():
    key = torch.arange(4.0).reshape(4, 1, 1).expand(4, 1, 2)
    caches = torch.full((2, 3, 4, 1, 2), -1.0)
    slots = torch.tensor([9, -1, 0])
    new_keys, new_values = write_kv_cache_reference(key, key + 10, *caches, slots)
    expected = torch.full((3, 4, 1, 2), -1.0)
    expected[2, 1], expected[0, 0] = 0.0, 2.0
    assert torch.equal(new_keys, expected)
    expected[2, 1], expected[0, 0] = 10.0, 12.0
    assert torch.equal(new_values, expected)
    assert torch.equal(caches, torch.full_like(caches, -1.0)), "inputs were changed"


def test_rms_norm_by_hand():
    """Mean square of (3, 4) is 12.5; with eps 3.5 the root is 4."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    weight = torch.tensor([2.0, -1.0], dtype=torch.bfloat16)
    normed, total = rms_norm_reference(x, weight, 3.5)
    assert total is None
    torch.testing.assert_close(normed, torch.tensor([[1.5, -1.0]]))
    residual = torch.tensor([[-3.0, 0.0]], dtype=torch.bfloat16)
    normed, total = rms_norm_reference(x, None, 1.0, residual)
    torch.testing.assert_close(normed, torch.tensor([[0.0, 4 / 3]]))
    torch.testing.assert_close(total, torch.tensor([[0.0, 4.0]]))


@pytest.mark.parametrize("shape", [(7, 100), (3, 5, 64)])
def test_rms_norm_equals_torch(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    ours, _ = rms_norm_reference(x, weight, 1e-5)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5)
    torch.testing.assert_close(ours, expected)
