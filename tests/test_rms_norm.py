# SPDX-License-Identifier: Apache-2.0
"""`rms_norm` against the oracle, at most as far off as vLLM's layers."""

import pytest
import torch
from kernel_cases import SENTINEL, assert_close, bits

from portable_backend.device import DeviceInfo
from portable_backend.kernels import launch_counts, rms_norm
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.reference import rms_norm_reference
from portable_backend.kernels.rms_norm_space import (
    candidate_configs,
    default_config,
    default_configs,
)

# Odd sizes, powers of two and their neighbours; SmolLM2's 576, Llama's 4096, 5120.
SIZES = (1, 7, 64, 100, 128, 576, 1000, 4096, 5120, 8192)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


def in_dtype(x, weight, eps, residual=None):
    """The same in plain torch with vLLM's roundings: (normed, residual)."""
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    return normed.to(x.dtype), total.to(x.dtype)


def randn(*shape, dtype, device, seed=0):
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=gen) * 3).to(device, dtype)


def guarded(shape, stride, dtype, device):
    """(buffer full of the sentinel, strided view into it with a gap after each row)."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 5
    buffer = torch.full((size,), SENTINEL, dtype=dtype, device=device)
    return buffer, buffer.as_strided(shape, stride)


def oracle(x, weight, residual=None):
    """Oracle in fp64 for fp32 inputs, which an fp32 one cannot judge."""
    if x.dtype is not torch.float32:
        return rms_norm_reference(x, weight, EPS, residual)
    total = x.double() if residual is None else x.double() + residual.double()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return normed * (1 if weight is None else weight.double()), total


def check(x, weight, residual=None, **arguments):
    given = {"x": x, "weight": weight, "residual": residual}
    before = {k: bits(v).clone() for k, v in given.items() if v is not None}
    right, _ = oracle(x, weight, residual)
    like, like_total = in_dtype(x, weight, EPS, residual)
    result = rms_norm(x, weight, EPS, residual=residual, **arguments)
    normed, total = result if residual is not None else (result, None)
    assert normed.dtype == x.dtype
    assert normed.shape == x.shape
    label = f"x {list(x.shape)} {x.stride()} {x.dtype}"
    assert_close(normed, right, like, label)
    if residual is not None:
        assert torch.equal(total, like_total), "residual is not the rounded fp32 sum"
    kept = {"x": arguments.get("out"), "residual": arguments.get("residual_out")}
    for name, was in before.items():
        if kept.get(name) is not given[name]:
            assert torch.equal(bits(given[name]), was), f"{name} was modified"
    return normed, total


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_any_row_size_and_dtype(size, dtype, fused, device):
    for num_tokens in (1, 3, 17):
        x = randn(num_tokens, size, dtype=dtype, device=device)
        weight = randn(size, dtype=dtype, device=device, seed=1)
        residual = randn(num_tokens, size, dtype=dtype, device=device, seed=2)
        check(x, weight, residual if fused else None)


@pytest.mark.parametrize("fused", [False, True])
def test_many_rows(fused, device):
    x = randn(1000, 96, dtype=torch.bfloat16, device=device)
    residual = randn(1000, 96, dtype=torch.bfloat16, device=device, seed=2)
    weight = randn(96, dtype=torch.bfloat16, device=device)
    check(x, weight, residual if fused else None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_may_be_left_out(dtype, fused, device):
    x = randn(5, 576, dtype=dtype, device=device)
    check(x, None, randn(5, 576, dtype=dtype, device=device, seed=2) if fused else None)


# vllm#55311, flashinfer#4060: (1 + w) in fp32 beside a bf16 input.
@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_multiplies_before_the_only_rounding(dtype, fused, fp32_weight, device):
    x = randn(64, 1000, dtype=dtype, device=device)
    weight = 1 + randn(1000, dtype=torch.float32, device=device) / 3
    if not fp32_weight:
        weight = weight.to(dtype)
    residual = randn(64, 1000, dtype=dtype, device=device, seed=2) if fused else None
    normed, _ = check(x, weight, residual)
    right, _ = oracle(x, weight, residual)
    # Rounded once, so nearest to the oracle but for ties and sums in another order.
    off = (normed != right.to(dtype)).float().mean().item()
    assert off < 0.002, f"{off:.2%} of the elements are not the nearest value"
    if not fp32_weight:
        like, _ = in_dtype(x, weight, EPS, residual)
        off = (like != right.to(dtype)).float().mean().item()
        assert off > 0.1, "the inputs do not tell one rounding from two"


def test_statistics_come_from_the_unrounded_sum(device):
    """x + r rounds to x in bf16, yet the mean square must see r."""
    x = torch.full((1, 256), 256.0, dtype=torch.bfloat16, device=device)
    residual = torch.full_like(x, 0.99)
    normed, total = rms_norm(x, None, 0.0, residual=residual)
    assert torch.equal(total, x)
    assert torch.equal(normed, torch.ones_like(x))
    mixed = residual.clone()
    mixed[:, ::2] = -0.99
    normed, _ = rms_norm(x, None, 0.0, residual=mixed)
    expected, _ = rms_norm_reference(x, None, 0.0, mixed)
    assert torch.equal(normed, expected.to(torch.bfloat16))
    assert normed.unique().numel() == 2, "the residual was lost before normalising"


@pytest.mark.parametrize("in_place", ["both", "out", "residual"])
@pytest.mark.parametrize("size", [100, 4096])
def test_fused_add_may_run_in_place(size, in_place, device):
    """vLLM's op writes the norm into x and the sum into residual."""
    x = randn(13, size, dtype=torch.bfloat16, device=device)
    residual = randn(13, size, dtype=torch.bfloat16, device=device, seed=2)
    weight = randn(size, dtype=torch.bfloat16, device=device)
    arguments = {}
    if in_place != "residual":
        arguments["out"] = x
    if in_place != "out":
        arguments["residual_out"] = residual
    normed, total = check(x, weight, residual, **arguments)
    assert (normed is x) == (in_place != "residual")
    assert (total is residual) == (in_place != "out")


def test_norm_may_run_in_place(device):
    x = randn(13, 576, dtype=torch.bfloat16, device=device)
    weight = randn(576, dtype=torch.bfloat16, device=device)
    assert check(x, weight, out=x)[0] is x


# q and k norm: [tokens, heads, head_size] views of a fused qkv projection.
@pytest.mark.parametrize("head_size", [64, 128, 80])
@pytest.mark.parametrize("heads", [1, 3, 32])
def test_heads_of_a_qkv_slice(heads, head_size, device):
    width = (heads + 4) * head_size
    buffer = torch.full((11, width), SENTINEL, dtype=torch.bfloat16, device=device)
    for start in (0, 2 * head_size):
        x = buffer[:, start : start + heads * head_size].view(11, heads, head_size)
        x.copy_(randn(11, heads, head_size, dtype=torch.bfloat16, device=device))
        weight = randn(head_size, dtype=torch.bfloat16, device=device)
        check(x, weight)
        before = buffer.clone()
        check(x, weight, out=x)
        before[:, start : start + heads * head_size] = buffer[
            :, start : start + heads * head_size
        ]
        assert torch.equal(buffer, before), "written outside the slice"


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((6, 100), (103, 1)),
        ((6, 100), (301, 1)),
        ((4, 3, 64), (1000, 67, 1)),
        ((4, 3, 64), (64, 300, 1)),
        ((1, 3, 64), (5, 67, 1)),
        ((2, 2, 3, 64), (1024, 512, 64, 1)),
    ],
)
def test_any_row_strides(shape, stride, device):
    weight = randn(shape[-1], dtype=torch.bfloat16, device=device)
    views = []
    for seed in range(2):
        _, view = guarded(shape, stride, torch.bfloat16, device)
        view.copy_(randn(*shape, dtype=torch.bfloat16, device=device, seed=seed))
        views.append(view)
    out_buffer, out = guarded(shape, stride, torch.bfloat16, device)
    sum_buffer, residual_out = guarded(shape, stride, torch.bfloat16, device)
    check(views[0], weight)
    check(*views[:1], weight, views[1], out=out, residual_out=residual_out)
    for buffer, view in ((out_buffer, out), (sum_buffer, residual_out)):
        view.fill_(SENTINEL)
        assert bool((buffer == SENTINEL).all()), "written between the rows"


def test_each_tensor_may_have_strides_of_its_own(device):
    """Out is contiguous, x a slice, the residual transposed."""
    shape = (5, 4, 64)
    x = randn(5, 9, 64, dtype=torch.float16, device=device)[:, 2:6]
    residual = randn(4, 5, 64, dtype=torch.float16, device=device).transpose(0, 1)
    weight = randn(64, dtype=torch.float16, device=device)
    out = torch.full(shape, float("nan"), dtype=torch.float16, device=device)
    check(x, weight, residual, out=out)


def test_residual_may_be_x_itself(device):
    x = randn(5, 100, dtype=torch.bfloat16, device=device)
    _, total = check(x, None, x)
    assert torch.equal(total, 2 * x)


@pytest.mark.parametrize("fused", [False, True])
def test_leading_axes_that_do_not_fold(fused, device):
    """Three leading axes that no pair of strides walks; eps matters at this size."""
    wide = randn(4, 5, 6, 64, dtype=torch.bfloat16, device=device) / 1000
    x = wide.permute(2, 0, 1, 3)[::2, 1:3, ::2]
    residual = randn(*x.shape, dtype=torch.bfloat16, device=device) / 1000
    weight = randn(64, dtype=torch.bfloat16, device=device)
    check(x, weight, residual if fused else None)
    before = wide.clone()
    check(x, weight, residual if fused else None, out=x)
    before.permute(2, 0, 1, 3)[::2, 1:3, ::2] = x
    assert torch.equal(wide, before), "written outside the view"


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_no_rows_launch_nothing(shape, device):
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    before = launch_counts(device)
    assert rms_norm(x, None, EPS).shape == x.shape
    assert rms_norm(x, None, EPS, residual=x)[1].shape == x.shape
    assert launch_counts(device) == before


def test_one_dimension_is_one_row(device):
    check(randn(576, dtype=torch.bfloat16, device=device), None)


def test_zeros_stay_zeros(device):
    x = torch.zeros(3, 100, device=device)
    assert torch.equal(rms_norm(x, None, EPS), x)


def test_large_values_do_not_overflow(device):
    """Squares of fp16 values near the largest one do not fit fp16."""
    x = randn(4, 576, dtype=torch.float16, device=device) * 4000
    assert torch.isfinite(x).all()
    check(x, None)


def test_nan_stays_in_its_row(device):
    x = randn(5, 100, dtype=torch.bfloat16, device=device)
    clean = rms_norm(x, None, EPS)
    x[2, 50] = float("nan")
    dirty = rms_norm(x, None, EPS)
    assert torch.isnan(dirty[2]).all()
    for row in (0, 1, 3, 4):
        assert torch.equal(dirty[row], clean[row])


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_config_changes_nothing_but_the_speed(rows, device):
    x = randn(37, 100, dtype=torch.bfloat16, device=device)
    weight = randn(100, dtype=torch.bfloat16, device=device)
    config = KernelConfig.of(ROWS=rows, num_warps=2)
    check(x, weight, config=config)
    check(x, weight, randn(37, 100, dtype=x.dtype, device=device), config=config)


# A vendor each, with the units of an H200 and an MI300X.
GPUS = (DeviceInfo.for_arch("sm90", 132), DeviceInfo.for_arch("gfx942", 304))
# q-norm, SmolLM2's rows, rows of whole 16-byte vectors that fill no power of two.
CANDIDATE_SIZES = (128, 576, 2880)


def distinct_candidates(size, num_rows, device):
    """Candidates for long calls; of those that the interpreter takes for one, one."""
    found = {}
    for gpu in GPUS:
        for config in candidate_configs(
            row_size=size, num_rows=2**20, dtype=torch.bfloat16, device=gpu
        ):
            rows, programs = config["ROWS"], config["PROGRAMS_PER_UNIT"]
            if device.type == "cpu":
                key = min(rows, num_rows), min(programs, num_rows)
            else:
                key = config
            found[key] = config
    return list(found.values())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", CANDIDATE_SIZES)
def test_every_candidate_config_is_right(size, fused, device):
    """Rows are no multiple of a tile, and many times the programs of a unit."""
    num_rows = 11 if device.type == "cpu" else 4099
    shape, stride = (num_rows, size), (size + 24, 1)
    weight = randn(size, dtype=torch.bfloat16, device=device)
    candidates = distinct_candidates(size, num_rows, device)
    assert any(c["PROGRAMS_PER_UNIT"] for c in candidates)
    for config in candidates:
        guards = []
        for _ in range(3):
            guards.append(guarded(shape, stride, torch.bfloat16, device))
        (_, x), *outputs = guards
        x.copy_(randn(*shape, dtype=torch.bfloat16, device=device))
        residual = randn(*shape, dtype=torch.bfloat16, device=device, seed=2)
        (_, out), (_, residual_out) = outputs
        out.fill_(float("nan"))
        residual_out.fill_(float("nan"))
        arguments = {"out": out, "config": config}
        if fused:
            arguments["residual_out"] = residual_out
        check(x, weight, residual if fused else None, **arguments)
        residual_out.fill_(SENTINEL)
        out.fill_(SENTINEL)
        for buffer, _ in outputs:
            assert bool((buffer == SENTINEL).all()), f"{config}: written between rows"


@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_programs_that_go_on_to_further_rows_work_in_place(rows, programs, device):
    """They fetch rows ahead, which no program may have written by then."""
    config = KernelConfig.of(ROWS=rows, PROGRAMS_PER_UNIT=programs, num_warps=1)
    x = randn(
        4099 if device.type == "cuda" else 23, 96, dtype=torch.bfloat16, device=device
    )
    residual = randn(*x.shape, dtype=x.dtype, device=device, seed=2)
    weight = randn(96, dtype=x.dtype, device=device)
    before = launch_counts(device)["fused_add_rms_norm"]
    check(x, weight, residual, out=x, residual_out=residual, config=config)
    assert launch_counts(device)["fused_add_rms_norm"] == before + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 128, 576, 4096, 5120, 65536])
def test_row_count_reaches_few_defaults(size, dtype):
    """What calls of any length compile can be listed ahead."""
    for gpu in GPUS:
        listed = default_configs(row_size=size, dtype=dtype, device=gpu)
        assert 1 <= len(listed) <= 3
        for num_rows in (1, 2, 16, 511, 512, 513, 4096, 4097, 2**20):
            arguments = dict(row_size=size, num_rows=num_rows, dtype=dtype, device=gpu)
            config = default_config(**arguments)
            assert config in listed
            candidates = candidate_configs(**arguments)
            assert candidates[0] == config
            assert len(candidates) == len(set(candidates)) <= 100
            for candidate in candidates:
                assert candidate["num_warps"] * gpu.limits.warp_size <= 1024
                if num_rows < 2 * gpu.num_units:
                    assert not candidate["PROGRAMS_PER_UNIT"]


@pytest.mark.parametrize(
    ("parameter", "given"),
    [("ROWS", 0), ("ROWS", 3), ("ROWS", None), ("PROGRAMS_PER_UNIT", -1)],
)
def test_config_out_of_range_is_refused(parameter, given, device):
    x = randn(3, 64, dtype=torch.bfloat16, device=device)
    config = KernelConfig.of(ROWS=1, num_warps=1).replace(**{parameter: given})
    before = launch_counts(device)
    with pytest.raises(ValueError, match=f"config {parameter} must be .* {given}"):
        rms_norm(x, None, EPS, config=config)
    assert launch_counts(device) == before


def test_each_call_is_one_launch(device):
    x = randn(5, 64, dtype=torch.bfloat16, device=device)
    before = launch_counts(device)
    rms_norm(x, None, EPS)
    rms_norm(x, None, EPS, residual=x.clone())
    after = launch_counts(device)
    assert after["rms_norm"] == before["rms_norm"] + 1
    assert after["fused_add_rms_norm"] == before["fused_add_rms_norm"] + 1


@pytest.mark.gpu
def test_rows_past_2_to_the_31_elements(device):
    x = torch.zeros(2**31 // 8192 + 8, 8192, dtype=torch.bfloat16, device=device)
    x[-3:] = randn(3, 8192, dtype=torch.bfloat16, device=device)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, None, EPS, out=out)
    right, _ = rms_norm_reference(x[-3:], None, EPS)
    like, _ = in_dtype(x[-3:], None, EPS)
    assert_close(out[-3:], right, like, "last rows")
    assert not torch.isnan(out[::4099]).any()
