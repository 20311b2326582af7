# SPDX-License-Identifier: Apache-2.0
"""The stopwatches: captured graphs replayed in turns, and the host's time per call."""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from portable_backend.bench.results import Result
from portable_backend.errors import PortableBackendError

Call = Callable[[], object]
# One timed span; long enough for the launch of a graph not to matter.
SPAN_US = 1000.0
MAX_CALLS = 200
TURN_US = 10_000.0
# What foreign kernels raise when they do not support a shape or this machine.
FAILURES = (
    RuntimeError,  # also out of memory, NotImplementedError, CUDA errors
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    subprocess.SubprocessError,  # a compiler that torch.compile starts
    PortableBackendError,
    triton.TritonError,
)


@dataclass
class Contestant:
    """One implementation, ready to be checked and timed.

    Attributes:
        calls: what is timed; several are called in turn, each with inputs of its own.
        verify: run on fresh outputs and return the relative error; None: no check.
        refill: put the inputs and outputs back before timed calls.
        recheck: return the relative error after a refill and one timed span; None where
            calls change what they read.
    """

    calls: Sequence[Call]
    verify: Callable[[], float | None]
    refill: Call = lambda: None
    recheck: Callable[[], float] | None = None


@contextlib.contextmanager
def failures_noted(result: Result) -> Iterator[None]:
    """Turn a failure into the result's reason, so that the others go on."""
    try:
        yield
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [""]
        result.fail(f"{type(error).__name__}: {lines[0]}"[:200])


def race(
    makers: Mapping[str, Callable[[], Contestant]],
    *,
    device: torch.device,
    rounds: int,
    limit: float,
) -> dict[str, Result]:
    """Check every contestant, then time the right ones side by side.

    Args:
        makers: by implementation; each is called once.
        device: on a CPU everything is checked, nothing is timed.
        rounds: timed spans of each.
        limit: largest error of a right result.

    Returns:
        A result for every maker; what failed says why.
    """
    results = {name: Result() for name in makers}
    ready: dict[str, Contestant] = {}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, make in makers.items():
        result = results[name]
        with failures_noted(result):
            contestant = make()
            result.judge(contestant.verify(), limit)
            if result.wrong:
                continue
            if device.type == "cuda":
                graphs[name] = capture(contestant.calls)
            ready[name] = contestant
    for contestant in ready.values():
        contestant.refill()
    if graphs:
        for name, spans in _replay_in_turns(graphs, rounds).items():
            _set_times(results[name], spans, graphs[name][1])
    for name, contestant in ready.items():
        if contestant.recheck is None:
            continue
        result = results[name]
        with failures_noted(result):
            contestant.refill()
            if name in graphs:
                graphs[name][0].replay()
            else:
                for call in contestant.calls:
                    call()
            result.judge(contestant.recheck(), limit)
    return results


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about SPAN_US of calls in turn, and how many they are.

    Everything must have run once before, so that nothing compiles meanwhile.
    """
    time_us = _elapsed_us(calls[0])
    if time_us < SPAN_US / 4:
        # Eager calls this short mostly time the host: ask a small graph instead.
        trial = _graph_of(calls, 8)
        trial.replay()
        time_us = _elapsed_us(trial.replay) / 8
    count = max(1, min(MAX_CALLS, round(SPAN_US / time_us)))
    count = -(-count // len(calls)) * len(calls)
    return _graph_of(calls, count), count


def _graph_of(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph


def _elapsed_us(call: Call) -> float:
    start, end = _event(), _event()
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return max(elapsed_ms * 1e3, 0.1)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _replay_in_turns(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int
) -> dict[str, list[float]]:
    """Microseconds of one replay, of each turn; every round starts with another.

    A turn lasts TURN_US, so that the chip takes the clock that each contestant's power
    allows: in turns of a millisecond the hungriest would run on what the others spare.
    Contestants more than twice as slow as the fastest are timed among themselves.
    """
    spans = {}
    for name, (graph, _) in graphs.items():
        graph.replay()  # the first replay uploads the graph
        spans[name] = _elapsed_us(graph.replay)
    per_call = {name: spans[name] / graphs[name][1] for name in graphs}
    fast = [name for name in graphs if per_call[name] <= 2 * min(per_call.values())]
    slow = [name for name in graphs if name not in fast]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for names in (fast, slow):
        turns: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        for i in range(rounds if names else 0):
            shift = i % len(names)
            for name in names[shift:] + names[:shift]:
                repeats = max(1, round(TURN_US / spans[name]))
                start, end = _event(), _event()
                start.record()
                for _ in range(repeats):
                    graphs[name][0].replay()
                end.record()
                turns.append((name, repeats, start, end))
        torch.cuda.synchronize()
        for name, repeats, start, end in turns:
            times[name].append(start.elapsed_time(end) * 1e3 / repeats)
    return times


def _set_times(result: Result, spans_us: Sequence[float], calls: int) -> None:
    times = sorted(span / calls for span in spans_us)
    result.calls = calls
    result.time_us = statistics.median(times)
    result.p20_us = times[int(0.2 * (len(times) - 1))]
    result.p80_us = times[-1 - int(0.2 * (len(times) - 1))]


def race_on_host(
    makers: Mapping[str, Callable[[], Call]],
    *,
    device: torch.device,
    rounds: int,
    calls: int = MAX_CALLS,
) -> dict[str, Result]:
    """The host's time per call: `calls` in a row, without waiting for the device.

    Between spans the device is waited for, so that its queue never fills.
    """
    results = {name: Result() for name in makers}
    ready: dict[str, Call] = {}
    for name, make in makers.items():
        with failures_noted(results[name]):
            call = make()
            for _ in range(3):
                call()
            ready[name] = call
    if device.type != "cuda":
        return results
    spans: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, call in ready.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            spans[name].append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    for name, measured in spans.items():
        _set_times(results[name], measured, calls)
    return results


def num_copies(num_bytes: int, device: torch.device, *, small_too: bool = False) -> int:
    """Sets of inputs to take in turn so that none is found in the L2 cache.

    Args:
        num_bytes: of one set.
        device: whose cache it is.
        small_too: else small inputs get one set: in a model they were just written,
            and do sit there.
    """
    if device.type != "cuda":
        return 1
    cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    if num_bytes < cache_bytes // 4 and not small_too:
        return 1
    return -(-2 * cache_bytes // num_bytes)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; NaN if any value is."""
    difference = out.float() - reference
    return float(difference.norm() / reference.norm().clamp_min(1e-30))
