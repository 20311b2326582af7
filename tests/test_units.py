# SPDX-License-Identifier: Apache-2.0
"""Every step has a bucket among the few that are tuned, and the host can name it."""

import functools
import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_backend.device import DeviceInfo
from portable_backend.kernels import kv_cache_space, rms_norm_space
from portable_backend.kernels.plan import StepKind
from portable_backend.warmup.buckets import (
    all_keys,
    num_seqs_buckets,
    prefill_token_buckets,
)
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.model_shapes import ModelShape, NormShape
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.units import (
    EngineLimits,
    Step,
    WorkUnit,
    bucket_of_step,
    decode_key,
    kv_cache_key,
    prefill_key,
    read_shapes,
    rms_norm_key,
    units_of,
    write_shapes,
)

LLAMA = ModelShape(
    name="llama",
    dtype="bfloat16",
    hidden_size=4096,
    num_layers=32,
    head_size=128,
    num_query_heads=32,
    num_kv_heads=8,
    tensor_parallel_size=1,
    max_model_len=131072,
    norms=(NormShape(4096, True, 1, 64), NormShape(4096, False, 1, 1)),
    windows=((0, 32),),
)
QWEN3 = replace(
    LLAMA,
    norms=(
        *LLAMA.norms,
        NormShape(128, False, 32, 36),
        NormShape(128, False, 8, 36),
    ),
)
GPT_OSS = replace(LLAMA, head_size=64, windows=((0, 12), (128, 12)))
# What a bucket of each kernel rounds up.
SIZE_OF = {"decode": "num_seqs", "kv_cache": "num_tokens", "rms_norm": "num_rows"}
MODELS = [LLAMA, QWEN3, GPT_OSS]
ENGINES = [
    EngineLimits(),
    EngineLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1),
    EngineLimits(max_num_seqs=100, max_num_batched_tokens=100, max_model_len=1000),
    EngineLimits(max_num_seqs=1024, max_num_batched_tokens=65536),
    EngineLimits(max_num_seqs=3, max_model_len=4097, speculative_tokens=15),
    EngineLimits(max_num_seqs=7, max_num_batched_tokens=9, speculative_tokens=40),
    EngineLimits(max_model_len=10_000_000, block_size=16),
]


@st.composite
def engines(draw):
    """A model, limits, and the keys that are tuned for them."""
    model = draw(st.sampled_from(MODELS))
    model = replace(
        model,
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        head_size=draw(st.sampled_from([40, 64, 128, 256])),
        windows=draw(
            st.sampled_from([((0, 4),), ((0, 4), (128, 4)), ((4096, 2),), ((3, 2),)])
        ),
    )
    size = st.integers(1, 1 << 17) | st.sampled_from([1, 2, 8, 9, 512, 4096, 8192])
    limits = EngineLimits(
        max_num_seqs=draw(st.integers(1, 2048)),
        max_num_batched_tokens=draw(size),
        max_model_len=draw(st.none() | size | st.integers(1, 1 << 24)),
        speculative_tokens=draw(st.sampled_from([0, 0, 1, 3, 8, 20])),
    )
    return model, limits


@given(engines(), st.data())
@settings(max_examples=200, deadline=None)
def test_every_step_falls_into_units_that_are_tuned(engine, data):
    model, limits = engine
    tuned = {unit.key for unit in units_of(model, limits)}
    # Graph padding and drafts may go beyond the limits.
    num_tokens = data.draw(st.integers(0, 4 * limits.max_num_tokens))
    step = Step(
        num_tokens=num_tokens,
        num_decodes=data.draw(st.integers(0, 4 * limits.max_num_seqs)),
        num_prefill_tokens=data.draw(st.integers(0, num_tokens)),
        no_context=data.draw(st.booleans()),
    )
    keys = bucket_of_step(model, limits, step)
    assert set(keys) <= tuned
    kernels = {key.kernel for key in keys}
    assert {"rms_norm", "kv_cache"} <= kernels
    assert ("decode" in kernels) == (step.num_decodes > 0)
    assert ("prefill" in kernels) == (step.num_prefill_tokens > 0)
    window = data.draw(st.sampled_from(model.sliding_windows))
    length = data.draw(st.integers(0, 2 * limits.model_len(model)))
    decode = decode_key(
        model,
        limits,
        num_seqs=max(step.num_decodes, 1),
        seq_len=length,
        sliding_window=window,
    )
    prefill = prefill_key(
        model,
        limits,
        num_tokens=num_tokens,
        no_context=False,
        context_len=length,
        sliding_window=window,
    )
    assert {decode, prefill} <= tuned


def draw_sizes(rng, most, edges):
    """1000 of 1 to `most`, short ones as often as long ones, and those at edges."""
    found = np.exp(rng.uniform(0, np.log(most + 1), 1000)).astype(np.int64)
    near = np.unique([n + d for n in edges for d in (-1, 0, 1)])
    found[: len(near)] = near
    return np.clip(rng.permutation(found), 1, most).tolist()


def draw_batches(rng, model, limits):
    seqs, tokens = num_seqs_buckets(limits), prefill_token_buckets(limits)
    middles = [int((low * high) ** 0.5) for low, high in itertools.pairwise(tokens)]
    most = limits.max_num_tokens
    writes = [key.to_dict()["num_tokens"] for key in all_keys(model, limits)
              if key.kernel == "kv_cache"]  # fmt: skip
    return zip(
        draw_sizes(rng, most, writes),
        draw_sizes(rng, seqs[-1], seqs),
        draw_sizes(rng, most, tokens + middles),
        (rng.random(1000) < 0.5).tolist(),
        strict=True,
    )


def smallest_that_holds(sizes, number):
    """The largest for what none holds, such as graph padding."""
    return min((size for size in sizes if size >= number), default=max(sizes))


def nearest_by_ratio(sizes, number):
    """One, or two where both are as near."""
    far = {size: abs(math.log(number / size)) for size in sizes}
    return [size for size in sizes if far[size] <= min(far.values()) + 1e-9]


@given(engines(), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_the_bucket_function_is_total_and_minimal(engine, seed):
    """Over 10^5 batches: each is in one bucket of each kind of call, the smallest that
    holds it, or the nearest one for prefills; and no bucket is without a batch."""
    model, limits = engine
    every = set(all_keys(model, limits))
    sizes = {}
    for key in every - {key for key in every if key.kernel == "prefill"}:
        size = dict(key.sizes)[SIZE_OF[key.kernel]]
        sizes.setdefault(key.structure, set()).add(size)
    tokens = prefill_token_buckets(limits)
    prefills = {
        (size, alone): {
            prefill_key(
                model, limits, num_tokens=size, no_context=alone, sliding_window=window
            )
            for window in model.sliding_windows
        }
        for size in tokens
        for alone in (False, True)
    }
    norms = [
        (norm, rms_norm_key(model, limits, norm, num_rows=1).structure)
        for norm in model.norms
    ]
    held = functools.cache(lambda kind, n: smallest_that_holds(sizes[kind], n))
    for batch in draw_batches(np.random.default_rng(seed), model, limits):
        num_tokens, num_decodes, num_prefill_tokens, alone = batch
        keys = bucket_of_step(model, limits, Step(*batch))
        assert every.issuperset(keys), batch
        found = {
            (key.structure, size)
            for key in keys
            if (size := dict(key.sizes).get(SIZE_OF.get(key.kernel)))
        }
        expected = {
            (norm, held(norm, num_tokens * shape.rows_per_token))
            for shape, norm in norms
        }
        for key in keys:
            if key.kernel in ("decode", "kv_cache"):
                number = num_decodes if key.kernel == "decode" else num_tokens
                expected.add((key.structure, held(key.structure, number)))
        assert found == expected, batch
        near = nearest_by_ratio(tokens, num_prefill_tokens)
        met = {key for key in keys if key.kernel == "prefill"}
        assert met in [prefills[size, alone] for size in near], batch
        kinds = Counter(key.kernel for key in keys)
        assert kinds["decode"] == kinds["prefill"] == len(model.sliding_windows)
        assert kinds["kv_cache"] == 1
    for key in every:
        assert is_reached(key, model, limits), key


def is_reached(key, model, limits):
    """Whether a batch of the bucket's own sizes falls into it."""
    fields = key.to_dict()
    if key.kernel == "decode":
        sizes = {name: fields[name] for name in ("num_seqs", "seq_len")}
        window = fields["sliding_window"]
        return key == decode_key(model, limits, sliding_window=window, **sizes)
    if key.kernel == "kv_cache":
        return key == kv_cache_key(model, limits, num_tokens=fields["num_tokens"])
    if key.kernel == "rms_norm":
        most = limits.max_num_tokens
        tokens = (
            (norm, min(fields["num_rows"] // norm.rows_per_token, most))
            for norm in model.norms
        )
        return any(
            key == rms_norm_key(model, limits, norm, num_rows=n * norm.rows_per_token)
            for norm, n in tokens
        )
    lengths = {"context_len": fields["context_len"]} if fields["context_len"] else {}
    return any(
        key
        == prefill_key(
            model,
            limits,
            num_tokens=size,
            no_context=not lengths,
            sliding_window=fields["sliding_window"],
            **lengths,
        )
        for size in prefill_token_buckets(limits)
    )


@given(engines())
@settings(max_examples=100, deadline=None)
def test_units_are_keys_that_the_kernels_take(engine):
    model, limits = engine
    units = units_of(model, limits)
    assert len({unit.key for unit in units}) == len(units)
    assert sum(unit.weight for unit in units) == pytest.approx(1)
    assert [u.weight for u in units] == sorted((u.weight for u in units), reverse=True)
    model_len = limits.model_len(model)
    for unit in units:
        spec_of(unit.key)
        fields = unit.key.to_dict()
        assert all(isinstance(value, int | str) for value in fields.values())
        if unit.key.kernel == "decode":
            assert fields["num_seqs"] < 2 * limits.max_num_seqs
            assert 1 <= fields["seq_len"] <= model_len
        if unit.key.kernel == "prefill":
            assert fields["num_seqs"] <= limits.max_num_seqs
            assert bool(fields["context_len"]) != bool(fields["no_context"])
            assert fields["query_len"] + fields["context_len"] <= max(model_len, 2)


@given(engines(), st.data())
@settings(max_examples=100, deadline=None)
def test_all_calls_of_a_bucket_have_its_default(engine, data):
    model, limits = engine
    device = DeviceInfo.for_arch("sm90", 132)
    tokens = data.draw(st.integers(1, limits.max_num_tokens))
    dtype = DTYPES[model.dtype]
    for norm in model.norms:
        rows = tokens * norm.rows_per_token
        key = rms_norm_key(model, limits, norm, num_rows=rows)
        assert spec_of(key).default(key, device) == rms_norm_space.default_config(
            row_size=norm.row_size, num_rows=rows, dtype=dtype, device=device
        )
    key = kv_cache_key(model, limits, num_tokens=tokens)
    exact = TuningKey.from_dict("kv_cache", key.to_dict() | {"num_tokens": tokens})
    default = spec_of(exact).default
    # Counted in vectors, as the kernel does.
    assert default(exact, device) == default(key, device)
    assert default(key, device) in kv_cache_space.default_configs(device=device)


@given(engines(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_decodes_bucket_follows_the_planners_kind(engine, data):
    model, limits = engine
    num_decodes = data.draw(st.integers(1, limits.max_num_seqs))
    kind = StepKind.of(num_decodes, no_context=False, has_prefill=False)
    key = decode_key(model, limits, num_seqs=num_decodes)
    assert key.to_dict()["num_seqs"] == kind.max_decodes


@pytest.mark.parametrize("limits", ENGINES, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=["llama", "qwen3", "gpt_oss"])
def test_units_stay_few(model, limits):
    assert len(units_of(model, limits)) <= 140


def test_a_llama_with_default_limits_has_76_units():
    units = units_of(LLAMA, EngineLimits())
    kernels = [unit.key.kernel for unit in units]
    counts = {kernel: kernels.count(kernel) for kernel in sorted(set(kernels))}
    assert counts == {"decode": 40, "kv_cache": 7, "prefill": 15, "rms_norm": 14}
    assert units[0].key.kernel in ("prefill", "decode")


def test_what_serves_decodes_has_the_geometric_mean_of_lengths():
    for max_model_len, seq_len in ((131072, 16384), (8192, 4096), (900, 900)):
        limits = EngineLimits(max_model_len=max_model_len)
        key = decode_key(LLAMA, limits, num_seqs=4)
        assert key.to_dict()["seq_len"] == seq_len


def test_lengths_beyond_a_window_are_one_bucket():
    def lengths(window):
        keys = [
            decode_key(
                LLAMA, EngineLimits(), num_seqs=1, seq_len=n, sliding_window=window
            )
            for n in (1, 1024, 5000, 16384, 131072)
        ]
        return [key.to_dict()["seq_len"] for key in keys]

    assert lengths(0) == [1024, 1024, 4096, 16384, 65536]
    assert lengths(4096) == [1024, 1024, 4096, 4096, 4096]
    assert lengths(128) == [1024] * 5


def test_more_calls_of_the_same_shape_weigh_more():
    weights = {unit.key: unit.weight for unit in units_of(LLAMA, EngineLimits())}
    norm = {"dtype": "bfloat16", "row_size": 4096, "num_rows": 16}
    fused = weights[TuningKey.of("rms_norm", fused_add=1, **norm)]
    assert fused > 32 * weights[TuningKey.of("rms_norm", fused_add=0, **norm)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("block_size", 24),
        ("speculative_tokens", -1),
    ],
)
def test_limits_that_make_no_sense_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        EngineLimits(**{name: value})


# ------------------------------------------------------------------------ shapes files


def test_a_shapes_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "shapes.json"
    units = units_of(GPT_OSS, EngineLimits())
    write_shapes(path, units)
    found = read_shapes(path)
    assert [unit.key for unit in found] == [unit.key for unit in units]
    for unit, other in zip(found, units, strict=True):
        assert unit.weight == pytest.approx(other.weight)


def test_weights_may_be_left_out(tmp_path):
    path = tmp_path / "shapes.json"
    units = units_of(LLAMA, EngineLimits())[:2]
    entries = [{"kernel": u.key.kernel, "key": u.key.to_dict()} for u in units]
    path.write_text(json.dumps([entries[0], entries[1] | {"weight": 3}]))
    assert read_shapes(path) == [
        WorkUnit(units[1].key, 0.75),
        WorkUnit(units[0].key, 0.25),
    ]


NORM = {
    "kernel": "rms_norm",
    "key": {"dtype": "bfloat16", "row_size": 4096, "fused_add": 1, "num_rows": 16},
}
PREFILL = {
    "kernel": "prefill",
    "key": prefill_key(LLAMA, EngineLimits(), num_tokens=64, no_context=True).to_dict(),
}


def _with(entry, **fields):
    return entry | {"key": entry["key"] | fields}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "list with at least one key, got {}"),
        ([], "list with at least one key"),
        ([1], "entry 1 must be an object, got 1"),
        ([NORM, {"kernel": "rms_norm"}], "entry 2 must be an object of kernel, key"),
        ([NORM | {"extra": 1}], "kernel, key"),
        ([NORM, NORM], "entry 2 must be unlike all others"),
        ([NORM | {"weight": "much"}], "weight must be a number, 0 or more, got 'much'"),
        ([NORM | {"weight": -1}], "weight must be a number"),
        ([NORM | {"weight": 0}], "at least one weight above 0"),
        ([NORM | {"kernel": "softmax"}], "kernel must be one of prefill, decode"),
        ([NORM | {"kernel": 3}], "entry 1: kernel must be"),
        ([_with(NORM, rows=3)], "fields of a rms_norm key"),
        ([_with(NORM, dtype="int8")], "dtype must be one of"),
        ([_with(NORM, num_rows=0)], "num_rows must be 1 or more, got 0"),
        ([_with(NORM, num_rows="16")], "num_rows must be a size"),
        ([_with(NORM, row_size="16")], "row_size must be a whole number, got 16"),
        ([_with(NORM, row_size=2.5)], "row_size must be an integer or a string"),
        ([_with(NORM, fused_add=2)], "fused_add must be 0 or 1, got 2"),
        ([_with(PREFILL, block_size=24)], "block_size must be a multiple of 16"),
        ([_with(PREFILL, sliding_window=-1)], "sliding_window must be 0 or more"),
        (
            [_with(PREFILL, context_len=5)],
            "no_context must be 1 where context_len is 0",
        ),
    ],
    ids=str,
)
def test_a_wrong_entry_is_named(tmp_path, entries, message):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        read_shapes(path)


@pytest.mark.parametrize("content", [None, "{", '[{"weight": NaN}]'])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "shapes.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"shapes\.json"):
        read_shapes(path)


def test_dtypes_are_those_of_torch():
    assert all(getattr(torch, name) is dtype for name, dtype in DTYPES.items())
