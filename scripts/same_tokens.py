#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of a model under one attention back end; or compare two such runs.

    same_tokens.py MODEL BACKEND OUT.json [LLM arguments as JSON]
    same_tokens.py compare REFERENCE.json OURS.json

Two runs agree on a prompt up to the first token in which they differ. There the two
best tokens must have been a near-tie (log-probs within 0.15) in either run; otherwise
the prompt is bad, and so is the exit code.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

NEAR_TIE = 0.15
SUBJECTS = (
    "rivers",
    "the moon",
    "bread",
    "prime numbers",
    "bees",
    "glass",
    "winter",
    "steam engines",
    "maps",
    "salt",
)
OPENINGS = (
    "A short fact about {}:",
    "The history of {} begins",
    "Most people think that {}",
    "Explain {} to a child.",
)


def prompts() -> list[str]:
    """Short prompts, prompts of several chunks, and two that share a long prefix."""
    short = [
        OPENINGS[i % len(OPENINGS)].format(subject)
        for i, subject in enumerate(SUBJECTS * 2)
    ]
    notes = [f"Note {i}: {text}" for i, text in enumerate(short * 8)]
    longer = [" ".join(notes[: 12 * (k + 1)]) + " In short," for k in range(6)]
    prefix = " ".join(notes)
    return [*short, *longer, prefix, prefix + " Finally,"]


def generate(model: str, backend: str, extra: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,  # long prompts come in several chunks
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.3,
        "seed": 0,
    }
    llm = LLM(model=model, attention_backend=backend, **(arguments | extra))
    sampling = SamplingParams(temperature=0, max_tokens=32, logprobs=2, ignore_eos=True)
    rows = []
    for output in llm.generate(prompts(), sampling, use_tqdm=False):
        completion = output.outputs[0]
        gaps = []
        for step in completion.logprobs:
            best = sorted((entry.logprob for entry in step.values()), reverse=True)
            gaps.append(best[0] - best[1])
        rows.append(
            {"ids": list(completion.token_ids), "text": completion.text, "gaps": gaps}
        )
    return rows


def compare(
    reference: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> dict[str, Any]:
    """Count prompts that are the same, a near-tie, or bad; and where bad ones are."""
    result: dict[str, Any] = {"same": 0, "near_tie": 0, "bad": 0, "where": []}
    if len(reference) != len(ours):
        raise ValueError(f"{len(reference)} prompts against {len(ours)}")
    for i, (a, b) in enumerate(zip(reference, ours, strict=True)):
        pairs = enumerate(zip(a["ids"], b["ids"], strict=True))
        first = next((n for n, (x, y) in pairs if x != y), None)
        if first is None:
            result["same"] += 1
        elif min(a["gaps"][first], b["gaps"][first]) < NEAR_TIE:
            result["near_tie"] += 1
        else:
            result["bad"] += 1
            gaps = (round(a["gaps"][first], 3), round(b["gaps"][first], 3))
            result["where"].append({"prompt": i, "token": first, "gaps": gaps})
    return result


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "compare":
        result = compare(*(json.loads(Path(p).read_text()) for p in sys.argv[2:4]))
        print(json.dumps(result))
        return 1 if result["bad"] else 0
    if len(sys.argv) not in (4, 5):
        print(__doc__, file=sys.stderr)
        return 2
    # One process, so that the kernels' launch counts can be read in it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model, backend, out = sys.argv[1:4]
    extra = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    rows = generate(model, backend, extra)
    Path(out).write_text(json.dumps(rows))
    print(f"{len(rows)} prompts under {backend}")
    return 0


if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
