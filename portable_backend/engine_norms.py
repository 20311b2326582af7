# SPDX-License-Identifier: Apache-2.0
"""The norms of an engine's model and of its drafter, as shapes."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portable_backend import plugin
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.model_shapes import ModelShape, NormShape, shape_of_config

logger = logging.getLogger("vllm.portable_backend.startup")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def norms_served(vllm_config: Any) -> list[ModelShape]:
    """Shapes of the norms that our kernel serves; a failure is a warning."""
    try:
        if plugin.norm_is_enabled():
            return [shape for shape, _ in norms_of(vllm_config)]
    except Exception:  # of a config that is like no other
        logger.warning("norms keep their default configs", exc_info=True)
    return []


def norms_of(vllm_config: Any) -> list[tuple[ModelShape, Mapping[str, Any]]]:
    """(shapes without attention, config.json) of the model and of its drafter."""
    parallel = vllm_config.parallel_config
    models = [(vllm_config.model_config, parallel)]
    speculative = vllm_config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    if drafter is not None:
        of_drafter = getattr(speculative, "draft_parallel_config", None)
        models.append((drafter, of_drafter or parallel))
    found = []
    for model_config, parallel_config in models:
        text = getattr(model_config, "hf_text_config", None)
        if text is None:
            continue
        config = text.to_dict()
        found.append((norm_shape(model_config, config, parallel_config), config))
    return found


def norm_shape(
    model_config: Any, config: Mapping[str, Any], parallel_config: Any
) -> ModelShape:
    """A model's norms; of a config.json that we cannot read, those that all have."""
    dtype = _DTYPE_NAMES[model_config.dtype]
    num_ranks = getattr(parallel_config, "tensor_parallel_size", 1)
    try:
        shape = shape_of_config(config, "", tensor_parallel_size=num_ranks, dtype=dtype)
    except ValueError as error:
        logger.debug("norms of heads are not looked for: %s", error)
        hidden_size = model_config.get_hidden_size()
        norms = tuple(NormShape(hidden_size, fused, 1, 1) for fused in (True, False))
        shape = ModelShape(
            "", dtype, hidden_size, 1, hidden_size, 1, 1, num_ranks, 1, norms, ()
        )
    return replace(shape, windows=(), max_model_len=1, num_layers=1)
