# SPDX-License-Identifier: Apache-2.0
"""Which configs an engine's attention runs with: from tuning records, chosen once.

Choices are made while the engine starts, from files alone, and hold until it ends.
Whatever is wrong with the files, the engine starts, with the kernels' defaults.
"""

import functools
import logging
from dataclasses import astuple

import torch

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import StepKind
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
    settings = get_settings()
    found: Configs = {}
    if settings.tune != "off":
        model = ModelShape(
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
        try:
            info = DeviceInfo.detect(device)
            lookup = _lookup(info)
            found = _choose(lookup, model, limits, info, max_num_seqs)
        except Exception:  # files and environments of any kind: serve all the same
            logger.warning(
                "tuning records cannot be used, default configs serve; see "
                "portable-backend doctor",
                exc_info=True,
            )
    return _as_on_first_rank(found)


def grades(device: DeviceInfo) -> dict[str, dict[str, int]]:
    """By kernel, how many of the keys looked up in this process got which grade."""
    if not _lookup.cache_info().currsize:
        return {}  # PORTABLE_BACKEND_TUNE=off, or no records could be read
    return _lookup(device).grade_counts()


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@functools.cache
def _lookup(device: DeviceInfo) -> Lookup:
    """One for the process: files are read once, for all groups of layers."""
    settings = get_settings()
    if settings.tune in ("startup", "background"):
        logger.warning(
            "PORTABLE_BACKEND_TUNE=%s is not there yet: records are loaded, nothing is "
            "tuned; run portable-backend tune --model MODEL before serving",
            settings.tune,
        )
    for folder in settings.cache_layers:
        if problem := why_no_folder(folder):
            logger.warning(
                "PORTABLE_BACKEND_CACHE_LAYERS must name folders of records, but %s "
                "%s: nothing is read there; correct it, or mount the folder",
                folder,
                problem,
            )
    environment = Environment(
        device.name, device.arch, current_digests(), current_toolchain()
    )
    store = RecordStore.open(settings.cache_dir, settings.cache_layers)
    return Lookup(
        store,
        environment,
        lambda key: spec_of(key).default(key, device),
        space_check=space_check(device),
    )


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
    grades = lookup.grade_counts()
    listed = [f"{kernel} {_listed(counts)}" for kernel, counts in grades.items()]
    logger.info("tuning records: %s", "; ".join(listed))
    return found


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{grade} {count}" for grade, count in counts.items())


def _as_on_first_rank(configs: Configs) -> Configs:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return configs
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return configs
    rows = [(astuple(kind), config.to_dict()) for kind, config in configs.items()]
    rows = group.broadcast_object(rows, src=0)
    return {StepKind(*kind): AttentionConfig.from_dict(row) for kind, row in rows}
