# SPDX-License-Identifier: Apache-2.0
"""One server per back end: started, checked, restarted, given up."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serving.backends import BACKENDS
from serving.load import Answer, send
from serving.server import Server, ServerError
from serving.study import Check
from serving.workloads import Request, Workload

# A server that fails that often in a row gets no other chance.
MAX_FAILURES = 3
# Tokens that are compared between back ends: of the prefill, and of decodes after it.
_CHECKED_TOKENS = 4
# Requests that are sent once more, in another context.
_OTHERS = 8


class OutOfTimeError(Exception):
    """The run's time is up before a server was ready; nobody's failure."""


@dataclass(frozen=True)
class Plan:
    """What all servers have in common.

    Attributes:
        model: hub id or folder.
        dummy: whether its weights are random, and it has no tokenizer.
        on_cpu: whether this is vLLM's CPU build.
        longest: tokens of the longest prompt with its answer.
        kv_cache_gib: of each server; 0: vLLM's choice.
        options: further ones of `vllm serve`.
        start_limit_s, part_limit_s: seconds for a start, and for a load.
        together: all servers run side by side, else one at a time.
        deadline: no start is waited for beyond it, by `time.monotonic()`.
    """

    model: str
    dummy: bool
    on_cpu: bool
    longest: int
    kv_cache_gib: float
    options: list[str]
    start_limit_s: float
    part_limit_s: float
    together: bool
    deadline: float = math.inf

    def server_options(self, backend: str) -> list[str]:
        """Of `vllm serve`; the user's come last, so that they win."""
        options = ["--attention-backend", BACKENDS[backend].name, "--seed", "0"]
        options += ["--max-model-len", str(self.longest + 1)]
        # Each round sends the same prompts again.
        options += ["--no-enable-prefix-caching"]
        if self.dummy:
            options += ["--load-format", "dummy", "--skip-tokenizer-init"]
        if self.on_cpu:
            # Ours runs in Triton's interpreter, which pays for every operation.
            options += ["--dtype", "float32", "--enforce-eager"]
            options += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
            options += ["--block-size", "32", "--gpu-memory-utilization", "0.2"]
        elif self.kv_cache_gib:
            # vLLM starts only where that share of the memory is free.
            options += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes"]
            options += [str(int(self.kv_cache_gib * 2**30))]
        return options + self.options

    def environment(self, backend: str) -> dict[str, str]:
        """What a server gets beside our own environment."""
        environment = dict(BACKENDS[backend].environment)
        if self.dummy:
            environment["HF_HUB_OFFLINE"] = "1"
        if self.on_cpu:
            environment |= {
                "TRITON_INTERPRET": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.kv_cache_gib or 1)),
                # Left alone, every engine binds its worker to the same core.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            }
        return environment


@dataclass
class _Member:
    """A back end: its server, if one runs, and what that has seen.

    Attributes:
        warm: workloads that it has run.
        failures: in a row.
        refused: why it gets no turn any more, or "".
    """

    server: Server | None = None
    warm: set[str] = field(default_factory=set)
    failures: int = 0
    refused: str = ""


class Fleet:
    """The servers of a run."""

    def __init__(
        self,
        plan: Plan,
        workloads: dict[str, tuple[Workload, list[Request]]],
        backends: list[str],
        logs: Path,
        started: Callable[[str, float], object],
    ) -> None:
        """Start nothing yet.

        Args:
            plan: what the servers have in common.
            workloads: by name, with their requests.
            backends: names in BACKENDS.
            logs: folder for the servers' output.
            started: called with a back end and the seconds that its server took.
        """
        self._plan, self._workloads, self._logs = plan, workloads, logs
        self._members = {name: _Member() for name in backends}
        self._started = started

    def start(self, backends: list[str]) -> None:
        """Start servers, all at once if they may run together.

        Raises:
            OutOfTimeError: they were not ready by the plan's deadline.
        """
        if self._plan.together:
            for backend in backends:
                self._launch(backend)
            for backend in backends:
                # Not yet a failure: the turn that needs it meets the reason.
                try:
                    self._ready(backend)
                except ServerError:
                    continue

    def _launch(self, backend: str) -> None:
        if not self._plan.together:
            self.stop()
        number = len(list(self._logs.glob(f"{_file_name(backend)}-*.log")))
        self._members[backend].server = Server(
            self._plan.model,
            self._plan.server_options(backend),
            self._plan.environment(backend),
            self._logs / f"{_file_name(backend)}-{number}.log",
        )

    def _ready(self, backend: str) -> Server:
        member = self._members[backend]
        if member.server is None:
            self._launch(backend)
        server = member.server
        assert server is not None
        is_new = not server.ready_at
        left_s = self._plan.deadline - server.began
        try:
            server.wait_ready(min(self._plan.start_limit_s, left_s))
        except ServerError:
            if time.monotonic() > self._plan.deadline and not server.has_ended:
                raise OutOfTimeError(f"{backend} was still starting") from None
            raise
        if server.has_ended:
            raise ServerError(f"the server ended:\n{server.log_tail()}")
        if is_new:
            self._started(backend, server.start_s)
        return server

    def run(self, backend: str, workload: str, rate: float) -> list[Answer]:
        """A back end's turn: a timed load, after an untimed one on a new server.

        Raises:
            ServerError, LoadError: nothing came of it; the server is stopped, and a
                later turn gets another one, but for one that failed too often.
            OutOfTimeError: it was not ready by the plan's deadline.
        """
        self.warm_up(backend, workload)
        return self._guarded(backend, workload, rate)

    def warm_up(self, backend: str, workload: str) -> list[Answer] | None:
        """Run a workload untimed, all at once; None: this server has done so."""
        member = self._members[backend]
        if member.server is not None and workload in member.warm:
            return None
        answers = self._guarded(backend, workload, math.inf)
        member.warm.add(workload)
        return answers

    def check(self, backend: str, workload: str) -> Check:
        """The first tokens of every answer, with log-probs.

        Raises:
            ServerError, LoadError: as for `run`.
        """
        _, requests = self._workloads[workload]
        short = [(prompt, min(n, _CHECKED_TOKENS)) for prompt, n in requests]
        answers = self._guarded(backend, workload, math.inf, short)
        others = [([*prompt[-2::-1], prompt[-1]], 1) for prompt, _ in short[:_OTHERS]]
        in_other_contexts = self._guarded(backend, workload, math.inf, others)
        return Check(
            [answer.tokens for answer in answers],
            [[best[0] - best[1] for best in answer.logprobs] for answer in answers],
            [answer.tokens[0] for answer in in_other_contexts],
        )

    def _guarded(
        self,
        backend: str,
        workload: str,
        rate: float,
        checked: list[Request] | None = None,
    ) -> list[Answer]:
        member = self._members[backend]
        if member.refused:
            raise ServerError(member.refused)
        kind, requests = self._workloads[workload]
        try:
            server = self._ready(backend)
            answers = send(
                server.url,
                kind,
                checked or requests,
                rate=rate,
                limit_s=self._plan.part_limit_s,
                with_logprobs=checked is not None,
            )
        except RuntimeError as error:
            member.failures += 1
            reason = str(error)
            if member.server is not None and member.server.ends_within(1.0):
                reason += f"\nits server ended:\n{member.server.log_tail(12)}"
            if member.failures >= MAX_FAILURES:
                first = reason.splitlines()[0]
                member.refused = f"given up after {MAX_FAILURES} failures: {first}"
            self._drop(member)
            raise type(error)(reason) from error
        member.failures = 0
        return answers

    def refuse(self, backend: str, reason: str) -> None:
        """Give a back end no turn any more."""
        self._members[backend].refused = reason
        self._drop(self._members[backend])

    def _drop(self, member: _Member) -> None:
        if member.server is not None:
            member.server.stop()
        member.server = None
        member.warm.clear()

    def stop(self) -> None:
        """Stop every server."""
        for member in self._members.values():
            self._drop(member)


def _file_name(backend: str) -> str:
    return backend.replace(", ", "_").replace(" ", "_")
