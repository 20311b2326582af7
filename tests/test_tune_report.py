# SPDX-License-Identifier: Apache-2.0
"""The report beside sweeps: what records lose, and what a portfolio does."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from search_cases import small_sweep
from tuner_fakes import DEVICE

from portable_backend.cli import main as cli
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.sweeps import Row, write_sweep
from portable_backend.warmup.tune_quality import portfolios, qualities, report
from portable_backend.warmup.tuning_tools import key_of

ROOT = Path(__file__).resolve().parents[1]
SWEEP = small_sweep(DEVICE)
OTHER = replace(SWEEP, key={**SWEEP.key, "num_seqs": 32})
RANKED = sorted((r for r in SWEEP.rows if r.times_us), key=lambda r: r.time_us)


def record_of(sweep, config, time_us=1.0, **changes):
    usual = {
        "gpu": DEVICE.name, "arch": DEVICE.arch, "kernel_digest": "d", "verified": True
    }  # fmt: skip
    return TuningRecord(key_of(sweep), config, time_us=time_us, **usual | changes)


def test_a_records_loss_is_that_of_its_config_in_the_sweep():
    third = RANKED[2]
    (quality,) = qualities([SWEEP], [record_of(SWEEP, third.config)])
    assert quality.loss == third.time_us / RANKED[0].time_us and quality.is_in_sweep
    assert (quality.configs, quality.timed) == (108, len(RANKED))
    (best,) = qualities([SWEEP], [record_of(SWEEP, RANKED[0].config)])
    assert best.loss == 1.0


def test_records_of_other_keys_and_gpus_do_not_count():
    config = RANKED[0].config
    records = [
        record_of(OTHER, config),
        record_of(SWEEP, config, gpu="nvidia_h100"),
    ]
    (quality,) = qualities([SWEEP], records)
    assert quality.record is None and quality.loss is None
    assert report([SWEEP], records)["without_record"] == 1


def test_the_record_of_the_sweeps_code_is_the_one_that_is_judged():
    fast = record_of(SWEEP, RANKED[0].config, 0.5)
    same = record_of(SWEEP, RANKED[5].config, 2.0, kernel_digest="now")
    (quality,) = qualities([replace(SWEEP, kernel_digest="now")], [fast, same])
    assert quality.record == same


def test_a_config_that_the_sweep_lacks_is_judged_by_its_own_time_and_marked():
    rows = tuple(row for row in SWEEP.rows if row != RANKED[0])
    records = [record_of(SWEEP, RANKED[0].config, RANKED[1].time_us * 0.9)]
    (quality,) = qualities([replace(SWEEP, rows=rows)], records)
    assert not quality.is_in_sweep and quality.loss == pytest.approx(0.9)
    # One that was found invalid there has no loss at all.
    invalid = Row(RANKED[0].config, invalid="correctness", reason="NaN")
    (quality,) = qualities([replace(SWEEP, rows=(*rows, invalid))], records)
    assert quality.loss is None
    found = report([replace(SWEEP, rows=(*rows, invalid))], records)
    assert found["without_time"] == 1 and found["loss"] is None


def test_the_means_are_geometric():
    records = [record_of(SWEEP, RANKED[3].config), record_of(OTHER, RANKED[0].config)]
    found = report([SWEEP, OTHER], records)
    loss = RANKED[3].time_us / RANKED[0].time_us
    assert found["loss"] == pytest.approx(math.sqrt(loss))
    assert found["loss_by_kernel"] == {"decode": found["loss"]}


def test_a_portfolio_names_its_loss_and_worst_bucket():
    """Two buckets whose optima differ: one config loses in one of them."""
    a, b = RANKED[0].config, RANKED[1].config

    def sweep(source, a_us, b_us):
        return replace(source, rows=(Row(a, (a_us,)), Row(b, (b_us,))))

    sweeps = [sweep(SWEEP, 10.0, 11.0), sweep(OTHER, 15.0, 10.0)]
    cover = portfolios(sweeps, 1)["decode"]
    assert cover.configs == (b,)
    assert cover.loss == pytest.approx(math.sqrt(1.1))
    found = report(sweeps, [], max_configs=1)["portfolios"]["decode"]
    assert found["worst_key"] == key_of(SWEEP).to_dict()
    assert found["worst_loss"] == pytest.approx(1.1)
    assert report(sweeps, [], max_configs=2)["portfolios"]["decode"]["loss"] == 1.0


def run_script(*args):
    script = ROOT / "scripts" / "tune_report.py"
    return subprocess.run(
        [sys.executable, "-P", str(script), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_reports_on_what_tune_wrote(tmp_path, capsys):
    sweeps, cache = tmp_path / "sweeps", tmp_path / "cache"
    for sweep in (SWEEP, OTHER):
        write_sweep(sweep, sweeps)
    tune = ["tune", "--replay", str(sweeps), "--cache-dir", str(cache), "--json"]
    assert cli([*tune, "--strategy", "exhaustive"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    done = run_script(sweeps, cache, "--tuned", tmp_path / "tuned.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["synthetic"] and found["loss"] == pytest.approx(1.0, abs=0.01)
    assert found["tuned"]["timed"] == tuned["counts"]["timed"] == 2 * len(RANKED)
    assert found["portfolios"]["decode"]["loss"] == 1.0
    text = run_script(sweeps, cache, "--tuned", tmp_path / "tuned.json").stdout
    assert "nobody measured" in text and "(geometric mean)" in text
    assert f"{2 * len(RANKED)} timed" in text
    empty = run_script(sweeps, tmp_path / "none")
    assert empty.returncode == 1 and "no record" in empty.stdout
    assert run_script(tmp_path / "nothing", cache).returncode == 2
