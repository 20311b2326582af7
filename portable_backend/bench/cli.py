# SPDX-License-Identifier: Apache-2.0
"""The command line: one printed line per row, then means, losses and what is missing.

Exit code 0: all rows right; 1: ours was wrong or failed in some row; 2: usage.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portable_backend.bench.markdown import NAMES, format_report, rate, verdict
from portable_backend.bench.results import (
    OURS,
    Job,
    Report,
    Result,
    Row,
    geometric_means,
    losses,
)

if TYPE_CHECKING:
    import torch

    from portable_backend.bench.settings import Settings

SUITES = (
    "copy",
    "matmul",
    "attention",
    "geometries",
    "features",
    "norm",
    "cache",
    "host",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that `run` reads."""
    add = parser.add_argument
    add("--suites", default=",".join(SUITES), help="comma list (default: all)")
    add("--rows", default="", help="only rows whose label contains this text")
    add("--impls", help=f"comma list of {', '.join(NAMES)} (default: the usual ones)")
    add("--rounds", type=_positive, default=12, help="timed turns of about 10 ms each")
    add("--budget-s", type=_seconds, help="start no row after this many seconds")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--markdown", type=Path, metavar="FILE", help="write tables there")
    add("--device", default="cuda", help="cuda, cuda:N, or cpu: tiny and not timed")
    add("--layout", choices=("split", "packed"), default="split", help="of the cache")
    add("--cold", action="store_true", help="attention finds no key in the L2 cache")
    add("--all", action="store_true", help="geometries at both block sizes")
    add("--list", action="store_true", help="print the labels and stop")
    add("--commit", help="for the header, where git cannot tell")


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m portable_backend.bench",
        description="Time portable's kernels beside vLLM's, FlashAttention-3 and "
        "torch on this GPU, after checking every output against an fp32 oracle.",
    )
    add_arguments(parser)
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments)
    try:
        return run(args, arguments)
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


class UsageError(Exception):
    """An option that argparse cannot judge."""


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    """Measure what `args` ask for; print it, and write the files.

    Args:
        args: as parsed by a parser with `add_arguments`.
        arguments: the same as text, for the header.

    Returns:
        The exit code, 0 or 1.

    Raises:
        UsageError: an unknown suite or implementation, or no such device.
    """
    started = time.monotonic()
    suites = _chosen("suites", args.suites, SUITES)
    for path in filter(None, (args.json, args.markdown)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no file can be written there")
    impls = None if args.impls is None else _chosen("impls", args.impls, tuple(NAMES))
    # vLLM's log would mix with the result on stdout.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.device.partition(":")[0] == "cpu":
        # Triton reads it when it is imported, which follows.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from portable_backend.bench import environment
    from portable_backend.bench.providers import ON_REQUEST, absent_here
    from portable_backend.bench.settings import Settings

    device = _device(args.device, must_exist=not args.list)
    absent = {} if args.list else absent_here(device)
    settings = Settings(
        device=device,
        rounds=args.rounds,
        impls=impls,
        absent=tuple(absent),
        every=args.all,
        cold=args.cold,
        layout=args.layout,
    )
    jobs = [job for job in _jobs(suites, settings) if args.rows in job.label]
    if not jobs:
        raise UsageError(f"--rows {args.rows!r} is in no label; --list prints them")
    if args.list:
        print("\n".join(job.label for job in jobs))
        return 0
    report = Report(environment.describe(device, arguments, args.commit))
    report.absent = {
        name: why
        for name, why in absent.items()
        if (name not in ON_REQUEST if impls is None else name in impls)
    }
    for name, text in report.environment.items():
        print(f"{name:9} {text}")
    for why in dict.fromkeys(report.absent.values()):
        names = [name for name, other in report.absent.items() if other == why]
        print(f"absent    {', '.join(names)}: {why}")
    if device.type == "cpu":
        print("note      tiny shapes in the interpreter: checked, times not claimed")
    sys.stdout.flush()
    deadline = float("inf")
    if args.budget_s is not None:
        deadline = started + args.budget_s
    _measure(jobs, report, deadline)
    _print_summary(report, time.monotonic() - started)
    if args.json:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(format_report(report))
    return 1 if report.failed else 0


def _chosen(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(
            f"--{option} must name some of {', '.join(known)}, "
            f"got {', '.join(unknown) or 'none'}"
        )
    return names


def _device(text: str, must_exist: bool) -> "torch.device":
    import torch

    from portable_backend.device import DeviceInfo

    try:
        device = torch.device(text)
        if not must_exist:
            return device
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError("torch finds no GPU; use --device cpu")
            if device.index is not None:
                torch.cuda.set_device(device)
            device = torch.device("cuda", torch.cuda.current_device())
        DeviceInfo.detect(device)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--device {text}: {error}") from error
    return device


def _jobs(suites: Sequence[str], settings: "Settings") -> Iterator[Job]:
    from portable_backend.bench import attention, cache, host, norm, roofs

    makers = {
        "copy": roofs.copy_jobs,
        "matmul": roofs.matmul_jobs,
        "attention": attention.attention_jobs,
        "geometries": attention.geometry_jobs,
        "features": attention.feature_jobs,
        "norm": norm.jobs,
        "cache": cache.jobs,
        "host": host.jobs,
    }
    for suite in suites:
        yield from makers[suite](settings)


def _measure(jobs: Sequence[Job], report: Report, deadline: float) -> None:
    """Fill the report; what does not fit in time or memory is left out by name."""
    stopped = ""
    for job in jobs:
        if not stopped and time.monotonic() > deadline:
            stopped = "no time left"
        if stopped:
            report.left_out[job.label] = stopped
            continue
        try:
            row = _row_of(job)
        except KeyboardInterrupt:
            stopped = report.left_out[job.label] = "interrupted"
            continue
        if row is None:
            report.left_out[job.label] = "does not fit in the device's memory"
            continue
        report.rows.append(row)
        print(format_row(row), flush=True)


def _row_of(job: Job) -> Row | None:
    """The job's row, be it of a failure; None if its inputs do not fit in memory."""
    import torch

    from portable_backend.bench.timing import failures_noted

    row, failure = Row(job.suite, job.name, "failed", job.fields), Result()
    with failures_noted(failure):
        try:
            row = job.run()
        except torch.OutOfMemoryError:
            return None
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    if failure.reason:
        row.results[OURS] = failure
    return row


def format_row(row: Row) -> str:
    """One line: every implementation's time, rate and error, then the ratios."""
    cells = [row.label]
    for name, result in row.results.items():
        cell = f"{name} "
        if result.time_us is None:
            cell += verdict(result)
        else:
            cell += f"{result.time_us:.1f}us {rate(row, name)}".rstrip()
        if result.error is not None and not result.wrong:
            cell += f" e{result.error:.0e}"
        cells.append(cell)
    ratios = {name: row.ratio(name) for name in row.results if name != OURS}
    text = " ".join(f"{name}/ours {r:.2f}" for name, r in ratios.items() if r)
    if text:
        cells.append(text)
    return " | ".join(cells)


def _print_summary(report: Report, seconds: float) -> None:
    for group, by_rival in geometric_means(report.rows).items():
        means = " ".join(f"{name}/ours {m:.2f}" for name, (m, _) in by_rival.items())
        print(f"mean      {group}: {means}")
    slower = losses(report.rows)
    for row, rival, ratio in slower:
        print(f"slower    {rival}/ours {ratio:.2f}: {row.label}")
    for label, why in report.left_out.items():
        print(f"left out  {label}: {why}")
    failed = [row for row in report.rows if row.failed]
    for row in failed:
        for name, result in row.failures.items():
            print(f"failed    {name} {row.label}: {verdict(result)}")
    print(
        f"{len(report.rows)} rows in {seconds:.0f} s, {len(failed)} failed, "
        f"{len(slower)} slower than another, {len(report.left_out)} left out"
    )
