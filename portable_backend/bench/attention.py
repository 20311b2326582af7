# SPDX-License-Identifier: Apache-2.0
"""The suites `attention`, `geometries` and `features`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from portable_backend.bench.inputs import Inputs, make_inputs, oracle
from portable_backend.bench.providers import ATTENTION, Prepared
from portable_backend.bench.results import ERROR_LIMITS, OUR_NAMES, OURS, Job, Row
from portable_backend.bench.settings import Settings
from portable_backend.bench.shapes import (
    BLOCK_SIZES,
    AttentionShape,
    attention_shapes,
    feature_shapes,
    geometry_shapes,
)
from portable_backend.bench.timing import (
    Contestant,
    num_copies,
    race,
    relative_error,
)


def attention_jobs(settings: Settings) -> Iterator[Job]:
    """Every step, and what its plans cost: those do not depend on the block size."""
    shapes = attention_shapes(settings.tiny)
    yield from _jobs("attention", shapes, settings)
    for shape in shapes:
        if settings.tiny or shape.block_size == BLOCK_SIZES[-1]:
            fields, run = shape.fields, partial(measure_plan, shape, settings)
            yield Job("attention", f"plan of {shape.name}", fields, run)


def geometry_jobs(settings: Settings) -> Iterator[Job]:
    shapes = geometry_shapes(settings.tiny, settings.every)
    yield from _jobs("geometries", shapes, settings)


def feature_jobs(settings: Settings) -> Iterator[Job]:
    yield from _jobs("features", feature_shapes(settings.tiny), settings)


def _jobs(
    suite: str, shapes: Sequence[AttentionShape], settings: Settings
) -> Iterator[Job]:
    for shape in shapes:
        run = partial(measure_attention, suite, shape, settings)
        yield Job(suite, shape.name, shape.fields, run)


def measure_attention(suite: str, shape: AttentionShape, settings: Settings) -> Row:
    """One row: every output against the oracle, then the times side by side."""
    num_layers = 1
    if settings.cold:
        num_layers = num_copies(int(shape.num_bytes), settings.device, small_too=True)
    inputs = make_inputs(
        shape, settings.device, layout=settings.layout, num_layers=num_layers
    )
    names = settings.chosen(list(ATTENTION))
    reference, source = _reference(inputs, "fa3" in names)

    def contestant(name: str) -> Contestant:
        out = torch.full_like(inputs.query, float("nan"))
        prepared = ATTENTION[name](inputs, out)

        def error() -> float:
            return relative_error(out, reference)

        def verify() -> float:
            # Other kernels may read what they then mask; ours must never let it in.
            inputs.fill_unused(float("nan") if name in OUR_NAMES else 0.0)
            prepared.calls[0]()
            return error()

        def refill() -> None:
            out.fill_(float("nan"))
            inputs.fill_unused(0.0)

        return Contestant(prepared.calls, verify, refill, error)

    makers: dict[str, Callable[[], Contestant]]
    makers = {name: partial(contestant, name) for name in names}
    limit = ERROR_LIMITS[shape.dtype]
    if source == "fa3":
        limit *= 2  # both sides have rounded
    results = race(makers, device=settings.device, rounds=settings.rounds, limit=limit)
    return Row(
        suite=suite,
        name=shape.name,
        group=_group(suite, shape),
        fields=shape.fields,
        flops=shape.flops,
        num_bytes=shape.num_bytes,
        baseline=shape.baseline,
        reference=source,
        results=results,
    )


def _group(suite: str, shape: AttentionShape) -> str:
    if suite == "attention":
        return f"{shape.group}, block size {shape.block_size}"
    return shape.group


def _reference(inputs: Inputs, has_fa3: bool) -> tuple[torch.Tensor, str]:
    """(what outputs must be, where it is from): the oracle, else FlashAttention-3."""
    try:
        return oracle(inputs), "oracle"
    except torch.OutOfMemoryError:
        if not has_fa3:
            raise
        torch.cuda.empty_cache()
        out = torch.empty_like(inputs.query)
        ATTENTION["fa3"](inputs, out).calls[0]()
        return out.float(), "fa3"


def measure_plan(shape: AttentionShape, settings: Settings) -> Row:
    """What a step's plan costs on the device, once for all layers."""
    inputs = make_inputs(shape, settings.device, num_layers=0)
    out = torch.empty_like(inputs.query)

    def contestant(name: str) -> Contestant:
        prepared: Prepared = ATTENTION[name](inputs, out)
        assert prepared.plan is not None
        prepared.plan()
        return Contestant([prepared.plan], lambda: None)

    names = settings.chosen(["fa3", OURS, "portable_exact"])
    makers: dict[str, Callable[[], Contestant]]
    makers = {name: partial(contestant, name) for name in names}
    results = race(
        makers, device=settings.device, rounds=settings.rounds, limit=float("inf")
    )
    return Row(
        suite="attention",
        name=f"plan of {shape.name}",
        group="plan",
        fields=shape.fields,
        results=results,
    )
