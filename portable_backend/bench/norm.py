# SPDX-License-Identifier: Apache-2.0
"""The suite `norm`: RMSNorm, and RMSNorm with the residual added first.

The fused form works in place, as vLLM's layers do, and each call takes the results of
the one before: rows keep norm 1 and the residual grows by at most that much per call,
which neither overflows nor changes the time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from portable_backend.bench.inputs import DTYPES
from portable_backend.bench.results import COPY, ERROR_LIMITS, OURS, Job, Row
from portable_backend.bench.settings import Settings
from portable_backend.bench.shapes import (
    NORM_SIZES,
    NORM_TOKENS,
    TINY_NORM,
    NormShape,
)
from portable_backend.bench.timing import (
    Contestant,
    num_copies,
    race,
    relative_error,
)
from portable_backend.kernels import rms_norm
from portable_backend.kernels.reference import rms_norm_reference

EPS = 1e-6
# (x, residual, out) of one call; the fused form overwrites x and residual.
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def portable(fused: bool, weight: torch.Tensor, buffers: Buffers) -> None:
    x, residual, out = buffers
    if fused:
        rms_norm(x, weight, EPS, residual=residual, out=x, residual_out=residual)
    else:
        rms_norm(x, weight, EPS, out=out)


def vllm(fused: bool, weight: torch.Tensor, buffers: Buffers) -> None:
    """vLLM's compiled operators."""
    from vllm import _custom_ops as ops

    x, residual, out = buffers
    if fused:
        ops.fused_add_rms_norm(x, residual, weight, EPS)
    else:
        ops.rms_norm(out, x, weight, EPS)


def torch_compile(fused: bool, weight: torch.Tensor, buffers: Buffers) -> None:
    """The plain formula under torch.compile, for any number of tokens, as in vLLM."""
    _compiled(fused, weight)(*_any_number(buffers), weight)


def _any_number(buffers: Buffers) -> Buffers:
    if buffers[0].shape[0] > 1:  # torch compiles one row apart
        for tensor in buffers:
            torch._dynamo.mark_dynamic(tensor, 0)
    return buffers


_compiled_now: dict[tuple[bool, int, torch.dtype], Callable[..., Any]] = {}


def _compiled(fused: bool, weight: torch.Tensor) -> Callable[..., Any]:
    """The compiled formula of one row size and dtype; others start with clean caches.

    Else torch would make the row size dynamic too, and give up after eight of them.
    """
    key = (fused, weight.shape[0], weight.dtype)
    if key not in _compiled_now:
        torch._dynamo.reset()
        _compiled_now.clear()
        _compiled_now[key] = torch.compile(_plain_fused if fused else _plain)
        # Tiles follow the first call's size: vLLM compiles at its largest step.
        # Separate tensors, since torch compiles views of one differently.
        x = weight.new_zeros(NORM_TOKENS[-1], weight.shape[0])
        largest = (x, torch.zeros_like(x), torch.zeros_like(x))
        _compiled_now[key](*_any_number(largest), weight)
    return _compiled_now[key]


def _plain(
    x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor
) -> None:
    total = x.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    out.copy_(normed.to(weight.dtype) * weight)


def _plain_fused(
    x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, weight: torch.Tensor
) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    x.copy_(normed.to(weight.dtype) * weight)


IMPLEMENTATIONS = {"vllm": vllm, "torch_compile": torch_compile, OURS: portable}


def jobs(settings: Settings) -> Iterator[Job]:
    tokens, sizes = TINY_NORM if settings.tiny else (NORM_TOKENS, NORM_SIZES)
    dtype = "fp32" if settings.tiny else "bf16"
    for fused in (False, True):
        for row_size in sizes:
            for num_tokens in tokens:
                shape = NormShape(fused, num_tokens, row_size, dtype)
                run = partial(measure, shape, settings)
                yield Job("norm", shape.name, shape.fields, run)


def measure(shape: NormShape, settings: Settings) -> Row:
    device, dtype = settings.device, DTYPES[shape.dtype]
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        empty = torch.empty(sizes, dtype=dtype, device=device)
        return empty.normal_(generator=generator)

    x = random(shape.num_tokens, shape.row_size)
    residual, weight = random(*x.shape), random(shape.row_size)
    normed, total = rms_norm_reference(
        x, weight, EPS, residual if shape.fused else None
    )
    sets: list[Buffers] = [
        (x.clone(), residual.clone(), torch.empty_like(x))
        for _ in range(num_copies(shape.num_bytes, device))
    ]

    def refill() -> None:
        for buffers in sets:
            buffers[0].copy_(x)
            buffers[1].copy_(residual)
            buffers[2].fill_(float("nan"))

    def error() -> float:
        if total is None:
            return relative_error(sets[0][2], normed)
        errors = (
            relative_error(sets[0][0], normed),
            relative_error(sets[0][1], total),
        )
        return float(torch.tensor(errors).max())  # keeps a NaN, which max() need not

    def contestant(name: str) -> Contestant:
        calls = [
            partial(IMPLEMENTATIONS[name], shape.fused, weight, buffers)
            for buffers in sets
        ]

        def verify() -> float:
            refill()
            calls[0]()
            return error()

        return Contestant(calls, verify, refill, None if shape.fused else error)

    def copy() -> Contestant:
        """A plain copy of as many bytes, the roof of this size."""
        half = shape.num_bytes // 2
        pairs = [
            torch.zeros((2, half // 4), dtype=torch.int32, device=device) for _ in sets
        ]
        return Contestant(
            [partial(torch.add, pair[0], 0, out=pair[1]) for pair in pairs],
            verify=lambda: None,
        )

    makers: dict[str, Callable[[], Contestant]] = {
        name: copy if name == COPY else partial(contestant, name)
        for name in settings.chosen([*IMPLEMENTATIONS, COPY])
    }
    results = race(
        makers,
        device=device,
        rounds=settings.rounds,
        limit=ERROR_LIMITS[shape.dtype],
    )
    return Row(
        suite="norm",
        name=shape.name,
        group=f"{shape.name}, {'few' if shape.num_tokens <= 256 else 'many'} tokens",
        fields=shape.fields,
        num_bytes=shape.num_bytes,
        reference="oracle",
        results=results,
    )
