#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts and compilations of a server with our back end, from one call.

    python -P scripts/startup_check.py --gpus 0,1 --out FOLDER
    python -P scripts/startup_check.py --parts start --rounds 3 --limit-s 800
    python -P scripts/startup_check.py --newest --gpus 0
    python -P scripts/startup_check.py --parts background

Parts: `awkward`, more than 2000 awkward requests in default mode and as many in eager
mode under `--jit-monitor-mode error`; `start`, cold and warm starts beside
FLASH_ATTN's; `startup_tuning`, budget, memory and records of tuning at start;
`carried`, a start from what `portable-backend warm` has compiled; `background`, where
it is asked for, what tuning beside an engine costs and finds. Random weights in the
shape of 8 layers of Llama-8B.

Jobs are processes, each on one GPU and its share of the CPUs, with a time limit of its
own; one that fails or hangs does not stop the others. Each writes JSON to --out as it
goes; a table comes last. Exit code 1 if a claim does not hold.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import startup_background
import startup_parts
from serving.server import members
from startup_run import FULL, QUICK, Run, Scale
from startup_table import (
    Row,
    awkward_rows,
    background_rows,
    carried_rows,
    markdown,
    start_rows,
    tuning_rows,
)

PARTS = ("awkward", "start", "startup_tuning", "carried", "background")
# Seconds of a job: what it takes at most on an H200, and some more.
LIMITS = {
    "awkward": 330,
    "start": 420,
    "startup_tuning": 280,
    "carried": 150,
    "background": 480,
}
# Of a job that is told to end, to stop its servers.
_GRACE_S = 25.0
# Nothing is begun that has less, nor a start that has less than it takes.
_LEAST_S = 10.0
_LEAST_OF_PARTS = {"carried": 60.0}


@dataclass(frozen=True)
class Job:
    """One process's work, on one GPU.

    Attributes:
        part: that it belongs to.
        argument: number of the round, if the part has several jobs.
    """

    part: str
    argument: str = ""

    @property
    def name(self) -> str:
        return "_".join(filter(None, [self.part, self.argument]))


def jobs_of(parts: Sequence[str], rounds: int) -> list[Job]:
    """In the order in which GPUs take them, the longest first."""
    jobs: list[Job] = []
    if "start" in parts:
        jobs += [Job("start", str(number)) for number in range(rounds)]
    others = ("background", "awkward", "startup_tuning", "carried")
    return jobs + [Job(part) for part in others if part in parts]


def run_job(args: argparse.Namespace) -> None:
    """In a job's process."""
    part, _, argument = args.job.partition(":")
    run = Run(
        args.out, Job(part, argument).name, scale_of(args), args.limit_s, args.reference
    )
    if part == "awkward":
        startup_parts.awkward(run, args.modes)
    elif part == "start":
        startup_parts.start(run, int(argument), args.variants)
    elif part == "startup_tuning":
        startup_parts.startup_tuning(run)
    elif part == "background":
        startup_background.background(run)
    else:
        startup_parts.carried(run)


def scale_of(args: argparse.Namespace) -> Scale:
    scale = QUICK if args.quick else FULL
    if args.newest:
        scale = replace(scale, share=scale.share * 0.2, batch_sizes=(1, 15, 16, 17))
    return scale


class Lanes:
    """GPUs, each with its share of the CPUs, that take jobs until there are none."""

    def __init__(self, args: argparse.Namespace, jobs: Sequence[Job]) -> None:
        self.args = args
        self.waiting = list(jobs)
        self.problems: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.end = time.monotonic() + args.limit_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Return when all jobs are done, or were ended; Ctrl-C ends them."""
        gpus = self.args.gpus.split(",")
        cpus = sorted(os.sched_getaffinity(0))
        threads = []
        for i, gpu in enumerate(gpus):
            size = max(1, len(cpus) // len(gpus))
            share = cpus[i * size : (i + 1) * size] or cpus
            threads.append(threading.Thread(target=self._lane, args=(gpu, share)))
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)  # an interrupted join() would count as done
        except KeyboardInterrupt:
            print("interrupted: what follows is what was seen", file=sys.stderr)
            self._stopped.set()
        for thread in threads:
            thread.join()

    def _lane(self, gpu: str, cpus: list[int]) -> None:
        while True:
            with self._lock:
                if not self.waiting or self._stopped.is_set():
                    return
                job = self.waiting.pop(0)
            most_s = LIMITS[job.part] * self.args.stretch
            limit_s = min(most_s, self.end - time.monotonic() - _GRACE_S)
            if limit_s < _LEAST_OF_PARTS.get(job.part, _LEAST_S):
                self.problems[job.name] = "no time was left for it"
                continue
            began = time.monotonic()
            problem = self._run(job, gpu, cpus, limit_s)
            self.seconds[job.name] = round(time.monotonic() - began, 1)
            if problem is not None:
                self.problems[job.name] = problem
            print(
                f"-- {job.name} on GPU {gpu}: {problem or 'done'}, "
                f"{self.seconds[job.name]} s",
                flush=True,
            )

    def command(self, job: Job, limit_s: float) -> list[str]:
        """Starts the process of a job."""
        args = self.args
        command = [sys.executable, "-P", __file__, "--out", str(args.out)]
        command += ["--job", f"{job.part}:{job.argument}", "--limit-s", str(limit_s)]
        command += ["--reference", args.reference, "--modes", ",".join(args.modes)]
        command += ["--variants", ",".join(args.variants)]
        return command + ["--quick"] * args.quick + ["--newest"] * args.newest

    def _run(self, job: Job, gpu: str, cpus: list[int], limit_s: float) -> str | None:
        """None if the job ended well, else why not."""
        environment = os.environ | {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": gpu,
            "PYTHONUNBUFFERED": "1",
        }
        # What would be shared with other servers, or with other runs.
        environment.pop("TRITON_CACHE_DIR", None)
        log = self.args.out / "logs" / f"{job.name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(job, limit_s),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        with suppress(OSError):  # it has ended already
            os.sched_setaffinity(process.pid, cpus)
        end = time.monotonic() + limit_s
        while (code := process.poll()) is None and time.monotonic() < end:
            if self._stopped.wait(0.2):
                break
        problem = None if code == 0 else f"exit code {code}"
        if code is None:
            problem = f"ended before it was done, limit {limit_s:.0f} s"
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)
        # Its servers have groups of their own within its session.
        for member in members("session", process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()
        if problem is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            return "; ".join([problem, *last])
        return None


def rows_of(out: Path, jobs: Sequence[Job], budget_s: float) -> list[Row]:
    """Of all that jobs have saved."""
    found: dict[str, Any] = {}
    for job in jobs:
        with suppress(OSError, ValueError):
            found[job.name] = json.loads((out / f"{job.name}.json").read_text())
    rows: list[Row] = []
    if "awkward" in found:
        rows += awkward_rows(found["awkward"])
    rows += start_rows(
        found[j.name] for j in jobs if j.part == "start" and j.name in found
    )
    if "startup_tuning" in found:
        rows += tuning_rows(found["startup_tuning"], budget_s)
    if "carried" in found:
        rows += carried_rows(found["carried"])
    if "background" in found:
        rows += background_rows(found["background"])
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--parts", default=None, help=",".join(PARTS) + " (default: all but background)"
    )
    add("--gpus", default="0", help="indices, as in 0,1 (default: %(default)s)")
    add("--limit-s", type=float, default=510, help="for all (default: %(default)s)")
    add("--stretch", type=float, default=1, help="factor on each job's own time limit")
    add("--rounds", type=int, default=1, help="of `start` (default: %(default)s)")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "startup_check_out")))
    add("--modes", default="default,eager", help="of `awkward` (default: %(default)s)")
    add("--reference", default="FLASH_ATTN", help="back end to compare starts with")
    add(
        "--variants",
        default=",".join(startup_parts.VARIANTS),
        help="of `start`, in the first round's order (default: %(default)s)",
    )
    add(
        "--newest", action="store_true", help="fewer requests, by default no other part"
    )
    add("--quick", action="store_true", help="a tiny model and few requests")
    add("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()
    if args.parts is None:
        args.parts = "awkward" if args.newest else ",".join(PARTS[:-1])
    args.parts = args.parts.split(",")
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {unknown[0]}")
    args.modes = args.modes.split(",")
    known = startup_parts.MODES
    if unknown := [mode for mode in args.modes if mode not in known]:
        parser.error(f"--modes must be some of {', '.join(known)}, got {unknown[0]}")
    args.variants = args.variants.split(",")
    known = startup_parts.VARIANTS
    if unknown := [name for name in args.variants if name not in known]:
        parser.error(f"--variants must be some of {', '.join(known)}, got {unknown[0]}")
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {args.rounds}")
    return args


def main() -> int:
    args = parse()
    # As Ctrl-C: servers are stopped on the way out.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.default_int_handler)
    if args.job:
        run_job(args)
        return 0
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(args.parts, args.rounds)
    for job in jobs:  # of an earlier run
        (args.out / f"{job.name}.json").unlink(missing_ok=True)
    shutil.rmtree(args.out / "work", ignore_errors=True)
    lanes = Lanes(args, jobs)
    lanes.run()
    rows = rows_of(args.out, jobs, scale_of(args).budget_s)
    rows += [Row(name, "job", False, why) for name, why in lanes.problems.items()]
    summary = {"seconds": lanes.seconds, "rows": [asdict(row) for row in rows]}
    (args.out / "startup_check.json").write_text(json.dumps(summary, indent=1) + "\n")
    table = markdown(rows)
    (args.out / "startup_check.md").write_text(table + "\n")
    print(table)
    shutil.rmtree(args.out / "work", ignore_errors=True)
    return 0 if rows and all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
