# SPDX-License-Identifier: Apache-2.0
"""What engines and servers are given to do."""

import random
from dataclasses import dataclass, field

Request = tuple[list[int], int]  # token ids of the prompt, tokens of the answer


@dataclass(frozen=True)
class Workload:
    """Requests, given together unless told otherwise.

    Attributes:
        count: requests.
        prompt: tokens of each prompt, or the least and most.
        output: tokens of each answer, or the least and most.
        counted: "all" tokens, or those of the "output".
        streamed: answers come token by token, and latencies count.
        at_rates: requests arrive at a rate.
        concurrency: requests under way at a time; None: no limit.
    """

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    counted: str = "all"
    # Not in repr(), from which requests() draws: equal lengths give equal requests.
    streamed: bool = field(default=False, repr=False)
    at_rates: bool = field(default=False, repr=False)
    concurrency: int | None = field(default=None, repr=False)

    def described(self) -> tuple[str, str, str, str]:
        """Requests, tokens of prompts and of answers, and how they are sent."""
        how = "all at once"
        if self.at_rates:
            how = "at random moments, at each rate; inf: all at once"
        elif self.concurrency:
            how = f"{self.concurrency} at a time"
        return str(self.count), _span(self.prompt), _span(self.output), how

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.prompt[1] + self.output[1]

    def requests(self, vocab_size: int) -> list[Request]:
        """(prompt, output length), the same in every engine."""
        rng = random.Random(str(self))
        return [
            (
                [
                    rng.randrange(2, vocab_size)
                    for _ in range(rng.randint(*self.prompt))
                ],
                rng.randint(*self.output),
            )
            for _ in range(self.count)
        ]

    def num_tokens(self, requests: list[Request]) -> int:
        """Those that count for the throughput."""
        tokens = sum(n for _, n in requests)
        if self.counted == "all":
            tokens += sum(len(prompt) for prompt, _ in requests)
        return tokens


def _span(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return str(least) if least == most else f"{least} to {most}"


WORKLOADS = {
    "prefill": Workload(4, (32768, 32768), (1, 1)),
    "batch": Workload(256, (1024, 1024), (128, 128)),
    "long": Workload(1, (32768, 32768), (128, 128), "output"),
    "mixed": Workload(64, (16, 8192), (16, 256)),
}
TINY = {
    "prefill": Workload(2, (64, 64), (1, 1)),
    "batch": Workload(3, (16, 16), (3, 3)),
    "long": Workload(1, (80, 80), (3, 3), "output"),
    "mixed": Workload(3, (1, 40), (1, 4)),
}
# Of servers, beside the above: one request at a time, and requests that arrive by
# chance, at rates up to more than a server can answer.
SERVED = {
    "single": Workload(8, (2048, 2048), (128, 128), streamed=True, concurrency=1),
    "chat": Workload(192, (32, 4096), (16, 256), streamed=True, at_rates=True),
}
TINY_SERVED = {
    "single": Workload(2, (24, 24), (4, 4), streamed=True, concurrency=1),
    "chat": Workload(4, (1, 40), (2, 4), streamed=True, at_rates=True),
}
