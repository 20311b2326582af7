#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One engine for tensor_parallel_check: greedy tokens, their gaps, launches, seconds.

    tensor_parallel_engine.py SPEC.json OUT.json

SPEC holds `llm`, arguments of vllm.LLM; `prompts`, lists of token ids; `max_tokens`;
and `cpus`, those that it may use, null for all. OUT gets `start_s`, seconds until the
engine could answer; `rows` as same_tokens.py compares them; and, if there is a worker
extension, each rank's `launch_counts` and `choices`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

SEED = 0
# Attention's scores, then logits, spread over a few units: the last token matters
# little, the prompt much, and the two best tokens are seldom close.
_STD, _HEAD_STD = 0.03, 0.08


def write_weights(folder: Path) -> None:
    """Random bf16 weights for the folder's config.json, a Llama's; always the same."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(SEED)

    def drawn(rows: int, columns: int, std: float) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator) * std
        return weights.to(torch.bfloat16)

    # So that each product keeps the size of its input, whatever the hidden size.
    std = _STD * (2048 / hidden) ** 0.5
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    inner = config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": drawn(vocab, hidden, 1.0),
        "model.norm.weight": ones,
        "lm_head.weight": drawn(vocab, hidden, _HEAD_STD * (2048 / hidden) ** 0.5),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = drawn(*shape, std)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = ones.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Random ids: one token to `longest`, two with a prefix in common."""
    rng = random.Random(SEED)

    def drawn(length: int) -> list[int]:
        return [rng.randrange(2, vocab_size) for _ in range(length)]

    lengths = [1, 2, 15, 16, 17, 33, 64, 100]
    lengths += [max(1, round(longest * part)) for part in (0.1, 0.3, 0.5, 0.8, 1.0)]
    prefix = drawn(longest // 2)
    found = [drawn(n) for n in lengths * 2 if n <= longest]
    return [*found, [*prefix, *drawn(9)], [*prefix, *drawn(9)]]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(**spec["llm"])
    result: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1)}
    sampling = SamplingParams(
        temperature=0,
        max_tokens=spec["max_tokens"],
        logprobs=2,
        ignore_eos=True,
        detokenize=False,
    )
    given = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    began, rows = time.monotonic(), []
    for output in llm.generate(given, sampling, use_tqdm=False):
        completion = output.outputs[0]
        gaps = []
        for step in completion.logprobs:
            best = sorted((entry.logprob for entry in step.values()), reverse=True)
            gaps.append(best[0] - best[1])
        rows.append({"ids": list(completion.token_ids), "gaps": gaps})
    result |= {"rows": rows, "answer_s": round(time.monotonic() - began, 1)}
    if "worker_extension_cls" in spec["llm"]:
        result["launch_counts"] = llm.collective_rpc("portable_launch_counts")
        result["choices"] = llm.collective_rpc("portable_choices")
    return result


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    spec, out = (Path(name) for name in sys.argv[1:])
    out.write_text(json.dumps(run(json.loads(spec.read_text()))))
    return 0


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
