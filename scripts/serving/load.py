# SPDX-License-Identifier: Apache-2.0
"""Requests to a running server, timed as its client sees them."""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from serving.workloads import Request, Workload

# vLLM puts this for a log-prob that is not finite.
_LOGPROB_FLOOR = -9000.0


class LoadError(RuntimeError):
    """Requests that failed, or took too long."""


class WrongAnswerError(LoadError):
    """Answers that cannot be right."""


@dataclass
class Answer:
    """One request's answer; times in seconds from the start of the load.

    Attributes:
        sent, done: when the request went out, and when the answer was complete.
        token_times: when each token came; of streamed answers only.
        tokens: ids.
        logprobs: of each token, if asked for: those of the two best, best first.
    """

    sent: float = 0.0
    done: float = 0.0
    token_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


def send(
    url: str,
    workload: Workload,
    requests: Sequence[Request],
    *,
    rate: float = math.inf,
    limit_s: float,
    with_logprobs: bool = False,
) -> list[Answer]:
    """Send all requests as `workload` says and wait for the answers.

    Args:
        url: of the server.
        workload: streamed or not, and how many at a time.
        requests: what to send.
        rate: requests per second, on average of these; the times of arrival are drawn
            from a Poisson process, the same ones each time. inf: all at once.
        limit_s: seconds for everything.
        with_logprobs: ask for those of the two best tokens.

    Raises:
        LoadError: out of time, or a request failed.
        WrongAnswerError: an answer has not as many tokens as were asked for, or a
            log-prob that is not finite.
    """
    streamed = workload.streamed and not with_logprobs
    # Encoded ahead, so that the client is not what is timed.
    bodies = [_encode(request, streamed, with_logprobs) for request in requests]
    try:
        answers = asyncio.run(
            asyncio.wait_for(
                _send_all(
                    f"{url}/v1/completions",
                    bodies,
                    _arrivals(len(bodies), rate),
                    workload.concurrency or len(bodies),
                    streamed,
                ),
                limit_s,
            )
        )
    except* TimeoutError:
        raise LoadError(f"not answered within {limit_s:.0f} s") from None
    except* (aiohttp.ClientError, OSError, ValueError, LookupError) as group:
        error = group.exceptions[0]
        raise LoadError(f"{type(error).__name__}: {error}"[:500]) from error
    _refuse_wrong(requests, answers, with_logprobs)
    return answers


def _encode(request: Request, streamed: bool, with_logprobs: bool) -> bytes:
    prompt, num_tokens = request
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if with_logprobs:
        body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def _refuse_wrong(
    requests: Sequence[Request], answers: Sequence[Answer], with_logprobs: bool
) -> None:
    for (_, asked), answer in zip(requests, answers, strict=True):
        if len(answer.tokens) != asked:
            raise WrongAnswerError(
                f"{len(answer.tokens)} tokens in an answer, {asked} asked"
            )
        if with_logprobs and len(answer.logprobs) != asked:
            raise WrongAnswerError(
                f"log-probs of {len(answer.logprobs)} tokens, {asked} asked"
            )
        for best in answer.logprobs:
            if len(best) < 2 or not all(_LOGPROB_FLOOR < p <= 0 for p in best):
                raise WrongAnswerError(f"log-probs that are not finite: {best}")


def _arrivals(number: int, rate: float) -> list[float]:
    """Seconds at which requests go out."""
    rng, now, times = random.Random(number), 0.0, []
    for _ in range(number):
        now += rng.expovariate(1.0)
        times.append(now)
    # So few requests would come at another rate, by chance.
    return [time * number / now / rate for time in times]


async def _send_all(
    url: str,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    concurrency: int,
    streamed: bool,
) -> list[Answer]:
    slots = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()

        async def one(body: bytes, arrival: float) -> Answer:
            delay = start + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            async with slots:
                return await _send_one(session, url, body, streamed, start)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(body, arrival))
                for body, arrival in zip(bodies, arrivals, strict=True)
            ]
    return [task.result() for task in tasks]


async def _send_one(
    session: aiohttp.ClientSession, url: str, body: bytes, streamed: bool, start: float
) -> Answer:
    answer = Answer(sent=time.perf_counter() - start)
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            raise aiohttp.ClientError(f"status {response.status}: {text}")
        if streamed:
            await _read_stream(response, answer, start)
        else:
            choice = (await response.json())["choices"][0]
            answer.tokens = choice["token_ids"]
            if logprobs := choice.get("logprobs"):
                answer.logprobs = [
                    sorted(best.values(), reverse=True)
                    for best in logprobs["top_logprobs"]
                ]
    answer.done = time.perf_counter() - start
    return answer


async def _read_stream(
    response: aiohttp.ClientResponse, answer: Answer, start: float
) -> None:
    usage, rest = None, b""
    async for data in response.content.iter_any():
        now = time.perf_counter() - start
        *lines, rest = (rest + data).split(b"\n")
        ids: list[int] = []
        for line in lines:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise aiohttp.ClientError(f"an error in the stream: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
        # Tokens that come together came one after the other in between.
        last = answer.token_times[-1] if answer.token_times and ids else now
        gap = (now - last) / max(1, len(ids))
        answer.token_times += [last + gap * (i + 1) for i in range(len(ids))]
        answer.tokens += ids
    told = usage and usage["completion_tokens"]
    if told != len(answer.tokens):
        raise aiohttp.ClientError(f"{len(answer.tokens)} tokens came, {told} told")


def metrics(
    workload: Workload, requests: Sequence[Request], answers: Sequence[Answer]
) -> dict[str, float]:
    """What a load came to.

    Returns:
        seconds; tokens_per_s, of the tokens that the workload counts;
        output_tokens_per_s; requests_per_s; and of streamed answers, in milliseconds,
        ttft_p50_ms, ttft_p99_ms (from the request to the first token), itl_p50_ms and
        itl_p99_ms (from one token to the next).
    """
    seconds = max(answer.done for answer in answers)
    found = {
        "seconds": seconds,
        "tokens_per_s": workload.num_tokens(list(requests)) / seconds,
        "output_tokens_per_s": sum(n for _, n in requests) / seconds,
        "requests_per_s": len(requests) / seconds,
    }
    if workload.streamed:
        first = [answer.token_times[0] - answer.sent for answer in answers]
        gaps = [
            after - before
            for answer in answers
            for before, after in zip(
                answer.token_times, answer.token_times[1:], strict=False
            )
        ]
        for name, values in (("ttft", first), ("itl", gaps)):
            for percent in (50, 99):
                if values:
                    value = percentile(values, percent)
                    found[f"{name}_p{percent}_ms"] = 1e3 * value
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the neighbouring values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
