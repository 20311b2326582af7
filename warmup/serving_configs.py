# SPDX-License-Identifier: Apache-2.0
"""Every config that a step of an engine can be launched with."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from portable_backend.device import DeviceInfo
from portable_backend.kernels import plan
from portable_backend.kernels.config import AttentionConfig, KernelConfig
from portable_backend.warmup.buckets import (
    EngineLimits,
    decode_key,
    kv_cache_key,
    prefill_key,
    rms_norm_key,
)
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.records import TuningKey


def default_of(
    model: ModelShape,
    limits: EngineLimits,
    device: DeviceInfo,
    kind: plan.StepKind,
    window: int,
) -> AttentionConfig:
    """What attention serves with where records say nothing."""
    return plan.default_config(
        num_queries_per_kv=model.num_queries_per_kv,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=DTYPES[model.dtype],
        block_size=limits.block_size,
        device=device,
        kind=kind,
        has_window=window > 0,
    )


def keys_for(
    model: ModelShape, limits: EngineLimits, kind: plan.StepKind, window: int
) -> tuple[TuningKey, TuningKey]:
    """The keys whose records serve prefills and decodes of steps of one kind."""
    return (
        prefill_key(
            model,
            limits,
            num_tokens=limits.max_num_batched_tokens,
            no_context=kind.no_context,
            sliding_window=window,
        ),
        decode_key(model, limits, num_seqs=kind.max_decodes, sliding_window=window),
    )


def recorded_for(
    lookup: Lookup,
    model: ModelShape,
    limits: EngineLimits,
    device: DeviceInfo,
    kind: plan.StepKind,
    window: int,
) -> AttentionConfig | None:
    """What records give steps of one kind; None: nothing, the default serves.

    Steps with both prefills and decodes keep the default: records are measured on
    either alone. So do long prompts where they have a default of their own. Prefills of
    all other sizes get the config of full steps, since that is all a kind tells.
    """
    default = default_of(model, limits, device, kind, window)
    if kind.mixed:
        return None
    if kind.long_prompts:
        usual = replace(kind, long_prompts=False)
        if default != default_of(model, limits, device, usual, window):
            return None
    choices = [lookup.choose(key) for key in keys_for(model, limits, kind, window)]
    prefill, decode = (None if c.grade == "default" else c.config for c in choices)
    if prefill is None and decode is None:
        return None
    return AttentionConfig(
        prefill or default.prefill, decode or default.decode, default.merge
    )


@dataclass(frozen=True)
class ServingConfigs:
    """The defaults, and beside them what records give.

    Defaults are always among them: with PORTABLE_BACKEND_TUNE=off, or where records
    cannot be read, a start takes nothing else.

    Attributes:
        model, limits, device: what serves.
        lookup: which records there are; None: none.
    """

    model: ModelShape
    limits: EngineLimits
    device: DeviceInfo
    lookup: Lookup | None = None

    def attention(self, kind: plan.StepKind, window: int) -> Iterator[AttentionConfig]:
        """Of steps of one kind.

        Args:
            kind: of the steps.
            window: sliding window of the layers; 0: none.
        """
        yield default_of(self.model, self.limits, self.device, kind, window)
        if self.lookup is not None:
            config = recorded_for(
                self.lookup, self.model, self.limits, self.device, kind, window
            )
            if config is not None:
                yield config

    def norm(self, norm: NormShape, num_rows: int) -> Iterator[KernelConfig | None]:
        """Of a call of `norm`; None: the default."""
        yield None
        yield from self._recorded(
            rms_norm_key(self.model, self.limits, norm, num_rows=num_rows)
        )

    def cache_write(self, num_tokens: int) -> Iterator[KernelConfig | None]:
        """Of a write of so many tokens; None: the default."""
        yield None
        yield from self._recorded(
            kv_cache_key(self.model, self.limits, num_tokens=num_tokens)
        )

    def _recorded(self, key: TuningKey) -> Iterator[KernelConfig]:
        choice = self.lookup.choose(key) if self.lookup is not None else None
        if choice is not None and choice.grade != "default":
            yield choice.config
