# SPDX-License-Identifier: Apache-2.0
"""Paged attention: ours, vLLM's, FlashAttention's and torch's, shape by shape."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from portable_backend.bench import providers
from portable_backend.bench.dense import DENSE
from portable_backend.bench.inputs import Inputs, make_inputs, oracle
from portable_backend.bench.results import ERROR_LIMITS, OUR_NAMES
from portable_backend.bench.shapes import AttentionShape
from portable_backend.bench.timing import FAILURES, relative_error
from portable_backend.errors import UnsupportedError


@lru_cache(maxsize=1)
def _inputs(shape: AttentionShape, device: torch.device) -> tuple[Inputs, torch.Tensor]:
    """One step, and what attention must give."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the last shape held is free by now
    inputs = make_inputs(shape, device)
    return inputs, oracle(inputs)


class _Bound:
    """A provider bound to inputs: call it, poison its output, compare that."""

    def __init__(self, provider: str, inputs: Inputs) -> None:
        self._dense = DENSE[provider](inputs) if provider in DENSE else None
        self._out = torch.empty(0)
        if self._dense is None:
            self._out = torch.empty_like(inputs.query)
            self._call = providers.ATTENTION[provider](inputs, self._out).calls[0]

    def call(self) -> None:
        if self._dense is None:
            self._call()
        else:
            self._out = self._dense.call()

    def refill(self) -> None:
        self._out.fill_(float("nan"))

    def error(self, reference: torch.Tensor) -> float:
        rows = self._out if self._dense is None else self._dense.rows(self._out)
        return relative_error(rows, reference)


def test_attention(
    measure: Any,
    shape: AttentionShape,
    provider: str,
    device: torch.device,
    absent: dict[str, str],
) -> None:
    if provider in absent:
        pytest.skip(f"{provider}: {absent[provider]}")
    try:
        inputs, reference = _inputs(shape, device)
    except torch.OutOfMemoryError:
        pytest.skip("does not fit in the device's memory")
    # Other kernels may read what they then mask; ours must never let it in.
    inputs.fill_unused(float("nan") if provider in OUR_NAMES else 0.0)
    try:
        bound = _Bound(provider, inputs)
        bound.call()
    except FAILURES as error:
        if provider in OUR_NAMES and not isinstance(error, UnsupportedError):
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        pytest.skip(f"{provider} does not run this: {type(error).__name__}: {reason}")
    measure(
        shape,
        provider,
        bound.call,
        bound.refill,
        lambda: bound.error(reference),
        ERROR_LIMITS[shape.dtype],
    )
