# SPDX-License-Identifier: Apache-2.0
"""`portable-backend warm`: compile all that a model needs into a cache to carry."""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.commands import DONE, FAILED, UsageError
from portable_backend.commands.tune import LIMITS, _count, _positive
from portable_backend.device import DeviceInfo, interpreting
from portable_backend.settings import Settings

if TYPE_CHECKING:
    from portable_backend.warmup.binary import Binary
    from portable_backend.warmup.buckets import EngineLimits
    from portable_backend.warmup.lookup import Lookup
    from portable_backend.warmup.model_shapes import ModelShape
    from portable_backend.warmup.model_traits import ModelTraits
    from portable_backend.warmup.warming import Warmed

SCHEMA = 1


@dataclass(frozen=True)
class _Target:
    """An architecture, and the devices whose binaries it needs."""

    arch: str
    devices: "list[DeviceInfo]"


def add_parser(groups: Any) -> None:
    text = "compile everything a model needs into a Triton cache that can be carried"
    parser = groups.add_parser(
        "warm",
        help=text,
        description=text,
        epilog="Serve with TRITON_CACHE_DIR set to that folder, the same Triton and "
        "the same engine options. A folder that was moved is mended by --relocate.",
    )
    parser.set_defaults(func=run)
    what = parser.add_argument_group("what to compile").add_argument
    what("--model", metavar="DIR_OR_ID", help="model folder, config.json or hub id")
    what("--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="N")
    what("--dtype", help="the engine's, where it is not the model's")
    what("--max-num-seqs", type=_positive, metavar="N", help="as the engine's")
    what("--max-num-batched-tokens", type=_positive, metavar="N", help="likewise")
    what("--max-model-len", type=_positive, metavar="N", help="likewise")
    what("--block-size", type=_positive, metavar="N", help="likewise")
    what("--speculative-tokens", type=_count, metavar="N", help="likewise")
    what(
        "--target",
        metavar="ARCH,...",
        help="such as sm90,gfx942, or all (default: the GPU at hand)",
    )
    how = parser.add_argument_group("how and where").add_argument
    how(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="Triton cache to fill (default: TRITON_CACHE_DIR, or Triton's own)",
    )
    how(
        "--mount-at",
        type=Path,
        metavar="DIR",
        help="where the folder will lie when it is used, if elsewhere",
    )
    how(
        "--relocate",
        action="store_true",
        help="compile nothing: only make --cache-dir fit the place where it lies",
    )
    how("--workers", type=_positive, metavar="N", help="processes (default: CPUs)")
    how(
        "--limit-s",
        type=_positive,
        default=300,
        metavar="S",
        help="for one binary (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the binaries")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.relocate:
        return _relocate(args)
    started = time.monotonic()
    model, traits, limits = _needs(args)
    targets = _targets(args.target)
    folder = _cache_dir(args)
    if not args.dry_run:
        _prepare(folder)
    rows = [_warm(args, target, model, traits, limits) for target in targets]
    result = {
        "schema": SCHEMA,
        "dry_run": args.dry_run,
        "model": model.name,
        "cache_dir": str(folder),
        "mount_at": None if args.mount_at is None else str(args.mount_at),
        "targets": rows,
        "seconds": round(time.monotonic() - started, 3),
    }
    if not args.dry_run:
        from portable_backend.warmup.triton_cache import relocate, size_bytes

        if args.mount_at is not None:
            relocate(folder, args.mount_at)
        result["bytes"] = size_bytes(folder)
    _print(args, result, _lines(args, result))
    return FAILED if any(row["failures"] for row in rows) else DONE


def _check(args: argparse.Namespace) -> None:
    if args.relocate:
        if args.model is not None or args.cache_dir is None:
            raise UsageError("--relocate needs --cache-dir, and takes no --model")
        return
    if args.model is None:
        raise UsageError("say what to compile: --model")
    if args.mount_at is not None and args.cache_dir is None:
        raise UsageError(
            "--mount-at needs --cache-dir: what lies in your own cache stays in use"
        )
    if args.mount_at is not None and not args.mount_at.is_absolute():
        raise UsageError(f"--mount-at must be an absolute path, got {args.mount_at}")
    if interpreting():
        raise UsageError(
            "Triton's interpreter compiles nothing; unset TRITON_INTERPRET"
        )


def _relocate(args: argparse.Namespace) -> int:
    from portable_backend.warmup.triton_cache import relocate

    try:
        changed = relocate(args.cache_dir, args.mount_at)
    except ValueError as error:
        raise UsageError(str(error)) from None
    place = (args.mount_at or args.cache_dir).absolute()
    result = {"schema": SCHEMA, "cache_dir": str(args.cache_dir), "relocated": changed}
    _print(args, result, [f"{changed} entries now lie in {place}"])
    return DONE


def _needs(
    args: argparse.Namespace,
) -> "tuple[ModelShape, ModelTraits, EngineLimits]":
    from portable_backend.warmup.buckets import EngineLimits
    from portable_backend.warmup.model_shapes import read_model
    from portable_backend.warmup.model_traits import read_traits

    given = {name: getattr(args, name) for name in LIMITS}
    try:
        model = read_model(
            args.model, tensor_parallel_size=args.tensor_parallel_size, dtype=args.dtype
        )
        limits = EngineLimits(**{n: v for n, v in given.items() if v is not None})
        return model, read_traits(args.model), limits
    except ValueError as error:
        raise UsageError(str(error)) from None


def _targets(text: str | None) -> list[_Target]:
    from portable_backend.warmup.targets import TARGETS, devices_of

    if text is None:
        try:
            device = DeviceInfo.detect("cuda")
        except (ImportError, RuntimeError, AssertionError) as error:
            raise UsageError(f"no GPU here ({error}); give --target") from None
        return [_Target(device.arch, [device])]
    # Vendors write sm_90.
    names = [name.strip().replace("sm_", "sm") for name in text.split(",")]
    if names == ["all"]:
        names = list(TARGETS)
    for name in names:
        if name not in TARGETS:
            raise UsageError(
                f"--target must be all or some of {', '.join(TARGETS)}, got {name}"
            )
    return [_Target(name, devices_of(name)) for name in dict.fromkeys(names)]


def _cache_dir(args: argparse.Namespace) -> Path:
    """The Triton cache, for this process and its workers."""
    if args.cache_dir is not None:
        folder = args.cache_dir
    else:
        from triton import knobs

        folder = Path(knobs.cache.dir)
    folder = folder.expanduser().absolute()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return Path(folder)


def _prepare(folder: Path) -> None:
    from portable_backend.warmup.triton_cache import relocate

    folder.mkdir(parents=True, exist_ok=True)
    relocate(folder)  # else entries made for another place are compiled anew


def _warm(
    args: argparse.Namespace,
    target: _Target,
    model: "ModelShape",
    traits: "ModelTraits",
    limits: "EngineLimits",
) -> dict[str, Any]:
    from portable_backend.warmup.tuning_tools import available_cpus
    from portable_backend.warmup.warming import warm_binaries

    binaries = _binaries(target, model, traits, limits)
    row: dict[str, Any] = {
        "target": target.arch,
        "units": [device.num_units for device in target.devices],
        "binaries": len(binaries),
    }
    if args.dry_run:
        return row | {"list": [str(binary) for binary in binaries], "failures": []}

    def show(warmed: "Warmed", total: int) -> None:
        _progress(f"{target.arch}: {warmed.binaries} of {total} binaries")

    workers = args.workers or available_cpus()
    warmed = warm_binaries(
        binaries,
        target.devices[0],
        workers=workers,
        limit_s=args.limit_s,
        on_done=show,
    )
    _progress(None)
    return row | {
        "compiled": warmed.compiled,
        "present": warmed.present,
        "failures": [
            {"binary": str(binary), "reason": reason}
            for binary, reason in warmed.failures
        ],
        "seconds": round(warmed.seconds, 3),
    }


def _binaries(
    target: _Target, model: "ModelShape", traits: "ModelTraits", limits: "EngineLimits"
) -> "list[Binary]":
    """What any of the target's devices needs, with defaults and what records give."""
    from portable_backend.warmup.binaries import binaries_of
    from portable_backend.warmup.serving_configs import ServingConfigs

    found: dict[Binary, None] = {}
    for device in target.devices:
        for lookup in _lookups(device):
            configs = ServingConfigs(model, limits, device, lookup)
            found |= dict.fromkeys(binaries_of(model, traits, limits, device, configs))
    return list(found)


def _lookups(device: DeviceInfo) -> "list[Lookup]":
    """Of a GPU, or, for an architecture, of every GPU that has records."""
    from portable_backend.warmup.digest import current_digests
    from portable_backend.warmup.kernel_specs import spec_of
    from portable_backend.warmup.lookup import Lookup
    from portable_backend.warmup.matching import Environment, current_toolchain
    from portable_backend.warmup.space_check import space_check
    from portable_backend.warmup.store import RecordStore

    try:
        settings = Settings.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from None
    store = RecordStore.open(settings.cache_dir, settings.cache_layers)
    gpus = [device.name]
    if device.name == device.arch:
        gpus += [
            record.gpu
            for kernel in store.kernels()
            for _, record in store.records(kernel)
            if record.arch == device.arch
        ]
    digests, toolchain = current_digests(), current_toolchain()
    return [
        Lookup(
            store,
            Environment(gpu, device.arch, digests, toolchain, device.num_units),
            lambda key: spec_of(key).default(key, device),
            space_check=space_check(device),
        )
        for gpu in dict.fromkeys(gpus)
    ]


def _lines(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["targets"]:
        lines += row.get("list", [])
        lines += [
            f"FAILED {item['binary']}: {item['reason']}" for item in row["failures"]
        ]
        text = f"{row['target']}: {row['binaries']} binaries"
        if not args.dry_run:
            text += f", {row['compiled']} compiled, {row['present']} already there"
            text += f", {len(row['failures'])} failed in {row['seconds']:.1f} s"
        lines.append(text)
    if not args.dry_run:
        place = args.mount_at or result["cache_dir"]
        lines.append(f"{result['bytes'] / 1e6:.1f} MB; TRITON_CACHE_DIR={place}")
    return lines


def _progress(text: str | None) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text or ''}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _print(args: argparse.Namespace, result: object, lines: list[str]) -> None:
    print(json.dumps(result, indent=1) if args.json else "\n".join(lines))
