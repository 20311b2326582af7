# SPDX-License-Identifier: Apache-2.0
"""scripts/bench_throughput.py: with vLLM's CPU engine, and with planted faults."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="its client comes with vLLM")

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_throughput.py"
FAKE = Path(__file__).with_name("fake_server.py")
PROBE = {
    "platform": "cuda",
    "vllm": "0.0",
    "backends": ["PORTABLE", "FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"],
    "modules": [],
    "vocab_size": 512,
    "max_tokens": 2048,
    "environment": {"date": "today", "gpu": "none", "versions": "0", "commit": "abc"},
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_throughput", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    """The script with fake servers, in one folder."""

    def __init__(self, script, folder, monkeypatch):
        self.script, self.folder, self.started = script, folder, []
        self.faults = folder / "faults.json"
        self.faults.write_text("{}")
        self.out = folder / "out"
        self.probe = PROBE
        monkeypatch.setattr("serving.server.server_command", self._command)
        monkeypatch.setattr(script.backends, "ask_vllm", lambda *args: self.probe)

    def _command(self, model, port, options):
        self.started.append(options[options.index("--attention-backend") + 1])
        command = [sys.executable, "-P", str(FAKE), str(self.faults)]
        return [*command, "--port", str(port), *options]

    def plant(self, **faults):
        self.faults.write_text(json.dumps(faults))

    def __call__(self, *options, rounds=2):
        self.started.clear()
        command = ["--out", self.out, "--geometry", "tiny", "--rounds", rounds]
        command += ["--start-limit-s", 60, "--part-limit-s", 60]
        return self.script.main([*map(str, [*command, *options])])

    @property
    def done(self):
        """(back end, part, round) -> result, as written."""
        rows = json.loads((self.out / "results.json").read_text())["done"]
        return {(r.pop("backend"), r.pop("part"), r.pop("round")): r for r in rows}

    @property
    def measured(self):
        return {key for key, result in self.done.items() if "failed" not in result}

    @property
    def report(self):
        return (self.out / "report.md").read_text()


@pytest.fixture
def bench(script, tmp_path, monkeypatch):
    return Bench(script, tmp_path, monkeypatch)


TWO = ("--backends", "PORTABLE,FLASH_ATTN", "--workloads", "batch")


@pytest.mark.vllm
@pytest.mark.slow
def test_two_backends_of_the_cpu_engine(tmp_path):
    """Real servers, real tokens: as users start it, but for the number of rounds."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs a CPU build of vLLM")
    options = ["--geometry", "tiny", "--rounds", "1", "--kv-cache-gib", "1"]
    options += ["--workloads", "batch,chat", "--rates", "4,inf", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    data = json.loads((tmp_path / "results.json").read_text())
    assert "this is cpu" in data["left_out"]["FLASH_ATTN"]
    for backend in ("PORTABLE", "CPU_ATTN"):
        results = {r["part"]: r for r in data["done"] if r["backend"] == backend}
        assert set(results) == {"batch", "chat @ 4", "chat @ inf"}
        assert all(result["tokens_per_s"] > 0 for result in results.values())
        assert 0 < results["chat @ 4"]["ttft_p50_ms"] < 60_000
        assert len(data["checks"][backend]["batch"]["tokens"]) == 3
    assert "| batch | PORTABLE | CPU_ATTN | 3 |" in done.stdout
    log = (tmp_path / "PORTABLE-0.log").read_text()
    assert "Attention backend PORTABLE is active" in log


def test_every_part_is_measured_in_turn_and_told(bench, capsys):
    assert bench("--workloads", "batch,single,chat", "--rates", "50,inf") == 0
    printed = capsys.readouterr()
    backends = ("PORTABLE", "FLASH_ATTN", "TRITON_ATTN")
    assert bench.started == list(backends)
    assert bench.measured == {
        (backend, part, number)
        for backend in backends
        for part in ("batch", "single", "chat @ 50", "chat @ inf")
        for number in (1, 2)
    }
    turns = [line for line in printed.err.splitlines() if line.startswith("round")]
    order = [line.split(", ")[2].split(":")[0] for line in turns if "batch" in line]
    # Each round begins with another one.
    assert order[:3] == ["FLASH_ATTN", "TRITON_ATTN", "PORTABLE"]
    assert order[3:] == ["TRITON_ATTN", "PORTABLE", "FLASH_ATTN"]
    result = bench.done["PORTABLE", "chat @ inf", 1]
    assert {"ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"} <= set(result)
    assert "PORTABLE / FLASH_ATTN" in printed.out
    assert "| ROCM_ATTN | vLLM has it on rocm, this is cuda |" in printed.out
    page = (bench.out / "report.html").read_text()
    assert "<h2>Agreement</h2>" in page
    assert "http" not in page  # nothing is fetched


def test_the_same_command_goes_on_where_it_stopped(bench):
    assert bench(*TWO) == 0
    assert bench(*TWO) == 0
    assert not bench.started
    before = bench.done
    file = bench.out / "results.json"
    data = json.loads(file.read_text())
    data["done"] = [
        row for row in data["done"] if (row["backend"], row["round"]) != ("PORTABLE", 2)
    ]
    file.write_text(json.dumps(data))
    assert bench(*TWO) == 0
    assert bench.started == ["PORTABLE"]
    after = bench.done
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("PORTABLE", "batch", 2)}
    assert bench(*TWO, rounds=3) == 0
    assert len(bench.measured) == 6


def test_another_option_or_machine_is_refused_unless_fresh(bench, capsys):
    assert bench(*TWO) == 0
    other = ("--backends", "PORTABLE", "--workloads", "batch")
    assert bench(*other) == 2
    told = capsys.readouterr().err
    assert "options, backends: expected ['PORTABLE', 'FLASH_ATTN'] as before" in told
    assert "--fresh" in told
    changed = PROBE["environment"] | {"gpu": "another", "date": "tomorrow"}
    bench.probe = PROBE | {"environment": changed}
    assert bench(*TWO) == 2
    told = capsys.readouterr().err
    assert "environment, gpu: expected 'none' as before, got 'another'" in told
    assert "date" not in told
    assert bench("--fresh", *other) == 0
    assert {backend for backend, _, _ in bench.measured} == {"PORTABLE"}
    (bench.out / "results.json").write_text("[]")
    assert bench(*TWO) == 2
    assert "not a file of this script" in capsys.readouterr().err


# Three requests of the check, three untimed, then round 1.
AT_ROUND_1 = 7


def test_a_server_that_dies_costs_its_part_and_is_started_again(bench, capsys):
    bench.plant(PORTABLE={"kind": "die", "at": AT_ROUND_1, "once": True})
    assert bench(*TWO) == 1
    failed = {key: r["failed"] for key, r in bench.done.items() if "failed" in r}
    (reason,) = failed.values()
    assert list(failed) == [("PORTABLE", "batch", 1)]
    assert "an illegal memory access was encountered" in reason
    assert bench.started == ["PORTABLE", "FLASH_ATTN", "PORTABLE"]
    assert len(bench.measured) == 3
    assert "PORTABLE, batch, round 1" in capsys.readouterr().err
    # The same command tries again what failed, and nothing else.
    assert bench(*TWO) == 0
    assert len(bench.measured) == 4


def test_a_server_that_hangs_costs_its_part(bench):
    bench.plant(FLASH_ATTN={"kind": "hang", "at": AT_ROUND_1, "once": True})
    assert bench(*TWO, "--part-limit-s", 3) == 1
    failed = {key: r["failed"] for key, r in bench.done.items() if "failed" in r}
    assert failed == {("FLASH_ATTN", "batch", 1): "not answered within 3 s"}


def test_a_server_that_never_starts_is_given_up(bench):
    bench.plant(FLASH_ATTN={"kind": "no start"})
    assert bench(*TWO, rounds=5) == 1
    assert {backend for backend, _, _ in bench.measured} == {"PORTABLE"}
    assert len(bench.measured) == 5
    assert bench.started.count("FLASH_ATTN") == 3
    assert "no kernel image is available" in bench.report
    assert "given up after 3 failures" in bench.report


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "log-probs that are not finite"),
        ("short", "2 tokens in an answer, 3 asked"),
    ],
)
def test_a_wrong_server_is_never_timed(kind, message, bench):
    bench.plant(PORTABLE={"kind": kind, "at": 1})
    assert bench(*TWO) == 1
    assert {backend for backend, _, _ in bench.measured} == {"FLASH_ATTN"}
    assert message in bench.report
    assert "not timed, since wrong in batch" in bench.report


def test_an_answer_that_is_too_short_while_timed_costs_its_part(bench):
    bench.plant(PORTABLE={"kind": "short", "at": AT_ROUND_1, "once": True})
    assert bench(*TWO) == 1
    assert bench.done["PORTABLE", "batch", 1]["failed"].startswith("2 tokens in an")
    assert len(bench.measured) == 3


def test_other_tokens_than_another_back_end_fail_the_run(bench, capsys):
    bench.plant(PORTABLE={"kind": "other tokens", "at": 1})
    assert bench(*TWO) == 1
    told = capsys.readouterr()
    assert "PORTABLE disagrees with FLASH_ATTN in batch: 3 answers differ" in told.err
    assert "| batch | PORTABLE | FLASH_ATTN | 0 | 0 | **3** | **0%** | 1 |" in told.out


def test_tokens_of_answers_are_told_apart(bench):
    options = ("--backends", "PORTABLE", "--workloads", "batch,long")
    assert bench(*options, rounds=1) == 0
    assert "| batch | tokens/s |" in bench.report
    assert "| long | output tokens/s |" in bench.report


def test_other_variables_are_another_study(bench, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    assert bench(*TWO) == 0
    assert "hidden" not in (bench.out / "results.json").read_text()
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    assert bench(*TWO) == 2
    told = capsys.readouterr().err
    assert "environment, variables: expected" in told
    assert "VLLM_ROCM_USE_AITER=1" in told


def test_tokens_that_no_context_changes_prove_nothing(bench, capsys):
    assert bench(*TWO) == 0
    assert "| batch | PORTABLE | FLASH_ATTN | 3 | 0 | 0 | 100% | 1 | 0% |" in (
        capsys.readouterr().out
    )
    every = {"kind": "no context", "at": 1}
    bench.plant(PORTABLE=every, FLASH_ATTN=every)
    assert bench(*TWO, "--fresh") == 0
    row = "| batch | PORTABLE | FLASH_ATTN | 3 | 0 | 0 | 100%, proves nothing | 0.001 |"
    assert f"{row} 100% |" in capsys.readouterr().out


def test_rates_follow_what_the_fastest_server_can_do(bench):
    options = ("--backends", "PORTABLE,FLASH_ATTN", "--workloads", "chat")
    assert bench(*options, rounds=1) == 0
    rates = json.loads((bench.out / "results.json").read_text())["rates"]["chat"]
    assert [float(rate) for rate in rates] == sorted(map(float, rates))
    assert len(rates) == 5 and rates[-1] == "inf"
    assert len(bench.measured) == 10
    # They stay what they were.
    assert bench(*options, rounds=2) == 0
    again = json.loads((bench.out / "results.json").read_text())["rates"]["chat"]
    assert again == rates


def test_servers_that_do_not_fit_together_run_one_at_a_time(bench, monkeypatch):
    import serving.fleet

    running, most = set(), []

    class Watched(serving.fleet.Server):
        def __init__(self, *arguments):
            running.add(self)
            most.append(len(running))
            super().__init__(*arguments)

        def stop(self):
            running.discard(self)
            super().stop()

    monkeypatch.setattr(serving.fleet, "Server", Watched)
    assert bench(*TWO, "--one-at-a-time") == 0
    assert max(most) == 1 and not running
    # Round 2 begins with the one that is still up.
    assert bench.started == ["FLASH_ATTN", "PORTABLE", "FLASH_ATTN"]


def test_a_server_ends_with_whoever_started_it(script, tmp_path):
    (tmp_path / "faults.json").write_text("{}")
    code = f"""
import sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
from pathlib import Path
import serving.server
fake = [sys.executable, "-P", {str(FAKE)!r}, {str(tmp_path / "faults.json")!r}]
serving.server.server_command = lambda _, port, __: [*fake, "--port", str(port)]
server = serving.server.Server("", [], {{}}, Path({str(tmp_path / "log")!r}))
server.wait_ready(60)
print(server.process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 30
    # Nobody may be there to reap it.
    while Path(f"/proc/{pid}").exists():
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            break
        assert time.monotonic() < end
        time.sleep(0.1)


def test_no_part_is_begun_after_the_time(bench, capsys):
    assert bench(*TWO, "--limit-s", "0.000001") == 1
    told = capsys.readouterr().err
    assert "--limit-s is over; the same command goes on from here" in told
    assert not bench.measured
    assert "not begun" in bench.report


@pytest.mark.parametrize("options", [[], ["--one-at-a-time"]])
def test_no_start_is_waited_for_after_the_time(bench, capsys, options):
    bench.plant(PORTABLE={"kind": "slow start"})
    began = time.monotonic()
    assert bench(*TWO, *options, "--limit-s", "2") == 1
    assert time.monotonic() - began < 30
    told = capsys.readouterr().err
    assert "goes on from here (PORTABLE was still starting)" in told
    assert not any(name == "PORTABLE" for name, *_ in bench.done), "nobody failed"
    bench.plant()
    assert bench(*TWO, *options) == 0


def test_the_report_says_what_the_work_is(bench, script):
    assert bench(*TWO) == 0
    assert "| batch | 3 | 16 | 3 | all at once |" in bench.report
    described = {name: kind.described() for name, kind in script.ALL_WORKLOADS.items()}
    assert described["chat"][1:3] == ("32 to 4096", "16 to 256")
    assert described["single"][3] == "1 at a time"


def test_back_ends_are_left_out_with_a_reason(script):
    left_out = script.backends.left_out
    rocm = PROBE | {"platform": "rocm", "backends": ["TRITON_ATTN", "ROCM_AITER_FA"]}
    names = ["PORTABLE", "FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_FA"]
    reasons = left_out(names, rocm)
    assert "TRITON_ATTN" not in reasons
    assert "install portable-backend" in reasons["PORTABLE"]
    assert reasons["FLASH_ATTN"] == "vLLM has it on cuda, this is rocm"
    assert reasons["ROCM_ATTN"] == "vLLM 0.0 does not know ROCM_ATTN"
    assert reasons["ROCM_AITER_FA"] == "the module aiter is not installed"
    assert not left_out(["ROCM_AITER_FA"], rocm | {"modules": ["aiter"]})


def test_where_no_back_end_exists_nothing_is_started(bench, capsys):
    assert bench("--backends", "ROCM_ATTN,CPU_ATTN") == 2
    assert "none of them exists here" in capsys.readouterr().err
    assert not bench.started


def test_a_model_that_takes_fewer_tokens_is_refused_before_the_start(bench, capsys):
    bench.probe = PROBE | {"max_tokens": 50}
    assert bench("--workloads", "batch,long") == 2
    told = capsys.readouterr().err
    assert "the longest needs 84 tokens" in told
    assert "takes 50; these fit: batch" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: must be a number from 1 on, got 0"),
        (["--limit-s", "nan"], "--limit-s: must be seconds"),
        (
            ["--backends", "FLASH_ATTN,portable"],
            "--backends: expected some of PORTABLE",
        ),
        (["--backends", "PORTABLE,PORTABLE"], "PORTABLE is there twice"),
        (["--workloads", "speed"], "--workloads: expected some of prefill; batch"),
        (["--rates", "1,0"], "--rates: must be auto, or requests per second above 0"),
        (["--geometry", "giant"], "llama8b"),
        (["--kv-cache-gib", "-1"], "must be GiB, 0 or more, got -1"),
        (["--model", "x", "--geometry", "tiny"], "not allowed with"),
        (["--", "--seed=1"], "--seed=1 cannot be given to the servers"),
        (["--", "--max_model_len", "8"], "--max_model_len cannot be given"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(
    options, message, script, tmp_path, capsys
):
    with pytest.raises(SystemExit) as ended:
        script.main(["--out", str(tmp_path / "out"), *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_four_workloads_are_those_of_end_to_end(script):
    from serving.workloads import WORKLOADS

    assert list(script.ALL_WORKLOADS)[:4] == ["prefill", "batch", "long", "mixed"]
    assert all(script.ALL_WORKLOADS[name] is kind for name, kind in WORKLOADS.items())


def test_arrivals_are_the_same_each_time_and_have_the_rate(script):
    from serving.load import _arrivals, percentile

    times = _arrivals(400, 10.0)
    assert times == sorted(times) and times == _arrivals(400, 10.0)
    assert times[-1] == pytest.approx(40) and times[0] > 0
    assert _arrivals(4, 2.0)[-1] == pytest.approx(2)
    assert set(_arrivals(5, math.inf)) == {0.0}
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_plots_are_drawn_where_matplotlib_is(script, bench):
    pytest.importorskip("matplotlib")
    assert bench("--workloads", "batch,chat", "--rates", "50,inf") == 0
    for name in ("throughput", "latency_chat"):
        assert (bench.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (bench.out / "report.html").read_text().count("data:image/png;base64,") == 2
