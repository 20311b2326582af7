# SPDX-License-Identifier: Apache-2.0
"""The suites `copy` and `matmul`: what this device reaches at best, by torch."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from portable_backend.bench.results import Job, Result, Row
from portable_backend.bench.settings import Settings
from portable_backend.bench.timing import Contestant, num_copies, race


def copy_jobs(settings: Settings) -> Iterator[Job]:
    """The largest is the roof; the others show how near it calls of their size get."""
    sizes = (12,) if settings.tiny else (24, 25, 26, 27, 31)
    for num_bytes in (1 << size for size in sizes):
        fields: dict[str, str | int] = {"bytes": num_bytes}
        run = partial(measure_copy, num_bytes, settings)
        yield Job("copy", "copy", fields, run)


def measure_copy(num_bytes: int, settings: Settings) -> Row:
    """A device copy of one tensor; its bytes count twice, read and written."""
    size = (num_copies(2 * num_bytes, settings.device), num_bytes // 4)
    sources = torch.randint(1 << 30, size, dtype=torch.int32, device=settings.device)
    targets = torch.empty_like(sources)
    # By a kernel: in a graph target.copy_ becomes the copy engine's, which is slower.
    calls = [
        partial(torch.add, x, 0, out=y) for x, y in zip(sources, targets, strict=True)
    ]
    return Row(
        suite="copy",
        name="copy",
        group="roof",
        fields={"bytes": num_bytes},
        num_bytes=2 * num_bytes,
        results=_alone(calls, settings),
    )


def matmul_jobs(settings: Settings) -> Iterator[Job]:
    size = 32 if settings.tiny else 8192
    fields: dict[str, str | int] = {"size": size}
    yield Job("matmul", "matmul", fields, partial(measure_matmul, size, settings))


def measure_matmul(size: int, settings: Settings) -> Row:
    """A bf16 product of two square matrices of random numbers."""
    shape, device = (size, size), settings.device
    a = torch.randn(shape, dtype=torch.bfloat16, device=device)
    b = torch.randn(shape, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return Row(
        suite="matmul",
        name="matmul",
        group="roof",
        fields={"size": size},
        flops=2.0 * size**3,
        results=_alone([partial(torch.mm, a, b, out=out)], settings),
    )


def _alone(
    calls: Sequence[partial[torch.Tensor]], settings: Settings
) -> dict[str, Result]:
    def contestant() -> Contestant:
        calls[0]()
        return Contestant(calls, lambda: None)

    return race(
        {"torch": contestant},
        device=settings.device,
        rounds=settings.rounds,
        limit=0.0,
    )
