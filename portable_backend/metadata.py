# SPDX-License-Identifier: Apache-2.0
"""From vLLM's batch to ours: one planned `PagedBatch` per step and kind of layer."""

import copy
import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from portable_backend import settings
from portable_backend.engine_config import (
    PlanKey,
    drafts_of,
    impls_of,
    key_of_spec,
    layer_of,
    limits_of,
    step_limits,
)
from portable_backend.engine_norms import norms_served
from portable_backend.errors import UnsupportedError
from portable_backend.kernels import AttentionPlanner, PagedBatch
from portable_backend.kernels._checks import differences
from portable_backend.tuned import configs_for_engine, model_of, tell_choices
from portable_backend.tuned_rows import serve_recorded
from portable_backend.warmup.activity import Beacon
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.model_shapes import ModelShape

logger = logging.getLogger("vllm.portable_backend.metadata")


@dataclass
class PortableMetadata:
    """One step for one group of layers.

    Mutable and without slots: vLLM's wrappers subclass it, copy its fields, and set
    attributes on it. Shapes as in vLLM's CommonAttentionMetadata.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    # Known on the host, of steps with prefills only; see PagedBatch.
    query_start_loc_cpu: torch.Tensor | None = None
    no_context: bool = False
    # One planned batch per kind of layer in the group.
    batches: dict[PlanKey, PagedBatch] = field(default_factory=dict)

    def unplanned(self) -> PagedBatch:
        """The step without a plan; its lengths are read where they are."""
        on_host = self.query_start_loc.device.type == "cpu"
        host = self.query_start_loc if on_host else self.query_start_loc_cpu
        return PagedBatch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc_cpu=host,
            no_context=self.no_context,
        )


class PortableMetadataBuilder(AttentionMetadataBuilder[PortableMetadata]):
    """Plans each step once per kind of layer, in buffers at fixed addresses."""

    # Mixed batches would need max_query_len at capture, which 0.25 understates.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_size_v = getattr(kv_cache_spec, "head_size_v", None)
        if head_size_v not in (None, kv_cache_spec.head_size):
            raise UnsupportedError(
                f"value heads of size {head_size_v} beside key heads of size "
                f"{kv_cache_spec.head_size} are not supported; choose another "
                "attention back end"
            )
        impls = impls_of(vllm_config, layer_names)
        for impl in impls:
            impl.forget_cache()
        keys = {impl.plan_key for impl in impls}
        if not keys:
            keys = {key_of_spec(vllm_config, kv_cache_spec)}
        limits = step_limits(vllm_config, kv_cache_spec)
        self.max_decode_query_len: int = limits["max_decode_query_len"]
        self.has_drafts = vllm_config.speculative_config is not None
        if settings.get_settings().tune == "startup":
            _tune_missing(vllm_config, keys, kv_cache_spec.block_size, device, limits)
        engine_limits = limits_of(vllm_config, kv_cache_spec.block_size)
        self._beacon: Beacon | None = None
        if settings.get_settings().tune == "background":
            self._beacon = _beacon_for(
                vllm_config, keys, kv_cache_spec.block_size, device, limits
            )
        self.planners = {
            key: _planner(key, vllm_config, kv_cache_spec.block_size, device, limits)
            for key in sorted(keys, key=repr)
        }
        serve_recorded(
            vllm_config,
            [
                model_of(**layer_of(key, vllm_config), limits=engine_limits)
                for key in self.planners
            ],
            engine_limits,
            device,
        )
        tell_choices(self.planners.values())
        if settings.get_settings().compile_ahead == "on":
            self._compile_ahead(vllm_config, impls)

    def _compile_ahead(self, vllm_config: Any, impls: list[Any]) -> None:
        try:
            from portable_backend.startup import prepare_kernels  # brings compilers
        except Exception as error:  # of a Triton that is not known: serve all the same
            _warn_not_ahead(repr(error))
            return
        layers = {
            planner: [impl for impl in impls if impl.plan_key == key]
            for key, planner in self.planners.items()
        }
        prepare_kernels(vllm_config, layers, drafts_of(vllm_config))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PortableMetadata:
        common = common_attn_metadata
        if self._beacon is not None:
            self._beacon.step(common.num_actual_tokens)
        if common.causal is not True:
            raise UnsupportedError(
                "attention that is not causal is not supported; choose another "
                "attention back end for this model"
            )
        num_reqs = common.num_reqs
        metadata = PortableMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),
            query_start_loc=_first(common.query_start_loc, num_reqs + 1),
            max_seq_len=common.max_seq_len,
            seq_lens=_first(common.seq_lens, num_reqs),
            block_table=_first(common.block_table_tensor, num_reqs),
            slot_mapping=common.slot_mapping,
        )
        if metadata.max_query_len > self.max_decode_query_len:
            self._read_host_lengths(metadata, common)
        self._plan(metadata)
        return metadata

    def _read_host_lengths(
        self, metadata: PortableMetadata, common: CommonAttentionMetadata
    ) -> None:
        """What the host knows of a step with prefills, which no graph captures.

        Under speculation vLLM's host copy of query_start_loc may differ from the
        device's. Its upper bound of seq_lens is exact for prefills.
        """
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        bound = getattr(common, "seq_lens_cpu_upper_bound", None)
        if self.has_drafts:
            return
        metadata.query_start_loc_cpu = starts
        if bound is not None:
            limit = self.max_decode_query_len
            seq_lens = bound.numpy()[:num_reqs].tolist()
            metadata.no_context = not any(
                limit < new < total
                for new, total in zip(
                    differences(starts.numpy().tolist()), seq_lens, strict=True
                )
            )

    def _plan(self, metadata: PortableMetadata) -> None:
        batch = metadata.unplanned()
        metadata.batches = {
            key: planner.plan(batch, metadata.num_actual_tokens)
            for key, planner in self.planners.items()
        }

    def update_block_table(
        self,
        metadata: PortableMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> PortableMetadata:
        """Reuse another group's metadata, of the same step and KV spec.

        Planned again all the same: a graph captured for this group reads the buffers
        of this builder, not those of the one that made `metadata`.
        """
        updated = copy.copy(metadata)
        updated.block_table = blk_table
        updated.slot_mapping = slot_mapping
        self._plan(updated)
        return updated

    def update_draft_decode_metadata(self, metadata: PortableMetadata) -> None:
        """Follow seq_lens, which a drafter has advanced in place; can be captured."""
        metadata.batches = {
            key: self.planners[key].plan(batch, metadata.num_actual_tokens)
            for key, batch in metadata.batches.items()
        }


@functools.cache
def _warn_not_ahead(reason: str) -> None:
    logger.warning(
        "kernels are not compiled ahead, each is when it is first launched, which "
        "makes requests wait: %s; install the Triton that this vLLM was made for",
        reason,
    )


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows; no view, which costs a microsecond, where there are no more."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _planner(
    key: PlanKey,
    vllm_config: Any,
    block_size: int,
    device: torch.device,
    limits: dict[str, Any],
) -> AttentionPlanner:
    """The planner of one kind of layer, with the configs that records give it."""
    layers = layer_of(key, vllm_config) | {"device": device}
    configs = configs_for_engine(
        **layers,
        limits=limits_of(vllm_config, block_size),
        max_num_seqs=limits["max_num_seqs"],
    )
    make = functools.partial(
        AttentionPlanner, **layers, block_size=block_size, **limits
    )
    try:
        return make(configs=configs)
    except ValueError as error:
        logger.warning("recorded configs are not used, they do not fit: %s", error)
        return make()


def _tune_missing(
    vllm_config: Any,
    keys: set[PlanKey],
    block_size: int,
    device: torch.device,
    limits: dict[str, Any],
) -> None:
    """Tune for all layers of the engine, since the first builder's budget is theirs."""
    from portable_backend.start_tuning import tune_missing  # brings the tuner along

    models, engine_limits = _every_model(vllm_config, keys, block_size)
    tune_missing(models, engine_limits, limits["max_num_seqs"], device)


def _beacon_for(
    vllm_config: Any,
    keys: set[PlanKey],
    block_size: int,
    device: torch.device,
    limits: dict[str, Any],
) -> Beacon | None:
    """Have what the engine lacks tuned beside it; what to mark its steps with."""
    from portable_backend.background_tuning import beacon_for  # brings the tuner

    models, engine_limits = _every_model(vllm_config, keys, block_size)
    return beacon_for(models, engine_limits, limits["max_num_seqs"], device)


def _every_model(
    vllm_config: Any, keys: set[PlanKey], block_size: int
) -> tuple[dict[ModelShape, int], EngineLimits]:
    """All kinds of layers of the engine and how many they are; what bounds its steps.

    Norms are among them, as models without windows, that of all layers at once.

    Args:
        vllm_config: the engine's.
        keys: of a builder's layers, which need not be registered.
        block_size: of the builder's cache.
    """
    counts = Counter(impl.plan_key for impl in impls_of(vllm_config))
    engine_limits = limits_of(vllm_config, block_size)
    models = {
        model_of(**layer_of(key, vllm_config), limits=engine_limits): counts[key]
        for key in sorted(keys | counts.keys(), key=repr)
    }
    models |= dict.fromkeys(norms_served(vllm_config), max(1, sum(models.values())))
    return models, engine_limits
