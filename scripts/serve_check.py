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
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GEOMETRIES = {
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "llama70b": {
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
# The API server may live on for a while.
ENGINE_FAILED = "Engine core initialization failed"
JIT_WARNING = re.compile(r"(compilation|autotun\w*) during inference: ", re.I)


def write_config(folder: Path, geometry: str) -> None:
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


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: its address.
        process: of the API server; it leads a process group of its own.
        log: its output.
        start_s: from the process's start to the first answer of /health.
        ready_at: Unix time of that answer.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    start_s: float
    ready_at: float

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def is_alive(self) -> bool:
        return self.process.poll() is None


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
        RuntimeError: it did not start; the message tells its last lines, too.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--attention-backend", backend]
    command += ["--load-format", "dummy", "--skip-tokenizer-init"]
    command += ["--jit-monitor-mode", monitor]
    command += ["--worker-extension-cls", extension, *options]
    variables = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, for the launch counts
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
        "HF_HUB_OFFLINE": "1",
        # In the checkout's root its folders would hide the installed package.
        "PYTHONSAFEPATH": "1",
        **(environment or {}),
    }
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            process_group=0,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            text = log.read_text(errors="replace")
            is_late = time.monotonic() - started > limit_s
            if is_late or process.poll() is not None or ENGINE_FAILED in text:
                tail = "\n".join(text.splitlines()[-25:])
                why = f" within {limit_s:.0f} s" if is_late else ""
                raise RuntimeError(f"{tail}\nthe server did not start{why}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.1)
        yield Server(url, process, log, time.monotonic() - started, time.time())
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server; when this returns, its engine has left the GPU, too."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if process.poll() is not None and not members("pgrp", process.pid):
                return
            time.sleep(0.1)


def members(kind: str, number: int) -> list[int]:
    """Living processes of a process group ("pgrp") or of a session ("session")."""
    place = {"pgrp": 2, "session": 3}[kind]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # What comes first, the command's name, may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[place]) == number and fields[0] not in ("Z", "X"):
            found.append(int(folder.name))
    return found


def post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


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
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="llama8b")
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
