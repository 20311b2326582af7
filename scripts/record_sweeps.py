#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record sweeps on the GPU at hand: every config of a space, checked and timed in full.

    python -P scripts/record_sweeps.py SHAPES FOLDER --budget-s 500
    python -P scripts/record_sweeps.py SHAPES FOLDER --sample 300 --best 300 \\
        --fix launch_pdl=true

SHAPES is a JSON list of keys, as for `portable-backend tune --shapes`. FOLDER gets a
*.sweep.json.gz for each key, and *.rows.jsonl beside it, from which the same command
goes on after Ctrl-C, a kill or the end of the budget. Keys that differ in sizes only
share what is compiled. Progress is on stderr, the result on stdout. Exit codes: 0 all
recorded, 1 something failed, 2 usage, 3 the budget ended first, 130 interrupted.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from portable_backend.errors import PortableBackendError
from portable_backend.warmup.recorder import Progress, Recorder, Selection
from portable_backend.warmup.strategies import FULL_ROUNDS
from portable_backend.warmup.sweeps import read_sweep
from portable_backend.warmup.tools import Tools
from portable_backend.warmup.tuning_tools import gpu_recipe
from portable_backend.warmup.units import read_shapes

ENDED = {"": 0, "budget": 3, "interrupted": 130}


def main() -> int:
    args = _parser().parse_args()
    tools: Tools | None = None
    recorder: Recorder | None = None
    try:
        keys = [unit.key for unit in read_shapes(args.shapes)]
        measuring = {"gives_up": False, "turn_us": args.turn_us}
        recipe = gpu_recipe(
            workers=args.workers, device=args.device, measuring=measuring
        )
        tools = recipe.open()
        tools.rounds = args.rounds
        selection = Selection(args.sample, args.best, dict(args.fix), args.seed)
        recorder = Recorder(keys, tools, args.folder, selection, batch=args.batch)
        paths = recorder.run(args.budget_s, _Reporter(recorder.progress))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except PortableBackendError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if recorder is not None:
            recorder.close()
        if tools is not None:
            tools.close()
    _print(args, recorder.progress, paths)
    return ENDED[recorder.progress.stopped]


class _Reporter:
    """A line on stderr every few seconds."""

    def __init__(self, progress: Progress) -> None:
        self._started = self._said = time.monotonic()
        self._first = progress.done
        print(f"{progress.total - progress.done} rows to record", file=sys.stderr)

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._said < 5 and progress.done < progress.total:
            return
        self._said = now
        each = (now - self._started) / max(1, progress.done - self._first)
        left = each * (progress.total - progress.done)
        print(
            f"{progress.done}/{progress.total} rows, {each:.2f} s each, "
            f"about {left:.0f} s left: {progress.key}",
            file=sys.stderr,
            flush=True,
        )


def _print(args: argparse.Namespace, progress: Progress, paths: list[Path]) -> None:
    rows: list[dict[str, Any]] = []
    for path in paths:
        sweep = read_sweep(path)
        timed = [row for row in sweep.rows if row.times_us]
        rows.append(
            {
                "sweep": path.name,
                "configs": len(sweep.rows),
                "timed": len(timed),
                "best_us": sweep.best_us,
                "selection": dict(sweep.selection),
                "bytes": path.stat().st_size,
            }
        )
    result = {
        "done": progress.done,
        "total": progress.total,
        "stopped": progress.stopped,
        "sweeps": rows,
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print(
            f"{row['sweep']}: {row['timed']} of {row['configs']} configs timed, best "
            f"{row['best_us']:g} us, {row['bytes']} bytes"
        )
    ended = f"; {progress.stopped}" if progress.stopped else ""
    print(f"{progress.done} of {progress.total} rows recorded{ended}")


def _fixed(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    add = parser.add_argument
    add("shapes", type=Path, help="JSON list of keys")
    add("folder", type=Path, help="where the sweeps go")
    add("--sample", type=int, metavar="N", help="configs at random (default: all)")
    add("--best", type=int, default=0, metavar="N", help="more, the best by estimate")
    add("--fix", type=_fixed, action="append", default=[], metavar="NAME=VALUE",
        help="leave out configs with another value; may be repeated")  # fmt: skip
    add("--seed", type=int, default=0, help="of sample and order (default: 0)")
    add("--rounds", type=int, default=FULL_ROUNDS, metavar="N", help="of timing")
    add("--turn-us", type=float, default=10_000.0, metavar="US", help="of a round")
    add("--batch", type=int, default=64, metavar="N", help="configs compiled ahead")
    add("--budget-s", type=float, metavar="S", help="seconds overall")
    add("--workers", type=int, metavar="N", help="processes that compile")
    add("--device", default="cuda:0", help="(default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
