# SPDX-License-Identifier: Apache-2.0
"""`write_kv_cache` puts each token into its slot and touches nothing else."""

import pytest
import torch
from kernel_cases import SENTINEL, bits, make_caches, make_rows
from kernel_draws import LAYOUTS

from portable_backend.device import DeviceInfo
from portable_backend.kernels import KernelConfig, launch_counts, write_kv_cache
from portable_backend.kernels.kv_cache import (
    VECTOR_BUCKET,
    candidate_configs,
    default_config,
    default_configs,
    vector_size,
)
from portable_backend.kernels.reference import write_kv_cache_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN = float("nan")


def make(
    num_tokens,
    device,
    *,
    num_kv_heads=2,
    head_size=64,
    block_size=16,
    dtype=torch.bfloat16,
    layout="nhd",
    key_rows="plain",
    value_rows="plain",
    num_blocks=9,
):
    """(key, value, key_cache, value_cache, slots): caches hold the sentinel."""
    gen = torch.Generator().manual_seed(num_tokens * 31 + head_size)
    caches = make_caches(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        layout=layout,
        dtype=dtype,
        device=device,
        fill=SENTINEL,
    )
    new = []
    for rows in (key_rows, value_rows):
        _, view = make_rows(
            num_tokens, num_kv_heads, head_size, rows=rows, dtype=dtype, device=device
        )
        view[:] = torch.randn(view.shape, generator=gen).to(device, dtype)
        new.append(view)
    slots = torch.randperm(num_blocks * block_size, generator=gen)[:num_tokens]
    return *new, *caches, slots.to(device)


def check(key, value, key_cache, value_cache, slots, **options):
    """Write and compare every slot of both caches with the oracle, bit by bit."""
    expected = write_kv_cache_reference(key, value, key_cache, value_cache, slots)
    given = [bits(t).clone() for t in (key, value)]
    assert write_kv_cache(key, value, key_cache, value_cache, slots, **options) is None
    for name, ours, right in zip(
        ("key", "value"), (key_cache, value_cache), expected, strict=True
    ):
        wrong = (bits(ours) != bits(right)).nonzero()
        assert wrong.numel() == 0, (
            f"{len(wrong)} elements of {name}_cache are wrong, "
            f"first {wrong[0].tolist()}"
        )
    assert torch.equal(bits(key), given[0])
    assert torch.equal(bits(value), given[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_lands_in_its_slot_in_any_layout(layout, dtype, device):
    check(*make(21, device, layout=layout, dtype=dtype))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_any_head_size_and_count(num_kv_heads, head_size, device):
    check(*make(7, device, num_kv_heads=num_kv_heads, head_size=head_size))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 528])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 130])
def test_any_block_size_and_token_count(num_tokens, block_size, device):
    check(*make(num_tokens, device, block_size=block_size, num_blocks=16))


@pytest.mark.parametrize("key_rows", ["plain", "qkv_slice", "odd_rows"])
@pytest.mark.parametrize("value_rows", ["plain", "qkv_slice", "odd_rows"])
def test_key_and_value_may_have_strides_of_their_own(key_rows, value_rows, device):
    check(*make(19, device, key_rows=key_rows, value_rows=value_rows, head_size=80))


def test_key_and_value_heads_may_be_strided(device):
    key, value, key_cache, value_cache, slots = make(11, device, num_kv_heads=4)
    wide = torch.randn(11, 8, 64, device=device).to(key.dtype)
    check(wide[:, ::2], value, key_cache, value_cache, slots)


def test_key_and_value_caches_may_have_strides_of_their_own(device):
    key, value, key_cache, *_, slots = make(11, device, layout="padded")
    *_, value_cache, _ = make(11, device, layout="packed_hnd")
    check(key, value, key_cache, value_cache, slots)


def test_negative_slots_are_skipped(device):
    *arguments, slots = make(20, device)
    slots[[0, 3, 4, 19]] = -1
    slots[7] = -(2**40)
    check(*arguments, slots)


def test_all_slots_may_be_negative(device):
    *arguments, slots = make(5, device)
    check(*arguments, torch.full_like(slots, -1))


@pytest.mark.parametrize("used", [0, 1, 12])
def test_tokens_past_slot_mapping_are_ignored(used, device):
    """Under CUDA graphs key and value are padded, slot_mapping may be shorter."""
    key, value, key_cache, value_cache, slots = make(20, device)
    key[used:], value[used:] = NAN, NAN
    check(key, value, key_cache, value_cache, slots[:used])


def test_an_empty_slot_mapping_launches_nothing(device):
    before = launch_counts(device)["kv_cache_write"]
    check(*make(0, device))
    assert launch_counts(device)["kv_cache_write"] == before


def test_a_write_is_one_launch(device):
    before = launch_counts(device)["kv_cache_write"]
    check(*make(50, device, num_kv_heads=8))
    assert launch_counts(device)["kv_cache_write"] == before + 1


def test_nan_and_infinity_are_copied_as_they_are(device):
    key, value, *rest = make(6, device)
    key[1], key[2], value[3], value[4] = NAN, float("inf"), -float("inf"), NAN
    check(key, value, *rest)


# vllm#34759 and others: scales belong to quantised caches.
def test_scales_of_an_unquantised_cache_are_ignored(device):
    scale = torch.tensor(0.5, device=device)
    check(*make(9, device), k_scale=scale, v_scale=scale)


# A vendor each, with the units of an H200 and an MI300X.
GPUS = (DeviceInfo.for_arch("sm90", 132), DeviceInfo.for_arch("gfx942", 304))


# 57 and 100 are no multiples of 16 bytes; 576 is DeepSeek's latent.
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (1, 576), (3, 57), (2, 100)])
def test_every_candidate_config_is_right(heads, size, device):
    """Padded tokens hold NaN, the caches a sentinel."""
    found = {
        config["VECTORS"]: config
        for gpu in GPUS
        for config in candidate_configs(num_vectors=2**20, device=gpu)
    }
    for config in found.values():
        *arguments, slots = make(
            37, device, num_kv_heads=heads, head_size=size, layout="packed_hnd"
        )
        slots[[1, 5, 36]] = -1
        for new in arguments[:2]:
            new[[1, 5, 36]] = NAN
        check(*arguments, slots, config=config)


def test_token_count_reaches_few_defaults():
    """What calls of any length compile can be listed ahead."""
    for gpu in GPUS:
        listed = default_configs(device=gpu)
        assert 1 <= len(listed) <= 2
        for size in (1, 100, VECTOR_BUCKET, VECTOR_BUCKET + 1, 2**24):
            config = default_config(num_vectors=size, device=gpu)
            candidates = candidate_configs(num_vectors=size, device=gpu)
            assert config in listed
            assert candidates[0] == config
            assert len(candidates) == len(set(candidates)) <= 13
            for candidate in candidates:
                lanes = candidate["num_warps"] * gpu.limits.warp_size
                assert candidate["VECTORS"] % lanes == 0
                assert lanes <= 1024


@pytest.mark.parametrize(
    ("size", "dtype", "elements"),
    [
        (128, torch.bfloat16, 8),
        (120, torch.float16, 8),
        (100, torch.bfloat16, 4),
        (57, torch.bfloat16, 1),
        (128, torch.float32, 4),
        (6, torch.float32, 2),
    ],
)
def test_lanes_move_16_bytes_where_heads_allow_it(size, dtype, elements):
    assert vector_size(size, dtype) == elements


@pytest.mark.parametrize("given", [0, 48, None])
def test_config_out_of_range_is_refused(given, device):
    arguments = make(5, device)
    before = launch_counts(device)
    with pytest.raises(ValueError, match=f"config VECTORS must be .* {given}"):
        config = KernelConfig.of(VECTORS=given, num_warps=1)
        write_kv_cache(*arguments, config=config)
    assert launch_counts(device) == before


# vllm#47671, sglang#20389: more than 2^31 elements in the pool.
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["planes", "pairs_nhd", "hnd"])
def test_slots_past_2_to_the_31_elements(layout, device):
    """4.6 G elements: element offsets and byte offsets need 64 bits."""
    num_blocks = 2**31 // (16 * 8 * 128) + 4096
    caches = make_caches(
        num_blocks,
        16,
        8,
        128,
        layout=layout,
        dtype=torch.bfloat16,
        device=device,
        fill=SENTINEL,
    )
    blocks = torch.tensor([0, 1, num_blocks // 2, num_blocks - 2, num_blocks - 1])
    slots = (blocks * 16 + torch.tensor([0, 5, 7, 15, 15])).to(device)
    key, value = torch.randn(2, 5, 8, 128, device=device, dtype=torch.bfloat16)
    write_kv_cache(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        block, slot = blocks.to(device), slots % 16
        assert torch.equal(cache[block, slot], new)
        cache[block, slot] = SENTINEL
        for part in cache.split(2**14):  # a comparison of the whole needs its size
            assert bool((part == SENTINEL).all())
