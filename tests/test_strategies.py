# SPDX-License-Identifier: Apache-2.0
"""What every strategy promises, whatever the space."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import SEARCHERS, measure, small_configs, small_sweep, time_of

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.replay import ReplayDevice
from portable_backend.warmup.search import Budget, Proposal, Trial, search
from portable_backend.warmup.strategies import STRATEGIES, make_strategy

DEVICE = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
SPACE = ListedSpace(small_configs())
OUTSIDE = KernelConfig.of(BLOCK_N=16, num_warps=8)


@st.composite
def searches(draw):
    """A space of any shape, results that fit no model, and a warm start."""
    values = st.sampled_from([16, 32, None, True, "pointer"])
    configs = draw(
        st.lists(
            st.builds(KernelConfig.of, BLOCK_N=values, LOAD=values, num_warps=values),
            min_size=1,
            max_size=60,
        )
    )
    ranking = draw(st.lists(st.sampled_from([*configs, OUTSIDE]), max_size=8))
    incumbent = draw(st.none() | st.sampled_from(configs))
    return configs, ranking, incumbent, draw(st.integers(0, 2**20))


@pytest.mark.parametrize("name", STRATEGIES)
@given(case=searches(), batch=st.integers(1, 5), rounds=st.integers(1, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_no_config_is_repeated_or_outside_the_space(name, case, batch, rounds):
    """A member each time, once at each fidelity; and the invalid never win."""
    configs, ranking, incumbent, seed = case
    space, rng = ListedSpace(configs), random.Random(seed)
    strategy = make_strategy(
        name, space, seed=seed, rounds=rounds, ranking=ranking, incumbent=incumbent
    )
    asked, valid = [], {}
    while proposals := strategy.ask(batch):
        assert len(proposals) <= batch
        for p in proposals:
            asked.append(p)
            if rng.random() < 0.3:
                trial = Trial(p.config, p.rounds, None, "compile", "unlucky")
            else:
                trial = Trial(p.config, p.rounds, rng.choice((1.0, 2.0, 3.0)))
                valid[p] = trial.time_us
            strategy.tell(trial)
    assert {p.config for p in asked} == set(configs)
    assert len(set(asked)) == len(asked)
    assert {p.rounds for p in asked} <= set(range(1, rounds + 1))
    best = strategy.best()
    if not valid:
        assert best is None
        return
    highest = {p: t for p, t in valid.items() if p.rounds == rounds} or valid
    assert best.time_us == min(highest.values())
    assert Proposal(best.config, best.rounds) in highest


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_incumbent_comes_first_and_the_ranking_next(name):
    ranking = [SPACE.configs[i] for i in (40, 3, 40, 17)]
    incumbent = SPACE.configs[9]
    strategy = make_strategy(
        name, SPACE, ranking=[OUTSIDE, *ranking, incumbent], incumbent=incumbent
    )
    asked = strategy.ask(4)
    assert asked[0] == Proposal(incumbent, 9)
    assert [p.config for p in asked[1:]] == [SPACE.configs[i] for i in (40, 3, 17)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_seeds_choose_alike_and_others_differ(name):
    def trials(seed):
        strategy = make_strategy(name, SPACE, seed=seed)
        return search(strategy, measure, Budget(trials=50)).trials

    assert trials(1) == trials(1)
    if name != "exhaustive":
        assert trials(1) != trials(2)


@pytest.mark.parametrize("name", SEARCHERS)
def test_an_invalid_config_never_wins_however_fast(name):
    sweep = small_sweep(DEVICE)
    strategy = make_strategy(name, ListedSpace(sweep.configs))
    result = search(strategy, ReplayDevice(sweep).measure, Budget())
    fastest = min(sweep.configs, key=time_of)
    assert any(t.config == fastest and t.invalid for t in result.trials)
    times = {row.config: row.time_us for row in sweep.rows}
    assert times[result.best.config] is not None
    assert sweep.best_us / times[result.best.config] > 0.98


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_flattering_screening_does_not_beat_a_full_measurement(name):
    a, b = SPACE.configs[:2]
    strategy = make_strategy(name, SPACE, rounds=9)
    strategy.tell(Trial(a, 1, 1.0))
    assert strategy.best().config == a
    strategy.tell(Trial(b, 9, 5.0))
    strategy.tell(Trial(a, 1, 0.5))
    assert strategy.best() == Trial(b, 9, 5.0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_was_told_is_not_asked_again(name):
    strategy = make_strategy(name, SPACE, rounds=1)
    for config in SPACE.configs[:100]:
        strategy.tell(Trial(config, 1, time_of(config)))
    asked = {p.config for p in strategy.ask(1000)}
    assert asked == set(SPACE.configs[100:])


def test_halving_screens_widely_and_times_only_the_fastest_in_full():
    strategy = make_strategy("halving", SPACE, rounds=9)
    trials = search(strategy, measure, Budget()).trials
    by_rounds = {r: [t.time_us for t in trials if t.rounds == r] for r in (1, 3, 9)}
    assert len(by_rounds[1]) == len(SPACE.configs)
    assert len(by_rounds[9]) <= len(by_rounds[3]) < len(by_rounds[1]) / 2
    assert min(by_rounds[9]) == min(by_rounds[1])


def test_an_unknown_strategy_is_answered_with_the_known_ones():
    expected = "^strategy must be one of exhaustive, random, .*, got luck;"
    with pytest.raises(ValueError, match=expected):
        make_strategy("luck", SPACE)


@pytest.mark.parametrize("name", STRATEGIES)
def test_bad_arguments_are_named(name):
    with pytest.raises(ValueError, match=r"^incumbent must be a member of the space"):
        make_strategy(name, SPACE, incumbent=OUTSIDE)
    with pytest.raises(ValueError, match=r"^rounds must be at least 1, got 0"):
        make_strategy(name, SPACE, rounds=0)
    with pytest.raises(ValueError, match=r"^trial\.config must be a member"):
        make_strategy(name, SPACE).tell(Trial(OUTSIDE, 9, 1.0))


def test_bayesian_without_optuna_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UnsupportedError, match=r"portable-backend\[tune\]"):
        make_strategy("bayesian", SPACE)


def test_a_space_without_configs_is_refused():
    with pytest.raises(ValueError, match=r"^configs must be one config at least"):
        ListedSpace([])


def test_neighbours_differ_in_one_parameter():
    for config in SPACE.configs:
        near = SPACE.neighbours(config)
        assert near
        for other in near:
            assert len(set(config.items_) ^ set(other.items_)) == 2


def test_a_child_takes_each_parameter_from_a_parent():
    rng = random.Random(0)
    a, b = SPACE.configs[0], SPACE.configs[-1]
    children = {SPACE.crossover(a, b, rng) for _ in range(200)}
    parameters = set(a.items_) | set(b.items_)
    mixed = {c for c in children if set(c.items_) <= parameters}
    assert mixed - {a, b}
    # The rest is what a constraint leaves of a cross: a neighbour of one parent.
    assert children <= set(SPACE.configs)
