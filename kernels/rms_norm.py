# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the last axis, alone or with the residual added first.

y = x / sqrt(mean(x^2) + eps) * weight, x replaced by x + residual in the fused form.

A program holds whole rows in registers, so each byte is read and written once: one row
where rows are long, several where they are short.

Source: Zhang and Sennrich (2019). Rounding as vLLM's layers do it: statistics from the
unrounded fp32 sum, the normalised value rounded to the weight's dtype before the
product.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._direct import (
    Bindings,
    Launch,
    cdiv,
    gate_for,
    next_power_of_2,
    pointer_classes,
)
from portable_backend.kernels._launch import (
    COUNT_FUSED_ADD_RMS_NORM,
    COUNT_RMS_NORM,
    count_launch,
    counters,
)
from portable_backend.kernels._numerics import round_to
from portable_backend.kernels.config import KernelConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A row must fit the registers of one program.
MAX_ROW_SIZE = 65536


def default_config(*, row_size: int, device: DeviceInfo) -> KernelConfig:
    """Rows per program and warps: 8 to 16 elements per lane, at least 1024 per program.

    Args:
        row_size: elements of the normalised axis.
        device: what the kernel will run on.
    """
    padded = triton.next_power_of_2(row_size)
    if device.platform == "interpreter":
        return KernelConfig.of(ROWS=max(1, 65536 // padded), num_warps=1)
    rows = max(1, min(16, 1024 // padded))
    lanes = rows * padded // 16
    num_warps = min(max(1, lanes // device.limits.warp_size), 16)
    max_warps = 1024 // device.limits.warp_size
    return KernelConfig.of(ROWS=rows, num_warps=min(num_warps, max_warps))


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
    ROWS: tl.constexpr,
):  # fmt: skip
    if HAS_RESIDUAL:
        count_launch(counts_ptr, COUNT_FUSED_ADD_RMS_NORM)
    else:
        count_launch(counts_ptr, COUNT_RMS_NORM)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outer = (row // INNER).to(tl.int64)
    within = (row % INNER).to(tl.int64)
    cols = tl.arange(0, ROW_SIZE_PADDED)
    mask = (row < num_rows)[:, None] & (cols < ROW_SIZE)[None, :]

    x_rows = outer * stride_x_outer + within * stride_x_inner
    x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=mask, other=0.0)
    total = x.to(tl.float32)
    if HAS_RESIDUAL:
        rows = outer * stride_residual_outer + within * stride_residual_inner
        offsets = rows[:, None] + cols[None, :]
        total += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rows = outer * stride_residual_out_outer + within * stride_residual_out_inner
        offsets = rows[:, None] + cols[None, :]
        residual_out = round_to(total, x.dtype, EMULATE_BF16)
        tl.store(residual_out_ptr + offsets, residual_out, mask=mask)

    mean_square = tl.sum(total * total, 1) / ROW_SIZE
    normed = total * tl.rsqrt(mean_square + eps)[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < ROW_SIZE, other=0.0)
        normed = round_to(normed, weight.dtype, EMULATE_BF16).to(tl.float32)
        normed = normed * weight.to(tl.float32)[None, :]
    rows = outer * stride_out_outer + within * stride_out_inner
    offsets = rows[:, None] + cols[None, :]
    tl.store(out_ptr + offsets, round_to(normed, x.dtype, EMULATE_BF16), mask=mask)


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
    # What checks and launches depend on; our own tensors and x itself need no look.
    signature = (
        x.shape, x.stride(), x.dtype, x.device,
        None if weight is None else _layout(weight),
        None if residual is None else _layout(residual),
        out is x if out is x or out is None else _layout(out),
        residual_out is residual
        if residual_out is residual or residual_out is None
        else _layout(residual_out),
        config,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None and residual_out is None:
        residual_out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Tensors that a launch does not use still need a place among its arguments.
    tensors = (
        out,
        out if residual_out is None else residual_out,
        x,
        x if residual is None else residual,
        x if weight is None else weight,
    )
    out_ptr, residual_out_ptr, x_ptr, residual_ptr, weight_ptr = addresses = (
        tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr(),
        tensors[3].data_ptr(), tensors[4].data_ptr(),
    )  # fmt: skip
    classes = pointer_classes(
        out_ptr | residual_out_ptr | x_ptr | residual_ptr | weight_ptr, tensors
    )
    binding = _BINDINGS.get((signature, classes))
    if binding is None:
        _check(x, weight, residual, out, residual_out)
        binding = _Binding(
            tensors, weight is not None, residual is not None, classes, config
        )
        _BINDINGS[signature, classes] = binding
    launch = binding.launch
    if launch is None:
        if binding.num_rows:
            # No pair of strides reaches every row: work on plain copies.
            normed = rms_norm(
                x.contiguous(), weight, eps,
                residual=None if residual is None else residual.contiguous(),
                config=config,
            )  # fmt: skip
            for target, made in zip(
                (out, residual_out), normed if isinstance(normed, tuple) else (normed,),
                strict=False,
            ):  # fmt: skip
                assert target is not None
                target.copy_(made)
    else:
        stream = binding.gate.stream() if launch.ready else None
        pointers: tuple[Any, ...] = (*tensors, binding.counts)
        if stream is not None:
            pointers = (*addresses, binding.counts_ptr)
        launch(
            stream, binding.num_programs, 1,
            (*pointers, *binding.strides, binding.num_rows, float(eps)),
        )  # fmt: skip
    return out if residual_out is None else (out, residual_out)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class _Binding:
    """A signature that passed the checks, and its launch; None where there is none."""

    launch: Launch | None = None

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        has_weight: bool,
        fused: bool,
        classes: object,
        config: KernelConfig | None,
    ) -> None:
        """Bind (out, residual_out, x, residual, weight), fillers included."""
        x, weight = tensors[2], tensors[4]
        row_size = x.shape[-1]
        self.num_rows = x.numel() // row_size
        if self.num_rows == 0:
            return
        info = DeviceInfo.detect(x.device)
        if config is None:
            config = default_config(row_size=row_size, device=info)
        rows = _rows_per_program(config)
        if info.platform == "interpreter":
            # The interpreter compiles nothing, so tiles may follow each call's size.
            rows = min(rows, next_power_of_2(self.num_rows))
        folded = _fold_leading_axes(tensors[:4])
        if folded is None:
            return
        inner, strides = folded
        self.strides = tuple(strides)
        self.num_programs = cdiv(self.num_rows, rows)
        self.counts = counters(x.device)
        self.counts_ptr = self.counts.data_ptr()
        self.gate = gate_for(x.device, info.platform)
        constants = {
            "INNER": inner,
            "ROW_SIZE": row_size,
            "ROW_SIZE_PADDED": next_power_of_2(row_size),
            "HAS_RESIDUAL": fused,
            "HAS_WEIGHT": has_weight,
            "EMULATE_BF16": info.platform == "interpreter",
            "ROWS": rows,
        }
        options = config.options(info.platform)
        # One launch, and so one handle, for every number of rows.
        key = (
            *constants.items(), *options.items(), *strides, x.dtype, weight.dtype,
            x.device, classes,
        )  # fmt: skip
        launch = _LAUNCHES.get(key)
        if launch is None:
            launch = Launch(_rms_norm_kernel, constants, options, self.gate)
            _LAUNCHES[key] = launch
        self.launch = launch


_BINDINGS = Bindings()
_LAUNCHES = Bindings()


def _rows_per_program(config: KernelConfig) -> int:
    rows = config.get("ROWS")
    if not isinstance(rows, int) or rows < 1 or rows & (rows - 1):
        raise bad_argument(
            "config ROWS", "a power of two", repr(rows), "correct the config"
        )
    return rows


def _fold_leading_axes(
    tensors: tuple[torch.Tensor, ...],
) -> tuple[int, list[int]] | None:
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
