# SPDX-License-Identifier: Apache-2.0
"""Compile the next configs while the GPU measures these."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal, Strategy, Trial
from portable_backend.warmup.tools import CompiledLike, Tools


class Ahead:
    """A strategy that is asked for a batch more than it hands out.

    What comes next is chosen without the results of the batch that is being measured,
    and can so be compiled meanwhile. The choices depend on seed and trials alone, like
    those of the strategy within.

    Args:
        strategy: makes the choices.
        submit: is told of each config as soon as it is chosen.
    """

    def __init__(
        self, strategy: Strategy, submit: Callable[[list[KernelConfig]], None]
    ) -> None:
        self.strategy, self.rounds = strategy, strategy.rounds
        self._submit = submit
        self._next: list[Proposal] = []

    def ask(self, n: int = 1) -> list[Proposal]:
        missing = 2 * n - len(self._next)
        chosen = self.strategy.ask(missing) if missing > 0 else []
        if chosen:
            self._submit([proposal.config for proposal in chosen])
        self._next += chosen
        asked, self._next = self._next[:n], self._next[n:]
        return asked

    def tell(self, trial: Trial) -> None:
        self.strategy.tell(trial)

    def best(self) -> Trial | None:
        return self.strategy.best()


class Pipeline:
    """Compiler and measurer in a row, for one key.

    A compiler that breaks is left out from then on: the measurer then compiles.
    """

    def __init__(
        self,
        tools: Tools,
        key: TuningKey,
        default: KernelConfig,
        note: Callable[[str], None],
    ) -> None:
        self.tools, self.key, self.default, self._note = tools, key, default, note
        self._readouts: dict[KernelConfig, Any] = {}
        self._compiler = tools.compiler
        # For compilers, before configs could be measured; and when, by the tools'
        # clock, none is waited for any longer.
        self.waited_s = 0.0
        self.until: float | None = None

    def submit(self, configs: Iterable[KernelConfig]) -> None:
        if self._compiler is not None:
            try:
                self._compiler.submit(self.key, list(configs))
            except (OSError, EOFError, RuntimeError) as error:
                self._give_up(error)

    def wait(self, configs: Sequence[KernelConfig]) -> None:
        """Until they are compiled, or cannot be."""
        if self._compiler is not None:
            try:
                for _ in self._compiler.wait(self.key, configs):
                    pass
            except (OSError, EOFError, RuntimeError) as error:
                self._give_up(error)

    def measure(
        self, proposals: Sequence[Proposal], incumbent: KernelConfig
    ) -> Iterator[Trial]:
        """Yield a trial for each proposal, in order, as soon as it can be had.

        It ends early where one would have to be waited for after `until`.
        """
        measurer = self.tools.measurer
        for proposal, invalid, reason in self._compiled(proposals):
            if invalid is None:
                # One by one: it is measured while the next one still compiles.
                yield from measurer.measure(self.key, [proposal], incumbent)
            else:
                config, rounds = proposal.config, proposal.rounds
                yield Trial(config, rounds, None, invalid, reason)

    def _compiled(
        self, proposals: Sequence[Proposal]
    ) -> Iterator[tuple[Proposal, str | None, str]]:
        """Each proposal, and why it need not be measured."""
        rest = list(proposals)
        if self._compiler is not None:
            try:
                self._compiler.submit(self.key, [p.config for p in proposals])
                configs = [p.config for p in proposals]
                found = self._compiler.wait(self.key, configs, self.until)
                for compiled in self._timed(found):
                    proposal = rest.pop(0)
                    if compiled.failure is not None:
                        yield proposal, "compile", compiled.failure
                        continue
                    reason = self._refusal(proposal.config, compiled.readout)
                    yield (
                        proposal,
                        None if reason is None else "resources",
                        reason or "",
                    )
                return
            except (OSError, EOFError, RuntimeError) as error:
                self._give_up(error)
        for proposal in rest:
            yield proposal, None, ""

    def _timed(self, compiled: Iterable[CompiledLike]) -> Iterator[CompiledLike]:
        rest, clock = iter(compiled), self.tools.clock
        while True:
            began = clock()
            one = next(rest, None)
            self.waited_s += clock() - began
            if one is None:
                return
            yield one

    def _refusal(self, config: KernelConfig, readout: Any) -> str | None:
        """Why the compiled code cannot win, by the resource model."""
        if readout is None or self.tools.prune is None:
            return None
        self._readouts[config] = readout
        if config == self.default or self.default not in self._readouts:
            return None
        _, pruned = self.tools.prune(
            self.key,
            [self.default, config],
            self.tools.device,
            keep=1,
            readouts=self._readouts,
        )
        return next((p.reason for p in pruned if p.config == config), None)

    def _give_up(self, error: Exception) -> None:
        self._compiler = None
        self._note(f"nothing is compiled ahead: {type(error).__name__}: {error}")
