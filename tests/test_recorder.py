# SPDX-License-Identifier: Apache-2.0
"""Recorded sweeps: complete, in full rounds, compiled once, and never begun anew."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from search_cases import time_of
from tuner_fakes import CONFIGS, DEFAULT, Measurer, key_of, tools_around

from portable_backend.warmup.listed_space import ListedSpace
from portable_backend.warmup.recorder import Recorder, Selection
from portable_backend.warmup.search import Trial
from portable_backend.warmup.sweeps import read_sweep, read_sweeps
from portable_backend.warmup.trial_log import LogMismatchError

ROOT = Path(__file__).resolve().parents[1]
KEYS = [key_of(1), key_of(2)]


class TimesEachRound(Measurer):
    def measure(self, key, proposals, incumbent=None):
        assert incumbent == DEFAULT
        for trial in super().measure(key, proposals, incumbent):
            if trial.time_us is None:
                yield trial
                continue
            times = tuple(trial.time_us * (1 + i / 1000) for i in range(trial.rounds))
            yield Trial(
                trial.config, trial.rounds, times[4], seconds=0.7, times_us=times,
                timing_s=0.2,
            )  # fmt: skip

    def recall(self, key, config, time_us):
        self.recalled = [*getattr(self, "recalled", []), (key, config)]


@dataclass
class Read:
    seconds: float = 2.0


@dataclass
class Compiled:
    config: object
    readout: object
    failure: str | None


@dataclass
class Compiler:
    """Compiles a config once for all keys; `bad` maps numbers to a failure."""

    bad: dict = field(default_factory=dict)
    compiled: list = field(default_factory=list)

    def submit(self, key, configs):
        self.compiled += [c for c in configs if c not in self.compiled]

    def wait(self, key, configs):
        for config in configs:
            assert config in self.compiled
            failure = self.bad.get(CONFIGS.index(config))
            readout = None if failure == "crash" else Read()
            yield Compiled(config, readout, failure)

    def close(self):
        pass


def record(folder, measurer, selection=None, budget_s=None, **parts):
    batch = parts.pop("batch", 16)
    tools = tools_around(measurer, **parts)
    recorder = Recorder(KEYS, tools, folder, selection, batch=batch)
    try:
        recorder.run(budget_s)
    finally:
        recorder.close()
    return recorder.progress


def test_every_config_is_there_with_all_rounds_or_its_reason(tmp_path):
    measurer = TimesEachRound(bad={"3": "correctness"})
    compiler = Compiler(bad={5: "crash", 6: "wants 9 bytes of shared memory"})
    progress = record(tmp_path, measurer, make_compiler=lambda: compiler)
    assert (progress.done, progress.total, progress.stopped) == (216, 216, "")
    sweeps = read_sweeps(tmp_path)
    assert [sweep.key for sweep in sweeps] == [key.to_dict() for key in KEYS]
    for sweep in sweeps:
        rows = {CONFIGS.index(row.config): row for row in sweep.rows}
        assert sorted(rows) == list(range(108))
        invalid = {n: row.invalid for n, row in rows.items() if row.invalid}
        assert invalid == {3: "correctness", 5: "compile", 6: "resources"}
        assert (rows[3].reason, rows[5].reason) == ("planted", "crash")
        assert rows[7].times_us[0] == float(f"{time_of(CONFIGS[7]):.4g}")
        assert rows[7].setup_s == pytest.approx(2.5)  # compiled, and not timed
        assert sweep.rounds == 9 and not sweep.synthetic
        assert sweep.kernel_digest == "sha256:aa"
        assert sweep.selection == {"members": 108, "of": "all", "chosen": 108}


def test_a_binary_is_compiled_once_and_timed_for_all_keys_in_turn(tmp_path):
    compiler, measurer = Compiler(), TimesEachRound()
    record(tmp_path, measurer, make_compiler=lambda: compiler)
    assert len(compiler.compiled) == len(set(compiler.compiled)) == 108
    keys = [key for key, _ in measurer.measured]
    assert keys[:48] == [KEYS[0]] * 16 + [KEYS[1]] * 16 + [KEYS[0]] * 16
    first = [config for _, config in measurer.measured[:16]]
    assert first == [config for _, config in measurer.measured[16:32]]
    assert first[0] == DEFAULT


def test_an_interrupted_recording_goes_on_where_it_stopped(tmp_path):
    begun = TimesEachRound(interrupts_after=40)
    assert record(tmp_path, begun).stopped == "interrupted"
    assert sum(len(sweep.rows) for sweep in read_sweeps(tmp_path)) == 40
    log = sorted(tmp_path.glob("*.jsonl"))[0]
    log.write_bytes(log.read_bytes()[:-7])  # killed while it wrote
    rest = TimesEachRound()
    assert record(tmp_path, rest).done == 216
    assert len(rest.measured) == 216 - 39
    assert rest.recalled == [(key, DEFAULT) for key in KEYS]
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")}
    record(tmp_path, again := TimesEachRound())
    assert again.measured == []
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.gz")} == whole


def test_the_budget_ends_it_and_leaves_a_sample_with_default_and_neighbours(tmp_path):
    progress = record(tmp_path, TimesEachRound(trial_s=1.0), budget_s=50.0)
    assert progress.stopped == "budget" and 45 <= progress.done <= 50
    near = ListedSpace(CONFIGS).neighbours(DEFAULT)
    for selection in (Selection(), Selection(sample=0)):
        folder = tmp_path / str(selection.sample)
        record(folder, measurer := TimesEachRound(trial_s=1.0), selection)
        early = [config for _, config in measurer.measured[: 1 + len(near)]]
        assert set(early) == {DEFAULT, *near}


def test_a_sample_is_the_same_for_all_keys_and_says_what_it_is(tmp_path):
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        record(folder, TimesEachRound(), Selection(sample=20, seed=3))
        found.append([read_sweep(path) for path in sorted(folder.glob("*.gz"))])
    one, other = found[0]
    assert one.configs == other.configs
    assert [sweep.rows for sweep in found[1]] == [one.rows, other.rows]
    near = {DEFAULT, *ListedSpace(CONFIGS).neighbours(DEFAULT)}
    assert 20 < len(one.rows) <= 20 + len(near) and near <= set(one.configs)
    assert one.selection["sample"] == 20 and one.selection["members"] == 108
    with pytest.raises(ValueError, match="sample must be 0 or more, got -1"):
        Selection(sample=-1)


def test_the_best_by_estimate_join_the_sample(tmp_path):
    def prune(key, configs, device, *, keep, readouts=None):
        return sorted(configs, key=time_of), []

    record(tmp_path, TimesEachRound(), Selection(sample=0, best=10), prune=prune)
    best = set(sorted(CONFIGS, key=time_of)[:10])
    assert all(best <= set(sweep.configs) for sweep in read_sweeps(tmp_path))


def test_fixed_parameters_leave_a_dense_space(tmp_path):
    record(tmp_path, TimesEachRound(), Selection(fixed={"LOAD": "pointer"}))
    (sweep, _) = read_sweeps(tmp_path)
    others = [c for c in sweep.configs if c["LOAD"] != "pointer" and c != DEFAULT]
    assert others == [] and len(sweep.rows) >= 54
    assert sweep.selection["fixed"] == {"LOAD": "pointer"}
    with pytest.raises(ValueError, match="fixed must be values of"):
        record(tmp_path / "none", TimesEachRound(), Selection(fixed={"LOAD": "no"}))


def test_rows_of_other_code_are_not_mixed_in(tmp_path):
    record(tmp_path, TimesEachRound(interrupts_after=3))
    with pytest.raises(LogMismatchError, match="toolchain differ"):
        record(tmp_path, TimesEachRound(), toolchain={"triton": "9"})


def run_script(*args):
    script = ROOT / "scripts" / "record_sweeps.py"
    return subprocess.run(
        [sys.executable, "-P", str(script), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )


@pytest.mark.long
def test_the_script_records_real_kernels_in_the_interpreter(tmp_path):
    norm = {"dtype": "float32", "row_size": 48, "fused_add": 0}
    write = {"dtype": "float32", "head_size": 16, "num_kv_heads": 2, "num_tokens": 4}
    shapes = [
        {"kernel": "rms_norm", "key": norm | {"num_rows": 4}},
        {"kernel": "rms_norm", "key": norm | {"num_rows": 16}},
        {"kernel": "kv_cache", "key": write},
    ]
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    options = ("--device", "cpu", "--rounds", 3, "--turn-us", 1000, "--json")
    done = run_script(tmp_path / "shapes.json", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["done"] == result["total"] > 3 and result["stopped"] == ""
    assert f"{result['total']} rows to record" in done.stderr
    sweeps = read_sweeps(tmp_path / "out")
    assert {sweep.kernel for sweep in sweeps} == {"rms_norm", "kv_cache"}
    for sweep in sweeps:
        assert sweep.rounds == 3 and len(sweep.rows) == sweep.selection["members"]
        assert all(row.invalid is None for row in sweep.rows)
    # All is there: nothing runs again.
    again = run_script(tmp_path / "shapes.json", tmp_path / "out", *options)
    assert json.loads(again.stdout) == result and again.returncode == 0


@pytest.mark.long
def test_the_script_names_what_is_wrong_with_its_arguments(tmp_path):
    done = run_script(tmp_path / "none.json", tmp_path)
    assert done.returncode == 2 and "none.json" in done.stderr
    assert run_script("a", "b", "--fix", "x").returncode == 2
