# SPDX-License-Identifier: Apache-2.0
"""Worker processes that compile candidates into Triton's cache.

A candidate that aborts the compiler, hangs or takes too much memory costs its worker,
which is replaced, and gets one line that says so. Workers never touch the GPU.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.activity import Activity
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.resources import Readout, over_limit
from portable_backend.warmup.toolchain import child_environment

WORKER = (sys.executable, "-P", "-m", "portable_backend.warmup.compile_worker")
_START_LIMIT_S = 120.0  # imports torch, perhaps from a cold disk
_LOOK_S = 0.1  # between looks at a worker's memory
# A compiler keeps some 3 MB of each kernel: after so many a worker is replaced.
_MAX_COMPILED = 200
# Whoever hides the GPUs from a worker is sure that it takes none of their memory.
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Compiled:
    """What became of a candidate.

    Attributes:
        key, config: the candidate.
        readout: what its kernel takes; None where it did not compile, and in the
            interpreter, for which nothing is compiled.
        failure: why it cannot be launched, in one line; None: it can.
        others: by kernel, what the other binaries take that measuring it launches;
            empty unless the pool was asked for them.
    """

    key: TuningKey
    config: KernelConfig
    readout: Readout | None
    failure: str | None
    others: tuple[tuple[str, Readout], ...] = ()


@dataclass(eq=False)
class _Job:
    """A binary to compile; candidates that need the same one share it."""

    key: TuningKey
    config: KernelConfig
    readout: Readout | None = None
    failure: str | None = None
    others: tuple[tuple[str, Readout], ...] = ()
    done: bool = False


def binary_of(key: TuningKey, config: KernelConfig) -> Hashable:
    """What (key, config) pairs that compile the same binaries have in common."""
    fields: dict[str, Any] = key.to_dict()
    parameters: dict[str, Any] = config.to_dict()
    # Sizes of grids: of these the code only knows whether they are 0.
    for name in ("CTAS_PER_UNIT", "PROGRAMS_PER_UNIT"):
        if name in parameters:
            parameters[name] = bool(parameters[name])
    # Rows of a decode tile follow the length of the queries.
    query_len = fields["query_len"] if key.kernel == "decode" else None
    sizes = (query_len, *_far_reaching(key.kernel, fields))
    return key.kernel, key.structure, sizes, *sorted(parameters.items())


def _far_reaching(kernel: str, fields: dict[str, Any]) -> list[bool]:
    """Which tensors are too large for 32-bit offsets: AMD's compiler is told."""
    size = DTYPES[fields["dtype"]].itemsize
    if kernel == "rms_norm":
        numbers = [fields["num_rows"] * fields["row_size"]]
    elif kernel == "kv_cache":
        new = fields["num_tokens"] * fields["num_kv_heads"] * fields["head_size"]
        numbers = [new, 2 * new]
    else:
        per_token = fields["num_kv_heads"] * fields["head_size"]
        tokens = fields["num_seqs"] * fields["query_len"]
        seq_len = fields.get("seq_len") or fields["context_len"] + fields["query_len"]
        blocks = fields["num_seqs"] * -(-seq_len // fields["block_size"])
        numbers = [
            tokens * per_token,
            tokens * per_token * fields["num_queries_per_kv"],
            2 * blocks * fields["block_size"] * per_token,
        ]
    return [number * size >= 1 << 31 for number in numbers]


class CompilePool:
    """Compiles in the background, in the order in which candidates are submitted.

    What is waited for goes before what was only submitted.

    Args:
        device: what to compile for; need not be at hand.
        workers: processes.
        limit_s: for one candidate.
        memory_mib: of one worker and the tools it starts; None: any.
        command: starts a worker; replaced in tests.
        activity: of an engine: workers are stopped while that is busy.
        parts: read out all binaries of a candidate, its plan's and merge's too.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        device: DeviceInfo,
        *,
        workers: int,
        limit_s: float = 60.0,
        memory_mib: int | None = None,
        command: Sequence[str] = WORKER,
        activity: Activity | None = None,
        parts: bool = False,
    ) -> None:
        for name, value in (("workers", workers), ("limit_s", limit_s)):
            if not value > 0:
                raise bad_argument(name, "positive", value, "pass a larger number")
        if memory_mib is not None and memory_mib <= 0:
            raise bad_argument("memory_mib", "None or positive", memory_mib, "omit it")
        self._device = device
        self._limit_s, self._memory_mib = limit_s, memory_mib
        self._command = tuple(command)
        self._jobs: dict[Hashable, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[CompileWorker] = []
        self._threads: list[threading.Thread] = []
        if device.platform == "interpreter":
            return
        for _ in range(workers):
            worker = CompileWorker(
                self._command, device, limit_s, memory_mib, activity, parts=parts
            )
            # The thread lives as long as the pool: workers end with it.
            thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
            self._workers.append(worker)
            self._threads.append(thread)
            thread.start()

    def submit(self, key: TuningKey, configs: Iterable[KernelConfig]) -> None:
        """Queue candidates; returns at once. Those known already are not repeated.

        Raises:
            ValueError: the key is no kernel's.
            RuntimeError: the pool is closed.
        """
        spec_of(key)
        with self._changed:
            if self._closed:
                raise RuntimeError("the compile pool is closed; make another one")
            for config in configs:
                self._queue(key, config)
            self._changed.notify_all()

    def wait(
        self,
        key: TuningKey,
        configs: Sequence[KernelConfig],
        until: float | None = None,
    ) -> Iterator[Compiled]:
        """Yield what became of each candidate, in order, as soon as it is known.

        Those not submitted before are submitted now. With `until`, by time.monotonic(),
        it ends then, whatever is known.

        Raises:
            ValueError: the key is no kernel's.
            RuntimeError: the pool is closed before all are known.
        """
        self.submit(key, configs)
        self._hurry(key, configs)
        for config in configs:
            with self._changed:
                job = self._jobs[binary_of(key, config)]
                while not job.done:
                    if self._closed:
                        raise RuntimeError("the compile pool was closed meanwhile")
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        return
                    self._changed.wait(left)
            yield Compiled(key, config, job.readout, job.failure, job.others)

    def ready(
        self, key: TuningKey, configs: Iterable[KernelConfig]
    ) -> list[KernelConfig]:
        """Those of the candidates that are compiled by now, and can be launched."""
        with self._changed:
            jobs = [(c, self._jobs.get(binary_of(key, c))) for c in configs]
            return [c for c, job in jobs if job and job.done and job.failure is None]

    def retarget(self, device: DeviceInfo) -> None:
        """Compile for another device from now on, with the same processes.

        Raises:
            RuntimeError: something is still to be compiled.
        """
        with self._changed:
            if not all(job.done for job in self._jobs.values()):
                raise RuntimeError("wait for what was submitted before you retarget")
            self._device = device
            self._jobs.clear()
        for worker in self._workers:
            worker.device = device

    def close(self) -> None:
        """End all workers; what is not compiled by now never will be."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _queue(self, key: TuningKey, config: KernelConfig) -> None:
        binary = binary_of(key, config)
        if binary in self._jobs:
            return
        job = self._jobs[binary] = _Job(key, config)
        if self._device.platform == "interpreter":
            job.done = True
        else:
            self._waiting.append(job)

    def _hurry(self, key: TuningKey, configs: Iterable[KernelConfig]) -> None:
        with self._changed:
            wanted = [self._jobs[binary_of(key, config)] for config in configs]
            first = [job for job in dict.fromkeys(wanted) if job in self._waiting]
            rest = [job for job in self._waiting if job not in first]
            self._waiting = deque([*first, *rest])

    def _serve(self, worker: "CompileWorker") -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    job = self._waiting.popleft()
                readout, failure, others = worker.compile(job.key, job.config)
                if readout is not None:
                    failure = over_limit(readout, self._device)
                with self._changed:
                    job.readout, job.failure, job.others = readout, failure, others
                    job.done = True
                    self._changed.notify_all()
        finally:
            worker.kill()


@dataclass(eq=False)
class CompileWorker:
    """One process at a time; another one after each that had to be killed.

    Attributes:
        environment: of the processes; None: this one's, as it is when one is started.
        parts: `compile` reads out all binaries of a candidate.
    """

    command: Sequence[str]
    device: DeviceInfo
    limit_s: float
    memory_mib: int | None
    activity: Activity | None = None
    environment: Mapping[str, str] | None = None
    parts: bool = False
    _process: subprocess.Popen[str] | None = None
    _lines: "queue.Queue[str | None]" = field(default_factory=queue.Queue)
    _errors: Any = None
    _compiled: int = 0  # by this process
    _told: DeviceInfo | None = None  # what it compiles for
    _killed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(
        self, key: TuningKey, config: KernelConfig
    ) -> tuple[Readout | None, str | None, tuple[tuple[str, Readout], ...]]:
        """(read-out, None, others' read-outs) or (None, why not, none)."""
        request = {
            "kernel": key.kernel,
            "fields": key.to_dict(),
            "config": config.to_dict(),
            "parts": self.parts,
        }
        answer, failure = self.answer_to(request)
        if answer is None:
            return None, failure, ()
        if "readout" not in answer:
            return None, str(answer.get("failure")), ()
        others = [(name, Readout(**held)) for name, held in answer.get("others", ())]
        return Readout(**answer["readout"]), None, tuple(others)

    def answer_to(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """(the answer to one request, "") or (None, why there is none)."""
        if self._process is not None and self._compiled >= _MAX_COMPILED:
            self._end()
        if self._process is None:
            failure = self._start()
            if failure is not None:
                return None, f"no worker: {failure}"
        if self._told != self.device:
            ready, failure = self._ask({"device": asdict(self.device)}, self.limit_s)
            if ready is None:
                return None, failure or ""
            self._told = self.device
        answer, failure = self._ask(request, self.limit_s)
        self._compiled += 1
        return answer, failure or ""

    def _start(self) -> str | None:
        """Start a process; why it did not come up, or None."""
        environment = dict(self.environment or child_environment(self.device))
        environment |= dict.fromkeys(_HIDDEN, "") | {"OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
        with self._lock:
            if self._killed:
                return "the pool is closed"
            try:
                self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # see _end
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    env=environment,
                    # Ctrl-C is the parent's; its tools are killed with it.
                    start_new_session=True,
                )
            except OSError as error:
                return str(error)
        self._lines, self._compiled, self._told = queue.Queue(), 0, self.device
        pump = threading.Thread(
            target=_pump, args=(self._process.stdout, self._lines), daemon=True
        )
        pump.start()
        _, failure = self._ask(asdict(self.device), _START_LIMIT_S)
        return failure

    def _ask(
        self, request: dict[str, Any], limit_s: float
    ) -> tuple[dict[str, Any] | None, str | None]:
        """(answer, None), or (None, why there is none); the process is gone then."""
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                deadline += self._pause()
                reason = self._over_memory()
                if reason is None and time.monotonic() >= deadline:
                    reason = f"no answer within {limit_s:g} s"
                if reason is None:
                    continue
                self._end()
                return None, reason
            if line is None:
                return None, self._end()
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                self._end()
                return None, f"an answer that is no JSON object: {line[:80]!r}"
            return answer, None

    def _pause(self) -> float:
        """Stop the process while the engine is busy; for how many seconds."""
        process, activity = self._process, self.activity
        if process is None or activity is None or not activity.idle_in():
            return 0.0
        began = time.monotonic()
        _signal_group(process, signal.SIGSTOP)
        while activity.idle_in() > 0 and not self._killed:
            time.sleep(_LOOK_S)
        _signal_group(process, signal.SIGCONT)
        return time.monotonic() - began

    def _over_memory(self) -> str | None:
        if self.memory_mib is None or self._process is None:
            return None
        used = resident_mib(self._process.pid)
        if used <= self.memory_mib:
            return None
        return f"took {used} MiB of memory, the limit is {self.memory_mib}"

    def _end(self) -> str:
        """Kill the process; how it had ended on its own, if it had."""
        with self._lock:
            process = self._process
            assert process is not None
            _kill_group(process)
            code = process.wait()
            self._process = None
        self._errors.seek(0)
        tail = self._errors.read()[-2000:].strip().splitlines()[-1:]
        self._errors.close()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        how = (
            f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        )
        return ": ".join(["the compiler ended with " + how, *tail])

    def kill(self) -> None:
        """End the process for good, from any thread."""
        with self._lock:
            self._killed = True
            process = self._process
            if process is not None:
                _kill_group(process)
                process.wait()


def _kill_group(process: subprocess.Popen[str]) -> None:
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    # Also when it has ended itself: tools that it started may go on. Once it is waited
    # for, its number may be somebody else's.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _pump(stream: Any, lines: "queue.Queue[str | None]") -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(None)


def resident_mib(pid: int) -> int:
    """Memory of a process and those it started, in MiB; 0 where nobody tells."""
    total, pending = 0, [pid]
    page = os.sysconf("SC_PAGE_SIZE")
    while pending:
        folder = Path(f"/proc/{pending.pop()}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((folder / "statm").read_text().split()[1]) * page
            for task in (folder / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
    return total >> 20
