# SPDX-License-Identifier: Apache-2.0
"""Entries that nobody has measured: what they must say, and when they serve."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from record_fakes import (
    DEFAULT,
    DIGEST,
    log_lines,
    make_config,
    make_key,
    make_portfolio,
    make_record,
)

from portable_backend import cli
from portable_backend.commands import cache
from portable_backend.errors import RecordError
from portable_backend.warmup.layers import PORTFOLIO, Layer, WritableLayer
from portable_backend.warmup.lookup import GRADES, Lookup
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tables import format_table, merge_records
from portable_backend.warmup.upkeep import Measurement, verify

GPU, ARCH = "nvidia_a100-sxm4-80gb", "sm80"
ENVIRONMENT = Environment(GPU, ARCH, {"decode": DIGEST}, {"triton": "3.6.0"}, 108)
TOLD = {
    "basis": "sweeps",
    "fitted_on": ["nvidia_h200"],
    "num_units": 108,
    "serves": True,
    "reason": None,
}
PREDICTED = make_config(128)


def prediction(key=None, told=None, **fields) -> TuningRecord:
    usual = {
        "config": PREDICTED,
        "gpu": "nvidia_a100",
        "arch": ARCH,
        "time_us": None,
        "default_us": None,
        "error_ratio": None,
        "verified": False,
        "measured": None,
        "trials": None,
        "toolchain": {},
        "unmeasured": TOLD | (told or {}),
    }
    return make_record(key, **usual | fields)


@pytest.fixture
def look(tmp_path):
    """A lookup among shipped records, and others in the user's cache."""

    def look(*shipped, own=(), environment=ENVIRONMENT):
        WritableLayer("", tmp_path / "shipped").merge_in(shipped)
        WritableLayer("", tmp_path / "own").merge_in(own)
        store = RecordStore.open(tmp_path / "own", shipped=tmp_path / "shipped")
        return Lookup(store, environment, lambda key: DEFAULT)

    return look


def test_a_prediction_survives_its_table():
    record = prediction()
    text = format_table("decode", record.gpu, merge_records([record]))
    assert json.loads(text)["records"][0]["time_us"] is None
    assert json.loads(text)["records"][0]["unmeasured"]["basis"] == "sweeps"


def test_a_prediction_read_again_is_the_same(tmp_path):
    WritableLayer("", tmp_path).merge_in([prediction()])
    held = Layer("", tmp_path).load_file("decode", "nvidia_a100")
    assert (held.records, held.problems) == ((prediction(),), ())


def test_a_measured_entry_says_nothing_of_it():
    assert "unmeasured" not in make_record().to_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time_us": 4.5}, "time_us must be .* or null in an entry that says"),
        ({"unmeasured": None}, "time_us must be .* or null in an entry that says"),
        ({"verified": True}, "verified must be false where unmeasured is given"),
        ({"unmeasured": {}}, "unmeasured must be null or an object of basis, "),
        ({"unmeasured": TOLD | {"basis": "hope"}}, "unmeasured must be null or"),
        ({"unmeasured": TOLD | {"serves": "yes"}}, "unmeasured must be null or"),
        ({"unmeasured": TOLD | {"num_units": 0}}, "unmeasured must be null or"),
        ({"unmeasured": TOLD | {"fitted_on": "h200"}}, "unmeasured must be null or"),
    ],
)
def test_a_prediction_with_a_time_or_without_its_grounds_is_refused(fields, message):
    with pytest.raises(RecordError, match=message):
        prediction(**fields)


def test_a_prediction_takes_the_defaults_place_under_its_own_grade(look):
    with log_lines() as lines:
        choice = look(prediction(make_key(8192))).choose(make_key(4096))
    assert (choice.grade, choice.config) == ("unmeasured", PREDICTED)
    assert choice.layer == "shipped"
    assert choice.reasons == ("shipped: predicted from sweeps, not measured",)
    assert lines == []  # no toolchain made any time of it
    assert GRADES.index("family") < GRADES.index("unmeasured")


def measured(**fields):
    return make_record(gpu=GPU, arch=ARCH, toolchain={"triton": "3.6.0"}, **fields)


@pytest.mark.parametrize(
    ("grade", "own"),
    [
        ("exact", measured()),
        ("nearest", measured(key=make_key(8192))),
        ("family", replace(measured(key=make_key(8192)), gpu="nvidia_a30")),
    ],
)
def test_whatever_was_measured_wins(look, grade, own):
    choice = look(prediction(), own=[own]).choose(make_key())
    assert (choice.grade, choice.record) == (grade, own)


def test_a_measured_portfolio_wins(look, tmp_path):
    lookup = look(prediction())
    portfolio = make_portfolio(gpu=GPU, arch=ARCH, toolchain={"triton": "3.6.0"})
    path = tmp_path / "shipped" / "decode" / f"{GPU}{PORTFOLIO}"
    path.write_text(portfolio.to_text())
    assert lookup.choose(make_key()).grade == "portfolio"


@pytest.mark.parametrize(
    ("told", "environment", "reason"),
    [
        ({"serves": False, "reason": "too little"}, {}, "default stays: too little"),
        ({"fitted_on": [GPU]}, {}, f"its model was fitted on {GPU}"),
        ({"num_units": 56}, {}, "it is for 56 units, here are 108"),
        ({}, {"num_units": None}, "here their number is not known"),
        ({}, {"digests": {"decode": "sha256:bb"}}, "kernel_digest: wanted sha256:bb"),
    ],
)
def test_the_default_stays_and_says_why(look, told, environment, reason):
    lookup = look(
        prediction(told=told), environment=replace(ENVIRONMENT, **environment)
    )
    choice = lookup.choose(make_key())
    assert (choice.grade, choice.config) == ("default", DEFAULT)
    assert any(reason in text for text in choice.reasons), choice.reasons


def test_another_architecture_sees_nothing_of_a_prediction(look):
    environment = replace(ENVIRONMENT, arch="sm86")
    assert look(prediction(), environment=environment).choose(make_key()).grade == (
        "default"
    )


def test_a_gpu_of_the_very_name_needs_no_number_of_units(look):
    environment = replace(ENVIRONMENT, gpu="nvidia_a100", num_units=None)
    choice = look(prediction(), environment=environment).choose(make_key())
    assert choice.grade == "unmeasured"


def test_the_nearest_prediction_decides_for_its_size(look):
    stays = prediction(make_key(8192), {"serves": False})
    lookup = look(stays, prediction(make_key(2048), config=make_config(16)))
    assert lookup.choose(make_key(6000)).grade == "default"
    assert lookup.choose(make_key(2500)).config == make_config(16)


def test_a_config_outside_todays_space_is_passed_over(look):
    lookup = look(prediction())
    lookup._space_check = lambda key, config: "too wide"
    choice = lookup.choose(make_key())
    assert choice.grade == "default"
    assert any("too wide" in reason for reason in choice.reasons)


def test_verifying_a_prediction_makes_a_measured_record_of_it(tmp_path):
    layer = WritableLayer("", tmp_path)
    layer.merge_in([prediction()])
    verify(layer, [prediction()], lambda record: Measurement(40.0, 1.0, 50.0))
    (after,) = layer.load_file("decode", "nvidia_a100").records
    assert (after.time_us, after.verified, after.unmeasured) == (40.0, True, None)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`portable-backend cache` on a shipped table with one prediction."""
    shipped = tmp_path / "shipped"
    WritableLayer("", shipped).merge_in([prediction()])
    monkeypatch.setattr(
        "portable_backend.warmup.store.shipped_folder", lambda: Path(shipped)
    )
    monkeypatch.setattr(cache, "current_digests", lambda: {"decode": DIGEST})
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(tmp_path / "own"))

    def run(*arguments):
        code = cli.main(["cache", *arguments])
        assert code == 0
        return capsys.readouterr().out

    return run


def test_lists_and_shows_say_that_nobody_measured_it(run):
    assert "1 records, 0 verified, 1 unmeasured" in run("list")
    assert json.loads(run("list", "--json"))[0]["unmeasured"] == 1
    assert run("show").startswith("nothing measured in any layer; --unmeasured shows 1")
    assert run("show", "--gpu", "nvidia_a100") == run("show", "--unmeasured")
    shown = run("show", "--unmeasured")
    assert "unmeasured, predicted from sweeps, serves" in shown
    assert " us" not in shown
    (row,) = json.loads(run("show", "--unmeasured", "--json"))
    assert row["time_us"] is None and row["unmeasured"]["num_units"] == 108


def test_explain_says_so_too(run, monkeypatch):
    monkeypatch.setattr(cache, "SPACE_CHECK", lambda key, config: None)
    fields = [f"{name}={value}" for name, value in make_key().fields]
    out = run("explain", "decode", *fields, "--gpu", "nvidia_a100", "--arch", "sm80")
    assert "unmeasured from shipped" in out
    assert "predicted from sweeps, not measured" in out
    assert "unmeasured: wanted measured" in out
