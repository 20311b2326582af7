# SPDX-License-Identifier: Apache-2.0
"""What vLLM, GPU and model there are: `probe.py MODEL MODULE,...` prints a JSON line.

platform (cuda, rocm, cpu or what vLLM calls it), vllm (version), backends (names that
it knows), modules (those of the named ones that are installed), vocab_size, max_tokens
(that the model takes; null: unknown) and environment (texts for the report).
"""

import importlib.util
import json
import os
import sys


def main(model: str, modules: str) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    import vllm
    from transformers import AutoConfig
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from portable_backend.bench.environment import describe

    load_general_plugins()
    platform = "rocm" if current_platform.is_rocm() else current_platform.device_type
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = describe(device, [], source=__file__)
    if device.type == "cuda":
        environment["gpu"] += f", {torch.cuda.device_count()} visible"
    else:
        environment["gpu"] = f"none, {os.cpu_count()} CPU cores"
    del environment["command"]
    config = AutoConfig.from_pretrained(model).get_text_config()
    answer = {
        "platform": platform,
        "vllm": vllm.__version__,
        "backends": list(AttentionBackendEnum.__members__),
        "modules": [m for m in modules.split(",") if m and importlib.util.find_spec(m)],
        "vocab_size": config.vocab_size,
        "max_tokens": getattr(config, "max_position_embeddings", None),
        "environment": environment,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
