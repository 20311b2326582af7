# SPDX-License-Identifier: Apache-2.0
"""Steps through builder and layers, over both cache forms and vLLM's wrappers."""

import dataclasses

import pytest
import torch
from backend_fakes import (
    BLOCK_SIZE,
    CACHE_FORMS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    SCALE,
    STEP,
    UNPACKED,
    assert_matches,
    fill_context,
    make_builder,
    make_impl,
    make_kv_cache,
    make_spec,
    make_step,
    modules,
    oracle,
    run_layer,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pb():
    return modules()


@pytest.mark.parametrize("form", CACHE_FORMS)
def test_both_cache_forms_split_into_views_of_k_and_v(pb, device, form):
    kv_cache = make_kv_cache(form, device)
    key_cache, value_cache = pb.impl.split_kv_cache(kv_cache, HEAD_SIZE)
    for cache in (key_cache, value_cache):
        assert cache.shape == (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        assert cache.stride(-1) == 1
    key_cache[7, 3, 1, 5] = 1.0
    value_cache[7, 3, 1, 5] = 2.0
    if form in UNPACKED:
        assert kv_cache[7, :, 3, 1, 5].tolist() == [1.0, 2.0]
    else:
        assert kv_cache[7, 1, 3, 5] == 1.0
        assert kv_cache[7, 1, 3, HEAD_SIZE + 5] == 2.0


@pytest.mark.parametrize("shape", [(8, 3, 16, 2, 32), (8, 2, 16, 32), (0,)])
def test_an_unknown_cache_form_is_refused(pb, shape):
    with pytest.raises(ValueError, match="kv_cache must be"):
        pb.impl.split_kv_cache(torch.empty(shape), HEAD_SIZE)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("with_layers", [False, True])
def test_the_shape_and_order_that_older_vllm_asks_for(
    pb, monkeypatch, layout, with_layers
):
    from vllm.v1.attention.backends import utils

    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: layout, raising=False)
    shape = pb.Backend.get_kv_cache_shape(8, 16, 2, 32)
    assert shape == (8, 2, 16, 2, 32)
    order = pb.Backend.get_kv_cache_stride_order(with_layers)
    if not with_layers:
        assert order == UNPACKED[layout]
        return
    # Blocks stay outermost, or right behind the heads that a connector transfers.
    axes = ["layer", "block", "kv", "slot", "head", "element"]
    names = [axes[axis] for axis in order]
    assert names[-1] == "element"
    if layout == "NHD":
        assert names == ["block", "layer", "kv", "slot", "head", "element"]
    else:
        assert names == ["block", "head", "layer", "kv", "slot", "element"]


# ----------------------------------------------------------------- a step of a group


@pytest.mark.parametrize("pad", [0, 64], ids=["compact", "padded"])
@pytest.mark.parametrize("form", CACHE_FORMS)
def test_a_mixed_step_over_each_cache_form(pb, device, form, pad):
    impl = make_impl(pb)
    builder = make_builder(pb, [impl], device)
    step, kv_cache = make_step(device), make_kv_cache(form, device, pad)
    fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    out = run_layer(impl, step, kv_cache, metadata)
    assert out is step.out
    assert_matches(out, oracle(step, kv_cache, impl))


OPTIONS = {
    "window": {"sliding_window": 12},
    "softcap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [0.1, -2.0, 3.0, 0.0]},
    "all": {
        "sliding_window": 12,
        "logits_soft_cap": 5.0,
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
        "sinks": [0.1, -2.0, 3.0, 0.0],
    },
}


def _with_tensors(options, device):
    if "sinks" in options:
        sinks = torch.tensor(options["sinks"], device=device)
        options = options | {"sinks": sinks}
    return options


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_options_reach_the_kernel(pb, device, name):
    impl = make_impl(pb, **_with_tensors(OPTIONS[name], device))
    builder = make_builder(pb, [impl], device)
    step, kv_cache = make_step(device), make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    out = run_layer(impl, step, kv_cache, builder.build(0, step.common))
    assert_matches(out, oracle(step, kv_cache, impl))
    plain = oracle(step, kv_cache, make_impl(pb))
    assert not torch.allclose(out, plain, atol=1e-3)


def test_one_group_may_hold_layers_of_two_windows(pb, device):
    impls = [make_impl(pb), make_impl(pb, sliding_window=12), make_impl(pb)]
    builder = make_builder(pb, impls, device)
    step, kv_cache = make_step(device), make_kv_cache("NHD", device)
    fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    assert len(metadata.batches) == 2
    for impl in impls:
        step.out.fill_(float("nan"))
        run_layer(impl, step, kv_cache, metadata)
        assert_matches(step.out, oracle(step, kv_cache, impl))


def test_padded_requests_and_tokens_of_a_graph_are_left_alone(pb, device):
    # vllm#57017: query_len 0 and seq_len 0 under replay.
    impl = make_impl(pb)
    builder = make_builder(pb, [impl], device)
    requests = [(1, 50), (1, 17)]
    step = make_step(device, requests, pad_tokens=2, pad_requests=2)
    kv_cache = make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    out = run_layer(impl, step, kv_cache, builder.build(0, step.common))
    assert_matches(out, oracle(step, kv_cache, impl))
    assert out[2:].isnan().all()
    # Slot -1 of the padding wrote nothing, not even to block 0.
    assert kv_cache[0].isnan().all()


def test_the_cache_update_stores_as_many_tokens_as_there_are_slots(pb, device):
    impl, kv_cache = make_impl(pb), make_kv_cache("BHNC", device)
    step = make_step(device, [(5, 5)])
    key_cache, value_cache = pb.impl.split_kv_cache(kv_cache, HEAD_SIZE)
    slots = step.common.slot_mapping[:3].clone()
    slots[1] = -1
    impl.do_kv_cache_update(None, step.key, step.value, kv_cache, slots)
    for cache, rows in ((key_cache, step.key), (value_cache, step.value)):
        stored = (
            cache.flatten(0, 1)
            if cache.is_contiguous()
            else cache.reshape(-1, KV_HEADS, HEAD_SIZE)
        )
        assert torch.equal(stored[slots[0]], rows[0])
        assert torch.equal(stored[slots[2]], rows[2])
        written = (~stored.isnan()).any(-1).any(-1)
        assert int(written.sum()) == 2


def test_an_empty_cache_update_is_allowed(pb, device):
    impl, kv_cache = make_impl(pb), make_kv_cache("NHD", device)
    step = make_step(device, [(5, 5)])
    none = step.common.slot_mapping[:0]
    impl.do_kv_cache_update(None, step.key, step.value, kv_cache, none)
    assert kv_cache.isnan().all()


def test_a_profiling_run_writes_zeros(pb, device):
    step = make_step(device)
    out = make_impl(pb).forward(
        None, step.query, step.key, step.value, torch.empty(0), None, output=step.out
    )
    assert out is step.out
    assert not out.any()


def test_a_new_cache_replaces_the_one_used_before(pb, device):
    impl = make_impl(pb)
    builder = make_builder(pb, [impl], device)
    step = make_step(device)
    for form in ("BHNC", "NHD"):
        kv_cache = make_kv_cache(form, device)
        fill_context(step, kv_cache)
        step.out.fill_(float("nan"))
        run_layer(impl, step, kv_cache, builder.build(0, step.common))
        assert_matches(step.out, oracle(step, kv_cache, impl))
    # A new builder means that vLLM is about to allocate: nothing may keep the old one.
    assert impl._kv_cache is kv_cache
    make_builder(pb, [impl], device)
    assert impl._kv_cache is None
    assert impl._layer is None


def test_reloaded_sinks_are_seen(pb, device):
    sinks = torch.zeros(HEADS, device=device)
    impl = make_impl(pb, sinks=sinks)
    builder = make_builder(pb, [impl], device)
    step, kv_cache = make_step(device), make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    first = run_layer(impl, step, kv_cache, metadata).clone()
    sinks.copy_(torch.tensor([4.0, -1.0, 2.0, 0.5]))
    impl.process_weights_after_loading(torch.float32)
    second = run_layer(impl, step, kv_cache, metadata)
    assert not torch.allclose(first, second, atol=1e-3)
    assert_matches(second, oracle(step, kv_cache, impl))


def test_a_layer_that_shares_a_cache_reads_only_the_cache(pb, device, monkeypatch):
    seen = {}

    def record(*args, **kwargs):
        seen.update(kwargs)
        return kwargs["out"]

    monkeypatch.setattr(pb.impl, "attend", record)
    step, kv_cache = make_step(device), make_kv_cache("BHNC", device)
    for target, expected in (("layer0", (None, None)), (None, (step.key, step.value))):
        impl = make_impl(pb, kv_sharing_target_layer_name=target)
        metadata = make_builder(pb, [impl], device).build(0, step.common)
        impl.forward(
            None, step.query, step.key, step.value, kv_cache, metadata, output=step.out
        )
        assert seen["key"] is expected[0]
        assert seen["value"] is expected[1]


def test_a_layer_the_builder_does_not_know_still_computes(pb, device, monkeypatch):
    warnings = []
    monkeypatch.setattr(pb.impl.logger, "warning", lambda *a: warnings.append(a))
    pb.impl._warn_once.cache_clear()
    impl = make_impl(pb, sliding_window=12)
    builder = make_builder(pb, [make_impl(pb)], device)
    step, kv_cache = make_step(device), make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    for _ in range(2):
        run_layer(impl, step, kv_cache, metadata)
        assert_matches(step.out, oracle(step, kv_cache, impl))
    assert len(warnings) == 1


# -------------------------------------------------------------------------- builders


def test_a_builder_without_known_layers_goes_by_the_kv_spec(pb, device):
    builder = make_builder(pb, [], device, spec=make_spec(sliding_window=12))
    (key,) = builder.planners
    assert key == pb.metadata.PlanKey(HEADS, KV_HEADS, HEAD_SIZE, 12)


def _limits_of(builder):
    (planner,) = builder.planners.values()
    return planner.max_num_seqs, planner.max_num_tokens, planner.max_decode_query_len


@pytest.mark.parametrize(
    ("limits", "spec", "expected"),
    [
        ({}, {}, (8, 128, 8)),
        # Graphs are padded beyond what the scheduler hands out.
        ({"captured": [1, 16, 256]}, {}, (256, 256, 8)),
        # Drafters append their slots; 1 + k tokens are verified like a decode.
        ({"drafts": 3}, {}, (8, 128 + 8 * 3, 8)),
        ({"drafts": 10}, {}, (8, 128 + 8 * 10, 11)),
        # Each request may begin and end in the middle of a chunk.
        ({}, {"attention_chunk_size": 32}, (2 * 8 + 4, 128, 8)),
    ],
)
def test_buffers_hold_the_largest_step(pb, device, limits, spec, expected):
    builder = make_builder(
        pb, [make_impl(pb)], device, spec=make_spec(**spec), **limits
    )
    assert _limits_of(builder) == expected


def test_value_heads_of_another_size_are_refused(pb, device):
    from portable_backend.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="value heads of size 16"):
        make_builder(pb, [make_impl(pb)], device, spec=make_spec(head_size_v=16))
    make_builder(pb, [make_impl(pb)], device, spec=make_spec(head_size_v=HEAD_SIZE))


def test_attention_that_is_not_causal_is_refused(pb, device):
    from portable_backend.errors import UnsupportedError

    builder = make_builder(pb, [make_impl(pb)], device)
    common = make_step(device).common
    for causal in (False, torch.ones(4, dtype=torch.bool, device=device)):
        common.causal = causal
        with pytest.raises(UnsupportedError, match="not causal"):
            builder.build(0, common)


def test_each_group_plans_in_its_own_buffers(pb, device):
    # A graph captured for the second group reads the second builder's buffers.
    impl = make_impl(pb)
    first, second = (make_builder(pb, [impl], device) for _ in range(2))
    step, other = make_step(device), make_step(device, seed=5)
    kv_cache = make_kv_cache("BHNC", device)
    fill_context(other, kv_cache)
    metadata = first.build(0, step.common)
    metadata.set_by_a_wrapper = "kept"
    updated = second.update_block_table(
        metadata, other.common.block_table_tensor, other.common.slot_mapping
    )
    assert updated.set_by_a_wrapper == "kept"
    assert metadata.block_table is not updated.block_table
    assert torch.equal(metadata.block_table, step.common.block_table_tensor)
    (batch,) = updated.batches.values()
    (planner,) = second.planners.values()
    assert batch.plan.planner is planner
    out = run_layer(impl, other, kv_cache, updated)
    assert_matches(out, oracle(other, kv_cache, impl))


def test_draft_steps_follow_lengths_that_advance_in_place(pb, device):
    impl = make_impl(pb)
    builder = make_builder(pb, [impl], device)
    step = make_step(device, [(1, 20), (1, 300)])
    kv_cache = make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    # The runner's persistent buffer starts shorter than it will be.
    step.common.seq_lens -= 15
    metadata = builder.build(0, step.common)
    metadata.seq_lens += 15
    builder.update_draft_decode_metadata(metadata)
    out = run_layer(impl, step, kv_cache, metadata)
    assert_matches(out, oracle(step, kv_cache, impl))


def test_building_reads_nothing_back_from_the_device(pb, device):
    if device.type != "cuda":
        pytest.skip("the CPU has nothing to wait for")
    builder = make_builder(pb, [make_impl(pb)], device)
    step = make_step(device)
    builder.build(0, step.common)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        builder.build(0, step.common)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------- vLLM's own wrappers


def test_chunked_local_attention_wraps_us(pb, device):
    local = pytest.importorskip(
        "vllm.model_executor.layers.attention.chunked_local_attention"
    )
    chunk = 2 * BLOCK_SIZE
    wrapped = local.create_chunked_local_attention_backend(pb.Backend, chunk)
    impl = make_impl(pb)
    builder = make_builder(
        pb,
        [impl],
        device,
        cls=wrapped.get_builder_cls(),
        spec=make_spec(attention_chunk_size=chunk),
    )
    requests = [(40, 75), (1, 70), (20, 20), (1, 33)]
    step, kv_cache = make_step(device, requests), make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    assert metadata.seq_lens.shape[0] > len(requests)
    out = run_layer(impl, step, kv_cache, metadata)
    # A query sees its own chunk: the requests' keys from the chunk's first token on.
    start = 0
    for i, (query_len, seq_len) in enumerate(requests):
        for t in range(query_len):
            position = seq_len - query_len + t
            first = position // chunk * chunk
            keys, values = (
                cache[step.common.block_table_tensor[i].long(),].flatten(0, 1)[
                    first : position + 1
                ]
                for cache in pb.impl.split_kv_cache(kv_cache, HEAD_SIZE)
            )
            keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
            values = values.repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("hd,khd->hk", step.query[start + t], keys) * SCALE
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(out[start + t], expected, atol=2e-6, rtol=2e-5)
        start += query_len


def test_fast_prefill_wraps_us(pb, device):
    from vllm.v1.attention.backends import utils

    make = getattr(utils, "create_fast_prefill_custom_backend", None)
    if make is None:
        pytest.skip("this vLLM has no fast prefill")
    impl = make_impl(pb)
    builder = make_builder(
        pb, [impl], device, cls=make("FastPrefill", pb.Backend).get_builder_cls()
    )
    step, kv_cache = make_step(device), make_kv_cache("BHNC", device)
    fill_context(step, kv_cache)
    impl.do_kv_cache_update(
        None, step.key, step.value, kv_cache, step.common.slot_mapping
    )
    # Only each request's last token needs an output.
    ends = step.common.query_start_loc[1:].long() - 1
    fields = {field.name for field in dataclasses.fields(step.common)}
    step.common.logits_indices_padded = ends
    step.common.num_logits_indices = len(STEP)
    if "max_logits_per_req" in fields:
        step.common.max_logits_per_req = 1
    metadata = builder.build(0, step.common)
    assert isinstance(metadata, pb.metadata.PortableMetadata)
    expected = oracle(step, kv_cache, impl)[ends]
    out = torch.full_like(expected, float("nan"))
    impl.forward(None, step.query[ends], None, None, kv_cache, metadata, output=out)
    assert_matches(out, expected)
