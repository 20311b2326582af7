# SPDX-License-Identifier: Apache-2.0
"""The back end between vLLM and the kernels: both cache forms, both ends mocked."""

import dataclasses
import functools
import types

import pytest
import torch

pytestmark = pytest.mark.vllm

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 16, 40
SCALE = HEAD_SIZE**-0.5
# Requests of one step: (query_len, seq_len). Prefill, chunk, verification, decode.
STEP = [(20, 20), (9, 41), (3, 33), (1, 50)]


@pytest.fixture(scope="module")
def pb():
    """What is under test, in one place; imported late, since it needs vLLM."""
    from portable_backend import backend, impl, metadata

    return types.SimpleNamespace(
        Backend=backend.PortableBackend,
        Impl=impl.PortableImpl,
        Builder=metadata.PortableMetadataBuilder,
        backend=backend,
        impl=impl,
        metadata=metadata,
    )


# ------------------------------------------------------------------ selection by vLLM


def _reasons(pb, **changes):
    values = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    return pb.Backend.validate_configuration(**(values | changes))


@pytest.mark.parametrize(
    "accepted",
    [
        {"head_size": 32},
        {"head_size": 80},
        {"head_size": 256},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"dtype": torch.float32},
        {"block_size": 528},
        {"has_sink": True},
    ],
    ids=repr,
)
def test_vllm_may_select_what_the_kernels_can_do(pb, accepted):
    assert _reasons(pb, **accepted) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"head_size": 512}, "head size must be a multiple of 8 from 32 to 256"),
        ({"head_size": 100}, "got 100"),
        ({"kv_cache_dtype": "fp8"}, "not implemented yet, got fp8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "not implemented yet, got fp8_e5m2"),
        ({"kv_cache_dtype": "float16"}, "must have the model's dtype bfloat16"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_vllm_is_told_why_it_may_not_select_us(pb, refused, reason):
    assert any(reason in text for text in _reasons(pb, **refused))


def test_windows_are_declared_which_newer_vllm_asks_for(pb):
    assert pb.Backend.supports_sliding_window()


@pytest.mark.parametrize("capability", [(7, 0), (7, 2)])
def test_gpus_that_triton_has_left_are_refused(pb, monkeypatch, capability):
    cuda = types.SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(pb.backend, "current_platform", cuda)
    assert not pb.Backend.supports_compute_capability(capability)
    assert pb.Backend.supports_compute_capability((7, 5))
    assert pb.Backend.supports_compute_capability((12, 0))
    assert pb.Backend.supports_compute_capability(None)


@pytest.mark.parametrize(
    ("on_cpu", "default", "preferred"),
    [(False, 16, 64), (False, 128, 128), (True, 16, 16), (True, 128, 128)],
)
def test_gpu_pages_hold_at_least_64_tokens(pb, monkeypatch, on_cpu, default, preferred):
    platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(pb.backend, "current_platform", platform)
    assert pb.Backend.get_preferred_block_size(default) == preferred


def test_uniform_batches_may_be_captured_in_one_graph(pb):
    from vllm.v1.attention.backend import AttentionCGSupport

    support = pb.Builder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


# ------------------------------------------------------------------------- KV caches

# Logical axes of vLLM 0.25's cache: block, K or V, slot, head, element; and of later
# ones: block, head, slot, K beside V. Each with its possible orders in memory.
UNPACKED = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}
PACKED = {"BHNC": (0, 1, 2, 3), "BNHC": (0, 2, 1, 3), "HBNC": (1, 0, 2, 3)}


def _in_memory(shape, order, device, dtype=torch.float32, pad=0):
    """A NaN tensor of logical `shape`, its axes laid out in memory in `order`.

    With `pad`, each index of the outermost axis is followed by that many elements, as
    where pages are padded or layers interleaved.
    """
    sizes = [shape[axis] for axis in order]
    rows = torch.Size(sizes[1:]).numel()
    memory = torch.full((sizes[0], rows + pad), float("nan"), dtype=dtype)
    memory = memory.to(device)[:, :rows].unflatten(1, sizes[1:])
    return memory.permute([order.index(axis) for axis in range(len(shape))])


def _kv_cache(form, device, pad=0):
    make = functools.partial(_in_memory, device=device, pad=pad)
    if form in UNPACKED:
        shape = (NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        return make(shape, UNPACKED[form])
    return make((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), PACKED[form])


CACHE_FORMS = [*UNPACKED, *PACKED]


@pytest.mark.parametrize("form", CACHE_FORMS)
def test_both_cache_forms_split_into_views_of_k_and_v(pb, device, form):
    kv_cache = _kv_cache(form, device)
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


def _impl(pb, **options):
    """A layer's impl, made with positional arguments as vLLM's layer does."""
    values = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    positional = [options.pop(name, default) for name, default in values.items()]
    return pb.Impl(HEADS, HEAD_SIZE, SCALE, KV_HEADS, *positional, **options)


def _spec(**changes):
    values = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    return types.SimpleNamespace(**(values | changes))


def _vllm_config(
    impls, *, max_num_seqs=8, max_num_tokens=128, captured=(), drafts=None
):
    layers = {
        f"layer{i}": types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)
    }
    speculative = None
    if drafts is not None:
        speculative = types.SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False
        )
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(
            static_forward_context=layers, cudagraph_capture_sizes=list(captured)
        ),
        model_config=types.SimpleNamespace(
            dtype=torch.float32, get_num_attention_heads=lambda _: HEADS
        ),
        scheduler_config=types.SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative,
    )


def _builder(pb, impls, device, *, cls=None, spec=None, **limits):
    names = [f"layer{i}" for i in range(len(impls))]
    config = _vllm_config(impls, **limits)
    return (cls or pb.Builder)(spec or _spec(), names, config, device)


@dataclasses.dataclass
class Step:
    """Inputs of one step, as vLLM's runner would have them."""

    common: object
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor


def _step(device, requests=STEP, *, pad_tokens=0, pad_requests=0, seed=0):
    """Random queries over a random permutation of blocks; block 0 is nobody's."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    generator = torch.Generator().manual_seed(seed)
    query_lens = [q for q, _ in requests] + [0] * pad_requests
    seq_lens = [s for _, s in requests] + [0] * pad_requests
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_tokens = int(start[-1]) + pad_tokens
    width = -(-max(seq_lens) // BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1
    table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = -(-seq_len // BLOCK_SIZE)
        table[i, :count], order = order[:count], order[count:]
        position = torch.arange(seq_len - query_len, seq_len)
        block = table[i, position // BLOCK_SIZE].long()
        slots[start[i] : start[i + 1]] = block * BLOCK_SIZE + position % BLOCK_SIZE

    def rows(heads):
        values = torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator)
        return values.to(device)

    common = CommonAttentionMetadata(
        query_start_loc=start.to(device),
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        causal=True,
    )
    out = torch.full((num_tokens, HEADS, HEAD_SIZE), float("nan"), device=device)
    return Step(common, rows(HEADS), rows(KV_HEADS), rows(KV_HEADS), out)


def _fill_context(step, kv_cache, seed=1):
    """Write random K and V of the tokens before this step; the rest stays NaN."""
    from portable_backend.impl import split_kv_cache

    generator = torch.Generator().manual_seed(seed)
    lens = step.common.seq_lens.tolist()
    start = step.common.query_start_loc.tolist()
    for cache in split_kv_cache(kv_cache, HEAD_SIZE):
        for i, seq_len in enumerate(lens):
            context = seq_len - (start[i + 1] - start[i])
            position = torch.arange(context, device=cache.device)
            block = step.common.block_table_tensor[i, position // BLOCK_SIZE].long()
            values = torch.randn(context, KV_HEADS, HEAD_SIZE, generator=generator)
            cache[block, position % BLOCK_SIZE] = values.to(cache.device)


def _oracle(step, kv_cache, impl, seq_lens=None):
    from portable_backend.impl import split_kv_cache
    from portable_backend.kernels import PagedBatch
    from portable_backend.kernels.reference import paged_attention_reference

    common = step.common
    batch = PagedBatch(
        common.query_start_loc,
        common.seq_lens if seq_lens is None else seq_lens,
        common.block_table_tensor,
        common.max_query_len,
        common.max_seq_len,
    )
    caches = split_kv_cache(kv_cache, HEAD_SIZE)
    options = impl._make_options(step.query.device)
    return paged_attention_reference(step.query, *caches, batch, options)


def _run_layer(impl, step, kv_cache, metadata):
    """The two calls that vLLM's layer makes."""
    impl.do_kv_cache_update(
        None, step.key, step.value, kv_cache, step.common.slot_mapping
    )
    return impl.forward(
        None, step.query, step.key, step.value, kv_cache, metadata, output=step.out
    )


def _assert_matches(out, expected):
    """Equal to fp32 rounding where the oracle has rows; NaN rows are padding."""
    rows = ~expected.isnan().any(-1).any(-1)
    assert rows.any()
    torch.testing.assert_close(out[rows], expected[rows], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("pad", [0, 64], ids=["compact", "padded"])
@pytest.mark.parametrize("form", CACHE_FORMS)
def test_a_mixed_step_over_each_cache_form(pb, device, form, pad):
    impl = _impl(pb)
    builder = _builder(pb, [impl], device)
    step, kv_cache = _step(device), _kv_cache(form, device, pad)
    _fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    out = _run_layer(impl, step, kv_cache, metadata)
    assert out is step.out
    _assert_matches(out, _oracle(step, kv_cache, impl))


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
    impl = _impl(pb, **_with_tensors(OPTIONS[name], device))
    builder = _builder(pb, [impl], device)
    step, kv_cache = _step(device), _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    out = _run_layer(impl, step, kv_cache, builder.build(0, step.common))
    _assert_matches(out, _oracle(step, kv_cache, impl))
    plain = _oracle(step, kv_cache, _impl(pb))
    assert not torch.allclose(out, plain, atol=1e-3)


def test_one_group_may_hold_layers_of_two_windows(pb, device):
    impls = [_impl(pb), _impl(pb, sliding_window=12), _impl(pb)]
    builder = _builder(pb, impls, device)
    step, kv_cache = _step(device), _kv_cache("NHD", device)
    _fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    assert len(metadata.batches) == 2
    for impl in impls:
        step.out.fill_(float("nan"))
        _run_layer(impl, step, kv_cache, metadata)
        _assert_matches(step.out, _oracle(step, kv_cache, impl))


def test_padded_requests_and_tokens_of_a_graph_are_left_alone(pb, device):
    # vllm#57017: query_len 0 and seq_len 0 under replay.
    impl = _impl(pb)
    builder = _builder(pb, [impl], device)
    requests = [(1, 50), (1, 17)]
    step = _step(device, requests, pad_tokens=2, pad_requests=2)
    kv_cache = _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    out = _run_layer(impl, step, kv_cache, builder.build(0, step.common))
    _assert_matches(out, _oracle(step, kv_cache, impl))
    assert out[2:].isnan().all()
    # Slot -1 of the padding wrote nothing, not even to block 0.
    assert kv_cache[0].isnan().all()


def test_the_cache_update_stores_as_many_tokens_as_there_are_slots(pb, device):
    impl, kv_cache = _impl(pb), _kv_cache("BHNC", device)
    step = _step(device, [(5, 5)])
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
    impl, kv_cache = _impl(pb), _kv_cache("NHD", device)
    step = _step(device, [(5, 5)])
    none = step.common.slot_mapping[:0]
    impl.do_kv_cache_update(None, step.key, step.value, kv_cache, none)
    assert kv_cache.isnan().all()


def test_a_profiling_run_writes_zeros(pb, device):
    step = _step(device)
    out = _impl(pb).forward(
        None, step.query, step.key, step.value, torch.empty(0), None, output=step.out
    )
    assert out is step.out
    assert not out.any()


def test_a_new_cache_replaces_the_one_used_before(pb, device):
    impl = _impl(pb)
    builder = _builder(pb, [impl], device)
    step = _step(device)
    for form in ("BHNC", "NHD"):
        kv_cache = _kv_cache(form, device)
        _fill_context(step, kv_cache)
        step.out.fill_(float("nan"))
        _run_layer(impl, step, kv_cache, builder.build(0, step.common))
        _assert_matches(step.out, _oracle(step, kv_cache, impl))
    # A new builder means that vLLM is about to allocate: nothing may keep the old one.
    assert impl._kv_cache is kv_cache
    _builder(pb, [impl], device)
    assert impl._kv_cache is None
    assert impl._caches is None


def test_reloaded_sinks_are_seen(pb, device):
    sinks = torch.zeros(HEADS, device=device)
    impl = _impl(pb, sinks=sinks)
    builder = _builder(pb, [impl], device)
    step, kv_cache = _step(device), _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    first = _run_layer(impl, step, kv_cache, metadata).clone()
    sinks.copy_(torch.tensor([4.0, -1.0, 2.0, 0.5]))
    impl.process_weights_after_loading(torch.float32)
    second = _run_layer(impl, step, kv_cache, metadata)
    assert not torch.allclose(first, second, atol=1e-3)
    _assert_matches(second, _oracle(step, kv_cache, impl))


def test_a_layer_that_shares_a_cache_reads_only_the_cache(pb, device, monkeypatch):
    seen = {}

    def record(*args, **kwargs):
        seen.update(kwargs)
        return kwargs["out"]

    monkeypatch.setattr(pb.impl, "paged_attention", record)
    step, kv_cache = _step(device), _kv_cache("BHNC", device)
    for target, expected in (("layer0", (None, None)), (None, (step.key, step.value))):
        impl = _impl(pb, kv_sharing_target_layer_name=target)
        metadata = _builder(pb, [impl], device).build(0, step.common)
        impl.forward(
            None, step.query, step.key, step.value, kv_cache, metadata, output=step.out
        )
        assert seen["key"] is expected[0]
        assert seen["value"] is expected[1]


def test_a_layer_the_builder_does_not_know_still_computes(pb, device, monkeypatch):
    warnings = []
    monkeypatch.setattr(pb.impl.logger, "warning", lambda *a: warnings.append(a))
    pb.impl._warn_once.cache_clear()
    impl = _impl(pb, sliding_window=12)
    builder = _builder(pb, [_impl(pb)], device)
    step, kv_cache = _step(device), _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    for _ in range(2):
        _run_layer(impl, step, kv_cache, metadata)
        _assert_matches(step.out, _oracle(step, kv_cache, impl))
    assert len(warnings) == 1


# -------------------------------------------------------------------------- builders


def test_a_builder_without_known_layers_goes_by_the_kv_spec(pb, device):
    builder = _builder(pb, [], device, spec=_spec(sliding_window=12))
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
    builder = _builder(pb, [_impl(pb)], device, spec=_spec(**spec), **limits)
    assert _limits_of(builder) == expected


def test_value_heads_of_another_size_are_refused(pb, device):
    from portable_backend.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="value heads of size 16"):
        _builder(pb, [_impl(pb)], device, spec=_spec(head_size_v=16))
    _builder(pb, [_impl(pb)], device, spec=_spec(head_size_v=HEAD_SIZE))


def test_attention_that_is_not_causal_is_refused(pb, device):
    from portable_backend.errors import UnsupportedError

    builder = _builder(pb, [_impl(pb)], device)
    common = _step(device).common
    for causal in (False, torch.ones(4, dtype=torch.bool, device=device)):
        common.causal = causal
        with pytest.raises(UnsupportedError, match="not causal"):
            builder.build(0, common)


def test_each_group_plans_in_its_own_buffers(pb, device):
    # A graph captured for the second group reads the second builder's buffers.
    impl = _impl(pb)
    first, second = (_builder(pb, [impl], device) for _ in range(2))
    step, other = _step(device), _step(device, seed=5)
    kv_cache = _kv_cache("BHNC", device)
    _fill_context(other, kv_cache)
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
    out = _run_layer(impl, other, kv_cache, updated)
    _assert_matches(out, _oracle(other, kv_cache, impl))


def test_draft_steps_follow_lengths_that_advance_in_place(pb, device):
    impl = _impl(pb)
    builder = _builder(pb, [impl], device)
    step = _step(device, [(1, 20), (1, 300)])
    kv_cache = _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    # The runner's persistent buffer starts shorter than it will be.
    step.common.seq_lens -= 15
    metadata = builder.build(0, step.common)
    metadata.seq_lens += 15
    builder.update_draft_decode_metadata(metadata)
    out = _run_layer(impl, step, kv_cache, metadata)
    _assert_matches(out, _oracle(step, kv_cache, impl))


def test_building_reads_nothing_back_from_the_device(pb, device):
    if device.type != "cuda":
        pytest.skip("the CPU has nothing to wait for")
    builder = _builder(pb, [_impl(pb)], device)
    step = _step(device)
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
    impl = _impl(pb)
    builder = _builder(
        pb,
        [impl],
        device,
        cls=wrapped.get_builder_cls(),
        spec=_spec(attention_chunk_size=chunk),
    )
    requests = [(40, 75), (1, 70), (20, 20), (1, 33)]
    step, kv_cache = _step(device, requests), _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
    metadata = builder.build(0, step.common)
    assert metadata.seq_lens.shape[0] > len(requests)
    out = _run_layer(impl, step, kv_cache, metadata)
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
    impl = _impl(pb)
    builder = _builder(
        pb, [impl], device, cls=make("FastPrefill", pb.Backend).get_builder_cls()
    )
    step, kv_cache = _step(device), _kv_cache("BHNC", device)
    _fill_context(step, kv_cache)
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
    expected = _oracle(step, kv_cache, impl)[ends]
    out = torch.full_like(expected, float("nan"))
    impl.forward(None, step.query[ends], None, None, kv_cache, metadata, output=out)
    _assert_matches(out, expected)


# ------------------------------------------------------------------- refusals of impl


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rotary_fraction": 0.5}, "rotary_fraction=0.5"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"chunk_lookback": 1}, "chunk_lookback"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"attn_type": "encoder_only"}, "attn_type='encoder_only'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_that_cannot_be_honoured_is_named(pb, options, named):
    from portable_backend.errors import UnsupportedError

    with pytest.raises(UnsupportedError) as caught:
        _impl(pb, **options)
    assert named in str(caught.value)


def test_all_refused_options_are_named_at_once(pb):
    from portable_backend.errors import UnsupportedError

    with pytest.raises(UnsupportedError) as caught:
        _impl(pb, kv_cache_dtype="fp8", mystery=1)
    assert "mystery=1" in str(caught.value)
    assert "fp8" in str(caught.value)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_numbers_of_all_ranks_are_not_mistaken_for_this_ranks(pb, name):
    # flashinfer#5101: slopes are per rank.
    values = [0.5] * (2 * HEADS)
    values = torch.tensor(values) if name == "sinks" else values
    with pytest.raises(
        ValueError, match=f"{name} must be one number for each of the 4"
    ):
        _impl(pb, **{name: values})


def test_fused_output_quantisation_is_refused(pb, device):
    step = _step(device)
    impl = _impl(pb)
    scale = torch.ones(1)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="quantisation"):
            impl.forward(
                None,
                step.query,
                step.key,
                step.value,
                torch.empty(0),
                None,
                output=step.out,
                **{name: scale},
            )


def test_a_wrong_setting_stops_the_first_layer(pb, monkeypatch):
    from portable_backend.settings import get_settings

    monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "maybe")
    get_settings.cache_clear()
    try:
        with pytest.raises(ValueError, match="one of off, load, startup, background"):
            _impl(pb)
        assert any("got 'maybe'" in reason for reason in _reasons(pb))
    finally:
        monkeypatch.delenv("PORTABLE_BACKEND_TUNE")
        get_settings.cache_clear()
