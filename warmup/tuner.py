# SPDX-License-Identifier: Apache-2.0
"""The tuner: from a unit of work to a record that may serve.

For each unit: list the space, drop what the resource model rules out, rank what others
have found, search with a strategy while the next configs compile, confirm the fastest
on data that nobody has seen, and record it, or the default where nothing beats that
beyond noise. Each record is written at once, each trial is logged: what is done stays
done, however the process ends.
"""

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from portable_backend.errors import PortableBackendError, RecordError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.layers import file_stem
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.matching import differences
from portable_backend.warmup.pipeline import Ahead, Pipeline
from portable_backend.warmup.preparation import Prepared, Preparer
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.search import Budget, SearchResult, Trial, search
from portable_backend.warmup.shares import NO_WAITS, Shares, Waits
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.strategies import make_strategy
from portable_backend.warmup.tools import Confirmation, Recipe, Tools
from portable_backend.warmup.trial_log import (
    LogHeader,
    LogMismatchError,
    TrialLog,
    log_name,
)
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Counts, Event, Outcome, Task
from portable_backend.warmup.warm_start import sure_starts, warm_ranking

logger = logging.getLogger("vllm.portable_backend.tuner")
# What tools may raise where they break, as against a mistake of ours.
BREAKDOWNS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ImportError,
    MemoryError,
    PortableBackendError,
    RuntimeError,
    ValueError,
)
# What is this near to the roof cannot be improved upon.
AT_ROOF = 0.95


class Tuner:
    """Tunes units one after another; a context manager that closes its tools.

    Args:
        recipe: of the tools, which are made when first needed.
        store: where records are looked up and put.
        options: how.
        log_root: folder of the trial logs, the user cache's; None: no log.
        on_event: told about progress.
        worker: who it is, for events.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: RecordStore,
        options: TuneOptions | None = None,
        *,
        log_root: Path | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.recipe, self.store = recipe, store
        self.options = options or TuneOptions()
        self.log_root, self.on_event = log_root, on_event
        self._tools: Tools | None = None
        self._confirm_s = 0.5  # what confirming one config takes
        self._preparer = Preparer(self.options)
        self._expected: list[TuningKey] = []
        self._is_warm = False  # whether compilers and measurer have started

    def expect(self, keys: Iterable[TuningKey]) -> None:
        """Have defaults of units to come compile after the next two's first configs.

        They share a few binaries, for each of which a unit would wait otherwise.
        """
        self._expected = list(keys)

    @property
    def tools(self) -> Tools:
        if self._tools is None:
            self._tools = self.recipe.open()
        return self._tools

    def close(self) -> None:
        self._is_warm = False
        if self._tools is not None:
            self._tools.close()

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.store.close()

    def tune_unit(
        self,
        task: Task,
        seconds: float | None = None,
        *,
        upcoming: TuningKey | None = None,
        waits: Waits = NO_WAITS,
    ) -> Outcome:
        """Tune one unit and write its record.

        Args:
            task: the unit.
            seconds: for all of it; None: no limit.
            upcoming: the next unit, of which something may be compiled already.
            waits: how much longer it may take, where it waits for others.

        Returns:
            What became of it. KeyboardInterrupt returns as well ("interrupted"), and
            so do tools that break ("failed").
        """
        self.on_event(Event("started", task.key))
        outcome = self._try(task, seconds, upcoming, waits)
        self.on_event(Event("finished", task.key, outcome.counts, outcome=outcome))
        return outcome

    def _try(
        self,
        task: Task,
        seconds: float | None,
        upcoming: TuningKey | None,
        waits: Waits,
    ) -> Outcome:
        spent, reason = 0.0, ""
        for attempt in range(self.options.attempts):
            started = None
            try:
                tools = self.tools
                started = tools.clock()
                left = None if seconds is None else max(0.0, seconds - spent)
                job = _Job(self, tools, task.key, left, upcoming, again=not attempt)
                job.waits = waits
                outcome = job.run()
                return replace(outcome, seconds=spent + tools.clock() - started)
            except KeyboardInterrupt:
                return Outcome(task.key, "interrupted", seconds=spent)
            except BREAKDOWNS as error:
                reason = f"{type(error).__name__}: {error}"
                logger.warning("%s: %s", task.key, reason)
                if started is not None:
                    spent += self.tools.clock() - started
                self.close()
        return Outcome(task.key, "failed", reason, seconds=spent)


def tune(
    tasks: Sequence[Task], tuner: Tuner, *, budget_s: float | None = None
) -> list[Outcome]:
    """Tune units in their order, within a budget of seconds that they share.

    Returns:
        An outcome for each unit. After an interruption, and at the end of the budget,
        the rest is "unreached".
    """
    clock = tuner.tools.clock if tasks else (lambda: 0.0)
    shares = Shares(tasks, budget_s, clock=clock)
    outcomes: list[Outcome] = []
    tuner.expect(task.key for task in tasks[1:])
    for task, following in itertools.zip_longest(tasks, tasks[1:]):
        seconds = shares.grant(task)
        if seconds == 0.0:
            outcome = Outcome(task.key, "unreached", "no time was left")
        else:
            upcoming = following.key if following else None
            outcome = tuner.tune_unit(
                task, seconds, upcoming=upcoming, waits=shares.waits(task)
            )
            shares.settle(task, outcome.seconds)
        outcomes.append(outcome)
        if outcome.state == "interrupted":
            rest = tasks[len(outcomes) :]
            outcomes += [Outcome(t.key, "unreached", "interrupted") for t in rest]
            break
    return outcomes


class _Job:
    """One unit, once."""

    def __init__(
        self,
        tuner: Tuner,
        tools: Tools,
        key: TuningKey,
        seconds: float | None,
        upcoming: TuningKey | None,
        again: bool,
    ) -> None:
        self.tuner, self.tools, self.key = tuner, tools, key
        self.options, self.seconds = tuner.options, seconds
        self.upcoming, self.waits = upcoming, NO_WAITS
        self.again = again and tuner.options.again
        self.started = tools.clock()
        self.considered = self.pruned = 0
        self.wrong = 0
        self.trials: list[Trial] = []

    def run(self) -> Outcome:
        key, tools = self.key, self.tools
        prepared = self.tuner._preparer.take(key, tools)
        known = self._known(prepared.members)
        if known is not None:
            return Outcome(key, "known", record=known)
        self.default = prepared.default
        self.considered, self.pruned = len(prepared.members), len(prepared.pruned)
        tools.begin(key)
        if self.upcoming is not None:
            self.tuner._preparer.begin(self.upcoming, tools)
        try:
            log = self._log(prepared)
        except LogMismatchError as error:
            return Outcome(key, "elsewhere", str(error))
        try:
            # Another process may have ended it before the log was ours.
            known = None if log is None else self._known(prepared.members)
            if known is not None:
                return Outcome(key, "known", record=known)
            result = self._search(prepared.space, prepared.estimated, log)
            if result.stopped == "interrupted":
                return self._outcome("interrupted", stopped=result.stopped)
            return self._conclude(result)
        finally:
            if log is not None:
                log.close()  # only now may others take the unit

    def _known(self, members: frozenset[KernelConfig]) -> TuningRecord | None:
        """A record that serves as exact and was measured with today's toolchain."""
        self.tuner.store.refresh()  # others may tune beside us
        if self.tuner.options.again:
            return None
        for _, record in self.tuner.store.records(self.key.kernel):
            if record.key == self.key and record.config in members:
                environment = self.tools.environment
                if not differences(self.key, environment, record):
                    return record
        return None

    def _log(self, prepared: Prepared) -> TrialLog | None:
        root, environment = self.tuner.log_root, self.tools.environment
        if root is None:
            return None
        header = LogHeader(
            kernel=self.key.kernel,
            key=self.key.to_dict(),
            gpu=environment.gpu,
            space=prepared.digest,
            strategy=self.options.chosen,
            seed=self.options.seed,
            rounds=self.tools.rounds,
        )
        name = log_name(header, self._digest(), environment.toolchain)
        path = trial_folder(root, self.key.kernel, environment.gpu) / f"{name}.jsonl"
        try:
            if self.again:
                path.unlink(missing_ok=True)
            log = TrialLog(path, header)
            if prepared.pruned:
                path.with_suffix(".pruned").write_text(prepared.pruned_lines)
            return log
        except OSError as error:
            self._note(f"no trial log, so it cannot be resumed: {error}")
            return None

    def _search(
        self,
        space: ListedSpace,
        estimated: Sequence[KernelConfig],
        log: TrialLog | None,
    ) -> SearchResult:
        tools, options = self.tools, self.options
        self.trials = list(log.trials) if log else []
        logged_s = sum(trial.seconds for trial in self.trials)
        pipeline = Pipeline(tools, self.key, self.default, self._note)
        done = {trial.config for trial in self.trials}

        def submit(configs: Iterable[KernelConfig]) -> None:
            pipeline.submit(config for config in configs if config not in done)

        starts: list[KernelConfig] = []
        if options.warm_start:
            starts = self._starts(space, estimated)
            submit(starts)  # while the cost model learns
        if not self.tuner._is_warm:
            if options.warm_start:
                submit(estimated[: 2 * self._batch()])  # as many as it will ask for
            self._get_warm(pipeline, [c for c in starts if c not in done])
        self._compile_expected()
        strategy = make_strategy(
            options.chosen,
            space,
            seed=options.seed,
            rounds=tools.rounds,
            incumbent=self.default,
            ranking=self._ranking(space, estimated, log),
        )
        ahead = Ahead(strategy, submit)

        def measure(proposals: Sequence[Any]) -> Iterable[Trial]:
            best = strategy.best()
            incumbent = best.config if best else self.default
            if not self.trials:
                self._compile_upcoming()
            for trial in pipeline.measure(proposals, incumbent):
                self.trials.append(trial)
                yield trial
                self._report(strategy.best())

        is_enough = self._is_enough()
        seconds = None
        if self.seconds is not None:
            finals_s = options.finalists * self.tuner._confirm_s
            left = self.seconds - (tools.clock() - self.started)
            # The log's seconds were those of an earlier budget.
            search_s = max(0.0, max(0.6 * left, left - finals_s))
            seconds = logged_s + search_s
            # The search begins a moment later.
            pipeline.until = tools.clock() + search_s + self.waits.compile_s + 0.01
        return search(
            ahead,
            measure,
            Budget(seconds=seconds, trials=options.cost),
            log,
            batch=self._batch(),
            stop=is_enough,
            clock=lambda: tools.clock() - min(pipeline.waited_s, self.waits.compile_s),
        )

    def _get_warm(
        self,
        pipeline: Pipeline,
        starts: Sequence[KernelConfig],
    ) -> None:
        """Wait for what any first unit would wait for: that time is not this one's.

        Behind this unit's first configs the next one's compile, and only then the
        defaults of those that come late.
        """
        began = self.tools.clock()
        prepared = self._upcoming_prepared(wait=True)
        self._compile_upcoming(prepared)
        self._compile_expected()
        pipeline.wait(starts)
        self._roof_us()  # once the measurer has made the inputs
        self.tuner._is_warm = True
        self.started += min(self.waits.start_s, self.tools.clock() - began)

    def _roof_us(self) -> float | None:
        roof_us: Callable[[TuningKey], float | None] | None
        roof_us = getattr(self.tools.measurer, "roof_us", None)
        return None if roof_us is None else roof_us(self.key)

    def _batch(self) -> int:
        """Configs at a time: no more than compile in the time that there is."""
        if self.seconds is None:
            return self.options.batch
        return min(self.options.batch, max(4, int(2 * self.seconds)))

    def _starts(
        self, space: ListedSpace, estimated: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        starts = sure_starts(
            self.key,
            space.configs,
            self.tools.device,
            records=self._records(),
            estimated=estimated,
        )
        return [self.default, *starts]

    def _ready(self, configs: Sequence[KernelConfig]) -> list[KernelConfig]:
        ready = getattr(self.tools.compiler, "ready", None)
        return [] if ready is None else ready(self.key, configs)

    def _records(self) -> list[TuningRecord]:
        store = self.tuner.store
        return [record for _, record in store.records(self.key.kernel)]

    def _refuted(self) -> set[KernelConfig]:
        """What `cache verify` has refuted: a record of it would never serve."""
        environment, digest = self.tools.environment, self._digest()
        return {
            record.config
            for _, record in self.tuner.store.refuted(self.key.kernel)
            if (record.key, record.gpu, record.kernel_digest)
            == (self.key, environment.gpu, digest)
        }

    def _ranking(
        self,
        space: ListedSpace,
        estimated: Sequence[KernelConfig],
        log: TrialLog | None,
    ) -> list[KernelConfig]:
        if not self.options.warm_start:
            return []
        ranking = warm_ranking(
            self.key,
            space.configs,
            self.tools.device,
            records=self._records(),
            log_folder=log.path.parent if log else None,
            estimated=estimated,
            ready=self._ready,
        )
        # What is compiled is timed while the others compile.
        ready = frozenset(self._ready(ranking))
        return sorted(ranking, key=lambda config: config not in ready)

    def _is_enough(self) -> Callable[[Trial], bool]:
        """Ends a search that has reached the roof, or that goes on in vain."""
        roof_us = self._roof_us()
        full, patience = self.tools.rounds, self.options.patience_in_trials
        leader: KernelConfig | None = None
        since = 0

        def is_enough(best: Trial) -> bool:
            nonlocal leader, since
            if best.config != leader:
                leader, since = best.config, len(self.trials)
            assert best.time_us is not None
            is_full = best.rounds >= full
            if is_full and roof_us is not None and AT_ROOF * best.time_us <= roof_us:
                return True
            return is_full and len(self.trials) - since >= patience

        return is_enough

    def _conclude(self, result: SearchResult) -> Outcome:
        """Confirm the fastest and record one of them, or the default."""
        wrong: list[KernelConfig] = []
        winner: tuple[float, KernelConfig, Confirmation] | None = None
        confirmed = 0
        ranked = fastest(result.trials, self.tools.rounds)
        refuted = self._refuted()
        slower = self._clearly_slower(result.trials)
        prepared = self._upcoming_prepared(wait=False)
        self._compile_upcoming(prepared, ranked[: self.options.batch])
        for config in ranked:
            if (
                confirmed == self.options.finalists
                or len(wrong) > self.options.finalists
            ):
                break
            if config == self.default or config in slower or config in refuted:
                continue
            found = self._confirm(config)
            if found.wrong is not None:
                wrong.append(config)
                self._note(f"wrong on unseen data: {dict(config)}: {found.wrong}")
                continue
            confirmed += 1
            # Without a default that runs there is nothing to compare with.
            gain, needed = 1.0, 0.0
            if found.default_us < math.inf:
                gain = 1 - found.time_us / found.default_us
                needed = max(self.options.min_gain, found.noise)
            if gain > needed and (winner is None or gain > winner[0]):
                winner = gain, config, found
        self.wrong = len(wrong)
        if winner is not None:
            return self._recorded("tuned", winner[1], winner[2], result.stopped)
        found = self._confirm(self.default)
        if found.wrong is not None:
            reason = f"the default config is wrong: {found.wrong}"
            return self._outcome("failed", reason, stopped=result.stopped)
        return self._recorded("default", self.default, found, result.stopped)

    def _clearly_slower(self, trials: Iterable[Trial]) -> set[KernelConfig]:
        """Configs that are worth it only if trials are off by twice the least gain."""
        full = [t for t in trials if t.time_us and t.rounds >= self.tools.rounds]
        ours = [t.time_us or 0.0 for t in full if t.config == self.default]
        limit_us = max(ours, default=math.inf) * (1 + self.options.min_gain)
        return {t.config for t in full if t.time_us and t.time_us > limit_us}

    def _compile_expected(self) -> None:
        keys, self.tuner._expected = self.tuner._expected, []
        compiler = self.tools.compiler
        if compiler is None:
            return
        for key in keys:
            try:
                compiler.submit(key, [self.tools.catalog.default(key)])
            except BREAKDOWNS as error:  # which that unit meets itself
                logger.debug("%s: not compiled ahead: %s", key, error)

    def _upcoming_prepared(self, *, wait: bool) -> Prepared | None:
        if self.upcoming is None:
            return None
        return self.tuner._preparer.look(self.upcoming, wait=wait)

    def _compile_upcoming(
        self, prepared: Prepared | None = None, ranked: Sequence[KernelConfig] = ()
    ) -> None:
        """Have the next unit's default compile, and what it will probably try first.

        Args:
            prepared: what is known of it; None: its default and records alone count.
            ranked: the best of this unit, which the next one tries if it can.
        """
        key, compiler = self.upcoming, self.tools.compiler
        if key is None or compiler is None:
            return
        try:
            catalog = self.tools.catalog
            members = frozenset(catalog.configs(key))
            near = ranked if key.kernel == self.key.kernel else ()
            if prepared is not None and self.options.warm_start:
                near = near or prepared.estimated[: self._batch()]
            records = [record for _, record in self.tuner.store.records(key.kernel)]
            starts = sure_starts(key, members, self.tools.device, records=records)
            chosen = [catalog.default(key), *near, *starts]
            compiler.submit(key, [config for config in chosen if config in members])
        except BREAKDOWNS as error:  # which the next unit meets itself
            logger.debug("%s: not compiled ahead: %s", key, error)

    def _confirm(self, config: KernelConfig) -> Confirmation:
        text = f"{self.options.seed} {self.key} {config.items_}"
        seed = random.Random(text).getrandbits(31)
        started = self.tools.clock()
        found = self.tools.measurer.confirm(self.key, config, seed)
        took = self.tools.clock() - started
        self.tuner._confirm_s += 0.3 * (took - self.tuner._confirm_s)
        return found

    def _recorded(
        self, state: str, config: KernelConfig, found: Confirmation, stopped: str
    ) -> Outcome:
        environment = self.tools.environment
        default_us, is_default = _finite(found.default_us), config == self.default
        record = TuningRecord(
            key=self.key,
            config=config,
            gpu=environment.gpu,
            arch=environment.arch,
            # Of the default beside itself, one of the two times.
            time_us=default_us or found.time_us if is_default else found.time_us,
            default_us=default_us,
            error_ratio=_finite(found.error_ratio),
            kernel_digest=self._digest(),
            toolchain=dict(environment.toolchain),
            verified=True,
            measured=date.today().isoformat(),
            trials=len({trial.config for trial in self.trials}),
        )
        if not self.tuner.store.put(record):
            reason = "the record could not be written to the user cache"
            return self._outcome("failed", reason, record, stopped)
        return self._outcome(state, "", record, stopped)

    def _outcome(
        self,
        state: str,
        reason: str = "",
        record: TuningRecord | None = None,
        stopped: str | None = None,
    ) -> Outcome:
        counts = self._counts()
        if self.wrong:
            counts.rejected["confirmation"] += self.wrong
        return Outcome(self.key, state, reason, record, counts, stopped)

    def _digest(self) -> str:
        digest = (self.tools.environment.digests or {}).get(self.key.kernel)
        if digest is None:
            raise RecordError(f"kernel {self.key.kernel} has no digest, so no record")
        return digest

    def _counts(self) -> Counts:
        return Counts.of(self.considered, self.pruned, self.trials)

    def _report(self, best: Trial | None) -> None:
        time_us = best.time_us if best else None
        self.tuner.on_event(Event("trial", self.key, self._counts(), time_us))

    def _note(self, text: str) -> None:
        logger.info("%s: %s", self.key, text)
        self.tuner.on_event(Event("note", self.key, self._counts(), note=text))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def fastest(trials: Iterable[Trial], rounds: int) -> list[KernelConfig]:
    """Valid configs, those timed at full fidelity first, then by time."""
    last: dict[KernelConfig, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.rounds):
        last[trial.config] = trial
    timed = [
        (trial.rounds < rounds, trial.time_us, i, trial.config)
        for i, trial in enumerate(last.values())
        if trial.time_us is not None
    ]
    return [config for *_, config in sorted(timed, key=lambda row: row[:3])]


def trial_folder(root: Path, kernel: str, gpu: str) -> Path:
    """Where the trial logs of a kernel on a GPU are, beside their records."""
    return root / file_stem(kernel) / f"{file_stem(gpu)}.trials"
