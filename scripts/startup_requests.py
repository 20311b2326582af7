# SPDX-License-Identifier: Apache-2.0
"""Awkward requests for a server: a closed, seeded plan, and the client that sends it.

Waves follow each other; within one, as many requests as it says are in flight. All of
it is a function of the arguments of `draw_plan`, so that two servers get the same.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_check import completion, is_finite

# Lengths at and beside these edges: blocks, tiles, chunks, and sizes of graphs.
EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREFIXES = (17, 65, 333, 1001, 4097)
OUTPUTS = (1, 2, 3, 7, 16, 33, 48)
# Between bursts; short enough that the next one meets the last one's decodes.
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Request:
    """One completion.

    Attributes:
        prompt: token ids.
        max_tokens: asked for, and to be answered unless the client leaves.
        logprobs: whether to ask for log-probs and check them.
        temperature: 0 is greedy.
        allowed: ids to choose from, all if empty: few, and they repeat, as drafts need.
        leave_after: answers of the stream after which the client disconnects, 0: as
            soon as the request is sent; None: it stays.
    """

    prompt: list[int]
    max_tokens: int
    logprobs: bool = False
    temperature: float = 0.0
    allowed: tuple[int, ...] = ()
    leave_after: int | None = None


@dataclass(frozen=True)
class Wave:
    """Requests sent by so many clients at once; `bursts` of them all at once."""

    name: str
    concurrency: int
    requests: list[Request]
    bursts: bool = False


def draw_plan(
    *,
    longest: int,
    vocab_size: int,
    batch_sizes: Sequence[int],
    share: float = 1.0,
    greedy: bool = True,
    seed: int = 0,
) -> list[Wave]:
    """Waves of awkward requests; about 1000 for a share of 1.

    Args:
        longest: tokens of the longest prompt.
        vocab_size: of the model; ids below 2 are left out.
        batch_sizes: numbers of requests to decode together.
        share: of the requests to draw; waves of a batch size keep at least that many.
        greedy: whether two of three requests choose the best token.
        seed: of everything drawn.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(2, vocab_size), k=count)

    def length(most: int) -> int:
        return min(most, max(1, round(math.exp(rng.uniform(0, math.log(most))))))

    def some(count: int) -> range:
        return range(max(2, round(share * count)))

    def request(prompt: list[int], **more: Any) -> Request:
        more.setdefault("max_tokens", rng.choice(OUTPUTS))
        temperature = rng.choice((0.0, 0.0, 0.8)) if greedy else 0.8
        return Request(
            prompt, logprobs=rng.random() < 0.3, temperature=temperature, **more
        )

    sizes = sorted({1, 2, longest - 1, longest})
    sizes += [e + d for e in EDGES for d in (-1, 0, 1) if e + 1 < longest]
    waves = [Wave("lengths", 1, [request(tokens(n)) for n in sizes])]
    for size in batch_sizes:
        # The largest have all they need in one go, so that all decode together.
        count = size if size > 64 else max(size, len(some(48 if size > 1 else 24)))
        most = min(longest, 2000)
        drawn = [
            request(tokens(length(most)), max_tokens=rng.randrange(20, 40))
            for _ in range(count)
        ]
        waves.append(Wave(f"batch {size}", size, drawn))
    drawn = [request(tokens(length(longest))) for _ in some(192)]
    waves.append(Wave("bursts", max(2, len(drawn) // 3), drawn, bursts=True))
    prefixes = [tokens(n) for n in PREFIXES if n < longest] or [tokens(longest // 2)]
    drawn = [
        request(
            prefix + tokens(rng.randrange(1, max(2, min(64, longest - len(prefix)))))
        )
        for _ in some(12)
        for prefix in prefixes
    ]
    waves.append(Wave("shared prefixes", 16, drawn))
    drawn = [
        request(
            tokens(length(longest)),
            leave_after=rng.randrange(0, 9) if i % 2 else None,
            max_tokens=rng.randrange(10, 48),
        )
        for i in some(128)
    ]
    waves.append(Wave("leaving", 32, drawn))
    drawn = []
    for _ in some(64):
        pattern, most = tokens(rng.randrange(1, 9)), length(min(longest, 4000))
        prompt = (pattern * (most // len(pattern) + 1))[:most]
        drawn.append(request(prompt, allowed=tuple(sorted({*prompt[:2]}))))
    waves.append(Wave("repeats", 24, drawn))
    return waves


@dataclass
class Answers:
    """What became of a plan so far.

    Attributes:
        sent: requests.
        right: of them, those answered in full, and left as planned.
        left: of those, where the client went first.
        checked: log-probs that were looked at.
        wrong: kinds of failures and how many.
        samples: the first failures, in words.
        unsent: requests that nobody was there for.
        waves: seconds of each wave.
    """

    sent: int = 0
    right: int = 0
    left: int = 0
    checked: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    unsent: int = 0
    waves: dict[str, float] = field(default_factory=dict)

    def fail(self, kind: str, text: str) -> None:
        self.wrong[kind] += 1
        if len(self.samples) < 5:
            self.samples.append(f"{kind}: {text}"[:300])


def send_plan(
    url: str,
    waves: Sequence[Wave],
    *,
    is_alive: Callable[[], bool],
    limit_s: float,
    request_limit_s: float = 120.0,
    on_wave: Callable[[Answers], None] = lambda answers: None,
) -> Answers:
    """Send a plan, and check every answer; never raises for what the server does.

    Args:
        url: of the server.
        waves: one after the other.
        is_alive: whether the server runs; where it doesn't, nothing more is sent.
        limit_s: for all of it; then what is unsent stays so.
        request_limit_s: for one request.
        on_wave: called after each wave with what there is so far.
    """
    answers = Answers()
    asyncio.run(
        _send_plan(
            url,
            waves,
            answers,
            is_alive,
            time.monotonic() + limit_s,
            request_limit_s,
            on_wave,
        )
    )
    return answers


async def _send_plan(
    url: str,
    waves: Sequence[Wave],
    answers: Answers,
    is_alive: Callable[[], bool],
    end: float,
    request_limit_s: float,
    on_wave: Callable[[Answers], None],
) -> None:
    import aiohttp  # vLLM needs it itself

    timeout = aiohttp.ClientTimeout(total=request_limit_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client(waiting: Iterator[Request]) -> None:
            for request in waiting:
                if time.monotonic() >= end or not is_alive():
                    answers.unsent += 1
                    continue
                answers.sent += 1
                try:
                    await _send(session, f"{url}/v1/completions", request, answers)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    answers.fail(type(error).__name__, str(error))
                except (LookupError, TypeError, ValueError) as error:
                    answers.fail("answer of another form", repr(error))

        for wave in waves:
            began = time.monotonic()
            step = wave.concurrency if wave.bursts else len(wave.requests)
            tasks: list[asyncio.Task[None]] = []
            for first in range(0, len(wave.requests), step):
                some = iter(wave.requests[first : first + step])
                tasks += [
                    asyncio.create_task(client(some)) for _ in range(wave.concurrency)
                ]
                await asyncio.sleep(_PAUSE_S if wave.bursts else 0)
            await asyncio.gather(*tasks)
            answers.waves[wave.name] = round(time.monotonic() - began, 2)
            on_wave(answers)


async def _send(session: Any, url: str, request: Request, answers: Answers) -> None:
    answers.prompt_tokens += len(request.prompt)
    body = completion(request.prompt, request.max_tokens)
    body["temperature"] = request.temperature
    if request.logprobs:
        body["logprobs"] = 1
    if request.allowed:
        body["allowed_token_ids"] = list(request.allowed)
    if request.leave_after is not None:
        # A prompt's ids would make a line longer than the client takes.
        body |= {"stream": True, "return_token_ids": False}
        await _leave(session, url, body, request, answers)
        return
    async with session.post(url, json=body) as response:
        if response.status != 200:
            answers.fail(f"status {response.status}", await response.text())
            return
        choice = (await response.json())["choices"][0]
    count = len(choice["token_ids"])
    answers.output_tokens += count
    if count != request.max_tokens:
        answers.fail("number of tokens", f"{count} instead of {request.max_tokens}")
        return
    if request.logprobs:
        logprobs = choice["logprobs"]["token_logprobs"]
        answers.checked += len(logprobs)
        if len(logprobs) != count or not is_finite(logprobs):
            answers.fail("log-probs", f"{len(request.prompt)} tokens: {logprobs[:8]}")
            return
    answers.right += 1


async def _leave(
    session: Any, url: str, body: dict[str, Any], request: Request, answers: Answers
) -> None:
    """Disconnect after some answers of the stream, or once the request is out."""
    seen = 0
    if request.leave_after == 0:
        sending = asyncio.ensure_future(session.post(url, json=body))
        await asyncio.wait([sending], timeout=0.05)
        if not sending.done():
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        else:
            (await sending).close()
    else:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                answers.fail(f"status {response.status}", await response.text())
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if "error" in json.loads(line[6:]):
                        answers.fail("error in a stream", line.decode())
                        return
                    seen += 1
                if seen == request.leave_after:
                    response.close()  # the server sees the client go
                    break
        if not seen:
            answers.fail("number of tokens", "an empty stream")
            return
    answers.left += 1
    answers.right += 1
