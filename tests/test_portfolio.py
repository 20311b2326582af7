# SPDX-License-Identifier: Apache-2.0
"""Portfolios: few configs that lose little against the best of each bucket."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_fakes import GPU, make_config, make_portfolio

from portable_backend.errors import RecordError
from portable_backend.warmup.portfolio import cover_buckets, parse_portfolio

A, B, C = (make_config(n) for n in (16, 32, 64))


def _loss(times, configs):
    """Uncovered buckets and geometric-mean loss, the plain way."""
    losses, uncovered = [], 0
    for row in times.values():
        ran = [row[config] for config in configs if config in row]
        if ran:
            losses.append(min(ran) / min(row.values()))
        else:
            uncovered += 1
    return uncovered, math.prod(losses) ** (1 / max(1, len(losses)))


TIMES = st.dictionaries(
    st.integers(0, 9),
    st.dictionaries(
        st.sampled_from([make_config(n) for n in range(1, 8)]),
        st.floats(0.5, 500),
        min_size=1,
    ),
    min_size=1,
)


@settings(deadline=None)
@given(TIMES, st.integers(1, 4))
def test_no_exchange_of_one_config_improves_a_cover(times, max_configs):
    cover = cover_buckets(times, max_configs)
    assert 1 <= len(cover.configs) <= max_configs
    uncovered, loss = _loss(times, cover.configs)
    assert len(cover.uncovered) == uncovered
    assert cover.loss == pytest.approx(loss)
    every = {config for row in times.values() for config in row}
    for place, config in itertools.product(range(len(cover.configs)), every):
        other = [*cover.configs[:place], config, *cover.configs[place + 1 :]]
        other_uncovered, other_loss = _loss(times, other)
        assert other_uncovered >= uncovered
        if other_uncovered == uncovered and not uncovered:
            assert other_loss >= loss * (1 - 1e-9)


@settings(deadline=None)
@given(TIMES)
def test_as_many_configs_as_buckets_lose_nothing(times):
    cover = cover_buckets(times, len(times))
    assert cover.loss == pytest.approx(1) and not cover.uncovered
    assert len(cover.losses) == len(times)


def test_an_exchange_mends_what_greed_spoils():
    # C is second best everywhere, so greed takes it first; A and B are better together.
    times = {
        1: {A: 1.0, B: 9.0, C: 1.5},
        2: {A: 9.0, B: 1.0, C: 1.5},
        3: {A: 1.0, B: 9.0, C: 1.5},
        4: {A: 9.0, B: 1.0, C: 1.5},
    }
    assert cover_buckets(times, 1).configs == (C,)
    cover = cover_buckets(times, 2)
    assert set(cover.configs) == {A, B} and cover.loss == pytest.approx(1)


def test_the_cover_is_near_the_best_that_all_subsets_offer():
    rng = random.Random(3)
    configs = [make_config(n) for n in range(1, 11)]
    worst = 1.0
    for _ in range(20):
        times = {b: {c: rng.lognormvariate(0, 1) for c in configs} for b in range(12)}
        cover = cover_buckets(times, 3)
        best = min(_loss(times, s)[1] for s in itertools.combinations(configs, 3))
        worst = max(worst, cover.loss / best)
    assert worst < 1.1


def test_loss_and_worst_bucket_are_reported():
    times = {"one": {A: 1.0, B: 2.0}, "two": {A: 8.0, B: 2.0}, "three": {A: 1.0}}
    cover = cover_buckets(times, 1)
    assert cover.configs == (A,)
    assert cover.loss == pytest.approx(4 ** (1 / 3))
    assert cover.worst_bucket == "two" and cover.losses["two"] == pytest.approx(4)


def test_serving_every_bucket_comes_before_speed():
    times = {1: {A: 1.0, B: 100.0}, 2: {A: 1.0, B: 100.0}, 3: {B: 100.0}}
    assert cover_buckets(times, 1).configs == (B,)
    cover = cover_buckets({1: {A: 1.0}, 2: {B: 1.0}}, 1)
    assert len(cover.uncovered) == 1 and cover.worst_bucket == cover.uncovered[0]


def test_equal_configs_are_chosen_in_a_fixed_order():
    rows = [{A: 1.0, B: 1.0, C: 1.0}, {C: 1.0, B: 1.0, A: 1.0}]
    assert len({cover_buckets({1: row}, 1).configs for row in rows}) == 1


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ({}, 1),
        ({1: {}}, 1),
        ({1: {A: 1.0}}, 0),
        ({1: {A: 0.0}}, 1),
        ({1: {A: math.nan}}, 1),
        ({1: {A: math.inf}}, 1),
    ],
)
def test_nothing_to_choose_from_is_refused(times, count):
    with pytest.raises(ValueError, match="must"):
        cover_buckets(times, count)


def test_a_portfolio_read_back_is_the_same():
    portfolio = make_portfolio()
    data = portfolio.to_text().encode()
    assert parse_portfolio(data, "p", "decode", GPU) == portfolio
    assert portfolio.loss == pytest.approx(1) and len(portfolio.configs) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 2),
        ("kernel", "prefill"),
        ("gpu", "nvidia_h100"),
        ("arch", 9),
        ("configs", []),
        ("configs", [{"block_n": 1}]),
        ("configs", "none"),
        ("toolchain", None),
        ("kernel_digest", 1),
        ("buckets", [{"key": {"seq_len": 1}, "config": 9}]),
        ("buckets", [3]),
        ("buckets", [{"key": {"seq_len": -1}, "config": 0}]),
        ("loss", 0.5),
        ("worst_loss", "x"),
    ],
)
def test_a_wrong_portfolio_is_refused_with_its_file(field, value):
    held = json.loads(make_portfolio().to_text()) | {field: value}
    with pytest.raises(RecordError, match="p: "):
        parse_portfolio(json.dumps(held).encode(), "p", "decode", GPU)
