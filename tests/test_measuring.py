# SPDX-License-Identifier: Apache-2.0
"""Paired times on a clock that drifts, noise, early stops. No kernel, no GPU."""

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from portable_backend.bench.timing import Contestant
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup import measuring
from portable_backend.warmup.gate import Check
from portable_backend.warmup.measuring import (
    MIN_NOISE,
    Bench,
    WrongResultError,
    is_roof_reached,
    load_maker,
    noise_of,
)
from portable_backend.warmup.measuring_child import failure_of
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import INVALID_REASONS, Proposal

CPU = torch.device("cpu")


def config(us: float, **params) -> KernelConfig:
    """One that takes so many microseconds."""
    return KernelConfig.of(NS=round(us * 1000), **params)


@dataclass
class Fake:
    """A workload whose calls take time on a clock that drifts and trembles."""

    drift: float = 0.0  # per second of the clock
    tremble: float = 0.0
    seed: int = 0
    wrong: str | None = None
    error: float = 0.0
    default: KernelConfig = field(default_factory=lambda: config(100))
    roof_us: float | None = None
    error_limit: float = 1e-4

    def __post_init__(self):
        self.key = TuningKey.of("fake", dtype="float32")
        self.now_s, self.calls = 0.0, []
        self.rng = random.Random(self.seed)
        self.seeds, self.reuses = [], []

    def check(self, config, seed, *, reuse=False):
        self.seeds.append(seed)
        self.reuses.append(reuse)
        return Check(1.25, self.wrong)

    def contestant(self, config):
        def call():
            self.calls.append(config)
            slower = (1 + self.drift * self.now_s) * self.rng.gauss(1, self.tremble)
            self.now_s += config["NS"] * 1e-9 * slower

        return Contestant([call], lambda: self.error, recheck=lambda: self.error)


@pytest.fixture
def bench(monkeypatch):
    def make(**options):
        fake = Fake(**options)
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: fake.now_s)
        return fake, Bench(fake, CPU)

    return make


def test_drift_does_not_reorder_configs(bench):
    """The clock slows down by half over the trials; half a percent is still told."""
    fake, timer = bench(drift=2.0)
    times = {}
    for i, us in enumerate([100.5, 101.5, 101.0, 99.5, 100.0] * 20):
        proposal = Proposal(config(us), 5)
        trial = timer.trial(proposal, seed=i, incumbent=fake.default)
        times.setdefault(us, []).append(trial.time_us)
    assert fake.now_s > 0.1
    assert fake.drift * fake.now_s > 0.2
    slowest = {us: max(found) for us, found in times.items()}
    quickest = {us: min(found) for us, found in times.items()}
    assert all(slowest[us] < quickest[us + 0.5] for us in (99.5, 100.0, 100.5, 101.0))


def test_the_incumbent_itself_keeps_its_time(bench):
    fake, timer = bench(drift=50.0)
    ask = {"seed": 0, "incumbent": fake.default}
    first = timer.trial(Proposal(fake.default, 3), **ask)
    again = timer.trial(Proposal(fake.default, 3), **ask)
    assert first.time_us == again.time_us
    known = timer.trial(Proposal(config(50), 3), incumbent_us=1000.0, **ask)
    assert known.time_us == pytest.approx(500, rel=0.05)


def test_alone_a_config_gets_its_own_time(bench):
    _, timer = bench()
    trial = timer.trial(Proposal(config(70), 3), seed=0)
    assert trial.time_us == pytest.approx(70)


@pytest.mark.parametrize(
    ("us", "turns"),
    [(140, 1), (115, 2), (107, 3), (104, 4), (102.5, 5), (101, 9), (50, 9)],
)
def test_what_is_clearly_slower_is_given_up(us, turns, bench):
    fake, timer = bench()
    slow = config(us)
    trial = timer.trial(Proposal(slow, 9), seed=0, incumbent=fake.default)
    assert trial.time_us == pytest.approx(us)
    assert trial.rounds == 9
    # One call warms up, one is checked.
    assert fake.calls.count(slow) == turns + 2


def test_what_is_as_fast_is_hardly_ever_given_up_and_what_is_faster_never(bench):
    """In turns that differ by 2 %, twice what a GPU's do."""
    rounds = {100: [], 97: [], 106: []}
    for us, found in rounds.items():
        for seed in range(300):
            fake, timer = bench(tremble=0.02, drift=1.0, seed=seed)
            proposal = Proposal(config(us, N=1), 9)
            trial = timer.trial(proposal, seed=0, incumbent=fake.default)
            found.append(len(trial.times_us))
    assert rounds[100].count(9) >= 294
    assert set(rounds[97]) == {9}
    assert sum(rounds[106]) / 300 < 7


def test_trials_take_short_turns_and_confirmations_long_ones(bench, monkeypatch):
    """The incumbent too, whose runner both have."""
    fake, timer = bench()
    lengths = []
    turn = measuring.Runner.turn

    def spy(runner, turn_us):
        lengths.append(turn_us)
        return turn(runner, turn_us)

    monkeypatch.setattr(measuring.Runner, "turn", spy)
    timer.trial(Proposal(config(90), 2), seed=0, incumbent=fake.default)
    assert lengths == [measuring.TRIAL_TURN_US] * 4
    lengths.clear()
    timer.confirm(config(90), seed=0, rounds=2)
    assert lengths == [measuring.CONFIRM_TURN_US] * 6
    lengths.clear()
    timer.trial(Proposal(config(90), 2), seed=1, incumbent=fake.default)
    assert lengths == [measuring.TRIAL_TURN_US] * 4


def test_a_confirmation_ends_early_where_nothing_is_to_be_gained(bench):
    for us, rounds in ((98, 15), (99.5, 7), (100, 7), (130, 7)):
        fake, timer = bench()
        winner = config(us, N=1)
        found = timer.confirm(winner, seed=0, rounds=15)
        assert found.time_us == pytest.approx(us)
        assert found.is_better == (us < 99.8)
        # One call warms up, one is checked.
        assert fake.calls.count(winner) == rounds + 2


def test_nothing_is_timed_before_its_check_and_nothing_counts_after_a_failed_one(bench):
    fake, timer = bench(wrong="off by one")
    with pytest.raises(WrongResultError, match="off by one"):
        timer.trial(Proposal(config(50), 3), seed=0)
    assert not fake.calls
    fake, timer = bench(error=math.nan)
    with pytest.raises(WrongResultError, match="timing inputs: relative error nan"):
        timer.trial(Proposal(config(50), 3), seed=0)


def test_stages_tell_whose_turn_it_is(bench):
    fake, _ = bench()
    stages = []
    timer = Bench(fake, CPU, stages.append)
    for us in (50, 60):
        timer.trial(Proposal(config(us), 1), seed=0, incumbent=fake.default)
    timer.trial(Proposal(config(60), 1), seed=0, incumbent=config(50))
    assert stages == ["incumbent", "candidate", "candidate", "incumbent", "candidate"]


def test_confirmation_is_on_unseen_seeds(bench):
    fake, timer = bench(tremble=0.01)
    result = timer.confirm(config(80), seed=7, rounds=9)
    assert fake.seeds == [-22, -23, -24]
    assert not any(fake.reuses)  # of inputs that trials had
    assert result.is_better
    assert result.time_us == pytest.approx(0.8 * result.default_us, rel=0.03)
    assert result.error_ratio == 1.25
    alone = timer.confirm(config(80), seed=7, rounds=9, beside=False)
    assert alone.default_us == math.inf
    fake.wrong = "late surprise"
    failed = timer.confirm(config(80), seed=8, rounds=9)
    assert (failed.wrong, failed.time_us) == ("late surprise", math.inf)
    assert not failed.is_better


def test_equals_are_rarely_taken_for_better_and_better_ones_rarely_missed(bench):
    promoted = {100: 0, 97: 0}
    for us in promoted:
        for seed in range(200):
            _, timer = bench(tremble=0.01, drift=1.0, seed=seed)
            promoted[us] += timer.confirm(config(us, N=1), seed=0, rounds=15).is_better
    assert promoted[100] <= 12
    assert promoted[97] >= 180


def test_noise_shrinks_with_rounds_but_not_below_what_a_control_shows():
    rng = random.Random(0)
    ratios = [rng.gauss(1, 0.02) for _ in range(400)]
    assert noise_of(ratios[:25]) == pytest.approx(0.01, rel=0.5)
    assert noise_of(ratios) == pytest.approx(0.0025, rel=0.3)
    assert noise_of(ratios, [1.03, 1.03, 1.0]) == pytest.approx(0.03)
    assert noise_of([1.0] * 9) == MIN_NOISE
    assert noise_of([1.0]) == math.inf


def test_the_roof_is_reached_within_five_percent():
    assert is_roof_reached(10.0, 9.6)
    assert not is_roof_reached(10.0, 9.4)
    assert not is_roof_reached(10.0, None)


def test_a_maker_is_named_by_module_and_function():
    assert load_maker("math:sqrt") is math.sqrt
    for target in ("math", "math:", "math:nothing", "no.such:thing", ":x"):
        with pytest.raises(ValueError, match="make must be a function, as module:name"):
            load_maker(target)


@pytest.mark.parametrize(
    ("error", "invalid", "reason"),
    [
        (WrongResultError("off by one"), "correctness", "off by one"),
        (MemoryError("no room"), "over-limit", "MemoryError: no room"),
        (torch.OutOfMemoryError("CUDA out of memory"), "over-limit", "CUDA out of"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "over-limit", "Triton"),
        (OutOfResources(300, 200, "shared memory"), "resources", "Required: 300"),
        (PTXASError("bad code"), "compile", "PTXASError"),
        (RuntimeError("PassManager::run failed"), "compile", "PassManager"),
        (RuntimeError("CUDA error: an illegal\nmore"), "runtime", "an illegal"),
        (ValueError("PACK must be"), "runtime", "ValueError: PACK must be"),
        (KeyError(), "runtime", "KeyError: "),
    ],
)
def test_failures_have_reasons(error, invalid, reason):
    found, message = failure_of(error)
    assert found == invalid
    assert found in INVALID_REASONS
    assert reason in message
    assert "\n" not in message


@pytest.mark.gpu
def test_a_graph_is_timed_on_the_gpu(device):
    x = torch.zeros(1 << 24, device=device)
    contestant = Contestant([lambda: x.add_(1)], lambda: 0.0)
    contestant.calls[0]()
    runner = measuring.Runner(contestant, device)
    for turn_us in (measuring.TRIAL_TURN_US, measuring.CONFIRM_TURN_US):
        times = [runner.turn(turn_us) for _ in range(5)]
        assert 5 < min(times) <= max(times) < 2 * min(times)
