# SPDX-License-Identifier: Apache-2.0
"""`portable-backend cache`: records people can read, ship and review."""

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from portable_backend.commands import DONE, FAILED, UsageError
from portable_backend.commands.cache_list import list_line, list_rows
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import RecordError
from portable_backend.kernels.config import KernelConfig
from portable_backend.settings import Settings
from portable_backend.warmup.archive import archive_of, read_archive
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.layers import Layer, WritableLayer, why_no_folder
from portable_backend.warmup.lookup import Lookup, SpaceCheck
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.portfolio import Portfolio
from portable_backend.warmup.portfolio_files import merge_all, read_portfolios
from portable_backend.warmup.records import SCHEMA, TuningKey, TuningRecord
from portable_backend.warmup.store import USER_CACHE, RecordStore
from portable_backend.warmup.tables import NewerSchemaError, merge_records
from portable_backend.warmup.upkeep import Measurer, Verdict, prune, verify

# Measures a record; None: a process of its own does, on the GPU at hand.
MEASURER: Measurer | None = None
# Why today's space does not hold a config; None: what the kernels' own spaces say.
SPACE_CHECK: SpaceCheck | None = None


def add_parser(groups: Any) -> None:
    text = "tuning records: list, show, explain, ship and tidy them"
    group = groups.add_parser("cache", help=text, description=text)
    commands = group.add_subparsers(required=True, metavar="command")

    def add(name: str, func: Any, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=text
        )
        parser.set_defaults(func=func)
        option = parser.add_argument
        option("--cache-dir", type=Path, help="not PORTABLE_BACKEND_CACHE_DIR")
        option("--json", action="store_true", help="the result as JSON")
        return parser

    _add_filters(add("list", run_list, "files of every layer, and what is wrong"))
    parser = add("show", run_show, "every record that is served")
    parser.add_argument("--unmeasured", action="store_true", help="predictions too")
    _add_filters(parser)
    parser = add("explain", run_explain, "why a lookup gives what it gives")
    parser.add_argument("kernel")
    parser.add_argument("field", nargs="+", help="name=value, such as num_seqs=32")
    parser.add_argument("--gpu", help="canonical name (default: the GPU at hand)")
    parser.add_argument("--arch", help="its architecture, such as sm90; with --gpu")
    parser = add("export", run_export, "write records to one file to share")
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", action="store_true", help="read-only layers too")
    _add_filters(parser)
    parser = add("import", run_import, "merge an exported file into the user cache")
    parser.add_argument("file", type=Path)
    parser = add("merge", run_merge, "merge other cache folders into the user cache")
    parser.add_argument("folder", type=Path, nargs="+")
    parser = add("verify", run_verify, "check and measure the records again")
    parser.add_argument("--device", default="cuda:0", help="where (default: cuda:0)")
    _add_filters(parser)
    parser = add("prune", run_prune, "remove records that can no longer be used")
    parser.add_argument("--stale", action="store_true", help="of other kernel code")
    parser.add_argument(
        "--refuted", action="store_true", help="what verify said is wrong, to try anew"
    )
    parser.add_argument("--min-schema", type=int, help="files of an earlier schema")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--gpu", help="only this GPU")


def run_list(args: argparse.Namespace) -> int:
    rows = list_rows(_store(args).layers, functools.partial(_wanted, args))
    lines = [list_line(row) for row in rows]
    _print(args, rows, lines or ["no records in any layer"])
    return FAILED if any(row["problems"] for row in rows) else DONE


def run_show(args: argparse.Namespace) -> int:
    rows, lines, left_out = [], [], 0
    for layer in _store(args).layers:
        for record in _served(layer, args):
            # Of many GPUs: only what is asked for by name.
            if record.unmeasured is not None and not (args.unmeasured or args.gpu):
                left_out += 1
                continue
            place = {"layer": layer.name, "kernel": record.key.kernel}
            place |= {"gpu": record.gpu, "arch": record.arch}
            rows.append(place | record.to_dict())
            lines.append(_line(layer.name, record))
    none = "no records in any layer"
    if left_out:
        none = (
            f"nothing measured in any layer; --unmeasured shows {left_out} predictions"
        )
    _print(args, rows, lines or [none])
    return DONE


def run_explain(args: argparse.Namespace) -> int:
    # The default config is code, not a record, and left out.
    device = _device(args)
    lookup = Lookup(
        _store(args),
        _environment(args, device),
        lambda key: KernelConfig(()),
        space_check=SPACE_CHECK or _space_check(device),
    )
    explanation = lookup.explain(_key(args.kernel, args.field))
    _print(args, explanation.to_dict(), [str(explanation)])
    return DONE


def run_export(args: argparse.Namespace) -> int:
    store = _store(args)
    names = {layer.name for layer in store.layers if args.layers} | {USER_CACHE}
    layers = [layer for layer in store.layers if layer.name in names]
    records = [r for layer in layers for r in _records(layer, args)]
    portfolios = {
        (portfolio.kernel, portfolio.gpu): portfolio
        for kernel in dict.fromkeys(name for x in layers for name in x.kernels())
        for layer, portfolio in reversed(store.portfolios(kernel))
        if layer in names and _wanted(args, kernel, portfolio.gpu)
    }
    data = archive_of(records, portfolios.values()).to_bytes()
    args.file.write_bytes(data)
    result = {"file": str(args.file), "records": len(records), "bytes": len(data)}
    _print(args, result, [f"{args.file}: {len(records)} records, {len(data)} bytes"])
    return DONE


def run_import(args: argparse.Namespace) -> int:
    try:
        archive = read_archive(args.file)
    except NewerSchemaError:  # which says what to do
        raise
    except RecordError as error:
        remedy = "nothing was imported; copy or export it again"
        raise RecordError(f"{error}; {remedy}") from None
    layer = _user_cache(args, may_be_made=True)
    archive.merge_into(layer, _digests())
    _print_merged(args, layer, len(archive.records), len(archive.portfolios))
    return DONE


def _print_merged(
    args: argparse.Namespace,
    layer: Layer,
    records: int,
    portfolios: int,
    **more: object,
) -> None:
    result = {"cache_dir": str(layer.root), "records": records}
    result |= {"portfolios": portfolios} | more
    both = f" and {portfolios} portfolios" if portfolios else ""
    _print(args, result, [f"{records} records{both} merged into {layer.root}"])


def run_merge(args: argparse.Namespace) -> int:
    records: list[TuningRecord] = []
    portfolios: list[Portfolio] = []
    problems: list[str] = []
    for folder in args.folder:
        if not folder.is_dir():
            raise UsageError(f"{folder} must be a folder of records, and is none")
        source = Layer(str(folder), folder)
        for kernel in source.kernels():
            for held in source.load(kernel):
                records += held.records
                problems += held.problems
            for file in read_portfolios(source, kernel):
                portfolios += [] if file.portfolio is None else [file.portfolio]
                problems += [] if file.problem is None else [file.problem]
        problems += [p for p in source.unreadable.values() if p not in problems]
    layer = _user_cache(args, may_be_made=True)
    merge_all(layer, records, portfolios, _digests())
    _print_merged(args, layer, len(records), len(portfolios), problems=problems)
    return FAILED if problems else DONE


def run_verify(args: argparse.Namespace) -> int:
    layer = _user_cache(args)
    with _measurer(args.device) as measurer:
        verdicts = verify(
            layer, list(_served(layer, args)), measurer, on_verdict=_show_progress
        )
    failed = [verdict for verdict in verdicts if verdict.after is None]
    result = {
        "verified": len(verdicts) - len(failed),
        "dropped": [
            {"key": str(verdict.record.key), "problem": verdict.problem}
            for verdict in failed
        ],
    }
    lines = [f"dropped {v.record.key}: {v.problem}" for v in failed]
    last = f"{result['verified']} records verified"
    if not verdicts:
        last = f"nothing to verify: {layer.root} has no such records; tune or import"
    _print(args, result, [*lines, last])
    return FAILED if failed or not verdicts else DONE


@contextlib.contextmanager
def _measurer(device: str) -> Iterator[Measurer]:
    if MEASURER is not None:
        yield MEASURER
        return
    from portable_backend.warmup.measuring_process import MeasuringProcess
    from portable_backend.warmup.verifier import Verifier

    with Verifier(MeasuringProcess(device=device)) as verifier:
        yield verifier


def run_prune(args: argparse.Namespace) -> int:
    if not args.stale and not args.refuted and args.min_schema is None:
        raise UsageError(
            "prune must be told what to remove, got nothing; give --stale, --refuted, "
            "--min-schema or several"
        )
    if args.min_schema is not None and not 1 <= args.min_schema <= SCHEMA:
        raise UsageError(
            f"--min-schema must be 1 to {SCHEMA}, the schema that this version writes, "
            f"got {args.min_schema}; tables of a schema below it are removed"
        )
    removed, tables = prune(
        _user_cache(args),
        digests=current_digests() if args.stale else None,
        min_schema=args.min_schema,
        refuted=args.refuted,
        dry_run=args.dry_run,
    )
    verb = "would remove" if args.dry_run else "removed"
    result = {
        "dry_run": args.dry_run,
        "records": [{"gpu": r.gpu, "key": str(r.key)} for r in removed],
        "tables": tables,
    }
    lines = [f"{verb} {r.key} on {r.gpu}" for r in removed]
    lines += [f"{verb} {path}" for path in tables]
    lines.append(f"{verb} {len(removed)} records and {len(tables)} files")
    _print(args, result, lines)
    return DONE


def _show_progress(verdict: Verdict) -> None:
    state = "verified" if verdict.after else f"dropped: {verdict.problem}"
    print(f"{verdict.record.key}: {state}", file=sys.stderr)


def _store(args: argparse.Namespace) -> RecordStore:
    settings = _settings()
    store = RecordStore.open(_cache_dir(args, settings), settings.cache_layers)
    _check_kernel(args, store.layers)
    return store


def _check_kernel(args: argparse.Namespace, layers: Iterable[Layer]) -> None:
    """Refuse a kernel that is none of ours and of which nobody has records."""
    given = getattr(args, "kernel", None)
    known = {kernel for layer in layers for kernel in layer.kernels()}
    if given is None or given in known:
        return
    try:
        from portable_backend.warmup.kernel_specs import KERNEL_SPECS
    except ImportError:
        return
    known |= KERNEL_SPECS.keys()
    if given not in known:
        names = ", ".join(sorted(known))
        raise UsageError(f"kernel must be one of {names}, got {given}; correct it")


def _settings() -> Settings:
    try:
        return Settings.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _user_cache(
    args: argparse.Namespace, *, may_be_made: bool = False
) -> WritableLayer:
    folder = _cache_dir(args, _settings(), may_be_made=may_be_made)
    layer = WritableLayer(USER_CACHE, folder)
    _check_kernel(args, [layer])
    return layer


def _cache_dir(
    args: argparse.Namespace, settings: Settings, *, may_be_made: bool = False
) -> Path:
    """The user's cache; one that is named has to exist, unless it may be made."""
    folder: Path = args.cache_dir or settings.cache_dir
    is_named = args.cache_dir is not None
    problem = why_no_folder(folder)
    if problem and (os.path.exists(folder) or (is_named and not may_be_made)):
        name = "--cache-dir" if is_named else "PORTABLE_BACKEND_CACHE_DIR"
        raise UsageError(
            f"{name} must be a folder of records, but {folder} {problem}; "
            "let it name another"
        )
    return folder


def _wanted(args: argparse.Namespace, kernel: str, gpu: str) -> bool:
    return args.kernel in (None, kernel) and args.gpu in (None, gpu)


def _files(layer: Layer, args: argparse.Namespace) -> Iterable[tuple[str, str]]:
    for kernel in layer.kernels():
        for gpu in layer.gpus(kernel):
            if _wanted(args, kernel, gpu):
                yield kernel, gpu


def _records(layer: Layer, args: argparse.Namespace) -> Iterable[TuningRecord]:
    for kernel, gpu in _files(layer, args):
        yield from layer.load_file(kernel, gpu).records


def _served(layer: Layer, args: argparse.Namespace) -> tuple[TuningRecord, ...]:
    return merge_records(_records(layer, args)).served


def _key(kernel: str, fields: list[str]) -> TuningKey:
    values: dict[str, int | str] = {}
    for text in fields:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"a field must be name=value, got {text}")
        values[name] = int(value) if value.lstrip("-").isdecimal() else value
    try:
        return TuningKey.from_dict(kernel, values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _device(args: argparse.Namespace) -> DeviceInfo | None:
    """The GPU at hand or the one named; None where its architecture is not known."""
    if bool(args.gpu) != bool(args.arch):
        raise UsageError("--gpu and --arch must be given together")
    if args.gpu is not None:
        if args.arch not in ARCH_LIMITS:
            return None
        # One unit: the bounds that need more of them are left out.
        return DeviceInfo(args.gpu, args.arch, 1, ARCH_LIMITS[args.arch])
    try:
        return DeviceInfo.detect("cuda")
    except (ImportError, RuntimeError, AssertionError) as error:
        raise UsageError(f"no GPU here ({error}); give --gpu and --arch") from None


def _digests() -> dict[str, str] | None:
    try:
        return current_digests()
    except RecordError as error:
        print(f"kernel_digest is not compared: {error}", file=sys.stderr)
        return None


def _environment(args: argparse.Namespace, device: DeviceInfo | None) -> Environment:
    digests = _digests()
    gpu, arch = (device.name, device.arch) if device else (args.gpu, args.arch)
    # A GPU that is only named has no known number of units.
    units = device.num_units if device and args.gpu is None else None
    return Environment(gpu, arch, digests, current_toolchain(), units)


def _space_check(device: DeviceInfo | None) -> SpaceCheck | None:
    if device is None:
        print("configs are not checked: arch is not known here", file=sys.stderr)
        return None
    try:
        from portable_backend.warmup.space_check import space_check
    except ImportError as error:
        print(f"configs are not checked: {error}", file=sys.stderr)
        return None
    return space_check(device)


def _line(layer: str, record: TuningRecord) -> str:
    config = " ".join(f"{name}={value}" for name, value in record.config.items_)
    if record.unmeasured is not None:
        told = record.unmeasured
        serves = "serves" if told["serves"] else "the default stays"
        why = f" ({told['reason']})" if told.get("reason") else ""
        return (
            f"{layer}  {record.gpu}  {record.key}: unmeasured, predicted from "
            f"{told['basis']}, {serves}{why}, {config}"
        )
    state = "verified" if record.verified else "not verified"
    gain = ""
    if record.default_us:
        gain = f", default {record.default_us:g} us"
    return (
        f"{layer}  {record.gpu}  {record.key}: {record.time_us:g} us{gain}, {state}, "
        f"{config}"
    )


def _print(args: argparse.Namespace, result: object, lines: Iterable[str]) -> None:
    text = json.dumps(result, indent=1) if args.json else "\n".join(lines)
    print(text)
