# SPDX-License-Identifier: Apache-2.0
"""The sweep's own logic, on tiny cases in the interpreter."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from portable_backend.device import interpreting

SCRIPT = Path(__file__).parents[1] / "scripts" / "sweep_memory_kernels.py"


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


smoke = pytest.mark.skipif(not interpreting(), reason="the smoke run is interpreted")


@smoke
def test_smoke_run_times_each_kernel(sweep, tmp_path):
    result = tmp_path / "rows.json"
    assert sweep.main(["--smoke", "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert {row["case"].split()[0] for row in rows} == {"norm", "fused", "write"}
    for row in rows:
        assert row["wrong"] == []
        assert 0 < row["best_us"] <= row["times_us"]["default"]
        assert len(row["contestants"]) > 1


@smoke
@pytest.mark.parametrize("kernel", ["rms_norm", "write_kv_cache"])
def test_a_wrong_candidate_fails_the_run(kernel, sweep, monkeypatch, capsys):
    """A kernel that does nothing leaves its poison."""
    monkeypatch.setattr(sweep, kernel, lambda *args, **kwargs: None)
    assert sweep.main(["--smoke", "--tokens", "3"]) == 1
    assert "WRONG" in capsys.readouterr().out


def row(best_us, default_us, **rivals):
    times = {"default": default_us, "copy": 8.0, **rivals}
    config = {"num_warps": 4, "ROWS": 1, "PROGRAMS_PER_UNIT": 8, "EVICT_FIRST": True}
    return {
        "case": "norm 1x64",
        "best": config,
        "best_us": best_us,
        "best_gbps": 1.0,
        "times_us": times,
    }


@pytest.mark.parametrize(
    ("best_us", "default_us", "marks"),
    [(10.0, 10.2, 0), (10.0, 11.0, 1), (11.0, 11.0, 2), (math.inf, math.inf, 2)],
)
def test_losses_of_more_than_3_percent_are_marked(best_us, default_us, marks, sweep):
    text = sweep.table([row(best_us, default_us, vllm=10.0, compile=12.0)])
    assert text.splitlines()[1].count("*") == marks
    assert "W4 R1 P8 E" in text


def test_graphs_hold_each_buffer_set_equally_often(sweep):
    for case in (sweep.NormCase(1, 576, False), sweep.NormCase(16384, 8192, True)):
        for sets in (1, 2, 8):
            calls = sweep.num_calls(case, sets)
            assert calls % sets == 0
            assert calls >= sets


def test_cases_that_compile_alike_are_compiled_once(sweep):
    config = sweep.KernelConfig.of(ROWS=1, PROGRAMS_PER_UNIT=4, num_warps=4)
    jobs = {
        sweep._as_compiled(
            sweep.NormCase(tokens, 576, False), config.replace(PROGRAMS_PER_UNIT=n)
        )
        for tokens in (16, 4096)
        for n in (4, 8)
    }
    assert len(jobs) == 1
    other = sweep._as_compiled(
        sweep.NormCase(16, 576, False), config.replace(PROGRAMS_PER_UNIT=0)
    )
    assert other not in jobs
