# SPDX-License-Identifier: Apache-2.0
"""What can be tuned: each kernel's space, the fields of its keys, and its default.

A key's fields are those that shape the compiled code or the data (they must match) and
sizes, which name a bucket: configs found for a size serve all steps of that bucket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels import kv_cache_space, plan, rms_norm_space
from portable_backend.kernels.attention_space import (
    DECODE_SPACE,
    PREFILL_SPACE,
    AttentionShape,
)
from portable_backend.kernels.config import AttentionConfig, ConfigSpace, KernelConfig
from portable_backend.kernels.kv_cache import vector_size
from portable_backend.warmup.bound_space import BoundSpace
from portable_backend.warmup.records import TuningKey

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_HEADS = (
    "dtype",
    "head_size",
    "num_kv_heads",
    "num_queries_per_kv",
    "block_size",
    "sliding_window",  # 0: none
)


@dataclass(frozen=True)
class KernelSpec:
    """How a kernel is tuned.

    Attributes:
        kernel: its name in keys, records and files.
        space: its configs.
        fields: names of the fields that its keys have, all of them.
        problem: a key's problem, as `space` takes it.
        default: the config that serves a key without any tuning.
    """

    kernel: str
    space: ConfigSpace[Any]
    fields: tuple[str, ...]
    problem: Callable[[TuningKey], Any]
    default: Callable[[TuningKey, DeviceInfo], KernelConfig]

    def bound(self, key: TuningKey, device: DeviceInfo) -> BoundSpace:
        """The configs to search for `key` on `device`."""
        return BoundSpace(self.space, self.problem(key), device)


def spec_of(key: TuningKey) -> KernelSpec:
    """The spec of a key's kernel.

    Raises:
        ValueError: no such kernel, or the key's fields are not that kernel's.
    """
    spec = KERNEL_SPECS.get(key.kernel)
    if spec is None:
        raise bad_argument(
            "kernel", f"one of {', '.join(KERNEL_SPECS)}", key.kernel, "correct it"
        )
    given = {name for name, _ in key.fields}
    if given != set(spec.fields):
        raise bad_argument(
            f"fields of a {key.kernel} key",
            ", ".join(sorted(spec.fields)),
            ", ".join(sorted(given)),
            "add what is missing and leave out the rest",
        )
    dtype = key.to_dict()["dtype"]
    if dtype not in DTYPES:
        raise bad_argument("dtype", f"one of {', '.join(DTYPES)}", dtype, "correct it")
    return spec


def _attention_shape(key: TuningKey) -> AttentionShape:
    fields: dict[str, Any] = key.to_dict()
    tokens = fields["query_len"] if key.kernel == "decode" else 1
    return AttentionShape(
        num_queries_per_kv=fields["num_queries_per_kv"],
        head_size=fields["head_size"],
        element_size=DTYPES[fields["dtype"]].itemsize,
        block_size=fields["block_size"],
        longest_decode=max(AttentionShape.longest_decode, tokens),
    )


def _attention_default(
    key: TuningKey, device: DeviceInfo, kind: plan.StepKind
) -> AttentionConfig:
    fields: dict[str, Any] = key.to_dict()
    return plan.default_config(
        num_queries_per_kv=fields["num_queries_per_kv"],
        num_kv_heads=fields["num_kv_heads"],
        head_size=fields["head_size"],
        dtype=DTYPES[fields["dtype"]],
        block_size=fields["block_size"],
        device=device,
        kind=kind,
        has_window=bool(fields["sliding_window"]),
    )


def _prefill_default(key: TuningKey, device: DeviceInfo) -> KernelConfig:
    return _attention_default(key, device, prefill_kind(key)).prefill


def prefill_kind(key: TuningKey) -> plan.StepKind:
    """The kind of a prefill key's steps."""
    fields: dict[str, Any] = key.to_dict()
    return plan.StepKind.of(
        0, not fields["context_len"], has_prefill=True, longest=fields["query_len"]
    )


def _decode_default(key: TuningKey, device: DeviceInfo) -> KernelConfig:
    num_seqs = key.to_dict()["num_seqs"]
    assert isinstance(num_seqs, int)
    kind = plan.StepKind.of(num_seqs, no_context=False, has_prefill=False)
    return _attention_default(key, device, kind).decode


def _rms_norm_problem(key: TuningKey) -> rms_norm_space.RMSNormProblem:
    fields: dict[str, Any] = key.to_dict()
    return rms_norm_space.RMSNormProblem(
        row_size=fields["row_size"],
        num_rows=fields["num_rows"],
        element_size=DTYPES[fields["dtype"]].itemsize,
    )


def _rms_norm_default(key: TuningKey, device: DeviceInfo) -> KernelConfig:
    fields: dict[str, Any] = key.to_dict()
    return rms_norm_space.default_config(
        row_size=fields["row_size"],
        num_rows=fields["num_rows"],
        dtype=DTYPES[fields["dtype"]],
        device=device,
    )


def _kv_cache_problem(key: TuningKey) -> kv_cache_space.KVCacheProblem:
    fields: dict[str, Any] = key.to_dict()
    head_size = fields["head_size"]
    elements = fields["num_tokens"] * fields["num_kv_heads"] * head_size
    per_vector = vector_size(head_size, DTYPES[fields["dtype"]])
    return kv_cache_space.KVCacheProblem(elements // per_vector)


def _kv_cache_default(key: TuningKey, device: DeviceInfo) -> KernelConfig:
    num_vectors = _kv_cache_problem(key).num_vectors
    return kv_cache_space.default_config(num_vectors=num_vectors, device=device)


_SPECS = (
    KernelSpec(
        "prefill",
        PREFILL_SPACE,
        # no_context repeats whether context_len is 0, as a field that must match: only
        # then may a config read the new tokens.
        (*_HEADS, "no_context", "num_seqs", "query_len", "context_len"),
        _attention_shape,
        _prefill_default,
    ),
    KernelSpec(
        "decode",
        DECODE_SPACE,
        (*_HEADS, "num_seqs", "query_len", "seq_len"),
        _attention_shape,
        _decode_default,
    ),
    KernelSpec(
        "rms_norm",
        rms_norm_space.SPACE,
        ("dtype", "row_size", "fused_add", "num_rows"),
        _rms_norm_problem,
        _rms_norm_default,
    ),
    KernelSpec(
        "kv_cache",
        kv_cache_space.SPACE,
        ("dtype", "head_size", "num_kv_heads", "num_tokens"),
        _kv_cache_problem,
        _kv_cache_default,
    ),
)
KERNEL_SPECS: Mapping[str, KernelSpec] = {spec.kernel: spec for spec in _SPECS}
