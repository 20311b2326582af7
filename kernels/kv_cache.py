# SPDX-License-Identifier: Apache-2.0
"""Write this step's keys and values into their slots of the paged cache.

A program copies a few tokens' heads, each byte read and written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._direct import (
    Bindings,
    Launch,
    cdiv,
    gate_for,
    next_power_of_2,
    pointer_classes,
)
from portable_backend.kernels._launch import (
    COUNT_KV_CACHE_WRITE,
    count_launch,
    counters,
)
from portable_backend.kernels.config import KernelConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def default_config(
    *, num_kv_heads: int, head_size: int, device: DeviceInfo
) -> KernelConfig:
    """Tokens and heads per program, and warps.

    About 4096 elements of K and of V per program keep every lane at 16-byte accesses;
    the interpreter wants few, large programs.
    """
    padded = triton.next_power_of_2(head_size)
    heads = triton.next_power_of_2(num_kv_heads)
    if device.platform == "interpreter":
        return KernelConfig.of(
            TOKENS=max(1, 65536 // (heads * padded)), BLOCK_H=heads, num_warps=1
        )
    block_h = min(heads, max(1, 4096 // padded))
    return KernelConfig.of(TOKENS=1, BLOCK_H=block_h, num_warps=4)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kv_cache_kernel(
    # outputs
    key_cache_ptr, value_cache_ptr,
    # inputs
    key_ptr, value_ptr, slot_mapping_ptr, counts_ptr,
    # strides, in elements
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_kc_block, stride_kc_slot, stride_kc_head,
    stride_vc_block, stride_vc_slot, stride_vc_head,
    # sizes
    num_tokens: tl.int32,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    # tile
    TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    count_launch(counts_ptr, COUNT_KV_CACHE_WRITE)
    row = tl.arange(0, TOKENS * BLOCK_H)
    token = tl.program_id(0) * TOKENS + row // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + row % BLOCK_H
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    slot = slot.to(tl.int64)
    offs_d = tl.arange(0, HEAD_SIZE_PADDED)
    # A negative slot marks padding.
    mask = ((slot >= 0) & (head < NUM_KV_HEADS))[:, None] & (offs_d < HEAD_SIZE)[
        None, :
    ]
    token = token.to(tl.int64)
    k_rows = token * stride_k_token + head * stride_k_head
    v_rows = token * stride_v_token + head * stride_v_head
    k = tl.load(key_ptr + k_rows[:, None] + offs_d[None, :], mask=mask)
    v = tl.load(value_ptr + v_rows[:, None] + offs_d[None, :], mask=mask)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_rows = block * stride_kc_block + offset * stride_kc_slot + head * stride_kc_head
    v_rows = block * stride_vc_block + offset * stride_vc_slot + head * stride_vc_head
    tl.store(key_cache_ptr + k_rows[:, None] + offs_d[None, :], k, mask=mask)
    tl.store(value_cache_ptr + v_rows[:, None] + offs_d[None, :], v, mask=mask)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy new tokens into the cache, in place.

    Args:
        key, value: [>= num_tokens, num_kv_heads, head_size], the cache's dtype, last
            stride 1, other strides free and unrelated.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], last
            stride 1, other strides free and unrelated.
        slot_mapping: [num_tokens] int64, block * block_size + offset; negative: skip.
        k_scale, v_scale: of fp8 caches; ignored for caches that are not quantised.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.
    """
    num_tokens, *slot_axes = slot_mapping.shape or (0,)
    key_tokens, *key_axes = key.shape or (0,)
    value_tokens, *value_axes = value.shape or (0,)
    key_cache_ptr, value_cache_ptr = key_cache.data_ptr(), value_cache.data_ptr()
    key_ptr, value_ptr = key.data_ptr(), value.data_ptr()
    slots_ptr = slot_mapping.data_ptr()
    tensors = (key_cache, value_cache, key, value, slot_mapping)
    # What checks and launches depend on: all but the numbers of tokens.
    signature = (
        key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device,
        value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.device,
        *key_axes, key.stride(), key.dtype, key.device, key_tokens == 0,
        *value_axes, value.stride(), value.dtype, value.device, value_tokens == 0,
        *slot_axes, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device,
        num_tokens > 1,
        pointer_classes(
            key_cache_ptr | value_cache_ptr | key_ptr | value_ptr | slots_ptr, tensors
        ),
    )  # fmt: skip
    binding = _BINDINGS.get(signature)
    if binding is None or key_tokens < num_tokens or value_tokens < num_tokens:
        # Raises where a tensor has too few rows, whatever is bound already.
        _check(key, value, key_cache, value_cache, slot_mapping)
        binding = _BINDINGS[signature] = _Binding(key, value, key_cache, value_cache)
    if num_tokens == 0:
        return
    stream = binding.gate.stream() if binding.launch.ready else None
    pointers: tuple[Any, ...] = (*tensors, binding.counts)
    if stream is not None:
        pointers = (
            key_cache_ptr, value_cache_ptr, key_ptr, value_ptr, slots_ptr,
            binding.counts_ptr,
        )  # fmt: skip
    launch, tokens = binding.launch_for(num_tokens)
    launch(
        stream, cdiv(num_tokens, tokens), binding.head_blocks,
        (*pointers, *binding.strides, num_tokens),
    )  # fmt: skip


class _Binding:
    """A signature that passed the checks, and its launch."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        _, block_size, num_kv_heads, head_size = key_cache.shape
        info = DeviceInfo.detect(key.device)
        config = default_config(
            num_kv_heads=num_kv_heads, head_size=head_size, device=info
        )
        self.tokens: int = config["TOKENS"]
        self.head_blocks = cdiv(num_kv_heads, config["BLOCK_H"])
        self.constants = {
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "HEAD_SIZE": head_size,
            "HEAD_SIZE_PADDED": next_power_of_2(head_size),
            "TOKENS": self.tokens,
            "BLOCK_H": config["BLOCK_H"],
        }
        self.strides = (
            *key.stride()[:2], *value.stride()[:2],
            *key_cache.stride()[:3], *value_cache.stride()[:3],
        )  # fmt: skip
        self.counts = counters(key.device)
        self.counts_ptr = self.counts.data_ptr()
        self.gate = gate_for(key.device, info.platform)
        self.interpreted = info.platform == "interpreter"
        self.launch = Launch(
            _write_kv_cache_kernel,
            self.constants,
            config.options(info.platform),
            self.gate,
        )

    def launch_for(self, num_tokens: int) -> tuple[Launch, int]:
        """The launch, and how many tokens a program takes."""
        if not self.interpreted:
            return self.launch, self.tokens
        # The interpreter compiles nothing, so tiles may follow each call's size.
        tokens = min(self.tokens, next_power_of_2(num_tokens))
        constants = self.constants | {"TOKENS": tokens}
        return Launch(_write_kv_cache_kernel, constants, {}, self.gate), tokens


_BINDINGS = Bindings()


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        raise bad_argument(
            "slot_mapping",
            "int64 [num_tokens]",
            f"{slot_mapping.dtype} {list(slot_mapping.shape)}",
            "call .to(torch.int64)",
        )
    if slot_mapping.stride(0) != 1 and slot_mapping.shape[0] > 1:
        raise bad_argument(
            "slot_mapping", "contiguous", slot_mapping.stride(), "call .contiguous()"
        )
    if key.dtype not in DTYPES and key_cache.dtype == key.dtype:
        raise bad_argument(
            "key", "float16, bfloat16 or float32", key.dtype, "convert key and value"
        )
    if 0 in key_cache.shape:
        raise bad_argument(
            "key_cache", "not empty", list(key_cache.shape), "allocate the cache first"
        )
    for name, new, cache in (
        ("key", key, key_cache),
        ("value", value, value_cache),
    ):
        if cache.dim() != 4 or cache.stride(3) != 1:
            raise bad_argument(
                f"{name}_cache",
                "[num_blocks, block_size, num_kv_heads, head_size], last stride 1",
                f"{list(cache.shape)} with strides {cache.stride()}",
                "pass a 4-D view with head_size innermost",
            )
        if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
            raise bad_argument(
                name,
                f"[num_tokens, {cache.shape[2]}, {cache.shape[3]}] as {name}_cache",
                list(new.shape),
                "reshape it",
            )
        if new.shape[0] < slot_mapping.shape[0]:
            raise bad_argument(
                name,
                f"at least {slot_mapping.shape[0]} tokens, as slot_mapping has",
                new.shape[0],
                "shorten slot_mapping",
            )
        if cache.dtype != new.dtype:
            quantised = cache.dtype == torch.uint8 or "float8" in str(cache.dtype)
            raise bad_argument(
                f"{name}_cache",
                f"of {name}'s dtype {new.dtype}",
                cache.dtype,
                "fp8 KV caches are not supported yet, use --kv-cache-dtype auto"
                if quantised
                else f"convert {name} or the cache",
            )
        if new.stride(2) != 1 and new.numel():
            raise bad_argument(
                name, "contiguous in its last axis", new.stride(), "call .contiguous()"
            )
        for other, tensor in ((f"{name}_cache", cache), ("slot_mapping", slot_mapping)):
            if tensor.device != new.device:
                raise bad_argument(
                    other, f"on {name}'s device {new.device}", tensor.device, "move it"
                )
    if key_cache.shape != value_cache.shape:
        raise bad_argument(
            "value_cache",
            f"shaped like key_cache {list(key_cache.shape)}",
            list(value_cache.shape),
            "value heads of another size are not supported",
        )
