# SPDX-License-Identifier: Apache-2.0
"""Dummy models: a config.json in the shape of a real one, weights at random."""

import json
from pathlib import Path
from typing import Any

_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama8b": _LLAMA_8B,
    # A quarter of the layers: several engines fit on one GPU, and start soon.
    "llama8b-8l": _LLAMA_8B | {"num_hidden_layers": 8},
    "llama70b-8l": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "small": {
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}


def write_config(folder: Path, geometry: str) -> None:
    """Write config.json of one of GEOMETRIES into `folder`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    text = json.dumps(config | GEOMETRIES[geometry], indent=1)
    (folder / "config.json").write_text(text)
