# SPDX-License-Identifier: Apache-2.0
"""Each kernel's keys, spaces and defaults fit together."""

import random

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.warmup.kernel_specs import KERNEL_SPECS, spec_of
from portable_backend.warmup.records import TuningKey

HEADS = {
    "dtype": "bfloat16",
    "head_size": 128,
    "num_kv_heads": 8,
    "num_queries_per_kv": 4,
    "block_size": 64,
    "sliding_window": 0,
}
KEYS = [
    TuningKey.of(
        "prefill", **HEADS, no_context=1, num_seqs=4, query_len=2048, context_len=0
    ),
    TuningKey.of(
        "prefill", **HEADS, no_context=0, num_seqs=1, query_len=2048, context_len=8192
    ),
    TuningKey.of("decode", **HEADS, num_seqs=32, query_len=1, seq_len=4096),
    TuningKey.of("rms_norm", dtype="float16", row_size=4096, fused_add=1, num_rows=16),
    TuningKey.of(
        "kv_cache", dtype="bfloat16", head_size=128, num_kv_heads=8, num_tokens=256
    ),
]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_default_is_a_member_of_the_space(key, arch):
    device = DeviceInfo.for_arch(arch)
    spec = spec_of(key)
    space = spec.bound(key, device)
    assert space.why_not(spec.default(key, device)) == []
    assert len(space) == len(space.configs) == len(set(space.configs)) > 1
    rng = random.Random(3)
    config = space.sample(1, rng)[0]
    child = space.crossover(config, spec.default(key, device), rng)
    for near in (space.mutate(config, rng), child, *space.neighbours(config)):
        assert space.why_not(near) == []


def test_a_llama_has_at_least_450_candidates_per_attention_kernel():
    device = DeviceInfo.for_arch("sm90", 132)
    for key in KEYS[:3]:
        assert len(spec_of(key).bound(key, device)) >= 450


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (TuningKey.of("softmax", dtype="float16"), "prefill, decode"),
        (TuningKey.of("rms_norm", dtype="float16", num_rows=1), "row_size"),
        (
            TuningKey.of("rms_norm", dtype="int8", row_size=8, fused_add=0, num_rows=1),
            "bfloat16",
        ),
    ],
)
def test_a_wrong_key_says_what_is_expected(key, expected):
    with pytest.raises(ValueError, match=expected):
        spec_of(key)


def test_names_are_the_records():
    assert list(KERNEL_SPECS) == ["prefill", "decode", "rms_norm", "kv_cache"]
