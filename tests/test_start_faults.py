# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with its files, an engine starts and says its grade on one line.

Faults of Triton's cache are in stub_start_faults.py, which this file runs.
"""

import logging
import re
import subprocess
import sys
import time

import pytest
import torch
from record_fakes import full_disk, permissions_bind
from stub_suites import check_suite
from test_tuned import DECODE, LIMITS, MODEL, keep, record

from portable_backend.device import DeviceInfo
from portable_backend.kernels.plan import StepKind
from portable_backend.settings import Settings
from portable_backend.warmup.buckets import decode_key
from portable_backend.warmup.store import RecordStore

pytestmark = pytest.mark.vllm
DEFAULT = "decode default 4; kv_cache default 3; prefill default 2"
EXACT = "decode exact 1, nearest 3; kv_cache default 3; prefill default 2"
HOLD = """
import sys, time
from filelock import UnixFileLock
UnixFileLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["off", "on"], ids=lambda switch: f"ahead={switch}")
def start(request, tmp_path, monkeypatch, caplog):
    """Starts an engine's builder; gives it, its grade and its warnings."""
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    from backend_fakes import make_builder, make_impl, modules

    from portable_backend import start_tuning, startup, tuned

    pb = modules()  # imported before any fault

    def start(**environ):
        values = {
            "PORTABLE_BACKEND_CACHE_DIR": str(tmp_path),
            "PORTABLE_BACKEND_COMPILE_AHEAD": request.param,
        } | environ
        settings = Settings.from_env(values)
        for place in ("portable_backend.settings", "portable_backend.startup"):
            monkeypatch.setattr(f"{place}.get_settings", lambda: settings)
        for module in (tuned, start_tuning):
            monkeypatch.setattr(module, "get_settings", lambda: settings)
        monkeypatch.setattr(tuned, "_told", tuned._Told())
        monkeypatch.setattr(startup, "_start", startup._Start())
        tuned._lookup.cache_clear()
        caplog.clear()
        caplog.set_level(logging.INFO, "vllm.portable_backend")
        builder = make_builder(pb, [make_impl(pb)], torch.device("cpu"))
        (planner,) = builder.planners.values()
        assert planner.config_for(StepKind(4)).decode
        lines = [x for x in caplog.messages if x.startswith("tuning records: ")]
        (grade,) = (re.fullmatch(r".*?: (.*); choices \w{8}", x)[1] for x in lines)
        if request.param == "on":
            assert len([x for x in caplog.messages if "kernels ready" in x]) == 1
        ours = [x for x in caplog.records if x.name.startswith("vllm.portable")]
        told = [x.getMessage() for x in ours if x.levelno >= logging.WARNING]
        return planner, grade, told

    yield start
    tuned._lookup.cache_clear()


@pytest.fixture
def recorded(tmp_path):
    """A record of one bucket in the user's cache."""
    keep(tmp_path, record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    return tmp_path / "decode"


def test_a_cache_that_is_read_only_serves_all_the_same(start, recorded, tmp_path):
    for folder in (recorded, tmp_path):
        folder.chmod(0o555)
    with permissions_bind():
        planner, grade, warnings = start()
    assert grade == EXACT and not warnings
    assert planner.config_for(StepKind(4)).decode == DECODE


def test_a_disk_that_is_full_serves_what_it_holds(start, recorded):
    with full_disk():
        _, grade, warnings = start()
    assert grade == EXACT and not warnings


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_cache_that_nobody_may_read_costs_a_warning(start, recorded, which):
    path = next(recorded.glob("*.json")) if which == "file" else recorded
    path.chmod(0)
    try:
        with permissions_bind():
            _, grade, warnings = start()
    finally:
        path.chmod(0o755)
    assert grade == DEFAULT
    assert len(warnings) == 1 and "Permission denied" in warnings[0]


@pytest.mark.parametrize("path", ["/dev/full", "/proc/none/cache", "/dev/null/cache"])
def test_a_cache_that_is_no_folder_serves_defaults(start, path):
    _, grade, warnings = start(PORTABLE_BACKEND_CACHE_DIR=path)
    assert grade == DEFAULT and not warnings


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": 99}', bytes(range(256)), None],
    ids=["empty", "cut", "list", "bare", "newer", "bytes", "folder"],
)
@pytest.mark.parametrize("suffix", [".json", ".journal", ".portfolio.json"])
@pytest.mark.parametrize("where", ["cache", "layer"])
def test_a_damaged_layer_costs_a_warning_and_the_next_one_serves(
    start, tmp_path, damage, suffix, where
):
    layers = {name: tmp_path / name for name in ("cache", "layer", "last")}
    keep(layers["last"], record(decode_key(MODEL, LIMITS, num_seqs=4), DECODE))
    path = layers[where] / "decode" / f"interpreter{suffix}"
    path.parent.mkdir(parents=True)
    if damage is None:
        path.mkdir()
    else:
        path.write_bytes(damage)
    planner, grade, warnings = start(
        PORTABLE_BACKEND_CACHE_DIR=str(layers["cache"]),
        PORTABLE_BACKEND_CACHE_LAYERS=f"{layers['layer']}:{layers['last']}",
    )
    assert grade == EXACT
    assert planner.config_for(StepKind(4)).decode == DECODE
    whole = damage == b"" and suffix == ".journal"
    assert len([x for x in warnings if str(path) in x]) == (0 if whole else 1)
    assert not [x for x in warnings if str(path) not in x and "layer" not in x]


def test_an_unknown_field_or_entry_spoils_no_other(start, recorded, tmp_path):
    (table,) = recorded.glob("*.json")
    text = table.read_text()
    table.write_text(text.replace('"records": [', '"records": [7, {"key": 3},', 1))
    _, grade, warnings = start()
    assert grade == EXACT
    assert len(warnings) == 1 and "and 1 more" in warnings[0]


def test_no_lock_is_waited_for(start, recorded):
    """Held by a process that lives and hangs; those of dead ones are free anyway."""
    (lock,) = recorded.glob("*.lock")
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(lock)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        _, grade, warnings = start()
        assert grade == EXACT and not warnings
        assert time.monotonic() - began < 5
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.mark.parametrize("ends", ["killed", "hangs"])
def test_a_line_that_its_writer_did_not_finish_is_left_out(
    start, recorded, tmp_path, monkeypatch, ends
):
    """The start waits for a writer that has the lock, but not for ever."""
    monkeypatch.setattr("portable_backend.warmup.layers.LOCK_TIMEOUT_S", 0.5)
    (lock,) = recorded.glob("*.lock")
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(lock)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        if ends == "killed":
            holder.kill()
            holder.wait()
        (recorded / "interpreter.journal").write_bytes(b'{"key": {"num')
        began = time.monotonic()
        _, grade, warnings = start()
        assert time.monotonic() - began < 5
        assert grade == EXACT
        assert len(warnings) == 1 and "torn" in warnings[0]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_gpu_that_nobody_knows_serves_its_defaults(start, recorded, monkeypatch):
    limits = DeviceInfo.detect("cpu").limits
    unknown = DeviceInfo("nvidia x1000 (tm)/μ", "sm130", 7, limits)
    monkeypatch.setattr(DeviceInfo, "detect", classmethod(lambda cls, device: unknown))
    _, grade, warnings = start()
    assert grade == DEFAULT and not warnings


def test_records_of_another_version_serve_nothing(start, tmp_path):
    key = decode_key(MODEL, LIMITS, num_seqs=4)
    keep(tmp_path, record(key, DECODE, kernel_digest="sha256:other"))
    _, grade, warnings = start()
    assert grade == DEFAULT and not warnings


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("what"), KeyError(1)]
)
def test_a_reader_that_breaks_is_told_with_the_grade(start, monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(RecordStore, "records", broken)
    _, grade, warnings = start()
    assert grade == (
        f"default configs serve: records cannot be used ({type(error).__name__})"
    )
    assert len(warnings) == 1 and "portable-backend doctor" in warnings[0]


def test_off_is_told_with_the_grade(start):
    _, grade, warnings = start(PORTABLE_BACKEND_TUNE="off")
    assert grade == "default configs serve: PORTABLE_BACKEND_TUNE=off"
    assert not warnings


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_budget_of_0_is_told_beside_the_grade(start, recorded, monkeypatch, has_gpu):
    from portable_backend import start_tuning

    monkeypatch.setattr(start_tuning, "_can_tune", lambda info: has_gpu)
    monkeypatch.setattr(start_tuning, "_spent", start_tuning._Spent())
    _, grade, warnings = start(
        PORTABLE_BACKEND_TUNE="startup", PORTABLE_BACKEND_TUNE_BUDGET_S="0"
    )
    assert grade == EXACT
    assert len(warnings) == 1
    assert ("nothing is left" if has_gpu else "needs a GPU") in warnings[0]


@pytest.mark.long
def test_faults_of_tritons_cache_beside_a_stub_gpu():
    check_suite("stub_start_faults", limit_s=600)
