#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, from one call, with a short table last.

    gpu_check.py --stages kernels,sanitizer
    gpu_check.py --stages tokens,serve --model DIR --reference flash_attn.json
    gpu_check.py --stages anchor --anchor-script FILE
    gpu_check.py --stages newest --model DIR --newest-python PYTHON --newest-path P1:P2

Each stage runs in processes of its own within its own time, so that one that fails or
hangs does not stop the others. Logs and gpu_check.json go to --out. Exit code 1 if any
stage failed.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
TESTS = SCRIPTS.parent / "tests"
KERNEL_TESTS = (
    "test_attention.py",
    "test_attention_poison.py",
    "test_attention_gpu.py",
    "test_attention_space.py",
    "test_plan.py",
    "test_kv_cache.py",
    "test_rms_norm.py",
    "test_kernel_errors.py",
    "test_launch.py",
)
STAGES = ("kernels", "sanitizer", "tokens", "serve", "anchor", "newest")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"enforce_eager": True},
    "ngram": {"speculative_config": NGRAM},
}
# Runs a script in this process and adds what the kernels counted in it.
COUNTED_RUN = """
import json, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from portable_backend.kernels import launch_counts
print("LAUNCH_COUNTS", json.dumps(launch_counts()))
"""

VERSIONS = """
import torch, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{gpu}; torch {torch.__version__}, triton {triton.__version__}")
"""


@dataclass
class Check:
    """One row of the table."""

    stage: str
    name: str
    passed: bool
    summary: str
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


class Job:
    """A process with its log file, ended with all its children when its time is up."""

    def __init__(
        self, command: list[Any], log: Path, env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self.started = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
                start_new_session=True,
            )

    def wait(self, limit_s: float) -> str | None:
        """None if it ended well, else why not."""
        left = limit_s - (time.monotonic() - self.started)
        try:
            code = self.process.wait(timeout=max(1.0, left))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return f"not done within {limit_s:.0f} s"
        return None if code == 0 else f"exit code {code}"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Runner:
    """What the stages share: arguments, deadline, and the rows they add."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.deadline = time.monotonic() + args.budget_s
        self.checks: list[Check] = []

    def limit(self, most_s: float) -> float:
        return min(most_s, max(5.0, self.deadline - time.monotonic()))

    def add(self, stage: str, name: str, passed: bool, summary: str, **more: Any):
        self.checks.append(Check(stage, name, passed, summary, **more))
        print(
            f"-- {stage} {name}: {'ok' if passed else 'FAILED'} {summary}", flush=True
        )

    def pytest(self, *arguments: Any) -> list[Any]:
        # The safe path keeps the checkout's folders from shadowing installed packages.
        command = [self.args.python, "-P", "-m", "pytest", "-q", "--tb=short"]
        return [*command, "-p", "no:cacheprovider", *arguments]

    # -- stages ----------------------------------------------------------------------

    def kernels(self) -> None:
        """Kernel tests on poisoned inputs; timings and big pools by themselves."""
        files = [TESTS / name for name in KERNEL_TESTS]
        workers = self.args.workers
        parallel = ["-n", workers, "--cases", self.args.cases, "-m", "not slow"]
        for name, options in (("tests", parallel), ("slow tests", ["-m", "slow"])):
            label = name.replace(" ", "_")
            report = self.out / f"{label}.xml"
            # With a line for each test, the log names failures even of a run cut short.
            command = self.pytest(*files, *options, "-vv", f"--junitxml={report}")
            log = self.out / f"{label}.log"
            job = Job(command, log)
            failed = job.wait(self.limit(self.args.kernels_limit_s))
            counts = junit_counts(report)
            drawn = counts.pop("drawn", 0)
            summary = f"{counts.get('passed', 0)} passed"
            if drawn:
                summary += f", {drawn} drawn cases among them"
            if failed:
                summary += f", {counts.get('failed', '?')} failed ({failed})"
                names = failed_in_log(log)
                summary += "".join(f"\n    {name}" for name in names[:9])
            counts["drawn"] = drawn
            self.add(
                "kernels",
                name,
                not failed,
                summary,
                seconds=job.seconds,
                details=counts,
            )

    def sanitizer(self) -> None:
        """compute-sanitizer memcheck over small cases, several processes at once."""
        tool = shutil.which(self.args.sanitizer)
        if tool is None:
            self.add(
                "sanitizer", "memcheck", False, f"no {self.args.sanitizer} on PATH"
            )
            return
        seeds = range(self.args.sanitizer_cases)
        parts = self.args.sanitizer_workers
        selections = [
            [TESTS / "test_attention.py", "-k", "drawn", "--case-size", "small"]
            + [f"--case-seed={seed}" for seed in seeds[part::parts]]
            for part in range(parts)
        ]
        # One more over the other kernels, and lengths at the edge of pages and tables.
        others = "layout or negative or past_slot or in_place or slice or strides"
        files = (TESTS / "test_kv_cache.py", TESTS / "test_rms_norm.py")
        selections.append([*files, "-k", others, "-m", "not slow"])
        selections.append([TESTS / "test_attention_poison.py"])
        jobs = []
        for i, selection in enumerate(selections):
            checker = [tool, "--tool", "memcheck", "--target-processes", "all"]
            checker += ["--error-exitcode", "99"]
            jobs.append(
                Job(
                    [*checker, *self.pytest(*selection)],
                    self.out / f"sanitizer_{i}.log",
                    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                )
            )
        limit = self.limit(self.args.sanitizer_limit_s)
        for i, job in enumerate(jobs):
            failed = job.wait(limit)
            found = re.findall(r"ERROR SUMMARY: (\d+) error", job.text)
            errors = sum(map(int, found))
            passed = re.search(r"(\d+) passed", job.text)
            summary = f"{errors} errors, {passed[1] if passed else 0} tests"
            if failed:
                summary += f" ({failed})"
            good = not failed and bool(found) and errors == 0
            self.add("sanitizer", f"memcheck {i}", good, summary, seconds=job.seconds)

    def tokens(self) -> None:
        self._tokens("tokens", self.args.modes.split(","), self.args.python, {})

    def newest(self) -> None:
        env = {"PYTHONNOUSERSITE": "1"}
        if self.args.newest_path:
            env["PYTHONPATH"] = self.args.newest_path
        if not self.args.newest_python:
            self.add("newest", "setup", False, "give --newest-python")
            return
        self._tokens("newest", ["default", "eager"], self.args.newest_python, env)

    def _tokens(
        self, stage: str, modes: list[str], python: str, env: dict[str, str]
    ) -> None:
        """Greedy tokens against FLASH_ATTN, all modes at the same time."""
        if not self.args.model:
            self.add(stage, "setup", False, "give --model")
            return
        script = self.args.tokens_script or SCRIPTS / "same_tokens.py"
        memory = {"kv_cache_memory_bytes": self.args.kv_cache_mib << 20}
        runs = [(mode, "portable", MODES[mode]) for mode in modes]
        reference: Path | None = self.args.reference if stage == "tokens" else None
        if reference is None:
            runs.append(("reference", "FLASH_ATTN", {}))
            reference = self.out / f"{stage}_reference.json"
        jobs = {}
        for name, backend, extra in runs:
            answer = self.out / f"{stage}_{name}.json"
            arguments = [script, self.args.model, backend, answer]
            arguments.append(json.dumps(extra | memory))
            cache = self.out / "cache" / f"{stage}_{name}"  # no two share a cache
            jobs[name] = Job(
                [python, "-P", "-c", COUNTED_RUN, *arguments],
                self.out / f"{stage}_{name}.log",
                {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_CACHE_ROOT": str(cache),
                    "HF_HUB_OFFLINE": "1",
                }
                | env,
            )
        limit = self.limit(self.args.tokens_limit_s)
        failures = {name: job.wait(limit) for name, job in jobs.items()}
        if failures.get("reference"):
            self.add(stage, "reference", False, failures["reference"] or "")
            return
        for mode in modes:
            job = jobs[mode]
            if failures[mode]:
                last = job.text.strip().splitlines()[-1:]
                summary = f"{failures[mode]}: {''.join(last)[:150]}"
                self.add(stage, mode, False, summary, seconds=job.seconds)
                continue
            answer = self.out / f"{stage}_{mode}.json"
            details = compare_tokens(reference, answer)
            counts = re.search(r"LAUNCH_COUNTS (\{.*\})", job.text)
            launches: dict[str, int] = json.loads(counts[1]) if counts else {}
            named = re.search(r"\bPORTABLE\b", job.text) is not None
            norm = launches.get("rms_norm", 0) + launches.get("fused_add_rms_norm", 0)
            missing = [
                kernel
                for kernel in ("plan", "decode", "prefill", "kv_cache_write")
                if not launches.get(kernel)
            ]
            summary = (
                f"same {details['same']}, near-tie {details['near_tie']}, "
                f"bad {details['bad']}; norm {'ours' if norm else 'NOT OURS'}, "
                f"PORTABLE {'' if named else 'NOT '}in the log"
            )
            if missing:
                summary += f"; never launched: {', '.join(missing)}"
            self.add(
                stage,
                mode,
                not details["bad"] and not missing and norm > 0 and named,
                summary,
                seconds=job.seconds,
                details=details | {"launch_counts": launches},
            )

    def serve(self) -> None:
        """vllm serve under mixed load, dummy weights."""
        log = self.out / "serve.log"
        limit = self.limit(self.args.serve_limit_s)
        command = [self.args.python, "-P", SCRIPTS / "serve_check.py"]
        command += ["--requests", self.args.requests, "--log", log]
        command += ["--geometry", self.args.geometry, "--longest", self.args.longest]
        command += ["--start-limit-s", max(10, limit - 60), "--"]
        job = Job([*command, *self.args.serve_options], self.out / "serve.json")
        failed = job.wait(limit)
        line = job.text.strip().splitlines()[-1:]
        try:
            result = json.loads(line[0])
        except (IndexError, json.JSONDecodeError):
            result = {"failed": f"{failed}: {''.join(line)[:300]}"}
        if "failed" in result:
            summary = result["failed"][-200:]
        else:
            summary = (
                f"{result['requests']} requests, {result['num_errors']} errors, "
                f"{result['not_finite']} not finite, NaN {result['nan_requests']}, "
                f"JIT warnings {result['jit_warnings']}, "
                f"{result['tokens_per_s']} tok/s"
            )
        passed = not failed and "failed" not in result
        self.add(
            "serve", "mixed load", passed, summary, seconds=job.seconds, details=result
        )

    def anchor(self) -> None:
        """An attention benchmark that finds our kernels as module portable_call."""
        script = self.args.anchor_script
        if script is None or not script.is_file():
            what = "give --anchor-script" if script is None else f"no file {script}"
            self.add("anchor", "setup", False, what)
            return
        path = os.pathsep.join(
            filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
        )
        command = [self.args.python, script, *self.args.anchor_options]
        env = {"PYTHONPATH": path, "OUT": str(self.out)}
        job = Job(command, self.out / "anchor.log", env)
        failed = job.wait(self.limit(self.args.anchor_limit_s))
        print(job.text, flush=True)
        result = self.out / "anchor.json"
        rows = json.loads(result.read_text()) if result.exists() else []
        ours = [row.get("portable", {}) for row in rows]
        good = [row for row in ours if row.get("err", 1) < 0.02]
        summary = f"{len(good)} of {len(rows)} rows right" + (
            f" ({failed})" if failed else ""
        )
        passed = not failed and len(rows) > 0 and len(good) == len(rows)
        self.add("anchor", "rows", passed, summary, seconds=job.seconds)


def failed_in_log(log: Path) -> list[str]:
    """Names of failed tests in pytest's verbose output, in order, without repeats."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return list(dict.fromkeys(re.findall(r"(?:FAILED|ERROR) (\S+::\S+)", text)))


def junit_counts(report: Path) -> dict[str, Any]:
    """Passed, failed and skipped tests of a report, and the names of the failed."""
    if not report.exists():
        return {}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcome = {"failed": [], "skipped": [], "passed": []}  # type: dict[str, list[str]]
    for case in cases:
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        kind = "skipped" if "skipped" in kinds else kind
        outcome[kind].append(case.get("name", "?"))
    drawn = sum("drawn_case" in name for name in outcome["passed"])
    counts = {kind: len(names) for kind, names in outcome.items()}
    return counts | {"drawn": drawn, "failed_names": outcome["failed"][:40]}


def compare_tokens(reference: Path, ours: Path) -> dict[str, Any]:
    """same_tokens.compare, loaded by path: scripts are no package."""
    spec = importlib.util.spec_from_file_location("same", SCRIPTS / "same_tokens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compare(  # type: ignore[no-any-return]
        json.loads(reference.read_text()), json.loads(ours.read_text())
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", default="kernels,sanitizer", help=",".join(STAGES))
    add("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_check_out")))
    add("--budget-s", type=float, default=540, help="for all stages together")
    add("--python", default=sys.executable, help="interpreter that has torch and vllm")
    add("--workers", type=int, default=8, help="processes of the kernel tests")
    add("--cases", type=int, default=330, help="drawn attention cases")
    add("--kernels-limit-s", type=float, default=420)
    add("--sanitizer", default="compute-sanitizer")
    add("--sanitizer-cases", type=int, default=40)
    add("--sanitizer-workers", type=int, default=4)
    add("--sanitizer-limit-s", type=float, default=240)
    add("--model", help="folder of a trained model")
    add("--modes", default="default,eager,ngram")
    add("--reference", type=Path, help="FLASH_ATTN's answer, to save running it")
    add("--tokens-script", type=Path, help="instead of same_tokens.py, same arguments")
    add("--tokens-limit-s", type=float, default=240)
    add("--kv-cache-mib", type=int, default=4096)
    add("--requests", type=int, default=200)
    add("--longest", type=int, default=8000)
    add("--geometry", default="llama8b-8l")
    add("--serve-limit-s", type=float, default=300)
    add("--serve-options", type=shlex.split, default=["--max-model-len", "9216"])
    add("--anchor-script", type=Path)
    add("--anchor-options", type=shlex.split, default=[])
    add("--anchor-limit-s", type=float, default=300)
    add("--newest-python", help="interpreter of a newer vLLM")
    add("--newest-path", help="its PYTHONPATH")
    return parser.parse_args()


def main() -> int:
    args = parse()
    stages = args.stages.split(",")
    unknown = set(stages) - set(STAGES)
    if unknown:
        print(f"unknown stages {sorted(unknown)}; there are {', '.join(STAGES)}")
        return 2
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(args)
    setup = Job([args.python, "-P", "-c", VERSIONS], args.out / "versions.log")
    setup.wait(60)
    print(setup.text.strip(), flush=True)
    for stage in stages:
        try:
            getattr(runner, stage)()
        except Exception as error:  # the other stages must still run
            runner.add(stage, "stage", False, f"{type(error).__name__}: {error}"[:200])
    rows = [vars(check) for check in runner.checks]
    (args.out / "gpu_check.json").write_text(json.dumps(rows, indent=1) + "\n")
    shutil.rmtree(args.out / "cache", ignore_errors=True)
    print(f"\n{'stage':10} {'check':12} {'':6} {'s':>5}  result")
    for check in runner.checks:
        state = "ok" if check.passed else "FAILED"
        line = f"{check.stage:10} {check.name:12} {state:6} {check.seconds:5.0f}"
        print(f"{line}  {check.summary}")
        for name in check.details.get("failed_names", [])[:15]:
            print(f"{'':24} {name}")
    return 0 if all(check.passed for check in runner.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
