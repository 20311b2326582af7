# SPDX-License-Identifier: Apache-2.0
"""PORTABLE_BACKEND_TUNE=startup: what is missing is tuned, in time, and serves."""

import logging
import os
import re
import time
from dataclasses import replace
from unittest import mock

import pytest
import start_tools
import torch
from record_fakes import permissions_bind
from test_tuned import DECODE, LIMITS, MODEL, keep, record

from portable_backend.device import DeviceInfo
from portable_backend.kernels.plan import StepKind
from portable_backend.settings import Settings
from portable_backend.warmup.buckets import decode_key
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.matching import Environment, current_toolchain
from portable_backend.warmup.spread import GpuCrew
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.timed_tuning import missing
from portable_backend.warmup.units import units_of

pytestmark = pytest.mark.vllm
ALL_EXACT = "decode exact 4; kv_cache exact 3; prefill exact 2"
DEFAULT = "decode default 4; kv_cache default 3; prefill default 2"


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """Starts an engine's builder; gives its planner, its grade and what it said."""
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    from backend_fakes import make_builder, make_impl, modules

    from portable_backend import tuned

    monkeypatch.setenv("PYTHONPATH", "")  # which start_tools sets
    pb = modules()

    def start(windows=(None,), again=False, **environ):
        values = {
            "PORTABLE_BACKEND_CACHE_DIR": str(tmp_path / "cache"),
            "PORTABLE_BACKEND_TUNE": "startup",
        } | environ
        settings = Settings.from_env(values)
        monkeypatch.setattr("portable_backend.settings.get_settings", lambda: settings)
        monkeypatch.setattr(
            "portable_backend.start_tuning.get_settings", lambda: settings
        )
        monkeypatch.setattr(tuned, "get_settings", lambda: settings)
        if not again:
            monkeypatch.setattr(tuned, "_told", tuned._Told())
            tuned._lookup.cache_clear()
        caplog.clear()
        caplog.set_level(logging.INFO, "vllm.portable_backend")
        impls = [make_impl(pb, sliding_window=window) for window in windows]
        builder = make_builder(pb, impls, torch.device("cpu"))
        lines = [x for x in caplog.messages if x.startswith("tuning records: ")]
        (grade,) = (re.fullmatch(r".*?: (.*); choices \w{8}", x)[1] for x in lines)
        ours = [x for x in caplog.records if x.name.startswith("vllm.portable")]
        warnings = [x.getMessage() for x in ours if x.levelno >= logging.WARNING]
        told = [x for x in caplog.messages if x.startswith(("tuned ", "tuning "))]
        return next(iter(builder.planners.values())), grade, warnings, told[:-1]

    yield start
    tuned._lookup.cache_clear()


def test_what_is_missing_is_tuned_and_serves_this_very_start(
    start, tmp_path, monkeypatch
):
    from portable_backend import tuned

    module = start_tools.use(monkeypatch.setattr)
    planner, grade, warnings, told = start(PORTABLE_BACKEND_TUNE_BUDGET_S="60")
    assert grade == ALL_EXACT and not warnings
    assert told[0] == "tuning 9 keys that lack records, for 60 s"
    assert (
        told[1].startswith("tuned 9 of 9 keys in ")
        and "(6 tuned, 3 default)" in told[1]
    )
    with RecordStore.open(tmp_path / "cache", shipped=tmp_path / "none") as store:
        records = {
            r.key: r
            for kernel in ("decode", "prefill", "kv_cache")
            for _, r in store.records(kernel)
        }
    assert len(records) == 9 and all(r.verified for r in records.values())
    for kind in StepKind.within(8):
        config = planner.config_for(kind)
        if not kind.mixed:
            best = records[decode_key(MODEL, LIMITS, num_seqs=kind.max_decodes)]
            assert config.decode == best.config
            assert config.decode != start_tools.make().catalog.default(best.key)
    assert 0 < tuned.tuning_s() == module._spent.seconds < 60

    # Another builder of the process, and the next start, have nothing to do.
    monkeypatch.setattr(GpuCrew, "_launch", mock.Mock(side_effect=AssertionError))
    assert start(again=True)[1:] == (ALL_EXACT, [], [])
    start_tools.use(monkeypatch.setattr)
    assert start()[1:] == (ALL_EXACT, [], [])
    other, grade, _, _ = start(PORTABLE_BACKEND_TUNE="load")
    assert grade == ALL_EXACT and other.configs() == planner.configs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour",
    [{"trial_s": 0.05}, {"trial_s": 30.0}, {"hangs": True}],
    ids=["slow", "very slow", "hangs"],
)
def test_the_budget_is_kept_within_a_tenth(start, monkeypatch, behaviour):
    budget_s = 12.0
    module = start_tools.use(monkeypatch.setattr, **behaviour)
    start(PORTABLE_BACKEND_TUNE_BUDGET_S="0")  # imports what it needs
    monkeypatch.setattr(module, "_spent", module._Spent())
    began = time.monotonic()
    planner, _, warnings, told = start(
        windows=(None, 16, 32), PORTABLE_BACKEND_TUNE_BUDGET_S=str(budget_s)
    )
    took = time.monotonic() - began
    assert took <= 1.1 * budget_s + 1  # the builder itself
    assert module._spent.seconds <= 1.1 * budget_s
    if behaviour == {"trial_s": 0.05}:
        assert module._spent.seconds >= 0.8 * budget_s
        # On a busy machine the child may not end by itself in the tenth that is left.
        said = warnings[0] if warnings else told[1]
        assert not warnings or "it did not end in time" in said
        assert "unreached" not in said.partition("(")[0]
        assert not said.startswith("tuned 0 of ")
    else:
        assert len(warnings) == 1 and "it did not end in time" in warnings[0]
        # On a busy machine the first key's time may end before its first trial.
        assert re.match("tuned [01] of ", warnings[0]), warnings
    assert planner.config_for(StepKind(4)).decode


@pytest.mark.parametrize("budget_s", ["0", "0.5"])
def test_without_a_budget_nothing_is_tuned(start, monkeypatch, budget_s):
    start_tools.use(monkeypatch.setattr)
    monkeypatch.setattr(GpuCrew, "_launch", mock.Mock(side_effect=AssertionError))
    for again in (False, True):
        _, grade, warnings, _ = start(
            again=again, PORTABLE_BACKEND_TUNE_BUDGET_S=budget_s
        )
        assert grade == DEFAULT
        expected = [] if again else [
            "nothing is tuned: 9 keys lack records, but of "
            f"PORTABLE_BACKEND_TUNE_BUDGET_S={budget_s} nothing is left"
        ]  # fmt: skip
        assert warnings == expected


def test_without_a_gpu_records_are_loaded_and_one_line_says_so(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr("portable_backend.start_tuning._spent.told", False)
    keep(tmp_path / "cache", record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    _, grade, warnings, told = start()
    assert (
        grade == "decode exact 1, nearest 3; kv_cache default 3; prefill default 2"
        and not told
    )
    assert len(warnings) == 1 and "startup needs a GPU" in warnings[0]
    assert not start(again=True)[2]


@pytest.mark.parametrize("how", ["dies", "does not start", "raises"])
def test_tuning_that_fails_is_one_warning(start, monkeypatch, how):
    start_tools.use(monkeypatch.setattr, dies=how == "dies")
    if how == "does not start":
        launch = mock.Mock(side_effect=OSError(12, "no memory"))
        monkeypatch.setattr(GpuCrew, "_launch", launch)
    if how == "raises":
        broken = mock.Mock(side_effect=RuntimeError("what"))
        monkeypatch.setattr("portable_backend.start_tuning.missing", broken)
    planner, grade, warnings, _ = start()
    assert grade == DEFAULT and len(warnings) == 1
    expected = "exit code 9" if how == "dies" else "nothing was tuned"
    assert expected in warnings[0]
    assert planner.config_for(StepKind(4)).decode


def test_what_the_cache_does_not_take_serves_this_start(start, tmp_path, monkeypatch):
    start_tools.use(monkeypatch.setattr)
    (tmp_path / "cache").mkdir(mode=0o555)
    with permissions_bind(children=True):
        _, grade, warnings, _ = start(PORTABLE_BACKEND_TUNE_BUDGET_S="60")
    assert grade == ALL_EXACT
    assert [x for x in warnings if "records are kept in this process only" in x]
    (line,) = [x for x in warnings if x.startswith("tuned 9 of 9 keys")]
    assert "could not be written" in line and len(warnings) == 2
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_candidates_are_compiled_to_where_the_engine_looks(
    start, tmp_path, monkeypatch, ahead
):
    """With compiling ahead that is the user's folder, not one that vLLM sets."""
    module = start_tools.use(monkeypatch.setattr)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "vllm"))
    at_start = "portable_backend.plugin.TRITON_CACHE_AT_START"
    monkeypatch.setattr(at_start, str(tmp_path / "user"))
    seen = []

    def tune_in_time(tasks, *_, **__):
        seen.append(os.environ["TRITON_CACHE_DIR"])
        return module.TimedTuning()

    monkeypatch.setattr(module, "tune_in_time", tune_in_time)
    start(PORTABLE_BACKEND_COMPILE_AHEAD=ahead)
    assert seen == [str(tmp_path / ("user" if ahead == "on" else "vllm"))]
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "vllm")


def test_only_the_rank_that_decides_tunes(start, monkeypatch):
    start_tools.use(monkeypatch.setattr)
    monkeypatch.setattr(GpuCrew, "_launch", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr("portable_backend.ranks.decides", lambda: False)
    _, grade, warnings, told = start()
    assert grade == DEFAULT
    assert not warnings and not told


def test_nothing_is_tuned_while_a_graph_is_captured(start, monkeypatch):
    start_tools.use(monkeypatch.setattr)
    monkeypatch.setattr(GpuCrew, "_launch", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr("portable_backend.start_tuning.capturing", lambda: True)
    _, _, warnings, told = start()
    assert not warnings and not told


def test_only_keys_without_a_good_record_are_tuned_by_their_share(tmp_path):
    """Of all layers, and those first that more layers and longer steps need."""
    from portable_backend import start_tuning

    few, many = MODEL, replace(MODEL, windows=((16, 1),))
    tasks = start_tuning._tasks({few: 2, many: 20}, LIMITS, 8)
    weights = {task.key: task.weight for task in tasks}
    assert len(weights) == len(tasks) == 12 + 3
    for model, layers in ((few, 2), (many, 20)):
        units = {unit.key: unit.weight for unit in units_of(model, LIMITS)}
        own = [key for key in weights.keys() & units.keys() if key.kernel != "kv_cache"]
        assert len(own) == 6
        for key in own:
            assert weights[key] == pytest.approx(layers * units[key])
    keep(tmp_path, record(decode_key(few, LIMITS, num_seqs=8), DECODE))
    device = DeviceInfo.detect("cpu")
    lookup = Lookup(
        RecordStore.open(tmp_path, shipped=tmp_path / "none"),
        Environment(device.name, device.arch, current_digests(), current_toolchain()),
        start_tools.make().catalog.default,
    )
    left = missing(tasks, lookup)
    grades = {task.key: lookup.choose(task.key).grade for task in tasks}
    assert {grades[task.key] for task in left} == {"default"}
    rest = {grades[t.key] for t in tasks if t not in left}
    assert rest == {"exact", "nearest"}
    shares = [task.weight for task in left]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] > 0


def test_a_gpus_tools_take_what_is_free_and_see_that_gpu_alone(monkeypatch):
    from portable_backend import start_tuning

    free = mock.Mock(return_value=(30 << 30, 120 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6,7")
    options = start_tuning._recipe(torch.device("cuda:1")).options
    assert options["device"] == "cuda:0"
    assert options["measuring"]["device_memory_share"] == 0.225
    assert start_tuning._visible_name(torch.device("cuda")) == "GPU-5"
    assert start_tuning._visible_name(torch.device("cuda:3")) == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert start_tuning._visible_name(torch.device("cuda:3")) == "3"
