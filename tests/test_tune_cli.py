# SPDX-License-Identifier: Apache-2.0
"""`portable-backend tune`, on recorded sweeps: results, progress, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from search_cases import small_sweep, time_of
from tuner_fakes import DEVICE, key_of, worker_path

from portable_backend import cli
from portable_backend.commands import tune
from portable_backend.commands.tune_progress import make_progress
from portable_backend.warmup import tuning_tools
from portable_backend.warmup.layers import WritableLayer
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.portfolio import parse_portfolio
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.store import RecordStore
from portable_backend.warmup.sweeps import Sweep, write_sweep
from portable_backend.warmup.tuning_report import Counts, Event, Outcome

UNIT_FIELDS = {
    "kernel": str,
    "key": dict,
    "state": str,
    "reason": str,
    "gpu": str,
    "config": dict,
    "time_us": float,
    "default_us": float,
    "gain": float,
    "counts": dict,
    "stopped": str,
    "seconds": float,
}


@pytest.fixture
def sweeps(tmp_path, monkeypatch):
    """A folder of three sweeps; nothing else is set."""
    for name in ("PORTABLE_BACKEND_CACHE_DIR", "PORTABLE_BACKEND_CACHE_LAYERS"):
        monkeypatch.delenv(name, raising=False)
    base = small_sweep(DEVICE)
    for n in (1024, 2048, 4096):
        key = {**base.key, "seq_len": n}
        sweep = Sweep("decode", key, DEVICE, base.rows, {"triton": "3.6.0"}, True)
        write_sweep(sweep, tmp_path / "sweeps")
    return tmp_path / "sweeps"


@pytest.fixture
def run(capsys, sweeps, tmp_path):
    def run(*arguments, replay=sweeps, cache=tmp_path / "cache"):
        """Exit code, stdout (parsed if it is JSON) and stderr."""
        given = ["tune", *map(str, arguments)]
        given += ["--replay", str(replay)] if replay else []
        given += ["--cache-dir", str(cache)] if cache else []
        try:
            code = cli.main(given)
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        is_json = "--json" in arguments and out
        return code, json.loads(out) if is_json else out, err

    return run


def test_the_result_goes_to_stdout_and_progress_to_stderr(run):
    code, out, err = run("--trials", 20)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("tuned       decode[")
    assert "BLOCK_N=" in lines[0] and "3 tuned in" in lines[3]
    assert "considered" in lines[3] and "correctness" in lines[3]
    assert lines[4].startswith("decode: portfolio of") and "at worst" in lines[4]
    assert err.startswith("[1/3] decode[") and "[3/3]" in err


def test_the_json_result_has_these_fields(run, tmp_path):
    code, result, _ = run("--trials", 20, "--json")
    assert code == 0
    assert (result["schema"], result["dry_run"]) == (1, False)
    assert (result["strategy"], result["states"]) == ("bayesian", {"tuned": 3})
    assert result["cache_dir"] == str(tmp_path / "cache")
    assert set(result["counts"]) == {
        "considered",
        "pruned",
        "compiled",
        "timed",
        "rejected",
    }
    assert result["counts"]["considered"] == 3 * 108
    for unit in result["units"]:
        assert {name: type(value) for name, value in unit.items()} == UNIT_FIELDS
        counts = unit["counts"]
        assert counts["timed"] + sum(counts["rejected"].values()) == 20
        assert unit["gain"] == unit["default_us"] / unit["time_us"] > 1


def test_what_it_wrote_can_be_listed(run, capsys, tmp_path):
    run("--trials", 20)
    assert (
        cli.main(["cache", "show", "--json", "--cache-dir", f"{tmp_path}/cache"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 3 and all(row["verified"] for row in rows)
    # Records from sweeps must not serve real kernels, whatever GPU they are of.
    assert all(row["kernel_digest"].startswith("replay:") for row in rows)


def test_it_says_what_the_portfolio_loses_and_a_lookup_finds_it(run, tmp_path):
    _, result, _ = run("--strategy", "exhaustive", "--json")
    (told,) = result["portfolios"]
    assert (told["kernel"], told["gpu"]) == ("decode", DEVICE.name)
    assert len(told["configs"]) <= 8 and told["buckets"] == 3 and told["loss"] >= 1
    assert told["worst_loss"] >= 1 and told["worst_key"]["seq_len"] in (
        1024,
        2048,
        4096,
    )
    record = result["units"][0]
    (file,) = (tmp_path / "cache" / "decode").glob("*.portfolio.json")
    assert str(file) == told["path"]
    portfolio = parse_portfolio(file.read_bytes(), "", "decode", DEVICE.name)
    digests = {"decode": portfolio.kernel_digest}
    environment = Environment(DEVICE.name, DEVICE.arch, digests)
    store = RecordStore.open(tmp_path / "cache", shipped=tmp_path / "none")
    far = TuningKey.from_dict("decode", record["key"] | {"seq_len": 1 << 30})
    choice = Lookup(store, environment, lambda key: None).choose(far)
    assert (choice.grade, choice.config.to_dict()) == ("portfolio", record["config"])


def test_a_portfolio_that_cannot_be_written_fails_the_run_and_says_so(run, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(WritableLayer, "write_file", fail)
    code, result, err = run("--trials", 20, "--json")
    assert (code, result["portfolios"]) == (1, []) and "no space left" in err
    assert result["states"] == {"tuned": 3}


def test_a_second_run_has_nothing_to_do_unless_told(run):
    run("--trials", 20)
    assert run("--trials", 20, "--json")[1]["states"] == {"known": 3}
    assert run("--trials", 20, "--json", "--again")[1]["states"] == {"tuned": 3}


def test_other_sweeps_are_other_code(run, sweeps):
    run("--trials", 20)
    base = small_sweep(DEVICE, rounds=12)
    key = {**base.key, "seq_len": 1024}
    write_sweep(Sweep("decode", key, DEVICE, base.rows, {}, True), sweeps)
    assert run("--trials", 20, "--json")[1]["states"] == {"tuned": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strategy", "halving"],
        ["--strategy", "evolutionary", "--no-warm-start"],
        ["--no-model", "--seed", "3"],
    ],
    ids=str,
)
def test_it_comes_near_the_optimum(run, sweeps, arguments):
    _, result, _ = run("--trials", 80, "--json", *arguments)
    best_us = small_sweep(DEVICE).best_us
    assert all(unit["time_us"] <= 1.05 * best_us for unit in result["units"])


def test_exhaustive_tries_everything(run):
    _, result, _ = run("--strategy", "exhaustive", "--json")
    assert all(unit["stopped"] == "exhausted" for unit in result["units"])
    best_us = small_sweep(DEVICE).best_us
    assert all(unit["time_us"] == best_us for unit in result["units"])


def test_a_budget_in_seconds_counts_what_the_sweeps_took(run):
    """Each of the small sweep's configs took a second and more."""
    _, result, _ = run("--budget-s", 30, "--json")
    took = sum(unit["seconds"] for unit in result["units"])
    assert 15 < took < 40
    assert result["counts"]["timed"] < 40


def test_a_dry_run_counts_and_estimates_and_writes_nothing(run, tmp_path):
    code, result, err = run("--dry-run", "--json", cache=None)
    assert (code, err) == (0, "")
    assert result["dry_run"] and result["gpu"] == DEVICE.name
    assert (result["considered"], result["kept"]) == (324, 324)
    assert [unit["considered"] for unit in result["units"]] == [108] * 3
    assert result["estimated_s"] > 60
    assert run("--dry-run", "--json", "--budget-s", 50)[1]["estimated_s"] == 50
    code, out, _ = run("--dry-run")
    assert code == 0 and "3 units, 324 configs" in out and "min on one GPU" in out
    assert not (tmp_path / "cache").exists()


def test_gpus_spread_the_work(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", worker_path())
    code, result, err = run("--trials", 20, "--gpus", "0,1", "--json")
    assert (code, result["states"]) == (0, {"tuned": 3})
    assert err.count("tuned") == 3


def test_a_unit_that_fails_exits_1_and_says_why(run, monkeypatch):
    confirm = tuning_tools.Replay.confirm

    def fail(self, key, config, seed):
        if key.to_dict()["seq_len"] == 2048:
            raise RuntimeError("the GPU fell off the bus")
        return confirm(self, key, config, seed)

    monkeypatch.setattr(tuning_tools.Replay, "confirm", fail)
    code, result, _ = run("--trials", 20, "--json")
    assert (code, result["states"]) == (1, {"failed": 1, "tuned": 2})
    (reason,) = [u["reason"] for u in result["units"] if u["state"] == "failed"]
    assert "fell off the bus" in reason


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--strategy", "luck"], "invalid choice"),
        (["--trials", "0"], "must be at least 1"),
        (["--budget-s", "-1"], "above 0"),
        (["--gpus", "all", "--ray"], "not both"),
        (["--model", "x", "--shapes", "y"], "not both"),
        (["--arch", "sm90"], "--dry-run"),
        (["--trials", "x"], "--trials: must be at least 1, got x"),
        (["--speculative-tokens", "-1"], "must be 0 or more, got -1"),
        (["--budget-s", "nan"], "--budget-s: must be seconds above 0, got nan"),
        (["--gpus", "x"], "--gpus must be all, or numbers such as 0,1, got x"),
        (["--gpus=-1"], "got -1; name each GPU once"),
        (["--gpus", "0,0"], "got 0,0; name each GPU once"),
        (["--gpus", ""], "--gpus must be all, or numbers"),
        (["--gpus", "0,"], "--gpus must be all, or numbers"),
    ],
    ids=str,
)
def test_wrong_usage_exits_2(run, arguments, remedy):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and remedy in err


@pytest.mark.parametrize("size", [65537, 10**30])
def test_a_row_that_no_kernel_takes_is_refused(run, tmp_path, size):
    norm = {"dtype": "bfloat16", "row_size": size, "fused_add": 1, "num_rows": 16}
    shapes, model = tmp_path / "shapes.json", tmp_path / "config.json"
    shapes.write_text(json.dumps([{"kernel": "rms_norm", "key": norm}]))
    heads = {"num_attention_heads": 8, "num_hidden_layers": 2, "head_dim": 64}
    model.write_text(json.dumps({"hidden_size": size} | heads))
    for given in (["--shapes", shapes], ["--model", model]):
        code, out, err = run(*given, "--dry-run", "--arch", "sm90", replay=None)
        assert (code, out) == (2, "")
        assert f"row_size must be at most 65536, got {size}" in err
        assert err.startswith(f"portable-backend: {given[1]}")


def test_a_run_needs_something_to_tune_and_a_place_for_what_was_replayed(run, tmp_path):
    code, _, err = run(replay=None)
    assert code == 2 and "--model, --shapes or --replay" in err
    code, _, err = run(cache=None)
    assert code == 2 and "--replay needs --cache-dir" in err
    code, _, err = run(replay=tmp_path / "none")
    assert code == 2 and "folder must be one with" in err


CTRL_C = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from portable_backend import cli
from portable_backend.warmup import replay
answer = replay.ReplayDevice._trial
def slow(self, proposal):
    time.sleep(0.01)
    return answer(self, proposal)
replay.ReplayDevice._trial = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_exits_130_with_what_was_done(sweeps, tmp_path):
    arguments = ["tune", "--replay", sweeps, "--cache-dir", tmp_path / "cache"]
    arguments += ["--strategy", "exhaustive", "--json"]
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CTRL_C, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": worker_path()},
    )
    assert b"[1/3]" in child.stderr.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert child.returncode == 130 and err.endswith(b"run it again to go on\n")
    result = json.loads(out)
    assert result["states"] == {"tuned": 1, "interrupted": 1, "unreached": 1}
    again = subprocess.run(
        [sys.executable, "-P", "-c", CTRL_C, *map(str, arguments)],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": worker_path()},
    )
    assert json.loads(again.stdout)["states"] == {"known": 1, "tuned": 2}


class Terminal:
    """A stream that says it is one."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_on_a_terminal_with_and_without_rich(monkeypatch, has_rich):
    if has_rich:
        pytest.importorskip("rich", reason="needs rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream, key, counts = Terminal(), key_of(1), Counts(9, 0, 2, 2)
    with make_progress(1, 10, stream) as show:
        show(Event("started", key))
        show(Event("trial", key, counts, 3.5))
        show(Event("note", key, counts, note="a note"))
        outcome = Outcome(key, "default", counts=counts)
        show(Event("finished", key, counts, outcome=outcome))
    assert "a note" in stream.text and "default" in stream.text
    assert ("\x1b[" in stream.text) == has_rich


def test_the_help_names_every_strategy():
    from portable_backend.warmup.strategies import STRATEGIES

    assert set(tune.STRATEGIES) == {"auto", *STRATEGIES}


def test_the_default_of_a_sweep_is_its_first_valid_config(sweeps):
    replay = tuning_tools.replay_tools(folder=str(sweeps)).catalog
    (key, *_), first = replay.sweeps, small_sweep(DEVICE).rows
    valid = [row.config for row in first if row.times_us]
    assert replay.default(key) == valid[0]
    assert time_of(valid[0]) > 1.05 * small_sweep(DEVICE).best_us
