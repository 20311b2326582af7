#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict configs for GPUs that nobody has measured, and write them as tables.

    python -P scripts/predict_tables.py tests/sweeps --out kernels/configs
    python -P scripts/predict_tables.py tests/sweeps --evaluate

The first fits a model on the sweeps of a folder, compiles what it puts first for each
GPU (none is needed), and writes DIR/<kernel>/<gpu>.json, in place of what was predicted
before. What code takes is kept beside the sweeps, in readouts.json.gz: with the same
kernels and Triton nothing is compiled again, and the same tables come out. The second
predicts each sweep from the others and prints how near the model's first choice comes.
Exit codes: 0 done, 1 something failed, 2 usage.
"""

import argparse
import json
import math
import os
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import triton

from portable_backend.errors import PortableBackendError
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.layers import TABLE, Layer, file_stem
from portable_backend.warmup.predicted_tables import (
    KERNELS,
    Model,
    common_keys,
    jobs_of,
    measured_all,
    predicted_record,
    sweep_jobs,
)
from portable_backend.warmup.prediction import HeldOut, across_heads, leave_one_out
from portable_backend.warmup.readouts import FILE, Readouts
from portable_backend.warmup.sweeps import read_sweeps
from portable_backend.warmup.tables import format_table, merge_records
from portable_backend.warmup.targets import unmeasured_devices


def main() -> int:
    args = _parser().parse_args()
    if (args.out is None) == (not args.evaluate):
        print("one of --out and --evaluate must be given", file=sys.stderr)
        return 2
    try:
        sweeps = read_sweeps(args.sweeps)
        readouts = Readouts(args.sweeps / FILE, current_digests(), triton.__version__)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if synthetic := [sweep.name for sweep in sweeps if sweep.synthetic]:
        print(f"nobody measured {synthetic[0]}; leave it out", file=sys.stderr)
        return 2
    try:
        swept = [sweep for sweep in sweeps if sweep.kernel not in args.estimate]
        readouts.compile(sweep_jobs(swept), args.workers, _progress("sweeps"))
        if args.evaluate:
            items = measured_all(sweeps, readouts)
            _print_evaluation(args, leave_one_out(items), across_heads(items))
            return 0
        rows = []
        for kernel in KERNELS:
            model = Model.of(kernel, sweeps, readouts)
            devices = unmeasured_devices()
            jobs = list(jobs_of(model, devices))
            readouts.compile(jobs, args.workers, _progress(kernel))
            readouts.write(args.sweeps / FILE)
            rows += _write(model, readouts, args.out)
    except (PortableBackendError, BrokenExecutor, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(args, rows)
    return 0


def _write(model: Model, readouts: Readouts, folder: Path) -> list[dict[str, Any]]:
    """Write the tables of one kernel; a measured table is left alone."""
    digest = current_digests()[model.kernel]
    rows = []
    for device in unmeasured_devices():
        held = Layer("out", folder).load_file(model.kernel, device.name).records
        kept = [record for record in held if record.unmeasured is None]
        found = [
            predicted_record(model, key, device, readouts, digest)
            for key in common_keys(model.kernel)
        ]
        path = folder / file_stem(model.kernel) / (file_stem(device.name) + TABLE)
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = merge_records(kept, found)
        path.write_text(format_table(model.kernel, device.name, merged))
        told = [record.unmeasured or {} for record in found]
        serving = [item["predicted_gain"] for item in told if item["serves"]]
        rows.append(
            {
                "kernel": model.kernel,
                "gpu": device.name,
                "arch": device.arch,
                "units": device.num_units,
                "basis": model.predictor.basis,
                "keys": len(found),
                "serve": len(serving),
                "gain": _mean(serving),
                "needed": min((i["needed_gain"] or math.inf) for i in told),
            }
        )
    return rows


def _print(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    _print_table(rows)


def _print_evaluation(
    args: argparse.Namespace, usual: list[HeldOut], heads: list[HeldOut]
) -> None:
    rows = []
    for how, outcomes in (("others", usual), ("other heads", heads)):
        for kernel in sorted({outcome.sweep.kernel for outcome in outcomes}):
            group = [o for o in outcomes if o.sweep.kernel == kernel]
            rows += [_evaluated(outcome, how) for outcome in group]
            mean = {"fitted on": how, "kernel": kernel, "held out": "geometric mean"}
            for name in ("first / best", "estimate's"):
                mean[name] = _mean([row[name] for row in rows[-len(group) :]])
            rows.append(mean)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_table(rows)


def _evaluated(outcome: HeldOut, how: str) -> dict[str, Any]:
    sizes = ("num_seqs", "query_len", "seq_len", "context_len", "num_rows")
    names = ("num_kv_heads", "num_queries_per_kv", "head_size", "row_size")
    key = outcome.sweep.key
    shape = " ".join(f"{n}={key[n]}" for n in (*sizes, *names) if n in key)
    return {
        "fitted on": f"{len(outcome.fitted_on)} {how}",
        "kernel": outcome.sweep.kernel,
        "held out": shape,
        "first / best": outcome.first,
        "correlation": outcome.correlation,
        "estimate's": outcome.estimate_first,
        "its correlation": outcome.estimate_correlation,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print("nothing to tell: a kernel needs two sweeps")
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(name)) for name in rows[0]) + " |")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _mean(values: list[float]) -> float | None:
    if not values:
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _progress(what: str) -> Any:
    def show(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            print(f"{what}: {done} of {total} compiled", file=sys.stderr, flush=True)

    return show


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    add = parser.add_argument
    add("sweeps", type=Path, help="folder of *.sweep.json.gz")
    add("--out", type=Path, metavar="DIR", help="where the tables go")
    add("--evaluate", action="store_true", help="only predict the sweeps themselves")
    add("--estimate", action="append", default=[], choices=KERNELS,
        help="do not compile what this kernel's sweeps hold, hundreds of configs "
        "each: learn from estimates of what they take; may be repeated")  # fmt: skip
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N",
        help="processes that compile (default: one for each CPU)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
