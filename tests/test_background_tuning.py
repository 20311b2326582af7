# SPDX-License-Identifier: Apache-2.0
"""PORTABLE_BACKEND_TUNE=background: an engine's steps, its tuner, its next start."""

import json
import logging
import re
import subprocess
import sys
import time
from unittest import mock

import pytest
import start_tools
import torch
from record_fakes import permissions_bind
from test_tuned import DECODE, LIMITS, MODEL, keep, record

from portable_backend import metrics
from portable_backend.device import DeviceInfo
from portable_backend.settings import Settings
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.background import status_path
from portable_backend.warmup.buckets import decode_key

pytestmark = pytest.mark.vllm
DEFAULT = "decode default 4; kv_cache default 3; prefill default 2"
ALL_EXACT = "decode exact 4; kv_cache exact 3; prefill exact 2"


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """Starts an engine's builder; gives it, its grade and its warnings."""
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    from backend_fakes import make_builder, make_impl, modules

    from portable_backend import background_tuning, tuned

    monkeypatch.setenv("PYTHONPATH", "")  # which start_tools sets
    pb = modules()

    def start(windows=(None,), **environ):
        values = {
            "PORTABLE_BACKEND_CACHE_DIR": str(tmp_path / "cache"),
            "PORTABLE_BACKEND_TUNE": "background",
        } | environ
        settings = Settings.from_env(values)
        monkeypatch.setattr("portable_backend.settings.get_settings", lambda: settings)
        for module in (background_tuning, tuned):
            monkeypatch.setattr(module, "get_settings", lambda: settings)
        monkeypatch.setattr(
            "portable_backend.start_tuning.get_settings", lambda: settings
        )
        monkeypatch.setattr(background_tuning, "_call_when_ready", lambda call: None)
        monkeypatch.setattr(tuned, "_told", tuned._Told())
        tuned._lookup.cache_clear()
        caplog.clear()
        caplog.set_level(logging.INFO, "vllm.portable_backend")
        impls = [make_impl(pb, sliding_window=window) for window in windows]
        builder = make_builder(pb, impls, torch.device("cpu"))
        lines = [x for x in caplog.messages if x.startswith("tuning records: ")]
        (grade,) = (re.fullmatch(r".*?: (.*); choices \w{8}", x)[1] for x in lines)
        return builder, grade

    yield start
    if process := background_tuning._state.process:
        process.kill()
    tuned._lookup.cache_clear()


def warnings(caplog):
    ours = [x for x in caplog.records if x.name.startswith("vllm.portable")]
    return [x.getMessage() for x in ours if x.levelno >= logging.WARNING]


def wait_for(module, *states):
    # Long, since it runs on CPUs that nobody else wants.
    ends = time.monotonic() + 240
    while module.status().get("state") not in states:
        assert time.monotonic() < ends, module.status()
        time.sleep(0.05)
    if module._state.process is not None:
        module._state.process.wait(60)
    return module.status()


def test_what_is_missing_is_tuned_while_it_serves_and_exact_at_the_next_start(
    start, tmp_path, monkeypatch, caplog
):
    module = start_tools.use_beside(monkeypatch.setattr, tmp_path)
    # One is near another's record, which is no work for `startup`.
    keep(tmp_path / "cache", record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    builder, grade = start()
    assert grade == "decode exact 1, nearest 3; kv_cache default 3; prefill default 2"
    configs = next(iter(builder.planners.values())).configs()
    assert module.status() == {} and module._state.process is None
    module.begin()
    module.begin()  # once
    status = wait_for(module, "done", "given up")
    assert status["state"] == "done" and status["done"] == status["keys"] == 8
    assert status["trials"] > 8
    lines = [x for x in caplog.messages if x.startswith("background tuning")]
    assert lines[0].startswith("background tuning: 8 of 9 keys lack records")
    assert len([x for x in lines if " tuned, 2." in x or " tuned, 1." in x]) == 5
    assert "the next start serves them" in lines[-1]
    assert not warnings(caplog)
    # What runs has not changed; the next engine has all, and nothing to do.
    assert next(iter(builder.planners.values())).configs() == configs
    monkeypatch.setattr(module, "_state", module._State())
    monkeypatch.setattr(module, "_attend", mock.Mock(side_effect=AssertionError))
    _, grade = start()
    assert grade == ALL_EXACT
    module.begin()
    assert module.status()["keys"] == 0
    assert "0 of 9 keys lack records of their own, nothing" in caplog.text
    held = json.loads(status_path(tmp_path / "cache", "interpreter").read_text())
    assert held["state"] == "done" and held["trials"] == status["trials"]


def test_each_step_is_marked_and_postpones_the_tuner(start, tmp_path, monkeypatch):
    from backend_fakes import make_step

    module = start_tools.use_beside(monkeypatch.setattr, tmp_path)
    builder, _ = start()
    looked = Activity(tmp_path / "test")
    step = make_step(torch.device("cpu"))
    before = looked.last_step()
    builder.build(0, step.common)
    assert looked.last_step() > before
    module.begin()
    ends = time.monotonic() + 8  # in which a process comes up
    while time.monotonic() < ends:
        builder.build(0, step.common)
        time.sleep(0.05)
    assert module.status()["trials"] == 0
    assert wait_for(module, "done", "given up")["done"] == 9


def test_modes_without_a_tuner_mark_nothing(start, tmp_path, monkeypatch):
    start_tools.use_beside(monkeypatch.setattr, tmp_path)
    builder, _ = start(PORTABLE_BACKEND_TUNE="load")
    assert builder._beacon is None and not (tmp_path / "test").exists()


def test_only_the_rank_that_decides_tunes(start, tmp_path, monkeypatch, caplog):
    module = start_tools.use_beside(monkeypatch.setattr, tmp_path)
    monkeypatch.setattr("portable_backend.ranks.decides", lambda: False)
    builder, grade = start()
    module.begin()
    assert builder._beacon is None and grade == DEFAULT
    assert module.status() == {} and not warnings(caplog)


def test_without_a_gpu_records_are_loaded_and_one_line_says_so(
    start, tmp_path, monkeypatch, caplog
):
    from portable_backend import background_tuning

    monkeypatch.setattr(background_tuning, "_state", background_tuning._State())
    keep(tmp_path / "cache", record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    builder, grade = start()
    background_tuning.begin()
    assert grade == "decode exact 1, nearest 3; kv_cache default 3; prefill default 2"
    (warning,) = warnings(caplog)
    assert "background needs a GPU" in warning and builder._beacon is None
    start()
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "how", ["dies", "raises", "no room", "no process", "no beacon"]
)
def test_tuning_that_fails_is_one_warning(start, tmp_path, monkeypatch, caplog, how):
    module = start_tools.use_beside(monkeypatch.setattr, tmp_path, dies=how == "dies")
    if how == "raises":
        monkeypatch.setattr(module, "missing", mock.Mock(side_effect=RuntimeError(1)))
    if how == "no room":
        monkeypatch.setattr(module, "_recipe", mock.Mock(side_effect=MemoryError("1")))
    if how == "no process":
        failing = mock.Mock(side_effect=OSError(12, "no memory"))
        monkeypatch.setattr(module.subprocess, "Popen", failing)
    if how == "no beacon":
        (tmp_path / "test").symlink_to(tmp_path)
    builder, grade = start()
    module.begin()
    ends = time.monotonic() + 240
    while not warnings(caplog) and time.monotonic() < ends:
        time.sleep(0.05)
    (warning,) = warnings(caplog)
    assert grade == DEFAULT and (builder._beacon is None) == (how == "no beacon")
    said = {
        "dies": "exit code 9",
        "no process": "has ended, the engine serves on",
    }
    assert said.get(how, "nothing is tuned in the background") in warning


def test_a_cache_that_takes_nothing_is_one_warning(
    start, tmp_path, monkeypatch, caplog
):
    module = start_tools.use_beside(monkeypatch.setattr, tmp_path)
    (tmp_path / "cache").mkdir(mode=0o555)
    with permissions_bind(children=True):
        start()
        module.begin()
        wait_for(module, "given up")
    (warning,) = warnings(caplog)
    assert "takes no records" in warning and "9 keys are left" in warning


def test_memory_is_a_part_of_what_is_free_and_too_little_is_told(monkeypatch):
    from portable_backend import background_tuning as module

    free = mock.Mock(return_value=(10 << 30, 120 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(module, "available_cpus", lambda: 12)
    beacon = mock.Mock(path="/dev/shm/x")
    info = DeviceInfo.detect("cpu")
    options = module._recipe(info, torch.device("cuda"), beacon).options
    assert options["memory_mib"] == (10 * 1024 - 600) // 2
    assert options["workers"] == 3
    free.return_value = (1 << 30, 24 << 30)
    with pytest.raises(MemoryError, match=r"1024 MiB .* are free beside the engine"):
        module._recipe(info, torch.device("cuda"), beacon)


def test_tuning_begins_when_a_worker_of_any_class_is_ready(monkeypatch):
    pytest.importorskip("vllm", reason="needs vLLM's worker")
    from vllm.v1.worker.worker_base import WorkerBase

    from portable_backend import background_tuning as module

    called = []

    class Worker(WorkerBase):
        def __init__(self):
            pass

        def compile_or_warm_up_model(self):
            called.append("graphs")
            return 7.5

    class Later(Worker):
        pass

    originals = {
        cls: cls.__dict__[module._LAST_STEP_OF_START]
        for cls in (WorkerBase, *WorkerBase.__subclasses__())
        if module._LAST_STEP_OF_START in cls.__dict__
    }
    try:
        for _ in range(2):  # builders are made several times
            module._call_when_ready(lambda: called.append("ready"))
        assert Later().compile_or_warm_up_model() == 7.5
        assert called == ["graphs", "ready"]
    finally:
        for cls, original in originals.items():
            setattr(cls, module._LAST_STEP_OF_START, original)


def test_trials_are_on_metrics(tmp_path):
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client import multiprocess

    code = (
        f"import os; os.environ[{metrics.VARIABLE!r}] = {str(tmp_path)!r}\n"
        "from portable_backend.metrics import publish_trials\n"
        "publish_trials(3); publish_trials(4)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    text = prometheus.generate_latest(registry).decode()
    assert "portable_backend_background_trials_total 7.0" in text


def test_choices_tell_how_far_it_is(tmp_path, monkeypatch):
    from backend_fakes import modules

    from portable_backend import background_tuning
    from portable_backend.worker_extension import PortableWorkerExtension

    modules()  # imported later, they would keep the settings below
    settings = Settings.from_env({"PORTABLE_BACKEND_TUNE": "background"})
    monkeypatch.setattr("portable_backend.settings.get_settings", lambda: settings)
    state = background_tuning._State(status={"state": "tuning", "trials": 3})
    monkeypatch.setattr(background_tuning, "_state", state)
    choices = PortableWorkerExtension().portable_choices()
    assert choices["background"] == {"state": "tuning", "trials": 3}
