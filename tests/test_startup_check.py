# SPDX-License-Identifier: Apache-2.0
"""scripts/startup_check.py without engines: plan, client, findings, jobs, table."""

import asyncio
import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location(
        "startup_check", SCRIPTS / "startup_check.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_module(check):
    return sys.modules["startup_run"]


@pytest.fixture(scope="module")
def requests(check):
    return sys.modules["startup_requests"]


@pytest.fixture(scope="module")
def table(check):
    return sys.modules["startup_table"]


# ------------------------------------------------------------------------------- plan


def draw(requests, **changes):
    given = {"longest": 30000, "vocab_size": 1000, "batch_sizes": (1, 15, 16, 17, 256)}
    return requests.draw_plan(**given | changes)


def test_two_servers_of_a_mode_get_more_than_2000_requests(run_module, requests):
    scale = run_module.FULL
    plan = draw(requests, batch_sizes=scale.batch_sizes, share=scale.share)
    assert 2 * sum(len(wave.requests) for wave in plan) >= 2000
    assert plan == draw(requests, batch_sizes=scale.batch_sizes, share=scale.share)
    longest = max(
        len(request.prompt) + request.max_tokens
        for wave in plan
        for request in wave.requests
    )
    assert longest <= scale.limits["max-model-len"]


def test_the_plan_is_awkward(requests):
    plan = {wave.name: wave for wave in draw(requests)}
    drawn = [request for wave in plan.values() for request in wave.requests]
    lengths = {len(request.prompt) for request in drawn}
    assert {1, 2, 29999, 30000, 63, 64, 65, 2047, 2049} <= lengths
    for size in (1, 15, 16, 17, 256):
        wave = plan[f"batch {size}"]
        assert wave.concurrency == size <= len(wave.requests)
        # Together in one step, whatever their prompts take.
        assert min(request.max_tokens for request in wave.requests) >= 20
    assert len(plan["bursts"].requests) == 3 * plan["bursts"].concurrency
    starts = [tuple(r.prompt[:17]) for r in plan["shared prefixes"].requests]
    assert len(set(starts)) == len(requests.PREFIXES)
    left = [r.leave_after for r in drawn if r.leave_after is not None]
    assert len(left) > 20
    assert min(left) == 0
    assert {0.0, 0.8} == {request.temperature for request in drawn}
    sampled = [r for wave in draw(requests, greedy=False) for r in wave.requests]
    assert {request.temperature for request in sampled} == {0.8}
    assert all(
        set(request.allowed) <= set(request.prompt)
        for request in plan["repeats"].requests
    )
    assert 0.2 < sum(request.logprobs for request in drawn) / len(drawn) < 0.4


def test_the_newest_version_gets_at_least_300_requests_a_mode(check, requests):
    scale = check.scale_of(check.parse(["--newest"]))
    plan = draw(requests, batch_sizes=scale.batch_sizes, share=scale.share)
    assert 2 * sum(len(wave.requests) for wave in plan) >= 300
    assert check.parse(["--newest"]).parts == ["awkward"]


# ----------------------------------------------------------------------------- client


@pytest.fixture
def server():
    """A server whose answers depend on the prompt: (url, prompts, who has left)."""
    web = pytest.importorskip("aiohttp.web")
    seen = SimpleNamespace(prompts=[], left=0, url=None)
    ready, done = threading.Event(), asyncio.Event()

    async def answer(request):
        body = await request.json()
        seen.prompts.append(body["prompt"])
        kind, count = body["prompt"][0], body["max_tokens"]
        if body.get("stream"):
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                for _ in range(1000):
                    await response.write(b'data: {"choices": []}\n\n')
                    await asyncio.sleep(0.01)
            except ConnectionError:
                seen.left += 1
            return response
        if kind == 500:
            return web.Response(status=500, text="engine is dead")
        tokens = count - 1 if kind == 501 else count
        logprobs = [-9999.0 if kind == 502 else -1.0] * tokens
        choice = {"token_ids": [5] * tokens, "logprobs": {"token_logprobs": logprobs}}
        return web.json_response({"choices": [choice] if kind != 503 else []})

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        seen.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        await done.wait()
        await runner.cleanup()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield seen
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


def waves(requests, *drawn, concurrency=2, bursts=False):
    return [requests.Wave("wave", concurrency, list(drawn), bursts)]


def send(requests, url, plan, is_alive=lambda: True):
    return requests.send_plan(url, plan, is_alive=is_alive, limit_s=30)


@pytest.mark.parametrize("bursts", [False, True])
def test_right_answers_count(bursts, requests, server):
    drawn = [requests.Request([7], 3, logprobs=True), requests.Request([8, 9], 2)]
    plan = waves(requests, *drawn, *drawn, bursts=bursts)
    answers = send(requests, server.url, plan)
    assert (answers.sent, answers.right, answers.checked) == (4, 4, 6)
    assert (answers.prompt_tokens, answers.output_tokens) == (6, 10)
    assert not answers.wrong
    assert list(answers.waves) == ["wave"]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (500, "status 500"),
        (501, "number of tokens"),
        (502, "log-probs"),
        (503, "answer of another form"),
    ],
)
def test_wrong_answers_are_told(prompt, kind, requests, server):
    wrong = requests.Request([prompt], 3, logprobs=True)
    plan = waves(requests, wrong, requests.Request([7], 3))
    answers = send(requests, server.url, plan)
    assert (answers.sent, answers.right) == (2, 1)
    assert answers.wrong == {kind: 1}
    assert answers.samples[0].startswith(kind)


def test_clients_leave_when_they_are_to(requests, server):
    plan = waves(requests, *(requests.Request([7], 30, leave_after=n) for n in (0, 3)))
    answers = send(requests, server.url, plan)
    assert (answers.sent, answers.right, answers.left) == (2, 2, 2)
    end = time.monotonic() + 10
    while server.left < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert server.left == 2


def test_nothing_is_sent_to_a_dead_server(requests, server):
    plan = waves(requests, *[requests.Request([7], 3)] * 5)
    answers = send(requests, server.url, plan, lambda: not server.prompts)
    assert answers.sent + answers.unsent == 5
    assert answers.unsent >= 3


def test_a_server_that_is_not_there_fails_requests_and_no_more(requests):
    plan = waves(requests, requests.Request([7], 3))
    answers = send(requests, "http://127.0.0.1:9", plan)
    assert (answers.sent, answers.right) == (1, 0)
    assert list(answers.wrong) == ["ClientConnectorError"]


def test_a_steady_load_takes_the_time_between_tokens(check, server, monkeypatch):
    module = sys.modules["startup_background"]
    monkeypatch.setattr(module, "_WARM_S", 0.6)
    began = time.monotonic()
    found = module.steady_load(
        server.url, seconds=1.0, rate=4.0, prompts=iter([[7]] * 9), output_tokens=3
    )
    # Its streams have 1000 answers, 10 ms apart, whatever is asked for.
    assert (found["sent"], found["failed"]) == (4, 0)
    # Of those that began late enough.
    assert found["gaps"] in (999, 2 * 999, 3 * 999)
    assert 5 < found["p50_ms"] <= found["p99_ms"]
    assert time.monotonic() - began < 60


def test_requests_that_fail_are_told_apart(check):
    module = sys.modules["startup_background"]
    found = module.steady_load(
        "http://127.0.0.1:9",
        seconds=0.5,
        rate=4.0,
        prompts=iter([[7]] * 9),
        output_tokens=3,
    )
    assert found == {"gaps": 0, "sent": 2, "failed": 2}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3.0), ([2.0, 1.0], 0.5, 1.0), (list(range(1, 101)), 0.99, 99)],
)
def test_quantiles(values, share, expected, check):
    assert sys.modules["startup_background"].quantile(values, share) == expected


def test_the_last_status_is_read_whatever_the_folder_holds(check, tmp_path):
    module = sys.modules["startup_background"]
    assert module.status_in(tmp_path) == {}
    (tmp_path / "background.a.json").write_text("{")
    assert module.status_in(tmp_path) == {}
    (tmp_path / "background.nvidia_h200.json").write_text('{"trials": 3}')
    assert module.status_in(tmp_path) == {"trials": 3}


# --------------------------------------------------------------------------- findings


def test_events_tell_whose_kernels_were_compiled_when(
    run_module, tmp_path, monkeypatch
):
    triton = pytest.importorskip("triton")
    events = sys.modules["startup_events"]
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    file = tmp_path / "events"
    events.listen(file)
    listener = triton.knobs.compilation.listener
    for module, cached in (
        ("portable_backend.kernels.decode", True),
        ("portable_backend.kernels.decode", False),
        ("vllm.v1.sample", False),
    ):
        source = SimpleNamespace(name="_kernel", fn=SimpleNamespace(__module__=module))
        listener(
            src=source,
            metadata={},
            metadata_group={},
            times=SimpleNamespace(total=1_500_000),
            cache_hit=cached,
        )
    found = run_module.compilations(file, time.time() + 1)
    ours = {"kernels": {"_kernel": 2}, "loaded": 1, "compiled": 1, "seconds": 3.0}
    assert found["before, ours"] == ours
    assert found["before, others"]["compiled"] == 1
    found = run_module.compilations(file, time.time() - 60)
    assert set(found) == {"after, ours", "after, others"}
    assert run_module.compilations(tmp_path / "none", 0.0) == {}


def test_figures_come_from_the_log_and_the_report(run_module, tmp_path):
    """vLLM's own words in 0.25.1, and ours."""
    (tmp_path / "last-start.nvidia_h200.json").write_text('{"tune_s": 57.4}')
    report = "26 kernels ready: 0 compiled, 26 were there, in 1.1 s; grades of 18 keys"
    log = f"""
INFO Model loading took 5.2 GiB memory and 3.250000 seconds
INFO torch.compile and initial profiling/warmup run together took 14.20 s in total
INFO Graph capturing finished in 6 secs, took 0.5 GiB
INFO init engine (profile, create kv cache, warmup model) took 31.05 s (compilation: 14)
INFO tuned 6 of 11 keys in 57.4 s of 60 (4 tuned, 2 default, 5 unreached)
INFO tuning records: decode exact 1, nearest 8; choices 3f2a91bc
INFO {report}
WARNING Triton kernel JIT compilation during inference: _decode_kernel. This
"""
    found = run_module.told(log, tmp_path)
    figures = [found[name] for name in ("load_s", "compile_s", "graphs_s", "engine_s")]
    assert figures == [3.25, 14.2, 6, 31.05]
    assert found["report_line"] == report
    assert found["tuned_line"].startswith("tuned 6 of 11 keys")
    assert found["records_line"].startswith("tuning records: decode exact 1")
    assert found["report"] == {"tune_s": 57.4}
    assert len(found["jit_lines"]) == 1


def test_servers_share_no_cache(run_module, tmp_path):
    run = run_module.Run(tmp_path, "job", run_module.QUICK, 10, "FLASH_ATTN")
    first, second = run.caches("a, b"), run.caches("c")
    assert not set(first.values()) & set(second.values())
    # Inductor's C++ compiler cannot bear spaces.
    assert {
        Path(folder).relative_to(run.folder).parts[1] for folder in first.values()
    } == {"a_b"}
    run.save("one", {"right": 1})
    run.save("two", {})
    assert json.loads(run.file.read_text()) == {"one": {"right": 1}, "two": {}}


def test_where_the_monitor_ends_an_engine_another_is_only_warned(
    check, run_module, tmp_path, monkeypatch
):
    """Else nobody would know what the rest of the requests compile."""
    parts, begun = check.startup_parts, []

    def serve(run, name, waves, options, environment, monitor):
        begun.append((name, monitor, "--enforce-eager" in options))
        return {"jit_lines": ["x"] if "no drafts" in name else []}

    monkeypatch.setattr(parts, "_serve_plan", serve)
    run = run_module.Run(tmp_path, "job", run_module.QUICK, 600, "FLASH_ATTN")
    parts.awkward(run, ["default", "eager"])
    expected = {
        (f"{mode}, {what}", monitor, mode == "eager")
        for mode in ("default", "eager")
        for what, monitor in (
            ("no drafts", "error"),
            ("no drafts, again", "warn"),
            ("drafts", "error"),
            ("not ahead", "warn"),
        )
    }
    assert set(begun) == expected
    assert set(json.loads(run.file.read_text())) == {name for name, _, _ in expected}


# ----------------------------------------------------------------------------- servers

# Stands in for `vllm serve`: an engine of its own process, and /health.
FAKE_VLLM = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("engine", engine.pid, *sys.argv[1:], flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FAILED_VLLM = """
import time
print("why\\nRuntimeError: Engine core initialization failed. See above.", flush=True)
time.sleep(600)
"""


def fake_vllm(folder, code):
    """Variables with which vLLM's server, by either name, runs `code`."""
    for place in ("cli/main.py", "openai/api_server.py"):
        file = folder / "vllm" / "entrypoints" / place
        file.parent.mkdir(parents=True)
        for parent in (file.parent, file.parent.parent, file.parent.parent.parent):
            (parent / "__init__.py").touch()
        file.write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_a_servers_engine_is_gone_when_it_is_left(check, tmp_path):
    serve_check = sys.modules["serve_check"]
    members = sys.modules["serving.server"].members
    variables = fake_vllm(tmp_path, FAKE_VLLM)
    log = tmp_path / "log"
    with serve_check.served(
        tmp_path, log, ["--more"], 60, backend="B", environment=variables
    ) as server:
        assert not server.has_ended
        assert 0 < server.start_s < 60
        assert abs(server.ready_at - time.time()) < 30
        assert len(members("pgrp", server.process.pid)) == 2
        assert "--attention-backend B" in server.text
        assert "--more" in server.text
    assert not members("pgrp", server.process.pid)


def test_a_failed_engine_is_told_though_its_server_lives_on(check, tmp_path):
    serve_check = sys.modules["serve_check"]
    variables = fake_vllm(tmp_path, FAILED_VLLM)
    began = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"^the server did not start:\nwhy\n"),
        serve_check.served(tmp_path, tmp_path / "log", [], 60, environment=variables),
    ):
        pass
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------------------- jobs


class Lanes:
    """Makes lanes whose jobs are lines of Python."""

    def __new__(cls, check, folder, codes, gpus="0", limit_s=60.0):
        class WithCode(check.Lanes):
            def command(self, job, limit_s):
                return [sys.executable, "-c", codes[job.argument]]

        (folder / "logs").mkdir()
        args = SimpleNamespace(gpus=gpus, limit_s=limit_s, out=folder, stretch=1)
        return WithCode(args, [check.Job("awkward", name) for name in codes])


def test_a_job_that_fails_or_hangs_does_not_stop_the_others(
    check, tmp_path, monkeypatch
):
    monkeypatch.setitem(check.LIMITS, "awkward", 4)
    monkeypatch.setattr(check, "_LEAST_S", 1.0)
    monkeypatch.setattr(check, "_GRACE_S", 1.0)
    child = tmp_path / "child"
    # What it started lives in a group of its own, as a server does.
    hang = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                           process_group=0)
open({str(child)!r}, "w").write(str(sleeper.pid))
time.sleep(600)
"""
    codes = {"hangs": hang, "fails": "raise SystemExit('why')", "works": ""}
    lanes = Lanes(check, tmp_path, codes, gpus="0,1")
    lanes.run()
    assert set(lanes.seconds) == {f"awkward_{name}" for name in codes}
    assert lanes.problems == {
        "awkward_hangs": "ended before it was done, limit 4 s",
        "awkward_fails": "exit code 1; why",
    }
    stat = Path("/proc", child.read_text(), "stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_jobs_see_one_gpu_and_no_cache_of_the_user(check, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    names = ["CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR"]
    code = f"import os; print(*map(os.environ.get, {names}))"
    lanes = Lanes(check, tmp_path, {"one": code, "two": code}, gpus="3")
    lanes.run()
    assert not lanes.problems
    for name in ("one", "two"):
        log = tmp_path / "logs" / f"awkward_{name}.log"
        assert log.read_text() == "3 None\n"


def test_only_the_wanted_variants_start_in_turned_order(check, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(check.startup_parts.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(
        check.startup_parts, "_one_start", lambda run, label, *_: started.append(label)
    )
    args = check.parse(["--variants", "reference,ahead", "--job", "start:1"])
    args.out = tmp_path
    assert "reference,ahead" in check.Lanes(args, []).command(check.Job("start"), 9)
    check.run_job(args)
    assert started == [
        "cold, ahead", "cold, reference", "warm, ahead", "warm, reference"
    ]  # fmt: skip


def test_a_job_without_time_is_told_and_not_begun(check, tmp_path):
    lanes = Lanes(check, tmp_path, {"late": "raise SystemExit('run')"}, limit_s=30)
    lanes.run()
    assert lanes.problems == {"awkward_late": "no time was left for it"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "awkward,tune"], "--parts must be some of awkward, start"),
        (["--modes", "eager,slow"], "--modes must be some of default, eager, got slow"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (["--variants", "ahead,cold"], "--variants must be some of ahead, not ahead"),
    ],
)
def test_a_wrong_argument_is_told(arguments, message, check, capsys):
    with pytest.raises(SystemExit):
        check.parse(arguments)
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------ table

GOOD = {
    "monitor": "error",
    "sent": 10,
    "right": 10,
    "unsent": 0,
    "left": 1,
    "checked": 30,
    "nan_requests": 0.0,
    "still_running": 0.0,
    "launches": {"decode": 5, "prefill": 5},
    "jit_lines": [],
    "compilations": {"before, ours": {"kernels": {"_decode_kernel": 2}, "loaded": 2}},
}


def passed(rows):
    return {row.what: row.passed for row in rows}


def test_a_silent_server_with_right_answers_passes(table):
    rows = table.awkward_rows({"eager, drafts": GOOD, "eager, no drafts": GOOD})
    assert passed(rows) == {
        "eager, drafts": True,
        "eager, no drafts": True,
        "eager, requests": None,
    }
    assert "ours 0 compiled 2 loaded" in rows[0].result
    assert rows[2].result.startswith("20 right ones under --jit-monitor-mode error")


@pytest.mark.parametrize(
    "change",
    [
        {"right": 9},
        {"unsent": 1},
        {"checked": 0},
        {"nan_requests": 1.0},
        {"still_running": 1.0},
        {"launches": {"decode": 0, "prefill": 5}},
        {"failed": "the server ended: exit code 1"},
        {"jit_lines": ["Triton kernel JIT compilation during inference: x."]},
        {"compilations": {"after, ours": {"kernels": {"_k": 1}, "loaded": 1}}},
    ],
)
def test_a_server_that_is_not_fails(change, table):
    rows = table.awkward_rows({"eager, drafts": GOOD | change})
    assert passed(rows)["eager, drafts"] is False


def test_without_compiling_ahead_compilations_are_told_only(table):
    late = {"after, ours": {"kernels": {"_prefill_kernel": 1}, "compiled": 1}}
    found = GOOD | {"monitor": "warn", "compilations": late}
    row = table.awkward_rows({"eager, not ahead": found})[0]
    assert row.passed
    assert "after readiness: ours 1 compiled 0 loaded (_prefill_kernel)" in row.result


def test_starts_are_compared_within_a_round(table):
    def starts(ahead, reference):
        labels = {"ahead": ahead, "not ahead": ahead - 1, "reference": reference}
        return {
            f"{state}, {name}": {"start_s": seconds, "engine_s": 30.0}
            for state in ("cold", "warm")
            for name, seconds in labels.items()
        }

    rows = passed(table.start_rows([starts(54.5, 50.0), starts(44.5, 40.0)]))
    assert rows == {
        "cold, ahead": True,
        "cold, not ahead": True,
        "cold, reference": None,
        "warm, ahead": False,
        "warm, not ahead": False,
        "warm, reference": None,
    }
    failed = table.start_rows([{"cold, ahead": {"failed": "exit\nno memory"}}])
    assert (failed[0].passed, failed[0].result) == (False, "no memory")


def test_tuning_keeps_budget_and_memory_and_leaves_records(table):
    load = GOOD | {"blocks": 5000}
    tuned = load | {"report": {"tune_s": 63.0}}
    again = load | {"blocks": 5001} | {"report": {"grades": {"decode": {"exact": 3}}}}
    starts = {"load": load, "startup": tuned, "load again": again}
    assert all(passed(table.tuning_rows(starts, 60)).values())
    late = starts | {"startup": tuned | {"report": {"tune_s": 66.5}, "blocks": 4999}}
    rows = passed(table.tuning_rows(late, 60))
    assert (rows["budget"], rows["memory"]) == (False, False)
    lost = starts | {"load again": again | {"report": {"grades": {}}}}
    assert passed(table.tuning_rows(lost, 60))["records found"] is False
    # A run that was cut says what it saw.
    assert set(passed(table.tuning_rows({"load": load}, 60))) == {"serves, load"}


def test_a_carried_cache_leaves_nothing_to_compile(table):
    target = {"target": "sm90", "binaries": 28, "seconds": 20.0}
    warm = {"targets": [target], "bytes": 1e7}
    start = GOOD | {"report": {"compiled": 0}, "new_of_ours": {}}
    rows = table.carried_rows({"warm": warm, "start": start})
    assert passed(rows) == {"warm": True, "start": True}
    for change in ({"report": {"compiled": 1}}, {"new_of_ours": {"_k": 1}}):
        rows = table.carried_rows({"warm": warm, "start": start | change})
        assert passed(rows)["start"] is False
    rows = table.carried_rows({"warm": {"failed": "no GPU"}})
    assert passed(rows) == {"warm": False}


def turns(*pairs, failed=0):
    """Findings of `background`: (load's, background's) p99 of each pair of turns."""
    found = {}
    for number, values in enumerate(pairs):
        for name, p99 in zip(("load", "background"), values, strict=True):
            turn = {"sent": 60, "failed": failed, "trials": 0, "gaps": 3000}
            found[f"turn {number}, {name}"] = turn | {"p50_ms": 5.0, "p99_ms": p99}
    return found


def beside(exact, done=0, choices="0a"):
    grades = {"decode": {"exact": exact, "default": 5}}
    return {"grades": grades, "choices": choices, "background": {"done": done}}


BESIDE = {
    "at start": beside(1),
    "idle": {"seconds": 60.0, "trials": 20, "used_mib": 5},
    "before the next start": beside(1, done=2),
    "next start": beside(3, choices="1b"),
}


def test_tuning_beside_an_engine_costs_little_and_leaves_records(table):
    found = turns((10.0, 10.2), (10.0, 10.05), (10.1, 10.0)) | BESIDE
    assert passed(table.background_rows(found)) == {
        "between tokens, p50": None,
        "between tokens, p99": True,
        "requests answered": True,
        "trials, idle": True,
        "misses become exact": True,
    }


@pytest.mark.parametrize(
    ("row", "change"),
    [
        ("between tokens, p99", turns((10.0, 10.2), (10.0, 10.2), (9.0, 8.0))),
        ("requests answered", turns((10.0, 10.0), failed=1)),
        ("trials, idle", {"idle": {"seconds": 60.0, "trials": 19}}),
        ("misses become exact", {"next start": beside(2)}),
        ("misses become exact", {"before the next start": beside(1)}),
        ("misses become exact", {"before the next start": beside(1, 2, "running")}),
        ("run", {"failed": "RuntimeError: the server ended"}),
    ],
)
def test_what_tuning_beside_an_engine_must_not_do_is_told(row, change, table):
    rows = passed(table.background_rows(BESIDE | change))
    assert rows.pop(row) is False
    assert False not in rows.values()
    # A run that was cut says what it saw.
    assert passed(table.background_rows(change)).get(row, False) is False


def test_the_table_is_markdown(table):
    rows = [table.Row("start", "cold", True, "a|b\nc"), table.Row("x", "y", None, "")]
    assert table.markdown(rows).splitlines()[2:] == [
        "| start | cold | ok | a/b c |",
        "| x | y |  |  |",
    ]
