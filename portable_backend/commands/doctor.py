# SPDX-License-Identifier: Apache-2.0
"""`portable-backend doctor`: what is wrong here, and how to mend it."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from portable_backend.commands import DONE, FAILED, UsageError
from portable_backend.commands import doctor_caches as folders
from portable_backend.commands import doctor_probes as probes
from portable_backend.commands.doctor_probes import Examination, Finding, Probe, examine
from portable_backend.commands.doctor_system import System

PROBES: Mapping[str, Probe] = {
    "versions": probes.versions,
    "conflicts": probes.conflicts,
    "device": probes.device,
    "settings": probes.settings,
    "plugin": probes.plugin,
    "caches": folders.caches,
    "triton cache": folders.triton_cache,
    "kernel": probes.kernel,
    "tuned": folders.tuned,
}
SYSTEM = System()


def add_parser(groups: Any) -> None:
    text = "say what would keep the back end from serving here, and how to mend it"
    parser: argparse.ArgumentParser = groups.add_parser(
        "doctor", help=text, description=f"{text}; exit 1 if serving would fail"
    )
    parser.set_defaults(func=run)
    option = parser.add_argument
    option("--json", action="store_true", help="the result as JSON")
    option("--model", help="a folder or Hugging Face id: how much of it is tuned")
    option("--tensor-parallel-size", type=int, default=1, help="ranks of --model")


def run(args: argparse.Namespace) -> int:
    if args.tensor_parallel_size < 1:
        raise UsageError("--tensor-parallel-size must be 1 or more")
    examination = Examination(SYSTEM, args.model, args.tensor_parallel_size)
    findings = examine(examination, PROBES, _show_progress)
    problems = sum(finding.state == probes.PROBLEM for finding in findings)
    if args.json:
        result = {"ok": not problems, "findings": [asdict(f) for f in findings]}
        print(json.dumps(result, indent=1, default=str))
    else:
        print("\n".join(_lines(findings)))
        count = f"{problems} problem{'s' if problems > 1 else ''}"
        print(f"serving would fail: {count}" if problems else "serving would work")
    return FAILED if problems else DONE


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield f"{finding.state:<8} {finding.check:<13} {finding.text}"
        if finding.remedy and finding.state != probes.OK:
            yield f"{'':<22} -> {finding.remedy}"


def _show_progress(name: str) -> None:
    print(f"checking {name}", file=sys.stderr, flush=True)
