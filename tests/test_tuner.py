# SPDX-License-Identifier: Apache-2.0
"""The tuner: what is recorded, in what time, and what cannot spoil it."""

import json
import threading
import time
from dataclasses import dataclass, replace

import pytest
from search_cases import time_of
from tuner_fakes import (
    BEST,
    CONFIGS,
    DEFAULT,
    DEVICE,
    Catalog,
    Measurer,
    key_of,
    served,
    tasks_of,
    tuner_with,
)

from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.preparation import Preparer
from portable_backend.warmup.trial_log import TrialLog
from portable_backend.warmup.tuner import trial_folder, tune
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import Task
from portable_backend.warmup.upkeep import Measurement, verify

EVERYTHING = TuneOptions(strategy="exhaustive", trials=None, warm_start=False)


def test_the_fastest_config_is_recorded_at_once(tmp_path):
    seen = []

    def on_event(event):
        if event.kind == "finished":
            seen.append(served(tmp_path).keys())

    tuner = tuner_with(Measurer(), tmp_path, EVERYTHING, on_event)
    outcomes = tune(tasks_of(1, 2), tuner)
    assert [outcome.state for outcome in outcomes] == ["tuned", "tuned"]
    assert seen == [{1}, {1, 2}]
    record = served(tmp_path)[1]
    assert record.config == BEST and record.verified and record.trials == len(CONFIGS)
    assert (record.time_us, record.default_us) == (time_of(BEST), time_of(DEFAULT))
    assert (record.gpu, record.kernel_digest) == (DEVICE.name, "sha256:aa")
    counts = outcomes[0].counts
    assert counts.considered == counts.compiled == counts.timed == len(CONFIGS)


@pytest.mark.parametrize("strategy", ["random", "evolutionary", "bayesian", "halving"])
def test_every_strategy_ends_with_a_record_and_within_its_trials(tmp_path, strategy):
    measurer = Measurer()
    options = TuneOptions(strategy=strategy, trials=30, warm_start=False)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, options))
    assert outcome.state == "tuned" and outcome.stopped == "budget"
    tried = {config for _, config in measurer.measured}
    # Halving pays for trials by the round: it tries about as many configs.
    assert len(tried) <= 30 if strategy != "halving" else 15 < len(tried) < 45


@pytest.mark.parametrize("planted", ["correctness", "timeout", "runtime", "over-limit"])
def test_an_invalid_config_never_wins(tmp_path, planted):
    measurer = Measurer(bad={str(CONFIGS.index(BEST)): planted})
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING))
    assert outcome.state == "tuned" and outcome.record.config != BEST
    assert outcome.counts.rejected == {planted: 1}
    assert outcome.counts.timed == len(CONFIGS) - 1


def test_a_config_that_fails_on_unseen_data_never_wins(tmp_path):
    """Two seem a thousand times as fast; the best of the honest ones is recorded."""
    notes = []
    measurer = Measurer(overfitted=(50, 60))
    tuner = tuner_with(
        measurer,
        tmp_path,
        EVERYTHING,
        lambda e: notes.append(e.note) if e.kind == "note" else None,
    )
    (outcome,) = tune(tasks_of(1), tuner)
    assert outcome.record.config == BEST
    assert outcome.counts.rejected == {"confirmation": 2}
    assert len(notes) == 2 and "timing shape" in notes[0]
    assert len(set(measurer.seeds)) == len(measurer.seeds)


def test_what_was_refuted_is_not_recorded_again(tmp_path):
    tune(tasks_of(1), tuner_with(Measurer(), tmp_path, EVERYTHING))
    layer, record = WritableLayer("", tmp_path), served(tmp_path)[1]
    assert record.config == BEST
    verify(layer, [record], lambda record: Measurement(problem="wrong"))
    (outcome,) = tune(tasks_of(1), tuner_with(Measurer(), tmp_path, EVERYTHING))
    assert outcome.state == "tuned" and outcome.record.config != BEST
    assert served(tmp_path)[1] == outcome.record


@pytest.mark.parametrize(
    ("gain", "noise", "state"),
    [
        (0.05, 0.04, "tuned"),
        (0.05, 0.06, "default"),
        (0.005, 0.001, "default"),  # too little to be worth another config
        (-0.5, 0.001, "default"),
    ],
)
def test_the_default_is_left_only_beyond_noise(tmp_path, gain, noise, state):
    default_us = time_of(BEST) / (1 - gain)
    measurer = Measurer(default_us=default_us, noise=noise)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING))
    assert outcome.state == state
    record = served(tmp_path)[1]
    assert record.config == (BEST if state == "tuned" else DEFAULT)
    assert record.verified and record.default_us == default_us


def test_what_is_clearly_slower_than_the_default_is_not_confirmed(tmp_path):
    """Trials are not off by 2 %; then a search of few trials ends at once."""
    measurer = Measurer()
    tuner = tuner_with(measurer, tmp_path, EVERYTHING)
    tuner.tools.catalog = type(
        "BestIsDefault", (Catalog,), {"default": lambda *_: BEST}
    )()
    (outcome,) = tune(tasks_of(1), tuner)
    near = [c for c in CONFIGS if c != BEST and time_of(c) <= 1.01 * time_of(BEST)]
    assert outcome.state in ("tuned", "default")
    assert len(near) < EVERYTHING.finalists
    assert set(measurer.confirmed) == {BEST, *near}


def test_each_config_is_measured_as_soon_as_it_is_compiled(tmp_path):
    """Not only once others are, too."""
    measurer = Measurer()
    compiler = Compiler(measurer)
    seen = []

    def wait(key, configs, until=None):
        for config in configs:
            seen.append(len(measurer.measured))
            yield Compiled(config)

    compiler.wait = wait
    tuner = tuner_with(measurer, tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    tune(tasks_of(1), tuner)
    assert seen == list(range(len(CONFIGS)))


def test_a_wrong_default_is_no_record(tmp_path):
    measurer = Measurer(overfitted=range(len(CONFIGS)))
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING))
    assert outcome.state == "failed" and "default config is wrong" in outcome.reason
    assert served(tmp_path) == {}


def test_what_has_a_record_is_skipped_unless_asked_again(tmp_path):
    tune(tasks_of(1), tuner_with(Measurer(), tmp_path))
    measurer = Measurer()
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path))
    assert (outcome.state, measurer.measured) == ("known", [])
    assert outcome.record == served(tmp_path)[1]
    options = replace(EVERYTHING, again=True)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, options))
    assert outcome.state == "tuned" and len(measurer.measured) == len(CONFIGS)


def test_what_another_process_has_just_recorded_is_not_tuned_again(
    tmp_path, monkeypatch
):
    """It ends between the first look at the records and the opening of the log."""

    def open_late(*args):
        monkeypatch.undo()
        tune(tasks_of(1), tuner_with(Measurer(), tmp_path))
        return TrialLog(*args)

    monkeypatch.setattr("portable_backend.warmup.tuner.TrialLog", open_late)
    measurer = Measurer()
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path))
    assert (outcome.state, measurer.measured) == ("known", [])
    assert outcome.record == served(tmp_path)[1]
    # The log is free again.
    options = replace(EVERYTHING, again=True)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, options))
    assert outcome.state == "tuned"


@pytest.mark.parametrize(
    "change",
    [{"digest": "sha256:bb"}, {"toolchain": {"torch": "2.11.0", "triton": "3.7.0"}}],
    ids=str,
)
def test_other_code_or_another_toolchain_is_tuned_anew(tmp_path, change):
    """Not even the old trials count: they are of other binaries."""
    tune(tasks_of(1), tuner_with(Measurer(), tmp_path, EVERYTHING))
    measurer = Measurer()
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING, **change))
    assert outcome.state == "tuned" and len(measurer.measured) == len(CONFIGS)


def test_the_budget_is_honoured_and_shared(tmp_path):
    measurer = Measurer(trial_s=1.0)
    tuner = tuner_with(measurer, tmp_path, replace(EVERYTHING, finalists=1))
    tasks = [Task(key_of(1), 8.0), Task(key_of(2), 1.0), Task(key_of(3), 1.0)]
    outcomes = tune(tasks, tuner, budget_s=60)
    assert {outcome.state for outcome in outcomes} <= {"tuned", "default"}
    assert 50 < measurer.clock_s <= 62
    counts = [sum(key == t.key for key, _ in measurer.measured) for t in tasks]
    assert counts[0] > 2 * counts[1] and min(counts) > 8


def test_what_a_unit_leaves_over_the_next_may_use(tmp_path):
    measurer = Measurer(trial_s=1.0)
    tuner = tuner_with(measurer, tmp_path)
    tune(tasks_of(7), tuner_with(Measurer(), tmp_path))  # known: takes no time
    tune(tasks_of(7, 2), tuner, budget_s=40)
    assert len(measurer.measured) > 30


def test_units_that_get_no_time_are_unreached_and_nothing_else(tmp_path):
    measurer = Measurer(trial_s=4.0)
    outcomes = tune(
        tasks_of(1, 2, 3, 4), tuner_with(measurer, tmp_path, EVERYTHING), budget_s=6
    )
    states = [outcome.state for outcome in outcomes]
    assert states[0] in ("tuned", "default") and states[-1] == "unreached"
    assert measurer.clock_s <= 12


def test_a_measurer_that_breaks_is_started_again(tmp_path):
    measurer = Measurer(breaks_on=1, breaks=1)
    outcomes = tune(tasks_of(1, 2), tuner_with(measurer, tmp_path, EVERYTHING))
    assert [outcome.state for outcome in outcomes] == ["tuned", "tuned"]
    assert measurer.closed == 1


def test_a_unit_that_cannot_be_measured_does_not_cost_the_others(tmp_path):
    measurer = Measurer(breaks_on=2, breaks=99)
    outcomes = tune(tasks_of(1, 2, 3), tuner_with(measurer, tmp_path))
    assert [outcome.state for outcome in outcomes] == ["tuned", "failed", "tuned"]
    assert "does not start" in outcomes[1].reason
    assert served(tmp_path).keys() == {1, 3}


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(tmp_path):
    measurer = Measurer(interrupts_after=len(CONFIGS) + 20)
    tuner = tuner_with(measurer, tmp_path, EVERYTHING)
    outcomes = tune(tasks_of(1, 2, 3), tuner)
    assert [o.state for o in outcomes] == ["tuned", "interrupted", "unreached"]
    assert served(tmp_path).keys() == {1}
    measurer = Measurer()
    outcomes = tune(tasks_of(1, 2, 3), tuner_with(measurer, tmp_path, EVERYTHING))
    assert [outcome.state for outcome in outcomes] == ["known", "tuned", "tuned"]
    assert sum(key == key_of(2) for key, _ in measurer.measured) == len(CONFIGS) - 20
    assert outcomes[1].counts.timed == len(CONFIGS)


def test_ctrl_c_while_a_winner_is_confirmed_is_no_record(tmp_path):
    measurer = Measurer(interrupts_in_confirm=True)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING))
    assert outcome.state == "interrupted" and served(tmp_path) == {}


def test_a_cache_that_cannot_be_written_fails_the_unit_and_says_so(tmp_path):
    place = tmp_path / "a file"
    place.write_text("")
    (outcome,) = tune(tasks_of(1), tuner_with(Measurer(), place))
    assert outcome.state == "failed" and "could not be written" in outcome.reason


@dataclass(frozen=True)
class Compiled:
    config: object
    readout: object = None
    failure: str | None = None


class Compiler:
    """Compiles at once; notes what was submitted before which measurement."""

    def __init__(self, measurer, failing=(), breaks_after=None):
        self.measurer, self.failing = measurer, failing
        self.submitted, self.log, self.breaks_after = [], [], breaks_after
        self.closed = False

    def submit(self, key, configs):
        configs = [config for config in configs if config not in self.submitted]
        self.submitted += configs
        self.log.append((len(self.submitted), len(self.measurer.measured)))

    def wait(self, key, configs, until=None):
        for config in configs:
            if self.breaks_after is not None and self.breaks_after <= 0:
                raise RuntimeError("the compile pool is closed")
            if self.breaks_after is not None:
                self.breaks_after -= 1
            assert config in self.submitted
            is_bad = CONFIGS.index(config) in self.failing
            yield Compiled(config, failure="ptxas died" if is_bad else None)

    def close(self):
        self.closed = True


def test_the_next_batch_compiles_while_this_one_is_measured(tmp_path):
    measurer = Measurer()
    compiler = Compiler(measurer)
    tuner = tuner_with(measurer, tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    tune(tasks_of(1), tuner)
    ahead = [submitted - measured for submitted, measured in compiler.log]
    assert ahead[0] == 2 * EVERYTHING.batch  # before anything is measured
    assert min(ahead[: len(ahead) // 2]) >= EVERYTHING.batch
    assert len(compiler.submitted) == len(CONFIGS)
    tuner.close()
    assert compiler.closed


def test_the_next_units_first_configs_compile_while_a_winner_is_confirmed(tmp_path):
    compiler = Compiler(Measurer())
    keys = []
    compiler.submit = lambda key, configs: keys.append((key, list(configs)))
    compiler.wait = lambda key, configs, until=None: map(Compiled, configs)
    tuner = tuner_with(Measurer(), tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    tune(tasks_of(1, 2), tuner)
    *early, late = [configs for key, configs in keys if key == key_of(2)][:4]
    # At once, as of all units, and as soon as this unit's first ones are on their way.
    assert early == [[DEFAULT]] * 3
    assert late[:2] == [DEFAULT, BEST] and len(late) == 1 + EVERYTHING.batch


def test_the_defaults_of_all_units_compile_before_the_first_unit_is_searched(tmp_path):
    compiler = Compiler(Measurer())
    keys = []
    compiler.submit = lambda key, configs: keys.append((key, list(configs)))
    compiler.wait = lambda key, configs, until=None: map(Compiled, configs)
    tuner = tuner_with(Measurer(), tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    tune(tasks_of(1, 2, 3), tuner)
    first = [keys.index((key_of(n), [DEFAULT])) for n in (2, 3)]
    searched = next(i for i, (key, found) in enumerate(keys) if len(found) > 1)
    assert max(first) < searched


def test_the_first_two_units_compile_ahead_of_the_defaults_of_later_ones(tmp_path):
    """As many configs of each as a strategy asks for at first."""
    compiler = Compiler(Measurer())
    keys = []
    compiler.submit = lambda key, configs: keys.append((key, list(configs)))
    compiler.wait = lambda key, configs, until=None: map(Compiled, configs)
    options = replace(EVERYTHING, warm_start=True)
    tuner = tuner_with(
        Measurer(), tmp_path, options, make_compiler=lambda: compiler, prune=prune
    )
    tune(tasks_of(1, 2, 3), tuner)
    before = keys[: keys.index((key_of(3), [DEFAULT]))]
    ours, theirs = ([c for k, found in before if k == key_of(n) for c in found]
                    for n in (1, 2))  # fmt: skip
    best = sorted((c for c in CONFIGS if c["num_warps"] != 8), key=time_of)
    assert set(best[: 2 * options.batch]) <= set(ours)
    assert list(dict.fromkeys(theirs)) == [DEFAULT, *best[: options.batch]]


def test_no_compiler_is_waited_for_after_a_units_time(tmp_path):
    """And what it has timed by then is confirmed and recorded."""
    measurer = Measurer(trial_s=0.5)
    compiler, waits = Compiler(measurer), []

    def wait(key, configs, until=None):
        for config in configs:
            if len(measurer.measured) >= 8:
                waits.append(until - time.monotonic() - measurer.clock_s)
                measurer.clock_s += waits[-1]
                return
            yield Compiled(config)

    compiler.wait = wait
    options = replace(EVERYTHING, batch=6)
    tuner = tuner_with(measurer, tmp_path, options, make_compiler=lambda: compiler)
    (outcome,) = tune(tasks_of(1), tuner, budget_s=20)
    assert outcome.counts.timed == 8 and outcome.stopped == "budget"
    assert outcome.state in ("tuned", "default") and len(waits) == 1
    assert 18 < measurer.clock_s <= 20


class SlowCompiler(Compiler):
    """Its processes take `start_s` to start; configs after `late` take `each_s`."""

    start_s, each_s, late = 0.0, 0.0, 5

    def wait(self, key, configs, until=None):
        measurer = self.measurer
        for config in configs:
            measurer.clock_s += self.start_s
            self.start_s = 0.0
            if len(measurer.measured) >= self.late:
                measurer.clock_s += self.each_s
            yield Compiled(config)


def timed(tmp_path, weights, budget_s, **slowness):
    """How many configs of each unit are timed, and in what time."""
    measurer = Measurer(trial_s=0.25)
    compiler = SlowCompiler(measurer)
    vars(compiler).update(slowness)
    options = replace(EVERYTHING, warm_start=True, finalists=1, batch=4)
    tuner = tuner_with(
        measurer, tmp_path, options, make_compiler=lambda: compiler, prune=prune
    )
    tasks = [Task(key_of(n), weight) for n, weight in enumerate(weights, 1)]
    tune(tasks, tuner, budget_s=budget_s)
    keys = [key for key, _ in measurer.measured]
    return [keys.count(task.key) for task in tasks], measurer.clock_s


def test_the_start_of_compilers_does_not_count_for_the_first_unit(tmp_path):
    quick, _ = timed(tmp_path / "quick", (3.0, 1.0), 30)
    slow, took_s = timed(tmp_path / "slow", (3.0, 1.0), 30, start_s=10)
    assert slow[0] == quick[0] and slow[1] < quick[1]
    assert took_s < 33


def test_a_short_grant_is_time_in_which_a_unit_is_measured(tmp_path):
    """And not one in which it waits for compilers."""
    weights = (6.0, *[0.1] * 10)
    quick, _ = timed(tmp_path / "quick", weights, 20)
    slow, took_s = timed(tmp_path / "slow", weights, 20, each_s=0.07)
    assert slow[0] > 0.9 * quick[0]
    assert took_s < 22


@pytest.mark.parametrize(("budget_s", "chosen"), [(None, 32), (1e3, 32), (3.4, 12)])
def test_no_more_is_compiled_ahead_than_there_is_time_for(tmp_path, budget_s, chosen):
    compiler = Compiler(Measurer())
    sizes = []
    compiler.submit = lambda key, configs: sizes.append(len(list(configs)))
    compiler.wait = lambda key, configs, until=None: map(Compiled, configs)
    tuner = tuner_with(Measurer(), tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    tune(tasks_of(1), tuner, budget_s=budget_s)
    assert max(sizes) == chosen


def test_what_is_compiled_is_tried_before_what_is_not(tmp_path):
    measurer = Measurer()
    compiler = Compiler(measurer)
    ready = sorted(CONFIGS[10:60], key=time_of)[5:9]
    compiler.ready = lambda key, configs: [c for c in configs if c in ready]
    options = replace(EVERYTHING, warm_start=True, trials=32)
    tuner = tuner_with(
        measurer, tmp_path, options, make_compiler=lambda: compiler, prune=prune
    )
    tune(tasks_of(1), tuner)
    tried = [config for _, config in measurer.measured]
    ranked = [config for config in ready if config in tried]
    assert ranked and tried[1 : 1 + len(ranked)] == ranked


def test_what_does_not_compile_is_not_measured(tmp_path):
    measurer = Measurer()
    bad = CONFIGS.index(BEST)
    compiler = Compiler(measurer, failing=(bad, 3))
    tuner = tuner_with(measurer, tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    (outcome,) = tune(tasks_of(1), tuner)
    assert outcome.counts.rejected == {"compile": 2}
    assert outcome.counts.compiled == len(CONFIGS) - 2
    assert BEST not in {config for _, config in measurer.measured}


def test_a_compiler_that_dies_is_done_without(tmp_path):
    measurer = Measurer()
    compiler = Compiler(measurer, breaks_after=10)
    tuner = tuner_with(measurer, tmp_path, EVERYTHING, make_compiler=lambda: compiler)
    (outcome,) = tune(tasks_of(1), tuner)
    assert outcome.state == "tuned" and outcome.record.config == BEST
    assert len(measurer.measured) == len(CONFIGS)


@dataclass(frozen=True)
class Pruned:
    config: object
    reason: str


def prune(key, configs, device, *, keep, readouts=None):
    """Keeps 8 warps out, and what is read out to spill."""
    spilling = {c for c, spills in (readouts or {}).items() if spills}
    bad = {c: "too many warps" for c in configs if c["num_warps"] == 8}
    bad |= {c: "spills 9 registers" for c in configs if c in spilling}
    kept = sorted((c for c in configs if c not in bad), key=time_of)
    return kept, [Pruned(c, reason) for c, reason in bad.items()]


def test_what_the_resource_model_drops_is_logged_and_never_measured(tmp_path):
    measurer = Measurer()
    tuner = tuner_with(measurer, tmp_path, EVERYTHING, prune=prune)
    (outcome,) = tune(tasks_of(1), tuner)
    wide = [config for config in CONFIGS if config["num_warps"] == 8]
    assert outcome.counts.pruned == len(wide) > 0
    assert outcome.counts.considered == len(CONFIGS)
    assert not set(wide) & {config for _, config in measurer.measured}
    (path,) = trial_folder(tmp_path, "decode", DEVICE.name).glob("*.pruned")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["config"] for row in rows] == [config.to_dict() for config in wide]
    assert {row["reason"] for row in rows} == {"too many warps"}


def test_compiled_code_that_cannot_win_is_not_timed(tmp_path):
    measurer = Measurer()
    compiler = Compiler(measurer)
    compiler.wait = lambda key, configs, until=None: (
        Compiled(config, 9 if config == BEST else 0) for config in configs
    )
    tuner = tuner_with(
        measurer, tmp_path, EVERYTHING, make_compiler=lambda: compiler, prune=prune
    )
    (outcome,) = tune(tasks_of(1), tuner)
    assert outcome.counts.rejected == {"resources": 1}
    assert BEST not in {config for _, config in measurer.measured}


def test_the_search_ends_at_the_roof(tmp_path):
    measurer = Measurer()
    measurer.roof_us = lambda key: time_of(DEFAULT)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, EVERYTHING))
    assert outcome.stopped == "condition"
    assert len(measurer.measured) < EVERYTHING.batch


def test_a_search_that_goes_on_in_vain_ends(tmp_path):
    measurer = Measurer()
    options = replace(EVERYTHING, patience=10)
    (outcome,) = tune(tasks_of(1), tuner_with(measurer, tmp_path, options))
    assert outcome.stopped == "condition"
    times = [time_of(config) for _, config in measurer.measured]
    assert len(times) - 1 - times.index(min(times)) == 10
    assert len(times) < len(CONFIGS)


def test_only_the_best_by_estimate_are_searched_and_the_default(tmp_path):
    measurer = Measurer()
    options = replace(EVERYTHING, candidates=9)
    tuner = tuner_with(measurer, tmp_path, options, prune=prune)
    (outcome,) = tune(tasks_of(1), tuner)
    best = sorted((c for c in CONFIGS if c["num_warps"] != 8), key=time_of)[:9]
    assert {config for _, config in measurer.measured} == {DEFAULT, *best}
    assert outcome.counts.pruned == len(CONFIGS) - 10


@pytest.mark.parametrize(
    "wrong", [{"strategy": "luck"}, {"batch": 0}, {"trials": 0}, {"finalists": 0}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        TuneOptions(**wrong)


def test_auto_is_bayesian_where_optuna_is_there(monkeypatch):
    assert TuneOptions().chosen == "bayesian"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TuneOptions().chosen == "evolutionary"


def test_the_next_unit_is_prepared_meanwhile_and_no_other_than_alone(tmp_path):
    listed = []

    class Watched(Catalog):
        def configs(self, key):
            listed.append((key, threading.current_thread() is threading.main_thread()))
            return super().configs(key)

    tuner = tuner_with(Measurer(), tmp_path, EVERYTHING)
    tuner.tools.catalog = Watched()
    tune(tasks_of(1, 2), tuner)
    assert listed == [(key_of(1), True), (key_of(2), False)]
    ahead, alone = Preparer(EVERYTHING), Preparer(EVERYTHING)
    ahead.begin(key_of(2), tuner.tools)
    one, other = (p.take(key_of(2), tuner.tools) for p in (ahead, alone))
    assert (one.space.configs, one.digest) == (other.space.configs, other.digest)
    # What was begun for another unit is not taken for this one's.
    ahead.begin(key_of(1), tuner.tools)
    listed.clear()
    ahead.take(key_of(2), tuner.tools)
    assert listed[-1] == (key_of(2), True)


def test_what_cannot_be_prepared_ahead_fails_in_its_own_turn(tmp_path):
    class Picky(Catalog):
        def configs(self, key):
            if key == key_of(2):
                raise ValueError("no such kernel")
            return super().configs(key)

    tuner = tuner_with(Measurer(), tmp_path)
    tuner.tools.catalog = Picky()
    outcomes = tune(tasks_of(1, 2, 3), tuner)
    assert [o.state for o in outcomes] == ["tuned", "failed", "tuned"]
    assert outcomes[1].reason == "ValueError: no such kernel"
