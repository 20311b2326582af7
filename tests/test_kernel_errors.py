# SPDX-License-Identifier: Apache-2.0
"""Bad input raises ValueError before any launch: argument, expected, given, remedy."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, Tiles, call, config_for, make_inputs, make_planner

from portable_backend.device import DeviceInfo
from portable_backend.kernels import (
    AttentionPlanner,
    launch_counts,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels.config import KernelConfig

CASE = Case(1, ((1, 20), (12, 12)), heads=(4, 2))
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
# name must be expected, got given; remedy
FORM = re.compile(
    r"^(?P<name>.+) must be (?P<expected>.+), got (?P<given>.+); (?P<fix>.+)$"
)


def refused(name, given, call_it, device, remedy=".", expected="."):
    """`call_it` raises the message in the house's form, and launches nothing."""
    before = launch_counts(device)
    with pytest.raises(ValueError) as caught:
        call_it()
    message = str(caught.value)
    found = FORM.match(message)
    assert found, f"not of the form 'X must be E, got G; remedy': {message}"
    assert found["name"] == name, message
    assert given in found["given"], message
    assert re.search(remedy, found["fix"]), message
    assert re.search(expected, found["expected"]), message
    assert launch_counts(device) == before, "launched before it was refused"


def options(**changes):
    """Each change is a value, or makes one for a device."""

    def change(inputs):
        device = inputs.query.device
        made = {k: v(device) if callable(v) else v for k, v in changes.items()}
        inputs.options = replace(inputs.options, **made)

    return change


def batch(**changes):
    def change(inputs):
        made = {k: v(getattr(inputs.batch, k)) for k, v in changes.items()}
        inputs.batch = replace(inputs.batch, **made)

    return change


def tensor(**changes):
    def change(inputs):
        for name, make in changes.items():
            setattr(inputs, name, make(getattr(inputs, name)))

    return change


def last_axis_strided(t):
    shape = (*t.shape[:-1], 2 * t.shape[-1])
    return torch.empty(shape, dtype=t.dtype, device=t.device)[..., ::2]


def both_caches(make):
    return tensor(key_cache=make, value_cache=make)


def spread(axis, distance):
    """Elements of an axis so far apart; never touched, so hardly any memory."""

    def make(t):
        strides = list(t.stride())
        strides[axis] = distance
        last = sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
        storage = torch.empty(last + 1, dtype=t.dtype, device=t.device)
        return storage.as_strided(t.shape, strides)

    return make


# id: (change to the inputs, argument named, what the message must show as given,
#      remedy)
ATTENTION = {
    "query is flat": (
        tensor(query=lambda t: t.flatten(1)),
        ("query", "[13, 256]", "reshape"),
    ),
    "query is fp64": (
        tensor(query=lambda t: t.double()),
        ("query", "torch.float64", "convert"),
    ),
    "query's last axis is strided": (
        tensor(query=last_axis_strided),
        ("query", "2)", "contiguous"),
    ),
    "out's last axis is strided": (
        tensor(out=last_axis_strided),
        ("out", "2)", "contiguous"),
    ),
    "out has too few rows": (
        tensor(out=lambda t: t[:5]),
        ("out", "[5, 4, 64]", "resize"),
    ),
    "out has other heads": (
        tensor(out=lambda t: t[:, :2]),
        ("out", "[13, 2, 64]", "resize"),
    ),
    "out is expanded": (
        tensor(out=lambda t: t[:, :1].expand(-1, 4, -1)),
        ("out", "0, 1)", "expand"),
    ),
    "out's heads are far apart": (
        tensor(out=spread(1, 716_000_000)),
        ("out", "3 times 716000000", "closer"),
    ),
    "query's heads are far apart": (
        tensor(query=spread(1, 716_000_000)),
        ("query", "3 times 716000000", "closer"),
    ),
    "slots of a block are far apart": (
        tensor(key_cache=spread(1, 143_200_000)),
        ("key_cache", "15 times 143200000", "closer"),
    ),
    "seq_lens has no axis": (
        batch(seq_lens=lambda t: t[0]),
        ("seq_lens", "[]", "reshape"),
    ),
    "out is fp32": (tensor(out=lambda t: t.float()), ("out", "torch.float32", "conv")),
    "key cache is 3-D": (
        tensor(key_cache=lambda t: t[0]),
        ("key_cache", "[16, 2, 64]", "4-D view"),
    ),
    "value cache has another head size": (
        tensor(value_cache=lambda t: t[..., :32]),
        ("value_cache", "32]", "head_size"),
    ),
    "value cache has another shape": (
        tensor(value_cache=lambda t: t[:-1]),
        ("value_cache", ", 16, 2, 64]", "not supported"),
    ),
    "key cache is fp16": (
        tensor(key_cache=lambda t: t.half()),
        ("key_cache", "torch.float16", "convert"),
    ),
    "value cache's last axis is strided": (
        tensor(value_cache=last_axis_strided),
        ("value_cache", "2)", "innermost"),
    ),
    # vllm#7714, #26431, #43914: refused with its reason until it works.
    "fp8 caches": (
        both_caches(lambda t: t.nan_to_num().to(FP8)),
        ("key_cache", "torch.float8_e4m3fn", "fp8.*not supported.*--kv-cache-dtype"),
    ),
    "fp8 caches as bytes": (
        both_caches(lambda t: torch.zeros_like(t, dtype=torch.uint8)),
        ("key_cache", "torch.uint8", "fp8.*not supported.*--kv-cache-dtype"),
    ),
    "query heads are no multiple": (
        tensor(query=lambda t: t[:, :3], out=lambda t: t[:, :3]),
        ("query heads", "3", "tensor-parallel"),
    ),
    "block size 24": (
        both_caches(lambda t: torch.zeros(4, 24, 2, 64, dtype=BF16, device=t.device)),
        ("block_size", "24", "multiple of 16"),
    ),
    "query_start_loc is int64": (
        batch(query_start_loc=lambda t: t.long()),
        ("query_start_loc", "torch.int64", r"\.to\(torch.int32\)"),
    ),
    "query_start_loc is too short": (
        batch(query_start_loc=lambda t: t[:-1]),
        ("query_start_loc", "[2]", "shape"),
    ),
    "seq_lens is int64": (
        batch(seq_lens=lambda t: t.long()),
        ("seq_lens", "torch.int64", r"\.to\(torch.int32\)"),
    ),
    "block_table is int64": (
        batch(block_table=lambda t: t.long()),
        ("block_table", "torch.int64", r"\.to\(torch.int32\)"),
    ),
    "block_table is flat": (
        batch(block_table=lambda t: t.flatten()),
        ("block_table", "torch.int32 [", "shape"),
    ),
    "block_table has a row too few": (
        batch(block_table=lambda t: t[:1]),
        ("block_table", "[1, ", "shape"),
    ),
    "block_table is transposed": (
        batch(block_table=lambda t: t.repeat(1, 2)[:, ::2]),
        ("block_table", "2)", "contiguous"),
    ),
    "scale is tiny": (options(scale=1e-30), ("scale", "1e-30", "head_size")),
    "scale is zero": (options(scale=0.0), ("scale", "0.0", r"head_size \*\* -0.5")),
    "scale is negative": (options(scale=-1.0), ("scale", "-1.0", "head_size")),
    "scale is huge": (options(scale=1e20), ("scale", "1e+20", "head_size")),
    "scale is NaN": (options(scale=float("nan")), ("scale", "nan", "head_size")),
    "window is zero": (options(sliding_window=0), ("sliding_window", "0", "None")),
    # vLLM passes (-1, -1) or window - 1 in places: never taken as "no window".
    "window is -1": (options(sliding_window=-1), ("sliding_window", "-1", "None")),
    "softcap is next to nothing": (
        options(softcap=1e-320),
        ("softcap", "1e-320", "None"),
    ),
    "softcap is negative": (options(softcap=-5.0), ("softcap", "-5.0", "None")),
    "too few slopes": (
        options(alibi_slopes=lambda d: torch.ones(2, device=d)),
        ("alibi_slopes", "[2]", "this rank's heads"),
    ),
    "slopes are integers": (
        options(alibi_slopes=lambda d: torch.ones(4, device=d).int()),
        ("alibi_slopes", "torch.int32", "."),
    ),
    "slopes of every rank": (
        options(alibi_slopes=lambda d: torch.ones(8, device=d)),
        ("alibi_slopes", "[8]", "this rank's heads"),
    ),
    "too many sinks": (
        options(sinks=lambda d: torch.ones(8, device=d)),
        ("sinks", "[8]", "this rank's heads"),
    ),
    "sinks are strided": (
        options(sinks=lambda d: torch.ones(8, device=d)[::2]),
        ("sinks", "(2,)", "contiguous"),
    ),
}


@pytest.mark.parametrize("when", ["unplanned", "planned", "after good input"])
@pytest.mark.parametrize("what", ATTENTION)
def test_attention_refuses(what, when, device):
    change, (name, given, remedy) = ATTENTION[what]
    inputs = make_inputs(CASE, device)
    planned_batch = make_planner(CASE, device).plan(inputs.batch, CASE.num_tokens)
    if when == "after good input":
        good = replace(inputs, batch=planned_batch)
        call(good)
        call(good)
    change(inputs)
    if when != "unplanned":
        inputs.batch = replace(inputs.batch, plan=planned_batch.plan)
    refused(name, given, lambda: call(inputs), device, remedy)


@pytest.mark.parametrize("head_size", [16, 31, 272, 512])
def test_attention_refuses_head_sizes_it_is_not_made_for(head_size, device):
    """vllm#57712, #39018: 512 wanted more shared memory than there is."""
    inputs = make_inputs(replace(CASE, head_size=head_size), device)
    refused("head_size", str(head_size), lambda: call(inputs), device, "back end")


@pytest.mark.parametrize(
    ("change", "name", "given"),
    [
        ({"heads": (8, 4)}, "batch.plan num_query_heads", "8"),
        ({"heads": (4, 4)}, "batch.plan num_kv_heads", "4"),
        ({"head_size": 128}, "batch.plan head_size", "128"),
        ({"block_size": 32}, "batch.plan block_size", "32"),
        ({"dtype": torch.float16}, "batch.plan dtype", "torch.float16"),
        ({"window": 16}, "batch.plan sliding_window", "16"),
        ({"causal": False}, "batch.plan causal", "False"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_attention_refuses_a_plan_for_other_layers(change, name, given, device):
    inputs = make_inputs(CASE, device)
    planner = make_planner(replace(CASE, **change), device)
    inputs.batch = planner.plan(inputs.batch, CASE.num_tokens)
    refused(name, given, lambda: call(inputs), device, "AttentionPlanner")


def test_attention_refuses_a_config_that_is_not_the_plans(device):
    inputs = make_inputs(CASE, device)
    inputs.batch = make_planner(CASE, device).plan(inputs.batch, CASE.num_tokens)
    config = config_for(replace(CASE, tiles=Tiles()), device)
    refused("config", "BLOCK_M", lambda: call(inputs, config=config), device, "Planner")


def test_planner_refuses_heads_that_do_not_divide(device):
    refused(
        "num_query_heads",
        "5 and 2",
        lambda: make_planner(replace(CASE, heads=(5, 2)), device),
        device,
        "tensor-parallel",
    )


@pytest.mark.parametrize("value", [4.5, True, torch.tensor(4)])
def test_planner_refuses_what_is_no_whole_number(value, device):
    refused(
        "max_num_seqs",
        str(value.item() if isinstance(value, torch.Tensor) else value),
        lambda: make_planner(CASE, device, max_num_seqs=value),
        device,
        "correct it",
        "a whole number at least 0",
    )


@pytest.mark.parametrize("pack", [3, 64])
def test_planner_refuses_a_pack_that_does_not_divide(pack, device):
    tiles = Tiles(block_m=32, pack=pack)
    heads = (4, 1) if pack == 3 else (64, 1)
    case = replace(CASE, heads=heads, tiles=tiles)
    refused(
        "config.prefill PACK",
        str(pack),
        lambda: make_planner(case, device),
        device,
        "another config",
    )


def test_planner_refuses_a_step_it_has_no_room_for(device):
    inputs = make_inputs(CASE, device)
    small = make_planner(CASE, device, max_num_seqs=1)
    refused(
        "batch", "2 requests", lambda: small.plan(inputs.batch, 13), device, "limit"
    )
    small = make_planner(CASE, device, max_num_tokens=12)
    refused("batch", "13 tokens", lambda: small.plan(inputs.batch, 13), device, "limit")


def norm_inputs(device):
    x = torch.randn(5, 64, dtype=BF16, device=device)
    return {
        "x": x,
        "weight": torch.ones(64, dtype=BF16, device=device),
        "residual": x.clone(),
        "out": torch.empty_like(x),
        "residual_out": torch.empty_like(x),
    }


NORM = {
    "x is fp64": ("x", lambda t: t.double(), "torch.float64", "convert"),
    "x has no axis": ("x", lambda t: t[0, 0], "[]", "reshape"),
    "x's rows are empty": ("x", lambda t: t[:, :0], "[5, 0]", "reshape"),
    "x's last axis is strided": ("x", last_axis_strided, "2)", "contiguous"),
    "weight is too short": ("weight", lambda t: t[:32], "[32]", "one factor"),
    "weight is an integer": ("weight", lambda t: t.int(), "torch.int32", "."),
    "weight is strided": ("weight", last_axis_strided, "(2,)", "contiguous"),
    "residual is fp32": ("residual", lambda t: t.float(), "torch.float32", "convert"),
    "residual has fewer rows": ("residual", lambda t: t[:3], "[3, 64]", "reshape"),
    "residual is strided": ("residual", last_axis_strided, "2)", "contiguous"),
    "out is fp16": ("out", lambda t: t.half(), "torch.float16", "convert"),
    "out has other rows": ("out", lambda t: t[:3], "[3, 64]", "reshape"),
    "out is strided": ("out", last_axis_strided, "2)", "contiguous"),
    "residual_out is fp16": ("residual_out", lambda t: t.half(), "float16", "."),
    "residual_out is strided": ("residual_out", last_axis_strided, "2)", "contig"),
    "out is expanded": ("out", lambda t: t[:1].expand(5, -1), "(0, 1)", "expand"),
}
FALLING = torch.tensor([9, 5], dtype=torch.int32)


@pytest.mark.parametrize("what", NORM)
def test_rms_norm_refuses(what, device):
    name, change, given, remedy = NORM[what]
    inputs = norm_inputs(device)
    inputs[name] = change(inputs[name])
    x, weight = inputs.pop("x"), inputs.pop("weight")
    refused(name, given, lambda: rms_norm(x, weight, 1e-6, **inputs), device, remedy)


def test_rms_norm_refuses_one_tensor_for_both_results(device):
    x = torch.ones(2, 64, device=device)
    refused(
        "residual_out",
        "out",
        lambda: rms_norm(x, None, 1e-6, residual=x.clone(), out=x, residual_out=x),
        device,
        "two tensors",
    )


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_rms_norm_refuses_an_eps_that_makes_no_number(eps, device):
    x = torch.ones(2, 64, device=device)
    refused("eps", str(eps), lambda: rms_norm(x, None, eps), device, "1e-6")


def test_rms_norm_refuses_residual_out_without_residual(device):
    x = torch.ones(2, 64, device=device)
    refused(
        "residual_out",
        "tensor",
        lambda: rms_norm(x, None, 1e-6, residual_out=x),
        device,
        "omit",
    )


def test_rms_norm_refuses_rows_that_fit_no_program(device):
    x = torch.ones(1, 65537, device=device)
    refused("x", "65537", lambda: rms_norm(x, None, 1e-6), device, "split")


def cache_inputs(device):
    return {
        "key": torch.ones(5, 2, 64, dtype=BF16, device=device),
        "value": torch.ones(5, 2, 64, dtype=BF16, device=device),
        "key_cache": torch.ones(3, 16, 2, 64, dtype=BF16, device=device),
        "value_cache": torch.ones(3, 16, 2, 64, dtype=BF16, device=device),
        "slot_mapping": torch.arange(5, device=device),
    }


WRITE = {
    "slots are int32": ("slot_mapping", lambda t: t.int(), "int32", "torch.int64"),
    "slots are 2-D": ("slot_mapping", lambda t: t[None], "[1, 5]", "."),
    "slots are strided": (
        "slot_mapping",
        lambda t: t.repeat(2)[::2],
        "(2,)",
        "contiguous",
    ),
    "key is flat": ("key", lambda t: t.flatten(1), "[5, 128]", "reshape"),
    "key has other heads": ("key", lambda t: t[:, :1], "[5, 1, 64]", "reshape"),
    "value has another head size": ("value", lambda t: t[..., :32], "32]", "reshape"),
    "fewer keys than slots": ("key", lambda t: t[:4], "4", "shorten"),
    "fewer values than slots": ("value", lambda t: t[:4], "4", "shorten"),
    "key is strided": ("key", last_axis_strided, "2)", "contiguous"),
    "value is strided": ("value", last_axis_strided, "2)", "contiguous"),
    "key cache is 3-D": ("key_cache", lambda t: t[0], "[16, 2, 64]", "4-D"),
    "key cache is strided": ("key_cache", last_axis_strided, "2)", "innermost"),
    "key cache is expanded": (
        "key_cache",
        lambda t: t[:1].expand(3, -1, -1, -1),
        "(0, 128",
        "expand",
    ),
    "key cache is fp32": ("key_cache", lambda t: t.float(), "float32", "convert"),
    "value cache is fp8": ("value_cache", lambda t: t.to(FP8), "float8", "fp8.*not"),
    "key cache is bytes": (
        "key_cache",
        lambda t: torch.zeros_like(t, dtype=torch.uint8),
        "uint8",
        "fp8.*not",
    ),
    "value cache has fewer blocks": (
        "value_cache",
        lambda t: t[:2],
        "[2, 16, 2, 64]",
        "not supported",
    ),
}


@pytest.mark.parametrize("what", WRITE)
def test_cache_write_refuses(what, device):
    name, change, given, remedy = WRITE[what]
    inputs = cache_inputs(device)
    inputs[name] = change(inputs[name])
    refused(name, given, lambda: write_kv_cache(**inputs), device, remedy)


def test_cache_write_refuses_one_place_for_both_caches(device):
    inputs = cache_inputs(device)
    write_kv_cache(**inputs)
    inputs["value_cache"] = inputs["key_cache"].view(3, 16, 2, 64)
    refused("value_cache", "key_cache", lambda: write_kv_cache(**inputs), device, "two")


@pytest.mark.parametrize(
    "params",
    [{"block_m": 3}, {"num_wraps": 4}, {"BLOCK_M": [16]}, {"BLOCK_M": 1.5}],
    ids=str,
)
def test_config_refuses_what_it_does_not_know(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        KernelConfig.from_dict(params)


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"sm90.*gfx942.*got sm1"):
        DeviceInfo.for_arch("sm1")


def test_a_device_that_is_neither_gpu_nor_cpu_is_named():
    with pytest.raises(ValueError, match=r"cuda .*or cpu, got meta"):
        DeviceInfo.detect("meta")


CPU_CALLS = {
    "attention": "make_planner(Case(1, ((1, 5),)), torch.device('cpu'))",
    "norm": "rms_norm(torch.ones(2, 64), None, 1e-6)",
    "cache": (
        "write_kv_cache(*torch.ones(2, 3, 2, 64).unbind(0), "
        "*torch.ones(2, 1, 16, 2, 64).unbind(0), torch.arange(3))"
    ),
}


@pytest.mark.parametrize("what", CPU_CALLS)
def test_cpu_tensors_without_the_interpreter_name_the_variable(what):
    """In a process of its own: Triton decides when it is first imported."""
    code = (
        "import torch\n"
        "from kernel_cases import Case, make_planner\n"
        "from portable_backend.kernels import rms_norm, write_kv_cache\n"
        f"{CPU_CALLS[what]}\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(__file__), *filter(None, [env.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode != 0
    assert "ValueError" in done.stderr.splitlines()[-1]
    assert "TRITON_INTERPRET=1" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("planned", [False, True], ids=["unplanned", "planned"])
@pytest.mark.parametrize(
    ("name", "given", "spoil"),
    [
        ("query_start_loc", "1, 40]", lambda b: b.query_start_loc[-1:].fill_(40)),
        ("query_start_loc", "[1, ", lambda b: b.query_start_loc[:1].fill_(1)),
        ("query_start_loc", "9, 5]", lambda b: b.query_start_loc[1:].copy_(FALLING)),
        ("max_query_len", "12", lambda b: b.query_start_loc[1:2].fill_(0)),
        ("seq_lens", "-5", lambda b: b.seq_lens[1:].fill_(-5)),
        ("seq_lens", "3000", lambda b: b.seq_lens[1:].fill_(3000)),
        ("block_table", "to 99", lambda b: b.block_table[0, :1].fill_(99)),
        ("block_table", "-1 to", lambda b: b.block_table[1, :1].fill_(-1)),
    ],
    ids=[
        "rows",
        "rising from 1",
        "falling",
        "longest",
        "negative",
        "columns",
        "block",
        "negative block",
    ],
)
def test_numbers_on_a_cpu_that_lead_out_of_bounds(name, given, spoil, planned, device):
    if device.type != "cpu":
        pytest.skip("numbers on a GPU are trusted")
    inputs = make_inputs(replace(CASE, planned=planned), device)
    if planned:
        inputs.batch = inputs.planner.plan(inputs.batch, CASE.num_tokens)
        inputs.planner = None
    spoil(inputs.batch)
    refused(name, given, lambda: call(inputs), device)


def test_slots_past_the_cache_are_refused_on_a_cpu(device):
    if device.type != "cpu":
        pytest.skip("numbers on a GPU are trusted")
    cache = torch.zeros(8, 16, 2, 64, device=device)
    new = torch.zeros(2, 2, 64, device=device)
    slots = torch.tensor([5, 128], device=device)
    refused(
        "slot_mapping", "128",
        lambda: write_kv_cache(new, new, cache, cache.clone(), slots), device,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["out", "key_cache", "value_cache"])
def test_attention_refuses_tensors_on_two_devices(name, device):
    inputs = make_inputs(CASE, device)
    setattr(inputs, name, getattr(inputs, name).cpu())
    refused(name, "cpu", lambda: call(inputs), device, "move")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table"])
def test_attention_refuses_a_batch_on_another_device(name, device):
    inputs = make_inputs(CASE, device)
    batch(**{name: lambda t: t.cpu()})(inputs)
    refused(name, "cpu", lambda: call(inputs), device, "move")


def test_planner_can_be_made_for_one_token(device):
    """The smallest limits are legal, not an error."""
    planner = make_planner(CASE, device, max_num_seqs=1, max_num_tokens=1)
    assert isinstance(planner, AttentionPlanner)
    assert planner.workspace_bytes > 0
