# SPDX-License-Identifier: Apache-2.0
"""What the tuner works with: the space, who compiles, who measures.

The tuner knows these by their protocols alone. A `Recipe` names the function that makes
them, so that a worker process makes its own.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal, Trial
from portable_backend.warmup.strategies import FULL_ROUNDS


class Catalog(Protocol):
    """What can be tried for a key."""

    def configs(self, key: TuningKey) -> Sequence[KernelConfig]:
        """Every member of the space, in fixed order."""

    def default(self, key: TuningKey) -> KernelConfig:
        """What serves without tuning."""


class Confirmation(Protocol):
    """A config beside the default, interleaved, on data that no trial has seen."""

    @property
    def time_us(self) -> float: ...
    @property
    def default_us(self) -> float: ...
    @property
    def noise(self) -> float:
        """How much of `time_us / default_us` may be chance."""

    @property
    def error_ratio(self) -> float | None: ...
    @property
    def wrong(self) -> str | None:
        """None where the output is right."""


class Measurer(Protocol):
    """Owns the GPU."""

    def measure(
        self,
        key: TuningKey,
        proposals: Sequence[Proposal],
        incumbent: KernelConfig | None = None,
    ) -> Iterator[Trial]:
        """Yield a trial for each proposal, in order; invalid ones with their reason."""

    def confirm(
        self, key: TuningKey, config: KernelConfig, seed: int
    ) -> Confirmation: ...

    def close(self) -> None: ...


class CompiledLike(Protocol):
    @property
    def config(self) -> KernelConfig: ...
    @property
    def readout(self) -> Any: ...
    @property
    def failure(self) -> str | None: ...


class Compiler(Protocol):
    """Compiles in processes of its own, ahead of whoever measures."""

    def submit(self, key: TuningKey, configs: Iterable[KernelConfig]) -> None: ...

    def wait(
        self,
        key: TuningKey,
        configs: Sequence[KernelConfig],
        until: float | None = None,
    ) -> Iterator[CompiledLike]:
        """Yield each as soon as it is compiled, in order; none after `until`."""

    def close(self) -> None: ...


class PrunedLike(Protocol):
    @property
    def config(self) -> KernelConfig: ...
    @property
    def reason(self) -> str: ...


class Prune(Protocol):
    """The resource model: those that may win, best first, and the rest with reasons."""

    def __call__(
        self,
        key: TuningKey,
        configs: Sequence[KernelConfig],
        device: DeviceInfo,
        *,
        keep: int,
        readouts: Mapping[KernelConfig, Any] | None = None,
    ) -> tuple[list[KernelConfig], Sequence[PrunedLike]]: ...


class Tools:
    """One set of tools; measurer and compiler start when first used.

    Args:
        device, environment: where, and with what code.
        catalog: what can be tried.
        make_measurer: starts one.
        make_compiler: starts one; None: the measurer compiles what it meets.
        prune: the resource model; None switches it off.
        rounds: of a trial of full fidelity.
        clock: seconds, as trials and budgets count them.
    """

    def __init__(
        self,
        *,
        device: DeviceInfo,
        environment: Environment,
        catalog: Catalog,
        make_measurer: Callable[[], Measurer],
        make_compiler: Callable[[], Compiler] | None = None,
        prune: Prune | None = None,
        rounds: int = FULL_ROUNDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.environment, self.catalog = device, environment, catalog
        self.prune, self.rounds, self.clock = prune, rounds, clock
        self._make_measurer, self._make_compiler = make_measurer, make_compiler
        self._measurer: Measurer | None = None
        self._compiler: Compiler | None = None

    @property
    def measurer(self) -> Measurer:
        if self._measurer is None:
            self._measurer = self._make_measurer()
        return self._measurer

    @property
    def compiler(self) -> Compiler | None:
        if self._compiler is None and self._make_compiler is not None:
            self._compiler = self._make_compiler()
        return self._compiler

    def begin(self, key: TuningKey) -> None:
        """Have the measurer start and prepare a key meanwhile, if it can."""
        begin = getattr(self.measurer, "begin", None)
        if begin is not None:
            begin(key)

    def close(self) -> None:
        """End what was started; used again, it starts afresh."""
        parts = self._measurer, self._compiler
        self._measurer = self._compiler = None
        for part in parts:
            if part is not None:
                # What is broken may fail to close; it is dropped all the same.
                with contextlib.suppress(OSError, EOFError, RuntimeError, ValueError):
                    part.close()


@dataclass(frozen=True)
class Recipe:
    """How a process makes its tools: `make` is "module:function".

    Attributes:
        make: called with `options`, returns `Tools`.
        options: as JSON can hold them.
    """

    make: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Tools:
        """Make the tools.

        Raises:
            ValueError: `make` names nothing that can be called.
        """
        module_name, _, name = self.make.partition(":")
        try:
            function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise bad_argument(
                "make", "module:function", f"{self.make} ({error})", "correct it"
            ) from error
        tools: Tools = function(**self.options)
        return tools

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
