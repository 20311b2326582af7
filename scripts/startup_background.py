# SPDX-License-Identifier: Apache-2.0
"""The part `background` of startup_check.py: what tuning beside an engine costs it.

Two servers share the GPU, one loads records and one tunes in the background; they take
turns under a steady load, so that both see the same machine. While the first one's turn
lasts the other one's tuner is stopped: it would take that server, whose steps it does
not see, for idle.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve_check import GEOMETRIES, Server, completion, post
from startup_run import Run, used_mib

from portable_backend.warmup.background import PREFIX

# Requests per second, and what each asks for.
RATE = 4.0
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 64
# Of a turn that are not counted: both servers have to come to the same clocks.
_WARM_S = 2.0
# Until what a stopped tuner had begun has ended.
_SETTLE_S = 1.5
# What another start takes at most.
_START_S = 120.0
FAILURES = (RuntimeError, OSError, ValueError)


def background(run: Run) -> None:
    """Turns of both servers, an idle minute, and a start that finds what came of it."""
    caches = {name: run.caches(name) for name in ("load", "background")}
    scale = run.scale
    try:
        with contextlib.ExitStack() as servers:
            started: dict[str, Server] = {}
            for mode, environment in caches.items():
                tune = {"PORTABLE_BACKEND_TUNE": mode}
                started[mode] = servers.enter_context(
                    run.served(mode, scale.beside, {**environment, **tune})
                )
            folder = Path(caches["background"]["PORTABLE_BACKEND_CACHE_DIR"])
            run.save("at start", _choices(started["background"]))
            for number in range(scale.turns):
                # Each comes first as often as the other.
                names = list(started) if number % 2 else list(started)[::-1]
                for name in names:
                    gaps = _turn(run, started[name], name, folder, number)
                    run.save(f"turn {number}, {name}", gaps)
            run.save("idle", _idle(run, folder))
            run.save("before the next start", _choices(started["background"]))
        with run.served(
            "next start",
            scale.beside,
            {**caches["background"], "PORTABLE_BACKEND_TUNE": "load"},
        ) as server:
            run.save("next start", _choices(server))
    except FAILURES as error:
        run.save("failed", f"{type(error).__name__}: {error}"[-3000:])


def _turn(
    run: Run, server: Server, name: str, folder: Path, number: int
) -> dict[str, Any]:
    vocab_size = int(GEOMETRIES[run.scale.geometry]["vocab_size"])
    prompt_tokens = min(PROMPT_TOKENS, run.scale.longest - OUTPUT_TOKENS)
    stopped = _stopped(folder) if name == "load" else contextlib.nullcontext()
    trials = status_in(folder).get("trials", 0)
    with stopped:
        found = steady_load(
            server.url,
            seconds=run.scale.turn_s,
            rate=RATE,
            prompts=_prompts(vocab_size, prompt_tokens, seed=number),
            output_tokens=OUTPUT_TOKENS,
        )
    return found | {"trials": status_in(folder).get("trials", 0) - trials}


def _prompts(vocab_size: int, num_tokens: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield rng.choices(range(2, vocab_size), k=num_tokens)


def _idle(run: Run, folder: Path) -> dict[str, Any]:
    """Trials of a minute without requests, and then until a key is done, if it can."""
    before, began = status_in(folder), time.monotonic()
    time.sleep(min(run.scale.idle_s, run.left_s))
    after = status_in(folder)
    found = {
        "seconds": round(time.monotonic() - began, 1),
        "trials": after.get("trials", 0) - before.get("trials", 0),
        "used_mib": used_mib(),
    }
    while (
        not status_in(folder).get("done")
        and status_in(folder).get("state") in ("waiting", "tuning")
        and run.left_s > _START_S
    ):
        time.sleep(1.0)
    return found | {"status": status_in(folder)}


def _choices(server: Server) -> dict[str, Any]:
    rpc = f"{server.url}/collective_rpc"
    found: dict[str, Any] = post(rpc, {"method": "portable_choices"}, 60)["results"][0]
    return found


def status_in(folder: Path) -> dict[str, Any]:
    """What the tuner has written last; empty before it has."""
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        with contextlib.suppress(OSError, ValueError):
            status: dict[str, Any] = json.loads(path.read_text())
            return status
    return {}


@contextlib.contextmanager
def _stopped(folder: Path) -> Iterator[None]:
    """The tuner stands still meanwhile. Its children end what they are at, no more."""
    _signal(folder, signal.SIGSTOP)
    time.sleep(_SETTLE_S)
    try:
        yield
    finally:
        _signal(folder, signal.SIGCONT)


def _signal(folder: Path, number: signal.Signals) -> None:
    pid = status_in(folder).get("pid")
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def steady_load(
    url: str,
    *,
    seconds: float,
    rate: float,
    prompts: Iterator[list[int]],
    output_tokens: int,
) -> dict[str, Any]:
    """Send requests at a steady rate, and take the time between tokens.

    Args:
        url: of the server.
        seconds: for which requests are sent.
        rate: of requests, per second.
        prompts: token ids, one after another.
        output_tokens: of each request.

    Returns:
        "p50_ms" and "p99_ms" of the time between two tokens of a request, "gaps", how
        many there were, "sent" and "failed" requests.
    """
    gaps, failed, sent = asyncio.run(
        _steady_load(url, seconds, rate, prompts, output_tokens)
    )
    found: dict[str, Any] = {"gaps": len(gaps), "sent": sent, "failed": failed}
    if gaps:
        found |= {"p50_ms": quantile(gaps, 0.5), "p99_ms": quantile(gaps, 0.99)}
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed."""
    rank = max(0, -(-round(share * 1000) * len(values) // 1000) - 1)
    return round(sorted(values)[rank], 4)


async def _steady_load(
    url: str,
    seconds: float,
    rate: float,
    prompts: Iterator[list[int]],
    output_tokens: int,
) -> tuple[list[float], int, int]:
    import aiohttp  # vLLM needs it itself

    gaps: list[float] = []
    failed = 0
    began = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def send(prompt: list[int]) -> None:
            nonlocal failed
            body = completion(prompt, output_tokens)
            body |= {"stream": True, "return_token_ids": False}
            times = []
            try:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            times.append(time.perf_counter())
            except (aiohttp.ClientError, TimeoutError, OSError):
                times = []
            if not times:
                failed += 1
            elif times[0] - began >= _WARM_S:
                gaps.extend(
                    1e3 * (after - before)
                    for before, after in itertools.pairwise(times)
                )

        tasks = []
        for number in range(max(1, round(seconds * rate))):
            await asyncio.sleep(began + number / rate - time.perf_counter())
            tasks.append(asyncio.create_task(send(next(prompts))))
        await asyncio.gather(*tasks)
    return gaps, failed, len(tasks)
