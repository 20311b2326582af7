# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with simulated tuning beside it: background_run.py MODEL FOLDER OUT.

FOLDER gets the beacon. OUT gets the status of tuning when the engine is ready and when
it has ended, and the tokens and choices before and after.
"""

import json
import sys
import time
from pathlib import Path

import start_tools

LIMIT_S = 200


def main(model: str, folder: str, out: str) -> None:
    module = start_tools.use_beside(setattr, Path(folder))
    from vllm import LLM, SamplingParams, TokensPrompt

    from portable_backend.worker_extension import PortableWorkerExtension

    llm = LLM(
        model=model,
        dtype="float32",
        attention_backend="PORTABLE",
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        gpu_memory_utilization=0.2,
        max_num_seqs=8,
        max_model_len=256,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False
    )

    def seen() -> dict[str, object]:
        prompt = TokensPrompt(prompt_token_ids=list(range(5, 30)))
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens, **PortableWorkerExtension().portable_choices()}

    result = {"ready": module.status(), "before": seen()}
    ends = time.monotonic() + LIMIT_S
    while module.status().get("state") in ("waiting", "tuning"):
        if time.monotonic() > ends:
            break
        time.sleep(0.1)
    result |= {"status": module.status(), "after": seen()}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
