# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over the last axis, alone or with the residual added first.

y = x / sqrt(mean(x^2) + eps) * weight, x replaced by x + residual in the fused form.

A program holds whole rows in registers, so each byte is read and written once: one row
where rows are long, several where they are short. It may go on to further rows, whose
data it fetches ahead, and then loads the weight once.

Source: Zhang and Sennrich (2019). All of it in fp32, rounded once at the end: what
torch.compile makes of vLLM's layers, and closer to the truth than the layers as
written, which round the normalised value before the product with the weight.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._checks import check_places
from portable_backend.kernels._direct import (
    Bindings,
    Launch,
    cdiv,
    gate_for,
    next_power_of_2,
    pointer_classes,
)
from portable_backend.kernels._jit import device_function
from portable_backend.kernels._launch import (
    COUNT_FUSED_ADD_RMS_NORM,
    COUNT_RMS_NORM,
    count_launch,
    counters,
    wait_for_earlier,
)
from portable_backend.kernels._numerics import round_to
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.rms_norm_space import (
    BUCKET_SIZES,
    MAX_ROW_SIZE,
    default_config,
    row_bucket,
)
from portable_backend.kernels.served import norm_config

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
    EARLY_START: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(EARLY_START)
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
        eps: added to the mean square, at least 0.
        residual: like x; its dtype is x's.
        out: like x, may be x itself; None allocates.
        residual_out: like x, may be residual itself; None allocates.
        config: launch parameters; None: what the engine has chosen (`served.py`), else
            default_config().

    Returns:
        out, or (out, residual_out) where residual_out = x + residual in x's dtype.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit, before any launch.
    """
    if not 0 <= eps < math.inf:
        raise bad_argument("eps", "finite, at least 0", eps, "models use 1e-6 to 1e-5")
    if residual is None and residual_out is not None:
        raise bad_argument(
            "residual_out", "None without residual", "a tensor", "omit it"
        )
    if out is not None and out is residual_out:
        raise bad_argument(
            "residual_out", "another tensor than out", "out itself", "pass two tensors"
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
            config = norm_config(x.dtype, row_size, fused, self.num_rows)
        if config is None:
            config = default_config(
                row_size=row_size,
                num_rows=BUCKET_SIZES[row_bucket(self.num_rows)],
                dtype=x.dtype,
                device=info,
            )
        rows, programs_per_unit = _tile_of(config)
        if info.platform == "interpreter":
            # The interpreter compiles nothing, so tiles may follow each call's size.
            rows = min(rows, next_power_of_2(self.num_rows))
        folded = _fold_leading_axes(tensors[:4])
        if folded is None:
            return
        inner, strides = folded
        self.strides = tuple(strides)
        self.num_programs = cdiv(self.num_rows, rows)
        if programs_per_unit:
            most = programs_per_unit * info.num_units
            self.num_programs = min(self.num_programs, most)
        self.counts = counters(x.device)
        self.counts_ptr = self.counts.data_ptr()
        self.gate = gate_for(x.device, info.platform)
        options = config.options(info.platform)
        constants = {
            "INNER": inner,
            "ROW_SIZE": row_size,
            "ROW_SIZE_PADDED": next_power_of_2(row_size),
            "HAS_RESIDUAL": fused,
            "HAS_WEIGHT": has_weight,
            "EMULATE_BF16": info.platform == "interpreter",
            "ROWS": rows,
            "PERSISTENT": programs_per_unit > 0,
            "EVICT_FIRST": bool(config.get("EVICT_FIRST", False)),
            "EARLY_START": bool(options.get("launch_pdl")),
        }
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


def forget_bindings() -> None:
    """Choose configs anew; compiled kernels stay."""
    _BINDINGS.clear()


def _tile_of(config: KernelConfig) -> tuple[int, int]:
    """(rows of a program, looping programs of a unit or 0)."""
    rows = config.get("ROWS")
    if not isinstance(rows, int) or rows < 1 or rows & (rows - 1):
        raise bad_argument(
            "config ROWS", "a power of two", repr(rows), "correct the config"
        )
    programs = config.get("PROGRAMS_PER_UNIT", 0)
    if not isinstance(programs, int) or programs < 0:
        raise bad_argument(
            "config PROGRAMS_PER_UNIT",
            "0 or the programs of one unit",
            repr(programs),
            "correct the config",
        )
    return rows, programs


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
    for name in ("out", "residual_out"):
        tensor = others[name]
        if tensor is not None:
            check_places(name, tensor)
