# SPDX-License-Identifier: Apache-2.0
"""scripts/end_to_end.py without engines: requests, comparison, table."""

import importlib.util
import sys
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
    assert lines[0].split() == ["batch", "portable", "300", "tokens/s"]
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
