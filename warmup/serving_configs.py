# SPDX-License-Identifier: Apache-2.0
"""Every config that a step of an engine can be launched with."""

import itertools
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
    prefill_token_buckets,
    rms_norm_key,
)
from portable_backend.warmup.kernel_specs import DTYPES
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.records import TuningKey


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

    def attention(
        self, kind: plan.StepKind, window: int, *, has_prefill: bool
    ) -> Iterator[AttentionConfig]:
        """Of steps of one kind.

        A record's config takes the place of its own kernel's default, also in steps of
        prefills and decodes together.

        Args:
            kind: of the steps.
            window: sliding window of the layers; 0: none.
            has_prefill: whether they have prefills.
        """
        default = plan.default_config(
            num_queries_per_kv=self.model.num_queries_per_kv,
            num_kv_heads=self.model.num_kv_heads,
            head_size=self.model.head_size,
            dtype=DTYPES[self.model.dtype],
            block_size=self.limits.block_size,
            device=self.device,
            kind=kind,
        )
        decodes, prefills = {default.decode: None}, {default.prefill: None}
        if not has_prefill or kind.mixed:
            key = decode_key(
                self.model,
                self.limits,
                num_seqs=kind.max_decodes,
                sliding_window=window,
            )
            decodes |= dict.fromkeys(self._recorded(key))
        if has_prefill:
            for num_tokens in prefill_token_buckets(self.limits):
                key = prefill_key(
                    self.model,
                    self.limits,
                    num_tokens=num_tokens,
                    no_context=kind.no_context,
                    sliding_window=window,
                )
                prefills |= dict.fromkeys(self._recorded(key))
        for prefill, decode in itertools.product(prefills, decodes):
            yield replace(default, prefill=prefill, decode=decode)

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
