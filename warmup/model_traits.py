# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of its layers beside their shapes.

Each trait decides which code a kernel is compiled to, so it must be known ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from portable_backend.warmup.model_shapes import load_config, text_config

# Layers with a learned logit in the denominator.
_WITH_SINKS = frozenset({"gpt_oss"})
# Positions as a slope per head on the scores, always or where a field says so.
_WITH_ALIBI = frozenset({"bloom", "mpt", "falcon", "baichuan"})
# RMSNorms whose weight is kept less 1 and added up in fp32.
_FP32_WEIGHTS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})


@dataclass(frozen=True)
class ModelTraits:
    """What all layers of a model have in common beside their shapes.

    Attributes:
        softcap: cap of the scores; 0: none. How it is computed depends on its size.
        sinks, alibi: as in AttentionOptions.
        shares_cache: some layers read the cache of another one.
        fp32_norm_weight: RMSNorm gets its weight in fp32, not in the model's dtype.
        fp32_sinks: so are the sinks.
    """

    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    shares_cache: bool = False
    fp32_norm_weight: bool = False
    fp32_sinks: bool = False


def read_traits(path_or_id: str) -> ModelTraits:
    """Read a model's traits; arguments and errors as for `read_model`."""
    return traits_of_config(load_config(path_or_id))


def traits_of_config(config: Mapping[str, Any]) -> ModelTraits:
    """The traits of a config that has been read."""
    text = text_config(config)
    kind = str(text.get("model_type"))
    return ModelTraits(
        softcap=float(text.get("attn_logit_softcapping") or 0.0),
        sinks=kind in _WITH_SINKS,
        alibi=kind in _WITH_ALIBI and _uses_alibi(kind, text),
        shares_cache=bool(text.get("num_kv_shared_layers")),
        fp32_norm_weight=kind in _FP32_WEIGHTS,
    )


def _uses_alibi(kind: str, text: Mapping[str, Any]) -> bool:
    if kind == "falcon":
        return bool(text.get("alibi"))
    if kind == "mpt":
        inner = text.get("attn_config")
        return not isinstance(inner, dict) or bool(inner.get("alibi", True))
    if kind == "baichuan":  # the large one alone, as vLLM tells them apart
        return bool(text.get("hidden_size") != 4096)
    return True
