# SPDX-License-Identifier: Apache-2.0
"""Steps that an engine marks, and the gate that opens while there are none."""

import fcntl
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch

from portable_backend.warmup import activity
from portable_backend.warmup.activity import (
    IDLE_S,
    TOKEN_S,
    Activity,
    Beacon,
    beacon_path,
)
from portable_backend.warmup.background import alone_on
from portable_backend.warmup.idle_gate import OPEN, IdleGate, gate_of


class Clock:
    """Goes on where somebody sleeps; `events` happen at their times."""

    def __init__(self, monkeypatch):
        self.now, self.events = 1000.0, []
        monkeypatch.setattr(activity.time, "monotonic", lambda: self.now)

    def sleep(self, seconds):
        end = self.now + seconds
        for at, event in sorted(self.events, key=lambda e: e[0]):
            if at <= end:
                self.now = max(self.now, at)
                event()
        self.events = [e for e in self.events if e[0] > end]
        self.now = end


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def beacon(tmp_path, clock):
    return Beacon(tmp_path / "beacon")


@pytest.fixture
def looked(beacon, clock):
    return Activity(beacon.path, clock=lambda: clock.now, sleep=clock.sleep)


def test_an_engine_is_idle_some_time_after_its_last_step(beacon, looked, clock):
    assert looked.idle_in() == pytest.approx(IDLE_S)
    clock.now += IDLE_S - 0.01
    assert looked.idle_in() == pytest.approx(0.01)
    beacon.step(0)
    assert looked.idle_in() == pytest.approx(IDLE_S)
    clock.now += IDLE_S
    assert looked.idle_in() == 0


def test_a_long_prompt_keeps_the_engine_busy_whatever_is_planned_behind_it(
    beacon, looked, clock
):
    beacon.step(8192)
    clock.now += 0.01
    beacon.step(1)  # planned while the other one still runs
    assert looked.idle_in() == pytest.approx(IDLE_S + 8192 * TOKEN_S - 0.01)


def test_the_gate_waits_until_no_step_has_come_for_long_enough(beacon, looked, clock):
    began, last = clock.now, clock.now + 3.0
    clock.events = [(began + 0.3 * i, lambda: beacon.step(1)) for i in range(11)]
    IdleGate(looked).wait()
    assert last + IDLE_S <= clock.now <= last + IDLE_S + 0.05


def test_a_round_during_which_a_step_came_is_repeated(beacon, looked, clock):
    rounds = []
    gate = IdleGate(looked)

    def work():
        rounds.append(clock.now)
        if len(rounds) < 3:
            beacon.step(1)
        return len(rounds)

    assert gate.undisturbed(work) == 3
    assert all(b - a >= IDLE_S for a, b in itertools.pairwise(rounds))


def test_a_round_stops_before_its_next_turn(beacon, looked, clock):
    turns = []
    gate = IdleGate(looked)

    def work():
        for turn in range(3):
            gate.check()
            turns.append(turn)
            if len(turns) == 1:
                beacon.step(1)

    gate.undisturbed(work)
    assert turns == [0, 0, 1, 2]


def test_each_torch_operation_waits_for_the_engine(beacon, looked, clock):
    waited = []
    synchronized = []
    gate = IdleGate(looked, synchronize=lambda: synchronized.append(clock.now))
    with gate.paced():
        for _ in range(3):
            beacon.step(1)
            before = clock.now
            tensor = torch.ones(3) + 1
            waited.append(clock.now - before)
    assert torch.equal(tensor, torch.tensor([2.0, 2.0, 2.0]))
    assert all(seconds >= IDLE_S for seconds in waited)
    assert len(synchronized) >= 6  # two of each time
    beacon.step(1)
    torch.ones(3)  # no longer


def test_without_an_engine_nothing_waits():
    gate = gate_of(None, torch.device("cpu"))
    assert gate is OPEN
    assert gate.undisturbed(lambda: 7) == 7


def test_engines_that_share_a_gpu_share_the_file(tmp_path, clock):
    path = tmp_path / "beacon"
    first, second = Beacon(path), Beacon(path)
    looked = Activity(path, clock=lambda: clock.now)
    clock.now += 10
    assert looked.idle_in() == 0
    for engine in (first, second):
        engine.step(1)
        assert looked.idle_in() > 0
        clock.now += 10


def test_a_later_boots_clock_is_not_behind_an_earlier_ones(tmp_path, clock):
    path = tmp_path / "beacon"
    clock.now = 1e6
    Beacon(path).step(10_000)
    clock.now = 5.0
    Beacon(path)
    looked = Activity(path, clock=lambda: clock.now)
    assert looked.idle_in() == pytest.approx(IDLE_S)


def test_links_and_other_files_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        Beacon(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PermissionError, match="not this user's own file; remove it"):
        Beacon(tmp_path / "fifo")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(OSError, match=r"short.*remove it"):
        Activity(tmp_path / "short")
    with pytest.raises(FileNotFoundError):
        Activity(tmp_path / "none")


def test_each_gpu_and_user_has_a_file_of_its_own(monkeypatch):
    names = {beacon_path(gpu).name for gpu in ("GPU-5/../a b", "GPU-6", "0")}
    assert len(names) == 3 and not [name for name in names if "/" in name]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert beacon_path("0").name == "portable_backend.12345.0"
    assert beacon_path("0").parent.is_dir()


def test_a_full_shared_memory_is_an_error_not_a_crash(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Beacon(tmp_path / "beacon")


def test_a_step_costs_less_than_a_microsecond(tmp_path):
    beacon = Beacon(tmp_path / "beacon")
    count, best = 20_000, float("inf")
    for _ in range(10):  # some of them undisturbed
        began = time.perf_counter()
        for _ in range(count):
            beacon.step(256)
        best = min(best, time.perf_counter() - began)
    assert best / count < 1e-6


def test_one_process_at_a_time_tunes_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("portable_backend.warmup.background._LOCK_S", 0.05)
    path = Beacon(tmp_path / "beacon").path
    hold = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from portable_backend.warmup.background import alone_on\n"
        "with alone_on(Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", hold, str(path)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        file = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)
        holder.kill()  # however it ends
        holder.wait()
        with alone_on(path):
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
