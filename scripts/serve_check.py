#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve a dummy model with `--attention-backend portable` under mixed load.

Starts `vllm serve` on random weights, sends requests of mixed length as token ids, and
reports errors, NaN, kernel launches, compilations while serving, and throughput as one
JSON line. Exit code 1 if any request failed or gave no finite log-probs.
"""

import argparse
import contextlib
import json
import math
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving.models import GEOMETRIES, write_config
from serving.server import Server, post

JIT_WARNING = re.compile(r"(compilation|autotun\w*) during inference: ", re.I)


@contextlib.contextmanager
def served(
    model: Path,
    log: Path,
    options: Sequence[str],
    limit_s: float,
    *,
    backend: str = "portable",
    monitor: str = "warn",
    extension: str = "portable_backend.worker_extension.PortableWorkerExtension",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A running server with random weights; stopped on leaving.

    Args:
        model: folder of a config.json.
        log: file for its output.
        options: further ones of `vllm serve`.
        limit_s: for its start.
        backend: that serves attention.
        monitor: what vLLM does on a compilation while serving, warn or error.
        extension: class whose methods /collective_rpc can call.
        environment: variables added to this process's.

    Raises:
        ServerError: it did not start; the message tells its last lines, too.
    """
    ours = ["--attention-backend", backend]
    ours += ["--load-format", "dummy", "--skip-tokenizer-init"]
    ours += ["--jit-monitor-mode", monitor]
    ours += ["--worker-extension-cls", extension]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, for the launch counts
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    server = Server(str(model), [*ours, *options], variables, log)
    try:
        server.wait_ready(limit_s)
        yield server
    finally:
        server.stop()


def draw_requests(
    count: int, longest: int, vocab_size: int, seed: int
) -> list[tuple[list[int], int]]:
    """(prompt, output length): from one token to `longest`, some with one prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, vocab_size) for _ in range(longest // 4)]
    drawn = []
    for i in range(count):
        length = max(1, round(math.exp(rng.uniform(0, math.log(longest)))))
        if i < 4:
            length = (1, longest, 17, longest - 1)[i]
        prompt = [rng.randrange(2, vocab_size) for _ in range(length)]
        if i % 5 == 0 and length < longest - len(shared):
            prompt = shared + prompt
        drawn.append((prompt, rng.choice((1, 2, 16, 64))))
    return drawn


def send(url: str, request: tuple[list[int], int], timeout_s: float) -> dict[str, Any]:
    """One request: output length, whether all log-probs are finite, or the error."""
    prompt, max_tokens = request
    body = completion(prompt, max_tokens) | {"logprobs": 1}
    try:
        choice = post(f"{url}/v1/completions", body, timeout_s)["choices"][0]
    except OSError as error:
        detail = error.read().decode() if hasattr(error, "read") else ""
        return {"error": f"{error} {detail}"[:300]}
    return {
        "tokens": len(choice["token_ids"]),
        "finite": is_finite(choice["logprobs"]["token_logprobs"]),
        "asked": max_tokens,
    }


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The body of a request for that many tokens, as ids."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def is_finite(logprobs: Sequence[float | None]) -> bool:
    """Whether all are log-probs; vLLM's floor for what is not finite is -9999."""
    return all(p is not None and -9000 < p <= 0 for p in logprobs)


def corrupted(url: str) -> float | None:
    """Requests with NaN in their logits, as vLLM counted them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return metric(response.read().decode(), "vllm:corrupted_requests_total")


def metric(text: str, name: str) -> float | None:
    """Sum of a metric over its labels; None where it is not there."""
    found = re.findall(rf"^{name}(?:\{{.*\}})?\s+([\d.e+]+)$", text, re.M)
    return sum(map(float, found)) if found else None


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    log = args.log or folder / "serve.log"
    write_config(folder, args.geometry)
    vocab_size: int = GEOMETRIES[args.geometry]["vocab_size"]
    requests = draw_requests(args.requests, args.longest, vocab_size, args.seed)
    with served(folder, log, args.options, args.start_limit_s) as server:
        url = server.url
        warm = len(server.text.splitlines())
        started = time.perf_counter()
        with ThreadPoolExecutor(args.concurrency) as pool:
            answers = list(
                pool.map(lambda r: send(url, r, args.request_limit_s), requests)
            )
        load_s = time.perf_counter() - started
        nan_requests = corrupted(url)
        counts = post(
            f"{url}/collective_rpc", {"method": "portable_launch_counts"}, 60
        )["results"]
    lines = log.read_text(errors="replace").splitlines()
    compiled = [line for line in lines[warm:] if JIT_WARNING.search(line)]
    good = [a for a in answers if "error" not in a]
    prompt_tokens = sum(len(p) for p, _ in requests)
    output_tokens = sum(a["tokens"] for a in good)
    return {
        "requests": len(answers),
        "errors": [a["error"] for a in answers if "error" in a][:5],
        "num_errors": len(answers) - len(good),
        "short": sum(a["tokens"] != a["asked"] for a in good),
        "not_finite": sum(not a["finite"] for a in good),
        "nan_requests": nan_requests,
        "launch_counts": counts,
        "jit_warnings": len(compiled),
        "jit_lines": compiled[:10],
        "start_s": round(server.start_s, 1),
        "load_s": round(load_s, 1),
        "tokens_per_s": round((prompt_tokens + output_tokens) / load_s),
        "output_tokens_per_s": round(output_tokens / load_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="llama8b-8l")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=8000, help="prompt tokens")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-limit-s", type=float, default=300)
    parser.add_argument("--request-limit-s", type=float, default=300)
    parser.add_argument("--log", type=Path, help="where the server's output goes")
    parser.add_argument("options", nargs="*", help="further options of vllm serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run(args, Path(folder))
        except RuntimeError as error:
            result = {"failed": str(error)}
    print(json.dumps(result))
    counts = (result.get("launch_counts") or [{}])[0]
    good = (
        "failed" not in result
        and not result["num_errors"]
        and not result["short"]
        and not result["not_finite"]
        and result["nan_requests"] == 0
        and counts.get("decode", 0) > 0
        and counts.get("prefill", 0) > 0
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
