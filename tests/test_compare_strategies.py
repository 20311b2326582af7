# SPDX-License-Identifier: Apache-2.0
"""How near strategies come to the optimum, on synthetic sweeps and recorded ones.

The synthetic ones say how the searches compare on such landscapes, not what a GPU would
gain. tests/sweeps holds what an H200 measured, recorded by scripts/record_sweeps.py.
`scripts/compare_strategies.py` prints the whole table for any folder of sweeps.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from search_cases import SEARCHERS, small_sweep
from synthetic_sweeps import KEYS, synthetic_sweep

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup.compare import Point, Run, geometric_mean, replay
from portable_backend.warmup.cost_model import CostModel, samples_of
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.sweeps import read_sweeps, write_sweep

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "sweeps"
# The ends of each kernel's range of keys; the seeds are fewer for the slow ones.
BUCKETS = (0, 3)
SEEDS = {"random": 20, "evolutionary": 20, "halving": 4, "bayesian": 5}


def runs_of(name, kernel, bucket, share=0.15, seeds=None, ranking=()):
    sweep = synthetic_sweep(kernel, bucket)
    space = ListedSpace(sweep.configs)
    return [
        replay(sweep, name, share=share, seed=seed, space=space, ranking=ranking)
        for seed in range(seeds or SEEDS[name])
    ]


def mean_quality(name):
    runs = [r for k in KEYS for b in BUCKETS for r in runs_of(name, k, b)]
    return geometric_mean(run.quality_at(0.15) for run in runs)


@pytest.mark.parametrize("name", ["evolutionary", "bayesian", "halving"])
def test_a_search_comes_within_a_percent_in_15_percent_of_the_trials(name):
    assert mean_quality(name) >= 0.99


@pytest.mark.parametrize("name", ["evolutionary", "bayesian", "halving"])
def test_so_it_does_on_what_a_gpu_measured(name):
    runs = []
    for sweep in read_sweeps(RECORDED):
        assert not sweep.synthetic
        space = ListedSpace(sweep.configs)
        runs += [
            replay(sweep, name, share=0.15, seed=seed, space=space)
            for seed in range(20)
        ]
    assert geometric_mean(run.quality_at(0.15) for run in runs) >= 0.99


def test_random_search_does_not():
    """Else the landscapes would be too easy to tell strategies apart."""
    assert mean_quality("random") < 0.97


@pytest.mark.parametrize("name", ["evolutionary", "halving"])
@pytest.mark.parametrize("kernel", KEYS)
def test_the_cost_models_warm_start_halves_the_trials_to_97_percent(kernel, name):
    """Trained on the kernel's other keys alone."""
    target = synthetic_sweep(kernel, 3)
    others = [synthetic_sweep(kernel, b) for b in range(5) if b != 3]
    model = CostModel("forest").fit([s for o in others for s in samples_of(o)])
    ranking = model.rank(target.configs, target.key, target.device)[:32]
    to_97 = [
        statistics.median(
            run.share_to(0.97)
            for run in runs_of(name, kernel, 3, seeds=5, ranking=start)
        )
        for start in ((), ranking)
    ]
    assert to_97[1] <= to_97[0] / 2 < 0.08  # not for want of reaching it


def test_shares_and_answers_are_counted_by_the_whole_record():
    sweep = small_sweep(DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"]))
    run = replay(sweep, "exhaustive", share=1)
    count = len(sweep.rows)
    first = next(i for i, row in enumerate(sweep.rows) if row.times_us)
    quality = sweep.best_us / sweep.rows[first].time_us
    assert run.points[0] == Point((first + 1) / count, (first + 1) / count, quality)
    assert run.points[-1].quality == 1
    assert run.seconds == pytest.approx(1)


def test_an_answer_that_got_worse_counts_as_it_is():
    points = (Point(0.1, 0.5, 0.8), Point(0.2, 0.6, 0.99), Point(0.3, 0.7, 0.9))
    run = Run("sweep", "halving", 0, points, 1.0)
    assert [run.quality_at(s) for s in (0.05, 0.1, 0.2, 1)] == [0, 0.8, 0.99, 0.9]
    assert (run.share_to(0.97), run.compiled_to(0.97)) == (0.2, 0.6)
    assert run.share_to(0.999) == float("inf")


def script(*arguments):
    path = ROOT / "scripts" / "compare_strategies.py"
    return subprocess.run(
        [sys.executable, "-P", str(path), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ,
    )


def test_the_script_prints_a_table_and_says_what_is_synthetic(tmp_path):
    device = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
    write_sweep(small_sweep(device), tmp_path)
    result = script(tmp_path, "--seeds", 1)
    assert result.returncode == 0, result.stderr
    assert "nobody measured" in result.stdout
    for name in SEARCHERS:
        assert f"| decode | {name} | " in result.stdout
    rows = json.loads(script(tmp_path, "--seeds", 1, "--json").stdout)
    assert [row["strategy"] for row in rows] == list(SEARCHERS)


def test_the_script_refuses_what_it_cannot_use(tmp_path):
    empty = script(tmp_path)
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "folder must be one with" in empty.stderr
    unknown = script(tmp_path, "--strategies", "luck")
    assert unknown.returncode == 2
    assert "known: exhaustive, random" in unknown.stderr
