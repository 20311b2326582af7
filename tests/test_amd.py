# SPDX-License-Identifier: Apache-2.0
"""What can be known of AMD's GPUs without one: options, waves, LDS, fp8 values.

Which code a cache of more than 2 GiB gets is tests/stub_compilation.py's.
"""

import dataclasses
import random

import pytest
import torch
from kernel_cases import Case, call, make_inputs
from triton.backends.amd.compiler import HIPOptions

from portable_backend.commands.compile_keys import Asked, candidates
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels.attention_space import MERGE_SPACE, AttentionShape
from portable_backend.kernels.config import PLATFORM_OPTIONS
from portable_backend.warmup.resources import MAX_LANES

AMD = [arch for arch, limits in ARCH_LIMITS.items() if limits.platform == "hip"]
KERNELS = ("prefill", "decode", "rms_norm", "kv_cache")
# Of HIPOptions, the same in the wheels of Triton 3.6.0, which PyTorch 2.10's ROCm
# builds ask for, and 3.8.0, as vLLM's images for ROCm 10 carry it (vllm#55246).
ACCEPTED = {"num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}


def configs(arch):
    """Defaults, and some of each space."""
    device = DeviceInfo.for_arch(arch)
    yield from (c.config for c in candidates(device, KERNELS, {}, Asked(each=10)))
    shape = AttentionShape(4, 128, 2, 16)
    yield from MERGE_SPACE.sample(10, random.Random(0), shape, device)


@pytest.mark.parametrize("arch", AMD)
def test_only_options_that_vllms_tritons_know_are_passed(arch):
    here = {field.name for field in dataclasses.fields(HIPOptions)}
    for config in configs(arch):
        options = config.options("hip")
        assert options.keys() <= ACCEPTED & here, config
    assert PLATFORM_OPTIONS["hip"] <= ACCEPTED


@pytest.mark.parametrize("arch", AMD)
def test_waves_have_as_many_lanes_as_the_compiler_takes(arch):
    limits = ARCH_LIMITS[arch]
    assert limits.warp_size == HIPOptions(arch=arch).warp_size
    assert limits.warp_size == (64 if arch.startswith("gfx9") else 32)
    for config in configs(arch):
        assert config["num_warps"] * limits.warp_size <= MAX_LANES


def test_lds_is_as_large_as_amds_guides_say():
    """ROCm/flash-attention#1534, vllm#48723: 65 792 of 65 536 bytes were wanted."""
    found = {arch: ARCH_LIMITS[arch].shared_bytes_per_block for arch in AMD}
    most = dict.fromkeys(AMD, 65536) | {"gfx950": 163840}
    assert found == most


FP8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("name", FP8)
def test_no_fp8_cache_is_taken_for_another_kind(name, device):
    """gfx942 reads bytes as e4m3fnuz, others as e4m3fn: a factor of two apart."""
    inputs = make_inputs(Case(1, ((1, 20),), heads=(4, 1), head_size=64), device)
    inputs.key_cache = inputs.key_cache.nan_to_num().to(getattr(torch, name))
    inputs.value_cache = inputs.value_cache.nan_to_num().to(getattr(torch, name))
    with pytest.raises(ValueError, match=f"{name}.*fp8 KV caches are not supported"):
        call(inputs)
    one = torch.tensor([0x38], dtype=torch.uint8)
    assert one.view(torch.float8_e4m3fn).float() == 1.0
    assert one.view(torch.float8_e4m3fnuz).float() == 0.5
