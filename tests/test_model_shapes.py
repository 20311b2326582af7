# SPDX-License-Identifier: Apache-2.0
"""What is read from a config.json, for the layouts that models come in."""

import importlib.util
import json
import subprocess
import sys

import pytest

from portable_backend.errors import UnsupportedError
from portable_backend.warmup.model_shapes import (
    NormShape,
    read_model,
    shape_of_config,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "torch_dtype": "bfloat16",
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "head_dim": 256,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "torch_dtype": "float32",
}
GEMMA3 = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "head_dim": 256,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16},
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
PHI3 = LLAMA | {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0]},
    "sliding_window": 262144,
}


def shape(config, **options):
    return shape_of_config(config, "model", **options)


def test_a_llama():
    found = shape(LLAMA)
    assert (found.head_size, found.num_query_heads, found.num_kv_heads) == (128, 32, 8)
    assert found.num_queries_per_kv == 4
    assert (found.dtype, found.max_model_len) == ("bfloat16", 131072)
    assert found.windows == ((0, 32),)
    assert found.norms == (
        NormShape(4096, True, 1, 64),
        NormShape(4096, False, 1, 1),
    )


def test_query_and_key_norms_have_a_row_for_each_head():
    found = shape(QWEN3, tensor_parallel_size=2)
    assert found.norms[2:] == (
        NormShape(128, False, 16, 36),
        NormShape(128, False, 4, 36),
    )
    assert found.norm_row_sizes == (128, 2560)
    flagged = shape(LLAMA | {"model_type": "new", "use_qk_norm": True})
    assert flagged.norm_row_sizes == (128, 4096)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, ((0, 32),)),
        (QWEN3, ((0, 36),)),
        (MISTRAL, ((4096, 32),)),
        (MISTRAL | {"sliding_window": None}, ((0, 32),)),
        (PHI3, ((262144, 32),)),
        (GEMMA2, ((0, 21), (4096, 21))),
        (GEMMA3, ((0, 5), (1024, 29))),
        (GPT_OSS, ((0, 12), (128, 12))),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "max_window_layers": 20,
            },
            ((0, 20), (4096, 16)),
        ),
        (
            LLAMA | {"sliding_window": 64, "sliding_window_pattern": 4},
            ((0, 8), (64, 24)),
        ),
        (
            LLAMA | {"layer_types": ["linear_attention", "full_attention"] * 16},
            ((0, 16),),
        ),
    ],
    ids=str,
)
def test_kinds_of_layers(config, windows):
    found = shape(config)
    assert found.windows == windows
    assert found.sliding_windows == tuple(window for window, _ in windows)
    assert found.num_layers == sum(count for _, count in windows)


def test_gemma_has_norms_around_both_halves_of_a_layer():
    calls = {n.fused_add: n.calls for n in shape(GEMMA2).norms if n.row_size == 3584}
    assert calls == {True: 84, False: 85}
    assert shape(GEMMA3).norm_row_sizes == (256, 2560)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (GEMMA3, 131072),
        (GPT_OSS, 131072),
        (PHI3, 4096),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, 65536),
        ({n: v for n, v in LLAMA.items() if n != "max_position_embeddings"}, 2048),
    ],
    ids=str,
)
def test_the_longest_sequence_is_vllms(config, length):
    assert shape(config).max_model_len == length


def test_missing_heads_are_the_query_heads():
    config = {n: v for n, v in LLAMA.items() if n != "num_key_value_heads"}
    assert shape(config).num_kv_heads == 32


@pytest.mark.parametrize(
    ("ranks", "heads"), [(1, (32, 8)), (2, (16, 4)), (8, (4, 1)), (16, (2, 1))]
)
def test_few_kv_heads_are_replicated(ranks, heads):
    found = shape(LLAMA, tensor_parallel_size=ranks)
    assert (found.num_query_heads, found.num_kv_heads) == heads


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (
            3,
            {},
            "tensor_parallel_size must be a divisor .* 32 query heads, got 3",
        ),
        (6, {"num_attention_heads": 24}, "of the model's 8 KV heads, got 6"),
        (1, {"num_key_value_heads": 5}, "num_key_value_heads, got 32 and 5"),
        (1, {"hidden_size": None}, "hidden_size must be given"),
        (1, {"hidden_size": "4096"}, "hidden_size must be 1 or more, got 4096"),
        (1, {"torch_dtype": "float8_e4m3fn"}, "bfloat16, float16, float32"),
        (1, {"sliding_window": -1}, "sliding_window must be a number of tokens"),
    ],
)
def test_what_does_not_fit_is_named(ranks, changes, message):
    with pytest.raises(ValueError, match=message):
        shape(LLAMA | {"model_type": "unknown"} | changes, tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    ("kinds", "given"),
    [
        (["full_attention"] * 31, "31 of them"),
        (["full_attention"] * 33, "33 of them"),
        ([], "0 of them"),
        ("full_attention", "'full_attention'"),
    ],
)
def test_a_config_lists_as_many_layers_as_it_says(tmp_path, kinds, given):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"layer_types": kinds}))
    message = "layer_types must be a list of the 32 layers that num_hidden_layers says"
    with pytest.raises(ValueError, match=f"{message}, got {given}; correct"):
        read_model(str(path))


@pytest.mark.parametrize("ranks", [0, -1])
def test_ranks_are_counted_from_one(ranks):
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 or more"):
        read_model("anything", tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["mamba"] * 32}, "no layer has attention"),
    ],
)
def test_models_without_ordinary_attention_are_refused(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        shape(LLAMA | changes)


@pytest.mark.parametrize(
    ("given", "wanted", "dtype"),
    [
        ("float16", None, "float16"),
        ("float32", None, "bfloat16"),
        ("float32", "float32", "float32"),
        ("bfloat16", "half", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        (None, None, "bfloat16"),
    ],
)
def test_dtypes_are_vllms(given, wanted, dtype):
    assert shape(LLAMA | {"torch_dtype": given}, dtype=wanted).dtype == dtype


def test_folders_and_files_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = read_model(str(tmp_path), tensor_parallel_size=4)
    assert found.name == str(tmp_path) and found.num_kv_heads == 2
    assert read_model(str(tmp_path / "config.json")).num_kv_heads == 8


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_is_none_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model(str(tmp_path))


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder with a config\.json"):
        read_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "/absent/folder", "./absent", "a/b/c"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"a folder, a config\.json or an id"):
        read_model(name)


def test_without_huggingface_hub_an_id_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="huggingface_hub is not installed"):
        read_model("owner/name")


def _offline(tmp_path, code):
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    env["PYTHONPATH"] = ":".join(sys.path)
    run = [sys.executable, "-P", "-c", code]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    return done.stdout, done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="needs huggingface_hub"
)
def test_offline_an_id_is_found_in_the_cache_or_refused(tmp_path):
    code = "from portable_backend.warmup.model_shapes import read_model; import sys; "
    code += "print(read_model('owner/name').num_kv_heads, 'torch' in sys.modules)"
    _, err = _offline(tmp_path, code)
    assert "in the local cache (HF_HUB_OFFLINE is set), got owner/name" in err
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    out, err = _offline(tmp_path, code)
    assert out == "8 False\n", err


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
def test_what_a_config_leaves_to_its_class_is_filled_in():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    found = shape({"model_type": "gemma3", "text_config": text})
    assert (found.num_query_heads, found.num_kv_heads, found.head_size) == (8, 4, 256)
    assert found.hidden_size == 2560
    assert found.windows == ((0, 5), (1024, 29))
