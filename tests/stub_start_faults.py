# SPDX-License-Identifier: Apache-2.0
"""Faults of Triton's cache and of the records' when a stub GPU's engine starts.

Run by test_start_faults.py, since Triton's interpreter must be off before triton loads.
"""

import contextlib
import errno
import gc
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import stub_driver
import stub_startup
import triton
from backend_fakes import modules
from record_fakes import full_disk, permissions_bind
from stub_binaries import SMOLLM2, Engine
from stub_driver import stub_gpu
from stub_startup import SMALL, compile_for_real

from portable_backend import startup
from portable_backend.device import DeviceInfo

pytestmark = pytest.mark.vllm
settings, all_present = stub_startup.settings, stub_startup.all_present


modules()


def start(caplog, config=SMOLLM2, limits=SMALL, compiler=compile_for_real):
    """Lines that a start logs: (those about kernels, those about records, warnings)."""
    caplog.clear()
    caplog.set_level(logging.INFO, "vllm.portable_backend")
    with stub_gpu("cuda") as gpu:

        def compile_and_note(src, target=None, options=None, **more):
            compiler(src, target=target, options=options, **more)
            return gpu.compile(src, target, options)

        with mock.patch.object(triton.compiler, "compile", compile_and_note):
            engine = Engine(config, limits, "NHD")
    assert all(builder.planners for _, builder, _ in engine.layers)
    return (
        [x for x in caplog.messages if "kernels ready" in x],
        [x for x in caplog.messages if x.startswith("tuning records: ")],
        [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING],
    )


def is_ready(lines):
    (line,) = lines
    assert "decode 2 default; kv_cache 2 default; prefill 2 default" in line
    assert "choices" in line
    return re.match(r"(\d+) kernels ready: (\d+) compiled", line).groups()


def lasting_elsewhere(warnings, tmp_path):
    """The folder that stands in for one that cannot be written."""
    told = [x for x in warnings if "for this start only" in x]
    assert len(told) == 1 and str(tmp_path / "triton") in told[0]
    assert not [x for x in warnings if "not ready" in x]
    folder = Path(startup._start.spare.name)
    assert str(folder) in told[0]
    return folder


def test_a_triton_cache_that_is_read_only_lasts_as_long_as_the_process(
    tmp_path, caplog
):
    tmp_path.chmod(0o555)
    with permissions_bind(children=True):
        lines, records, warnings = start(caplog)
    assert len(records) == 1
    ready, compiled = is_ready(lines)
    assert ready == compiled != "0"
    spare = lasting_elsewhere(warnings, tmp_path)
    entries = {path.name for path in spare.iterdir() if path.is_dir()}
    assert len(entries) == int(ready)
    # Of records nothing was to be written but the report.
    assert len([x for x in warnings if "the start's report is not written" in x]) == 1
    startup._start.spare = None
    gc.collect()
    assert not spare.exists()


def test_what_a_read_only_cache_holds_is_taken_from_there(
    tmp_path, caplog, monkeypatch
):
    ready, _ = is_ready(start(caplog)[0])
    folder = tmp_path / "triton"
    entries = [path for path in folder.iterdir() if path.is_dir()]
    shutil.rmtree(entries[0])
    folder.chmod(0o555)
    monkeypatch.setattr(startup, "_start", startup._Start())
    with permissions_bind(children=True):
        lines, _, warnings = start(caplog)
    assert is_ready(lines) == (ready, "1")
    spare = lasting_elsewhere(warnings, tmp_path)
    assert [x.name for x in spare.iterdir() if x.is_dir()] == [entries[0].name]


def test_a_triton_cache_without_room_lasts_as_long_as_the_process(
    tmp_path, caplog, monkeypatch
):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left"))
    monkeypatch.setattr(
        startup,
        "tempfile",
        SimpleNamespace(
            TemporaryFile=lambda dir: contextlib.nullcontext(mock.Mock(write=full)),
            TemporaryDirectory=tempfile.TemporaryDirectory,
        ),
    )
    lines, _, warnings = start(caplog)
    ready, compiled = is_ready(lines)
    assert ready == compiled != "0"
    assert len(list(lasting_elsewhere(warnings, tmp_path).iterdir())) >= int(ready)
    assert not [x for x in (tmp_path / "triton").iterdir() if x.is_dir()]


def test_where_no_disk_takes_a_byte_an_engine_starts(caplog):
    """Its kernels are those that Triton cannot write, either."""
    with full_disk():
        lines, records, warnings = start(caplog)
    assert is_ready(lines) == ("0", "0") and len(records) == 1
    assert [x for x in warnings if "kernels are not ready" in x]


@pytest.mark.timeout(120)
def test_no_folder_for_temporary_files_is_a_warning(tmp_path, caplog, monkeypatch):
    (tmp_path / "triton").write_text("a file")
    refuse = mock.Mock(side_effect=FileNotFoundError("no usable temporary folder"))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # compilers, too
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    lines, _, warnings = start(caplog)
    assert is_ready(lines)[0] == "0"
    assert [x for x in warnings if "nor can another" in x]


def test_entries_that_are_damaged_are_compiled_again(tmp_path, caplog, monkeypatch):
    ready, _ = is_ready(start(caplog)[0])
    lists = sorted((tmp_path / "triton").glob("*/__grp__*.json"))
    lists[0].write_text("{")
    lists[1].write_bytes(b"")
    named = json.loads(lists[2].read_text())["child_paths"]
    Path(next(iter(named.values()))).unlink()
    monkeypatch.setattr(startup, "_start", startup._Start())
    lines, _, warnings = start(caplog)
    assert is_ready(lines) == (ready, "3")
    assert not [x for x in warnings if "ready" in x]


def test_a_lock_of_a_dead_process_holds_up_nobody(tmp_path, caplog):
    code = (
        "import os, sys, filelock\n"
        "filelock.UnixFileLock(sys.argv[1]).acquire()\n"
        "os.kill(os.getpid(), 9)"
    )
    folder = tmp_path / "triton"
    folder.mkdir()
    lock = str(folder / startup.LOCK)
    done = subprocess.run([sys.executable, "-P", "-c", code, lock])
    assert done.returncode == -signal.SIGKILL and Path(lock).exists()
    began = time.monotonic()
    ready, compiled = is_ready(start(caplog)[0])
    assert ready == compiled != "0"
    assert time.monotonic() - began < 100  # LOCK_TIMEOUT_S is 300


def test_a_gpu_that_nobody_knows_is_prepared_for(all_present, caplog, monkeypatch):
    smallest = DeviceInfo.for_arch("sm86").limits
    unknown = DeviceInfo("nvidia_x1000", "sm130", 7, smallest)
    monkeypatch.setitem(stub_driver.ARCHS, "cuda", "sm130")
    monkeypatch.setattr(
        DeviceInfo, "for_arch", classmethod(lambda cls, arch, units: unknown)
    )
    lines, records, warnings = start(caplog, compiler=mock.Mock())
    assert int(is_ready(lines)[0]) > 5
    assert "nvidia_x1000 (sm130)" in lines[0] and len(records) == 1
    assert not [x for x in warnings if "ready" in x]


def test_records_that_cannot_be_read_leave_the_defaults(
    settings, all_present, tmp_path, caplog
):
    layer = tmp_path / "layer"
    for folder in (tmp_path, layer):
        (folder / "decode").mkdir(parents=True, exist_ok=True)
        (folder / "decode" / "sm90.json").write_text('{"schema": 1, "records": [')
        (folder / "decode" / "sm90.journal").write_bytes(bytes(range(256)) * 9)
        (folder / "prefill").write_text("no folder")
    settings(PORTABLE_BACKEND_CACHE_LAYERS=str(layer))
    lines, records, warnings = start(caplog, compiler=mock.Mock())
    assert int(is_ready(lines)[0]) > 10 and len(records) == 1
    assert len([x for x in warnings if "sm90.json: not JSON" in x]) == 2
