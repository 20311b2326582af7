# SPDX-License-Identifier: Apache-2.0
"""Tuners that are killed, that share a cache, and that work for one parent."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from search_cases import time_of
from tuner_fakes import (
    BEST,
    CONFIGS,
    key_of,
    open_store,
    served,
    tasks_of,
    worker_path,
)

from portable_backend.warmup.spread import GpuCrew, spread, visible_gpus
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_options import TuneOptions
from portable_backend.warmup.tuning_report import (
    Counts,
    Event,
    Outcome,
    format_message,
    parse_message,
)

OPTIONS = TuneOptions(strategy="random", trials=20, warm_start=False, batch=2)
UNITS = 12
TUNE = """
import sys
from pathlib import Path
from tuner_fakes import open_store, tasks_of
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuner import Tuner, tune
from portable_backend.warmup.tuning_options import TuneOptions
folder, log = Path(sys.argv[1]), sys.argv[2]
options = TuneOptions(strategy="random", trials=20, warm_start=False, batch=2)
recipe = Recipe("tuner_fakes:make", {"sleep_s": 0.002, "log": log})
with Tuner(recipe, open_store(folder), options, log_root=folder) as tuner:
    print("up", flush=True)
    for outcome in tune(tasks_of(*range(1, 1 + int(sys.argv[3]))), tuner):
        print(outcome.key.to_dict()["seq_len"], outcome.state)
"""


@pytest.fixture(autouse=True)
def path_of_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", worker_path())


def start(folder, log, units=UNITS):
    command = [sys.executable, "-P", "-c", TUNE, folder, log, units]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


def lines_of(log):
    return log.read_text().splitlines() if log.exists() else []


def test_a_tuner_killed_at_any_moment_loses_the_trial_in_flight_at_most(tmp_path):
    """Every config is measured once, but for one for each kill."""
    rng, log, kills = random.Random(0), tmp_path / "log", 0
    folder = tmp_path / "cache"
    while True:
        child = start(folder, log)
        assert child.stdout.readline() == "up\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(rng.uniform(0.01, 0.2))
        if child.poll() is not None:
            break
        done_before = set(served(folder))
        child.send_signal(signal.SIGKILL)
        child.wait()
        kills += 1
        assert done_before <= set(served(folder)), "a finished unit was lost"
    assert child.returncode == 0 and kills >= 3
    assert set(served(folder)) == set(range(1, UNITS + 1))
    lines = lines_of(log)
    assert len(set(lines)) == UNITS * OPTIONS.trials
    assert len(lines) - len(set(lines)) <= kills


def test_two_processes_tune_into_one_cache_and_share_the_work(tmp_path):
    folder = tmp_path / "cache"
    logs = [tmp_path / "one", tmp_path / "two"]
    children = [start(folder, log) for log in logs]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert set(served(folder)) == set(range(1, UNITS + 1))
    states = [line.split()[1] for out in outputs for line in out.splitlines()[1:]]
    assert set(states) <= {"tuned", "known", "elsewhere"}
    # What one is at, or has done, the other leaves alone.
    assert sum(len(lines_of(log)) for log in logs) <= (UNITS + 1) * OPTIONS.trials


def crew_of(folder, gpus=("0", "1"), options=OPTIONS, **behaviour):
    return contextlib.closing(
        GpuCrew(gpus, Recipe("tuner_fakes:make", behaviour), options, cache_dir=folder)
    )


def test_units_spread_over_gpus_and_end_in_one_cache(tmp_path):
    events: list[Event] = []
    with crew_of(tmp_path, sleep_s=0.01) as crew:
        outcomes = spread(tasks_of(*range(1, 7)), crew, on_event=events.append)
    assert [(o.key, o.state) for o in outcomes] == [
        (key_of(n), "tuned") for n in range(1, 7)
    ]
    assert set(served(tmp_path)) == set(range(1, 7))
    assert served(tmp_path)[1] == outcomes[0].record
    workers = {event.worker for event in events if event.kind == "trial"}
    assert workers == {"0", "1"}
    assert sum(event.kind == "finished" for event in events) == 6


def test_each_worker_sees_its_own_gpu(tmp_path):
    recipe = Recipe("test_gpu_names:make")
    (tmp_path / "test_gpu_names.py").write_text(
        "import os, tuner_fakes\n"
        "def make():\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "        names = 'CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES'\n"
        "        file.write(' '.join(os.environ[n] for n in names) + '\\n')\n"
        "    return tuner_fakes.make(sleep_s=0.01)\n"
    )
    os.environ["PYTHONPATH"] += f":{tmp_path}"
    with contextlib.closing(
        GpuCrew(["3", "5"], recipe, OPTIONS, cache_dir=tmp_path / "cache")
    ) as crew:
        spread(tasks_of(*range(1, 5)), crew)
    assert set((tmp_path / "seen").read_text().splitlines()) == {"3 3", "5 5"}


def test_the_unit_of_a_worker_that_dies_goes_to_another(tmp_path):
    token = tmp_path / "died"
    with crew_of(tmp_path / "cache", kills_on=3, token=str(token)) as crew:
        outcomes = spread(tasks_of(1, 2, 3, 4), crew)
    assert token.exists()
    assert [outcome.state for outcome in outcomes] == ["tuned"] * 4
    assert set(served(tmp_path / "cache")) == {1, 2, 3, 4}


def test_a_unit_that_kills_each_worker_fails_alone(tmp_path):
    with crew_of(tmp_path, kills_on=2) as crew:
        outcomes = spread(tasks_of(1, 2, 3, 4), crew)
    states = [outcome.state for outcome in outcomes]
    assert states == ["tuned", "failed", "tuned", "tuned"]
    assert "signal 9" in outcomes[1].reason


def test_workers_that_never_start_fail_all_units_and_end(tmp_path):
    recipe = Recipe("no_such_module:make")
    crew = GpuCrew(["0"], recipe, OPTIONS, cache_dir=tmp_path, restarts=1)
    with contextlib.closing(crew):
        outcomes = spread(tasks_of(1, 2, 3), crew)
    assert {outcome.state for outcome in outcomes} == {"failed"}
    assert "no_such_module" in outcomes[0].reason


@pytest.mark.long
def test_a_budget_holds_over_several_workers(tmp_path):
    options = TuneOptions(strategy="exhaustive", trials=None, warm_start=False)
    with crew_of(tmp_path, options=options, sleep_s=0.1) as crew:
        started = time.monotonic()
        outcomes = spread(tasks_of(*range(1, 5)), crew, budget_s=12)
        took = time.monotonic() - started
    assert took < 24  # 12, the start of a process and a trial, on a busy machine
    assert all(0 < outcome.counts.timed < len(CONFIGS) for outcome in outcomes)


class ScriptedCrew:
    """Says what it was told to; Ctrl-C comes after `patience` polls."""

    def __init__(self, patience):
        self.patience, self.started, self.interrupted = patience, [], False

    def idle(self):
        return [0, 1]

    def alive(self):
        return 2

    def start(self, worker, task, seconds, upcoming=None):
        self.started.append((worker, task))

    def poll(self, timeout_s):
        self.patience -= 1
        if self.patience < 0:
            raise KeyboardInterrupt
        worker, task = self.started[0]
        yield worker, Outcome(task.key, "tuned")

    def interrupt(self):
        self.interrupted = True
        worker, task = self.started[-1]
        yield worker, Outcome(task.key, "interrupted", counts=Counts(timed=5))

    def close(self):
        pass


class StepwiseCrew(SimpleNamespace):
    """Workers that end their units in the order that a test says."""

    def __init__(self, workers, ends):
        self.started, self.busy, self.ends = [], {}, iter(ends)
        self.alive = lambda: workers
        self.idle = lambda: [n for n in range(workers) if n not in self.busy]

    def start(self, worker, task, seconds, upcoming=None):
        self.started.append((worker, task, upcoming))
        self.busy[worker] = task

    def poll(self, timeout_s):
        worker = next(self.ends)
        yield worker, Outcome(self.busy.pop(worker).key, "tuned")


def test_a_worker_that_is_alone_prepares_what_comes_next():
    first, second, third = tasks = tasks_of(1, 2, 3)
    crew = StepwiseCrew(1, [0, 0, 0])
    assert {outcome.state for outcome in spread(tasks, crew)} == {"tuned"}
    assert crew.started == [(0, first, second), (0, second, third), (0, third, None)]


def test_workers_prepare_units_of_their_own_and_take_those_first():
    one, two, three, four, five = tasks = tasks_of(1, 2, 3, 4, 5)
    crew = StepwiseCrew(2, [1, 1, 0, 1, 0])
    assert {outcome.state for outcome in spread(tasks, crew)} == {"tuned"}
    assert crew.started[:3] == [(0, one, three), (1, two, four), (1, four, five)]
    assert crew.started[3:] == [(1, five, None), (0, three, None)]


def test_a_worker_with_nothing_else_to_do_takes_what_another_prepares():
    one, two, three = tasks = tasks_of(1, 2, 3)
    crew = StepwiseCrew(2, [1, 1, 0])
    assert {outcome.state for outcome in spread(tasks, crew)} == {"tuned"}
    assert crew.started == [(0, one, three), (1, two, None), (1, three, None)]


def test_ctrl_c_asks_workers_for_what_they_have():
    crew = ScriptedCrew(patience=1)
    outcomes = spread(tasks_of(1, 2, 3, 4), crew)
    assert crew.interrupted
    states = [outcome.state for outcome in outcomes]
    assert states == ["tuned", "interrupted", "interrupted", "unreached"]
    assert outcomes[2].counts.timed == 5


def test_ctrl_c_reaches_workers_which_keep_their_trials(tmp_path):
    """The parent's Ctrl-C, by an event: workers answer with what was done."""

    def on_event(event):
        if event.kind == "trial" and event.counts.timed >= 3:
            raise KeyboardInterrupt

    log = tmp_path / "log"
    with crew_of(tmp_path / "cache", sleep_s=0.05, log=str(log)) as crew:
        outcomes = spread(tasks_of(1, 2, 3), crew, on_event=on_event)
    states = [outcome.state for outcome in outcomes]
    assert states == ["interrupted", "interrupted", "unreached"]
    before = len(lines_of(log))
    with crew_of(tmp_path / "cache", log=str(log)) as crew:
        outcomes = spread(tasks_of(1, 2, 3), crew)
    assert {outcome.state for outcome in outcomes} == {"tuned"}
    # All but the trials in flight were kept.
    assert before >= 3
    assert len(lines_of(log)) - len(set(lines_of(log))) <= 2


def test_visible_gpus_are_those_this_process_sees(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus(3) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpus(2) == ["4", "6"]


def test_messages_say_the_same_when_read_back(tmp_path):
    with crew_of(tmp_path, gpus=("0",)) as crew:
        (outcome,) = spread(tasks_of(1), crew)
    assert outcome.record.config in CONFIGS
    assert outcome.record.time_us == time_of(outcome.record.config) >= time_of(BEST)
    assert parse_message(format_message(outcome)) == outcome
    event = Event("trial", key_of(1), Counts(5, 1, 3, 2), 3.5, "")
    assert parse_message(format_message(event)) == event
    with pytest.raises(ValueError, match="message lacks"):
        parse_message(b'{"type": "event"}')
    assert open_store(tmp_path).records("decode")[0][1] == outcome.record
