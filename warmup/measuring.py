# SPDX-License-Identifier: Apache-2.0
"""Times that can be compared: captured, cold, in turns with the incumbent, paired.

A GPU's clock drifts by more than what separates good configs. So every candidate is
timed in turns with the incumbent, and what counts is the ratio of neighbouring turns;
times are that ratio on the incumbent's scale. On a CPU the calls are timed as they are.
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from portable_backend.bench.timing import (
    MAX_CALLS,
    SPAN_US,
    Call,
    Contestant,
)
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.idle_gate import OPEN, Gate, TooLongError
from portable_backend.warmup.measuring_process import (
    CONFIRM_TURN_US,
    TRIAL_TURN_US,
    Confirmation,
)
from portable_backend.warmup.search import Proposal, Trial
from portable_backend.warmup.workloads import Workload

# A candidate is given up once every round so far was slower by this factor: after one
# round, two, and so on. One as fast as the incumbent has all of k rounds slower by
# chance alone, less than once in 2 ** k times, and by so much hardly ever.
_GIVE_UP = (1.3, 1.1, 1.05, 1.03, 1.02)
# A median lies within this many deviations of a round over the root of their number,
# 95 times of 100: 1.96, for medians of a normal distribution 1.253 more.
_INTERVAL = 1.96 * 1.253
_MAD_TO_DEVIATION = 1.4826
# No clock is better than this, whatever a few rounds say.
MIN_NOISE = 0.002
_CONFIRM_CHECKS = 3
# A confirmation ends after so many rounds of which none saved this share of the
# default's time, the least that a tuner asks for: one that does save it gets there by
# chance less than once in 2 ** 7 times.
_HOPELESS_ROUNDS, _LEAST_GAIN = 7, 0.01
# Beside an engine, launches of a config before it counts as too long.
_LOOKS = 3


class WrongResultError(Exception):
    """A config's output is not the oracle's; the message says how."""


def noise_of(ratios: Sequence[float], control: Sequence[float] = ()) -> float:
    """How far the median of paired ratios may be off, relative.

    Args:
        ratios: of neighbouring turns, one of each round.
        control: the same for two contestants that are alike; what their median differs
            from 1, it differs by mistake.
    """
    if len(ratios) < 2:
        return float("inf")
    center = statistics.median(ratios)
    spread = statistics.median(abs(ratio - center) for ratio in ratios)
    deviation = _MAD_TO_DEVIATION * spread / center
    noise = max(MIN_NOISE, _INTERVAL * deviation / math.sqrt(len(ratios)))
    return max(noise, abs(statistics.median(control) - 1)) if control else noise


def is_roof_reached(time_us: float, roof_us: float | None, share: float = 0.95) -> bool:
    """Whether the search may stop, since no config can be much faster."""
    return roof_us is not None and roof_us >= share * time_us


class Runner:
    """A contestant that is ready to be timed.

    Args:
        contestant: whose calls have all been made once, so that nothing compiles.
        device: a GPU captures the calls, a CPU just makes them.
        gate: whether anything may run on the device now.

    Raises:
        TooLongError: a turn would be longer than the gate allows.
    """

    def __init__(
        self, contestant: Contestant, device: torch.device, gate: Gate = OPEN
    ) -> None:
        self.contestant, self.device, self._gate = contestant, device, gate
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls, self._span_us = len(contestant.calls), 0.0
        if device.type == "cuda":
            self._graph, self._calls = _capture(contestant.calls, gate)
            gate.wait()
            self._span_us = _elapsed_us(self._graph.replay)

    def turn(self, turn_us: float = CONFIRM_TURN_US) -> float:
        """Microseconds of one call, over a turn of about `turn_us`, one span at least.

        Runners that are compared take turns of one length.
        """
        self._gate.check()
        if self._graph is not None:
            repeats = max(1, round(turn_us / self._span_us))
            took_us = _elapsed_us(self._graph.replay, repeats)
            return took_us / (repeats * self._calls)
        start = time.perf_counter()
        self._run_once()
        return max((time.perf_counter() - start) * 1e6 / self._calls, 1e-3)

    def error(self) -> float:
        """The relative error of what timed calls write."""
        contestant, gate = self.contestant, self._gate
        with gate.paced():
            if contestant.recheck is None:
                return contestant.verify() or 0.0
            contestant.refill()
            run = self._run_once if self._graph is None else self._graph.replay
            gate.launch(run)
            return contestant.recheck()

    def _run_once(self) -> None:
        for call in self.contestant.calls:
            call()


class Bench:
    """Measures configs of one workload. What a config raises passes through.

    Args:
        workload: of one key.
        device: the workload's.
        on_stage: told "incumbent" before the incumbent runs for the first time, and
            "candidate" before anything else does: whose fault a hang is.
        turn_us: length of a turn of a trial.
        confirm_turn_us: of a confirmation.
        gives_up: on what is clearly slower than the incumbent; False times all rounds.
        gate: whether anything may run on the device now; pieces of work wait for it.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        on_stage: Callable[[str], None] = lambda stage: None,
        turn_us: float = TRIAL_TURN_US,
        gives_up: bool = True,
        gate: Gate = OPEN,
        confirm_turn_us: float = CONFIRM_TURN_US,
    ) -> None:
        self.workload, self.device, self._on_stage = workload, device, on_stage
        self._turn_us, self._confirm_turn_us = turn_us, confirm_turn_us
        self._gives_up, self._gate = gives_up, gate
        self._incumbent: tuple[KernelConfig, Runner] | None = None
        self._scales_us: dict[KernelConfig, float] = {}

    def require_short(self) -> None:
        """Have the default ready to be timed.

        Raises:
            TooLongError: it takes longer than the gate allows.
        """
        self._prepare_incumbent(self.workload.default)

    def trial(
        self,
        proposal: Proposal,
        *,
        seed: int,
        incumbent: KernelConfig | None = None,
        incumbent_us: float | None = None,
    ) -> Trial:
        """Check and time one config.

        Args:
            proposal: the config, and its rounds; fewer are timed where it is clearly
                slower than the incumbent.
            seed: 0 or more, another one for each trial; of the inputs that are drawn
                to check it on. Some that earlier trials had are among them as well.
            incumbent: to time it in turns with; None: alone.
            incumbent_us: its time, as an earlier trial gave it; None: as measured now.

        Raises:
            WrongResultError: the config is not right.
            TooLongError: it takes longer than the gate allows.
        """
        config = proposal.config
        if incumbent is not None:
            self._prepare_incumbent(incumbent)
        self._on_stage("candidate")
        with self._gate.paced():
            check = self.workload.check(config, seed, reuse=True)
        if check.wrong is not None:
            raise WrongResultError(check.wrong)
        if config == incumbent:
            runner = self._runner_of(incumbent)
            started = time.perf_counter()
            turns = [self._round([runner])[0] for _ in range(proposal.rounds)]
            scale = incumbent_us or self._scale_us(config, turns)
            times = [turn / statistics.median(turns) * scale for turn in turns]
        else:
            runner = self._ready(config)
            started = time.perf_counter()
            times = self._time(runner, proposal.rounds, incumbent, incumbent_us)
        timing_s = time.perf_counter() - started
        self._require_right(runner)
        time_us = statistics.median(times)
        return Trial(
            config, proposal.rounds, time_us, times_us=(*times,), timing_s=timing_s
        )

    def confirm(
        self, config: KernelConfig, *, seed: int, rounds: int, beside: bool = True
    ) -> Confirmation:
        """Check a config on unseen inputs, and time it in turns with the default.

        The default takes part twice: how its two times differ is part of the noise.

        Args:
            config: the winner.
            seed: 0 or more; of inputs that no trial has seen.
            rounds: of timing; fewer where it is clear that it is not worth it.
            beside: False leaves the default out, where it does not run.
        """
        default = self.workload.default
        if beside:
            self._prepare_incumbent(default)
        self._on_stage("candidate")
        ratio = 0.0
        for i in range(_CONFIRM_CHECKS):
            with self._gate.paced():
                check = self.workload.check(config, -1 - _CONFIRM_CHECKS * seed - i)
            ratio = max(ratio, check.error_ratio)
            if check.wrong is not None:
                return no_confirmation(check.wrong, ratio)
        names = ["config", "default", "control"] if beside else ["config"]
        runners = {"config": self._ready(config)}
        if beside:
            runners |= {
                "default": self._runner_of(default),
                "control": self._ready(default),
            }
        times: dict[str, list[float]] = {name: [] for name in names}
        for i in range(rounds):
            shift = i % len(names)
            order = names[shift:] + names[:shift]
            turns = self._round(
                [runners[name] for name in order], self._confirm_turn_us
            )
            for name, turn in zip(order, turns, strict=True):
                times[name].append(turn)
            if beside and i + 1 >= _HOPELESS_ROUNDS:
                least = min(_ratios(times["config"], times["default"]))
                if least > 1 - _LEAST_GAIN:
                    break
        self._require_right(runners["config"])
        time_us = statistics.median(times["config"])
        if not beside:
            return Confirmation(time_us, float("inf"), float("inf"), ratio)
        ratios = _ratios(times["config"], times["default"])
        control = _ratios(times["control"], times["default"])
        default_us = statistics.median(times["default"])
        return Confirmation(
            default_us * statistics.median(ratios),
            default_us,
            noise_of(ratios, control),
            ratio,
        )

    def _time(
        self,
        runner: Runner,
        rounds: int,
        incumbent: KernelConfig | None,
        incumbent_us: float | None,
    ) -> list[float]:
        """Of each round; fewer rounds where it is given up."""
        if incumbent is None:
            return [self._round([runner])[0] for _ in range(rounds)]
        other = self._runner_of(incumbent)
        times: list[float] = []
        others: list[float] = []
        for i in range(rounds):
            if i % 2:
                ours, its = self._round([runner, other])
            else:
                its, ours = self._round([other, runner])
            times.append(ours)
            others.append(its)
            limit = _GIVE_UP[min(i, len(_GIVE_UP) - 1)]
            if self._gives_up and min(_ratios(times, others)) > limit:
                break
        scale_us = incumbent_us or self._scale_us(incumbent, others)
        return [scale_us * ratio for ratio in _ratios(times, others)]

    def _round(
        self, runners: Sequence[Runner], turn_us: float | None = None
    ) -> list[float]:
        """A turn of each, between which nothing else ran; a trial's unless said."""
        length_us = turn_us or self._turn_us
        return self._gate.undisturbed(lambda: [r.turn(length_us) for r in runners])

    def _scale_us(self, incumbent: KernelConfig, times: Sequence[float]) -> float:
        """Its time, the same for all that is compared with it."""
        return self._scales_us.setdefault(incumbent, statistics.median(times))

    def _prepare_incumbent(self, config: KernelConfig) -> None:
        if self._incumbent is None or self._incumbent[0] != config:
            self._incumbent = None  # its graph goes before the next comes
            self._on_stage("incumbent")
            self._incumbent = config, self._ready(config)

    def _runner_of(self, incumbent: KernelConfig) -> Runner:
        assert self._incumbent is not None
        assert self._incumbent[0] == incumbent
        return self._incumbent[1]

    def _ready(self, config: KernelConfig) -> Runner:
        gate = self._gate
        with gate.paced():
            contestant = self.workload.contestant(config)
            contestant.refill()
        first, *others = contestant.calls
        gate.launch(first)  # which loads the kernel
        if gate is not OPEN:
            _require_short(gate, lambda: gate.launch(first))
        for call in others:
            gate.launch(call)
        return Runner(contestant, self.device, gate)

    def _require_right(self, runner: Runner) -> None:
        error, limit = runner.error(), self.workload.error_limit
        if not error <= limit:
            raise WrongResultError(
                f"timing inputs: relative error {error:.3g}, allowed {limit:.3g}"
            )


def no_confirmation(wrong: str, error_ratio: float = float("inf")) -> Confirmation:
    """Of a config that must not be used."""
    inf = float("inf")
    return Confirmation(inf, inf, inf, error_ratio, wrong)


def load_maker(target: str) -> Callable[[Any, torch.device], Workload]:
    """The function that "module:name" names.

    Raises:
        ValueError: there is none.
    """
    module, _, name = target.partition(":")
    try:
        make: Callable[[Any, torch.device], Workload] = getattr(
            importlib.import_module(module), name
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise bad_argument(
            "make", "a function, as module:name", target, f"correct it ({error})"
        ) from None
    return make


def _require_short(gate: Gate, elapsed_us: Callable[[], float]) -> float:
    """What it took, tried again while the host may just have been slow.

    Raises:
        TooLongError: more than the gate allows.
    """
    least_us = float("inf")
    for _ in range(_LOOKS):
        gate.wait()
        least_us = min(least_us, elapsed_us())
        if least_us <= gate.longest_us:
            return least_us
    raise _too_long(gate, least_us)


def _too_long(gate: Gate, time_us: float) -> TooLongError:
    return TooLongError(
        f"takes {time_us / 1e3:.1f} ms at a time, beside an engine "
        f"{gate.longest_us / 1e3:g} ms are allowed"
    )


def _capture(calls: Sequence[Call], gate: Gate) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about SPAN_US of calls in turn, and how many they are.

    As `bench.timing.capture`, which waits for the garbage collector each time.
    """
    time_us = _require_short(gate, lambda: _elapsed_us(calls[0]))
    if time_us < SPAN_US / 4:
        # Eager calls this short mostly time the host: ask a small graph instead.
        trial = _graph_of(calls, 8)
        gate.launch(trial.replay)  # the first replay uploads the graph
        gate.wait()
        time_us = _elapsed_us(trial.replay) / 8
    count = max(1, min(MAX_CALLS, round(SPAN_US / time_us)))
    count = -(-count // len(calls)) * len(calls)
    if count * time_us > gate.longest_us:
        raise _too_long(gate, count * time_us)
    graph = _graph_of(calls, count)
    gate.launch(graph.replay)
    return graph, count


def _graph_of(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(count):
                calls[i % len(calls)]()
        finally:
            graph.capture_end()
    return graph


def _elapsed_us(call: Call, count: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return max(elapsed_ms * 1e3, 0.1)


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]
