# SPDX-License-Identifier: Apache-2.0
"""The cost model: ranks the configs of a key that it has never seen."""

import statistics
import sys

import pytest
from search_cases import small_sweep, time_of
from synthetic_sweeps import KEYS, synthetic_sweep

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.cost_model import (
    CostModel,
    Sample,
    features,
    rank_configs,
    samples_of,
    samples_of_trials,
)
from portable_backend.warmup.search import Trial

DEVICE = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
SWEEP = small_sweep(DEVICE)
KEY = {"num_seqs": 16, "seq_len": 1024, "dtype": "bfloat16"}
TRAINED = ("boosting", "forest")


@pytest.mark.parametrize("model", TRAINED)
@pytest.mark.parametrize("kernel", KEYS)
def test_the_first_of_an_unseen_key_are_near_its_optimum(model, kernel):
    """The best of the first 16 loses 5 % at most; a config in the middle, half."""
    target = synthetic_sweep(kernel, 2)
    others = [synthetic_sweep(kernel, bucket) for bucket in (0, 1, 3, 4)]
    fitted = CostModel(model).fit([s for o in others for s in samples_of(o)])
    ranking = fitted.rank(target.configs, target.key, target.device)
    assert sorted(map(repr, ranking)) == sorted(map(repr, target.configs))
    times = {row.config: row.time_us or float("inf") for row in target.rows}
    assert target.best_us / min(times[c] for c in ranking[:16]) >= 0.95
    assert target.best_us / statistics.median(times.values()) < 0.6


@pytest.mark.parametrize("model", TRAINED)
def test_equal_samples_and_seeds_rank_alike(model):
    samples = samples_of(SWEEP)
    rankings = [
        rank_configs(model, samples, SWEEP.configs, KEY, DEVICE, limit=30, seed=5)
        for _ in range(2)
    ]
    assert rankings[0] == rankings[1]
    assert len(rankings[0]) == 30


def test_keys_of_any_scale_count_alike():
    """Times a thousand times as long for another key leave the ranking as it was."""
    slow = [
        Sample(
            s.config, {**s.key, "num_seqs": 64}, DEVICE, s.time_us and 1e3 * s.time_us
        )
        for s in samples_of(SWEEP)
    ]
    model = CostModel("forest").fit(samples_of(SWEEP) + slow)
    predicted = model.predict(SWEEP.configs, KEY, DEVICE)
    assert abs(statistics.median(predicted)) < 0.5
    assert time_of(model.rank(SWEEP.configs, KEY, DEVICE)[0]) < 13


def test_invalid_configs_rank_last():
    samples = [
        Sample(s.config, s.key, DEVICE, None if s.config["num_warps"] == 2 else 5.0)
        for s in samples_of(SWEEP)
    ]
    ranking = CostModel("forest").fit(samples).rank(SWEEP.configs, KEY, DEVICE)
    invalid = [config["num_warps"] == 2 for config in ranking]
    assert invalid == sorted(invalid)


def test_a_search_of_a_neighbouring_key_can_train_it():
    trials = [Trial(c, 9, time_of(c)) for c in SWEEP.configs[::2]]
    samples = samples_of_trials(trials, SWEEP.key, DEVICE)
    ranking = CostModel("forest").fit(samples).rank(SWEEP.configs, KEY, DEVICE)
    assert time_of(ranking[0]) <= sorted(map(time_of, SWEEP.configs))[10]


def test_the_model_can_be_switched_off_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert rank_configs("off", [], SWEEP.configs, KEY, DEVICE, limit=9) == []


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(UnsupportedError, match=r"portable-backend\[tune\]"):
        CostModel()


def test_an_unknown_model_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^model must be one of boosting, forest, got"
    ):
        CostModel("oracle")


def test_a_model_without_samples_is_refused():
    with pytest.raises(ValueError, match=r"^samples must be two or more"):
        CostModel().fit([Sample(SWEEP.configs[0], KEY, DEVICE, 1.0)])
    with pytest.raises(ValueError, match=r"^model must be fitted"):
        CostModel().predict(SWEEP.configs, KEY, DEVICE)


def test_features_are_logarithms_categories_and_what_follows():
    config = KernelConfig.of(BLOCK_N=64, LOAD="pointer", num_warps=4, launch_pdl=None)
    found = features(config, {"seq_len": 4096, "is_causal": True, "window": 0}, DEVICE)
    assert found["config.BLOCK_N"] == 6
    assert found["config.LOAD"] == "pointer"
    assert found["config.launch_pdl"] == "None"
    assert found["key.seq_len"] == 12
    assert found["key.is_causal"] == "True"
    assert found["key.window"] == -1
    assert found["bytes_in_flight"] == 15  # keys and values of 64 * 128 * 2 bytes
    assert found["tile_elements"] == 10


def test_more_stages_are_more_bytes_in_flight():
    found = [
        features(KernelConfig.of(BLOCK_N=64, num_stages=s), KEY, DEVICE) for s in (2, 3)
    ]
    assert found[1]["bytes_in_flight"] == found[0]["bytes_in_flight"] + 1
    assert found[1]["programs_per_unit"] < found[0]["programs_per_unit"]
