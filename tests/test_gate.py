# SPDX-License-Identifier: Apache-2.0
"""The house tolerance, what is drawn to apply it to, and what it must catch."""

import math
import random
from dataclasses import replace

import pytest
import torch

from portable_backend.device import interpreting
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.reference import (
    paged_attention_reference,
    rms_norm_reference,
)
from portable_backend.warmup import attention_workload, gate, row_workloads
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.workloads import make_workload

CPU = torch.device("cpu")
# tests/test_workloads_gpu.py has those of a GPU.
interpreted = pytest.mark.skipif(
    not interpreting(), reason="runs kernels on the CPU: needs TRITON_INTERPRET=1"
)
HEADS = {
    "dtype": "float32",
    "head_size": 32,
    "num_kv_heads": 1,
    "num_queries_per_kv": 2,
    "block_size": 16,
    "sliding_window": 0,
}
PREFILL = TuningKey.of(
    "prefill", **HEADS, no_context=1, num_seqs=2, query_len=40, context_len=0
)
CHUNK = TuningKey.of(
    "prefill",
    **HEADS | {"sliding_window": 20, "dtype": "float16"},
    no_context=0,
    num_seqs=2,
    query_len=24,
    context_len=40,
)
DECODE = TuningKey.of("decode", **HEADS, num_seqs=3, query_len=1, seq_len=70)
WINDOW = TuningKey.of(
    "decode", **HEADS | {"sliding_window": 20}, num_seqs=3, query_len=3, seq_len=70
)
CACHE = TuningKey.of(
    "kv_cache", dtype="bfloat16", head_size=32, num_kv_heads=2, num_tokens=40
)
KEYS = (
    PREFILL,
    CHUNK,
    DECODE,
    WINDOW,
    CACHE,
    TuningKey.of(
        "kv_cache", dtype="float32", head_size=32, num_kv_heads=1, num_tokens=1
    ),
    TuningKey.of("rms_norm", dtype="bfloat16", row_size=100, fused_add=1, num_rows=16),
    TuningKey.of("rms_norm", dtype="float32", row_size=64, fused_add=0, num_rows=1),
)


@interpreted
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_default_passes_and_its_timing_output_is_right(key):
    workload = make_workload(key, CPU)
    for seed in range(3):
        check = workload.check(workload.default, seed)
        assert check.wrong is None
        assert 0 <= check.error_ratio < 4
    contestant = workload.contestant(workload.default)
    assert contestant.verify() <= workload.error_limit
    contestant.refill()
    for call in contestant.calls:
        call()
    if contestant.recheck is not None:
        assert contestant.recheck() <= workload.error_limit
        contestant.refill()
        assert not contestant.recheck() <= workload.error_limit, "nothing was written"


def test_the_rule_is_twice_torchs_error_and_two_rounding_steps():
    oracle = torch.tensor([[1.0, -2.0, 4.0, 3.0]])
    step = 4 * torch.finfo(torch.bfloat16).eps
    torchs = (oracle + torch.tensor([0, 0, 0, step / 2])).to(torch.bfloat16)
    for error, right in (
        (0.0, True),
        (step, True),
        (3 * step, True),
        (4 * step, False),
    ):
        ours = (oracle + torch.tensor([error, 0, 0, 0])).to(torch.bfloat16)
        check = gate.judge(ours, oracle, torchs, "sum")
        assert (check.wrong is None) == right
        assert check.error_ratio == error / step
    assert check.wrong is not None
    assert check.wrong.startswith("sum: error 0.125, allowed")
    assert check.wrong.endswith("1 of 4 elements are off")


def test_nan_is_the_largest_error_and_torchs_own_overflow_excuses_nothing():
    oracle = torch.ones(2, 4)
    ours = oracle.to(torch.float16)
    overflown = torch.full_like(ours, math.inf)
    assert gate.judge(ours, oracle, overflown, "x").wrong is None
    assert gate.judge(ours * 2, oracle, overflown, "x").wrong is not None
    ours[1, 3] = math.nan
    check = gate.judge(ours, oracle, ours, "x")
    assert check.error_ratio == math.inf
    assert check.wrong is not None
    assert gate.judge(ours[:0], oracle[:0], ours[:0], "x") == gate.Check(0.0)


def test_the_first_thing_wrong_ends_the_checks():
    def checks():
        yield gate.Check(1.5)
        yield gate.Check(0.5, "wrong")
        raise AssertionError("asked for more")

    assert gate.worst_of(checks()) == gate.Check(1.5, "wrong")
    assert gate.worst_of([]) == gate.Check(0.0)


def test_lengths_are_uneven_within_the_bucket_and_not_those_timed():
    rng = random.Random(0)
    for size in (1, 2, 16, 17, 100):
        for count in (1, 2, 5):
            lengths = gate.draw_lengths(rng, count, size, 1000)
            assert len(lengths) == count
            assert all(1 <= length <= size for length in lengths)
            assert lengths[0] >= (size - 1) // 2
            assert size == 1 or lengths[0] != size
            assert lengths[0] % 16
            assert count == 1 or lengths[1] == 1
    lengths = gate.draw_lengths(rng, 9, 10**6, 100)
    assert 50 <= lengths[0] <= max(lengths) <= 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_and_their_products_stay_in_range(dtype):
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    for distribution in gate.DISTRIBUTIONS:
        query, keys, values = distribution.query(x), distribution.rows(x), x
        assert (query @ keys.T).isfinite().all(), distribution.name
        assert distribution.value(values).isfinite().all(), distribution.name
        assert keys.dtype == dtype


@interpreted
def test_other_seeds_draw_other_inputs_and_the_same_seed_the_same(monkeypatch):
    drawn = []
    judge = gate.judge

    def spy(ours, oracle, same_dtype, label):
        drawn.append((label, ours.sum().item()))
        return judge(ours, oracle, same_dtype, label)

    monkeypatch.setattr(attention_workload, "judge", spy)
    workload = make_workload(DECODE, CPU)
    found = []
    for seed in (0, 1, 0):
        drawn.clear()
        workload.check(workload.default, seed)
        found.append(list(drawn))
    assert found[0] == found[2]
    assert not set(found[0]) & set(found[1])
    names = {label.split(" inputs")[0] for label, _ in found[0] + found[1]}
    assert len(names) > 2


def _right(query, keys, values, step, options, **changes):
    batch = replace(step, plan=None, **changes)
    # The step's rows; padding is NaN.
    return paged_attention_reference(query, keys, values, batch, options)


def _rows(step):
    return slice(0, int(step.query_start_loc[-1]))


def _twist(name, *given, out):
    query, keys, values, step, options = given
    rows = _rows(step)
    lens = step.seq_lens
    timed = bool((lens == lens[0]).all())
    if name == "right":
        out[rows] = _right(*given)[rows].to(out.dtype)
    elif name == "writes nothing":
        pass
    elif name == "one key too many":
        out[rows] = _right(*given, seq_lens=lens + 1)[rows].to(out.dtype)
    elif name == "one key too few":
        shorter = (lens - 1).clamp_min(1)
        out[rows] = _right(*given, seq_lens=shorter)[rows].to(out.dtype)
    elif name == "no window":
        given = (*given[:4], replace(options, sliding_window=None))
        out[rows] = _right(*given)[rows].to(out.dtype)
    elif name == "the timed lengths only":
        longest = lens if timed else torch.full_like(lens, int(lens.max()))
        out[rows] = _right(*given, seq_lens=longest)[rows].to(out.dtype)
    elif name == "one head less":
        out[rows] = _right(*given)[rows].to(out.dtype)
        out[rows, -1] = out[rows, 0]
    elif name == "a request less":
        out[rows] = _right(*given)[rows].to(out.dtype)
        last = slice(int(step.query_start_loc[-2]), rows.stop)
        out[last] = float("nan")
    elif name == "no maximum subtracted":
        scores = torch.einsum("qhd,bshd->hqbs", query[rows].float(), keys[:, :, :1])
        out[rows] = _right(*given)[rows].to(out.dtype)
        if float(scores.nan_to_num().abs().max()) * options.scale > 88:
            out[rows] = float("inf")
    elif name == "writes padding":
        out[:] = _right(*given).nan_to_num(0.0).to(out.dtype)
    elif name == "writes the cache":
        out[rows] = _right(*given)[rows].to(out.dtype)
        values[0, 0, 0, 0] = 0.0


TWISTS = [
    ("writes nothing", DECODE),
    ("writes nothing", PREFILL),
    ("one key too many", DECODE),
    ("one key too few", DECODE),
    ("one key too few", CHUNK),
    ("no window", WINDOW),
    ("no window", CHUNK),
    ("the timed lengths only", DECODE),
    ("the timed lengths only", CHUNK),
    ("one head less", DECODE),
    ("a request less", PREFILL),
    ("no maximum subtracted", PREFILL),
    ("writes padding", DECODE),
    ("writes the cache", DECODE),
]


@interpreted
@pytest.mark.parametrize(("name", "key"), [("right", DECODE), *TWISTS])
def test_attention_gone_wrong_is_caught(name, key, monkeypatch):
    def planted(query, keys, values, step, options, *, out, key, value):
        _twist(name, query, keys, values, step, options, out=out)

    workload = make_workload(key, CPU)
    monkeypatch.setattr(attention_workload, "paged_attention", planted)
    wrong = [workload.check(workload.default, seed).wrong for seed in range(3)]
    if name == "right":
        assert wrong == [None] * 3
    elif name == "no maximum subtracted":
        # Shows with large inputs only; the interpreter's checks are of two kinds each.
        assert any(wrong)
    else:
        assert all(wrong)


@interpreted
@pytest.mark.parametrize(
    "bug", ["nothing", "skipped", "padding", "swapped", "rounded", "kept"]
)
def test_a_cache_write_gone_wrong_is_caught(bug, monkeypatch):
    kept = {}

    def planted(key, value, key_cache, value_cache, slots, *, config):
        if bug == "kept":
            key, value = kept.setdefault(len(slots), (key, value))
        if bug == "swapped":
            key, value = value, key
        if bug == "rounded":
            key = (key.float() * 1.005).to(key.dtype)
        if bug == "padding":
            spare = key.shape[0] - slots.shape[0]
            slots = torch.cat((slots, slots.new_zeros(spare)))
        for cache, new in ((key_cache, key), (value_cache, value)):
            for token, slot in enumerate(slots.tolist()):
                if bug == "nothing" or (slot < 0 and bug != "skipped"):
                    continue
                cache[slot // 64, slot % 64] = new[token]

    workload = make_workload(CACHE, CPU)
    monkeypatch.setattr(row_workloads, "write_kv_cache", planted)
    assert workload.check(workload.default, 0).wrong is not None


NORM_OF_HEADS = TuningKey.of(
    "rms_norm", dtype="bfloat16", row_size=64, fused_add=0, num_rows=16
)


@interpreted
@pytest.mark.parametrize("bug", ["none", "packed heads", "no fp32 weight"])
def test_a_norm_gone_wrong_for_heads_or_for_fp32_weights_is_caught(bug, monkeypatch):
    def planted(x, weight, eps, *, out, config):
        if bug == "no fp32 weight" and weight.dtype != x.dtype:
            weight = None
        if bug == "packed heads" and x.dim() == 3:  # as if a token had no other heads
            x = x.as_strided(x.shape, (x[0].numel(), x.shape[-1], 1))
        out.copy_(rms_norm_reference(x, weight, eps)[0])

    workload = make_workload(NORM_OF_HEADS, CPU)
    assert workload.check(workload.default, 0).wrong is None
    monkeypatch.setattr(row_workloads, "rms_norm", planted)
    assert (workload.check(workload.default, 0).wrong is None) == (bug == "none")
    # Trials leave this out: it takes binaries that nothing else would.
    assert workload.check(workload.default, 0, reuse=True).wrong is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (TuningKey.of("decode", **HEADS, num_seqs=1, query_len=9, seq_len=9), "1 to 8"),
        (
            TuningKey.of(
                "prefill", **HEADS, no_context=1, num_seqs=1, query_len=8, context_len=0
            ),
            "above 8",
        ),
        (
            TuningKey.of(
                "prefill", **HEADS, no_context=1, num_seqs=1, query_len=9, context_len=7
            ),
            "no_context must be 1 where context_len is 0",
        ),
        (TuningKey.of("softmax", dtype="float32"), "one of prefill, decode"),
    ],
)
def test_a_key_that_leads_elsewhere_is_refused(key, expected):
    with pytest.raises(ValueError, match=expected):
        make_workload(key, CPU)


@interpreted
def test_a_config_that_cannot_run_raises():
    workload = make_workload(PREFILL, CPU)
    with pytest.raises(ValueError, match="PACK"):
        workload.check(workload.default.replace(PACK=3), 0)
    with pytest.raises(ValueError, match="BLOCK_N"):
        workload.check(KernelConfig.of(BLOCK_M=16), 0)
