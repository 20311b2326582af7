# SPDX-License-Identifier: Apache-2.0
"""One attention layer: what it computes is fixed here, how is the kernels' business."""

import functools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from portable_backend import __version__
from portable_backend.device import DeviceInfo
from portable_backend.engine_config import PlanKey
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels import AttentionOptions, PagedBatch, write_kv_cache
from portable_backend.kernels._layer import AttentionLayer
from portable_backend.kernels.attention import attend
from portable_backend.metadata import PortableMetadata
from portable_backend.plugin import NAME
from portable_backend.settings import get_settings
from portable_backend.warmup.toolchain import settle

logger = init_logger("vllm.portable_backend")

# Not quantised; "auto" is the model's dtype.
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class PortableImpl(AttentionImpl[PortableMetadata]):
    """Calls the kernels with this layer's options and its group's plan."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
        **unknown: Any,
    ) -> None:
        """Heads are those of this rank; the rest as vLLM's AttentionImpl has it.

        Raises:
            UnsupportedError: names every option that cannot be honoured.
            ValueError: a PORTABLE_BACKEND_* variable does not parse, or sinks or slopes
                do not fit the heads.
        """
        get_settings()
        refused = [f"{name}={value!r}" for name, value in unknown.items()]
        if attn_type != AttentionType.DECODER:
            refused.append(f"attn_type={attn_type!r}")
        if use_alibi_sqrt:
            refused.append("use_alibi_sqrt=True")
        if chunk_lookback > -1:
            refused.append(f"chunk_lookback={chunk_lookback}")
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            refused.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        for name in ("dcp_world_size", "pcp_world_size"):
            if getattr(self, name, 1) > 1:
                refused.append(f"{name}={getattr(self, name)}")
        if refused:
            raise UnsupportedError(
                f"attention back end {NAME} does not support {', '.join(refused)}; "
                "choose another attention back end for this model"
            )
        for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if per_head is not None and len(per_head) != num_heads:
                raise bad_argument(
                    name,
                    f"one number for each of the {num_heads} query heads of this rank",
                    f"{len(per_head)} numbers",
                    "check the tensor-parallel split",
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = alibi_slopes
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # Weights that may not be loaded yet: kept as they are, read by the kernel.
        self.sinks = sinks
        self.plan_key = PlanKey(
            self.num_heads, self.num_kv_heads, self.head_size, sliding_window
        )
        self._options: AttentionOptions | None = None
        self._kv_cache: torch.Tensor | None = None
        self._layer: AttentionLayer | None = None
        _log_active(current_platform.device_type)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PortableMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query` to the layer's cache, which holds this step's tokens.

        Args:
            layer: unused; caches are not quantised.
            query, output: [num_tokens, num_heads, head_size]; rows past the step's
                tokens are padding and stay as they are.
            key, value: [num_tokens, num_kv_heads, head_size] or None.
            kv_cache: as vLLM allocates it, see `split_kv_cache`.
            attn_metadata: None in profiling runs, which have no cache: zeros.

        Returns:
            output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported")
        if attn_metadata is None:
            self.forget_cache()
            return output.fill_(0)
        bound = self._layer
        if bound is None or kv_cache is not self._kv_cache:
            bound = self._bind_cache(kv_cache)
        batch = attn_metadata.batches.get(self.plan_key)
        if batch is None:
            batch = _warn_unplanned(attn_metadata, self.plan_key)
        if self.kv_sharing_target_layer_name is not None:
            # The cache is another layer's: this layer's own K and V are not in it.
            key = value = None
        return attend(query, bound, batch, out=output, key=key, value=value)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the first slot_mapping.shape[0] tokens of key and value."""
        bound = self._layer
        if bound is None or kv_cache is not self._kv_cache:
            bound = self._bind_cache(kv_cache)
        write_kv_cache(key, value, bound.key_cache, bound.value_cache, slot_mapping)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called when weights are loaded, and again when they are reloaded."""
        device = torch.empty(0, device=current_platform.device_type).device
        # Before vLLM has PyTorch compile, so that all starts find the same kernels.
        settle(DeviceInfo.detect(device))
        if get_settings().compile_ahead == "on":
            _begin_compiling(device)
        if self._options is None:
            self._options = self._make_options(device)

    def forget_cache(self) -> None:
        """Let go of the cache; vLLM replaces it between profiling and serving."""
        self._kv_cache = self._layer = None

    def _bind_cache(self, kv_cache: torch.Tensor) -> AttentionLayer:
        # Made once per cache: views cost microseconds in every layer otherwise.
        key_cache, value_cache = split_kv_cache(kv_cache, self.head_size)
        set_range = _pointer_range_setter()
        if set_range is not None:
            set_range(kv_cache, key_cache, value_cache)
        if self._options is None:
            self._options = self._make_options(kv_cache.device)
        self._kv_cache = kv_cache
        self._layer = AttentionLayer(key_cache, value_cache, self._options)
        return self._layer

    def _make_options(self, device: torch.device) -> AttentionOptions:
        slopes = self.alibi_slopes
        return AttentionOptions(
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.logits_soft_cap,
            alibi_slopes=None
            if slopes is None
            else torch.tensor(slopes, dtype=torch.float32, device=device),
            sinks=self.sinks,
        )


def split_kv_cache(
    kv_cache: torch.Tensor, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, each [num_blocks, block_size, num_kv_heads, head_size].

    Args:
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size] (0.25), or
            [num_blocks, num_kv_heads, block_size, 2 * head_size] with K and V packed
            per head and slot (0.32 and later). Any strides, last stride 1.
        head_size: elements per head.

    Raises:
        ValueError: neither form.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        key_cache, value_cache = kv_cache.unbind(1)
    elif kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * head_size:
        key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    else:
        raise bad_argument(
            "kv_cache",
            f"[blocks, 2, slots, heads, {head_size}] or "
            f"[blocks, heads, slots, {2 * head_size}]",
            list(kv_cache.shape),
            "this vLLM's cache layout is not known; see the supported versions",
        )
    return key_cache, value_cache


def _begin_compiling(device: torch.device) -> None:
    try:
        from portable_backend.startup import begin  # brings compilers along
    except Exception as error:  # of a Triton that is not known: the builder tells
        logger.debug("kernels are not compiled early: %r", error)
        return
    begin(device)


@functools.cache
def _pointer_range_setter() -> Any:
    """ROCm, 0.33: tells Triton that a view lies within 32 bits of its base."""
    from vllm.v1.attention.backends import utils

    return getattr(utils, "set_triton_ptr_range", None)


@functools.cache
def _log_active(device_type: str) -> None:
    """Once per process: the line that proves the back end is in use."""
    import triton

    device = DeviceInfo.detect(device_type)
    logger.info(
        "Attention backend %s is active: portable-backend %s, Triton %s kernels on %s "
        "(%s)",
        NAME,
        __version__,
        triton.__version__,
        device.name,
        device.arch,
    )


def _warn_unplanned(metadata: PortableMetadata, key: PlanKey) -> PagedBatch:
    _warn_once(key)
    return metadata.unplanned()


@functools.cache
def _warn_once(key: PlanKey) -> None:
    logger.warning(
        "No plan for %s: its layer is unknown to the metadata builder. Planning inside "
        "each call instead, which is slower.",
        key,
    )
