# SPDX-License-Identifier: Apache-2.0
"""The correctness gate: whether an output is right, and the inputs that tell.

No time counts before a config has passed. The rule is flash-attention's: no worse than
twice what plain torch does in the same dtype, and two rounding steps.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# A value that no computation here produces and every dtype stores exactly.
SENTINEL = 7776.0
NAN = float("nan")


@dataclass(frozen=True)
class Check:
    """What comparing a config's outputs with the oracle gave.

    Attributes:
        error_ratio: our largest error over torch's in the same dtype, or over one
            rounding step of the oracle where that is larger; infinite for NaN.
        wrong: None, or what is wrong, in one line.
    """

    error_ratio: float
    wrong: str | None = None


@dataclass(frozen=True)
class Distribution:
    """How inputs are distributed: what is done to normally distributed rows.

    Each function takes [..., row] and works row by row, so that copies of a row in
    different places change alike.

    Attributes:
        name: for messages.
        rows: of keys, or of whatever else is normalised over the last axis.
        query: of queries.
        value: of values.
    """

    name: str
    rows: Callable[[torch.Tensor], torch.Tensor]
    query: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def _constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.full_like(x, value)


def _spikes(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() > 2, 8 * x, 0)


def _outliers(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x[..., :1] > 1.5, 20 * x, x)


# Products of a head stay below fp16's largest number, before they are scaled too.
DISTRIBUTIONS = (
    Distribution("normal", _same, _same, _same),
    Distribution("large", _times(6), _times(6), _times(1000)),
    Distribution("outlier keys", _outliers, _same, _same),
    Distribution("constant", _constant(0.75), _constant(0.5), _constant(1.25)),
    Distribution("spikes", _spikes, _spikes, _spikes),
)


def judge(
    ours: torch.Tensor, oracle: torch.Tensor, same_dtype: torch.Tensor, label: str
) -> Check:
    """Compare by the house rule.

    Args:
        ours: [..., row], in the dtype of the inputs.
        oracle: like ours, fp32, or fp64 where ours is fp32.
        same_dtype: what plain torch makes of it in the dtype of the inputs.
        label: what was computed, for the message.
    """
    if oracle.numel() == 0:
        return Check(0.0)
    error = (ours.to(oracle.dtype) - oracle).abs()
    # NaN compares as false: make it the largest error there is.
    error = torch.where(error.isnan(), math.inf, error)
    torch_error = (same_dtype.to(oracle.dtype) - oracle).abs()
    torch_error = torch.where(torch_error.isfinite(), torch_error, 0)
    worst, torchs, largest = torch.stack(
        (error.max(), torch_error.max(), oracle.abs().max())
    ).tolist()
    step = torch.finfo(ours.dtype).eps * largest
    # Products are summed one after the other, where torch sums in blocks.
    steps = 2 + (oracle.shape[-1] / 64 if ours.dtype == torch.float32 else 0)
    allowed = 2 * torchs + steps * step
    ratio = worst / max(torchs, step, math.ulp(0.0)) if worst else 0.0
    if worst <= allowed:
        return Check(ratio)
    off = int((error > allowed).sum())
    return Check(
        ratio,
        f"{label}: error {worst:.3g}, allowed {allowed:.3g}; "
        f"{off} of {error.numel()} elements are off",
    )


def untouched(tensor: torch.Tensor, before: torch.Tensor, label: str) -> Check:
    """Whether `tensor` holds the bits it held `before`."""
    changed = int((bits(tensor) != bits(before)).sum())
    if not changed:
        return Check(0.0)
    return Check(math.inf, f"{label}: {changed} elements were written")


def worst_of(checks: Iterable[Check]) -> Check:
    """The largest ratio, and the first thing that is wrong; stops there."""
    ratio = 0.0
    for check in checks:
        ratio = max(ratio, check.error_ratio)
        if check.wrong is not None:
            return Check(ratio, check.wrong)
    return Check(ratio)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that NaN compares equal to itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kind[tensor.element_size()])


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """The oracle's: fp32 cannot judge itself."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def draw_length(rng: random.Random, size: int, limit: int) -> int:
    """One of a bucket's upper half; if it can be, not round, nor the one timed.

    Args:
        rng: makes the choice.
        size: of the bucket.
        limit: of what is cheap enough; stands in for a larger size.
    """
    most = max(1, min(size - 1, limit))
    length = rng.randint(max(1, most // 2), most)
    return length - 1 if length % 16 == 0 else length


def draw_lengths(rng: random.Random, count: int, size: int, limit: int) -> list[int]:
    """Lengths up to `size`, uneven: the first is long, others short, one among them 1.

    Args:
        rng: makes the choice.
        count: how many, at least 1.
        size: of the bucket.
        limit: as in `draw_length`.
    """
    lengths = [draw_length(rng, size, limit)]
    for i in range(1, count):
        most = max(1, min(size, limit))
        lengths.append(1 if i == 1 else rng.randint(1, most))
    return lengths
