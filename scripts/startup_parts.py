# SPDX-License-Identifier: Apache-2.0
"""What startup_check.py runs on one GPU: servers, requests and what came of them.

Each function takes a `Run` and saves its findings as it goes, so that a run that is cut
short still says what it saw.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gpu_check import NGRAM
from serving.models import GEOMETRIES
from startup_requests import Wave, draw_plan, send_plan
from startup_run import Run, asked, compilations, told, used_mib

AHEAD = {"PORTABLE_BACKEND_COMPILE_AHEAD": "on"}
NOT_AHEAD = {"PORTABLE_BACKEND_COMPILE_AHEAD": "off"}
VARIANTS = ("ahead", "not ahead", "reference")
MODES: dict[str, list[str]] = {"default": [], "eager": ["--enforce-eager"]}
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


def awkward(run: Run, modes: Sequence[str]) -> None:
    """Servers side by side, three of a mode: drafts or none, and not compiling ahead.

    Args:
        run: the job.
        modes: some of MODES.
    """
    drafts = ["--speculative-config", json.dumps(NGRAM | {"prompt_lookup_min": 1})]
    plan = _plan(run)
    # Where all requests of a step are greedy, vLLM's own check of drafts compiles a
    # kernel while it serves (0.25.1: see the FIXME in rejection_greedy_sample_kernel).
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
            cut = {**found, "failed": "cut short"}
            answers = send_plan(
                server.url,
                waves,
                is_alive=lambda: not server.has_ended,
                limit_s=run.left_s - 20,
                on_wave=lambda answers: run.save(name, cut | asdict(answers)),
            )
            found |= asdict(answers)
            found["load_s"] = round(time.monotonic() - began, 1)
            if not server.has_ended:
                found |= asked(server)
            else:
                found["failed"] = f"the server ended: exit code {server.process.poll()}"
    except FAILURES as error:
        found["failed"] = f"{type(error).__name__}: {error}"[-3000:]
    log = run.log(name).read_text(errors="replace")
    found |= told(log, Path(caches["PORTABLE_BACKEND_CACHE_DIR"]))
    return found | {"compilations": compilations(run.events(name), ready_at)}


def start(run: Run, number: int, names: Sequence[str] = VARIANTS) -> None:
    """Cold and warm starts of ours and the reference, in an order turned by `number`.

    Args:
        run: the job.
        number: of the round.
        names: which of VARIANTS.
    """
    variants: dict[str, tuple[str, Mapping[str, str]]] = {
        "ahead": ("portable", AHEAD),
        "not ahead": ("portable", NOT_AHEAD),
        "reference": (run.reference, {}),
    }
    shift = number % len(names)
    names = [*names[shift:], *names[:shift]]
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
                    server.url,
                    waves,
                    is_alive=lambda: not server.has_ended,
                    limit_s=run.left_s - 20,
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
