# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the last axis, alone or with the residual added first.

y = x / sqrt(mean(x^2) + eps) * weight, x replaced by x + residual in the fused form.

A program holds whole rows in registers, so each byte is read and written once: one row
where rows are long, several where they are short. It may go on to further rows, whose
data it fetches ahead, and then loads the weight once.

Source: Zhang and Sennrich (2019). Rounding as vLLM's layers do it: statistics from the
unrounded fp32 sum, the normalised value rounded to the weight's dtype before the
product.
"""

import functools
import itertools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._jit import device_function
from portable_backend.kernels._launch import (
    COUNT_FUSED_ADD_RMS_NORM,
    COUNT_RMS_NORM,
    count_launch,
    counters,
)
from portable_backend.kernels._numerics import round_to
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.rms_norm_space import (
    BUCKET_SIZES,
    MAX_ROW_SIZE,
    default_config,
    row_bucket,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@device_function
def _row_offsets(row, stride_outer, stride_inner, INNER: tl.constexpr):
    """Where rows begin: they are addressed by two axes, the inner one of size INNER."""
    outer = (row // INNER).to(tl.int64)
    return outer * stride_outer + (row % INNER).to(tl.int64) * stride_inner


@device_function
def _load_rows(
    x_ptr, residual_ptr, row, cols, mask, stride_x_outer, stride_x_inner,
    stride_residual_outer, stride_residual_inner, INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, EVICT_FIRST: tl.constexpr,
):  # fmt: skip
    """(x, residual), as stored; x twice without a residual."""
    EVICTION: tl.constexpr = "evict_first" if EVICT_FIRST else ""
    rows = _row_offsets(row, stride_x_outer, stride_x_inner, INNER)
    x = tl.load(x_ptr + rows + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
    residual = x
    if HAS_RESIDUAL:
        rows = _row_offsets(row, stride_residual_outer, stride_residual_inner, INNER)
        residual = tl.load(
            residual_ptr + rows + cols, mask=mask, other=0.0, eviction_policy=EVICTION
        )
    return x, residual


@device_function
def _store_rows(
    out_ptr, residual_out_ptr, x, residual, weight, row, cols, mask, stride_out_outer,
    stride_out_inner, stride_residual_out_outer, stride_residual_out_inner, eps,
    INNER: tl.constexpr, ROW_SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, EMULATE_BF16: tl.constexpr,
):  # fmt: skip
    """Normalise loaded rows and write the results."""
    total = x.to(tl.float32)
    if HAS_RESIDUAL:
        total += residual.to(tl.float32)
        rows = _row_offsets(
            row, stride_residual_out_outer, stride_residual_out_inner, INNER
        )
        residual_out = round_to(total, x.dtype, EMULATE_BF16)
        tl.store(residual_out_ptr + rows + cols, residual_out, mask=mask)
    mean_square = tl.sum(total * total, 1, keep_dims=True) / ROW_SIZE
    normed = total * tl.rsqrt(mean_square + eps)
    if HAS_WEIGHT:
        normed = round_to(normed, weight.dtype, EMULATE_BF16).to(tl.float32)
        normed = normed * weight.to(tl.float32)
    rows = _row_offsets(row, stride_out_outer, stride_out_inner, INNER)
    normed = round_to(normed, x.dtype, EMULATE_BF16)
    tl.store(out_ptr + rows + cols, normed, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    # outputs
    out_ptr, residual_out_ptr,
    # inputs
    x_ptr, residual_ptr, weight_ptr, counts_ptr,
    # strides, in elements: rows are addressed by two axes
    stride_out_outer, stride_out_inner, stride_residual_out_outer,
    stride_residual_out_inner, stride_x_outer, stride_x_inner,
    stride_residual_outer, stride_residual_inner,
    # sizes
    num_rows: tl.int32, eps,
    INNER: tl.constexpr, ROW_SIZE: tl.constexpr, ROW_SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, EMULATE_BF16: tl.constexpr,
    # tile
    ROWS: tl.constexpr, PERSISTENT: tl.constexpr, EVICT_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, ROW_SIZE_PADDED)[None, :]
    in_row = tl.broadcast_to(cols < ROW_SIZE, (ROWS, ROW_SIZE_PADDED))
    # A program of one row has that row: the grid holds no more programs than rows.
    mask = in_row
    if ROWS > 1:
        mask = in_row & (row < num_rows)

    weight = 0.0
    if HAS_WEIGHT:
        # As a whole tile: in x's layout, so that lanes need no exchange.
        offsets = tl.broadcast_to(cols, (ROWS, ROW_SIZE_PADDED))
        weight = tl.load(weight_ptr + offsets, mask=in_row, other=0.0)
    if HAS_RESIDUAL:
        count_launch(counts_ptr, COUNT_FUSED_ADD_RMS_NORM)
    else:
        count_launch(counts_ptr, COUNT_RMS_NORM)

    # All loads leave before the first wait. Behind the branch of count_launch() ptxas
    # cannot put off the weight's until x has come.
    x, residual = _load_rows(
        x_ptr, residual_ptr, row, cols, mask, stride_x_outer, stride_x_inner,
        stride_residual_outer, stride_residual_inner, INNER, HAS_RESIDUAL,
        EVICT_FIRST,
    )  # fmt: skip
    if PERSISTENT:
        step = tl.num_programs(0) * ROWS
        for _ in range(tl.program_id(0) * ROWS, num_rows, step):
            # The next rows are fetched while these are worked on.
            next_mask = in_row & (row + step < num_rows)
            next_x, next_residual = _load_rows(
                x_ptr, residual_ptr, row + step, cols, next_mask, stride_x_outer,
                stride_x_inner, stride_residual_outer, stride_residual_inner, INNER,
                HAS_RESIDUAL, EVICT_FIRST,
            )  # fmt: skip
            _store_rows(
                out_ptr, residual_out_ptr, x, residual, weight, row, cols, mask,
                stride_out_outer, stride_out_inner, stride_residual_out_outer,
                stride_residual_out_inner, eps, INNER, ROW_SIZE, HAS_RESIDUAL,
                HAS_WEIGHT, EMULATE_BF16,
            )  # fmt: skip
            x, residual, mask, row = next_x, next_residual, next_mask, row + step
    else:
        _store_rows(
            out_ptr, residual_out_ptr, x, residual, weight, row, cols, mask,
            stride_out_outer, stride_out_inner, stride_residual_out_outer,
            stride_residual_out_inner, eps, INNER, ROW_SIZE, HAS_RESIDUAL, HAS_WEIGHT,
            EMULATE_BF16,
        )  # fmt: skip


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last axis by its root mean square; add `residual` first if given.

    Args:
        x: [..., row_size], fp16, bf16 or fp32; last stride 1, others free.
        weight: [row_size] or None; may be fp32 beside a 16-bit x.
        eps: added to the mean square.
        residual: like x; its dtype is x's.
        out: like x, may be x itself; None allocates.
        residual_out: like x, may be residual itself; None allocates.
        config: launch parameters; None means default_config().

    Returns:
        out, or (out, residual_out) where residual_out = x + residual in x's dtype.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.
    """
    if residual is None and residual_out is not None:
        raise bad_argument(
            "residual_out", "None without residual", "a tensor", "omit it"
        )
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is not None and residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check(x, weight, residual, out, residual_out)
    row_size = x.shape[-1]
    num_rows = x.numel() // row_size
    if num_rows:
        default, options, counts, info = _config_for(
            x.device, row_size, x.dtype, row_bucket(num_rows)
        )
        if config is not None:
            options = config.options(info.platform)
        tile = _tile_for(default if config is None else config, num_rows, info)
        fused = residual is not None
        if residual is None or residual_out is None:
            tensors = (out, out, x, x)
        else:
            tensors = (out, residual_out, x, residual)
        folded = _fold_leading_axes(tensors)
        if folded is None:
            # No pair of strides reaches every row: work on copies laid out plainly.
            o, ro, i, r = (t.contiguous() for t in tensors)
            copies = (o, ro, i, r)
            _launch(copies, weight, eps, counts, tile, options, fused)
            out.copy_(copies[0])
            if residual_out is not None:
                residual_out.copy_(copies[1])
        else:
            _launch(tensors, weight, eps, counts, tile, options, fused, folded)
    return out if residual_out is None else (out, residual_out)


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class _Tile(NamedTuple):
    """A config in the terms of one launch."""

    rows: int
    programs: int
    is_persistent: bool
    evict_first: bool


def _tile_for(config: KernelConfig, num_rows: int, info: DeviceInfo) -> _Tile:
    rows = config.get("ROWS")
    if not isinstance(rows, int) or rows < 1 or rows & (rows - 1):
        raise bad_argument(
            "config ROWS", "a power of two", repr(rows), "correct the config"
        )
    programs_per_unit = config.get("PROGRAMS_PER_UNIT", 0)
    if not isinstance(programs_per_unit, int) or programs_per_unit < 0:
        raise bad_argument(
            "config PROGRAMS_PER_UNIT",
            "0 or the programs of one unit",
            repr(programs_per_unit),
            "correct the config",
        )
    if info.platform == "interpreter":
        # It compiles nothing, so tiles may follow each call's size.
        padded: int = triton.next_power_of_2(num_rows)
        rows = min(rows, padded)
    programs = triton.cdiv(num_rows, rows)
    if programs_per_unit:
        programs = min(programs, programs_per_unit * info.num_units)
    evict_first = bool(config.get("EVICT_FIRST", False))
    return _Tile(rows, programs, programs_per_unit > 0, evict_first)


def _launch(
    tensors: _Tensors,
    weight: torch.Tensor | None,
    eps: float,
    counts: torch.Tensor,
    tile: _Tile,
    options: dict[str, object],
    fused: bool,
    folded: tuple[int, list[int]] | None = None,
) -> None:
    """Launch on (out, residual_out, x, residual), or without on (out, out, x, x)."""
    x = tensors[2]
    inner, strides = folded or (1, [x.shape[-1], 0] * 4)
    row_size = x.shape[-1]
    num_rows = x.numel() // row_size
    _rms_norm_kernel[(tile.programs,)](
        *tensors, weight if weight is not None else x, counts,
        *strides, num_rows, float(eps),
        INNER=inner, ROW_SIZE=row_size,
        ROW_SIZE_PADDED=triton.next_power_of_2(row_size),
        HAS_RESIDUAL=fused, HAS_WEIGHT=weight is not None,
        EMULATE_BF16=x.device.type == "cpu", ROWS=tile.rows,
        PERSISTENT=tile.is_persistent, EVICT_FIRST=tile.evict_first, **options,
    )  # fmt: skip


def _fold_leading_axes(tensors: _Tensors) -> tuple[int, list[int]] | None:
    """Address all rows by (outer, inner) index: inner size, and strides per tensor.

    None if some tensor's leading axes cannot be folded into two.
    """
    lead = tensors[0].shape[:-1]
    for split in range(len(lead), -1, -1):
        strides: list[int | None] = []
        for t in tensors:
            strides.append(_fold(lead[:split], t.stride()[:split]))
            strides.append(_fold(lead[split:], t.stride()[split:-1]))
        if None not in strides:
            return math.prod(lead[split:]), strides  # type: ignore[return-value]
    return None


def _fold(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one stride that walks these axes in order, or None."""
    if not sizes:
        return 0
    axes = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(axes):
        if outer != inner * n:
            return None
    return axes[-1][1] if axes else strides[-1]


@functools.cache
def _config_for(
    device: torch.device, row_size: int, dtype: torch.dtype, bucket: int
) -> tuple[KernelConfig, dict[str, object], torch.Tensor, DeviceInfo]:
    info = DeviceInfo.detect(device)
    config = default_config(
        row_size=row_size, num_rows=BUCKET_SIZES[bucket], dtype=dtype, device=info
    )
    return config, config.options(info.platform), counters(device), info


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    if x.dtype not in DTYPES:
        raise bad_argument("x", "float16, bfloat16 or float32", x.dtype, "convert it")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_ROW_SIZE:
        raise bad_argument(
            "x", f"[..., 1 to {MAX_ROW_SIZE}]", list(x.shape), "reshape or split it"
        )
    if weight is not None:
        if weight.shape != x.shape[-1:] or weight.dtype not in DTYPES:
            raise bad_argument(
                "weight",
                f"floating point [{x.shape[-1]}]",
                f"{weight.dtype} {list(weight.shape)}",
                "pass one factor per element of x's last axis",
            )
        if weight.stride(0) != 1 and weight.shape[0] > 1:
            raise bad_argument(
                "weight", "contiguous", weight.stride(), "call .contiguous()"
            )
        if weight.device != x.device:
            raise bad_argument("weight", f"on {x.device}", weight.device, "move it")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise bad_argument(
            "x", "contiguous in its last axis", x.stride(), "call .contiguous()"
        )
    others = {"residual": residual, "out": out, "residual_out": residual_out}
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.shape != x.shape or tensor.dtype != x.dtype:
            raise bad_argument(
                name,
                f"{x.dtype} {list(x.shape)} like x",
                f"{tensor.dtype} {list(tensor.shape)}",
                "convert or reshape it",
            )
        if tensor.device != x.device:
            raise bad_argument(name, f"on {x.device}", tensor.device, "move it")
        if tensor.stride(-1) != 1 and x.shape[-1] > 1:
            raise bad_argument(
                name,
                "contiguous in its last axis",
                tensor.stride(),
                "call .contiguous()",
            )
