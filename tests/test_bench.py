# SPDX-License-Identifier: Apache-2.0
"""The benchmark's command line: no time counts before the result is right."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from portable_backend import device
from portable_backend.bench.cli import SUITES, main

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def environment_as_usual(monkeypatch):
    """The command sets variables that are unset, which must not reach other tests."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


def bench(*arguments):
    return main(["--device", "cpu", *map(str, arguments)])


@interpreted
def test_every_suite_runs_and_is_right_on_a_cpu(tmp_path, capsys):
    files = ["--json", tmp_path / "x.json", "--markdown", tmp_path / "x.md"]
    assert bench(*files) == 0
    printed = capsys.readouterr().out
    assert "absent    fa3, vllm_triton, vllm, torch_compile: needs a GPU" in printed
    assert "times not claimed" in printed
    data = json.loads((tmp_path / "x.json").read_text())
    assert {row["suite"] for row in data["rows"]} == set(SUITES)
    for row in data["rows"]:
        assert row["label"] in printed
        ours = row["results"].get("portable")
        if ours is None:
            assert row["suite"] in ("copy", "matmul")
            continue
        assert ours["reason"] is None
        assert ours["time_us"] is None
        has_output = row["suite"] != "host" and not row["name"].startswith("plan")
        assert (ours["error"] is not None) == has_output
        assert not has_output or row["reference"] == "oracle"
    assert {"date", "gpu", "versions", "command"} <= set(data["environment"])
    assert "## attention" in (tmp_path / "x.md").read_text()


def test_a_cpu_interprets_without_being_told():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("TRITON_INTERPRET")
    command = [sys.executable, "-P", "-m", "portable_backend.bench"]
    command += ["--device", "cpu", "--suites", "norm", "--rows", "tokens=1 "]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "portable right" in done.stdout


def test_a_cpu_does_not_interpret_where_that_is_switched_off(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    device._detect.cache_clear()
    assert bench("--suites", "norm") == 2
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err


def scaled(kernel):
    def wrong(query, *args, out, **kwargs):
        return kernel(query, *args, out=out, **kwargs).mul_(1.01)

    return wrong


def skipping_a_row(kernel):
    def wrong(query, *args, out, **kwargs):
        last = out[-1].clone()
        kernel(query, *args, out=out, **kwargs)
        out[-1] = last

    return wrong


def touching_unused_slots(kernel):
    def wrong(query, key_cache, *args, out, **kwargs):
        kernel(query, key_cache, *args, out=out, **kwargs).add_(0 * key_cache.sum())

    return wrong


def norm_without_weight(kernel):
    return lambda x, weight, eps, **kwargs: kernel(x, None, eps, **kwargs)


def write_to_a_slot_too_many(kernel):
    def wrong(key, value, key_cache, value_cache, slot_mapping):
        kernel(key, value, key_cache, value_cache, slot_mapping)
        value_cache[-1, -1] = 0

    return wrong


@interpreted
@pytest.mark.parametrize(
    ("suite", "module", "kernel", "wrong"),
    [
        ("attention", "providers", "paged_attention", scaled),
        ("attention", "providers", "paged_attention", skipping_a_row),
        ("attention", "providers", "paged_attention", touching_unused_slots),
        ("norm", "norm", "rms_norm", norm_without_weight),
        ("cache", "cache", "write_kv_cache", write_to_a_slot_too_many),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_kernel_is_reported_and_fails_the_run(
    suite, module, kernel, wrong, monkeypatch, capsys
):
    where = importlib.import_module(f"portable_backend.bench.{module}")
    monkeypatch.setattr(where, kernel, wrong(getattr(where, kernel)))
    assert bench("--suites", suite) == 1
    printed = capsys.readouterr().out
    assert "| portable WRONG, error" in printed
    assert "\nfailed    portable " in printed


@interpreted
def test_a_kernel_that_cannot_run_fails_the_run(monkeypatch, capsys):
    from portable_backend.bench import norm

    def broken(*args, **kwargs):
        raise ValueError("x must be something else")

    monkeypatch.setattr(norm, "rms_norm", broken)
    assert bench("--suites", "norm", "--rows", "tokens=5") == 1
    assert "portable ValueError: x must be something else" in capsys.readouterr().out


@interpreted
def test_a_row_whose_inputs_fail_does_not_stop_the_others(monkeypatch, capsys):
    from portable_backend.bench import attention

    def no_inputs(shape, *args, **kwargs):
        raise RuntimeError("device is gone")

    monkeypatch.setattr(attention, "make_inputs", no_inputs)
    assert bench("--suites", "attention,copy") == 1
    printed = capsys.readouterr().out
    assert "prefill 2x20" in printed
    assert "portable RuntimeError: device is gone" in printed
    assert "copy copy bytes=4096" in printed


@interpreted
def test_others_errors_are_printed_and_do_not_fail_the_run(monkeypatch, capsys):
    from portable_backend.bench import providers

    def wrong_rival(inputs, out):
        return providers.Prepared([lambda: out.fill_(1.0)], None)

    def no_rival(inputs, out):
        raise NotImplementedError("not on this machine")

    monkeypatch.setitem(providers.ATTENTION, "fa3", wrong_rival)
    monkeypatch.setitem(providers.ATTENTION, "vllm_triton", no_rival)
    monkeypatch.setattr(providers, "absent_here", lambda device: {})
    assert bench("--suites", "geometries", "--rows", "heads=6/1") == 0
    printed = capsys.readouterr().out
    assert "| fa3 WRONG, error" in printed
    assert "| vllm_triton NotImplementedError: not on this machine" in printed
    assert "| portable right" in printed


@interpreted
def test_what_the_budget_does_not_cover_is_left_out_by_name(tmp_path, capsys):
    file = tmp_path / "x.json"
    assert bench("--suites", "norm", "--budget-s", 1e-9, "--json", file) == 0
    printed = capsys.readouterr().out
    assert (
        "left out  norm norm tokens=1 row_size=64 dtype=fp32: no time left" in printed
    )
    assert len(json.loads(file.read_text())["left_out"]) == 4


@interpreted
def test_rows_and_implementations_can_be_chosen(capsys):
    options = ("--suites", "attention", "--rows", "prefill 2x20 heads")
    assert bench(*options, "--impls", "portable_exact") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("attention ")]
    assert len(rows) == 2  # attention, and its plan
    assert all("portable_exact" in row and "portable " not in row for row in rows)


def test_labels_can_be_listed_where_there_is_no_gpu(capsys):
    assert main(["--list", "--rows", "decode 256x4096"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 3  # two block sizes and the plan
    assert (
        "attention decode 256x4096 heads=32/8 head_size=128 block_size=16" in listed[0]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "norm,speed"], "must name some of copy, matmul, .* got speed"),
        (["--impls", "fa5"], "must name some of .* got fa5"),
        (["--rows", "no such row", "--list"], "--rows 'no such row' is in no label"),
        (["--json", "no/such/folder/b.json"], "b.json: no file can be written there"),
        (["--device", "abacus"], "--device abacus: "),
        (["--device", "meta"], "device must be cuda"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(arguments, message, capsys):
    assert bench(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)
