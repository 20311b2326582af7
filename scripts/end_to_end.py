#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole engines: portable beside vLLM's own attention back ends.

    python -P scripts/end_to_end.py --json FILE
    python -P scripts/end_to_end.py --engines portable,FLASH_ATTN --workloads prefill
    python -P scripts/end_to_end.py --geometry llama70b-8l --tensor-parallel-size 2

Random weights in the shape of 8 layers of Llama-8B, or of another geometry. Each engine
is a process of its own, or several; all start at once, and when the last one is ready
they take turns, workload by workload, in each round another one first, so that clocks
and neighbours treat them alike. Medians, and medians of each round's ratio; the first
tokens that engines choose are compared, since a fast wrong answer is none. Rounds end
with --limit-s. Exit code 1 if an engine fails or disagrees.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving.models import GEOMETRIES, write_config
from serving.options import count, names_in, seconds
from serving.turns import same_shares, turns_of_round
from serving.workloads import TINY, WORKLOADS

# A workload is repeated for so long in its turn: one of half a second differs by 7 %.
LEAST_S = 1.2


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


def run_engine(args: argparse.Namespace, parent: Connection) -> None:
    """Start one engine, say so, and run each workload whose name comes."""
    engine = ENGINES[args.one]
    os.environ["PORTABLE_BACKEND_RMS_NORM"] = engine.rms_norm
    from vllm import LLM, SamplingParams

    tiny = args.geometry == "tiny"
    chosen = {name: (TINY if tiny else WORKLOADS)[name] for name in args.workloads}
    longest = max(w.longest for w in chosen.values()) + 1
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
        tensor_parallel_size=args.tensor_parallel_size,
        **options,
        **json.loads(args.llm_options),
    )
    start_s = time.perf_counter() - started
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
        prepared[name] = (prompts, params, workload.num_tokens(requests))
    parent.send({"start_s": start_s})
    while name := parent.recv():  # until it is ended
        prompts, params, tokens = prepared[name]
        begin, times = time.perf_counter(), 0
        while not times or time.perf_counter() - begin < LEAST_S:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            times += 1
        seconds = (time.perf_counter() - begin) / times
        first = [int(o.outputs[0].token_ids[0]) for o in outputs]
        parent.send({"rate": tokens / seconds, "first": first})


@dataclass
class Child:
    """An engine's process, and what came of it."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return "failed" in self.result

    def run(self, workload: str, end: float) -> dict[str, Any] | None:
        """Its turn; None: nothing came of it, and it counts as failed."""
        with suppress(OSError):  # it is dead, as `answer` will find
            self.pipe.send(workload)
        return self.answer(end)

    def answer(self, end: float) -> dict[str, Any] | None:
        """What the engine says next; None: nothing, and it counts as failed."""
        reason = "no answer within the time limit"
        try:
            while time.monotonic() < end:
                if self.pipe.poll(min(1.0, max(0.0, end - time.monotonic()))):
                    answer: dict[str, Any] = self.pipe.recv()
                    return answer
                # Whoever inherited its pipe may keep that open.
                if self.process.poll() is not None and not self.pipe.poll(0.0):
                    raise EOFError
        except (EOFError, OSError):
            reason = f"exit code {self.process.wait()}"
        tail = self.log.read_text(errors="replace").splitlines()[-12:]
        self.result["failed"] = "\n".join([reason, *tail])
        return None


def start(
    args: argparse.Namespace, name: str, model: Path, log: Path, stack: ExitStack
) -> Child:
    """Start one engine's process; it ends with the stack."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", __file__, "--one", name, "--model", str(model)]
    command += ["--pipe", str(theirs.fileno()), "--workloads", ",".join(args.workloads)]
    for option in (
        "geometry", "tensor_parallel_size", "kv_cache_gib", "gpu_memory_utilization",
        "llm_options",
    ):  # fmt: skip
        command += ["--" + option.replace("_", "-"), str(getattr(args, option))]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    theirs.close()
    stack.callback(_end, process)
    stack.callback(ours.close)
    return Child(process, ours, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an engine and its own processes, whatever it is doing."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def collect(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Start every engine, have them take turns; what failed says why."""
    end = time.monotonic() + args.limit_s
    with ExitStack() as stack:
        children = start_all(args, folder, stack)
        try:
            run_all(children, args.workloads, args.rounds, end)
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds before", file=sys.stderr)
    return results_of(children, args.workloads)


def start_all(
    args: argparse.Namespace, folder: Path, stack: ExitStack
) -> dict[str, Child]:
    """Start every engine's process; they end with the stack."""
    model = folder / "model"
    model.mkdir()
    write_config(model, args.geometry)
    logs = args.logs or folder
    return {
        name: start(args, name, model, logs / f"engine_{i}.log", stack)
        for i, name in enumerate(args.engines)
    }


def run_all(
    children: dict[str, Child], workloads: list[str], rounds: int, end: float
) -> None:
    """Wait for the engines, then have them take turns; `end` is a monotonic time."""
    for child in children.values():
        child.result |= child.answer(end) or {}
    take_turns(children, workloads, rounds, end)


def results_of(
    children: dict[str, Child], workloads: list[str]
) -> dict[str, dict[str, Any]]:
    """What came of each engine; one without a round of each workload has failed."""
    for child in children.values():
        times = child.result.get("times", {})
        if not child.failed and any(not times.get(name) for name in workloads):
            child.result["failed"] = "no round was timed"
    return {name: child.result for name, child in children.items()}


def take_turns(
    children: dict[str, Child], workloads: list[str], rounds: int, end: float
) -> None:
    """Run all workloads in `rounds` rounds after one that warms up.

    A round that would not be done by `end` is not begun.
    """
    for child in children.values():
        child.result |= {"times": {}, "first_tokens": {}}
    names, longest = list(children), 0.0
    for number in range(rounds + 1):
        began = time.monotonic()
        if number > 1 and began + longest > end:
            return
        for name, workload in turns_of_round(number, names, workloads):
            child = children[name]
            if child.failed:
                continue
            answer = child.run(workload, end)
            if answer is None:
                if time.monotonic() >= end:
                    return  # the others are not to blame
                continue
            if number == 0:
                child.result["first_tokens"][workload] = answer["first"]
            else:
                times = child.result["times"].setdefault(workload, [])
                times.append(answer["rate"])
        longest = max(longest, time.monotonic() - began)


def agreement(results: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    """Share of first tokens equal to the first good engine's, of each other engine."""
    return same_shares(
        {
            engine: result["first_tokens"].get(name)
            for engine, result in results.items()
            if "failed" not in result
        }
    )


def report(results: dict[str, dict[str, Any]], workloads: list[str]) -> bool:
    """Print a table; whether all engines ran and agree."""
    fine = True
    ours = results.get("portable", {})
    for name in workloads:
        shares = agreement(results, name)
        for engine, result in results.items():
            if "failed" in result:
                continue
            rates = result["times"][name]
            rate = statistics.median(rates)
            line = f"{name:8} {engine:20} {rate:12.0f} tokens/s"
            line += f" ({min(rates):.0f} to {max(rates):.0f} in {len(rates)} rounds)"
            if ours and "failed" not in ours and engine != "portable":
                ratio = statistics.median(
                    mine / its
                    for mine, its in zip(ours["times"][name], rates, strict=False)
                )
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


# What `run_engine` passes itself.
_OURS = (
    "model", "load_format", "skip_tokenizer_init", "attention_backend", "seed",
    "enable_prefix_caching", "max_model_len", "gpu_memory_utilization",
    "tensor_parallel_size",
)  # fmt: skip


def _options(text: str) -> str:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}, got {text}") from None
    if not isinstance(options, dict) or set(options) & set(_OURS):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object without {', '.join(_OURS)}, got {text}"
        )
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=DEFAULT_ENGINES)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=count, default=5, help="timed ones, at most")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="llama8b-8l")
    parser.add_argument(
        "--tensor-parallel-size", type=count, default=1, help="GPUs of each engine"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7)
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        default=16,
        help="of each engine on each GPU, so that several fit side by side; 0: by "
        "--gpu-memory-utilization, for one engine at a time",
    )
    parser.add_argument(
        "--llm-options",
        default="{}",
        type=_options,
        help="further ones, as a JSON object; not those that this script sets",
    )
    parser.add_argument("--limit-s", type=seconds, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the engines' output")
    for hidden in ("--one", "--model", "--pipe"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.workloads = names_in(args.workloads, dict(WORKLOADS), "--workloads")
    if args.one:
        return args
    args.engines = names_in(args.engines, dict(ENGINES), "--engines")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(
            f"--json: {args.json.absolute().parent} is no folder; make it first"
        )
    return args


def main() -> int:
    args = parse()
    if args.one:
        run_engine(args, Connection(int(args.pipe)))
        return 0
    if args.geometry != "tiny" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --geometry tiny runs without one")
    # As Ctrl-C: engines end, and what was measured is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results = collect(args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if report(results, args.workloads) else 1


if __name__ == "__main__":
    sys.exit(main())
