#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for GPUs that are not at hand, and check what they may use.

    python -P scripts/cross_compile.py                     # all targets
    python -P scripts/cross_compile.py --targets sm90 gfx942 --shapes all --json FILE
    python -P scripts/cross_compile.py --draw 10           # configs from the spaces
    python -P scripts/cross_compile.py --cover 2 --shapes sizes    # pairs of values

The public functions are called on tensors without storage while launches are recorded
instead of run, so each kernel is compiled with the arguments it is launched with. One
child process per target compiles, within a time limit: a compiler that aborts or hangs
fails its kernel, not the run. Exit code 1: something did not compile, would not fit its
target, or is a default that spills more than `portable-backend compile` expects of it.
"""

import argparse
import contextlib
import json
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compiling.calls import SHAPES, Call, Shape, default_calls, drawn_calls
from compiling.covers import Cover, covers_for
from compiling.tables import cover_table, table
from serving.options import count

from portable_backend import kernels
from portable_backend.commands.compile_checks import expected_spills
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup import resources
from portable_backend.warmup.compilation import (
    KernelLaunch,
    compile_launch,
    distinct,
    recording,
)

TARGETS = (
    "sm80",
    "sm86",
    "sm89",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
)


@dataclass(frozen=True)
class Asked:
    """What to compile: which shapes, and configs beside the defaults."""

    shapes: str
    draw: int = 0
    cover: int = 0

    def options(self) -> list[str]:
        """Of a child process."""
        numbers = ("--draw", str(self.draw), "--cover", str(self.cover))
        return ["--shapes", self.shapes, *numbers]


@dataclass(frozen=True)
class Job:
    """A compilation, and the call that asks for it."""

    shape: str
    config: dict[str, dict[str, Any]] | None  # by kernel; None: defaults
    launch: KernelLaunch


def all_kernels() -> set[str]:
    """Names of the kernels that the package's source defines."""
    pattern = re.compile(r"^def (_\w+_kernel)\(", re.M)
    sources = Path(kernels.__file__).parent.glob("*.py")
    return {name for path in sources for name in pattern.findall(path.read_text())}


def launched(shape: Shape, calls: Iterable[Call], info: DeviceInfo) -> Iterator[Job]:
    """Each launch that calls make, repeats included."""
    with recording(info) as launches:
        for call in calls:
            call.run()
            config = {kernel: c.to_dict() for kernel, c in call.config.items()} or None
            yield from (Job(shape.name, config, launch) for launch in launches)
            launches.clear()


def jobs_for(
    arch: str, shapes: tuple[Shape, ...], draw: int, covers: list[Cover]
) -> list[Job]:
    """Distinct compilations of a target."""
    info = DeviceInfo.for_arch(arch)
    jobs: dict[KernelLaunch, Job] = {}
    for shape in shapes:
        calls = [*default_calls(shape), *drawn_calls(shape, draw, info)]
        calls += [c for cover in covers if cover.shape == shape for c in cover.calls()]
        jobs |= {job.launch: job for job in launched(shape, calls, info)}
    return [jobs[launch] for launch in distinct(jobs, info)]


def compile_job(arch: str, job: Job) -> dict[str, Any]:
    """Compile and read what the binary uses."""
    launch = job.launch
    readout = compile_launch(launch, DeviceInfo.for_arch(arch))
    parameters = {p.name for p in launch.function.params}
    return {
        "arch": arch,
        "kernel": launch.kernel,
        "shape": job.shape,
        "spills_allowed": spills_allowed(arch, job),
        "config": job.config,
        "options": {k: v for k, v in launch.kwargs.items() if k not in parameters},
        "shared_bytes": readout.shared_bytes,
        "num_warps": readout.num_warps,
        "tmem_columns": readout.tensor_columns,
        "compile_s": round(readout.seconds, 2),
        "registers": readout.registers,
        "spills": readout.spills,
        "programs_per_unit": readout.programs_per_unit,
    }


def spills_allowed(arch: str, job: Job) -> int | None:
    """Registers that a default may spill; None: any, it is a config of the space."""
    if job.config is not None:
        return None
    shape = next(s for shapes in SHAPES.values() for s in shapes if s.name == job.shape)
    if shape.features:
        return None  # nobody has chosen a default for all of them at once
    dtype = str(shape.dtype).removeprefix("torch.")
    fields = {"head_size": shape.head_size, "dtype": dtype}
    expected = expected_spills(arch, job.launch.kernel, fields)
    return expected.most if expected else 0


def over_limit(row: dict[str, Any]) -> str | None:
    """Why the kernel must not be launched on its target, or None."""
    readout = resources.Readout(
        shared_bytes=row["shared_bytes"],
        registers=row.get("registers"),
        spills=row.get("spills"),
        programs_per_unit=row.get("programs_per_unit"),
        seconds=0,
        num_warps=row["num_warps"],
        tensor_columns=row["tmem_columns"],
    )
    reason = resources.over_limit(readout, DeviceInfo.for_arch(row["arch"]))
    spills, allowed = row.get("spills") or 0, row.get("spills_allowed")
    if reason is None and allowed is not None and spills > allowed:
        reason = f"the default spills {spills} registers, {allowed} are expected"
    return reason


def work(arch: str, asked: Asked, skip: int) -> None:
    """Child process: compile the jobs from number `skip` on, one JSON line each."""
    shapes = SHAPES[asked.shapes]
    covers = list(covers_for(shapes, asked.cover, DeviceInfo.for_arch(arch)))
    for cover in covers if skip == 0 else ():
        print(json.dumps({"arch": arch, "cover": cover.summary()}), flush=True)
    for job in jobs_for(arch, shapes, asked.draw, covers)[skip:]:
        label = {"kernel": job.launch.kernel, "shape": job.shape, "config": job.config}
        print(json.dumps({"starts": label}), flush=True)
        try:
            row = compile_job(arch, job)
        except Exception as error:  # whatever a compiler raises
            row = {"arch": arch, "error": f"{type(error).__name__}: {error}"[:500]}
            row |= label
        print(json.dumps(row), flush=True)


def compile_target(
    arch: str, asked: Asked, limit_s: float, stopped: threading.Event
) -> Iterator[dict[str, Any]]:
    """Run children until each job has a row; an abort or a hang is a row too.

    Covers come first, a row with "cover" each. Once `stopped` is set, the rest is left.
    """
    done = 0
    while True:
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__]
        command += ["--child", arch, "--skip", str(done), *asked.options()]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        pump = threading.Thread(target=_pump, args=(child, lines), daemon=True)
        pump.start()
        running: dict[str, Any] | None = {"kernel": "?", "shape": "?"}
        reason = None
        while True:
            line = _next(lines, limit_s, stopped)
            if stopped.is_set():
                child.kill()
                child.communicate()
                return
            if line == "":
                reason = f"no answer within {limit_s:.0f} s"
                child.kill()
                break
            if line is None:
                break
            row = json.loads(line)
            if "starts" in row:
                running = row["starts"]
                continue
            if "cover" in row:
                yield row
                continue
            running = None
            done += 1
            yield row
        _, errors = child.communicate()
        if child.returncode == 0 and reason is None:
            return
        tail = errors.strip().splitlines()[-1:] or [""]
        reason = reason or f"exit code {child.returncode}: {tail[0]}"
        yield {"arch": arch, "error": reason} | (running or {"kernel": "?"})
        if running is None or running["kernel"] == "?":
            return  # it never got to a kernel, and would not the next time
        done += 1


def _next(
    lines: "queue.Queue[str | None]", limit_s: float, stopped: threading.Event
) -> str | None:
    """A line; None: there are no more; empty: none came in time, or it is stopped."""
    end = time.monotonic() + limit_s
    while (left := end - time.monotonic()) > 0 and not stopped.is_set():
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=min(0.2, left))
    return ""


def _pump(child: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def compile_all(
    targets: list[str],
    asked: Asked,
    limit_s: float,
    num_workers: int,
    stopped: threading.Event,
) -> list[dict[str, Any]]:
    """Rows of all targets, `num_workers` at a time; Ctrl-C ends it, sets `stopped`."""
    rows: list[dict[str, Any]] = []
    waiting = list(reversed(targets))

    def worker() -> None:
        while True:
            try:
                arch = waiting.pop()
            except IndexError:
                return
            start, done, failed = time.perf_counter(), 0, 0
            for row in compile_target(arch, asked, limit_s, stopped):
                if {"error", "cover"}.isdisjoint(row) and (reason := over_limit(row)):
                    row |= {"error": reason, "over_limit": True}
                rows.append(row)
                done += "cover" not in row
                failed += "error" in row
            seconds = time.perf_counter() - start
            print(
                f"{arch}: {done} compilations, {failed} failed, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    threads = [threading.Thread(target=worker) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        waiting.clear()
        stopped.set()
        for thread in threads:
            thread.join()
    return sorted(rows, key=lambda row: targets.index(row["arch"]))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {text}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="ARCH")
    parser.add_argument("--shapes", choices=list(SHAPES), default="few")
    parser.add_argument(
        "--draw",
        type=_number,
        default=0,
        metavar="N",
        help="also N configs of each attention kernel, drawn from its space",
    )
    parser.add_argument(
        "--cover",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        metavar="N",
        help="also configs of every kernel that have each combination of N parameters' "
        "values that occurs in its space, N up to 3 (2: pairs); the table then shows "
        "failures and a summary of each target",
    )
    parser.add_argument("--limit-s", type=_seconds, default=60, help="for one kernel")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    asked = Asked(args.shapes, args.draw, args.cover)
    if args.child:
        work(args.child, asked, args.skip)
        return 0
    targets = [target.replace("sm_", "sm") for target in args.targets]
    known = [arch for arch in ARCH_LIMITS if arch != "interpreter"]
    for target in targets:
        if target not in known:
            parser.error(f"--targets: no {target}; known: {', '.join(known)}")
    if args.json and not args.json.absolute().parent.is_dir():
        folder = args.json.absolute().parent
        parser.error(f"--json: {folder} is no folder; make it first")
    start = time.perf_counter()
    stopped = threading.Event()
    rows = compile_all(targets, asked, args.limit_s, args.workers, stopped)
    missing = (
        set()
        if stopped.is_set()
        else {
            (target, name)
            for target in targets
            for name in all_kernels()
            if not any(
                row["arch"] == target and f"_{row.get('kernel')}_kernel" == name
                for row in rows
            )
        }
    )
    rows += [
        {"arch": arch, "kernel": name, "error": "was never launched"}
        for arch, name in sorted(missing)
    ]
    compiled = [row for row in rows if "cover" not in row]
    failures = [row for row in compiled if "error" in row]
    if args.cover:
        if failures:
            print(table(failures), end="\n\n")
        print(cover_table(rows, targets))
    else:
        print(table(compiled))
    failed = len(failures)
    seconds = time.perf_counter() - start
    print(f"{len(compiled)} compilations, {failed} failed, {seconds:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if stopped.is_set():
        print("interrupted: what is not listed was not compiled", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
