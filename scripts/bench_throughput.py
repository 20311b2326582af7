#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of vLLM's server under one attention back end after another.

    python -P scripts/bench_throughput.py --out DIR
    python -P scripts/bench_throughput.py --out DIR --model ID_OR_FOLDER
    python -P scripts/bench_throughput.py --out DIR --geometry tiny --rounds 1
    python -P scripts/bench_throughput.py --out DIR -- --tensor-parallel-size 2

Every back end that this machine's vLLM has gets a server. Servers take turns, part by
part, in each round another one first. A part is a workload: all requests at once
(prefill, batch, long, mixed), one request at a time (single), or requests at a rate
(chat), from a quarter of what the fastest server can answer up to more than any can.

First each server shows that its log-probs are finite, and which tokens it chooses;
they are compared between back ends. A server that hangs or crashes costs its part, and
is started again. Everything measured is in DIR/results.json at once, and the same
command goes on from there; DIR gets report.md, report.html and, with matplotlib, plots.

Exit code 0: all measured and in agreement; 1: not; 2: usage. What follows -- goes to
every server.
"""

import argparse
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import backends, page, study, summary
from serving.fleet import Fleet, OutOfTimeError, Plan
from serving.load import LoadError, WrongAnswerError, metrics
from serving.models import GEOMETRIES, write_config
from serving.options import count, names_in, seconds
from serving.server import ServerError
from serving.study import Part, Study, StudyError
from serving.turns import turns_of_round
from serving.workloads import (
    SERVED,
    TINY,
    TINY_SERVED,
    WORKLOADS,
    Request,
    Workload,
)

ALL_WORKLOADS = WORKLOADS | SERVED
# Of the most requests per second that any server can answer.
_AUTO_SHARES = (0.25, 0.5, 0.75, 1.0)
_PROBE_LIMIT_S = 300

Prepared = dict[str, tuple[Workload, list[Request]]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Run:
    """One start of the command."""

    def __init__(
        self,
        args: argparse.Namespace,
        found: Study,
        plan: Plan,
        prepared: Prepared,
        deadline: float,
    ) -> None:
        self.args, self.study, self.prepared = args, found, prepared
        self.plan, self.deadline = plan, deadline
        self.fleet = Fleet(plan, prepared, found.backends, args.out, self._started)

    def _started(self, backend: str, start_s: float) -> None:
        say(f"{backend}: ready after {start_s:.1f} s")
        self.study.starts.setdefault(backend, []).append(start_s)
        self.save()

    def save(self) -> None:
        self.study.save(self.args.out / "results.json")

    def measure(self) -> None:
        """Everything that is not measured yet, until the time is up."""
        wanted = self._wanted()
        if not wanted:
            return
        try:
            self.fleet.start([name for name in self.study.backends if name in wanted])
            self._find_rates()
            for number in range(1, self.args.rounds + 1):
                parts = self.study.parts(list(self.prepared))
                for backend, part in turns_of_round(
                    number, self.study.backends, parts, by_name=not self.plan.together
                ):
                    if self.study.is_measured(backend, part, number):
                        continue
                    if time.monotonic() > self.deadline:
                        raise OutOfTimeError
                    self._turn(number, backend, part)
        except OutOfTimeError as error:
            why = f" ({error})" if error.args else ""
            say(f"--limit-s is over; the same command goes on from here{why}")
        finally:
            self.fleet.stop()

    def _wanted(self) -> set[str]:
        """Back ends that have something left to do."""
        unknown = any(
            kind.at_rates and name not in self.study.rates
            for name, (kind, _) in self.prepared.items()
        )
        return {
            backend
            for backend in self.study.backends
            for part in self.study.parts(list(self.prepared))
            for number in range(1, self.args.rounds + 1)
            if unknown or not self.study.is_measured(backend, part, number)
        }

    def _find_rates(self) -> None:
        """Rates of the workloads that have them, by what the fastest server can do."""
        for name, (kind, requests) in self.prepared.items():
            if not kind.at_rates or name in self.study.rates:
                continue
            fastest = 0.0
            for backend in self.study.backends:
                with suppress(ServerError, LoadError):
                    self._check(backend, name)
                    answers = self.fleet.warm_up(backend, name)
                    if answers:
                        reached = metrics(kind, requests, answers)["requests_per_s"]
                        fastest = max(fastest, reached)
                        say(f"{backend}: {name}, at most {reached:.2f} requests/s")
            if fastest:
                rates = [f"{fastest * share:.3g}" for share in _AUTO_SHARES]
                self.study.rates[name] = [*rates, "inf"]
                self.save()

    def _check(self, backend: str, workload: str) -> None:
        """Log-probs and first tokens, once; wrong ones end the back end's turns."""
        checks = self.study.checks.setdefault(backend, {})
        if workload in checks:
            return
        try:
            checks[workload] = self.fleet.check(backend, workload)
        except WrongAnswerError as error:
            self.fleet.refuse(backend, f"not timed, since wrong in {workload}: {error}")
            raise
        self.save()

    def _turn(self, number: int, backend: str, part: Part) -> None:
        kind, requests = self.prepared[part.workload]
        try:
            self._check(backend, part.workload)
            rate = math.inf if part.rate is None else float(part.rate)
            answers = self.fleet.run(backend, part.workload, rate)
            result: dict[str, Any] = metrics(kind, requests, answers)
            told = f"{result['tokens_per_s']:.0f} tokens/s"
        except (ServerError, LoadError) as error:
            result = {"failed": str(error)}
            told = f"FAILED: {error}"
        say(f"round {number}, {part.label}, {backend}: {told}")
        self.study.done[backend, part.label, number] = result
        self.save()


def write_report(
    args: argparse.Namespace, found: Study, kinds: dict[str, Workload]
) -> int:
    """Files and tables; the exit code."""
    told = summary.summarise(found, kinds, args.rounds)
    plots = page.plot(found, kinds, args.out) if page.can_plot() else []
    markdown = summary.to_markdown(told)
    (args.out / "report.md").write_text(markdown)
    (args.out / "report.html").write_text(page.to_html(told, plots))
    print(markdown)
    for problem in told.problems:
        say(f"problem   {problem}")
    say(f"report: {args.out / 'report.html'}")
    return 1 if told.problems else 0


def _rates(text: str) -> str:
    """argparse type: auto, or rates above 0 such as 1,2.5,inf."""
    if text != "auto":
        for rate in text.split(","):
            try:
                is_good = float(rate) > 0
            except ValueError:
                is_good = False
            if not is_good:
                raise argparse.ArgumentTypeError(
                    "must be auto, or requests per second above 0 separated by commas "
                    f"(inf: all at once), got {text}"
                )
    return text


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be GiB, 0 or more, got {text}")
    return value


# What this script gives the servers itself.
_OURS = (
    "--model", "--host", "--port", "--attention-backend", "--seed", "--max-model-len",
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--kv-cache-memory-bytes",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for results and reports")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="hub id or folder")
    what.add_argument(
        "--geometry",
        choices=list(GEOMETRIES),
        default="llama8b-8l",
        help="random weights in this shape (default: %(default)s)",
    )
    asked = [name for name, one in backends.BACKENDS.items() if not one.by_default]
    add(
        "--backends",
        help=f"some of {'; '.join(backends.BACKENDS)} (default: all that there are, "
        f"without {'; '.join(asked)})",
    )
    add("--workloads", default=",".join(ALL_WORKLOADS), help="(default: %(default)s)")
    add(
        "--rates",
        type=_rates,
        default="auto",
        help="of the workload chat, requests per second: auto, or 1,2.5,inf",
    )
    add("--rounds", type=count, default=5, help="(default: %(default)s)")
    add(
        "--one-at-a-time",
        action="store_true",
        help="one server at a time, started for each of its turns: where several do "
        "not fit",
    )
    add(
        "--kv-cache-gib",
        type=_gib,
        default=16,
        help="of each server (default: %(default)s); 0: by vLLM's "
        "--gpu-memory-utilization",
    )
    add(
        "--tiny-workloads",
        action="store_true",
        help="a few short requests; always so with --geometry tiny",
    )
    add("--start-limit-s", type=seconds, default=900, help="for a server's start")
    add("--part-limit-s", type=seconds, default=600, help="for a part's answers")
    add("--limit-s", type=seconds, help="begin nothing after this many seconds")
    add("--fresh", action="store_true", help="forget what is in --out")
    add("--commit", help="for the report, where git cannot tell")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ends with a message, and exit code 2, if they are wrong."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    args = parser.parse_args(argv[:cut])
    args.server_options = argv[cut + 1 :]
    for option in args.server_options:
        if option.split("=")[0].replace("_", "-") in _OURS:
            parser.error(f"{option} cannot be given to the servers: it is set already")
    try:
        known = backends.BACKENDS
        args.backends = (
            [name for name, backend in known.items() if backend.by_default]
            if args.backends is None
            else names_in(args.backends, known, "--backends")
        )
        args.workloads = names_in(args.workloads, ALL_WORKLOADS, "--workloads")
    except SystemExit as error:
        parser.error(str(error))
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: expected a folder, got the file {args.out}")
    return args


def prepare(args: argparse.Namespace, vocab_size: int) -> Prepared:
    """The workloads that were asked for, with their requests."""
    is_tiny = args.tiny_workloads or (not args.model and args.geometry == "tiny")
    kinds = TINY | TINY_SERVED if is_tiny else ALL_WORKLOADS
    return {
        name: (kinds[name], kinds[name].requests(vocab_size)) for name in args.workloads
    }


def new_study(args: argparse.Namespace, probe: dict[str, Any]) -> Study:
    """A study of these options, with nothing measured."""
    options = {
        "model": args.model or f"random weights in the shape of {args.geometry}",
        "backends": args.backends,
        "workloads": args.workloads,
        "tiny_workloads": args.tiny_workloads,
        "rates": args.rates,
        "one_at_a_time": args.one_at_a_time,
        "kv_cache_gib": args.kv_cache_gib,
        "server_options": shlex.join(args.server_options),
    }
    environment = dict(probe["environment"])
    if args.commit:
        environment["commit"] = args.commit
    environment["variables"] = study.variables(os.environ)
    found = Study(options, environment, backends.left_out(args.backends, probe))
    if args.rates != "auto":
        found.rates = {
            name: args.rates.split(",")
            for name in args.workloads
            if ALL_WORKLOADS[name].at_rates
        }
    return found


def go(args: argparse.Namespace, model: str) -> int:
    """Measure and report.

    Raises:
        StudyError, ProbeError: nothing can be measured, and why.
    """
    deadline = time.monotonic() + (args.limit_s or math.inf)
    known = backends.BACKENDS
    modules = [known[name].module for name in args.backends]
    probe = backends.ask_vllm(model, list(filter(None, modules)), _PROBE_LIMIT_S)
    found = new_study(args, probe)
    if not args.fresh:
        found = study.resume(args.out / "results.json", found)
    for name, why in found.left_out.items():
        say(f"left out  {name}: {why}")
    if not found.backends:
        raise StudyError("--backends: none of them exists here")
    prepared = prepare(args, probe["vocab_size"])
    longest = max(kind.longest for kind, _ in prepared.values())
    if probe["max_tokens"] and longest + 1 > probe["max_tokens"]:
        fitting = [
            name
            for name, (kind, _) in prepared.items()
            if kind.longest < probe["max_tokens"]
        ]
        raise StudyError(
            f"--workloads: the longest needs {longest + 1} tokens, {model} takes "
            f"{probe['max_tokens']}; these fit: {','.join(fitting) or 'none'}"
        )
    plan = Plan(
        model=model,
        dummy=not args.model,
        on_cpu=probe["platform"] == "cpu",
        longest=longest,
        kv_cache_gib=args.kv_cache_gib,
        options=args.server_options,
        start_limit_s=args.start_limit_s,
        part_limit_s=args.part_limit_s,
        together=not args.one_at_a_time,
        deadline=deadline,
    )
    run = Run(args, found, plan, prepared, deadline)
    run.save()
    try:
        run.measure()
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
    kinds = {name: kind for name, (kind, _) in prepared.items()}
    return write_report(args, found, kinds)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    args.out.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C: servers end, and what was measured is told.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if not model:
            write_config(Path(folder), args.geometry)
            model = folder
        try:
            return go(args, model)
        except (StudyError, backends.ProbeError) as error:
            say(f"{Path(__file__).name}: {error}")
            return 2


if __name__ == "__main__":
    sys.exit(main())
