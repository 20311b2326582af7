# SPDX-License-Identifier: Apache-2.0
"""scripts/tensor_parallel_check.py: verdicts, commands, and what a hang costs."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tuner_fakes import (
    BEST,
    CONFIGS,
    Measurer,
    open_store,
    tasks_of,
    tuner_with,
    worker_path,
)

from portable_backend.warmup.tuner import tune

SCRIPTS = Path(__file__).parents[1] / "scripts"
RANK = {"choices": "3f2a91bc", "grades": {"decode": {"exact": 2}}, "tune_s": 0.0}
OTHER = RANK | {"choices": "00000000"}
COUNTS = {"plan": 1, "decode": 2, "prefill": 3, "kv_cache_write": 4}
TUNED = "INFO [start_tuning.py:9] tuned 3 of 8 keys in 29.1 s of 30 ({})"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check():
    return load("tensor_parallel_check")


@pytest.fixture(scope="module")
def verdicts(check):
    return sys.modules["tensor_parallel_verdicts"]


@pytest.fixture(scope="module")
def runs(check):
    return sys.modules["tensor_parallel_runs"]


def answer(verdicts, log="", failed=None, **result):
    found = {"choices": [RANK, RANK], "launch_counts": [COUNTS, COUNTS], "start_s": 9.0}
    return verdicts.Answer(failed, log, {} if failed else found | result)


# ----------------------------------------------------------------------------- verdicts


def test_what_a_process_tuned_is_read_from_its_log(verdicts):
    assert verdicts.tuning_of("nothing of the kind") is None
    log = f"""(EngineCore pid=3) {TUNED.format("2 tuned, 1 default, 5 unreached")}
(EngineCore pid=3) {TUNED.format("1 tuned, 2 elsewhere")}: it did not end in time
"""
    tuning = verdicts.tuning_of(log)
    assert tuning.written == 4 and tuning.keys == 16
    assert tuning.seconds == pytest.approx(58.2)
    assert tuning.states["elsewhere"] == 2 and tuning.states["unreached"] == 5


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("'pass_config': {'fuse_allreduce_rms': True, 'x': 1}", "on"),
        ("PassConfig(fuse_allreduce_rms=False)", "off"),
        ("", "not told"),
    ],
)
def test_the_fusion_is_read_from_the_engines_config(verdicts, log, told):
    assert verdicts.fusion_of(log) == told


def test_tokens_may_differ_at_near_ties_only(verdicts):
    good, dead = answer(verdicts), answer(verdicts, "x\nno memory\n", "exit code 1")
    counted = {"same": 20, "near_tie": 2, "bad": 0}
    assert verdicts.judge_tokens("as A", good, good, counted).passed
    assert not verdicts.judge_tokens("as A", good, good, counted | {"bad": 1}).passed
    # Where all differ, however nearly, something is wrong.
    none_same = counted | {"same": 0}
    assert not verdicts.judge_tokens("as A", good, good, none_same).passed
    row = verdicts.judge_tokens("as A", good, dead, None)
    assert not row.passed and row.summary == "exit code 1: no memory"


def test_ranks_that_run_the_same_pass(verdicts):
    row = verdicts.judge_ranks("warm", answer(verdicts), 2, 0)
    assert row.passed and row.seconds == 9.0
    assert row.summary == "rank 0 3f2a91bc, rank 1 3f2a91bc (decode exact 2)"
    log = TUNED.format("2 tuned, 1 default, 5 unreached")
    tuned = [RANK | {"tune_s": 29.1}, RANK]
    row = verdicts.judge_ranks("startup", answer(verdicts, log, choices=tuned), 2, None)
    assert row.passed and row.summary.endswith("; tuned 3 of 8 in 29.1 s")


@pytest.mark.parametrize(
    ("result", "bad", "problem"),
    [
        ({"choices": [RANK, OTHER]}, 0, "ranks run different configs"),
        ({"choices": [RANK]}, 0, "1 of 2 ranks told their choices"),
        ({"choices": [RANK, RANK | {"grades": {}}]}, 0, "different grades"),
        ({"choices": [RANK, RANK | {"tune_s": 3.0}]}, 0, "not the first rank alone"),
        ({"launch_counts": [COUNTS]}, 0, "1 of 2 ranks counted"),
        ({"launch_counts": [COUNTS, {"plan": 1}]}, 0, "never launched: decode"),
        ({}, 3, "3 prompts answered differently"),
        ({"log": "WARNING tensor-parallel ranks may run different"}, 0, None),
        ({"log": "tensor-parallel ranks may run different configs"}, 0, "in vain"),
        ({"failed": "not done within 9 s", "log": "a\nb"}, None, "within 9 s: b"),
    ],
)
def test_ranks_that_do_not_fail_with_the_reason(verdicts, result, bad, problem):
    row = verdicts.judge_ranks("cold", answer(verdicts, **result), 2, bad)
    assert row.passed is (problem is None)
    assert (problem or "rank 0") in row.summary


def test_records_of_a_start_must_serve_the_next_ones(verdicts):
    log = TUNED.format("2 tuned, 1 default, 5 unreached")
    starts = {
        "startup": answer(verdicts, log),
        "warm": answer(verdicts),
        "first rank only": answer(verdicts),
    }
    assert verdicts.judge_starts(starts).passed
    nothing = starts | {"startup": answer(verdicts)}
    assert "recorded nothing" in verdicts.judge_starts(nothing).summary
    for wrong in (answer(verdicts, choices=[OTHER]), answer(verdicts, failed="gone")):
        row = verdicts.judge_starts(starts | {"warm": wrong})
        assert not row.passed
    assert "warm ?" in row.summary


def test_engines_that_share_a_cache_lose_nothing_and_repeat_nothing(verdicts):
    logs = [
        TUNED.format("2 tuned, 1 default, 1 elsewhere"),
        TUNED.format("2 tuned, 3 known, 1 elsewhere"),
    ]
    engines = [answer(verdicts, log) for log in logs]
    keys = ["a", "b", "c", "d", "e"]
    row = verdicts.judge_shared(engines, keys, [])
    assert row.passed and row.seconds == 9.0
    assert row.summary.startswith("engine 0: 2 tuned, 1 default, 1 elsewhere; engine 1")
    # A record that was written just before its process was cut off.
    assert verdicts.judge_shared(engines, [*keys, "f"], []).passed
    for records, problems, told in (
        (keys[1:], [], "5 records were told, 4 are there"),
        ([*keys, "a"], [], "1 keys were tuned twice: a"),
        (keys, ["decode/x.json: torn"], "torn"),
    ):
        row = verdicts.judge_shared(engines, records, problems)
        assert not row.passed and told in row.summary
    silent = [engines[0], answer(verdicts)]
    assert "engine 1 has not told" in verdicts.judge_shared(silent, keys, []).summary
    idle = [engines[0], answer(verdicts, TUNED.format("3 known, 1 failed"))]
    row = verdicts.judge_shared(idle, keys, [])
    assert (
        "did not tune at the same time" in row.summary
        and "1 keys failed" in row.summary
    )


def test_a_key_that_was_recorded_twice_is_seen_in_the_cache(verdicts, tmp_path):
    """The loser of the two is kept as history."""
    tune(tasks_of(1, 2), tuner_with(Measurer(), tmp_path))
    with open_store(tmp_path) as store:
        kept = [record for _, record in store.records("decode")]
        keys, problems = verdicts.records_in(tmp_path)
        assert sorted(keys) == sorted(str(record.key) for record in kept)
        assert len(keys) == 2 and not problems
        again = next(config for config in CONFIGS if config != BEST)
        store.put(replace(kept[0], config=again))
    keys, problems = verdicts.records_in(tmp_path)
    assert len(keys) == 3 and len(set(keys)) == 2 and not problems
    (tmp_path / "decode" / "nvidia_h200.json.damaged").touch()
    assert verdicts.records_in(tmp_path)[1] == ["nvidia_h200.json.damaged is there"]
    assert verdicts.records_in(tmp_path / "none") == ([], [])


def tuned_on(verdicts, keys, seconds=50.0, **unit):
    unit = {"state": "tuned", "config": {"A": 1}, "time_us": 9.0, "seconds": 1} | unit
    units = [{"kernel": "decode", "key": {"num_seqs": n}} | unit for n in keys]
    text = json.dumps({"seconds": seconds, "units": units}, indent=1)
    return verdicts.tuned_units(f"[1/2] decode: {{}}\nnote\n{text}\nbye\n")


def test_tuning_on_all_gpus_makes_the_same_keys_faster(verdicts):
    several = tuned_on(verdicts, (2, 1), time_us=10.0)
    row = verdicts.judge_tune(tuned_on(verdicts, (1, 2), 90.0), several)
    assert row.passed and "ratio 1.80; 2 keys in both, 2 with the same" in row.summary
    assert row.summary.endswith("one by all, 0.900")
    slow = verdicts.judge_tune(tuned_on(verdicts, (1, 2), 80.0), several)
    assert not slow.passed and slow.summary.startswith("ratio below 1.7")
    other = verdicts.judge_tune(tuned_on(verdicts, (2, 3), 90.0), several)
    assert not other.passed and "other keys: 2" in other.summary
    failed = tuned_on(verdicts, (1, 2), state="failed")
    row = verdicts.judge_tune(failed, failed)
    assert not row.passed and "2 and 2 units were not done" in row.summary


def test_what_is_no_result_of_tune_is_refused(verdicts):
    for text in ("", "no GPU\n", '{\n"units": []\n}'):
        with pytest.raises(ValueError, match="no result of tune --json"):
            verdicts.tuned_units(text)


def test_throughput_has_a_row_for_each_workload_and_engine(verdicts):
    results = {
        "portable": {"times": {"batch": [100.0, 120.0]}, "start_s": 60.0},
        "FLASH_ATTN": {"times": {"batch": [100.0, 100.0]}, "start_s": 50.0},
        "TRITON_ATTN": {"failed": "exit code 1\nno memory"},
    }
    agreements = {"batch": {"portable": 1.0, "FLASH_ATTN": 0.9}}
    batch, *engines = verdicts.judge_throughput(results, ["batch"], agreements)
    assert batch.passed
    assert batch.summary == "portable 110 tok/s, FLASH_ATTN 100 tok/s (1.10)"
    assert [row.passed for row in engines] == [True, True, False]
    assert engines[2].summary == "exit code 1 / no memory"
    agreements["batch"]["FLASH_ATTN"] = 0.5
    batch, *_ = verdicts.judge_throughput(results, ["batch"], agreements)
    assert not batch.passed and "DISAGREES: 50%" in batch.summary
    nobody = {"portable": {"failed": "gone"}}
    batch, *_ = verdicts.judge_throughput(nobody, ["batch"], {})
    assert not batch.passed and batch.summary == "no engine has run it"


def test_the_table_holds_whatever_a_log_may_say(verdicts):
    row = verdicts.Row("tune", "one", False, "a | b\nc", 3.4)
    told = verdicts.Row("all", "time", None, "5 s")
    *_, first, second = verdicts.table([row, told]).splitlines()
    assert first == "| tune | one | **FAILED** | 3 | a / b c |"
    assert second == "| all | time |  |  | 5 s |"


# ------------------------------------------------------------------- model and commands


def test_the_model_is_the_same_each_time_and_has_all_its_weights(check, tmp_path):
    import torch
    from safetensors.torch import load_file

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        check.write_config(tmp_path / name, "tiny")
        check.write_weights(tmp_path / name)
    found, again = (load_file(tmp_path / n / "model.safetensors") for n in ("a", "b"))
    assert all(torch.equal(found[name], again[name]) for name in found | again)
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "a")
    model = transformers.LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in found.items()} == shapes


def test_prompts_fit_cross_chunks_and_share_a_prefix(runs):
    found = runs.prompts(8192, 1300)
    assert found == runs.prompts(8192, 1300) and len(found) >= 24
    lengths = [len(ids) for ids in found]
    assert min(lengths) == 1 and max(lengths) == 1300
    assert sum(n > 512 for n in lengths) >= 6
    assert found[-1][:650] == found[-2][:650] and found[-1] != found[-2]
    assert all(2 <= token < 8192 for ids in found for token in ids)
    assert max(map(len, runs.prompts(512, 20))) == 20


@pytest.fixture
def this(check, tmp_path, monkeypatch):
    """A check whose work and results are in tmp_path, with two GPUs at hand."""
    monkeypatch.setattr(check, "visible", lambda: ["4", "GPU-5"])
    args = check.parse(["--out", str(tmp_path), "--budget-s", "300"])
    return check.Check(args, tmp_path)


def test_every_run_is_in_one_wave_and_after_what_it_needs(runs):
    waves = [name for wave in runs.WAVES for name in wave]
    assert sorted(waves) == sorted(runs.RUNS)
    assert {n for names in runs.RUNS_OF_PART.values() for n in names} <= set(waves)
    for name, run in runs.RUNS.items():
        assert waves.index(run.compiled_by or name) <= waves.index(name)
        if run.records == "ranks" and not run.tunes:
            assert waves.index("startup") < waves.index(name)


def test_engines_get_their_gpu_records_and_mode(this, runs):
    spec_of = functools.partial(runs.spec_of, args=this.args, work=this.work)
    environment_of = functools.partial(
        runs.environment_of, args=this.args, work=this.work
    )
    spec, env = spec_of("cold"), environment_of("cold")
    assert spec["llm"]["tensor_parallel_size"] == 2 and "worker_cls" not in spec["llm"]
    assert env["PORTABLE_BACKEND_TUNE"] == "load" and "CUDA_VISIBLE_DEVICES" not in env
    assert spec_of("reference")["llm"]["attention_backend"] == "FLASH_ATTN"
    shared = [environment_of(f"shared {n}") for n in (0, 1)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in shared] == ["4", "GPU-5"]
    assert len({env["PORTABLE_BACKEND_CACHE_DIR"] for env in shared}) == 1
    assert shared[0]["PORTABLE_BACKEND_TUNE"] == "startup"
    assert shared[0]["PORTABLE_BACKEND_TUNE_BUDGET_S"] == "30"
    llm = spec_of("first rank only")["llm"]
    module, _, name = llm["worker_cls"].partition(".")
    assert f"class {name}(" in (SCRIPTS / f"{module}.py").read_text()
    path = environment_of("first rank only")["PYTHONPATH"].split(":")
    assert path[0] == str(SCRIPTS)
    assert max(map(len, spec_of("cold")["prompts"])) < llm["max_model_len"] - 32


def test_engines_that_tune_beside_each_other_share_the_cpus(runs, monkeypatch):
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: range(32))
    shares = runs.shares_of_cpus(runs.WAVES[1])
    assert sorted(n for cpus in shares.values() for n in cpus) == list(range(32))
    assert min(map(len, shares.values())) == 10
    assert runs.shares_of_cpus(runs.WAVES[0]) == {}
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: range(2))
    assert runs.shares_of_cpus(runs.WAVES[1]) == {}


@pytest.mark.vllm
def test_vllm_knows_every_argument_of_the_engines(this, runs):
    from vllm.engine.arg_utils import EngineArgs

    known = {item.name for item in fields(EngineArgs)}
    for name in runs.RUNS:
        assert set(runs.spec_of(name, this.args, this.work)["llm"]) <= known


def test_tuning_takes_shapes_and_options_that_the_command_knows(this, check, tmp_path):
    from portable_backend.cli import build_parser
    from portable_backend.commands import tune as tune_of_command
    from portable_backend.device import DeviceInfo
    from portable_backend.warmup.tuning_tools import SpaceCatalog

    shapes = tmp_path / "shapes.json"
    check.write_shapes(shapes, 3)
    command = check.tune_command(this.args, shapes, "all", tmp_path)
    known = build_parser().parse_args(command[command.index("tune") :])
    assert known.func is tune_of_command.run and known.json
    tune_of_command._check(known)
    tasks = tune_of_command._tasks(known)
    assert len(tasks) == 3 and known.trials == known.patience == 40
    catalog = SpaceCatalog(DeviceInfo.for_arch("sm90", 132))
    assert len({catalog.configs(task.key) for task in tasks}) == 1
    assert len(catalog.configs(tasks[0].key)) > 1000


@pytest.mark.slow
def test_tuning_is_compared_from_what_the_command_prints(this, check, monkeypatch):
    """Recorded sweeps answer in a GPU's place: in no time, so that no ratio is good."""

    def replayed(args, shapes, gpus, cache_dir):
        names = {"all": "0,1", "0": "0"}[gpus]
        command = [sys.executable, "-P", "-m", "portable_backend.cli", "tune"]
        command += ["--replay", SCRIPTS.parent / "tests" / "sweeps", "--gpus", names]
        return [*command, "--trials", "9", "--cache-dir", cache_dir, "--json"]

    monkeypatch.setattr(check, "tune_command", replayed)
    monkeypatch.setenv("PYTHONPATH", worker_path())
    this.tune()
    (row,) = this.rows
    assert "3 keys in both" in row.summary
    assert "not done" not in row.summary and "other keys" not in row.summary


def test_tuning_that_fails_is_told_with_its_last_line(this, check, monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit('no GPU')"]
    monkeypatch.setattr(check, "tune_command", lambda *_: command)
    this.tune()
    (row,) = this.rows
    assert not row.passed and row.summary == "exit code 1: no GPU"


def test_the_contest_is_end_to_end_s_with_more_gpus(this, check, tmp_path):
    contest = check.contest_args(this.args, tmp_path)
    assert contest.tensor_parallel_size == 2 and contest.geometry == "llama70b-8l"
    assert contest.engines == ["portable", "FLASH_ATTN", "TRITON_ATTN"]
    assert contest.workloads == list(check.end_to_end.WORKLOADS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "tokens,nonsense"], "got nonsense"),
        (["--parts", ""], "got none"),
        (["--tensor-parallel-size", "4"], "needs as many GPUs, got 2: 4, GPU-5"),
        (["--rounds", "0"], "--rounds: must be a number from 1 on"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(
    check, monkeypatch, capsys, options, message
):
    monkeypatch.setattr(check, "visible", lambda: ["4", "GPU-5"])
    with pytest.raises(SystemExit):
        check.parse(options)
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------- hangs and ends

# An engine by its name: one answers, one hangs with a child, one dies.
STAND_IN = """
import json, subprocess, sys, time
from pathlib import Path
spec, out = map(Path, sys.argv[1:])
llm = json.loads(spec.read_text())["llm"]
print("starting", flush=True)
if llm["attention_backend"] == "FLASH_ATTN":
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
if llm["tensor_parallel_size"] == 1:
    sys.exit("no memory")
ranks = [dict(choices="ab", grades={}, tune_s=0)] * 2
counts = [dict(plan=1, decode=1, prefill=1, kv_cache_write=1)] * 2
answer = dict(rows=[dict(ids=[1], gaps=[1.0])], start_s=1, choices=ranks)
out.write_text(json.dumps(answer | dict(launch_counts=counts)))
"""


def test_engines_that_hang_or_die_cost_the_others_nothing(this, check, monkeypatch):
    (this.work / "tensor_parallel_engine.py").write_text(STAND_IN)
    monkeypatch.setattr(check, "SCRIPTS", this.work)
    this.args.parts, this.args.wave_limit_s = ["tokens", "ranks"], 6.0
    began = time.monotonic()
    this.engines(this.args.parts)
    assert time.monotonic() - began < 40
    rows = {(row.part, row.name): row for row in this.rows}
    assert not rows["tokens", "as FLASH_ATTN"].passed
    assert "not done within 6 s" in rows["tokens", "as FLASH_ATTN"].summary
    assert "exit code 1: no memory" in rows["tokens", "as portable on one GPU"].summary
    for name in check.STARTS:
        assert rows["ranks", name].passed, rows["ranks", name].summary
    assert not this.jobs
    held = json.loads((this.out / "tensor_parallel.json").read_text())
    assert [row["name"] for row in held["rows"]] == [row.name for row in this.rows]


def test_a_part_that_raises_is_a_row(this):
    this.attempt("tune", lambda: 1 / 0)
    (row,) = this.rows
    assert not row.passed and row.summary.startswith("ZeroDivisionError")


def test_parts_leave_time_for_those_after_them(this, check):
    this.deadline = time.monotonic() + 400
    assert this.limit(50) == 50
    assert 389 < this.limit(1000) <= 390
    assert 29 < this.limit(1000, "tune", "throughput") <= 30
    this.args.parts = ["ranks"]
    assert this.limit(1000, "tune", "throughput") > 380
    this.deadline = time.monotonic()
    this.wave(["cold"])
    assert this.answers["cold"].failed == "no time was left"


# ------------------------------------------------------------------------- real engines

# Engines on the CPU tune as if it were a GPU.
PLUGIN = """
def register():
    import start_tools
    start_tools.use(setattr, trial_s=0.05)
"""
ENGINES = {
    "gpu_memory_utilization": 0.1,
    "enforce_eager": True,
    "block_size": 32,
}


@pytest.mark.vllm
@pytest.mark.long
def test_two_ranks_and_two_engines_of_real_vllm(tmp_path):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("its engines are small enough for a CPU build of vLLM")
    (tmp_path / "fake_tuning.py").write_text(PLUGIN)
    about = tmp_path / "fake_tuning-1.0.dist-info"
    about.mkdir()
    text = "Metadata-Version: 2.1\nName: fake_tuning\nVersion: 1.0\n"
    (about / "METADATA").write_text(text)
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfake_tuning = fake_tuning:register\n"
    )
    environ = os.environ | {
        "PYTHONPATH": f"{worker_path()}:{tmp_path}",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    environ.pop("VLLM_PLUGINS", None)
    out = tmp_path / "out"
    command = [sys.executable, "-P", SCRIPTS / "tensor_parallel_check.py"]
    command += ["--parts", "tokens,ranks,shared", "--out", out, "--budget-s", "1500"]
    command += ["--wave-limit-s", "500", "--reference", "CPU_ATTN"]
    command += ["--geometry", "tiny", "--dtype", "float32", "--longest", "100"]
    command += ["--max-tokens", "6", "--startup-budget-s", "20"]
    command += ["--llm-options", json.dumps(ENGINES)]
    done = subprocess.run(
        list(map(str, command)), env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((out / "tensor_parallel.json").read_text())["rows"]
    assert len(rows) == 9 and "| ranks | same records | ok |" in done.stdout
