# SPDX-License-Identifier: Apache-2.0
"""What today's spaces say of stored configs."""

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.warmup.kernel_specs import KERNEL_SPECS
from portable_backend.warmup.model_shapes import shape_of_config
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.space_check import space_check
from portable_backend.warmup.units import EngineLimits, units_of

H200 = DeviceInfo.for_arch("sm90", 132)
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
KEYS = [u.key for u in units_of(shape_of_config(LLAMA, "llama"), EngineLimits())]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_every_buckets_default_is_held(arch):
    device = DeviceInfo.for_arch(arch, 132)
    for key in KEYS:
        default = KERNEL_SPECS[key.kernel].default(key, device)
        assert space_check(device)(key, default) is None


@pytest.mark.parametrize("kernel", KERNEL_SPECS)
def test_a_value_outside_is_refused_with_its_reason(kernel):
    key = next(key for key in KEYS if key.kernel == kernel)
    config = KERNEL_SPECS[kernel].default(key, H200).replace(num_warps=3)
    assert "num_warps is 3, not one of" in space_check(H200)(key, config)


@pytest.mark.parametrize(
    "key",
    [
        TuningKey.of("softmax", dtype="float16"),
        TuningKey.of("decode", dtype="float16"),
        TuningKey.from_dict("rms_norm", KEYS[-1].to_dict() | {"row_size": "many"}),
    ],
    ids=str,
)
def test_unknown_keys_are_not_judged(key):
    assert KEYS[-1].kernel == "rms_norm"
    default = KERNEL_SPECS["rms_norm"].default(KEYS[-1], H200)
    assert space_check(H200)(key, default) is None
