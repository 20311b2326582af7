# SPDX-License-Identifier: Apache-2.0
"""Ranking configs of sweeps that the model has not seen, and when to believe it."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.warmup.predicted_tables import Model, _why_default, measured_all
from portable_backend.warmup.prediction import (
    HeldOut,
    Predictor,
    across_heads,
    held_out,
    leave_one_out,
    margin,
)
from portable_backend.warmup.ratios import NAMES, ratios
from portable_backend.warmup.readouts import FILE, Readouts
from portable_backend.warmup.resources import Readout
from portable_backend.warmup.sweeps import read_sweeps

FOLDER = Path(__file__).with_name("sweeps")
# Of a first choice next to the optimum: what was asked for.
WITHIN = 1.10


@pytest.fixture(scope="module")
def items():
    return measured_all(read_sweeps(FOLDER), Readouts(FOLDER / FILE))


@pytest.fixture(scope="module")
def outcomes(items):
    return leave_one_out(items)


def by_kernel(outcomes):
    kernels = sorted({outcome.sweep.kernel for outcome in outcomes})
    return [[o for o in outcomes if o.sweep.kernel == kernel] for kernel in kernels]


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def test_the_first_choice_for_a_held_out_sweep_is_within_a_tenth_of_its_optimum(
    outcomes,
):
    assert {outcome.sweep.device.name for outcome in outcomes} == {"nvidia_h200"}
    assert len(outcomes) >= 3
    for group in by_kernel(outcomes):
        assert mean([outcome.first for outcome in group]) <= WITHIN
    decode = [o for o in outcomes if o.sweep.kernel == "decode"]
    assert max(outcome.first for outcome in decode) <= 1.05


def test_held_out_ranks_agree_with_measured_ones(outcomes):
    decode = [o for o in outcomes if o.sweep.kernel == "decode"]
    assert min(outcome.correlation for outcome in decode) >= 0.7
    correlations = [outcome.correlation for outcome in decode]
    estimates = [outcome.estimate_correlation for outcome in decode]
    assert sum(correlations) / len(decode) >= 0.8
    # What the sweeps teach is more than the resource model knows.
    assert sum(correlations) >= sum(estimates) + 0.1 * len(decode)


def test_heads_that_no_sweep_has_are_within_a_tenth_as_well(items):
    found = across_heads(items)
    assert len(found) >= 3
    for group in by_kernel(found):
        assert mean([outcome.first for outcome in group]) <= WITHIN


def test_equal_sweeps_give_equal_predictions(items):
    decode = [item for item in items if item.sweep.kernel == "decode"]
    one, two = (Predictor(decode[:2]).predict(decode[2].features) for _ in range(2))
    assert one == two


def test_a_sweep_cannot_be_held_out_from_itself(items):
    with pytest.raises(ValueError, match=r"^others must be other sweeps, got decode"):
        held_out(items[0], items)


def test_without_sweeps_the_resource_model_ranks_and_says_so(items):
    alone = Predictor()
    assert alone.basis == "resources"
    features = items[0].features
    predicted = alone.predict(features)
    order = sorted(range(len(features)), key=predicted.__getitem__)
    estimates = [features[i][0] for i in order]
    assert estimates == sorted(estimates)
    model = Model.of("kv_cache", [item.sweep for item in items], Readouts(None))
    assert (model.sweeps, model.fitted_on) == ((), [])
    assert model.predictor.basis == "resources"
    assert model.margin == math.inf


def test_what_no_unit_can_hold_comes_last(items):
    features = [None, *items[0].features[:3]]
    assert Predictor(items[:1]).predict(features)[0] == math.inf


def outcome(*gains):
    return HeldOut(None, (), 1.0, 1.0, 1.0, 1.0, gains)


def test_the_margin_is_the_worst_mistake():
    assert margin([outcome((1.5, 1.2), (1.2, 0.9), (1.1, 0.8))]) == 1.2
    assert margin([outcome((1.5, 1.2)), outcome((1.6, 0.99))]) == 1.6
    assert margin([outcome((1.5, 1.2))]) == 1.0
    assert margin([]) == math.inf


@pytest.mark.parametrize(
    ("arch", "gain", "estimated", "reason"),
    [
        ("sm80", 1.9, 1.2, None),
        ("sm80", 1.05, 1.2, "a predicted gain of 1.05 is below"),
        ("sm80", 1.9, 0.9, "the resource model alone does not agree"),
        ("sm90", 1.9, 1.2, "it was chosen by measurements on sm90"),
        # A vendor that was never measured has to gain more.
        ("gfx942", 1.4, 1.2, "a predicted gain of 1.40 is below 1.69"),
        ("gfx942", 1.9, 1.2, None),
    ],
)
def test_a_default_gives_way_to_evidence_alone(items, arch, gain, estimated, reason):
    sweeps = tuple(item.sweep for item in items[:1])
    model = Model("decode", Predictor(), sweeps, frozenset(), (), 1.3)
    device, key = DeviceInfo.for_arch(arch), items[0].key
    found = _why_default(model, device, key, False, gain, estimated)
    assert (found or "").startswith(reason or "") and bool(found) == bool(reason)
    resources = replace(model, sweeps=())
    found = _why_default(resources, device, key, False, gain, estimated)
    assert found == "nothing of this kernel was measured"


def test_what_no_sweep_has_takes_more_evidence(items):
    sweeps = (items[0].sweep,)
    model = Model("decode", Predictor(), sweeps, frozenset(), (), 1.5)
    nvidia, amd = DeviceInfo.for_arch("sm80"), DeviceInfo.for_arch("gfx942")
    key = items[0].key
    other = type(key).from_dict("decode", key.to_dict() | {"head_size": 64})
    needed = [model.margin_on(d, k) for d in (nvidia, amd) for k in (key, other)]
    assert needed == [1.5, 1.5**2, 1.5**2, 1.5**3]


def test_features_are_ratios_to_the_devices_limits(items):
    """Twice as many requests on a GPU of twice the size look the same."""
    item = next(item for item in items if item.sweep.key.get("num_seqs") == 32)
    key, config, h200 = item.key, item.configs[0], item.sweep.device
    twice = type(key).from_dict(key.kernel, key.to_dict() | {"num_seqs": 64})
    found = ratios(key, config, h200)
    scaled = ratios(twice, config, replace(h200, num_units=2 * h200.num_units))
    assert scaled == pytest.approx(found, abs=0.02)
    assert ratios(twice, config, h200) != pytest.approx(found, abs=0.02)
    assert len(found) == len(NAMES)


def test_read_outs_replace_estimates(items):
    key, config, device = items[0].key, items[0].configs[0], items[0].sweep.device
    readout = Readout(100 << 10, 255, 12, 1, 0.0, num_warps=config["num_warps"])
    found = dict(zip(NAMES, ratios(key, config, device, readout), strict=True))
    assert (found["programs_fit"], found["registers"], found["spills"]) == (0, 1, 12)
    full = replace(readout, programs_per_unit=0)
    assert ratios(key, config, device, full) is None


def test_without_scikit_learn_the_error_names_the_extra(items, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(UnsupportedError, match=r"portable-backend\[tune\]"):
        Predictor(items[:1])
