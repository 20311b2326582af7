#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole engines: portable beside vLLM's own attention back ends.

    python -P scripts/end_to_end.py --json FILE
    python -P scripts/end_to_end.py --engines portable,FLASH_ATTN --workloads prefill

Random weights in the shape of 8 layers of Llama-8B. Each engine is a process of its
own; all start at once, then take turns, workload by workload and round by round, so
that the chip's clocks treat them alike. Medians; the first tokens that engines choose
are compared, since a fast wrong answer is none. Exit code 1 if an engine fails or
disagrees.
"""

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve_check import GEOMETRIES, write_config


@dataclass(frozen=True)
class Engine:
    """One contestant: a back end, and who does RMSNorm."""

    backend: str
    rms_norm: str = "auto"


ENGINES = {
    "portable": Engine("portable"),
    "portable, norm off": Engine("portable", "off"),
    "portable, norm on": Engine("portable", "on"),
    "FLASH_ATTN": Engine("FLASH_ATTN"),
    "TRITON_ATTN": Engine("TRITON_ATTN"),
    "CPU_ATTN": Engine("CPU_ATTN"),
}
DEFAULT_ENGINES = "portable,portable, norm off,FLASH_ATTN,TRITON_ATTN"


@dataclass(frozen=True)
class Workload:
    """Requests given to the engine together.

    Attributes:
        count: requests.
        prompt: tokens of each prompt, or the least and most.
        output: tokens of each answer, or the least and most.
        counted: "all" tokens, or those of the "output".
    """

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    counted: str = "all"

    def requests(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """(prompt, output length), the same in every engine."""
        rng = random.Random(str(self))
        return [
            (
                [
                    rng.randrange(2, vocab_size)
                    for _ in range(rng.randint(*self.prompt))
                ],
                rng.randint(*self.output),
            )
            for _ in range(self.count)
        ]


WORKLOADS = {
    "prefill": Workload(4, (32768, 32768), (1, 1)),
    "batch": Workload(256, (1024, 1024), (128, 128)),
    "long": Workload(1, (32768, 32768), (128, 128), "output"),
    "mixed": Workload(128, (16, 8192), (16, 256)),
}
TINY = {
    "prefill": Workload(2, (64, 64), (1, 1)),
    "batch": Workload(3, (16, 16), (3, 3)),
    "long": Workload(1, (80, 80), (3, 3), "output"),
    "mixed": Workload(3, (1, 40), (1, 4)),
}


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Wait until no other engine works."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Start one engine and take its turns; the child's whole work."""
    engine = ENGINES[args.one]
    os.environ["PORTABLE_BACKEND_RMS_NORM"] = engine.rms_norm
    from vllm import LLM, SamplingParams

    tiny = args.geometry == "tiny"
    chosen = {name: (TINY if tiny else WORKLOADS)[name] for name in args.workloads}
    longest = max(w.prompt[1] + w.output[1] for w in chosen.values()) + 1
    options: dict[str, Any] = {"max_model_len": longest}
    if args.kv_cache_gib:
        # vLLM starts only where that share of the memory is free, whatever it needs.
        options["gpu_memory_utilization"] = 0.2
        options["kv_cache_memory_bytes"] = int(args.kv_cache_gib * 2**30)
    else:
        options["gpu_memory_utilization"] = args.gpu_memory_utilization
    started = time.perf_counter()
    llm = LLM(
        model=str(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=engine.backend,
        enable_prefix_caching=False,
        seed=0,
        **options,
        **json.loads(args.llm_options),
    )
    result: dict[str, Any] = {"start_s": time.perf_counter() - started, "times": {}}
    vocab_size: int = GEOMETRIES[args.geometry]["vocab_size"]
    prepared = {}
    for name, workload in chosen.items():
        requests = workload.requests(vocab_size)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True,
                detokenize=False,
            )
            for _, n in requests
        ]  # fmt: skip
        tokens = sum(n for _, n in requests)
        if workload.counted == "all":
            tokens += sum(len(prompt) for prompt, _ in requests)
        prepared[name] = (prompts, params, tokens)
    result["first_tokens"] = {}
    for round_number in range(args.rounds + 1):  # the first warms up
        for name, (prompts, params, tokens) in prepared.items():
            with turn(args.lock):
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
            if round_number == 0:
                first = [int(o.outputs[0].token_ids[0]) for o in outputs]
                result["first_tokens"][name] = first
                continue
            result["times"].setdefault(name, []).append(tokens / seconds)
    return result


def collect(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Run every engine in a process of its own; what failed says why."""
    model = folder / "model"
    model.mkdir()
    write_config(model, args.geometry)
    children = {}
    for i, name in enumerate(args.engines):
        out = folder / f"{i}.json"
        command = [sys.executable, "-P", __file__, "--one", name, "--out", str(out)]
        command += ["--model", str(model), "--lock", str(folder / "lock")]
        for option in (
            "rounds", "geometry", "kv_cache_gib", "gpu_memory_utilization",
            "llm_options",
        ):  # fmt: skip
            flag = "--" + option.replace("_", "-")
            command += [flag, str(getattr(args, option))]
        command += ["--workloads", ",".join(args.workloads)]
        log = (args.logs or folder) / f"engine_{i}.log"
        with log.open("wb") as file:
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        children[name] = (child, out, log)
    results: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + args.limit_s
    for name, (child, out, log) in children.items():
        try:
            code = child.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            code = -1
        if code == 0 and out.exists():
            results[name] = json.loads(out.read_text())
        else:
            tail = log.read_text(errors="replace").splitlines()[-12:]
            results[name] = {"failed": "\n".join([f"exit code {code}", *tail])}
    return results


def agreement(results: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    """Share of first tokens equal to the first good engine's, of each other engine."""
    good = {e: r["first_tokens"].get(name) for e, r in results.items() if "times" in r}
    reference = next(iter(good.values()), None)
    if not reference:
        return {}
    return {
        engine: statistics.fmean(a == b for a, b in zip(tokens, reference, strict=True))
        for engine, tokens in good.items()
    }


def report(results: dict[str, dict[str, Any]], workloads: list[str]) -> bool:
    """Print a table; whether all engines ran and agree."""
    fine = True
    ours = results.get("portable", {})
    for name in workloads:
        shares = agreement(results, name)
        for engine, result in results.items():
            if "failed" in result:
                continue
            rate = statistics.median(result["times"][name])
            line = f"{name:8} {engine:20} {rate:12.0f} tokens/s"
            if "times" in ours and engine != "portable":
                ratio = statistics.median(ours["times"][name]) / rate
                line += f"   portable / this {ratio:.2f}"
            if shares[engine] < 0.75:
                fine = False
                line += f"   DISAGREES: {shares[engine]:.0%} of first tokens the same"
            print(line)
    for engine, result in results.items():
        if "failed" in result:
            fine = False
            print(f"{engine} FAILED: {result['failed']}")
        else:
            print(f"start    {engine:20} {result['start_s']:12.1f} s")
    return fine


def names_in(text: str, known: dict[str, Any], what: str) -> list[str]:
    """Split a list whose members may hold commas themselves."""
    left, found = text, []
    while left:
        name = max((k for k in known if left.startswith(k)), key=len, default=None)
        if name is None or left[len(name) :][:1] not in ("", ","):
            raise SystemExit(
                f"{what}: expected some of {'; '.join(known)}, got {left!r}; "
                "separate them by commas"
            )
        found.append(name)
        left = left[len(name) + 1 :]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=DEFAULT_ENGINES)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="llama8b")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7)
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        default=16,
        help="of each engine, so that several fit side by side; 0: by "
        "--gpu-memory-utilization, for one engine at a time",
    )
    parser.add_argument("--llm-options", default="{}", help="further ones, as JSON")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the engines' output")
    for hidden in ("--one", "--out", "--model", "--lock"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.workloads = names_in(args.workloads, dict(WORKLOADS), "--workloads")
    if args.one:
        args.lock = Path(args.lock)
        Path(args.out).write_text(json.dumps(run_engine(args)))
        return 0
    args.engines = names_in(args.engines, dict(ENGINES), "--engines")
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results = collect(args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if report(results, args.workloads) else 1


if __name__ == "__main__":
    sys.exit(main())
