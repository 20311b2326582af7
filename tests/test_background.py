# SPDX-License-Identifier: Apache-2.0
"""Tuning beside an engine: processes that wait for it, and what they leave behind."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from planted_workloads import behaving, make_key
from record_fakes import permissions_bind
from tuner_fakes import worker_path

from portable_backend.errors import UnsupportedError
from portable_backend.warmup.activity import IDLE_S, Activity, Beacon
from portable_backend.warmup.attention_workload import AttentionWorkload
from portable_backend.warmup.background import Background, status_path
from portable_backend.warmup.compile_pool import CompilePool
from portable_backend.warmup.idle_gate import IdleGate
from portable_backend.warmup.measuring_child import _memory_share
from portable_backend.warmup.measuring_process import MeasuringProcess
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.search import Proposal
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_report import Task

DECODE_FIELDS = {
    "dtype": "float32",
    "head_size": 32,
    "num_kv_heads": 2,
    "num_queries_per_kv": 2,
    "block_size": 16,
    "sliding_window": 0,
    "num_seqs": 2,
    "query_len": 1,
    "seq_len": 64,
}
KEYS = [make_key(num_rows=rows) for rows in (20, 24)]
# A process tree that plays an engine: it starts the tuner, and steps until it is ended.
ENGINE = """
import json, subprocess, sys, time
from pathlib import Path
from portable_backend.warmup.activity import Beacon
setup = json.loads(sys.argv[1])
beacon = Beacon(Path(setup["beacon"]))
import os
setup["parent"] = os.getpid()
command = [sys.executable, "-P", "-m", "portable_backend.warmup.background"]
tuner = subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=1, start_new_session=True
)
tuner.stdin.write(json.dumps(setup).encode() + b"\\n")
tuner.stdin.flush()
print(json.dumps({"tuner": tuner.pid}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def beacon(tmp_path):
    return Beacon(tmp_path / "beacon")


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", worker_path())


def setup_of(folder, beacon, keys=KEYS, recipe=None):
    recipe = recipe or Recipe("start_tools:make_planted", {"beacon": str(beacon.path)})
    return {
        "parent": os.getpid(),
        "recipe": recipe.to_dict(),
        "tasks": [Task(key).to_dict() for key in keys],
        "gpu": "interpreter",
        "cache_dir": str(folder),
        "cache_layers": [],
        "beacon": str(beacon.path),
    }


@contextlib.contextmanager
def tuning(setup):
    """The process; it has its work already."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "portable_backend.warmup.background"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        process.stdin.write(json.dumps(setup).encode() + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def told(process):
    """All that it says until it ends: lines with their levels, and the last status."""
    messages = [json.loads(line) for line in process.stdout]
    assert process.wait(60) == 0
    lines = [(m["level"], m["line"]) for m in messages if "line" in m]
    return lines, [m["status"] for m in messages if "status" in m][-1]


def records_in(folder):
    with RecordStore.open(folder, shipped=folder / "none") as store:
        return {record.key: record for _, record in store.records("rms_norm")}


class Busy(threading.Thread):
    """An engine that steps for a while every so often.

    Attributes:
        steps: when they were, in order.
    """

    def __init__(self, beacon, busy_s, idle_s):
        super().__init__(daemon=True)
        self.beacon, self.busy_s, self.idle_s = beacon, busy_s, idle_s
        self.steps, self.done = [], threading.Event()

    def run(self):
        while not self.done.is_set():
            ends = time.monotonic() + self.busy_s
            while time.monotonic() < ends:
                self.beacon.step(1)
                self.steps.append(time.monotonic())
                time.sleep(0.01)
            self.done.wait(self.idle_s)

    def __exit__(self, *_):
        self.done.set()
        self.join()

    def __enter__(self):
        self.start()
        return self


@pytest.mark.slow
def test_nothing_of_a_trial_begins_while_the_engine_has_work(
    beacon, tmp_path, monkeypatch
):
    log = tmp_path / "log"
    monkeypatch.setenv("PLANTED_LOG", str(log))
    limit_s = 4.0  # which the engine's work alone exceeds
    with (
        MeasuringProcess(
            device="cpu",
            make="planted_workloads:make",
            beacon=str(beacon.path),
            limit_s=limit_s,
            gives_up=False,
        ) as measuring,
        Busy(beacon, busy_s=1.0, idle_s=IDLE_S + 0.25) as engine,
    ):
        proposals = [Proposal(behaving("noted"), rounds=400)]
        began = time.monotonic()
        (trial,) = measuring.measure(KEYS[0], proposals)
        took = time.monotonic() - began
    assert trial.invalid is None, trial.reason
    assert len(trial.times_us) == 400 and took > limit_s
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    disturbed = 0
    for start, end in spans:
        before = [step for step in engine.steps if step <= start - 0.01]
        assert start - before[-1] >= IDLE_S - 0.01
        disturbed += any(start < step < end for step in engine.steps)
    # Those of the check and first launches, of 400 rounds, and of rounds thrown away.
    assert disturbed and len(spans) > 400 + disturbed


def test_a_config_that_takes_too_long_is_given_up_and_the_next_one_measured(beacon):
    options = {"device": "cpu", "beacon": str(beacon.path)}
    with MeasuringProcess(make="planted_workloads:make", **options) as measuring:
        assert measuring.why_not(KEYS[0]) is None
        proposals = [Proposal(behaving(name), 2) for name in ("long", "good")]
        long, good = measuring.measure(KEYS[0], proposals)
    assert (long.invalid, good.invalid) == ("timeout", None)
    assert "ms at a time, beside an engine 5 ms are allowed" in long.reason


def test_a_key_whose_default_takes_too_long_is_passed_over(beacon, monkeypatch):
    monkeypatch.setenv("PLANTED_DEFAULT", "long")
    with MeasuringProcess(
        device="cpu",
        make="planted_workloads:make_bad_default",
        beacon=str(beacon.path),
    ) as measuring:
        for _ in range(2):
            reason = measuring.why_not(KEYS[0])
            assert "beside an engine 5 ms are allowed" in reason


def test_a_child_gives_its_memory_back_to_an_engine_that_is_busy_for_long(beacon):
    with MeasuringProcess(
        device="cpu",
        make="planted_workloads:make",
        beacon=str(beacon.path),
        hold_s=1.0,
    ) as measuring:
        assert measuring.why_not(KEYS[0]) is None
        first = measuring._child._process
        with Busy(beacon, busy_s=5.0, idle_s=60.0):
            # In the middle of a trial, and while nothing is asked of it.
            proposals = [Proposal(behaving("good"), 3)]
            (trial,) = measuring.measure(KEYS[0], proposals)
        assert first.poll() is not None
        assert trial.invalid is None, trial.reason


def test_compilers_stop_while_the_engine_has_work(beacon, tmp_path, monkeypatch):
    from portable_backend.device import ARCH_LIMITS, DeviceInfo

    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys, time\n"
        "sys.stdin.readline(); print('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    for _ in range(20):\n"
        f"        open({str(tmp_path / 'ticks')!r}, 'a')"
        ".write(f'{time.monotonic()}\\n')\n"
        "        time.sleep(0.05)\n"
        '    print(\'{"failure": "no"}\', flush=True)\n'
    )
    device = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
    command = [sys.executable, str(worker)]
    key = make_key()
    time.sleep(IDLE_S)
    with (
        CompilePool(
            device, workers=1, command=command, activity=Activity(beacon.path)
        ) as pool,
    ):
        pool.submit(key, [behaving("good")])
        while not (tmp_path / "ticks").exists():
            time.sleep(0.01)
        with Busy(beacon, busy_s=2.0, idle_s=60.0) as engine:
            (done,) = pool.wait(key, [behaving("good")])
    assert done.failure == "no"
    ticks = [float(line) for line in (tmp_path / "ticks").read_text().splitlines()]
    first, last = engine.steps[0], engine.steps[-1]
    assert len(ticks) == 20 and ticks[-1] > last + IDLE_S
    assert not [t for t in ticks if first + 0.5 < t < last + IDLE_S - 0.01]


def test_records_are_made_beside_an_engine_and_the_process_ends(
    beacon, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "log"))
    with tuning(setup_of(tmp_path / "cache", beacon)) as process:
        lines, status = told(process)
    assert [level for level, _ in lines] == ["INFO"] * 3
    assert "key 1 of 2, default" in lines[0][1]
    assert lines[2][1].startswith("background tuning is done: 2 of 2 keys have records")
    # "wrong" was tried as well.
    assert status == {"state": "done", "keys": 2, "done": 2, "trials": 8}
    records = records_in(tmp_path / "cache")
    assert records.keys() == set(KEYS) and all(r.verified for r in records.values())
    held = json.loads(status_path(tmp_path / "cache", "interpreter").read_text())
    assert held["state"] == "done" and len(held["outcomes"]) == 2
    # There is nothing left to do.
    with tuning(setup_of(tmp_path / "cache", beacon)) as process:
        lines, status = told(process)
    assert "key 1 of 2, known" in lines[0][1] and status["trials"] == 0


def test_it_takes_the_lowest_priority_and_so_do_its_children(beacon, tmp_path):
    with tuning(setup_of(tmp_path / "cache", beacon)) as process:
        for pid in (process.pid, wait_for_child(process.pid)):
            assert os.getpriority(os.PRIO_PROCESS, pid) == 19
            assert os.sched_getscheduler(pid) == os.SCHED_IDLE


@pytest.mark.parametrize("how", ["engine", "tuner"])
def test_nothing_outlives_an_engine_that_is_killed(beacon, tmp_path, how):
    setup = setup_of(tmp_path / "cache", beacon)
    engine = subprocess.Popen(
        [sys.executable, "-P", "-c", ENGINE, json.dumps(setup)],
        stdout=subprocess.PIPE,
    )
    try:
        tuner = next(
            message["tuner"]
            for message in map(json.loads, engine.stdout)
            if "tuner" in message
        )
        child = wait_for_child(tuner)
        os.kill(engine.pid if how == "engine" else tuner, signal.SIGKILL)
        ends = time.monotonic() + 30
        while is_alive(tuner) or is_alive(child):
            assert time.monotonic() < ends
            time.sleep(0.05)
        if how == "tuner":
            assert engine.poll() is None
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_without_room_for_records_nothing_is_measured(beacon, tmp_path, fault):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o555)
    if fault == "full":
        folder = "/dev/full"
    with permissions_bind(children=True), tuning(setup_of(folder, beacon)) as process:
        lines, status = told(process)
    ((level, line),) = lines
    assert level == "WARNING" and "takes no records" in line
    assert status["state"] == "given up" and status["trials"] == 0


def test_records_that_are_not_taken_end_it(beacon, tmp_path, monkeypatch):
    monkeypatch.setattr(RecordStore, "put", lambda *_: False)
    source, out = os.pipe()
    setup = setup_of(tmp_path / "cache", beacon, recipe=Recipe("start_tools:make"))
    key = TuningKey.of("decode", **DECODE_FIELDS)
    background = Background(
        Recipe(**setup["recipe"]),
        [Task(key), Task(key)],
        gpu="interpreter",
        cache_dir=tmp_path / "cache",
        cache_layers=[],
        beacon=beacon.path,
        out=out,
    )
    background.run()
    os.close(out)
    with os.fdopen(source) as lines:
        said = [json.loads(line) for line in lines]
    (warning,) = [m["line"] for m in said if m.get("level") == "WARNING"]
    assert "1 keys are left as they were: the record could not be written" in warning
    assert background.status.state == "given up" and background.status.trials > 0


def test_memory_is_what_was_free_when_the_engine_was_ready_or_less(monkeypatch):
    """An engine that sleeps frees much, and wants it back."""
    gib = 1 << 30
    options = {"device_memory_share": 0.9, "device_memory_mib": 4096}
    for free_gib, share in ((100, 4 / 140), (6, 3 / 140)):
        free = (free_gib * gib, 140 * gib)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: free)
        assert _memory_share(options) == pytest.approx(share)
    assert _memory_share({"device_memory_share": 0.9}) == 0.9  # without an engine
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (gib // 4, 140 * gib))
    with pytest.raises(UnsupportedError, match=r"256 MiB .* 512 are needed; lower"):
        _memory_share(options)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on the CPU"
)
def test_attention_is_prepared_and_checked_in_slices(beacon):
    launched = []

    class Counted(IdleGate):
        def launch(self, call):
            launched.append(call)
            return super().launch(call)

    gate = Counted(Activity(beacon.path))
    key = TuningKey.of("decode", **DECODE_FIELDS)
    plain = AttentionWorkload(key, torch.device("cpu"))
    expected = plain.check(plain.default, 1)
    assert expected.wrong is None and not launched
    with gate.paced():
        workload = AttentionWorkload(key, torch.device("cpu"))
        before = len(launched)
        assert workload.check(workload.default, 1) == expected
    assert 10 < before < len(launched) - 10


def test_a_gpu_that_is_gone_costs_one_warning(beacon, tmp_path):
    options = {"device": device_fields(), "beacon": str(beacon.path)}
    options |= {"workers": 1, "memory_mib": 100}
    recipe = Recipe(
        "portable_backend.warmup.background_tools:background_tools", options
    )
    keys = [make_key(dtype="bfloat16", row_size=4096, num_rows=n) for n in (1, 2, 4, 8)]
    setup = setup_of(tmp_path / "cache", beacon, keys, recipe)
    with tuning(setup) as process:
        lines, status = told(process)
    (warning,) = [line for level, line in lines if level == "WARNING"]
    assert "is given up, 1 keys are left as they were" in warning
    assert "torch sees no GPU" in warning or "not compiled with CUDA" in warning
    assert status == {"state": "given up", "keys": 4, "done": 0, "trials": 0}


@pytest.mark.long
def test_of_two_engines_on_a_gpu_one_tunes_after_the_other(
    beacon, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "log"))
    setup = setup_of(tmp_path / "cache", beacon, KEYS[:1])
    with tuning(setup) as first, tuning(setup) as second:
        results = [told(first), told(second)]
    assert [status["done"] for _, status in results] == [1, 1]
    outcomes = {line.split(", ")[1] for lines, _ in results for _, line in lines[:1]}
    assert outcomes == {"default", "known"}


def device_fields():
    from dataclasses import asdict

    from portable_backend.device import ARCH_LIMITS, DeviceInfo

    return asdict(DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"]))


def wait_for_child(pid):
    """The first process that `pid` starts."""
    # Long, since it runs on CPUs that nobody else wants.
    for _ in itertools.repeat(None, 2400):
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = file.read().split()
                if children:
                    return int(children[0])
        time.sleep(0.05)
    raise AssertionError("no child within 120 s")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
