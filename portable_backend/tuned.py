# SPDX-License-Identifier: Apache-2.0
"""Which configs an engine's attention runs with: from tuning records, chosen once.

(Those of norms and cache writes: `tuned_rows.py`.)

Choices are made while the engine starts, from files alone, and hold until it ends;
`start_tuning.py` may have tuned what was missing before.
Whatever is wrong with the files, the engine starts, with the kernels' defaults. Of the
ranks of a tensor-parallel group, the first one chooses.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from portable_backend import ranks
from portable_backend.device import DeviceInfo
from portable_backend.kernels import AttentionPlanner
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import StepKind
from portable_backend.metrics import publish_grades
from portable_backend.settings import get_settings
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.layers import why_no_folder
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.serving_configs import recorded_for
from portable_backend.warmup.space_check import space_check
from portable_backend.warmup.store import RecordStore

logger = logging.getLogger("vllm.portable_backend.tuned")
Configs = dict[StepKind, AttentionConfig]
# How long ranks wait for the first one, which reads files.
RANKS_LIMIT_S = 300.0


@dataclass
class _Told:
    """What this process knows of its choices.

    Attributes:
        grades: as the first rank counts them.
        note: why there are none.
        choices: of each kind of layer, what is hashed to compare ranks.
        tune_s: seconds that it has tuned for.
        warned: whether somebody has been told that records cannot be used.
    """

    grades: dict[str, dict[str, int]] = field(default_factory=dict)
    note: str = ""
    choices: dict[str, Any] = field(default_factory=dict)
    tune_s: float = 0.0
    warned: bool = False


_told = _Told()


def configs_for_engine(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    limits: EngineLimits,
    max_num_seqs: int,
) -> Configs:
    """The config of each kind of step for which records say something.

    The same on all ranks of a tensor-parallel group: they take the first one's, whether
    it has records or none. Steps with both prefills and decodes keep the defaults,
    since records are measured on either alone.

    Args:
        num_query_heads, num_kv_heads, head_size, sliding_window, dtype: of the layers.
        device: where they run.
        limits: of the engine, its max_model_len known.
        max_num_seqs: requests of the largest step, graph padding included.
    """
    model = model_of(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        sliding_window=sliding_window,
        dtype=dtype,
        limits=limits,
    )

    def choose(lookup: Lookup, info: DeviceInfo) -> list[Any]:
        found = _choose(lookup, model, limits, info, max_num_seqs)
        return [[astuple(kind), config.to_dict()] for kind, config in found.items()]

    return {
        StepKind(*kind): AttentionConfig.from_dict(config)
        for kind, config in decide_for_all(choose, device)
    }


def decide_for_all(
    choose: Callable[[Lookup, DeviceInfo], list[Any]], device: torch.device
) -> list[Any]:
    """What the first rank of a tensor-parallel group chooses; nothing where it cannot.

    All ranks must call it equally often and in the same order.

    Args:
        choose: called on the first rank alone; gives what JSON can hold.
        device: where the configs run.
    """
    limit_s, settings = RANKS_LIMIT_S, get_settings()
    if settings.tune == "startup":  # which the first rank does before it decides
        limit_s += 1.1 * settings.tune_budget_s
    decision = ranks.from_first_rank(lambda: _decide(choose, device), limit_s)
    if decision is None:
        decision = _decision(note="the first rank's choice has not come")
    failed = bool(decision["note"]) and settings.tune != "off"
    if not failed or not _told.grades:  # else what was chosen before still serves
        _told.grades, _told.note = decision["grades"], decision["note"]
    chosen: list[Any] = decision["chosen"]
    return chosen


def note_choice(name: str, chosen: Any) -> None:
    """Have `choices` tell of more than planners' configs.

    Args:
        chosen: what JSON can hold; the same on all ranks.
    """
    _told.choices[name] = chosen


def model_of(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    limits: EngineLimits,
) -> ModelShape:
    """One kind of layer, as keys of records are made from it."""
    return ModelShape(
        name="",
        dtype=_NAMES[dtype],
        hidden_size=num_query_heads * head_size,
        num_layers=1,
        head_size=head_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        tensor_parallel_size=1,
        max_model_len=limits.max_model_len or 1,
        norms=(),
        windows=((sliding_window or 0, 1),),
    )


def note_tuning(seconds: float) -> None:
    """What tuning has taken while this engine starts."""
    _told.tune_s += seconds


def tuning_s() -> float:
    """Seconds that this process has tuned for."""
    return _told.tune_s


def grades() -> dict[str, dict[str, int]]:
    """By kernel, how many of the keys looked up for this engine got which grade."""
    return _told.grades


def choices() -> str:
    """A short hash of all configs that this process has chosen; equal on all ranks."""
    held = json.dumps(sorted(_told.choices.items()))
    return hashlib.sha256(held.encode()).hexdigest()[:8]


def tell_choices(planners: Iterable[AttentionPlanner]) -> None:
    """Log, on one line, what planners run with: grades, and a hash of the configs.

    The grades go to vLLM's metrics as well, where those can be reached.
    """
    for planner in planners:
        layer = (
            planner.num_query_heads,
            planner.num_kv_heads,
            planner.head_size,
            planner.sliding_window,
            planner.block_size,
            _NAMES[planner.dtype],
        )
        _told.choices[str(layer)] = [
            [astuple(kind), planner.config_for(kind).to_dict()]
            for kind in StepKind.within(planner.max_num_seqs)
        ]
    listed = [f"{kernel} {_listed(counts)}" for kernel, counts in grades().items()]
    text = "; ".join(listed) or f"default configs serve: {_told.note}"
    logger.info("tuning records: %s; choices %s", text, choices())
    publish_grades(grades())


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@functools.cache
def _lookup(device: DeviceInfo) -> Lookup:
    """One for the process: files are read once, for all groups of layers."""
    for folder in get_settings().cache_layers:
        if problem := why_no_folder(folder):
            logger.warning(
                "PORTABLE_BACKEND_CACHE_LAYERS must name folders of records, but %s "
                "%s: nothing is read there; correct it, or mount the folder",
                folder,
                problem,
            )
    settings = get_settings()
    environment = Environment(
        device.name,
        device.arch,
        current_digests(),
        current_toolchain(),
        device.num_units,
    )
    store = RecordStore.open(settings.cache_dir, settings.cache_layers)
    return Lookup(
        store,
        environment,
        lambda key: spec_of(key).default(key, device),
        space_check=space_check(device),
    )


def likely_lookup(device: DeviceInfo) -> Lookup:
    """Chooses as this process will, and counts no grades.

    Args:
        device: what is to be served on.
    """
    return _lookup(device).anew()


def _decide(
    choose: Callable[[Lookup, DeviceInfo], list[Any]], device: torch.device
) -> dict[str, Any]:
    """The first rank's choice for all; never raises."""
    if get_settings().tune == "off":
        return _decision(note="PORTABLE_BACKEND_TUNE=off")
    try:
        info = DeviceInfo.detect(device)
        lookup = _lookup(info)
        return _decision(choose(lookup, info), lookup.grade_counts())
    except Exception as error:  # files and environments of any kind: serve all the same
        if not _told.warned:
            _told.warned = True
            logger.warning(
                "tuning records cannot be used, default configs serve; see "
                "portable-backend doctor",
                exc_info=True,
            )
        return _decision(note=f"records cannot be used ({type(error).__name__})")


def _decision(
    chosen: list[Any] | None = None,
    grades: dict[str, dict[str, int]] | None = None,
    note: str = "",
) -> dict[str, Any]:
    return {"chosen": chosen or [], "grades": grades or {}, "note": note}


def _choose(
    lookup: Lookup,
    model: ModelShape,
    limits: EngineLimits,
    device: DeviceInfo,
    max_num_seqs: int,
) -> Configs:
    (window,) = model.sliding_windows
    found: Configs = {}
    for kind in StepKind.within(max_num_seqs):
        config = recorded_for(lookup, model, limits, device, kind, window)
        if config is not None:
            found[kind] = config
    return found


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{grade} {count}" for grade, count in counts.items())
