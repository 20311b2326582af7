# SPDX-License-Identifier: Apache-2.0
"""What startup_check.py runs on one GPU: servers, requests and what came of them.

Each function takes a `Run` and saves its findings as it goes, so that a run that is cut
short still says what it saw.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gpu_check import NGRAM
from serve_check import (
    GEOMETRIES,
    JIT_WARNING,
    Server,
    metric,
    post,
    served,
    write_config,
)
from startup_events import EXTENSION, VARIABLE
from startup_requests import Wave, draw_plan, send_plan

AHEAD = {"PORTABLE_BACKEND_COMPILE_AHEAD": "on"}
NOT_AHEAD = {"PORTABLE_BACKEND_COMPILE_AHEAD": "off"}
MODES: dict[str, list[str]] = {"default": [], "eager": ["--enforce-eager"]}
OURS = "portable_backend"
# Else the first start would read all these from disk, and compile them for Python.
IMPORTS = """
import contextlib, importlib
for name in (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama",
    "portable_backend.backend",
    "portable_backend.startup",
    "portable_backend.start_tuning",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""
# What a server causes that does not start, or dies while it is asked.
FAILURES = (RuntimeError, OSError, ValueError, HTTPException)
# Less does not suffice for another start and all requests.
_AGAIN_S = 60.0
# Seconds, as vLLM logs them.
LOGGED = {
    "engine_s": r"init engine \(.*?\) took ([\d.]+) s",
    "compile_s": r"torch\.compile.*? took ([\d.]+) s in total",
    "graphs_s": r"Graph capturing finished in ([\d.]+) s",
    "load_s": r"Model loading took .*? and ([\d.]+) s",
}
COUNTED = {
    "nan_requests": "corrupted_requests",
    "prefix_hits": "prefix_cache_hits",
    "drafts": "spec_decode_num_draft_tokens",
    "drafts_accepted": "spec_decode_num_accepted_tokens",
}
REPORT_LINE = re.compile(r"\d+ kernels ready: .*")
TUNED_LINE = re.compile(r"tuned \d+ of \d+ keys in .*|nothing (?:is|was) tuned.*")
RECORDS_LINE = re.compile(r"tuning records: .*")


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        geometry: of the model.
        longest: tokens of the longest prompt.
        batch_sizes: numbers of requests to decode together.
        share: of the plan's requests.
        limits: of the engine, names as in vLLM's and `warm`'s options.
        options: further ones of vLLM.
        beside: options of servers that share a GPU.
        alone: of one that has it for itself.
        budget_s: of tuning at start.
    """

    geometry: str = "llama8b"
    longest: int = 30000
    batch_sizes: tuple[int, ...] = (1, 15, 16, 17, 255, 256)
    share: float = 1.0
    limits: Mapping[str, int] = field(
        default_factory=lambda: {
            "max-model-len": 30720,
            "max-num-seqs": 256,
            "max-num-batched-tokens": 8192,
        }
    )
    options: tuple[str, ...] = ()
    # vLLM starts only where that share of the memory is free, whatever it needs.
    beside: tuple[str, ...] = (
        "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(8 << 30)
    )  # fmt: skip
    alone: tuple[str, ...] = ("--gpu-memory-utilization", "0.5")
    budget_s: int = 60

    def server_options(self) -> list[str]:
        limits = [part for n, v in self.limits.items() for part in (f"--{n}", str(v))]
        return [*limits, *self.options]


FULL = Scale()
QUICK = Scale(
    geometry="tiny",
    longest=180,
    batch_sizes=(1, 3),
    share=0.03,
    limits={
        "max-model-len": 256,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 64,
        "block-size": 32,
    },
    # Inductor's C++ takes long to compile, and needs a compiler.
    options=("--dtype", "float32", "--compilation-config", '{"backend": "eager"}'),
    beside=("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", "67108864"),
    alone=("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", "67108864"),
    budget_s=3,
)


class Run:
    """One job: its folder, its time, and the file of its findings.

    Args:
        out: folder for logs, caches and `<name>.json`.
        name: of the job.
        scale: of everything.
        limit_s: for the job.
        reference: back end to compare starts with.
    """

    def __init__(
        self, out: Path, name: str, scale: Scale, limit_s: float, reference: str
    ) -> None:
        self.name, self.scale, self.reference = name, scale, reference
        self.end = time.monotonic() + limit_s
        self.file = out / f"{name}.json"
        self.folder = out / "work" / name
        self.logs = out / "logs"
        self.model = self.folder / "model"
        for folder in (self.model, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        write_config(self.model, scale.geometry)
        self._found: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        return max(1.0, self.end - time.monotonic())

    def save(self, key: str, found: Any) -> None:
        """Write a finding down at once; readers see the old file or the new one."""
        with self._lock:
            self._found[key] = found
            spare = self.file.with_suffix(".tmp")
            spare.write_text(json.dumps(self._found, indent=1) + "\n")
            os.replace(spare, self.file)

    def caches(self, name: str) -> dict[str, str]:
        """Variables that give a server caches of its own, empty at first."""
        folder = self.folder / "caches" / _as_file(name)
        return {
            "VLLM_CACHE_ROOT": str(folder / "vllm"),
            "TRITON_HOME": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "CUDA_CACHE_PATH": str(folder / "cuda"),
            "PORTABLE_BACKEND_CACHE_DIR": str(folder / "portable"),
        }

    @contextlib.contextmanager
    def served(
        self,
        name: str,
        options: Iterable[str],
        environment: Mapping[str, str],
        *,
        backend: str = "portable",
        monitor: str = "warn",
    ) -> Iterator[Server]:
        """A server, its log and its kernels' events named after `name`."""
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = {
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            VARIABLE: str(self.events(name)),
        }
        with served(
            self.model,
            self.log(name),
            [*self.scale.server_options(), *options],
            max(1.0, self.left_s - 15),  # so that the rest can still be told
            backend=backend,
            monitor=monitor,
            extension=EXTENSION,
            environment=variables,
        ) as server:
            yield server

    def log(self, name: str) -> Path:
        return self.logs / f"{self.name}.{_as_file(name)}.log"

    def events(self, name: str) -> Path:
        return self.log(name).with_suffix(".events")


def _as_file(name: str) -> str:
    """Without what compilers and shells take for two names."""
    return name.replace(",", "").replace(" ", "_")


# What servers tell


def compilations(events: Path, ready_at: float) -> dict[str, Any]:
    """Kernels that a worker compiled, and found in a cache, before and after it served.

    Args:
        events: file of startup_events.py; absent where nothing was compiled.
        ready_at: Unix time from which on requests could come.
    """
    lines = events.read_text().splitlines() if events.exists() else []
    found: dict[str, Any] = {}
    for event in map(json.loads, lines):
        when = "before" if event["at"] < ready_at else "after"
        whose = "ours" if event["module"].split(".")[0] == OURS else "others"
        what = "loaded" if event["cached"] else "compiled"
        counts = found.setdefault(f"{when}, {whose}", {"kernels": Counter()})
        counts[what] = counts.get(what, 0) + 1
        counts["seconds"] = round(counts.get("seconds", 0.0) + event["seconds"], 3)
        counts["kernels"][event["kernel"]] += 1
    return found


def told(server_log: str, cache_dir: Path) -> dict[str, Any]:
    """Figures and lines of a log, and the report that our start left."""
    found: dict[str, Any] = {}
    for name, pattern in LOGGED.items():
        if match := re.search(pattern, server_log):
            found[name] = float(match[1])
    for name, line in (
        ("report_line", REPORT_LINE),
        ("tuned_line", TUNED_LINE),
        ("records_line", RECORDS_LINE),
    ):
        if match := line.search(server_log):
            found[name] = match[0]
    for path in sorted(cache_dir.glob("last-start.*.json")):
        found["report"] = json.loads(path.read_text())
    jit = [line for line in server_log.splitlines() if JIT_WARNING.search(line)]
    return found | {"jit_lines": jit[:20]}


def asked(server: Server) -> dict[str, Any]:
    """Launches, memory, blocks and NaN of a living server."""
    rpc = f"{server.url}/collective_rpc"
    found: dict[str, Any] = {}
    for name, method in (
        ("launches", "portable_launch_counts"),
        ("memory", "startup_check_memory"),
    ):
        found[name] = post(rpc, {"method": method}, 60)["results"][0]
    text = _metrics(server)
    for name, counter in COUNTED.items():
        found[name] = metric(text, f"vllm:{counter}_total")
    blocks = re.search(r'num_gpu_blocks="(\d+)"', text)
    found["blocks"] = int(blocks[1]) if blocks else None
    end = time.monotonic() + 20  # those whose clients left may take a step or two
    while (running := metric(text, "vllm:num_requests_running")) and (
        time.monotonic() < end
    ):
        time.sleep(0.5)
        text = _metrics(server)
    return found | {"still_running": running}


def _metrics(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        return str(response.read().decode())


def used_mib() -> int | None:
    """GPU memory in use, as nvidia-smi has it; None where it does not run."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    command += ["-i", gpu] if gpu else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


# Parts


def awkward(run: Run, modes: Sequence[str]) -> None:
    """Servers side by side, three of a mode: drafts or none, and not compiling ahead.

    Args:
        run: the job.
        modes: some of MODES.
    """
    drafts = ["--speculative-config", json.dumps(NGRAM | {"prompt_lookup_min": 1})]
    plan = _plan(run)
    # Where all requests of a step are greedy, vLLM's own check of drafts compiles a
    # kernel while it serves (0.25.1, rejection_greedy_sample_kernel has a FIXME).
    sampled = _plan(run, greedy=False)
    few = _plan(run, share=run.scale.share / 4, most=64)
    servers: dict[str, tuple[list[Wave], list[str], Mapping[str, str], str]] = {}
    for mode in modes:
        options = MODES[mode]
        servers |= {
            f"{mode}, no drafts": (plan, options, AHEAD, "error"),
            f"{mode}, drafts": (sampled, [*options, *drafts], AHEAD, "error"),
            f"{mode}, not ahead": (few, options, NOT_AHEAD, "warn"),
        }

    def serve(name: str) -> None:
        waves, options, environment, monitor = servers[name]
        found = _serve_plan(run, name, waves, options, environment, monitor)
        run.save(name, found)
        if monitor == "error" and found["jit_lines"] and run.left_s > _AGAIN_S:
            # The engine is dead: what would the rest have compiled?
            again = f"{name}, again"
            run.save(
                again, _serve_plan(run, again, waves, options, environment, "warn")
            )

    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(serve, servers))


def _plan(
    run: Run, *, share: float | None = None, most: int = 10000, greedy: bool = True
) -> list[Wave]:
    scale = run.scale
    return draw_plan(
        longest=scale.longest,
        vocab_size=int(GEOMETRIES[scale.geometry]["vocab_size"]),
        batch_sizes=[size for size in scale.batch_sizes if size <= most],
        share=scale.share if share is None else share,
        greedy=greedy,
    )


def _serve_plan(
    run: Run,
    name: str,
    waves: list[Wave],
    options: list[str],
    environment: Mapping[str, str],
    monitor: str,
) -> dict[str, Any]:
    """Serve a plan with options; what came of it, or why nothing did."""
    found: dict[str, Any] = {"monitor": monitor}
    caches = run.caches(name.removesuffix(", again"))
    ready_at = float("inf")
    try:
        with run.served(
            name,
            [*run.scale.beside, *options],
            {**caches, **environment},
            monitor=monitor,
        ) as server:
            ready_at = server.ready_at
            found["start_s"] = round(server.start_s, 1)
            began = time.monotonic()
            answers = send_plan(
                server.url, waves, is_alive=server.is_alive, limit_s=run.left_s - 20
            )
            found |= asdict(answers)
            found["load_s"] = round(time.monotonic() - began, 1)
            if server.is_alive():
                found |= asked(server)
            else:
                found["failed"] = f"the server ended: exit code {server.process.poll()}"
    except FAILURES as error:
        found["failed"] = f"{type(error).__name__}: {error}"[-3000:]
    log = run.log(name).read_text(errors="replace")
    found |= told(log, Path(caches["PORTABLE_BACKEND_CACHE_DIR"]))
    return found | {"compilations": compilations(run.events(name), ready_at)}


def start(run: Run, number: int) -> None:
    """Cold and warm starts of ours and the reference, in an order turned by `number`.

    Args:
        run: the job.
        number: of the round.
    """
    variants: dict[str, tuple[str, Mapping[str, str]]] = {
        "ahead": ("portable", AHEAD),
        "not ahead": ("portable", NOT_AHEAD),
        "reference": (run.reference, {}),
    }
    names = list(variants)
    names = names[number % 3 :] + names[: number % 3]
    command = [sys.executable, "-P", "-c", IMPORTS]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=run.left_s)
    for state in ("cold", "warm"):
        for name in names:
            backend, environment = variants[name]
            label = f"{state}, {name}"
            run.save(label, _one_start(run, label, name, backend, environment))


def _one_start(
    run: Run, label: str, name: str, backend: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    caches = run.caches(name)
    found: dict[str, Any] = {"backend": backend}
    try:
        with run.served(
            label, run.scale.alone, {**caches, **environment}, backend=backend
        ) as server:
            found["start_s"] = round(server.start_s, 2)
            ready_at = server.ready_at
    except RuntimeError as error:
        return found | {"failed": str(error)[-3000:]}
    log = run.log(label).read_text(errors="replace")
    found |= told(log, Path(caches["PORTABLE_BACKEND_CACHE_DIR"]))
    return found | {"compilations": compilations(run.events(label), ready_at)}


def startup_tuning(run: Run) -> None:
    """A start that loads records, one that tunes, and one that finds what that left."""
    modes = {"load": "load", "startup": "startup", "load again": "load"}
    caches = run.caches("tuned")
    for name, mode in modes.items():
        environment = {
            **caches,
            **AHEAD,
            "PORTABLE_BACKEND_TUNE": mode,
            "PORTABLE_BACKEND_TUNE_BUDGET_S": str(run.scale.budget_s),
        }
        if name == "load":  # of an untuned start; the others share the tuned cache
            environment["PORTABLE_BACKEND_CACHE_DIR"] += "_before"
        run.save(name, _serve_some(run, name, environment))


def _serve_some(run: Run, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Start alone on the GPU, answer some requests, tell memory and blocks."""
    found: dict[str, Any] = {"used_before_mib": used_mib()}
    ready_at = float("inf")
    try:
        with run.served(name, run.scale.alone, environment) as server:
            ready_at = server.ready_at
            found |= {"start_s": round(server.start_s, 1), "used_mib": used_mib()}
            found["at_start"] = asked(server)
            waves = _plan(run, share=run.scale.share / 20, most=16)
            found |= asdict(
                send_plan(
                    server.url, waves, is_alive=server.is_alive, limit_s=run.left_s - 20
                )
            )
            found |= asked(server)
    except FAILURES as error:
        found["failed"] = f"{type(error).__name__}: {error}"[-3000:]
    log = run.log(name).read_text(errors="replace")
    found |= told(log, Path(environment["PORTABLE_BACKEND_CACHE_DIR"]))
    return found | {"compilations": compilations(run.events(name), ready_at)}


def carried(run: Run) -> None:
    """Fill a cache by `portable-backend warm`, then start with nothing but it."""
    folder = run.folder / "carried"
    command = [sys.executable, "-P", "-m", "portable_backend.cli", "warm", "--json"]
    command += ["--model", str(run.model), "--cache-dir", str(folder)]
    for name, value in run.scale.limits.items():
        command += [f"--{name}", str(value)]
    options = run.scale.options
    if "--dtype" in options:
        command += ["--dtype", options[options.index("--dtype") + 1]]
    caches = run.caches("carried")
    environment = {**os.environ, **caches, "PYTHONSAFEPATH": "1"}
    if environment.pop("TRITON_INTERPRET", None):
        command += ["--target", "sm90"]  # compiles all the same
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=run.left_s
    )
    if done.returncode != 0:
        run.save("warm", {"failed": (done.stderr or done.stdout)[-3000:]})
        return
    run.save("warm", json.loads(done.stdout))
    before = _kernels_in(folder)
    found = _serve_some(
        run, "start", {**caches, **AHEAD, "TRITON_CACHE_DIR": str(folder)}
    )
    found["new_of_ours"] = dict((_kernels_in(folder) - before) & _only(before))
    run.save("start", found)


def _kernels_in(folder: Path) -> "Counter[str]":
    """Entries of a Triton cache by kernel."""
    names = (path.name for path in folder.glob("*/*.json"))
    return Counter(n.removesuffix(".json") for n in names if not n.startswith("__grp"))


def _only(names: Iterable[str]) -> "Counter[str]":
    return Counter(dict.fromkeys(names, 1 << 30))
