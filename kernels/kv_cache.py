# SPDX-License-Identifier: Apache-2.0
"""Write this step's keys and values into their slots of the paged cache.

A program copies a few tokens' heads, each byte read and written once.
"""

import functools

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
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
            Slots past the cache are the caller's fault: refused on a CPU, where looking
            is cheap; elsewhere nobody looks.
        k_scale, v_scale: of fp8 caches; ignored for caches that are not quantised.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.
    """
    num_tokens = slot_mapping.shape[0] if slot_mapping.dim() else 0
    _check(key, value, key_cache, value_cache, slot_mapping)
    if num_tokens == 0:
        return
    if key.device.type == "cpu":
        _check_slots(slot_mapping, key_cache)
    _, block_size, num_kv_heads, head_size = key_cache.shape
    config, options, counts = _config_for(key.device, num_kv_heads, head_size)
    tokens, block_h = config["TOKENS"], config["BLOCK_H"]
    if key.device.type == "cpu":
        # The interpreter compiles nothing, so tiles may follow each call's size.
        tokens = min(tokens, triton.next_power_of_2(num_tokens))
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_kv_heads, block_h))
    _write_kv_cache_kernel[grid](
        key_cache, value_cache, key, value, slot_mapping, counts,
        *key.stride()[:2], *value.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], num_tokens,
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=triton.next_power_of_2(head_size),
        TOKENS=tokens, BLOCK_H=block_h, **options,
    )  # fmt: skip


def _check_slots(slot_mapping: torch.Tensor, key_cache: torch.Tensor) -> None:
    most, slots = int(slot_mapping.max()), key_cache.shape[0] * key_cache.shape[1]
    if most >= slots:
        raise bad_argument(
            "slot_mapping", f"slots below {slots}", most, "pass block * block_size + i"
        )


@functools.cache
def _config_for(
    device: torch.device, num_kv_heads: int, head_size: int
) -> tuple[KernelConfig, dict[str, object], torch.Tensor]:
    info = DeviceInfo.detect(device)
    config = default_config(num_kv_heads=num_kv_heads, head_size=head_size, device=info)
    return config, config.options(info.platform), counters(device)


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
