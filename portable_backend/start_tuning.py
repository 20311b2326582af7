# SPDX-License-Identifier: Apache-2.0
"""PORTABLE_BACKEND_TUNE=startup: tune what this engine lacks before it looks it up.

Called by each metadata builder, before its planners are made and graphs are captured.
The budget is one for the process. Only the rank tunes whose choices count; the others
wait for them. Whatever fails costs a warning: the engine serves with what there is.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from portable_backend import ranks, tuned
from portable_backend.device import DeviceInfo
from portable_backend.kernels.attention import capturing
from portable_backend.kernels.plan import StepKind
from portable_backend.settings import get_settings
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.serving_configs import keys_for
from portable_backend.warmup.spread import visible_gpus
from portable_backend.warmup.timed_tuning import (
    LEAST_BUDGET_S,
    TimedTuning,
    missing,
    tune_in_time,
)
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Outcome, Task
from portable_backend.warmup.tuning_tools import gpu_recipe
from portable_backend.warmup.units import units_of

logger = logging.getLogger("vllm.portable_backend.tuned")
# As `portable-backend tune` does it.
OPTIONS = TuneOptions(trials=128, candidates=2048, patience=48)
# A candidate that hangs must not take a large share of the budget.
_TRIAL_LIMIT_S = 5.0
# Norms and cache writes come after attention: their defaults leave less to gain.
_LATER = 1e-3


@dataclass
class _Spent:
    """What this process has tuned for, for all builders together."""

    seconds: float = 0.0
    tried: set[TuningKey] = field(default_factory=set)
    told: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_spent = _Spent()


def tune_missing(
    models: Mapping[ModelShape, int],
    limits: EngineLimits,
    max_num_seqs: int,
    device: torch.device,
) -> None:
    """Tune for the keys that these layers look up and lack; never raises.

    Args:
        models: kinds of layers as `tuned.model_of` describes them, and how many; those
            without windows stand for a model's norms.
        limits: of the engine, its max_model_len known.
        max_num_seqs: requests of the largest step, graph padding included.
        device: where they run.
    """
    if not ranks.decides():
        return
    try:
        with _spent.lock:
            _tune_missing(models, limits, max_num_seqs, device)
    except Exception:  # of any kind: the engine serves all the same
        logger.warning(
            "nothing was tuned, records that are there serve; see portable-backend "
            "doctor",
            exc_info=True,
        )


def _tune_missing(
    models: Mapping[ModelShape, int],
    limits: EngineLimits,
    max_num_seqs: int,
    device: torch.device,
) -> None:
    began = time.monotonic()
    info = DeviceInfo.detect(device)
    if not _can_tune(info):
        _tell_once(
            "PORTABLE_BACKEND_TUNE=startup needs a GPU: records are loaded, nothing is "
            "tuned"
        )
        return
    if capturing():
        return  # the GPU is not to be disturbed, and there will be another builder
    settings = get_settings()
    left_s = settings.tune_budget_s - _spent.seconds
    lookup = tuned._lookup(info)
    tasks = missing(_tasks(models, limits, max_num_seqs), lookup)
    tasks = [task for task in tasks if task.key not in _spent.tried]
    if not tasks:
        return
    if left_s < LEAST_BUDGET_S:
        _tell_once(
            f"nothing is tuned: {len(tasks)} keys lack records, but of "
            f"PORTABLE_BACKEND_TUNE_BUDGET_S={settings.tune_budget_s:g} nothing is left"
        )
        return
    _spent.tried.update(task.key for task in tasks)  # also when it fails
    logger.info("tuning %d keys that lack records, for %.0f s", len(tasks), left_s)
    with _caching():
        result = tune_in_time(
            tasks,
            _recipe(device),
            OPTIONS,
            gpu=_visible_name(device),
            cache_dir=settings.cache_dir,
            cache_layers=settings.cache_layers,
            budget_s=left_s - (time.monotonic() - began),
            on_outcome=lambda outcome: _keep(outcome, lookup),
        )
    seconds = time.monotonic() - began
    _spent.seconds += seconds
    tuned.note_tuning(seconds)
    lookup.refresh()
    _tell(result, seconds, left_s)


def _tasks(
    models: Mapping[ModelShape, int], limits: EngineLimits, max_num_seqs: int
) -> list[Task]:
    """The keys that this engine looks up, by expected share of time.

    No others: of attention's that `portable-backend tune` knows beyond these, it would
    use nothing.
    """
    weights: dict[TuningKey, float] = defaultdict(float)
    for model, num_layers in models.items():
        units = {unit.key: unit.weight for unit in units_of(model, limits)}
        kinds = [k for k in StepKind.within(max_num_seqs) if not k.mixed]
        keys = dict.fromkeys(
            key
            for window in model.sliding_windows
            for kind in kinds
            for key in keys_for(model, limits, kind, window)
        )
        for key in keys:
            weights[key] += num_layers * units.get(key, 0.0)
        rows = "kv_cache" if model.windows else "rms_norm"
        for key, weight in units.items():
            if key.kernel == rows:
                weights[key] += num_layers * _LATER * weight
    return [Task(key, weight) for key, weight in weights.items()]


def _can_tune(info: DeviceInfo) -> bool:
    return info.platform != "interpreter"


def _caching() -> contextlib.AbstractContextManager[None]:
    """Candidates are compiled to where the engine will look for what has won."""
    if get_settings().compile_ahead != "on":
        return contextlib.nullcontext()
    from portable_backend import startup

    return startup.caching_in(startup.cache_folder())


def _recipe(device: torch.device) -> Recipe:
    """Of a process that sees this GPU alone, and takes what is free of its memory."""
    free, total = torch.cuda.mem_get_info(device)
    measuring = {
        "limit_s": _TRIAL_LIMIT_S,
        "device_memory_share": round(0.9 * free / total, 3),
    }
    return gpu_recipe(measuring=measuring)


def _visible_name(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return visible_gpus(torch.cuda.device_count())[index]


def _keep(outcome: Outcome, lookup: Lookup) -> None:
    """What the user's cache did not take serves this process all the same."""
    if outcome.record is not None and outcome.state == "failed":
        lookup.store.put(outcome.record)


def _tell(result: TimedTuning, seconds: float, budget_s: float) -> None:
    states = Counter(outcome.state for outcome in result.outcomes)
    text = (
        f"tuned {result.done} of {len(result.outcomes)} keys in {seconds:.1f} s "
        f"of {budget_s:.0f} ("
        + ", ".join(f"{n} {state}" for state, n in states.most_common())
        + ")"
    )
    reasons = [x.reason for x in result.outcomes if x.state == "failed"]
    problem = result.problem or next(iter(reasons), None)
    if problem is None:
        logger.info("%s", text)
    else:
        logger.warning("%s: %s", text, problem)


def _tell_once(text: str) -> None:
    if not _spent.told:
        _spent.told = True
        logger.warning("%s", text)
