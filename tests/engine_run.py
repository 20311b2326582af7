# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's engine once, in a process of its own: engine_run.py SPEC.json OUT.json.

SPEC holds `llm`, the arguments of vllm.LLM; `batches`, lists of prompts (text or token
ids), submitted one list after another; and `max_tokens` of each list. OUT gets, for
each prompt, the greedy tokens, how far the best log-prob of each is ahead of the
second, and the tokens found in the prefix cache; and, if the worker extension is in
use, the launch counts.
"""

import json
import sys
from pathlib import Path


def main(spec_path: str, out_path: str) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    spec = json.loads(Path(spec_path).read_text())
    llm = LLM(skip_tokenizer_init=True, **spec["llm"])
    tokens, gaps, cached = [], [], []
    for batch, max_tokens in zip(spec["batches"], spec["max_tokens"], strict=True):
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
        )
        if isinstance(batch[0], str):
            batch = AutoTokenizer.from_pretrained(spec["llm"]["model"])(batch).input_ids
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            completion = output.outputs[0]
            tokens.append(list(completion.token_ids))
            best = [
                sorted((p.logprob for p in step.values()), reverse=True)
                for step in completion.logprobs
            ]
            gaps.append([first - second for first, second, *_ in best])
            cached.append(output.num_cached_tokens)
    result: dict[str, object] = {
        "tokens": tokens,
        "gaps": gaps,
        "num_cached_tokens": cached,
    }
    if "worker_extension_cls" in spec["llm"]:
        result["launch_counts"] = llm.collective_rpc("portable_launch_counts")[0]
    Path(out_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
