# SPDX-License-Identifier: Apache-2.0
"""Tuning on a Ray cluster of this machine, with recorded sweeps and fake tools."""

import contextlib
import json
import sys

import pytest
from search_cases import small_sweep
from tuner_fakes import DEVICE, open_store, served, tasks_of, worker_path

from portable_backend import cli
from portable_backend.errors import UnsupportedError
from portable_backend.warmup.ray_crew import RayCrew
from portable_backend.warmup.spread import spread
from portable_backend.warmup.sweeps import Sweep, write_sweep
from portable_backend.warmup.tools import Recipe
from portable_backend.warmup.tuning_options import TuneOptions

OPTIONS = TuneOptions(strategy="random", trials=20, warm_start=False, batch=2)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two CPUs; its workers import what this process does."""
    ray = pytest.importorskip("ray", reason="needs Ray: portable-backend[ray]")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir("/"):
        patch.setenv("PYTHONPATH", worker_path())
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def crew_of(folder, store, **behaviour):
    recipe = Recipe("tuner_fakes:make", behaviour)
    return contextlib.closing(
        RayCrew("", recipe, OPTIONS, store=store, log_root=folder, num_gpus=0)
    )


def test_records_are_merged_as_they_come(cluster, tmp_path):
    seen = []
    with (
        open_store(tmp_path / "cache") as store,
        crew_of(tmp_path / "logs", store) as crew,
    ):

        def on_outcome(outcome):
            crew.merge(outcome)
            seen.append(len(served(tmp_path / "cache")))

        outcomes = spread(tasks_of(1, 2, 3), crew, on_outcome=on_outcome)
    assert [outcome.state for outcome in outcomes] == ["tuned"] * 3
    assert seen == [1, 2, 3]
    assert served(tmp_path / "cache")[2] == outcomes[1].record


def test_a_lost_workers_unit_is_given_to_another(cluster, tmp_path):
    token = tmp_path / "died"
    with (
        open_store(tmp_path / "cache") as store,
        crew_of(tmp_path / "logs", store, kills_on=2, token=str(token)) as crew,
    ):
        outcomes = spread(tasks_of(1, 2, 3), crew, on_outcome=crew.merge)
    assert token.exists()
    assert [outcome.state for outcome in outcomes] == ["tuned"] * 3
    assert set(served(tmp_path / "cache")) == {1, 2, 3}


def test_workers_know_the_drivers_records(cluster, tmp_path):
    for states in ({"tuned"}, {"known"}):
        with (
            open_store(tmp_path / "cache") as store,
            crew_of(tmp_path / "logs", store) as crew,
        ):
            outcomes = spread(tasks_of(1, 2), crew, on_outcome=crew.merge)
        assert {outcome.state for outcome in outcomes} == states


def test_the_command_tunes_on_a_cluster(cluster, tmp_path, capsys):
    base = small_sweep(DEVICE)
    for n in (1024, 2048):
        key = {**base.key, "seq_len": n}
        write_sweep(Sweep("decode", key, DEVICE, base.rows, {}, True), tmp_path / "s")
    arguments = ["--replay", tmp_path / "s", "--cache-dir", tmp_path / "cache"]
    arguments += ["--trials", 20, "--ray", "--json"]
    assert cli.main(["tune", *map(str, arguments)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["states"] == {"tuned": 2}
    assert all(unit["time_us"] <= unit["default_us"] for unit in result["units"])


def test_a_cluster_without_gpus_is_refused(cluster, tmp_path):
    with pytest.raises(UnsupportedError, match="has no GPU"):
        RayCrew(
            "", Recipe("m:f"), OPTIONS, store=open_store(tmp_path), log_root=tmp_path
        )


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"portable-backend\[ray\]"):
        crew_of(tmp_path, open_store(tmp_path))
