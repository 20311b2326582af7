# SPDX-License-Identifier: Apache-2.0
"""Slices of measuring that run only while an engine has nothing to do.

Nothing is queued on the GPU beyond one slice: a launch, one torch operation, or a turn
of timing. Before each the gate waits until the engine is idle, and a round of turns
during which a step came is repeated. An engine that gets a request in the middle of a
slice waits for its rest, `LONGEST_US` at most. The first launch of a config is the one
exception, since nobody knows what it takes: GPUs share their time between processes,
and what takes longer is launched four times and never again.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from portable_backend.warmup.activity import Activity

_T = TypeVar("_T")
# Of one slice. What takes longer is not measured beside an engine.
LONGEST_US = 5000.0


class TooLongError(RuntimeError):
    """A slice would take the GPU from the engine for too long."""


class Disturbed(Exception):
    """A step came during a round, which begins anew."""


class Gate(Protocol):
    """When a slice may begin.

    Attributes:
        longest_us: of a slice.
    """

    longest_us: float

    def wait(self) -> None:
        """Return as soon as a slice may begin."""

    def launch(self, call: Callable[[], object]) -> float:
        """Call as a slice of its own; microseconds until the device has done it."""

    def undisturbed(self, work: Callable[[], _T]) -> _T:
        """The result of a `work` during which nothing else ran."""

    def check(self) -> None:
        """Within `undisturbed`, before each of its slices."""

    def paced(self) -> contextlib.AbstractContextManager[object]:
        """Makes each torch operation a slice; not while a graph is captured."""


class OpenGate:
    """Always open: nobody else is there."""

    longest_us = float("inf")

    def wait(self) -> None:
        pass

    def launch(self, call: Callable[[], object]) -> float:
        call()
        return 0.0

    def undisturbed(self, work: Callable[[], _T]) -> _T:
        return work()

    def check(self) -> None:
        pass

    def paced(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


OPEN = OpenGate()


class IdleGate:
    """Open while an engine has nothing to do.

    Args:
        activity: of the engine.
        longest_us: of a slice.
        synchronize: waits for the device.
    """

    def __init__(
        self,
        activity: Activity,
        *,
        longest_us: float = LONGEST_US,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        self.longest_us = longest_us
        self._activity, self._synchronize = activity, synchronize
        self._seen: float | None = None

    def wait(self) -> None:
        self._activity.wait()

    def launch(self, call: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - started) * 1e6

    def undisturbed(self, work: Callable[[], _T]) -> _T:
        while True:
            self.wait()
            self._seen = self._activity.last_step()
            try:
                result = work()
                self.check()
                return result
            except Disturbed:
                continue

    def check(self) -> None:
        """Raise `Disturbed` if a step has come since the round began."""
        if self._activity.last_step() != self._seen:
            raise Disturbed

    def paced(self) -> contextlib.AbstractContextManager[object]:
        return _Paced(self)


class _Paced(TorchDispatchMode):
    """Each torch operation is a slice of its own."""

    def __init__(self, gate: IdleGate) -> None:
        super().__init__()
        self._gate = gate

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = None

        def call() -> None:
            nonlocal result
            result = func(*args, **(kwargs or {}))

        self._gate.launch(call)
        return result


def gate_of(activity: Activity | None, device: torch.device) -> Gate:
    """The gate for what runs on a device; open where there is no engine."""
    if activity is None:
        return OPEN
    if device.type != "cuda":
        return IdleGate(activity)
    return IdleGate(activity, synchronize=lambda: torch.cuda.synchronize(device))
