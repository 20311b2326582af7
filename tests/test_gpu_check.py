# SPDX-License-Identifier: Apache-2.0
"""The GPU run's own logic: what counts as equal, as failed, and as out of time."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_check():
    return load("gpu_check")


@pytest.fixture(scope="module")
def same_tokens():
    return load("same_tokens")


@pytest.fixture(scope="module")
def serve_check():
    return load("serve_check")


def row(ids, gaps=None):
    return {"ids": ids, "gaps": gaps or [1.0] * len(ids), "text": ""}


def test_equal_tokens_are_the_same(same_tokens):
    result = same_tokens.compare([row([1, 2, 3])], [row([1, 2, 3])])
    assert (result["same"], result["near_tie"], result["bad"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("reference_gap", "our_gap", "bad"),
    [(0.1, 2.0, 0), (2.0, 0.1, 0), (0.15, 0.15, 1), (2.0, 2.0, 1)],
)
def test_a_difference_is_bad_unless_the_best_two_were_close(
    reference_gap, our_gap, bad, same_tokens
):
    """Only the first difference counts: what follows it has another context."""
    reference = row([1, 2, 9], [5.0, reference_gap, 5.0])
    ours = row([1, 3, 8], [5.0, our_gap, 5.0])
    result = same_tokens.compare([reference], [ours])
    assert result["bad"] == bad
    assert result["near_tie"] == 1 - bad
    if bad:
        assert result["where"][0]["token"] == 1


def test_a_close_call_elsewhere_excuses_nothing(same_tokens):
    reference = row([1, 2, 3], [0.0, 5.0, 0.0])
    result = same_tokens.compare([reference], [row([1, 9, 3], [0.0, 5.0, 0.0])])
    assert result["bad"] == 1


def test_runs_over_other_prompts_are_not_compared(same_tokens):
    with pytest.raises(ValueError, match="1 prompts against 2"):
        same_tokens.compare([row([1])], [row([1]), row([1])])


def test_compare_exits_with_an_error_for_bad_prompts(tmp_path):
    files = []
    for name, ids in (("a", [1, 2]), ("b", [1, 3])):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps([row(ids)]))
    for other, code in ((files[1], 1), (files[0], 0)):
        command = [sys.executable, "-P", SCRIPTS / "same_tokens.py", "compare"]
        done = subprocess.run([*command, files[0], other], capture_output=True)
        assert done.returncode == code


def test_prompts_need_chunks_and_share_a_prefix(same_tokens):
    prompts = same_tokens.prompts()
    assert len(prompts) == len(set(prompts)) >= 24
    # At most five characters a token: the longest take several chunks of 512 tokens.
    assert sum(len(p) > 5 * 512 for p in prompts) >= 3
    assert prompts[-1].startswith(prompts[-2])


def test_failed_and_drawn_tests_are_counted(gpu_check, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase name="test_drawn_case_matches[seed0]"/>'
        '<testcase name="test_drawn_case_matches[seed1]"><failure/></testcase>'
        '<testcase name="test_other"/>'
        '<testcase name="test_gone"><error/></testcase>'
        '<testcase name="test_left"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = gpu_check.junit_counts(report)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 2, 1)
    assert counts["drawn"] == 1
    assert counts["failed_names"] == ["test_drawn_case_matches[seed1]", "test_gone"]
    assert gpu_check.junit_counts(tmp_path / "absent.xml") == {}


def test_failures_are_named_even_of_a_run_cut_short(gpu_check, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "[gw0] [  5%] PASSED tests/test_a.py::test_x \n"
        "[gw1] [  6%] FAILED tests/test_a.py::test_y[1-a b] \n"
        "[gw1] [  7%] ERROR tests/test_b.py::test_z \n"
        "FAILED tests/test_a.py::test_y[1-a b] - assert 1 == 2\n"
    )
    assert gpu_check.failed_in_log(log) == [
        "tests/test_a.py::test_y[1-a",
        "tests/test_b.py::test_z",
    ]
    assert gpu_check.failed_in_log(tmp_path / "absent") == []


def test_a_job_out_of_time_is_ended_with_its_children(gpu_check, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    job = gpu_check.Job([sys.executable, "-c", code], tmp_path / "log")
    assert job.wait(1) == "not done within 1 s"
    time.sleep(3)
    assert not alive.exists()


def test_a_job_says_how_it_ended(gpu_check, tmp_path):
    job = gpu_check.Job([sys.executable, "-c", "print('x'); exit(3)"], tmp_path / "log")
    assert job.wait(30) == "exit code 3"
    assert job.text == "x\n"
    assert gpu_check.Job([sys.executable, "-c", ""], tmp_path / "log").wait(30) is None


def test_a_stage_that_fails_does_not_stop_the_next(tmp_path):
    """No model, no benchmark given: two failed rows, a table and a report."""
    command = [sys.executable, "-P", SCRIPTS / "gpu_check.py", "--out", tmp_path]
    done = subprocess.run(
        [*command, "--stages", "tokens,anchor"], capture_output=True, text=True
    )
    assert done.returncode == 1
    rows = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(r["stage"], r["passed"]) for r in rows] == [
        ("tokens", False),
        ("anchor", False),
    ]
    assert "give --model" in done.stdout.splitlines()[-2]


def test_an_unknown_stage_lists_the_known_ones(tmp_path):
    command = [sys.executable, "-P", SCRIPTS / "gpu_check.py", "--stages", "nonsense"]
    done = subprocess.run([*command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "sanitizer" in done.stdout


def test_the_load_mixes_lengths_and_shares_a_prefix(serve_check):
    requests = serve_check.draw_requests(200, 8000, 1000, seed=0)
    lengths = [len(prompt) for prompt, _ in requests]
    assert min(lengths) == 1
    assert max(lengths) == 8000
    quarters = [
        sum(lo <= math.log(n, 8000) < lo + 0.25 for n in lengths)
        for lo in (0, 0.25, 0.5, 0.75)
    ]
    assert min(quarters) >= 20
    starts = [tuple(p[:2000]) for p, _ in requests if len(p) > 2000]
    assert len(starts) - len(set(starts)) >= 10
    assert all(2 <= token < 1000 for prompt, _ in requests for token in prompt)


def test_compilations_while_serving_are_seen(serve_check):
    """The monitor's own words in the versions we serve under."""
    for line in (
        "WARNING Triton kernel JIT compilation during inference: _decode_kernel. This",
        "WARNING Triton autotuning during inference: _decode_kernel. This",
    ):
        assert serve_check.JIT_WARNING.search(line)
    assert not serve_check.JIT_WARNING.search(
        "Kernel JIT monitor activated; monitored JIT compilations during inference "
        "will use mode=warn."
    )
