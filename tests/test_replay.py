# SPDX-License-Identifier: Apache-2.0
"""Recorded sweeps: read back as written, replayed the same each time."""

import gzip
import json
import statistics
from dataclasses import replace

import pytest
from search_cases import small_sweep
from synthetic_sweeps import KEYS, synthetic_sweep

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.replay import ReplayDevice
from portable_backend.warmup.search import Proposal
from portable_backend.warmup.sweeps import Row, read_sweep, read_sweeps, write_sweep

DEVICE = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
SWEEP = small_sweep(DEVICE)
VALID = [row for row in SWEEP.rows if row.times_us]
INVALID = next(row for row in SWEEP.rows if row.invalid)


def test_a_sweep_is_read_as_it_was_written(tmp_path):
    path = write_sweep(SWEEP, tmp_path / "new")
    assert read_sweep(path) == SWEEP
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_equal_sweeps_are_equal_files(tmp_path):
    first = write_sweep(SWEEP, tmp_path / "a").read_bytes()
    assert write_sweep(SWEEP, tmp_path / "b").read_bytes() == first


def test_a_folder_is_read_whole(tmp_path):
    other = replace(SWEEP, key={**SWEEP.key, "num_seqs": 1})
    for sweep in (SWEEP, other):
        write_sweep(sweep, tmp_path)
    assert read_sweeps(tmp_path) == [other, SWEEP]


def test_a_folder_without_sweeps_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^folder must be one with"):
        read_sweeps(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 10, 200])
def test_a_cut_off_sweep_is_refused_by_name(tmp_path, size):
    path = write_sweep(SWEEP, tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"a sweep of schema 1, got {path}"):
        read_sweep(path)


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"arch": "sm1"}, {"rows": [{"config": {}}]}, {"rows": 3}]
)
def test_a_sweep_that_makes_no_sense_is_refused_by_name(tmp_path, change):
    path = write_sweep(SWEEP, tmp_path)
    data = json.loads(gzip.decompress(path.read_bytes())) | change
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(ValueError, match=f"a sweep of schema 1, got {path}"):
        read_sweep(path)


@pytest.mark.parametrize(
    "arguments", [{}, {"times_us": (1.0,), "invalid": "runtime"}, {"invalid": "tired"}]
)
def test_a_row_is_either_timed_or_invalid(arguments):
    with pytest.raises(ValueError, match="must be"):
        Row(KernelConfig.of(BLOCK_N=16), **arguments)


def measured(device, row, rounds):
    [trial] = device.measure([Proposal(row.config, rounds)])
    return trial


def test_all_rounds_give_the_median_of_the_record():
    device = ReplayDevice(SWEEP)
    for row in VALID:
        assert measured(device, row, 9).time_us == statistics.median(row.times_us)


def test_fewer_rounds_are_noisier():
    errors = {}
    for rounds in (1, 3):
        devices = [ReplayDevice(SWEEP, seed=seed) for seed in range(20)]
        errors[rounds] = statistics.mean(
            abs(measured(device, row, rounds).time_us / row.time_us - 1)
            for device in devices
            for row in VALID
        )
    assert errors[1] > 1.3 * errors[3] > 0


def test_answers_depend_on_neither_order_nor_instance():
    proposals = [Proposal(row.config, r) for row in SWEEP.rows for r in (1, 3)]
    forward = list(ReplayDevice(SWEEP).measure(proposals))
    backward = list(ReplayDevice(SWEEP).measure(proposals[::-1]))[::-1]
    times = [trial.time_us for trial in forward]
    assert times == [trial.time_us for trial in backward]
    other = ReplayDevice(SWEEP, seed=1).measure(proposals)
    assert times != [trial.time_us for trial in other]


def test_trials_cost_and_seconds_are_counted():
    device = ReplayDevice(SWEEP, round_s=0.5)
    measured(device, VALID[0], 9)
    measured(device, VALID[0], 3)
    measured(device, INVALID, 9)
    assert (device.trials, device.compiled) == (3, 2)
    assert device.cost == pytest.approx(2 + 1 / 3)
    assert device.seconds == pytest.approx(1 + 12 * 0.5 + 1)


def test_an_invalid_config_answers_with_its_reason():
    trial = measured(ReplayDevice(SWEEP), INVALID, 1)
    assert (trial.time_us, trial.invalid, trial.reason) == (None, "correctness", "NaN")


def test_what_was_not_recorded_is_refused():
    device = ReplayDevice(SWEEP)
    with pytest.raises(ValueError, match=r"^config must be one of the sweep"):
        measured(device, Row(KernelConfig.of(BLOCK_N=7), (1.0,)), 1)
    with pytest.raises(ValueError, match=r"^rounds must be between 1 and the 9"):
        measured(device, VALID[0], 10)


@pytest.mark.parametrize("kernel", KEYS)
def test_synthetic_sweeps_say_so_and_resemble_each_other(tmp_path, kernel):
    """A tenth to a third invalid, a wide spread; the neighbour's best does well."""
    one, two = (synthetic_sweep(kernel, bucket) for bucket in (1, 2))
    assert one.synthetic
    assert read_sweep(write_sweep(one, tmp_path)).synthetic
    invalid = sum(row.invalid is not None for row in one.rows) / len(one.rows)
    assert 0.1 < invalid < 0.34
    times = [row.time_us for row in one.rows if row.time_us]
    assert statistics.median(times) / min(times) > 1.5
    best = next(row.config for row in one.rows if row.time_us == one.best_us)
    elsewhere = next(row.time_us for row in two.rows if row.config == best)
    assert two.best_us / elsewhere > 0.9
