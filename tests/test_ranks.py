# SPDX-License-Identifier: Apache-2.0
"""All tensor-parallel ranks run the same configs, whatever each of them finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_tuned import DECODE, LIMITS, MODEL, keep, record
from tuner_fakes import worker_path

from portable_backend.warmup.buckets import decode_key

pytestmark = pytest.mark.vllm
LONG = pytest.mark.long  # each rank imports vLLM
PROCESS = Path(__file__).with_name("rank_process.py")
OTHER = DECODE.replace(BLOCK_N=64)


def run(tmp_path, cases, *, tp, pp=1, exits=0):
    """What each rank says of each case: [rank][case]."""
    job = {"tp": tp, "pp": pp, "init": f"file://{tmp_path}/group", "cases": cases}
    command = [sys.executable, "-P", str(PROCESS), json.dumps(job)]
    environ = os.environ | {
        "PYTHONPATH": worker_path(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, str(rank)], env=environ, text=True,
            stdout=subprocess.PIPE, stderr=(tmp_path / f"{rank}.log").open("w"),
        )
        for rank in range(tp * pp)
    ]  # fmt: skip
    said = []
    try:
        for rank, process in enumerate(processes):
            out, _ = process.communicate(timeout=240)
            log = (tmp_path / f"{rank}.log").read_text()[-3000:]
            assert exits or process.returncode == 0, log
            said.append([json.loads(x) for x in out.splitlines() if x.startswith("{")])
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    return said


def case(folders, *, layers=None, late_s=0, limit_s=60, **more):
    """Ranks with these user caches; layers by their sliding windows."""
    environ = [
        {"PORTABLE_BACKEND_CACHE_DIR": str(folder), **more.pop(f"rank{rank}", {})}
        for rank, folder in enumerate(folders)
    ]
    layers = layers or [[None, 16]] * len(folders)
    given = {"environ": environ, "layers": layers, "late_s": late_s}
    return given | {"limit_s": limit_s} | more


def tuning(tp, folders, *, budget_s=20, **more):
    environ = {
        "PORTABLE_BACKEND_TUNE": "startup",
        "PORTABLE_BACKEND_TUNE_BUDGET_S": str(budget_s),
    }
    by_rank = {f"rank{rank}": environ for rank in range(tp)}
    return case(folders, **by_rank, **more)


@pytest.fixture
def caches(tmp_path):
    """Folders of records: none, one, another."""
    cold, warm, other = (tmp_path / name for name in ("cold", "warm", "other"))
    cold.mkdir()
    for folder, config in ((warm, DECODE), (other, OTHER)):
        keep(folder, record(decode_key(MODEL, LIMITS, num_seqs=4), config))
    return cold, warm, other


@pytest.mark.parametrize(
    "tp", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]
)
def test_ranks_choose_alike_whatever_their_caches_hold(tmp_path, caches, tp):
    cold, warm, other = caches
    no_folder = tmp_path / "file"
    no_folder.touch()
    off = {"PORTABLE_BACKEND_TUNE": "off"}
    rest = tp - 1
    cases = {
        "cold": case([cold] * tp),
        "warm": case([warm] * tp),
        "different": case([warm, *([other, cold, warm] * 2)][:tp]),
        "differently": case([other, *([warm, cold, other] * 2)][:tp]),
        "first has none": case([cold] + [warm] * rest),
        "only first has one": case([warm] + [cold] * rest),
        "last cannot read": case([warm] * rest + [no_folder]),
        "last is off": case([warm] * tp, **{f"rank{rest}": off}),
        "first is off": case([warm] * tp, rank0=off),
        "first is slow": case([warm] * tp, late_s=2),
        "first tunes": tuning(tp, [tmp_path / "new"] + [cold] * rest),
        "first fails to": tuning(tp, [cold] * tp, tools={"dies": True}),
        "first may not": tuning(tp, [cold] * tp, budget_s=0),
    }
    said = run(tmp_path, list(cases.values()), tp=tp)
    found = {}
    for number, name in enumerate(cases):
        answers = [answers[number] for answers in said]
        assert len({answer["choices"] for answer in answers}) == 1, name
        assert all(a["configs"] == answers[0]["configs"] for a in answers), name
        assert all(a["grades"] == answers[0]["grades"] for a in answers), name
        assert not any(answer["warnings"] for answer in answers), name
        assert max(answer["seconds"] for answer in answers) < 30, name
        found[name] = answers[0]
    choices = {name: answer["choices"] for name, answer in found.items()}
    for name in ("first has none", "first is off"):
        assert choices[name] == choices["cold"]
    for name in (
        "different", "only first has one", "last cannot read", "last is off",
        "first is slow",
    ):  # fmt: skip
        assert choices[name] == choices["warm"], name
    for name in ("first fails to", "first may not"):
        assert choices[name] == choices["cold"], name
    of_its_own = ("cold", "warm", "differently", "first tunes")
    assert len({choices[name] for name in of_its_own}) == 4
    grades = found["first tunes"]["grades"]
    assert sum(counts.get("exact", 0) for counts in grades.values()) >= 2
    assert sum(sum(counts.values()) for counts in grades.values()) == 12 + 3
    number = list(cases).index("first tunes")
    tuned_s, *others = (answers[number]["tuned_s"] for answers in said)
    assert 0 < tuned_s < 22 and not any(others)
    assert found["warm"]["grades"]["decode"] == {"exact": 1, "nearest": 3, "default": 4}


@LONG
def test_stages_of_a_pipeline_may_have_other_layers_and_caches(tmp_path, caches):
    """As many broadcasts in each group as its stage has layers of a kind."""
    cold, warm, other = caches
    layers = [[None], [None], [None, 16, 32], [None, 16, 32]]
    cases = [case([warm, cold, other, warm], layers=layers), case([cold] * 4)]
    said = run(tmp_path, cases, tp=2, pp=2)
    choices = [answers[0]["choices"] for answers in said]
    assert choices[0] == choices[1] != choices[2] == choices[3]
    assert len({answers[1]["choices"] for answers in said}) == 1


@LONG
def test_who_waits_too_long_starts_with_defaults_and_says_so(tmp_path, caches):
    cold, warm, _ = caches
    late = case([warm] * 2, layers=[[None]] * 2, late_s=4, limit_s=1)
    cases = [case([cold] * 2, layers=[[None]] * 2), late, case([warm] * 2)]
    first, second = run(tmp_path, cases, tp=2)
    assert second[1]["choices"] == second[0]["choices"] != first[1]["choices"]
    (warning,) = second[1]["warnings"]
    assert "may run different configs" in warning and "within 1 s" in warning
    assert second[1]["seconds"] < 3.5
    # What came late is taken for nothing else.
    assert first[2]["choices"] == second[2]["choices"]
    assert not first[2]["warnings"] + second[2]["warnings"]


@LONG
def test_a_first_rank_that_is_gone_keeps_nobody(tmp_path, caches):
    _, warm, _ = caches
    gone = case([warm] * 2, layers=[[None]] * 2, dies=0)
    first, second = run(tmp_path, [gone], tp=2, exits=3)
    assert not first
    assert len(second[0]["warnings"]) == 1


def test_one_rank_is_asked_without_a_collective(monkeypatch):
    from vllm.distributed import parallel_state

    from portable_backend import ranks

    assert ranks.from_first_rank(lambda: [1], 5) == [1]
    alone = type("Group", (), {"world_size": 1})()
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: alone)
    assert ranks.from_first_rank(lambda: [2], 5) == [2]
    assert ranks.decides()


def test_what_cannot_be_read_is_a_warning(caplog):
    from portable_backend import ranks

    message = torch.zeros(1 << 16, dtype=torch.uint8)
    assert ranks._read(message) is None
    assert "cannot be read" in caplog.text
    ranks._write(message, {"configs": [[[1, False, True], {"a": None}]]})
    assert ranks._read(message) == {"configs": [[[1, False, True], {"a": None}]]}
