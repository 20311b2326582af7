# SPDX-License-Identifier: Apache-2.0
"""The search loop: budgets are kept, interruptions keep what is done."""

import pytest
from search_cases import measure, small_configs, time_of

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.search import Budget, Trial, search
from portable_backend.warmup.strategies import STRATEGIES, make_strategy

SPACE = ListedSpace(small_configs())
NOW = {"clock": lambda: 0.0}


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("trials", [0, 0.5, 1, 7, 20.4])
def test_budget_of_trials_is_kept(name, batch, trials):
    budget = Budget(trials=trials)
    result = search(make_strategy(name, SPACE), measure, budget, batch=batch, **NOW)
    cost = sum(t.rounds for t in result.trials) / 9
    assert result.cost == pytest.approx(cost)
    assert trials - 1 < cost <= trials + 1e-9
    assert result.stopped == "budget"


def test_a_trial_of_fewer_rounds_costs_its_fraction():
    strategy = make_strategy("halving", SPACE, rounds=9)
    result = search(strategy, measure, Budget(trials=2), **NOW)
    assert len(result.trials) > 6
    assert sum(t.rounds for t in result.trials) == 18


def test_budget_of_seconds_counts_what_trials_report():
    strategy = make_strategy("random", SPACE)
    result = search(strategy, measure, Budget(seconds=5), batch=4, **NOW)
    assert (len(result.trials), result.stopped) == (5, "budget")


def test_what_is_not_measured_by_the_end_of_the_time_is_left_out():
    clock, strategy = Clock(), make_strategy("random", SPACE)

    def late(proposals):
        yield from measure(proposals[:2])
        clock.now += 10

    result = search(strategy, late, Budget(seconds=5), batch=4, clock=clock)
    assert (len(result.trials), result.stopped) == (2, "budget")


def test_budget_of_seconds_counts_what_the_strategy_takes():
    clock, strategy = Clock(), make_strategy("random", SPACE)
    ask = strategy.ask

    def slow_ask(n):
        clock.now += 10
        return ask(n)

    strategy.ask = slow_ask
    result = search(strategy, measure, Budget(seconds=25), clock=clock)
    assert (len(result.trials), result.seconds) == (2, 30)


def test_search_ends_with_the_space_and_its_optimum():
    result = search(make_strategy("exhaustive", SPACE), measure, Budget(), **NOW)
    assert result.stopped == "exhausted"
    assert len(result.trials) == len(SPACE.configs)
    assert result.best.time_us == min(map(time_of, SPACE.configs))


def test_search_stops_at_the_roof():
    roof = sorted(map(time_of, SPACE.configs))[5]
    strategy = make_strategy("exhaustive", SPACE)
    result = search(
        strategy, measure, Budget(), stop=lambda best: best.time_us <= roof, **NOW
    )
    assert result.stopped == "condition"
    assert result.best.time_us <= roof
    assert all(t.time_us > roof for t in result.trials[:-1])


def test_ctrl_c_keeps_what_is_done():
    def interrupted(proposals):
        for trial in measure(proposals):
            if len(done) == 5:
                raise KeyboardInterrupt
            done.append(trial)
            yield trial

    done = []
    strategy = make_strategy("random", SPACE)
    result = search(strategy, interrupted, Budget(), batch=3, **NOW)
    assert result.stopped == "interrupted"
    assert list(result.trials) == done
    assert result.best.time_us == min(t.time_us for t in done)


def test_what_measure_raises_passes_through():
    def failing(proposals):
        raise OSError("device lost")

    with pytest.raises(OSError, match="device lost"):
        search(make_strategy("random", SPACE), failing, Budget())


@pytest.mark.parametrize("answer", ["none", "other", "two"])
def test_trials_that_do_not_fit_their_proposals_are_refused(answer):
    def wrong(proposals):
        trial = next(measure(proposals))
        other = next(c for c in SPACE.configs if c != trial.config)
        if answer == "other":
            yield Trial(other, 9, 1.0)
        elif answer == "two":
            yield from (trial, trial)

    with pytest.raises(RuntimeError, match="one trial per proposal"):
        search(make_strategy("random", SPACE), wrong, Budget())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"rounds": 0, "time_us": 1.0}, "rounds"),
        ({"rounds": 1, "time_us": None}, "time_us"),
        ({"rounds": 1, "time_us": 0.0}, "time_us"),
        ({"rounds": 1, "time_us": float("nan")}, "time_us"),
        ({"rounds": 1, "time_us": float("inf")}, "time_us"),
        ({"rounds": 1, "time_us": 1.0, "invalid": "runtime"}, "time_us"),
        ({"rounds": 1, "time_us": None, "invalid": "tired"}, "invalid"),
    ],
)
def test_impossible_trials_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Trial(KernelConfig.of(BLOCK_N=16), **arguments)


@pytest.mark.parametrize("name", ["seconds", "trials"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_impossible_budgets_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Budget(**{name: value})


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match=r"^batch must be at least 1, got 0"):
        search(make_strategy("random", SPACE), measure, Budget(), batch=0)
