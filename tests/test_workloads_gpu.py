# SPDX-License-Identifier: Apache-2.0
"""Each kernel's workload at the sizes of an 8B model, on a GPU."""

import random
import statistics
import time

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal

pytestmark = pytest.mark.gpu

HEADS = {
    "dtype": "bfloat16",
    "head_size": 128,
    "num_kv_heads": 8,
    "num_queries_per_kv": 4,
    "block_size": 64,
    "sliding_window": 0,
}
NORM = {"dtype": "bfloat16", "row_size": 4096}
CACHE = {"dtype": "bfloat16", "head_size": 128, "num_kv_heads": 8}
KEYS = [
    TuningKey.of(
        "prefill", **HEADS, no_context=1, num_seqs=2, query_len=4096, context_len=0
    ),
    TuningKey.of(
        "prefill", **HEADS, no_context=0, num_seqs=1, query_len=2048, context_len=8192
    ),
    TuningKey.of("decode", **HEADS, num_seqs=1, query_len=1, seq_len=32768),
    TuningKey.of("decode", **HEADS, num_seqs=64, query_len=1, seq_len=2048),
    TuningKey.of("decode", **HEADS, num_seqs=16, query_len=4, seq_len=1024),
    TuningKey.of(
        "decode",
        **HEADS | {"sliding_window": 128},
        num_seqs=4,
        query_len=1,
        seq_len=131072,
    ),
    TuningKey.of("rms_norm", **NORM, fused_add=1, num_rows=16),
    TuningKey.of("rms_norm", **NORM, fused_add=0, num_rows=16384),
    TuningKey.of("kv_cache", **CACHE, num_tokens=64),
    TuningKey.of("kv_cache", **CACHE, num_tokens=8192),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_configs_pass_the_gate_quickly_and_keep_below_the_roof(key, device):
    from portable_backend.warmup.measuring import Bench
    from portable_backend.warmup.workloads import make_workload

    workload = make_workload(key, device)
    bench = Bench(workload, device, turn_us=3000.0)
    configs = [workload.default]
    space = spec_of(key).bound(key, DeviceInfo.detect(device))
    configs += space.sample(2, random.Random(0))
    for i, config in enumerate(configs):
        proposal = Proposal(config, 3)
        trial = bench.trial(proposal, seed=i, incumbent=workload.default)
        assert trial.time_us is not None
        assert trial.time_us > 0.95 * (workload.roof_us or 0)
    spans = []
    for seed in range(10, 15):
        start = time.perf_counter()
        assert workload.check(workload.default, seed).wrong is None
        spans.append(time.perf_counter() - start)
    assert statistics.median(spans) < 0.1
    confirmation = bench.confirm(workload.default, seed=0, rounds=9)
    assert confirmation.wrong is None
    assert confirmation.noise < 0.05
    assert confirmation.time_us == pytest.approx(confirmation.default_us, rel=0.05)
