# SPDX-License-Identifier: Apache-2.0
"""`portable-backend tune`: tune for this GPU, ahead of deployment."""

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.commands import DONE, FAILED, INTERRUPTED, UsageError
from portable_backend.settings import Settings

if TYPE_CHECKING:
    from portable_backend.warmup.store import RecordStore
    from portable_backend.warmup.tools import Recipe, Tools
    from portable_backend.warmup.tuned_portfolios import Written
    from portable_backend.warmup.tuning_options import TuneOptions
    from portable_backend.warmup.tuning_report import Event, Outcome, Task

SCHEMA = 1
# Those of warmup.strategies, which need not be imported to print the help.
STRATEGIES = ("auto", "bayesian", "evolutionary", "exhaustive", "halving", "random")
LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "speculative_tokens",
)
TRIALS, PATIENCE, CANDIDATES = 128, 48, 2048


def add_parser(groups: Any) -> None:
    text = "tune for this GPU, ahead of deployment"
    parser = groups.add_parser("tune", help=text, description=text)
    parser.set_defaults(func=run)
    what = parser.add_argument_group("what to tune").add_argument
    what("--model", metavar="DIR_OR_ID", help="model folder, config.json or hub id")
    what("--shapes", type=Path, metavar="FILE", help="JSON list of keys")
    what("--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="N")
    what("--dtype", help="the engine's, where it is not the model's")
    what("--max-num-seqs", type=_positive, metavar="N", help="as the engine's")
    what("--max-num-batched-tokens", type=_positive, metavar="N", help="likewise")
    what("--max-model-len", type=_positive, metavar="N", help="likewise")
    what("--block-size", type=_positive, metavar="N", help="likewise")
    what("--speculative-tokens", type=_count, metavar="N", help="likewise")
    what("--again", action="store_true", help="also what has a record already")
    how = parser.add_argument_group("how").add_argument
    how("--budget-s", type=_seconds, metavar="S", help="seconds overall")
    how("--trials", type=_positive, metavar="N", help=f"per unit (default: {TRIALS})")
    how(
        "--patience",
        type=_positive,
        metavar="N",
        help=f"stop after so many in vain (default: {PATIENCE})",
    )
    how(
        "--candidates",
        type=_positive,
        metavar="N",
        help=f"search the N best by estimate (default: {CANDIDATES})",
    )
    how("--strategy", choices=STRATEGIES, default="auto", help="(default: %(default)s)")
    how("--seed", type=int, default=0, help="(default: %(default)s)")
    how("--no-model", action="store_true", help="do not prune by the resource model")
    how("--no-warm-start", action="store_true", help="ignore what was tuned before")
    where = parser.add_argument_group("where").add_argument
    where("--gpus", metavar="all|0,1", help="GPUs of this host (default: the first)")
    where(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="on the GPUs of a Ray cluster: that at ADDRESS, the one at hand, or new",
    )
    where("--workers", type=_positive, metavar="N", help="processes that compile")
    where("--replay", type=Path, metavar="FOLDER", help="recorded sweeps, not a GPU")
    where("--arch", help="with --dry-run, where there is no GPU: such as sm90")
    where("--cache-dir", type=Path, help="not PORTABLE_BACKEND_CACHE_DIR")
    parser.add_argument("--dry-run", action="store_true", help="only say what it takes")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(args: argparse.Namespace) -> int:
    _check(args)
    recipe, options = _recipe(args), _options(args)
    tasks = _tasks(args)
    if args.dry_run:
        return _dry_run(args, tasks, recipe, options)
    from portable_backend.commands.tune_progress import make_progress

    settings = _settings()
    # Workers have working directories of their own.
    cache_dir = (args.cache_dir or settings.cache_dir).absolute()
    started = time.monotonic()
    with make_progress(len(tasks), options.trials, sys.stderr) as on_event:
        outcomes = _tune(args, tasks, recipe, options, cache_dir, on_event)
    seconds = time.monotonic() - started
    portfolios = _portfolios(outcomes, cache_dir)
    _print_outcomes(args, outcomes, portfolios, options, cache_dir, seconds)
    states = Counter(outcome.state for outcome in outcomes)
    if states["interrupted"] or any(o.reason == "interrupted" for o in outcomes):
        print("interrupted; run it again to go on", file=sys.stderr)
        return INTERRUPTED
    return FAILED if states["failed"] or portfolios is None else DONE


def _portfolios(
    outcomes: "Sequence[Outcome]", cache_dir: Path
) -> "list[Written] | None":
    """Write them; None, with a line on stderr, where that cannot be done."""
    from portable_backend.warmup.layers import WritableLayer
    from portable_backend.warmup.store import USER_CACHE, RecordStore
    from portable_backend.warmup.tuned_portfolios import write_portfolios

    store = RecordStore.open(cache_dir, _settings().cache_layers)
    try:
        return write_portfolios(outcomes, store, WritableLayer(USER_CACHE, cache_dir))
    except (OSError, NotImplementedError, ImportError) as error:
        print(f"no portfolio could be written: {error}", file=sys.stderr)
        return None


def _tune(
    args: argparse.Namespace,
    tasks: "Sequence[Task]",
    recipe: "Recipe",
    options: "TuneOptions",
    cache_dir: Path,
    on_event: "Callable[[Event], None]",
) -> "list[Outcome]":
    from portable_backend.warmup.store import RecordStore
    from portable_backend.warmup.tuner import Tuner, tune

    layers = _settings().cache_layers
    store = RecordStore.open(cache_dir, layers)
    if args.ray is not None:
        return _tune_on_ray(args, tasks, recipe, options, store, cache_dir, on_event)
    if args.gpus is not None:
        from portable_backend.warmup.spread import GpuCrew, spread

        crew = GpuCrew(
            _gpus(args), recipe, options, cache_dir=cache_dir, cache_layers=layers
        )
        with contextlib.closing(crew):
            return spread(tasks, crew, budget_s=args.budget_s, on_event=on_event)
    with Tuner(recipe, store, options, log_root=cache_dir, on_event=on_event) as tuner:
        return tune(tasks, tuner, budget_s=args.budget_s)


def _tune_on_ray(
    args: argparse.Namespace,
    tasks: "Sequence[Task]",
    recipe: "Recipe",
    options: "TuneOptions",
    store: "RecordStore",
    cache_dir: Path,
    on_event: "Callable[[Event], None]",
) -> "list[Outcome]":
    from portable_backend.warmup.ray_crew import RayCrew
    from portable_backend.warmup.spread import spread

    crew = RayCrew(
        args.ray,
        recipe,
        options,
        store=store,
        log_root=cache_dir,
        num_gpus=0 if args.replay else 1,
    )
    with contextlib.closing(crew), store:
        return spread(
            tasks,
            crew,
            budget_s=args.budget_s,
            on_event=on_event,
            on_outcome=crew.merge,
        )


def _check(args: argparse.Namespace) -> None:
    given = [args.model is not None, args.shapes is not None]
    if all(given):
        raise UsageError("give --model or --shapes, not both")
    if not any(given) and args.replay is None:
        raise UsageError("say what to tune: --model, --shapes or --replay")
    if args.gpus is not None and args.ray is not None:
        raise UsageError("give --gpus or --ray, not both")
    if args.gpus is not None:
        _gpu_numbers(args.gpus)
    if args.replay is not None and args.cache_dir is None and not args.dry_run:
        raise UsageError(
            "--replay needs --cache-dir: what comes of it is no measurement of this GPU"
        )
    if args.arch is not None and not args.dry_run:
        raise UsageError("--arch goes with --dry-run: tuning needs the GPU itself")


def _recipe(args: argparse.Namespace) -> "Recipe":
    from portable_backend.warmup.tuning_tools import (
        available_cpus,
        gpu_recipe,
        replay_recipe,
    )

    if args.replay is not None:
        return replay_recipe(args.replay.absolute())
    workers = args.workers
    if workers is None and args.gpus is not None and not args.dry_run:
        workers = max(1, available_cpus() // len(_gpus(args)))
    return gpu_recipe(workers=workers, resource_model=not args.no_model)


def _options(args: argparse.Namespace) -> "TuneOptions":
    from portable_backend.warmup.tuning_options import TuneOptions

    trials, patience, candidates = args.trials, args.patience, args.candidates
    if args.strategy != "exhaustive":  # which tries everything unless told
        trials, patience = trials or TRIALS, patience or PATIENCE
        candidates = candidates or CANDIDATES
    return TuneOptions(
        strategy=args.strategy,
        seed=args.seed,
        trials=trials,
        candidates=candidates,
        patience=patience,
        warm_start=not args.no_warm_start,
        again=args.again,
    )


def _tasks(args: argparse.Namespace) -> "list[Task]":
    from portable_backend.warmup.tuning_tools import tasks_of, tasks_of_sweeps
    from portable_backend.warmup.units import check_fields, read_shapes

    tasks: list[Task] | None = None
    try:
        if args.model is not None:
            tasks = tasks_of(_units_of_model(args))
        elif args.shapes is not None:
            tasks = tasks_of(read_shapes(args.shapes))
        if args.replay is not None:
            recorded = tasks_of_sweeps(args.replay)
            if tasks is None:
                return recorded
            keys = {task.key for task in recorded}
            tasks = [task for task in tasks if task.key in keys]
        for task in () if args.replay is not None or tasks is None else tasks:
            check_fields(task.key, args.model or str(args.shapes))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    if not tasks:
        raise UsageError("there is nothing to tune")
    return tasks


def _units_of_model(args: argparse.Namespace) -> Any:
    from portable_backend.warmup.model_shapes import read_model
    from portable_backend.warmup.units import EngineLimits, units_of

    limits = {name: getattr(args, name) for name in LIMITS}
    given = {name: value for name, value in limits.items() if value is not None}
    model = read_model(
        args.model, tensor_parallel_size=args.tensor_parallel_size, dtype=args.dtype
    )
    return units_of(model, EngineLimits(**given))


def _gpus(args: argparse.Namespace) -> list[str]:
    """The chosen GPUs as CUDA_VISIBLE_DEVICES has them."""
    from portable_backend.warmup.spread import visible_gpus

    chosen = _gpu_numbers(args.gpus)
    if args.replay is not None:  # no GPU is asked, so there may be any number
        return ["0", "1"] if chosen is None else [str(n) for n in chosen]
    import torch

    visible = visible_gpus(torch.cuda.device_count())
    if chosen is None and visible:
        return visible
    if chosen is None or not set(chosen) <= {*range(len(visible))}:
        known = ", ".join(map(str, range(len(visible)))) or "none: no GPU is seen"
        raise UsageError(
            f"--gpus must be all or some of {known}, got {args.gpus}; "
            "`portable-backend doctor` says what is seen"
        )
    return [visible[n] for n in chosen]


def _gpu_numbers(text: str) -> list[int] | None:
    """The numbers of --gpus; None for all."""
    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if len(set(numbers)) < len(parts):
        raise UsageError(
            f"--gpus must be all, or numbers such as 0,1, got {text}; "
            "name each GPU once"
        )
    return numbers


def _dry_run(
    args: argparse.Namespace,
    tasks: "Sequence[Task]",
    recipe: "Recipe",
    options: "TuneOptions",
) -> int:
    from portable_backend.warmup.tuning_tools import (
        SpaceCatalog,
        available_cpus,
        estimated_s,
        resource_model,
    )

    if args.replay is not None:
        tools: Tools = recipe.open()
        device, catalog, prune = tools.device, tools.catalog, tools.prune
    else:
        device = _dry_device(args.arch)
        catalog = SpaceCatalog(device)
        prune = None if args.no_model else resource_model()
    rows, lines = [], []
    for task in tasks:
        configs = catalog.configs(task.key)
        kept = len(configs)
        if prune is not None:
            kept = len(prune(task.key, configs, device, keep=options.keep)[0])
            kept = min(kept, options.candidates or kept)
        rows.append(task.to_dict() | {"considered": len(configs), "kept": kept})
        lines.append(f"{task.key}: {len(configs)} configs, {kept} kept")
    workers = args.workers or max(1, available_cpus() - 1)
    trials = [
        row["kept"] if options.trials is None else min(options.trials, row["kept"])
        for row in rows
    ]
    seconds = sum(estimated_s(count, workers) for count in trials)
    if args.budget_s is not None:
        seconds = min(seconds, args.budget_s)
    considered, kept = (
        sum(row[name] for row in rows) for name in ("considered", "kept")
    )
    result = {
        "schema": SCHEMA,
        "dry_run": True,
        "gpu": device.name,
        "arch": device.arch,
        "strategy": options.chosen,
        "units": rows,
        "considered": considered,
        "kept": kept,
        "estimated_s": round(seconds),
    }
    lines.append(
        f"{len(rows)} units, {considered} configs, {kept} kept, up to {sum(trials)} "
        f"tried by {options.chosen}: about {_duration(seconds)} on one GPU"
    )
    _print(args, result, lines)
    return DONE


def _dry_device(arch: str | None) -> Any:
    from portable_backend.device import DeviceInfo

    try:
        return DeviceInfo.detect("cuda") if arch is None else DeviceInfo.for_arch(arch)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (ImportError, RuntimeError, AssertionError) as error:
        raise UsageError(f"no GPU here ({error}); give --arch") from None


def _print_outcomes(
    args: argparse.Namespace,
    outcomes: "Sequence[Outcome]",
    portfolios: "Sequence[Written] | None",
    options: "TuneOptions",
    cache_dir: Path,
    seconds: float,
) -> None:
    from portable_backend.warmup.tuning_report import total

    states = Counter(outcome.state for outcome in outcomes)
    counts = total(outcomes).to_dict()
    result = {
        "schema": SCHEMA,
        "dry_run": False,
        "strategy": options.chosen,
        "cache_dir": str(cache_dir),
        "seconds": round(seconds, 3),
        "states": dict(sorted(states.items())),
        "counts": counts,
        "units": [outcome.to_dict() for outcome in outcomes],
        "portfolios": [written.to_dict() for written in portfolios or ()],
    }
    summary = ", ".join(f"{n} {state}" for state, n in states.most_common())
    rejected = "".join(f", {n} {why}" for why, n in counts["rejected"].items())
    _print(
        args,
        result,
        [
            *map(_line, outcomes),
            f"{summary} in {_duration(seconds)}; configs: {counts['considered']} "
            f"considered, {counts['pruned']} pruned, {counts['compiled']} compiled, "
            f"{counts['timed']} timed{rejected}; records in {cache_dir}",
            *map(str, portfolios or ()),
        ],
    )


def _line(outcome: "Outcome") -> str:
    from portable_backend.warmup.tuning_report import describe

    text = f"{outcome.state:<11} {outcome.key}"
    record = outcome.record
    if record is not None:
        text += f": {record.time_us:.4g} us"
        if outcome.gain is not None and outcome.state != "default":
            text += f" ({outcome.gain:.2f}x)"
        text += f", {describe(record.config)}"
    return f"{text}: {outcome.reason}" if outcome.reason else text


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _settings() -> Settings:
    try:
        return Settings.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _print(args: argparse.Namespace, result: object, lines: Iterable[str]) -> None:
    print(json.dumps(result, indent=1) if args.json else "\n".join(lines))


def _positive(text: str) -> int:
    return int(_number(text, int, lambda number: number >= 1, "at least 1"))


def _count(text: str) -> int:
    return int(_number(text, int, lambda number: number >= 0, "0 or more"))


def _seconds(text: str) -> float:
    return _number(text, float, lambda s: 0 < s < float("inf"), "seconds above 0")


def _number(
    text: str,
    kind: Callable[[str], float],
    fits: Callable[[float], bool],
    expected: str,
) -> float:
    with contextlib.suppress(ValueError):
        number = kind(text)
        if fits(number):
            return number
    raise argparse.ArgumentTypeError(f"must be {expected}, got {text}; give a number")
