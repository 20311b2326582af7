# SPDX-License-Identifier: Apache-2.0
"""Sharing seconds among units, and what to try first in them."""

import pytest
from search_cases import small_configs, time_of
from tuner_fakes import DEVICE, key_of

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.search import Trial
from portable_backend.warmup.shares import (
    ENOUGH_S,
    LEAST_S,
    NO_WAITS,
    Shares,
    Waits,
)
from portable_backend.warmup.trial_log import LogHeader, TrialLog
from portable_backend.warmup.tuning_report import Task
from portable_backend.warmup.warm_start import FROM_READY, FROM_RECORDS, warm_ranking

CONFIGS = small_configs()


def tasks(*weights):
    return [Task(key_of(n), weight) for n, weight in enumerate(weights, 1)]


def test_half_is_shared_by_weight_and_half_equally():
    units = tasks(3.0, 1.0)
    shares = Shares(units, 80, clock=lambda: 0)
    first = shares.grant(units[0])
    assert first == 0.5 * 40 + 0.5 * 60
    shares.settle(units[0], first)
    assert shares.grant(units[1]) == 80 - first


def test_what_is_left_over_goes_to_the_others_and_what_is_overdrawn_is_theirs():
    for spent, rest in ((10, 90), (90, 10)):
        units = tasks(1.0, 1.0)
        shares = Shares(units, 100, clock=lambda: 0)
        assert shares.grant(units[0]) == 50
        shares.settle(units[0], spent)
        assert shares.grant(units[1]) == rest


def test_no_unit_is_granted_more_than_the_clock_leaves():
    now = 0.0
    units = tasks(1.0, 1.0)
    shares = Shares(units, 100, clock=lambda: now)
    shares.grant(units[0])
    now = 95.0
    assert shares.grant(units[1]) == 5


def test_a_unit_may_wait_as_long_as_its_weight_counts_and_no_longer_than_there_is():
    now = 0.0
    units = tasks(3.0, 1.0, 0.0)
    shares = Shares(units, 12, clock=lambda: now)
    assert shares.grant(units[0]) == 0.5 * 4 + 0.5 * 9
    assert shares.waits(units[0]) == Waits(12 - 6.5, 4.5)
    shares.settle(units[0], 6.5)
    now = 6.5
    assert shares.grant(units[1]) == LEAST_S + 1.125
    assert shares.waits(units[1]) == Waits(1.375, 1.375)
    assert Shares(units, None).waits(units[0]) == NO_WAITS


def test_who_is_granted_enough_waits_in_that_time():
    units = tasks(3.0, 1.0)
    shares = Shares(units, 100, clock=lambda: 0)
    assert shares.grant(units[0]) > ENOUGH_S
    assert shares.waits(units[0]).compile_s == 0.0
    assert shares.waits(units[0]).start_s > 0.0


def test_lanes_multiply_what_there_is():
    units = tasks(1.0, 1.0, 1.0, 1.0)
    shares = Shares(units, 30, lanes=2, clock=lambda: 0)
    assert [shares.grant(unit) for unit in units[:2]] == [15, 15]


def test_the_last_units_get_none_rather_than_all_too_little():
    units = tasks(*[1.0] * 100)
    shares = Shares(units, 10, clock=lambda: 0)
    granted = [shares.grant(unit) for unit in units]
    assert granted[:4] == [LEAST_S, LEAST_S, LEAST_S, 1.0] and not any(granted[4:])


def test_without_a_budget_there_is_no_limit():
    units = tasks(1.0)
    assert Shares(units, None).grant(units[0]) is None
    with pytest.raises(ValueError, match=r"^budget_s must be"):
        Shares(units, -1)


def record(seq_len, config, **fields):
    usual = {"gpu": DEVICE.name, "arch": DEVICE.arch, "verified": True}
    usual |= {"time_us": 5.0, "kernel_digest": "sha256:aa"}
    return TuningRecord(key=key_of(seq_len), config=config, **usual | fields)


def test_near_keys_and_this_gpu_come_first():
    near, far, family, other = CONFIGS[3:7]
    records = [
        record(1024, other, gpu="nvidia_a100", arch="sm80"),
        record(1024, family, gpu="nvidia_h100"),
        record(64, far),
        record(2048, near),
        record(1024, CONFIGS[8], verified=False),
        record(1024, KernelConfig.of(BLOCK_N=1, num_warps=1)),  # of another space
    ]
    ranking = warm_ranking(key_of(1024), CONFIGS, DEVICE, records=records)
    assert ranking == [near, far, family, other]


def test_a_model_learns_from_the_logs_of_other_keys(tmp_path):
    for seq_len in (512, 2048):
        header = LogHeader("decode", key_of(seq_len).to_dict(), "g", "s", "r", 0, 9)
        with TrialLog(tmp_path / f"{seq_len}.jsonl", header) as log:
            for config in CONFIGS[seq_len == 512 :: 2]:
                log.append(Trial(config, 9, time_of(config)))
    (tmp_path / "broken.jsonl").write_text("{\n")
    start = warm_ranking(key_of(1024), CONFIGS, DEVICE, log_folder=tmp_path, limit=10)
    assert len(start) == 10
    assert time_of(start[0]) <= sorted(map(time_of, CONFIGS))[5]


def test_what_is_compiled_already_comes_before_what_is_not(tmp_path):
    """The best of it by the model, after what served neighbours."""
    header = LogHeader("decode", key_of(512).to_dict(), "g", "s", "r", 0, 9)
    with TrialLog(tmp_path / "512.jsonl", header) as log:
        for config in CONFIGS:
            log.append(Trial(config, 9, time_of(config)))
    arguments = {"log_folder": tmp_path, "records": [record(2048, CONFIGS[50])]}
    plain = warm_ranking(key_of(1024), CONFIGS, DEVICE, **arguments)
    compiled = plain[-1:1:-2]  # in whatever order

    def ready(configs):
        return [config for config in configs if config in compiled]

    ranking = warm_ranking(key_of(1024), CONFIGS, DEVICE, **arguments, ready=ready)
    assert ranking[0] == CONFIGS[50] and len(ranking) == len(plain)
    assert (
        ranking[1 : 1 + FROM_READY] == [c for c in plain if c in compiled][:FROM_READY]
    )
    assert set(ranking) == set(plain)


def test_a_keys_own_log_teaches_nothing(tmp_path):
    """Else a search that goes on would not choose as it did before."""
    header = LogHeader("decode", key_of(1024).to_dict(), "g", "s", "r", 0, 9)
    with TrialLog(tmp_path / "own.jsonl", header) as log:
        for config in CONFIGS:
            log.append(Trial(config, 9, time_of(config)))
    assert warm_ranking(key_of(1024), CONFIGS, DEVICE, log_folder=tmp_path) == []


def test_without_a_model_the_estimates_fill_up():
    estimated = CONFIGS[::-1]
    records = [record(2048, CONFIGS[n]) for n in range(FROM_RECORDS + 4)]
    ranking = warm_ranking(
        key_of(1024), CONFIGS, DEVICE, records=records, estimated=estimated, limit=32
    )
    assert len(ranking) == FROM_RECORDS + 16
    assert ranking[FROM_RECORDS:] == estimated[:16]
