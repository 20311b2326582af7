# SPDX-License-Identifier: Apache-2.0
"""The trial log: a search goes on from it as if it had never stopped."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from search_cases import SEARCHERS, small_sweep

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.replay import ReplayDevice
from portable_backend.warmup.search import Budget, Trial, search
from portable_backend.warmup.strategies import make_strategy
from portable_backend.warmup.trial_log import (
    LogHeader,
    LogMismatchError,
    TrialLog,
    ranking_from,
    read_trials,
    space_digest,
)

DEVICE = DeviceInfo("nvidia_h200", "sm90", 132, ARCH_LIMITS["sm90"])
SWEEP = small_sweep(DEVICE)
SPACE = ListedSpace(SWEEP.configs)
HEADER = LogHeader(
    kernel="decode",
    key={"num_seqs": 8, "dtype": "bfloat16"},
    gpu="nvidia_h200",
    space=space_digest(SPACE.configs),
    strategy="random",
    seed=3,
    rounds=9,
)


def run(path, name="random", trials=10.0, batch=1):
    """Search with the log at `path`; returns the result and how much was measured."""
    device = ReplayDevice(SWEEP)
    strategy = make_strategy(name, SPACE, seed=3, incumbent=SPACE.configs[7])
    with TrialLog(path, replace(HEADER, strategy=name)) as log:
        result = search(
            strategy, device.measure, Budget(trials=trials), log, batch=batch
        )
    return result, device.trials


@pytest.mark.parametrize("batch", [1, 3])
def test_resume_after_a_cut_at_any_byte_gives_the_same_answer(tmp_path, batch):
    path = tmp_path / "log.jsonl"
    whole, _ = run(path, batch=batch)
    content = path.read_bytes()
    lines = content.count(b"\n")
    for size in range(len(content)):
        path.write_bytes(content[:size])
        resumed, measured = run(path, batch=batch)
        assert resumed.trials == whole.trials
        assert resumed.best == whole.best
        assert path.read_bytes() == content
        kept = max(0, content[:size].count(b"\n") - 1)
        assert measured == lines - 1 - kept


@pytest.mark.parametrize("name", SEARCHERS)
def test_every_strategy_resumes_as_if_it_had_never_stopped(tmp_path, name):
    """Part of the budget, then all of it: the same trials as in one go."""
    path = tmp_path / "log.jsonl"
    budget = 12 if name == "halving" else 60  # beyond what it draws at random
    whole, _ = run(tmp_path / "whole.jsonl", name, trials=budget)
    first, _ = run(path, name, trials=budget * 0.7)
    resumed, measured = run(path, name, trials=budget)
    # A new process has compiled nothing yet, so only what trials take may differ.
    assert [replace(t, seconds=0) for t in resumed.trials] == [
        replace(t, seconds=0) for t in whole.trials
    ]
    assert 40 < len(first.trials) == len(whole.trials) - measured
    assert measured > 0


def test_a_killed_process_leaves_a_log_to_resume(tmp_path):
    """kill -9 amid the search; the trials it had done are not measured again."""
    path = tmp_path / "log.jsonl"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import test_trial_log as t\n"
        "class Slow(t.ReplayDevice):\n"
        "    def _trial(self, proposal):\n"
        "        if self.trials == 4: print('now', flush=True); time.sleep(60)\n"
        "        return super()._trial(proposal)\n"
        "t.ReplayDevice = Slow\n"
        "t.run(t.Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parent), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "now\n"
        os.kill(process.pid, signal.SIGKILL)
    assert len(read_trials(path)[1]) == 4
    resumed, measured = run(path)
    assert measured == 6
    assert resumed.trials == run(tmp_path / "whole.jsonl")[0].trials


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff\x80", b"{}", b"[]", b"7", b'{"config": 3}', b"", b"\r"]
)
def test_garbage_amid_the_log_costs_that_line_and_one_warning(
    tmp_path, caplog, garbage
):
    path = tmp_path / "log.jsonl"
    whole, _ = run(path)
    lines = path.read_bytes().split(b"\n")
    lines[3], lines[5] = garbage, garbage
    path.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        resumed, measured = run(path)
    assert len(caplog.records) == 1
    assert f"{path}: skipped lines that are not trials: [4, 6]" in caplog.text
    assert (measured, resumed.best) == (2, whole.best)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("kernel", "prefill"),
        ("key", {"num_seqs": 9, "dtype": "bfloat16"}),
        ("gpu", "amd_instinct_mi300x"),
        ("space", "sha256:0"),
        ("strategy", "halving"),
        ("seed", 4),
        ("rounds", 3),
    ],
)
def test_the_log_of_another_search_is_refused_and_left_alone(tmp_path, field, other):
    path = tmp_path / "log.jsonl"
    run(path)
    before = path.read_bytes() + b"torn"
    path.write_bytes(before)
    with pytest.raises(LogMismatchError, match=f"another search: {field} .* instead"):
        TrialLog(path, replace(HEADER, **{field: other}))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello\n", b"{}\n", b'{"schema": 2}\n', b"[]\n"])
def test_a_file_that_is_no_log_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(LogMismatchError, match="not a trial log of schema 1"):
        TrialLog(path, HEADER)
    assert path.read_bytes() == content


def test_a_log_in_use_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    with (
        TrialLog(path, HEADER),
        pytest.raises(LogMismatchError, match="another process"),
    ):
        TrialLog(path, HEADER)
    TrialLog(path, HEADER).close()


def test_logged_trials_count_even_if_the_strategy_asks_for_others(tmp_path):
    """As after an update that changes a strategy's choices."""
    path = tmp_path / "log.jsonl"
    first, _ = run(path, trials=12)
    device = ReplayDevice(SWEEP)
    strategy = make_strategy("random", SPACE, seed=99)
    with TrialLog(path, HEADER) as log:
        second = search(strategy, device.measure, Budget(trials=20), log)
    assert set(first.trials) <= set(second.trials)
    assert len(set(second.trials)) == len(second.trials) == 20
    assert device.trials == 8
    assert second.best.time_us <= first.best.time_us


def test_a_log_beyond_the_budget_still_counts(tmp_path):
    path = tmp_path / "log.jsonl"
    first, _ = run(path, trials=12)
    second, measured = run(path, trials=2)
    assert (second.best, measured) == (first.best, 0)


def test_logged_seconds_count_against_the_budget(tmp_path):
    path = tmp_path / "log.jsonl"
    first, _ = run(path, trials=12)
    with TrialLog(path, HEADER) as log:
        device = ReplayDevice(SWEEP)
        strategy = make_strategy("random", SPACE, seed=3, incumbent=SPACE.configs[7])
        budget = Budget(seconds=first.seconds + 2.5)
        search(strategy, device.measure, budget, log)
    assert device.trials == 3  # of a little more than a second each


def test_ranking_puts_the_best_known_first_and_drops_the_invalid():
    a, b, c, d = SPACE.configs[:4]
    trials = [
        Trial(a, 1, 1.0),
        Trial(b, 9, 2.0),
        Trial(c, 9, None, "runtime"),
        Trial(d, 9, 3.0),
        Trial(a, 9, 4.0),  # the screening flattered it
    ]
    assert ranking_from(trials) == [b, d, a]


def test_the_log_is_lines_that_people_can_read(tmp_path):
    path = tmp_path / "log.jsonl"
    result, _ = run(path)
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["schema"], header["kernel"], header["seed"]) == (1, "decode", 3)
    assert len(lines) == len(result.trials)
    assert lines[0]["config"] == SPACE.configs[7].to_dict()
    assert any(line.get("invalid") == "correctness" for line in lines)


def test_digest_tells_spaces_apart():
    configs = SPACE.configs
    assert space_digest(configs) == space_digest(list(configs))
    assert space_digest(configs) != space_digest(configs[:-1])
    assert space_digest(configs) != space_digest(configs[::-1])
