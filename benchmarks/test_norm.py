# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and with the residual added: ours, vLLM's, and torch.compile's."""

from typing import Any

import pytest
import torch

from portable_backend.bench.inputs import DTYPES
from portable_backend.bench.norm import EPS, IMPLEMENTATIONS
from portable_backend.bench.results import ERROR_LIMITS
from portable_backend.bench.shapes import NormShape
from portable_backend.bench.timing import relative_error
from portable_backend.kernels.reference import rms_norm_reference


def test_norm(
    measure: Any,
    shape: NormShape,
    provider: str,
    device: torch.device,
    absent: dict[str, str],
) -> None:
    if provider in absent:
        pytest.skip(f"{provider}: {absent[provider]}")
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        empty = torch.empty(sizes, dtype=DTYPES[shape.dtype], device=device)
        return empty.normal_(generator=generator)

    x = random(shape.num_tokens, shape.row_size)
    residual, weight = random(*x.shape), random(shape.row_size)
    normed, total = rms_norm_reference(
        x, weight, EPS, residual if shape.fused else None
    )
    buffers = (x.clone(), residual.clone(), torch.empty_like(x))

    def refill() -> None:
        buffers[0].copy_(x)
        buffers[1].copy_(residual)
        buffers[2].fill_(float("nan"))

    def error() -> float:
        if total is None:
            return relative_error(buffers[2], normed)
        errors = [
            relative_error(buffers[0], normed),
            relative_error(buffers[1], total),
        ]
        return float(torch.tensor(errors).max())  # keeps a NaN, which max() need not

    measure(
        shape,
        provider,
        lambda: IMPLEMENTATIONS[provider](shape.fused, weight, buffers),
        refill,
        error,
        ERROR_LIMITS[shape.dtype],
    )
