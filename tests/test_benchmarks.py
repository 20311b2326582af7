# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmarks at tiny shapes, and the comparison of two runs of them."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable_backend.bench.shape_lists import ATTENTION_LISTS, FAMILIES, NORM_LISTS

ROOT = Path(__file__).parents[1]


def run_benchmarks(*options, **environment):
    """`pytest benchmarks` in the interpreter."""
    environment = {"TRITON_INTERPRET": "1", **environment}
    paths = [environment.pop("path", ""), *sys.path]
    command = [sys.executable, "-P", "-m", "pytest", "benchmarks", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    # Within a worker of pytest-xdist pytest-benchmark would time nothing.
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [*command, *map(str, options)],
        cwd=ROOT,
        env=ours | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_they_run_and_are_right_without_a_gpu(tmp_path):
    pytest.importorskip("pytest_benchmark")
    file = tmp_path / "x.json"
    done = run_benchmarks("--benchmark-json", file, "-k", "prefill or norm")
    assert done.returncode == 0, done.stdout
    assert "vllm_triton: needs a GPU" in done.stdout
    data = json.loads(file.read_text())
    assert "interpreter" in data["machine_info"]["portable"]["gpu"]
    found = {row["extra_info"]["provider"] for row in data["benchmarks"]}
    assert {"portable", "torch_sdpa", "flex_attention"} <= found
    for row in data["benchmarks"]:
        assert row["extra_info"]["error"] <= 1e-4
        assert row["stats"]["median"] > 0


@pytest.mark.parametrize(
    ("when", "message"),
    [(1, "wrong before it was timed"), (2, "wrong after it was timed")],
)
def test_a_wrong_kernel_fails_and_has_no_time(when, message, tmp_path):
    pytest.importorskip("pytest_benchmark")
    tmp_path.joinpath("planted.py").write_text(f"""
import itertools
from portable_backend.bench import norm
right, count = norm.rms_norm, itertools.count()

def wrong(x, weight, eps, *, out, **kwargs):
    right(x, weight, eps, out=out, **kwargs)
    if next(count) >= {when - 1}:
        out.mul_(1.01)

norm.rms_norm = wrong
""")
    file = tmp_path / "x.json"
    options = ["--providers", "portable", "-k", "norm and not add"]
    # Imported after the benchmarks' conftest has switched the interpreter on.
    done = run_benchmarks(
        *options, "--benchmark-json", file, "-p", "planted", path=str(tmp_path)
    )
    assert done.returncode == 1, done.stdout
    assert message in done.stdout
    assert not file.exists() or not file.read_text() or not json.loads(
        file.read_text()
    )["benchmarks"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--providers", "fa9"], "--providers must name some of fa3, .* got fa9"),
        (["--shape-lists", "x"], "--shape-lists must name some of tiny, .* got x"),
    ],
)
def test_wrong_names_are_told(options, message):
    pytest.importorskip("pytest_benchmark")
    import re

    done = run_benchmarks(*options)
    assert done.returncode != 0
    assert re.search(message, done.stdout + done.stderr)


def test_the_timer_counts_what_lies_between_two_events(monkeypatch):
    """And waits for the later one only, so that nothing stops the queue before."""
    from portable_backend.bench import cold

    waited, clock = [], iter((1.0, 3.5))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = next(clock)

        def synchronize(self):
            waited.append(self.at_ms)

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(cold.torch.cuda, "Event", Event)
    start = cold.device_timer()
    end = cold.device_timer()
    assert not waited
    assert end - start == pytest.approx(2.5e-3)
    assert waited == [3.5]


def test_the_grid_has_its_corners():
    shapes = ATTENTION_LISTS["grid"]()
    assert {shape.dtype for shape in shapes} == {"fp16", "bf16"}
    assert {shape.heads for shape in shapes} == {(32, 8)}
    assert {shape.head_size for shape in shapes} == {128}
    names = {shape.name for shape in shapes}
    for name in (
        "decode 1x16",
        "decode 128x16384",
        "prefill 1x16384",
        "prefill 128x16",
    ):
        assert name in names
    assert max(shape.num_tokens for shape in shapes) <= 65536


def test_every_list_has_distinct_shapes_for_attention_and_norm():
    assert set(ATTENTION_LISTS) == set(NORM_LISTS) == {"tiny", "grid", *FAMILIES}
    for lists in (ATTENTION_LISTS, NORM_LISTS):
        for name, make in lists.items():
            labels = [(s.name, *s.fields.values()) for s in make()]
            assert len(labels) == len(set(labels)) > 0, name
    gpt_oss = ATTENTION_LISTS["gpt-oss-20b"]()
    assert all(shape.sinks and shape.heads == (64, 8) for shape in gpt_oss)
    assert {shape.sliding_window for shape in gpt_oss} == {None, 128}
    gemma = ATTENTION_LISTS["gemma2-9b"]()
    assert {shape.softcap for shape in gemma} == {50.0}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)
@pytest.mark.parametrize("name", ["torch_sdpa", "flex_attention"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7}, {"alibi": True}, {"softcap": 5.0}, {"sinks": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_torchs_attention_agrees_with_the_oracle_or_says_why_not(name, options):
    from dataclasses import replace

    import torch

    from portable_backend.bench.dense import DENSE
    from portable_backend.bench.inputs import make_inputs, oracle
    from portable_backend.bench.shapes import chunk, decode, prefill
    from portable_backend.bench.timing import relative_error
    from portable_backend.errors import UnsupportedError

    for step in (prefill(2, 20), chunk(5, 30), decode(3, 33)):
        small = {"heads": (4, 2), "head_size": 32, "block_size": 16, "dtype": "fp32"}
        inputs = make_inputs(replace(step, **small, **options), torch.device("cpu"))
        try:
            dense = DENSE[name](inputs)
        except UnsupportedError as error:
            assert name == "torch_sdpa" and {"softcap", "sinks"} & set(options)
            assert "neither soft caps nor sinks" in str(error)
            continue
        rows = dense.rows(dense.call())
        assert rows.shape == inputs.query.shape
        assert relative_error(rows, oracle(inputs)) < 1e-6


# -------------------------------------------------------------------------- comparison


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "compare_benchmarks.py"
    spec = importlib.util.spec_from_file_location("compare_benchmarks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(folder, name, medians, *, iqr=0.005, rounds=30, **header):
    """A run: benchmark -> median in microseconds; ours are those named ours*."""
    header = {"gpu": "H200", "versions": "torch 2", "commit": name} | header
    rows = [
        {
            "fullname": benchmark,
            "extra_info": {"ours": benchmark.startswith("ours")},
            "stats": {"median": us / 1e6, "iqr": iqr * us / 1e6, "rounds": rounds},
        }
        for benchmark, us in medians.items()
    ]
    file = folder / f"{name}.json"
    machine = {"portable": header}
    file.write_text(json.dumps({"machine_info": machine, "benchmarks": rows}))
    return str(file)


def test_verdicts_follow_the_noise(script, tmp_path, capsys):
    before = write(tmp_path, "a", {"ours 1": 100.0, "ours 2": 100.0, "ours 3": 100.0})
    after = write(tmp_path, "b", {"ours 1": 104.0, "ours 2": 95.0, "ours 3": 101.0})
    assert script.main([before, after]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "commit     a -> b" in lines
    assert any(line.startswith("slower     1.040") for line in lines)
    assert any(line.startswith("faster     0.950") for line in lines)
    assert lines[-1] == "1 slower, 1 faster, 1 same, 0 missing, 0 new"
    assert script.main([before, after, "--threshold", "6"]) == 0
    wide = write(tmp_path, "c", {"ours 1": 104.0}, iqr=0.5)
    before = write(tmp_path, "a", {"ours 1": 100.0})
    assert script.main([before, wide, "--all"]) == 0
    assert "same       1.040 (noise 14.3%)" in capsys.readouterr().out


def test_others_tell_what_two_runs_differ_by(script, tmp_path, capsys):
    others = {f"torch {i}": 100.0 for i in range(10)}
    moved = {name: 104.0 for name in others}
    before = write(tmp_path, "a", others | {"ours": 100.0})
    after = write(tmp_path, "b", moved | {"ours": 103.0})
    assert script.main([before, after]) == 0
    assert "nine in ten changed by at most 4.0%" in capsys.readouterr().out
    # With other versions they may have changed themselves.
    after = write(tmp_path, "b", moved | {"ours": 103.0}, versions="torch 3")
    assert script.main([before, after]) == 1


def test_others_regressions_are_shown_and_fail_nothing(script, tmp_path, capsys):
    before = write(tmp_path, "a", {"torch": 100.0, "ours": 100.0})
    after = write(tmp_path, "b", {"torch": 150.0, "ours": 100.0})
    assert script.main([before, after]) == 0
    assert "slower     1.500" in capsys.readouterr().out


def test_one_of_ours_that_is_missing_is_a_regression(script, tmp_path, capsys):
    before = write(tmp_path, "a", {"torch": 100.0, "ours": 100.0})
    assert script.main([before, write(tmp_path, "b", {"torch": 100.0})]) == 1
    assert "missing    ours" in capsys.readouterr().out
    assert script.main([before, write(tmp_path, "b", {"ours": 100.0})]) == 0


def test_too_few_rounds_decide_nothing(script, tmp_path, capsys):
    before = write(tmp_path, "a", {"ours": 100.0, "torch": 100.0}, rounds=1)
    after = write(tmp_path, "b", {"ours": 300.0, "torch": 100.0})
    assert script.main([before, after]) == 2
    assert "expected 5 rounds or more of our kernels" in capsys.readouterr().err


def test_runs_that_say_nothing_are_refused(script, tmp_path, capsys):
    others = {f"torch {i}": 100.0 for i in range(10)}
    before = write(tmp_path, "a", others | {"ours": 100.0})
    after = write(tmp_path, "b", {n: 200.0 for n in others} | {"ours": 200.0})
    assert script.main([before, after]) == 2
    assert "change by 25% at most, got 100%" in capsys.readouterr().err
    assert script.main([write(tmp_path, "c", {}), after]) == 2
    assert "benchmarks that both files have, got none" in capsys.readouterr().err
    # One that is lost is still a regression.
    assert script.main([before, write(tmp_path, "d", {"new": 1.0})]) == 1


@pytest.mark.parametrize("median", [0.0, -1.0, math.nan, math.inf])
def test_medians_that_are_no_times_are_refused(script, tmp_path, capsys, median):
    before = write(tmp_path, "a", {"ours": 100.0})
    assert script.main([before, write(tmp_path, "b", {"ours": median})]) == 2
    assert "a median of" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(script, tmp_path, capsys):
    before = write(tmp_path, "a", {"ours": 100.0})
    after = write(tmp_path, "b", {"ours": 100.0}, gpu="MI300X")
    assert script.main([before, after]) == 2
    assert "got H200 and MI300X; --any-machine" in capsys.readouterr().err
    assert script.main([before, after, "--any-machine"]) == 0
    assert script.main([before, str(tmp_path / "none.json")]) == 2
    assert "expected a file of `pytest benchmarks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main([before, after, "--threshold", "-1"])
    assert "must be a percentage from 0 on" in capsys.readouterr().err
    assert math.isinf(
        script.read(Path(write(tmp_path, "c", {"x": 1.0}, rounds=4)))[0]["x"].noise
    )
