# SPDX-License-Identifier: Apache-2.0
"""scripts/end_to_end.py without engines: requests, comparison, table."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "end_to_end.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("end_to_end", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def result(rate, tokens, name="batch"):
    return {
        "start_s": 50.0,
        "times": {name: [rate, 2 * rate, rate / 2]},
        "first_tokens": {name: tokens},
    }


def test_every_engine_gets_the_same_requests(script):
    for workloads in (script.WORKLOADS, script.TINY):
        for workload in workloads.values():
            requests = workload.requests(1000)
            assert requests == workload.requests(1000)
            assert len(requests) == workload.count
            for prompt, output in requests:
                assert workload.prompt[0] <= len(prompt) <= workload.prompt[1]
                assert workload.output[0] <= output <= workload.output[1]
                assert 2 <= min(prompt) <= max(prompt) < 1000


def test_the_table_shows_medians_and_ratios(script, capsys):
    results = {
        "portable": result(300.0, [1, 2, 3, 4]),
        "FLASH_ATTN": result(200.0, [1, 2, 3, 4]),
    }
    assert script.report(results, ["batch"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["batch", "portable", "300", "tokens/s"]
    assert lines[0].endswith("(150 to 600 in 3 rounds)")
    assert lines[1].endswith("portable / this 1.50")


def test_engines_that_disagree_or_fail_are_told(script, capsys):
    results = {
        "portable": result(300.0, [1, 2, 3, 4]),
        "FLASH_ATTN": result(200.0, [1, 2, 9, 9]),
    }
    assert not script.report(results, ["batch"])
    assert "DISAGREES: 50%" in capsys.readouterr().out
    results["FLASH_ATTN"] = {"failed": "exit code 1\nno memory"}
    assert not script.report(results, ["batch"])
    assert "FLASH_ATTN FAILED: exit code 1\nno memory" in capsys.readouterr().out


def test_names_may_hold_commas(script):
    text = "portable, norm off,portable,FLASH_ATTN"
    names = script.names_in(text, script.ENGINES, "--engines")
    assert names == ["portable, norm off", "portable", "FLASH_ATTN"]
    for wrong in ("portable,nobody", "FLASH", ""):
        with pytest.raises(SystemExit, match="expected some of portable"):
            script.names_in(wrong or "?", script.ENGINES, "--engines")


class Pipe:
    """An engine that answers at once; dies at the turn of that number."""

    def __init__(self, log, name, dies_at=None):
        self.log, self.name, self.dies_at, self.turns = log, name, dies_at, 0

    def send(self, workload):
        self.log.append((workload, self.name))
        self.workload = workload

    def poll(self, timeout):
        return True

    def recv(self):
        self.turns += 1
        if self.turns == self.dies_at:
            raise EOFError
        return {"rate": 100.0, "first": [1, 2]}


class DeadPipe(Pipe):
    """Of an engine that died between two turns."""

    def send(self, workload):
        super().send(workload)
        if self.turns:
            raise BrokenPipeError

    def recv(self):
        if self.turns:
            raise EOFError
        return super().recv()


class HungPipe(Pipe):
    def poll(self, timeout):
        time.sleep(min(timeout, 0.05))
        return self.turns < 2


class Process:
    def wait(self):
        return -9

    def poll(self):
        return None


def test_each_round_begins_with_another_engine_and_goes_on_without_the_dead(
    script, tmp_path
):
    said = []
    (tmp_path / "log").write_text("killed by somebody")
    children = {
        name: script.Child(Process(), Pipe(said, name, dies_at), tmp_path / "log")
        for name, dies_at in (("a", None), ("b", 3), ("c", None))
    }
    script.take_turns(children, ["x", "y"], 2, script.time.monotonic() + 60)
    assert "".join(name for _, name in said) == "abcabc" + "bca" + "ca" + "caca"
    assert children["b"].result["failed"] == "exit code -9\nkilled by somebody"
    assert children["a"].result["times"] == {"x": [100.0] * 2, "y": [100.0] * 2}
    assert children["a"].result["first_tokens"] == {"x": [1, 2], "y": [1, 2]}


def test_an_engine_that_died_between_turns_stops_nobody(script, tmp_path):
    said = []
    (tmp_path / "log").write_text("gone")
    children = {
        "a": script.Child(Process(), DeadPipe(said, "a"), tmp_path / "log"),
        "b": script.Child(Process(), Pipe(said, "b"), tmp_path / "log"),
    }
    script.take_turns(children, ["x"], 2, script.time.monotonic() + 60)
    assert children["a"].result["failed"] == "exit code -9\ngone"
    assert children["b"].result["times"] == {"x": [100.0] * 2}


def test_an_engine_that_hangs_costs_the_others_nothing(script, tmp_path):
    said = []
    (tmp_path / "log").write_text("thinking")
    children = {
        "a": script.Child(Process(), Pipe(said, "a"), tmp_path / "log"),
        "b": script.Child(Process(), HungPipe(said, "b"), tmp_path / "log"),
    }
    script.take_turns(children, ["x"], 5, script.time.monotonic() + 0.5)
    assert "no answer within the time limit" in children["b"].result["failed"]
    assert not children["a"].failed and children["a"].result["times"]["x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: must be a number from 1 on, got 0"),
        (["--limit-s", "nan"], "--limit-s: must be seconds"),
        (["--engines", ""], "--engines: expected some of"),
        (["--engines", "portable,portable"], "portable is there twice"),
        (["--workloads", ""], "--workloads: expected some of"),
        (["--llm-options", "{bad"], "--llm-options: must be JSON"),
        (["--llm-options", '{"seed": 1}'], "must be a JSON object without"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at is no folder"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(options, message):
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, *options], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_rounds_end_with_the_time(script, tmp_path):
    said = []
    children = {"a": script.Child(Process(), Pipe(said, "a"), tmp_path)}
    children["a"].pipe.poll = lambda timeout: time.sleep(0.2) or True
    script.take_turns(children, ["x"], 50, script.time.monotonic() + 1)
    assert 2 <= len(said) <= 6
    assert not children["a"].failed
