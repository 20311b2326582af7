# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of the shapes its kernels will see on one rank.

Hugging Face's layout, read as data: no torch, and no code that a model brings along.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_backend.errors import UnsupportedError, bad_argument

DTYPES = ("bfloat16", "float16", "float32")
_ALIASES = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
# Of one layer in so many the window is left out; where the config does not list layers.
_WINDOW_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
}
# A norm of each query and key head.
_HEAD_NORMS = frozenset(
    {
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "gemma3",
        "gemma3_text",
        "exaone4",
        "apertus",
    }
)
# A norm before and one after both halves of a layer.
_SANDWICHED = frozenset({"gemma2", "gemma3", "gemma3_text"})
# Layers that keep keys and values of each token.
_WITHOUT_CACHE = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
_LATENT = ("kv_lora_rank", "q_lora_rank")
# vLLM's, where a config does not tell.
_MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class NormShape:
    """RMSNorms of one kind in a forward pass.

    Attributes:
        row_size: elements of the normalised axis.
        fused_add: whether a residual is added first.
        rows_per_token: rows of one call for each token: 1, or a number of heads.
        calls: launches of a forward pass.
    """

    row_size: int
    fused_add: bool
    rows_per_token: int
    calls: int


@dataclass(frozen=True)
class ModelShape:
    """A model's shapes on one tensor-parallel rank.

    Attributes:
        name: the folder, file or id it was read from.
        dtype: of weights and cache: bfloat16, float16 or float32.
        hidden_size, num_layers: of the text model; layers with a KV cache only.
        head_size: elements per head.
        num_query_heads, num_kv_heads: of one rank.
        tensor_parallel_size: ranks that share the heads.
        max_model_len: longest sequence that the config allows.
        norms: RMSNorms by kind.
        windows: (sliding window, number of layers) of each kind of layer; 0: no window.
    """

    name: str
    dtype: str
    hidden_size: int
    num_layers: int
    head_size: int
    num_query_heads: int
    num_kv_heads: int
    tensor_parallel_size: int
    max_model_len: int
    norms: tuple[NormShape, ...]
    windows: tuple[tuple[int, int], ...]

    @property
    def num_queries_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def norm_row_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({norm.row_size for norm in self.norms}))

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """One for each kind of layer; 0: no window."""
        return tuple(window for window, _ in self.windows)


def read_model(
    path_or_id: str, *, tensor_parallel_size: int = 1, dtype: str | None = None
) -> ModelShape:
    """Read a model's shapes.

    Args:
        path_or_id: a folder with a config.json, such a file, or a Hugging Face id,
            which needs huggingface_hub and the network or a local copy.
        tensor_parallel_size: ranks that share the heads.
        dtype: as vLLM's --dtype; None and "auto" follow the config, with float32
            weights served as bfloat16.

    Raises:
        ValueError: there is no such config, a field is missing or does not fit.
        UnsupportedError: the back end does not serve such a model.
    """
    if tensor_parallel_size < 1:
        raise bad_argument(
            "tensor_parallel_size", "1 or more", tensor_parallel_size, "correct it"
        )
    config = load_config(path_or_id)
    _check_layer_types(config, path_or_id)
    return shape_of_config(
        config, path_or_id, tensor_parallel_size=tensor_parallel_size, dtype=dtype
    )


def _check_layer_types(config: Mapping[str, Any], name: str) -> None:
    """Of a file only: an engine may be told to serve fewer layers than it lists."""
    text = _with_library_defaults(text_config(config))
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if kinds is None or (isinstance(kinds, list) and len(kinds) == count):
        return
    raise bad_argument(
        f"{name}: layer_types",
        f"a list of the {count} layers that num_hidden_layers says",
        f"{len(kinds)} of them" if isinstance(kinds, list) else repr(kinds),
        "correct the config",
    )


def shape_of_config(
    config: Mapping[str, Any],
    name: str,
    *,
    tensor_parallel_size: int = 1,
    dtype: str | None = None,
) -> ModelShape:
    """The shapes of a config that has been read; otherwise as `read_model`."""
    text = text_config(config)
    if any(text.get(field) for field in _LATENT):
        raise UnsupportedError(
            f"{name}: latent attention (MLA) is not supported; choose another "
            "attention back end for this model"
        )
    text = _with_library_defaults(text)
    hidden_size = _count(text, "hidden_size", name)
    all_layers = _count(text, "num_hidden_layers", name)
    heads = _count(text, "num_attention_heads", name)
    kv_heads = _count(text, "num_key_value_heads", name, heads)
    head_size = _count(text, "head_dim", name, hidden_size // heads)
    query_heads, kv_heads = _split_heads(heads, kv_heads, tensor_parallel_size)
    windows = _windows(text, all_layers, name)
    return ModelShape(
        name=name,
        dtype=_dtype(config, text, dtype),
        hidden_size=hidden_size,
        num_layers=sum(windows.values()),
        head_size=head_size,
        num_query_heads=query_heads,
        num_kv_heads=kv_heads,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=_max_model_len(text, name),
        norms=_norms(text, all_layers, hidden_size, head_size, query_heads, kv_heads),
        windows=tuple(sorted(windows.items())),
    )


def load_config(path_or_id: str) -> dict[str, Any]:
    """A model's config.json as it is; arguments and errors as for `read_model`."""
    if not path_or_id:
        raise bad_argument(
            "model", "a folder, a config.json or an id", "nothing", "name one"
        )
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise bad_argument(
                "model", "a folder with a config.json", path.parent, "correct the path"
            )
    elif not path.exists():
        path = _download(path_or_id)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad_argument(
            "model", "a config.json that can be read", path, f"mend it ({error})"
        ) from None
    if not isinstance(config, dict):
        raise bad_argument(
            "model", "a config.json that holds an object", path, "correct the path"
        )
    return config


def _download(model_id: str) -> Path:
    """config.json of a hub id, from the local cache where it is there."""
    expected, remedy = "a folder, a config.json or an id", "use a local copy's folder"
    # An id is NAME or OWNER/NAME; anything else was meant as a path.
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise bad_argument("model", expected, model_id, remedy)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        without = "a folder or a config.json where huggingface_hub is not installed"
        raise bad_argument("model", without, f"{model_id} ({error})", remedy) from None
    try:
        return Path(hf_hub_download(model_id, "config.json"))
    except Exception as error:
        # Its errors have no common base: network, authentication, files, names.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "TRUE", "YES"):
            expected += " in the local cache (HF_HUB_OFFLINE is set)"
        got = f"{model_id} ({reason})"
        raise bad_argument("model", expected, got, remedy) from None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a model with several."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            return inner
    thinker = config.get("thinker_config")
    return text_config(thinker) if isinstance(thinker, dict) else config


def _with_library_defaults(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in what the file leaves to transformers, such as Gemma 3's heads.

    Only where something is missing, and only for a model type that transformers knows:
    its class holds the defaults.
    """
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    default_heads = str(text.get("model_type", "")).startswith("gemma")
    if all(text.get(name) for name in needed) and not (
        default_heads and not text.get("head_dim")
    ):
        return text
    try:
        from transformers import AutoConfig

        full: dict[str, Any] = AutoConfig.for_model(text["model_type"]).to_dict()
    except (ImportError, KeyError, ValueError, TypeError):
        return text
    given = {name: value for name, value in text.items() if value is not None}
    # The list of layers follows from their number, which may be the file's.
    full.pop("layer_types", None)
    return full | given


def _count(
    text: Mapping[str, Any], field: str, name: str, default: int | None = None
) -> int:
    value = text.get(field)
    if value is None:
        value = default
    if value is None:
        raise bad_argument(
            f"{name}: {field}",
            "given in config.json",
            "nothing",
            "install transformers, which knows the defaults of many model types, or "
            "describe the shapes in a file",
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_argument(f"{name}: {field}", "1 or more", value, "correct the config")
    return value


def _split_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query and KV heads of one rank; fewer KV heads than ranks are replicated."""
    if heads % kv_heads:
        raise bad_argument(
            "num_attention_heads",
            "a multiple of num_key_value_heads",
            f"{heads} and {kv_heads}",
            "correct the config",
        )
    if heads % ranks:
        raise bad_argument(
            "tensor_parallel_size",
            f"a divisor of the model's {heads} query heads",
            ranks,
            "choose another one",
        )
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise bad_argument(
            "tensor_parallel_size",
            f"a divisor or a multiple of the model's {kv_heads} KV heads",
            ranks,
            "choose another one",
        )
    return heads // ranks, max(1, kv_heads // ranks)


def _windows(text: Mapping[str, Any], num_layers: int, name: str) -> Counter[int]:
    """Number of layers by their window; 0: none."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        kinds = [str(kind) for kind in kinds[:num_layers]]
        cached = [kind for kind in kinds if kind not in _WITHOUT_CACHE]
        if not cached:
            raise UnsupportedError(f"{name}: no layer has attention with a KV cache")
    else:
        cached = ["sliding_attention"] * num_layers
        pattern = text.get("sliding_window_pattern") or text.get(
            "_sliding_window_pattern"
        )
        if not isinstance(pattern, int) or isinstance(pattern, bool):
            pattern = _WINDOW_PATTERNS.get(str(text.get("model_type")))
        if pattern:
            cached[pattern - 1 :: pattern] = ["full_attention"] * (
                num_layers // pattern
            )
        elif text.get("use_sliding_window"):
            # Qwen's first layers see everything.
            first = text.get("max_window_layers", 0)
            cached[:first] = ["full_attention"] * min(first, num_layers)
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False or not window:
        window = 0
    if not isinstance(window, int) or window < 0:
        raise bad_argument(
            f"{name}: sliding_window",
            "a number of tokens",
            window,
            "correct the config",
        )
    return Counter(window if kind.startswith("sliding") else 0 for kind in cached)


def _norms(
    text: Mapping[str, Any],
    num_layers: int,
    hidden_size: int,
    head_size: int,
    query_heads: int,
    kv_heads: int,
) -> tuple[NormShape, ...]:
    """All but a model's first norm come with the residual's addition, or after a half.

    Other layouts of norms give too few or too many calls, never other shapes than the
    hidden size and the head size.
    """
    kind = str(text.get("model_type"))
    unfused = 1 + (2 * num_layers if kind in _SANDWICHED else 0)
    norms = [
        NormShape(hidden_size, True, 1, 2 * num_layers),
        NormShape(hidden_size, False, 1, unfused),
    ]
    flags = ("use_qk_norm", "qk_norm", "use_qk_norms")
    if kind in _HEAD_NORMS or any(text.get(flag) is True for flag in flags):
        norms += [
            NormShape(head_size, False, heads, num_layers)
            for heads in (query_heads, kv_heads)
        ]
    return tuple(norms)


def _max_model_len(text: Mapping[str, Any], name: str) -> int:
    """What vLLM serves unless told otherwise."""
    longest = _count(text, "max_position_embeddings", name, _MAX_MODEL_LEN)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, dict) or "gemma3" in str(text.get("model_type")):
        return longest
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("su", "longrope"):
        return int(text.get("original_max_position_embeddings") or longest)
    factor = scaling.get("factor")
    if kind in ("linear", "dynamic") and isinstance(factor, int | float):
        return int(longest * factor)
    return longest


def _dtype(
    config: Mapping[str, Any], text: Mapping[str, Any], dtype: str | None
) -> str:
    wanted = dtype
    if wanted in (None, "auto"):
        names = ("torch_dtype", "dtype")
        found = [part.get(name) for part in (config, text) for name in names]
        wanted = next((value for value in found if value), "bfloat16")
        if wanted in ("float32", "float", "auto"):
            wanted = "bfloat16"
    text_form = str(wanted).removeprefix("torch.")
    resolved = _ALIASES.get(text_form, text_form)
    if resolved not in DTYPES:
        raise bad_argument(
            "dtype", f"one of {', '.join(DTYPES)}", wanted, "pass the dtype to serve in"
        )
    return resolved
