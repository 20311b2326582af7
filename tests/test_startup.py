# SPDX-License-Identifier: Apache-2.0
"""Kernels are ready before an engine serves; what fails costs a warning."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from stub_suites import check_suite

from portable_backend.settings import Settings

pytestmark = pytest.mark.vllm
HOLD = """
import sys, time
from pathlib import Path
from portable_backend.startup import turn
with turn(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def startup(monkeypatch):
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    from backend_fakes import modules

    from portable_backend import startup

    modules()  # imported later, they would keep the settings below
    monkeypatch.setattr(startup, "_start", startup._Start())
    ahead = Settings.from_env({"PORTABLE_BACKEND_COMPILE_AHEAD": "on"})
    for place in ("portable_backend.settings", "portable_backend.startup"):
        monkeypatch.setattr(f"{place}.get_settings", lambda: ahead)
    return startup


@pytest.fixture
def build():
    """Makes a builder as an engine does, kernels and all."""
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    from backend_fakes import make_impl, make_spec, make_vllm_config, modules

    pb = modules()

    def build(**impl):
        config = make_vllm_config([make_impl(pb, **impl)])
        return pb.Builder(make_spec(), ["layer0"], config, torch.device("cpu"))

    return build


@pytest.mark.long
def test_starts_beside_a_stub_gpu():
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    check_suite("stub_startup", limit_s=600)


def test_workers_begin_when_weights_are_loaded():
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    check_suite("stub_early_start", limit_s=600)


@pytest.mark.parametrize(("switch", "calls"), [("off", 0), ("on", 1)])
def test_a_switch_decides_whether_kernels_are_compiled_ahead(
    build, monkeypatch, switch, calls
):
    prepare = mock.Mock()
    monkeypatch.setattr("portable_backend.startup.prepare_kernels", prepare)
    found = Settings.from_env({"PORTABLE_BACKEND_COMPILE_AHEAD": switch})
    monkeypatch.setattr("portable_backend.settings.get_settings", lambda: found)
    build()
    assert prepare.call_count == calls


def test_the_interpreter_has_nothing_to_prepare(startup, build, caplog, monkeypatch):
    monkeypatch.setattr(startup, "_make_ready", mock.Mock(side_effect=AssertionError))
    write = mock.Mock()
    monkeypatch.setattr(startup, "write_report", write)
    caplog.set_level(logging.INFO, "vllm.portable_backend")
    for _ in range(2):
        build()
    (line,) = [x for x in caplog.messages if "kernels ready" in x]
    assert line.startswith("0 kernels ready: 0 compiled, 0 were there, in 0.0 s")
    write.assert_not_called()


def test_a_failure_is_one_warning_and_the_engine_serves(
    startup, build, caplog, monkeypatch
):
    monkeypatch.setattr(startup, "_report", mock.Mock(side_effect=OSError("no disk")))
    builder = build()
    build()
    assert builder.planners
    (warning,) = [x for x in caplog.records if x.levelno >= logging.WARNING]
    assert "not compiled ahead" in warning.message
    assert "no disk" in str(warning.exc_info[1])


def test_a_triton_that_is_not_known_costs_one_warning(build, monkeypatch, caplog):
    """What compiles ahead needs parts of Triton that serving does not."""
    from backend_fakes import make_impl, modules

    from portable_backend import metadata

    pb = modules()
    metadata._warn_not_ahead.cache_clear()
    found = Settings.from_env({"PORTABLE_BACKEND_COMPILE_AHEAD": "on"})
    for place in ("settings", "impl"):
        monkeypatch.setattr(f"portable_backend.{place}.get_settings", lambda: found)
    monkeypatch.setitem(sys.modules, "portable_backend.startup", None)
    make_impl(pb).process_weights_after_loading(torch.float32)
    for _ in range(2):
        assert build().planners
    (warning,) = [x for x in caplog.records if x.levelno >= logging.WARNING]
    assert "not compiled ahead" in warning.getMessage()
    metadata._warn_not_ahead.cache_clear()


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "who knows"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "0"}, 8),
    ],
)
def test_a_containers_quota_of_cpus_counts(tmp_path, monkeypatch, files, cpus):
    from portable_backend.warmup.cpus import usable_cpus

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == cpus


def test_layers_are_told_apart_by_what_their_kernels_are_compiled_for(startup, build):
    sinks = torch.zeros(4)
    for options in ({}, {"logits_soft_cap": 30.0}, {"sinks": sinks}):
        build(**options)
    build(alibi_slopes=[0.5] * 4, sliding_window=16)
    traits = {(n.traits.softcap, n.traits.sinks, n.traits.alibi, n.model.windows)
              for n in startup._start.needs}  # fmt: skip
    plain = ((0, 1),)
    assert traits == {
        (0.0, False, False, plain),
        (30.0, False, False, plain),
        (0.0, True, False, plain),
        (0.0, False, True, ((16, 1),)),
    }
    assert any(need.traits.fp32_sinks for need in startup._start.needs)


def test_processes_take_turns_and_a_dead_one_frees_its_own(startup, tmp_path):
    folder = tmp_path / "cache"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(folder)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        with startup.turn(folder, timeout_s=0.3):  # does not wait for ever
            assert time.monotonic() - began >= 0.3
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        began = time.monotonic()
        with startup.turn(folder, timeout_s=60):
            assert time.monotonic() - began < 30
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_turn_that_is_not_to_be_had_is_a_warning(startup, tmp_path, caplog):
    (tmp_path / startup.LOCK).mkdir()
    with startup.turn(tmp_path, timeout_s=1):
        pass
    assert "without waiting for other processes" in caplog.text


@pytest.mark.parametrize("at_start", ["user", "", None])
def test_the_cache_is_the_users_or_tritons_whatever_vllm_sets(
    startup, tmp_path, monkeypatch, at_start
):
    chosen = at_start and str(tmp_path / at_start)
    monkeypatch.setattr(startup.plugin, "TRITON_CACHE_AT_START", chosen)
    monkeypatch.setattr(startup.knobs.cache, "home_dir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "vllm"))
    folder = startup.cache_folder()
    assert folder == tmp_path / (at_start or ".triton/cache")
    with startup.caching_in(folder):
        assert Path(startup.knobs.cache.dir) == folder
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "vllm")


def test_a_home_that_cannot_be_written_leaves_the_cache_to_vllm(
    startup, tmp_path, monkeypatch
):
    monkeypatch.setattr(startup.plugin, "TRITON_CACHE_AT_START", None)
    (tmp_path / ".triton").write_text("a file")
    monkeypatch.setattr(startup.knobs.cache, "home_dir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "vllm"))
    assert startup.cache_folder() == tmp_path / "vllm"


def test_a_variable_that_was_not_set_is_not_afterwards(startup, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with startup.caching_in(tmp_path):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert "TRITON_CACHE_DIR" not in os.environ


def test_serving_imports_no_tuner():
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    code = (
        "import sys, portable_backend.metadata\n"
        "names = ('optuna', 'sklearn', 'ray', 'portable_backend.warmup.tuner')\n"
        "sys.exit(', '.join(n for n in names if n in sys.modules) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
