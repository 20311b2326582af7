# SPDX-License-Identifier: Apache-2.0
"""Write this step's keys and values into their slots of the paged cache.

Each byte is read and written once, 16 bytes a lane. Lanes are dealt to the heads of all
tokens without gaps, whatever the size and number of heads.
"""

import math
from bisect import bisect_left
from typing import Any

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._checks import check_places
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
    wait_for_earlier,
)
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.kv_cache_space import (
    VECTOR_BUCKET,
    candidate_configs,
    default_config,
    default_configs,
)
from portable_backend.kernels.served import write_steps

__all__ = [
    "DTYPES",
    "VECTOR_BUCKET",
    "candidate_configs",
    "default_config",
    "default_configs",
    "vector_size",
    "write_kv_cache",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def vector_size(head_size: int, dtype: torch.dtype) -> int:
    """Elements that a lane moves at once: 16 bytes, or what divides a head."""
    return math.gcd(head_size, 16 // dtype.itemsize)


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
    # tile
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(EARLY_START)
    # Each lane moves vectors of a head, whatever the tokens and heads they belong to.
    VECTORS_PER_HEAD: tl.constexpr = HEAD_SIZE // VECTOR
    index = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    offs_d = index % VECTORS_PER_HEAD * VECTOR
    token = index // VECTORS_PER_HEAD // NUM_KV_HEADS
    head = (index // VECTORS_PER_HEAD % NUM_KV_HEADS).to(tl.int64)
    mask = token < num_tokens
    elements = tl.arange(0, VECTOR)[None, :]

    # Keys and values do not wait for their slot, nor are they left out where it is
    # negative, which marks padding.
    slot = tl.load(slot_mapping_ptr + token, mask=mask, other=-1).to(tl.int64)
    token = token.to(tl.int64)
    offsets = token * stride_k_token + head * stride_k_head + offs_d
    k = tl.load(key_ptr + offsets[:, None] + elements, mask=mask[:, None])
    offsets = token * stride_v_token + head * stride_v_head + offs_d
    v = tl.load(value_ptr + offsets[:, None] + elements, mask=mask[:, None])
    count_launch(counts_ptr, COUNT_KV_CACHE_WRITE)

    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    mask = (slot >= 0)[:, None]
    offsets = block * stride_kc_block + place * stride_kc_slot
    offsets += head * stride_kc_head + offs_d
    tl.store(key_cache_ptr + offsets[:, None] + elements, k, mask=mask)
    offsets = block * stride_vc_block + place * stride_vc_slot
    offsets += head * stride_vc_head + offs_d
    tl.store(value_cache_ptr + offsets[:, None] + elements, v, mask=mask)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    config: KernelConfig | None = None,
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
        config: launch parameters; None: what the engine has chosen (`served.py`), else
            default_config().

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
        num_tokens > 1, config,
        pointer_classes(
            key_cache_ptr | value_cache_ptr | key_ptr | value_ptr | slots_ptr, tensors
        ),
    )  # fmt: skip
    binding = _BINDINGS.get(signature)
    if binding is None or key_tokens < num_tokens or value_tokens < num_tokens:
        # Raises where a tensor has too few rows, whatever is bound already.
        _check(key, value, key_cache, value_cache, slot_mapping)
        binding = _Binding(key, value, key_cache, value_cache, config)
        _BINDINGS[signature] = binding
    if num_tokens == 0:
        return
    if key_cache_ptr == value_cache_ptr != 0:  # 0: without storage
        raise bad_argument(
            "value_cache", "a place of its own", "key_cache's", "pass two caches"
        )
    if binding.interpreted:
        _check_slots(slot_mapping, key_cache)
    num_vectors = num_tokens * binding.vectors_per_token
    launch, vectors = binding.launch_for(num_vectors)
    stream = binding.gate.stream() if launch.ready else None
    pointers: tuple[Any, ...] = (*tensors, binding.counts)
    if stream is not None:
        pointers = (
            key_cache_ptr, value_cache_ptr, key_ptr, value_ptr, slots_ptr,
            binding.counts_ptr,
        )  # fmt: skip
    launch(
        stream, cdiv(num_vectors, vectors), 1,
        (*pointers, *binding.strides, num_tokens),
    )  # fmt: skip


def _check_slots(slot_mapping: torch.Tensor, key_cache: torch.Tensor) -> None:
    most, slots = int(slot_mapping.max()), key_cache.shape[0] * key_cache.shape[1]
    if most >= slots:
        raise bad_argument(
            "slot_mapping", f"slots below {slots}", most, "pass block * block_size + i"
        )


class _Binding:
    """A signature that passed the checks, and its launch for each size of calls."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        config: KernelConfig | None,
    ) -> None:
        _, block_size, num_kv_heads, head_size = key_cache.shape
        info = DeviceInfo.detect(key.device)
        vector = vector_size(head_size, key.dtype)
        self.vectors_per_token = num_kv_heads * (head_size // vector)
        self.constants = {
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "HEAD_SIZE": head_size,
            "VECTOR": vector,
        }
        self.strides = (
            *key.stride()[:2], *value.stride()[:2],
            *key_cache.stride()[:3], *value_cache.stride()[:3],
        )  # fmt: skip
        self.counts = counters(key.device)
        self.counts_ptr = self.counts.data_ptr()
        self.gate = gate_for(key.device, info.platform)
        self.interpreted = info.platform == "interpreter"
        chosen = write_steps(key.dtype, head_size, num_kv_heads)
        # The most vectors of each launch; the last one has no bound.
        self.sizes = [VECTOR_BUCKET]
        if config is None:
            per_token = self.vectors_per_token
            self.sizes = sorted({VECTOR_BUCKET, *(n * per_token for n in chosen.sizes)})
        self.launches: list[tuple[Launch, int]] = []
        launches: dict[KernelConfig, Launch] = {}
        for size in (*self.sizes, self.sizes[-1] + 1):
            used = (
                config
                or chosen.at(cdiv(size, self.vectors_per_token))
                or default_config(num_vectors=size, device=info)
            )
            vectors = _vectors_of(used)
            options = used.options(info.platform)
            early = bool(options.get("launch_pdl"))
            if used not in launches:
                launches[used] = Launch(
                    _write_kv_cache_kernel,
                    self.constants | {"VECTORS": vectors, "EARLY_START": early},
                    options,
                    self.gate,
                )
            self.launches.append((launches[used], vectors))

    def launch_for(self, num_vectors: int) -> tuple[Launch, int]:
        """The launch, and how many vectors a program takes."""
        launch, vectors = self.launches[bisect_left(self.sizes, num_vectors)]
        if not self.interpreted:
            return launch, vectors
        # The interpreter compiles nothing, so tiles may follow each call's size.
        vectors = min(vectors, next_power_of_2(num_vectors))
        constants = self.constants | {"VECTORS": vectors, "EARLY_START": False}
        return Launch(_write_kv_cache_kernel, constants, {}, self.gate), vectors


def _vectors_of(config: KernelConfig) -> int:
    vectors = config.get("VECTORS")
    if not isinstance(vectors, int) or vectors < 1 or vectors & (vectors - 1):
        raise bad_argument(
            "config VECTORS", "a power of two", repr(vectors), "correct the config"
        )
    return vectors


_BINDINGS = Bindings()


def forget_bindings() -> None:
    """Choose configs anew; compiled kernels stay."""
    _BINDINGS.clear()


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
        check_places(f"{name}_cache", cache)
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
