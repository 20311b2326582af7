# SPDX-License-Identifier: Apache-2.0
"""`portable-backend compile`: every kernel for GPUs that are not at hand."""

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.commands import DONE, FAILED, UsageError
from portable_backend.commands.compile_page import page
from portable_backend.device import ARCH_LIMITS, DeviceInfo

if TYPE_CHECKING:
    from portable_backend.kernels.config import KernelConfig
    from portable_backend.warmup.compile_pool import Compiled
    from portable_backend.warmup.records import TuningKey
    from portable_backend.warmup.resources import Readout

TARGETS = tuple(arch for arch in ARCH_LIMITS if arch != "interpreter")
_KERNELS = ("prefill", "decode", "rms_norm", "kv_cache")
_LLAMA: dict[str, int | str] = {
    "dtype": "bfloat16",
    "head_size": 128,
    "num_kv_heads": 8,
    "num_queries_per_kv": 4,
    "sliding_window": 0,
    "row_size": 4096,
}
# Sizes of the default keys: each names a step whose default config differs somewhere.
_STEPS: dict[str, tuple[dict[str, int], ...]] = {
    "prefill": (
        {"num_seqs": 2, "query_len": 2048, "context_len": 0, "no_context": 1},
        {"num_seqs": 2, "query_len": 2048, "context_len": 4096, "no_context": 0},
    ),
    "decode": tuple(
        {"num_seqs": n, "query_len": 1, "seq_len": 4096} for n in (1, 32, 256)
    ),
    "rms_norm": tuple(
        {"fused_add": fused, "num_rows": rows}
        for fused in (0, 1)
        for rows in (16, 2048, 8192)
    ),
    "kv_cache": ({"num_tokens": 256}, {"num_tokens": 8192}),
}
_BLOCK_SIZES = (16, 64)
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
    "matrix: matrix instructions in them; load: bytes of the widest load of a lane."
)


@dataclass(frozen=True)
class _Candidate:
    target: str
    key: "TuningKey"
    config: "KernelConfig"
    is_default: bool


def add_parser(groups: Any) -> None:
    text = "compile kernels for GPUs that are not at hand, and show what they take"
    parser = groups.add_parser(
        "compile",
        help=text,
        description=text,
        epilog=f"{_NOTE} Exit code 1: something does not compile or exceeds a limit, "
        "or a default spills, loads nothing or less than 16 bytes at once, or "
        "multiplies 16-bit elements without matrix instructions.",
    )
    parser.set_defaults(func=run)
    option = parser.add_argument
    option(
        "--target",
        default="all",
        metavar="ARCH,...",
        help=f"all (the default), or some of {', '.join(TARGETS)}",
    )
    option("--kernel", action="append", choices=_KERNELS, help="only these")
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
        help="also N configs of each space, always the same (default: defaults only)",
    )
    option("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    option("--limit-s", type=float, default=60.0, metavar="S", help="for one config")
    option("--memory-mib", type=int, metavar="N", help="of one worker (default: any)")
    option(
        "--max-spills",
        type=int,
        default=8,
        metavar="N",
        help="of a default; with a cap on registers a few are intended (default: 8)",
    )
    option("--json", action="store_true", help="the result as JSON")
    option("--html", type=Path, metavar="FILE", help="the result as a page, too")


def run(args: argparse.Namespace) -> int:
    from portable_backend.warmup.compile_pool import CompilePool

    if args.max_spills < 0:
        raise UsageError(f"--max-spills must be 0 or more, got {args.max_spills}")
    if args.html and not args.html.absolute().parent.is_dir():
        folder = args.html.absolute().parent
        raise UsageError(f"--html: {folder} is no folder; make it first")
    targets = _targets(args.target)
    given = _fields(args.key)
    kernels = args.kernel or _KERNELS
    rows: list[dict[str, Any]] = []
    for target in targets:
        device = DeviceInfo.for_arch(target)
        candidates = list(_candidates(device, kernels, given, args.sample))
        try:
            pool = CompilePool(
                device,
                workers=args.workers,
                limit_s=args.limit_s,
                memory_mib=args.memory_mib,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        with pool:
            for candidate in candidates:
                pool.submit(candidate.key, [candidate.config])
            for done, candidate in enumerate(candidates, 1):
                (compiled,) = pool.wait(candidate.key, [candidate.config])
                rows.append(_row(candidate, compiled, args.max_spills))
                _progress(f"{target}: {done} of {len(candidates)}")
    _progress(None)
    _print(args, rows)
    if args.html:
        args.html.write_text(_page(rows), encoding="utf-8")
    return FAILED if any(row["failure"] for row in rows) else DONE


def _targets(text: str) -> list[str]:
    if text == "all":
        return list(TARGETS)
    # Vendors write sm_90.
    names = [name.strip().replace("sm_", "sm") for name in text.split(",")]
    for name in names:
        if re.fullmatch(r"sm[5-7]\d", name):
            raise UsageError(
                f"--target {name} is refused: kernels need compute capability 8.0 or "
                "later, for bf16 and asynchronous copies"
            )
        if name not in TARGETS:
            raise UsageError(
                f"--target must be all or some of {', '.join(TARGETS)}, got {name}"
            )
    return list(dict.fromkeys(names))


def _fields(texts: list[str]) -> dict[str, int | str]:
    fields: dict[str, int | str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--key must be FIELD=VALUE, got {text}")
        is_number = value.removeprefix("-").isdecimal()
        fields[name] = int(value) if is_number else value
    return fields


def _keys(
    kernels: tuple[str, ...] | list[str], given: dict[str, int | str]
) -> "Iterator[TuningKey]":
    """The keys of each kernel: Llama's, with what is given in place of it.

    Raises:
        UsageError: no kernel asked for has such a field, or it takes no such value.
    """
    from portable_backend.warmup.kernel_specs import KERNEL_SPECS, spec_of
    from portable_backend.warmup.records import TuningKey
    from portable_backend.warmup.units import check_fields

    known = {name for kernel in kernels for name in KERNEL_SPECS[kernel].fields}
    if unknown := sorted(given.keys() - known):
        raise UsageError(
            f"--key must name one of {', '.join(sorted(known))}, got {unknown[0]}"
        )
    for kernel in kernels:
        names = KERNEL_SPECS[kernel].fields
        found: dict[TuningKey, None] = {}
        for block_size in _BLOCK_SIZES:
            for sizes in _STEPS[kernel]:
                fields = _LLAMA | {"block_size": block_size} | sizes | given
                if kernel == "prefill" and "no_context" not in given:
                    fields["no_context"] = int(fields["context_len"] == 0)
                try:
                    key = TuningKey.of(kernel, **{name: fields[name] for name in names})
                    spec_of(key)
                    check_fields(key, f"{kernel} key")
                except ValueError as error:
                    raise UsageError(f"--key: {error}") from None
                found[key] = None
        yield from found


def _candidates(
    device: DeviceInfo,
    kernels: tuple[str, ...] | list[str],
    given: dict[str, int | str],
    sample: int,
) -> Iterator[_Candidate]:
    from portable_backend.warmup.kernel_specs import spec_of

    if sample < 0:
        raise UsageError(f"--sample must be 0 or more, got {sample}")
    for key in _keys(kernels, given):
        spec = spec_of(key)
        try:
            default = spec.default(key, device)
            rng = random.Random(f"{device.arch} {key}")
            drawn = spec.bound(key, device).sample(sample, rng)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--key: {error}") from None
        for config in dict.fromkeys([default, *drawn]):
            yield _Candidate(device.arch, key, config, config == default)


def _row(
    candidate: _Candidate, compiled: "Compiled", max_spills: int
) -> dict[str, Any]:
    failure, readout = compiled.failure, compiled.readout
    spills = (readout.spills if readout else None) or 0
    if failure is None and candidate.is_default and spills > max_spills:
        failure = f"the default spills {spills} registers"
    if failure is None and candidate.is_default and readout is not None:
        failure = _weakness(candidate.key.to_dict(), candidate.key.kernel, readout)
    return {
        "target": candidate.target,
        "kernel": candidate.key.kernel,
        "key": candidate.key.to_dict(),
        "config": candidate.config.to_dict(),
        "is_default": candidate.is_default,
        "readout": vars(readout) if readout else None,
        "failure": failure,
    }


def _weakness(fields: dict[str, Any], kernel: str, readout: "Readout") -> str | None:
    """What no default may lack, where its code was read."""
    width = readout.load_bytes
    if width == 0:
        return "the default loads nothing"
    if kernel not in ("prefill", "decode") or fields["dtype"] == "float32":
        return None
    if readout.matrix_instructions == 0:
        return "the default has no matrix instructions"
    if width is not None and width < 16 and fields["head_size"] % 64 == 0:
        return f"the default loads {width} bytes at once at most, 16 are expected"
    return None


def _progress(text: str | None) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text or ''}", end="", file=sys.stderr, flush=True)


def _print(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    table = [tuple(title for title, _ in _COLUMNS), *map(_cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
    for line in table:
        cells = [c.ljust(w) for c, w in zip(line, widths, strict=False)]
        print("  ".join([*cells, *line[len(widths) :]]).rstrip())
    failed = sum(row["failure"] is not None for row in rows)
    print(f"{len(rows)} configs, {failed} failed")


def _page(rows: list[dict[str, Any]]) -> str:
    titles = [*(title for title, _ in _COLUMNS[1:]), "failure"]
    tables: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        cells = _cells(row | {"failure": None})[1:]
        tables.setdefault(row["target"], []).append([*cells, row["failure"] or ""])
    return page(titles, tables, _NOTE)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    readout = row["readout"] or {}
    shape = {n: v for n, v in row["key"].items() if _LLAMA.get(n) != v}
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
    cells = [_cell(values.get(name)) for _, name in _COLUMNS]
    return (*cells, f"FAILED: {row['failure']}") if row["failure"] else tuple(cells)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _text(values: dict[str, Any]) -> str:
    return " ".join(f"{n}={v}" for n, v in values.items() if v is not None)
