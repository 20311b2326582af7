#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How near the records of `portable-backend tune` come to recorded sweeps' optima.

    portable-backend tune --shapes SHAPES --cache-dir DIR --json > tuned.json
    python -P scripts/record_sweeps.py SHAPES SWEEPS
    python -P scripts/tune_report.py SWEEPS DIR --tuned tuned.json

For each sweep: the time of the record's config over the optimum, both by the sweep;
for each kernel the geometric mean, and what a portfolio of a few configs loses. A
config that the sweep lacks is judged by the record's own time, and marked. Exit codes:
0 done, 1 a sweep has no record or the record's config did not run, 2 usage.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from portable_backend.errors import PortableBackendError
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.sweeps import read_sweeps
from portable_backend.warmup.tune_quality import report


def main() -> int:
    args = _parser().parse_args()
    try:
        sweeps = read_sweeps(args.folder)
        tuned = json.loads(args.tuned.read_text()) if args.tuned else None
        with RecordStore.open(args.cache_dir, shipped=args.cache_dir) as store:
            kernels = sorted({sweep.kernel for sweep in sweeps})
            records = [r for kernel in kernels for _, r in store.records(kernel)]
        found = report(sweeps, records, max_configs=args.max_configs, tuned=tuned)
    except (PortableBackendError, OSError, ValueError, KeyError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 1 if found["without_record"] or found["without_time"] else 0


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["synthetic"]:
        lines += [
            "Some of these sweeps are synthetic: nobody measured those times.",
            "",
        ]
    lines += [
        "| key | loss | record, us | best, us | tried | sweep |",
        "|---" * 6 + "|",
    ]
    for unit in found["units"]:
        key, sweep = TuningKey.from_dict(unit["kernel"], unit["key"]), unit["sweep"]
        loss = "no record" if unit["record_us"] is None else "did not run"
        if unit["loss"] is not None:
            loss = f"{unit['loss'] - 1:+.2%}" + ("" if unit["is_in_sweep"] else " *")
        of = sweep["selection"].get("members", "?")
        lines.append(
            f"| {key} | {loss} | {_number(unit['time_us'])} | {unit['best_us']:.4g} "
            f"| {unit['tried'] or '-'} | {sweep['timed']} timed of {of} |"
        )
    if any(unit["loss"] and not unit["is_in_sweep"] for unit in found["units"]):
        lines.append("\n* not in the sweep: the record's own time, of another run")
    for kernel, loss in found["loss_by_kernel"].items():
        lines.append(f"\n{kernel}: {loss - 1:+.2%} (geometric mean)")
    if found["loss"] is not None:
        lines.append(f"\nall: {found['loss'] - 1:+.2%} (geometric mean)")
    for kernel, cover in found["portfolios"].items():
        worst = TuningKey.from_dict(kernel, cover["worst_key"])
        at = "uncovered" if cover["worst_loss"] is None else (
            f"{cover['worst_loss'] - 1:+.2%}"
        )  # fmt: skip
        lines.append(
            f"\n{kernel}: portfolio of {len(cover['configs'])} configs for "
            f"{cover['buckets']} buckets loses {cover['loss'] - 1:+.2%} (geometric "
            f"mean), at worst {at} in {worst}"
        )
    counts = found["tuned"]
    if counts is not None:
        lines.append(
            f"\ntuned in {counts['seconds']:.0f} s: {counts['considered']} configs "
            f"considered, {counts['pruned']} pruned, {counts['compiled']} compiled, "
            f"{counts['timed']} timed"
        )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    add = parser.add_argument
    add("folder", type=Path, help="where the sweeps are")
    add("cache_dir", type=Path, help="where tune wrote its records")
    add("--tuned", type=Path, metavar="FILE", help="what tune --json printed")
    add("--max-configs", type=int, default=8, help="of a portfolio (default: 8)")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
