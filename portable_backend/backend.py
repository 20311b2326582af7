# SPDX-License-Identifier: Apache-2.0
"""The attention back end as vLLM sees it: what it supports, and its two classes.

vLLM checks `PortableBackend` against a model, then makes a `PortableImpl` per layer and
a `PortableMetadataBuilder` per group of layers.
"""

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from portable_backend.device import interpreting
from portable_backend.impl import KV_CACHE_DTYPES, PortableImpl
from portable_backend.metadata import PortableMetadataBuilder
from portable_backend.plugin import NAME
from portable_backend.settings import get_settings

HEAD_SIZES = range(32, 257, 8)
# Pages of 64 tokens let one descriptor fetch a whole tile; vLLM's default is 16.
MIN_GPU_BLOCK_SIZE = 64


class PortableBackend(AttentionBackend):
    """What the back end can do; vLLM refuses the rest before a model is loaded."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*KV_CACHE_DTYPES]
    # The layer calls do_kv_cache_update before forward.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        # vLLM looks this up as the enum member's name.
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PortableImpl]:
        return PortableImpl

    @staticmethod
    def get_builder_cls() -> type[PortableMetadataBuilder]:
        return PortableMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape where the back end chooses it (0.25); K and V side by side."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Order of the logical axes in memory, blocks outermost (0.25)."""
        from vllm.v1.attention.backends import utils

        if utils.get_kv_cache_layout() == "HND":
            return (
                (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
            )
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        size: int = super().get_preferred_block_size(default_block_size)
        return size if current_platform.is_cpu() else max(size, MIN_GPU_BLOCK_SIZE)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        # The CPU has none. Before 8.0 shared memory is too small for the largest heads.
        if capability is None or not current_platform.is_cuda():
            return True
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Every reason of ours at once, in words that say what to do."""
        reasons = []
        if not cls.supports_head_size(head_size):
            reasons.append(
                f"head size must be a multiple of {HEAD_SIZES.step} from "
                f"{HEAD_SIZES[0]} to {HEAD_SIZES[-1]}, got {head_size}"
            )
        model_dtype = str(dtype).removeprefix("torch.")
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            reasons.append(
                f"quantised KV caches are not implemented yet, got {kv_cache_dtype}; "
                "use --kv-cache-dtype auto"
            )
        elif kv_cache_dtype not in (None, "auto", model_dtype):
            reasons.append(
                f"the KV cache must have the model's dtype {model_dtype}, got "
                f"{kv_cache_dtype}; use --kv-cache-dtype auto"
            )
        if current_platform.is_cpu() and not interpreting():
            reasons.append(
                "on a CPU the kernels need Triton's interpreter; set "
                "TRITON_INTERPRET=1 in the environment before vLLM starts"
            )
        try:
            get_settings()
        except ValueError as error:
            reasons.append(str(error))
        return "; ".join(reasons) or None
