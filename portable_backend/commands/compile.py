# SPDX-License-Identifier: Apache-2.0
"""`portable-backend compile`: every kernel for GPUs that are not at hand."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.commands import DONE, FAILED, UsageError
from portable_backend.commands.compile_checks import (
    Baseline,
    expected_spills,
    held_of,
    weakness,
)
from portable_backend.commands.compile_keys import (
    KERNELS,
    LLAMA,
    TARGETS,
    Asked,
    Candidate,
    candidates,
    fields_of,
    targets_of,
)
from portable_backend.commands.compile_page import page
from portable_backend.device import DeviceInfo

if TYPE_CHECKING:
    from portable_backend.warmup.compile_pool import Compiled, CompilePool
    from portable_backend.warmup.resources import Readout

_COLUMNS = (
    ("target", "target"),
    ("kernel", "kernel"),
    ("shape", "shape"),
    ("config", "config"),
    ("shared", "shared_bytes"),
    ("regs", "registers"),
    ("spills", "spills"),
    ("fit", "programs_per_unit"),
    ("code", "code_bytes"),
    ("matrix", "matrix_instructions"),
    ("load", "load_bytes"),
    ("s", "seconds"),
)

_NOTE = (
    "regs: registers of a lane; spills: those of them that live in memory; fit: "
    "programs that a unit holds at once, its occupancy; code: bytes of instructions; "
    "matrix: matrix instructions in them; load: bytes of the widest load of a lane. "
    "plan and merge stand below the first config that launches such binaries."
)


def add_parser(groups: Any) -> None:
    text = "compile kernels for GPUs that are not at hand, and show what they take"
    parser = groups.add_parser(
        "compile",
        help=text,
        description=text,
        epilog=f"{_NOTE} Exit code 1: something does not compile or exceeds a limit, "
        "or a default spills more than is expected of it, loads nothing or less than "
        "16 bytes at once, multiplies 16-bit elements without matrix instructions, or "
        "takes an eighth more than in the baseline.",
    )
    parser.set_defaults(func=run)
    option = parser.add_argument
    option(
        "--target",
        default="all",
        metavar="ARCH,...",
        help=f"all (the default), or some of {', '.join(TARGETS)}",
    )
    option("--kernel", action="append", choices=KERNELS, help="only these")
    option(
        "--key",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="other than the fields of Llama 8B, such as head_size=64; may be repeated",
    )
    option(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="also N configs of each key's space, always the same (default: none)",
    )
    option(
        "--draw",
        type=int,
        default=0,
        metavar="N",
        help="also N configs in all, of keys and targets in turn, always the same",
    )
    option("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    option("--limit-s", type=float, default=60.0, metavar="S", help="for one config")
    option("--memory-mib", type=int, metavar="N", help="of one worker (default: any)")
    option(
        "--max-spills",
        type=int,
        default=0,
        metavar="N",
        help="of a default without an exception of its own (default: 0)",
    )
    option("--json", action="store_true", help="the result as JSON")
    option("--html", type=Path, metavar="FILE", help="the result as a page, too")
    option(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="fail where a default takes more than it did when FILE was written",
    )
    option(
        "--write-baseline",
        type=Path,
        metavar="FILE",
        help="write what defaults take; of what FILE holds, the rest stays",
    )


@dataclass
class _Row:
    """A binary of a candidate: its own kernel's, or a part that it launches too."""

    candidate: Candidate
    kernel: str
    readout: "Readout | None"
    failure: str | None
    number: int = 1  # among binaries of this kernel and candidate
    expected: str | None = None  # why its spills are no failure

    @property
    def name(self) -> str:
        """In a baseline, within a target."""
        own = f"{self.candidate.key.kernel} {_text(_shape(self.candidate))}"
        if self.kernel != self.candidate.key.kernel:
            own = f"{self.kernel} of {own}"
        return own if self.number == 1 else f"{own} #{self.number}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.candidate.target,
            "kernel": self.kernel,
            "key": self.candidate.key.to_dict(),
            "config": self.candidate.config.to_dict(),
            "is_default": self.candidate.is_default,
            "readout": vars(self.readout) if self.readout else None,
            "expected": self.expected,
            "failure": self.failure,
        }


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    _check(args)
    targets = targets_of(args.target)
    given = fields_of(args.key)
    kernels = args.kernel or KERNELS
    baseline = Baseline.read(args.baseline) if args.baseline else None
    toolchain = _toolchain(targets)
    rows: list[_Row] = []
    with _pool(args, DeviceInfo.for_arch(targets[0])) as pool:
        for target in targets:
            device = DeviceInfo.for_arch(target)
            asked = Asked(args.sample, args.draw).of_target(targets, target)
            found = list(candidates(device, kernels, given, asked))
            pool.retarget(device)
            for candidate in found:
                pool.submit(candidate.key, [candidate.config])
            seen: set[object] = set()
            for done, candidate in enumerate(found, 1):
                (compiled,) = pool.wait(candidate.key, [candidate.config])
                rows += _rows(candidate, compiled, args.max_spills, seen)
                _progress(f"{target}: {done} of {len(found)}")
    _progress(None)
    if baseline:
        _compare(rows, baseline, toolchain)
    result: dict[str, Any] = {
        "toolchain": toolchain,
        "targets": targets,
        "seconds": round(time.perf_counter() - start, 1),
        "configs": [row.to_dict() for row in rows],
    }
    _print(args, result)
    if args.html:
        args.html.write_text(_page(result["configs"]), encoding="utf-8")
    if args.write_baseline:
        _write_baseline(args.write_baseline, rows, toolchain)
    return FAILED if any(row.failure for row in rows) else DONE


def _check(args: argparse.Namespace) -> None:
    for name in ("sample", "draw", "max_spills"):
        if getattr(args, name) < 0:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be 0 or more, got {getattr(args, name)}")
    for name in ("html", "write_baseline"):
        path = getattr(args, name)
        if path and not path.absolute().parent.is_dir():
            option, folder = name.replace("_", "-"), path.absolute().parent
            raise UsageError(f"--{option}: {folder} is no folder; make it first")


def _toolchain(targets: Sequence[str]) -> dict[str, Any]:
    """What compiles; of AMD's targets it is the LLVM within Triton."""
    import triton

    from portable_backend.warmup.toolchain import ptxas_version

    devices = map(DeviceInfo.for_arch, targets)
    ptxas = {d.arch: ptxas_version(d) for d in devices if d.platform == "cuda"}
    return {"triton": triton.__version__, "ptxas": ptxas}


def _pool(args: argparse.Namespace, device: DeviceInfo) -> "CompilePool":
    from portable_backend.warmup.compile_pool import CompilePool

    try:
        return CompilePool(
            device,
            workers=args.workers,
            limit_s=args.limit_s,
            memory_mib=args.memory_mib,
            parts=True,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _rows(
    candidate: Candidate, compiled: "Compiled", max_spills: int, seen: set[object]
) -> Iterator[_Row]:
    """The candidate's row, and those of parts that take what none before took."""
    from portable_backend.warmup.resources import over_limit

    device, key = DeviceInfo.for_arch(candidate.target), candidate.key
    parts = [_Row(candidate, key.kernel, compiled.readout, compiled.failure)]
    for kernel, other in compiled.others:
        number = 1 + sum(part.kernel == kernel for part in parts)
        failure = over_limit(other, device)
        parts.append(_Row(candidate, kernel, other, failure, number))
    for row in parts:
        readout, fields = row.readout, key.to_dict()
        if readout:
            taken = row.kernel, replace(readout, seconds=0.0)
            if row is not parts[0] and taken in seen:
                continue
            seen.add(taken)
        if readout and candidate.is_default and row.failure is None:
            place = candidate.target, row.kernel, fields
            row.failure = weakness(*place, readout, max_spills)
            expected = expected_spills(*place) if readout.spills else None
            if expected and not row.failure:
                row.expected = expected.reason
        yield row


def _compare(
    rows: Sequence[_Row], baseline: Baseline, toolchain: dict[str, Any]
) -> None:
    """Give rows a failure that have grown; say what cannot be compared."""
    unknown = 0
    said: set[str] = set()
    for row in rows:
        if row.readout is None or not row.candidate.is_default:
            continue
        target = row.candidate.target
        if why := baseline.other_tools(toolchain, target):
            said.add(f"not compared with the baseline: {why}")
        elif not baseline.knows(target, row.name):
            unknown += 1
        elif row.failure is None:
            row.failure = baseline.growth(target, row.name, row.readout)
    if unknown:
        said.add(f"{unknown} binaries are not in the baseline")
    for line in sorted(said):
        print(line, file=sys.stderr)


def _write_baseline(
    path: Path, rows: Sequence[_Row], toolchain: dict[str, Any]
) -> None:
    baseline = Baseline(toolchain["triton"])
    if path.exists():
        kept = Baseline.read(path)
        if kept.triton == baseline.triton:
            baseline = kept
    for target, version in toolchain["ptxas"].items():
        if baseline.ptxas.get(target, version) != version:
            baseline.held.pop(target, None)
        baseline.ptxas[target] = version
    for row in rows:
        if row.readout and row.candidate.is_default:
            held = baseline.held.setdefault(row.candidate.target, {})
            held[row.name] = held_of(row.readout)
    baseline.write(path)


def _progress(text: str | None) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text or ''}", end="", file=sys.stderr, flush=True)


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(result, indent=1))
        return
    rows = result["configs"]
    table = [tuple(title for title, _ in _COLUMNS), *map(_line, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
    for line in table:
        cells = [c.ljust(w) for c, w in zip(line, widths, strict=False)]
        print("  ".join([*cells, *line[len(widths) :]]).rstrip())
    failed = sum(row["failure"] is not None for row in rows)
    print(f"{len(rows)} binaries, {failed} failed, {result['seconds']:.0f} s")


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    remark = f"FAILED: {row['failure']}" if row["failure"] else row["expected"]
    return (*_cells(row), remark) if remark else _cells(row)


def _page(rows: list[dict[str, Any]]) -> str:
    titles = [*(title for title, _ in _COLUMNS[1:]), "remark"]
    tables: dict[str, list[tuple[bool, Sequence[str]]]] = {}
    for row in rows:
        remark = row["failure"] or row["expected"] or ""
        line = bool(row["failure"]), [*_cells(row)[1:], remark]
        tables.setdefault(row["target"], []).append(line)
    return page(titles, tables, _NOTE)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    readout = row["readout"] or {}
    shape = {n: v for n, v in row["key"].items() if LLAMA.get(n) != v}
    config = "default" if row["is_default"] else _text(row["config"])
    values = {
        "target": row["target"],
        "kernel": row["kernel"],
        "shape": _text(shape),
        "config": config,
        **readout,
    }
    if readout:
        values["seconds"] = f"{readout['seconds']:.1f}"
    return tuple(_cell(values.get(name)) for _, name in _COLUMNS)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _shape(candidate: Candidate) -> dict[str, Any]:
    """Fields in which a key is not Llama's."""
    fields = candidate.key.to_dict()
    return {name: value for name, value in fields.items() if LLAMA.get(name) != value}


def _text(values: dict[str, Any]) -> str:
    return " ".join(f"{n}={v}" for n, v in values.items() if v is not None)
