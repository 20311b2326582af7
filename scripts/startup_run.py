# SPDX-License-Identifier: Apache-2.0
"""A job of startup_check.py: its scale, its servers, and what those tell."""

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_check import (
    JIT_WARNING,
    Server,
    metric,
    post,
    served,
    write_config,
)
from startup_events import EXTENSION, VARIABLE

OURS = "portable_backend"
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
        turns, turn_s: of each server under a steady load, and how long one lasts.
        idle_s: in which an engine that has nothing to do tunes.
    """

    geometry: str = "llama8b-8l"
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
    turns: int = 6
    turn_s: float = 15.0
    idle_s: float = 60.0

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
    turns=1,
    turn_s=3.0,
    idle_s=2.0,
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
