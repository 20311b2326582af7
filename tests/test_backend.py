# SPDX-License-Identifier: Apache-2.0
"""What vLLM may select, what it is told otherwise, and what a layer refuses."""

import types

import pytest
import torch
from backend_fakes import HEADS, make_impl, make_step, modules

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pb():
    return modules()


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
    assert pb.Backend.supports_compute_capability((8, 0))
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
        make_impl(pb, **options)
    assert named in str(caught.value)


def test_all_refused_options_are_named_at_once(pb):
    from portable_backend.errors import UnsupportedError

    with pytest.raises(UnsupportedError) as caught:
        make_impl(pb, kv_cache_dtype="fp8", mystery=1)
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
        make_impl(pb, **{name: values})


def test_fused_output_quantisation_is_refused(pb, device):
    step = make_step(device)
    impl = make_impl(pb)
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
            make_impl(pb)
        assert any("got 'maybe'" in reason for reason in _reasons(pb))
    finally:
        monkeypatch.delenv("PORTABLE_BACKEND_TUNE")
        get_settings.cache_clear()
