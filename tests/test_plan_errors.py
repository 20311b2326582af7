# SPDX-License-Identifier: Apache-2.0
"""What a planner and a planned call refuse, before anything is launched."""

from dataclasses import replace

import pytest
import torch

from portable_backend.kernels import (
    AttentionOptions,
    AttentionPlanner,
    KernelConfig,
    PagedBatch,
    launch_counts,
    paged_attention,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels._layer import AttentionLayer
from portable_backend.kernels.attention import attend

HEADS = {"num_query_heads": 4, "num_kv_heads": 2, "head_size": 64}
LIMITS = {"max_num_seqs": 4, "max_num_tokens": 64}
OPTIONS = AttentionOptions(scale=0.125)


def make_planner(device, **changes):
    arguments = HEADS | LIMITS | {"dtype": torch.float32, "block_size": 16}
    return AttentionPlanner(device=device, **(arguments | changes))


def make_batch(device, query_lens=(1, 12), seq_lens=(20, 12)):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return PagedBatch(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.arange(4, dtype=torch.int32, device=device).view(2, 2)[
            : len(seq_lens)
        ],
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=starts,
    )


def make_tensors(device, tokens=13):
    query = torch.zeros(tokens, 4, 64, device=device)
    return query, torch.zeros(4, 16, 2, 64, device=device)


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 0},
        {"num_query_heads": -4},
        {"head_size": 512},
        {"head_size": 0},
        {"block_size": 17},
        {"block_size": 0},
        {"dtype": torch.int32},
        {"sliding_window": 0},
        {"sliding_window": 2.5},
        {"sliding_window": 2**31 - 1},
        {"max_num_seqs": -1},
        {"max_num_tokens": -5},
        {"max_decode_query_len": 0},
    ],
    ids=str,
)
def test_planner_names_the_number_that_is_out_of_range(change, device):
    with pytest.raises(ValueError, match=next(iter(change))):
        make_planner(device, **change)


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("prefill", {"PACK": 0}),
        ("prefill", {"PACK": -1}),
        ("prefill", {"PACK": "2"}),
        ("prefill", {"BLOCK_N": 48}),
        ("prefill", {"BLOCK_N": 8}),
        ("prefill", {"BLOCK_N": True}),
        ("decode", {"CTAS_PER_UNIT": 10**6}),
        ("prefill", {"LOAD": "tma"}),
        ("decode", {"CTAS_PER_UNIT": -1}),
        ("decode", {"BLOCK_N": 0}),
        ("merge", {"BLOCK_SPLITS": 3}),
    ],
)
def test_planner_names_the_config_parameter_that_does_not_fit(kernel, change, device):
    good = make_planner(device).configs()[0]
    bad = replace(good, **{kernel: getattr(good, kernel).replace(**change)})
    with pytest.raises(ValueError, match=f"config.{kernel} {next(iter(change))}"):
        make_planner(device, config=bad)


def refuses(match, call, device):
    before = launch_counts(device)
    with pytest.raises(ValueError, match=match):
        call()
    assert launch_counts(device) == before, "launched before the refusal"


@pytest.mark.parametrize(
    ("starts", "given"),
    [
        ([0, 3], "list"),
        (torch.tensor([0, 3], dtype=torch.int32), r"\[2\]"),
        (torch.tensor([0.0, 1.0, 13.0]), "torch.float32"),
        (torch.tensor([[0, 1, 13]], dtype=torch.int32), r"\[1, 3\]"),
    ],
    ids=["list", "short", "float", "2-D"],
)
def test_a_host_copy_of_another_kind_is_refused(starts, given, device):
    batch = replace(make_batch(device), query_start_loc_cpu=starts)
    planner = make_planner(device)
    refuses(f"query_start_loc_cpu.*{given}", lambda: planner.plan(batch, 13), device)


def test_a_host_copy_with_other_numbers_is_refused_on_a_cpu(device):
    if device.type != "cpu":
        pytest.skip("a GPU's numbers are not waited for")
    batch = make_batch(device)
    batch = replace(batch, query_start_loc_cpu=torch.zeros_like(batch.query_start_loc))
    planner = make_planner(device)
    refuses("query_start_loc_cpu.*equal", lambda: planner.plan(batch, 13), device)


@pytest.mark.parametrize(
    ("starts", "longest", "says"),
    [
        ((0, 20, 10), 20, r"rising from 0.*\[0, 20, 10\]"),
        ((-1, 4, 8), 8, "rising from 0"),
        ((0, 4, 9000), 9000, "num_tokens.*9000"),
        ((0, 30, 60), 20, "at least 30 and 60"),
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_lengths_that_would_overrun_the_buffers_are_refused_before_planning(
    starts, longest, says, host, device
):
    if not host and device.type != "cpu":
        pytest.skip("looking at them would wait for the device")
    batch = make_batch(device, (4, 4), (20, 12))
    starts = torch.tensor(starts, dtype=torch.int32)
    batch = replace(
        batch,
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts if host else None,
        max_query_len=longest,
    )
    refuses(says, lambda: make_planner(device).plan(batch, 64), device)


def test_a_plan_that_the_next_one_overwrote_is_refused(device):
    planner = make_planner(device)
    query, cache = make_tensors(device)
    older = planner.plan(make_batch(device), 13)
    newer = planner.plan(make_batch(device, (1, 5), (20, 12)), 13)
    refuses(
        "batch.plan.*latest, number 2.*number 1.*plan each step",
        lambda: paged_attention(query, cache, cache, older, OPTIONS, out=query),
        device,
    )
    paged_attention(query, cache, cache, newer, OPTIONS, out=query)


def test_a_plan_of_another_step_is_refused(device):
    planner = make_planner(device)
    query, cache = make_tensors(device)
    other = planner.plan(make_batch(device, (1,), (1,)), 1)
    stale = make_batch(device).with_plan(other.plan)
    refuses(
        "batch.plan.*2 requests",
        lambda: paged_attention(query, cache, cache, stale, OPTIONS, out=query),
        device,
    )


def test_a_query_shorter_than_its_plan_is_refused(device):
    batch = make_planner(device).plan(make_batch(device), 13)
    query, cache = make_tensors(device, tokens=5)
    refuses(
        "at most 5 tokens",
        lambda: paged_attention(query, cache, cache, batch, OPTIONS, out=query),
        device,
    )


def test_each_layer_of_a_step_is_looked_at(device):
    # What the first layer's tensors passed says nothing of the next one's.
    batch = make_planner(device).plan(make_batch(device), 13)
    query, cache = make_tensors(device)
    query.uniform_(-1, 1)
    cache.uniform_(-1, 1)
    layer = AttentionLayer(cache, cache, OPTIONS)
    expected = attend(query, layer, batch, out=torch.empty_like(query))
    wide = torch.empty(13, 4, 128, device=device)[..., :64]
    wide.copy_(query)
    torch.testing.assert_close(
        attend(wide, layer, batch, out=torch.empty_like(wide)), expected
    )
    for changes in (
        {"out": torch.empty_like(query[:5])},
        {"out": torch.empty_like(query).half()},
        {"query": query[:5]},
        {"query": query[:, :2]},
        {"query": query.half()},
    ):
        arguments = {"query": query, "out": torch.empty_like(query)} | changes
        refuses(
            r"query|out|batch\.plan",
            lambda arguments=arguments: attend(layer=layer, batch=batch, **arguments),
            device,
        )
    torch.testing.assert_close(
        attend(query, layer, batch, out=torch.empty_like(query)), expected
    )


@pytest.mark.parametrize(
    ("change", "num_tokens"), [({"max_query_len": 1}, 13), ({}, 5)], ids=str
)
def test_host_numbers_that_contradict_each_other_are_refused(
    change, num_tokens, device
):
    planner, batch = make_planner(device), replace(make_batch(device), **change)
    refuses("query_start_loc_cpu says", lambda: planner.plan(batch, num_tokens), device)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_lens": torch.tensor([20, 12])},
        {"seq_lens": torch.tensor([20, 0, 12, 0], dtype=torch.int32)[::2]},
        {"query_start_loc": torch.tensor([0, 1], dtype=torch.int32)},
    ],
    ids=["int64", "strided", "short"],
)
def test_planner_looks_at_the_lengths_before_it_launches(change, device):
    name, value = next(iter(change.items()))
    storage = value.untyped_storage()
    moved = torch.empty(0, dtype=value.dtype, device=device).set_(
        storage if device.type == "cpu" else storage.cuda(),
        0,
        value.shape,
        value.stride(),
    )
    batch = replace(make_batch(device), **{name: moved})
    refuses(name, lambda: make_planner(device).plan(batch, 13), device)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=float("inf")),
        AttentionOptions(scale=0.1, softcap=float("nan")),
        AttentionOptions(scale=0.1, softcap=float("inf")),
    ],
    ids=["scale", "softcap nan", "softcap inf"],
)
def test_numbers_that_are_not_finite_are_refused(options, device):
    query, cache = make_tensors(device)
    batch = make_batch(device)
    refuses(
        "finite",
        lambda: paged_attention(query, cache, cache, batch, options, out=query),
        device,
    )


def test_empty_caches_and_tables_are_refused(device):
    query, cache = make_tensors(device)
    batch = make_batch(device)
    refuses(
        "at least one block",
        lambda: paged_attention(query, cache[:0], cache[:0], batch, OPTIONS, out=query),
        device,
    )
    narrow = replace(batch, block_table=batch.block_table[:, :0])
    refuses(
        "at least one column",
        lambda: paged_attention(query, cache, cache, narrow, OPTIONS, out=query),
        device,
    )
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    new = torch.zeros(1, 2, 64, device=device)
    refuses(
        "key_cache must be not empty",
        lambda: write_kv_cache(new, new, cache[:0], cache[:0], slots),
        device,
    )


def test_cache_writes_of_other_dtypes_are_refused(device):
    _, cache = make_tensors(device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    new, cache = torch.zeros(1, 2, 64, device=device).to(torch.uint8), cache.byte()
    refuses(
        "key must be", lambda: write_kv_cache(new, new, cache, cache, slots), device
    )


@pytest.mark.parametrize("rows", [0, -1, 3, "4", None])
def test_norm_config_rows_must_be_a_power_of_two(rows, device):
    x = torch.zeros(2, 64, device=device)
    config = KernelConfig.of(ROWS=rows)
    refuses("config ROWS", lambda: rms_norm(x, None, 1e-6, config=config), device)
    refuses(
        "config ROWS", lambda: rms_norm(x, None, 1e-6, config=KernelConfig(())), device
    )
