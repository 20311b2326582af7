#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay search strategies on recorded sweeps and print how near they come.

    python -P scripts/compare_strategies.py FOLDER
    python -P scripts/compare_strategies.py FOLDER --strategies halving,random --seeds 5

FOLDER holds *.sweep.json.gz files. For each kernel and strategy: the geometric mean
over sweeps and seeds of the optimum's time over that of the config found, after shares
of the trials of an exhaustive search; the worst run at the last of them; the median
share of trials to 97 % and 99 %, and of configs compiled to 99 %; and the mean share of
time that the whole run took. A strategy of many short trials compiles most of the
space: its trials look cheap where compiling takes the time.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

from portable_backend.warmup.compare import Run, geometric_mean, replay
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.strategies import STRATEGIES
from portable_backend.warmup.sweeps import read_sweeps

SHARES = (0.02, 0.05, 0.10, 0.15)


def main() -> int:
    args = _parser().parse_args()
    unknown = [name for name in args.strategies if name not in STRATEGIES]
    if unknown:
        known = ", ".join(STRATEGIES)
        print(f"strategies: no {', '.join(unknown)}; known: {known}", file=sys.stderr)
        return 2
    try:
        sweeps = read_sweeps(args.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    runs: dict[tuple[str, str], list[Run]] = {}
    for sweep in sweeps:
        space = ListedSpace(sweep.configs)
        print(f"{sweep.name}: {len(sweep.rows)} configs", file=sys.stderr)
        for name in args.strategies:
            for seed in range(args.seeds):
                run = replay(sweep, name, share=SHARES[-1], seed=seed, space=space)
                runs.setdefault((sweep.kernel, name), []).append(run)
    rows = [_row(kernel, name, found) for (kernel, name), found in runs.items()]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    if any(sweep.synthetic for sweep in sweeps):
        print("Some of these sweeps are synthetic: nobody measured those times.\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")
    return 0


def _row(kernel: str, name: str, runs: list[Run]) -> dict[str, str | float | None]:
    row: dict[str, str | float | None] = {"kernel": kernel, "strategy": name}
    for share in SHARES:
        qualities = (run.quality_at(share) for run in runs)
        row[f"at {share:.0%}"] = geometric_mean(qualities)
    row["worst"] = min(run.quality_at(SHARES[-1]) for run in runs)
    for column, values in (
        ("trials to 97%", [run.share_to(0.97) for run in runs]),
        ("trials to 99%", [run.share_to(0.99) for run in runs]),
        ("compiled to 99%", [run.compiled_to(0.99) for run in runs]),
    ):
        median = statistics.median(values)
        row[column] = median if math.isfinite(median) else None
    row["time at 15%"] = statistics.mean(run.seconds for run in runs)
    return row


def _cell(value: str | float | None) -> str:
    if value is None:
        return "not reached"
    return value if isinstance(value, str) else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("folder", type=Path, help="where the sweeps are")
    parser.add_argument(
        "--strategies",
        type=lambda text: text.split(","),
        default=[name for name in STRATEGIES if name != "exhaustive"],
        help="comma-separated (default: all but exhaustive)",
    )
    parser.add_argument("--seeds", type=int, default=20, help="runs each (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
