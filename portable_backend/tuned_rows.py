# SPDX-License-Identifier: Apache-2.0
"""Which configs norms and cache writes run with: from tuning records, chosen once.

As `tuned.py` chooses attention's: while the engine starts, before graphs are captured,
from files alone, and by the first rank for all. The layers call the kernels without a
config; `kernels/served.py` keeps what was chosen.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from portable_backend import tuned
from portable_backend.device import DeviceInfo
from portable_backend.engine_norms import norms_served
from portable_backend.kernels import served
from portable_backend.kernels.attention import capturing
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.buckets import EngineLimits, all_keys
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.records import TuningKey

logger = logging.getLogger("vllm.portable_backend.tuned")
# The fields of a key that layers share, and the one that names a step.
_LAYER_FIELDS = {
    "rms_norm": ("dtype", "row_size", "fused_add"),
    "kv_cache": ("dtype", "head_size", "num_kv_heads"),
}
_SIZE = {"rms_norm": "num_rows", "kv_cache": "num_tokens"}
# Of one kernel and kind of layer: [kernel, fields, sizes, configs].
Row = list[Any]


def serve_recorded(
    vllm_config: Any,
    models: Iterable[ModelShape],
    limits: EngineLimits,
    device: torch.device,
) -> None:
    """Have norms and cache writes launch what records give; never raises.

    All ranks of a tensor-parallel group must call it equally often.

    Args:
        vllm_config: the engine's.
        models: kinds of attention layers, as `tuned.model_of` describes them.
        limits: of the engine.
        device: where they run.
    """
    shapes = [*models, *norms_served(vllm_config)]

    def choose(lookup: Lookup, _: DeviceInfo) -> list[Row]:
        return [*_rows(lookup, shapes, limits)]

    rows = tuned.decide_for_all(choose, device)
    if not rows or capturing():
        return  # there will be another builder
    try:
        _serve(rows)
    except (ValueError, TypeError, LookupError) as error:
        logger.warning("recorded configs are not used, they do not fit: %s", error)
    else:
        for kernel, layer, *steps in rows:
            tuned.note_choice(f"{kernel} {layer}", steps)


def _rows(
    lookup: Lookup, shapes: Sequence[ModelShape], limits: EngineLimits
) -> Iterator[Row]:
    """What records say, of those layers for which they say anything."""
    keys: dict[tuple[Any, ...], list[TuningKey]] = {}
    for shape in shapes:
        for key in all_keys(shape, limits):
            if key.kernel in _SIZE and (key.kernel == "rms_norm" or shape.windows):
                fields = key.to_dict()
                layer = [fields[name] for name in _LAYER_FIELDS[key.kernel]]
                found = keys.setdefault((key.kernel, *layer), [])
                if key not in found:
                    found.append(key)
    for (kernel, *layer), found in keys.items():
        found.sort(key=lambda key: key.to_dict()[_SIZE[key.kernel]])
        choices = [lookup.choose(key) for key in found]
        configs = [
            None if choice.grade == "default" else choice.config.to_dict()
            for choice in choices
        ]
        if any(config is not None for config in configs):
            sizes = [key.to_dict()[_SIZE[kernel]] for key in found]
            yield [kernel, layer, sizes, configs]


def _serve(rows: Iterable[Row]) -> None:
    norms: dict[served.NormKey, served.Steps] = {}
    writes: dict[served.WriteKey, served.Steps] = {}
    for kernel, (dtype, *fields), sizes, configs in rows:
        steps = served.Steps(
            tuple(sizes),
            tuple(c and KernelConfig.from_dict(c) for c in configs),
        )
        if kernel == "rms_norm":
            row_size, fused_add = fields
            norms[DTYPES[dtype], row_size, bool(fused_add)] = steps
        else:
            head_size, num_kv_heads = fields
            writes[DTYPES[dtype], head_size, num_kv_heads] = steps
    served.serve(norms, writes)
