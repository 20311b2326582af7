#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time every candidate config of RMSNorm and the KV-cache write, and their rivals.

    python -P scripts/sweep_memory_kernels.py --json FILE
    python -P scripts/sweep_memory_kernels.py --only fused --tokens 4096 --compile off

Each candidate is first checked on poisoned outputs, then timed as replays of a CUDA
graph whose calls walk through several sets of buffers, in rounds that take all
contestants in turn. Rivals are vLLM's CUDA ops where vLLM is installed, torch.compile's
kernels, and a plain copy of as many bytes. Exit code 1: a candidate is wrong, or did
not compile. --smoke runs tiny cases in Triton's interpreter and times nothing of worth.
"""

import argparse
import collections
import concurrent.futures
import functools
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.kernels import KernelConfig, kv_cache, rms_norm, write_kv_cache
from portable_backend.kernels.reference import rms_norm_reference
from portable_backend.kernels.rms_norm_space import candidate_configs, default_config

DTYPE = torch.bfloat16
EPS = 1e-6
TOKENS = (1, 16, 256, 4096, 16384)
HIDDEN = (576, 2048, 4096, 8192)
# KV heads, head size, block size, layout
KV_SHAPES = (
    (8, 128, 16, "nhd"),
    (8, 128, 64, "nhd"),
    (8, 128, 16, "hnd"),
    (8, 128, 64, "hnd"),
    (1, 128, 16, "nhd"),
    (8, 64, 16, "nhd"),
    (1, 576, 64, "nhd"),
    (3, 80, 16, "hnd"),
)
# Buffers beyond twice an L2 cache, so that no call finds its data there; but no more
# sets than small cases need to be different calls.
ROTATED_BYTES = 192 << 20
MAX_SETS = 8
GRAPH_US = 500.0
SENTINEL = 0.75
Call = Callable[[], object]


@dataclass
class NormInputs:
    """Buffers of one call; the fused form works in place, as vLLM's op does."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None


@dataclass(frozen=True)
class NormCase:
    tokens: int
    hidden: int
    fused: bool

    @property
    def label(self) -> str:
        return f"{'fused' if self.fused else 'norm '} {self.tokens}x{self.hidden}"

    @property
    def bytes_moved(self) -> int:
        passes = 4 if self.fused else 2
        return DTYPE.itemsize * self.hidden * (passes * self.tokens + 1)

    def smallest(self) -> "NormCase":
        """A case that compiles the same kernels."""
        return replace(self, tokens=4)

    def candidates(self, device: DeviceInfo) -> list[KernelConfig]:
        return candidate_configs(
            row_size=self.hidden, num_rows=self.tokens, dtype=DTYPE, device=device
        )

    def default(self, device: DeviceInfo) -> KernelConfig:
        return default_config(
            row_size=self.hidden, num_rows=self.tokens, dtype=DTYPE, device=device
        )

    def inputs(self, device: torch.device, sets: int) -> list[NormInputs]:
        gen = torch.Generator(device).manual_seed(self.tokens + self.hidden)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device=device).to(DTYPE)

        weight = random(self.hidden)
        made = []
        for _ in range(sets):
            x = random(self.tokens, self.hidden)
            residual = torch.randn_like(x) if self.fused else None
            made.append(
                NormInputs(
                    x, weight, x if self.fused else torch.empty_like(x), residual
                )
            )
        return made

    def call(self, at: NormInputs, config: KernelConfig | None) -> None:
        rms_norm(
            at.x,
            at.weight,
            EPS,
            residual=at.residual,
            out=at.out,
            residual_out=at.residual,
            config=config,
        )

    def rivals(self, mode: str) -> dict[str, Callable[[NormInputs], object]]:
        found: dict[str, Callable[[NormInputs], object]] = {}
        ops = _vllm_ops()
        if ops is not None and self.fused:
            found["vllm"] = lambda at: ops.fused_add_rms_norm(
                at.x, at.residual, at.weight, EPS
            )
        elif ops is not None:
            found["vllm"] = lambda at: ops.rms_norm(at.out, at.x, at.weight, EPS)
        if mode != "off":
            found["compile"] = _compiled(mode)
        return found

    def checker(
        self, at: NormInputs
    ) -> Callable[[Callable[[NormInputs], object]], str]:
        """What tells how far a call is off: "" if it is right."""
        x, residual = at.x.clone(), None if at.residual is None else at.residual.clone()
        normed, total = rms_norm_reference(x, at.weight, EPS, residual)
        like = x.float() if total is None else total
        like = like * torch.rsqrt(like.pow(2).mean(-1, keepdim=True) + EPS)
        like = (like.to(DTYPE) * at.weight).float()
        allowed = 2 * (like - normed).abs().max().item()
        allowed += 2 * torch.finfo(DTYPE).eps * normed.abs().max().item()
        del like

        def check(call: Callable[[NormInputs], object]) -> str:
            at.out.fill_(float("nan"))
            at.x.copy_(x)
            if at.residual is not None and residual is not None:
                at.residual.copy_(residual)
            returned = call(at)
            if isinstance(returned, tuple):
                at.out.copy_(returned[0])
                if at.residual is not None:
                    at.residual.copy_(returned[1])
            error = (at.out.float() - normed).abs()
            worst = torch.where(error.isnan(), float("inf"), error).max().item()
            if worst > allowed:
                return f"off by {worst:.3g}, allowed {allowed:.3g}"
            if total is not None and not torch.equal(at.residual, total.to(DTYPE)):
                return "residual is not the rounded sum"
            return ""

        return check


@dataclass
class KvInputs:
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class KvCase:
    tokens: int
    heads: int
    head_size: int
    block_size: int
    layout: str

    @property
    def label(self) -> str:
        shape = f"{self.heads}x{self.head_size}"
        return f"write {self.tokens}x{shape} {self.layout}{self.block_size}"

    @property
    def bytes_moved(self) -> int:
        size = self.heads * self.head_size * DTYPE.itemsize
        return self.tokens * (4 * size + 8)

    @property
    def num_vectors(self) -> int:
        vector = kv_cache.vector_size(self.head_size, DTYPE)
        return self.tokens * self.heads * self.head_size // vector

    def smallest(self) -> "KvCase":
        """A case that compiles the same kernels."""
        return replace(self, tokens=4)

    def candidates(self, device: DeviceInfo) -> list[KernelConfig]:
        return kv_cache.candidate_configs(num_vectors=self.num_vectors, device=device)

    def default(self, device: DeviceInfo) -> KernelConfig:
        return kv_cache.default_config(num_vectors=self.num_vectors, device=device)

    def inputs(self, device: torch.device, sets: int) -> list[KvInputs]:
        """Sets share one pool, each with slots of its own in shuffled blocks."""
        gen = torch.Generator().manual_seed(self.tokens + self.head_size)
        blocks = -(-self.tokens // self.block_size)
        if self.layout == "nhd":
            shape = (sets * blocks + 8, 2, self.block_size, self.heads, self.head_size)
        else:
            shape = (sets * blocks + 8, 2, self.heads, self.block_size, self.head_size)
        pool = torch.full(shape, SENTINEL, dtype=DTYPE, device=device)
        if self.layout == "hnd":
            pool = pool.transpose(2, 3)
        caches = pool.unbind(1)
        order = torch.randperm(shape[0], generator=gen)
        within = torch.arange(self.tokens) % self.block_size
        made = []
        for i in range(sets):
            mine = order[i * blocks : (i + 1) * blocks]
            slots = mine.repeat_interleave(self.block_size)[: self.tokens]
            slots = slots * self.block_size + within
            size = (2, self.tokens, self.heads, self.head_size)
            new = torch.randn(size, device=device).to(DTYPE)
            made.append(KvInputs(new[0], new[1], *caches, slots.to(device)))
        return made

    def call(self, at: KvInputs, config: KernelConfig | None) -> None:
        write_kv_cache(
            at.key, at.value, at.key_cache, at.value_cache, at.slots, config=config
        )

    def rivals(self, mode: str) -> dict[str, Callable[[KvInputs], object]]:
        ops = _vllm_ops()
        if ops is None:
            return {}
        scale = torch.ones(1, device="cuda")
        return {
            "vllm": lambda at: ops.reshape_and_cache_flash(
                at.key,
                at.value,
                at.key_cache,
                at.value_cache,
                at.slots,
                "auto",
                scale,
                scale,
            )
        }

    def checker(self, at: KvInputs) -> Callable[[Callable[[KvInputs], object]], str]:
        """What tells how far a call is off: "" if it is right."""
        slots = at.slots.clone()
        slots[1::7] = -1
        used = slots >= 0
        block, place = slots[used] // self.block_size, slots[used] % self.block_size
        both = (at.key, at.key_cache), (at.value, at.value_cache)

        def check(call: Callable[[KvInputs], object]) -> str:
            for _, cache in both:
                cache.fill_(SENTINEL)
            call(replace(at, slots=slots))
            for new, cache in both:
                if not torch.equal(cache[block, place], new[: len(slots)][used]):
                    return "a token is not in its slot"
                cache[block, place] = SENTINEL
                if not bool((cache == SENTINEL).all()):
                    return "another slot was written"
            return ""

        return check


Case = NormCase | KvCase


@functools.cache
def _vllm_ops() -> Any:
    """vLLM's wrappers of its CUDA ops, or None."""
    if not torch.cuda.is_available():
        return None
    try:
        import vllm._custom_ops as ops
    except Exception as error:  # not installed, or not for this machine
        if not isinstance(error, ImportError):
            print(f"vLLM's ops cannot be used: {error!r}", file=sys.stderr)
        return None
    return ops


def _norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """vLLM's formula, for torch.compile."""
    total = x.float()
    if residual is not None:
        total = total + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    normed = normed.to(weight.dtype) * weight
    return (normed,) if residual is None else (normed, total.to(x.dtype))


@functools.cache
def _compiled(mode: str) -> Callable[[NormInputs], object]:
    """torch.compile's kernel: rows dynamic, as vLLM compiles, or each size its own."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._inductor.config.compile_threads = 1
    compiled = torch.compile(_norm, fullgraph=True)
    # Results are kept a while: each call gets memory of its own, as ours does.
    kept: collections.deque[object] = collections.deque(maxlen=MAX_SETS)

    def call(at: NormInputs) -> object:
        if mode == "dynamic" and at.x.shape[0] > 1:
            torch._dynamo.mark_dynamic(at.x, 0)
            if at.residual is not None:
                torch._dynamo.mark_dynamic(at.residual, 0)
        kept.append(compiled(at.x, at.weight, at.residual))
        return kept[-1]

    return call


def compile_candidate(case: Case, config: KernelConfig | None) -> str:
    """In a worker: one tiny launch fills Triton's cache. The error, or ""."""
    try:
        case.call(case.inputs(torch.device("cuda"), 1)[0], config)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler or a launch raises
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _as_compiled(case: Case, config: KernelConfig) -> tuple[Case, KernelConfig]:
    """What of a candidate decides the binary."""
    params = config.to_dict()
    if "PROGRAMS_PER_UNIT" in params:
        params["PROGRAMS_PER_UNIT"] = int(bool(params["PROGRAMS_PER_UNIT"]))
    return case.smallest(), KernelConfig.from_dict(params)


class Compilations:
    """All binaries of the sweep, compiled by a pool of processes."""

    def __init__(self, cases: list[Case], device: DeviceInfo, workers: int) -> None:
        self.jobs: dict[tuple[Case, KernelConfig], Future[str]] = {}
        self.pool: ProcessPoolExecutor | None = None
        if device.platform == "interpreter" or workers == 0:
            return
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, mp_context=spawn)
        for case in cases:
            for config in case.candidates(device):
                job = _as_compiled(case, config)
                if job not in self.jobs:
                    self.jobs[job] = self.pool.submit(compile_candidate, *job)

    def wait(self, limit_s: float) -> None:
        concurrent.futures.wait(self.jobs.values(), timeout=limit_s)
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def error(self, case: Case, config: KernelConfig) -> str:
        future = self.jobs.get(_as_compiled(case, config))
        if future is None:
            return ""
        if not future.done() or future.cancelled():
            return "not compiled in time"
        try:
            return future.result()
        except Exception as error:  # the worker died
            return f"{type(error).__name__}: {error}"[:300]


@dataclass
class Contestant:
    """A way to do a case, and how long one call took in each round."""

    name: str
    config: dict[str, Any] | None
    calls: list[Call]
    times_us: list[float] = field(default_factory=list)
    error: str = ""
    note: str = ""

    @property
    def time_us(self) -> float:
        return statistics.median(self.times_us) if self.times_us else math.inf


class Copy:
    """A plain copy that moves as many bytes as a case does."""

    def __init__(self, num_bytes: int, sets: int) -> None:
        self.calls: list[Call] = []
        for _ in range(sets):
            source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            self.calls.append(lambda s=source, t=target: t.copy_(s))  # type: ignore[misc]


def num_calls(case: Case, sets: int) -> int:
    """Calls of one graph: about GRAPH_US by a guess, each set equally often."""
    guess_us = 2.5 + case.bytes_moved / 3.8e6
    return sets * max(1, math.ceil(min(GRAPH_US / guess_us, 200) / sets))


def captured(calls: Iterable[Call], stream: torch.cuda.Stream) -> Callable[[], object]:
    """What replays `calls`. torch.cuda.graph() would empty the allocator's cache."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    return graph.replay


def time_contestants(contestants: list[Contestant], calls: int, rounds: int) -> None:
    """Replays in rounds that begin with another contestant each time."""
    graphs: list[tuple[Contestant, Callable[[], object]]] = []
    stream = torch.cuda.Stream()
    for contestant in contestants:
        turns = itertools.islice(itertools.cycle(contestant.calls), calls)
        try:
            graphs.append((contestant, captured(turns, stream)))
        except Exception as error:  # cannot be captured
            contestant.error = f"{type(error).__name__}: {error}"[:300]
    for _, replay in graphs:
        replay()
    for i in range(rounds):
        events = []
        at = i * len(graphs) // rounds
        for contestant, replay in graphs[at:] + graphs[:at]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            events.append((contestant, begin, end))
        torch.cuda.synchronize()
        for contestant, begin, end in events:
            contestant.times_us.append(begin.elapsed_time(end) * 1000 / calls)


def time_on_cpu(contestants: list[Contestant]) -> None:
    """For the smoke run: the interpreter's time of one call."""
    for contestant in contestants:
        begin = time.perf_counter()
        contestant.calls[0]()
        contestant.times_us.append((time.perf_counter() - begin) * 1e6)


def run_case(
    case: Case, compilations: Compilations, args: argparse.Namespace
) -> dict[str, Any]:
    """Check, then time, all contestants of a case: a row of the results."""
    device = torch.device("cpu" if args.smoke else "cuda")
    info = DeviceInfo.detect(device)
    sets = 1
    if not args.smoke:
        sets = min(MAX_SETS, max(2, ROTATED_BYTES // case.bytes_moved))
    inputs = case.inputs(device, sets)
    check = case.checker(inputs[0])
    contestants = []

    def enter(
        name: str,
        call: Callable[[Any], object],
        config: KernelConfig | None = None,
        error: str = "",
    ) -> None:
        params = None if config is None else config.to_dict()
        calls: list[Call] = [lambda at=at: call(at) for at in inputs]  # type: ignore[misc]
        contestant = Contestant(name, params, calls, error=error)
        contestants.append(contestant)
        if error:
            return
        try:
            found = check(call)  # type: ignore[arg-type]
        except Exception as failure:  # whatever a launch raises
            contestant.error = f"{type(failure).__name__}: {failure}"[:300]
            return
        if config is None:
            contestant.note = found  # a rival that rounds otherwise is timed as well
        else:
            contestant.error = found

    # As it is called without a config.
    enter("default", lambda at: case.call(at, None), case.default(info))
    for config in case.candidates(info):
        error = compilations.error(case, config)
        enter("candidate", lambda at, c=config: case.call(at, c), config, error)
    for name, call in case.rivals("off" if args.smoke else args.compile).items():
        enter(name, call)
    if args.smoke:
        time_on_cpu([c for c in contestants if not c.error])
    else:
        copy = Contestant("copy", None, Copy(case.bytes_moved, sets).calls)
        contestants.append(copy)
        running = [c for c in contestants if not c.error]
        time_contestants(running, num_calls(case, sets), args.rounds)
    return summary(case, contestants, sets)


def summary(case: Case, contestants: list[Contestant], sets: int) -> dict[str, Any]:
    times = {
        c.name: c.time_us for c in contestants if c.name != "candidate" and c.times_us
    }
    ours = [c for c in contestants if c.name in ("default", "candidate")]
    best = min(ours, key=lambda c: c.time_us)
    return {
        "case": case.label.strip(),
        "bytes": case.bytes_moved,
        "buffer_sets": sets,
        "best": best.config,
        "best_us": best.time_us if best.times_us else None,
        "best_gbps": case.bytes_moved / best.time_us / 1e3,
        "times_us": times,
        "contestants": [
            {
                "name": c.name,
                "config": c.config,
                "time_us": c.time_us if c.times_us else None,
                "rounds_us": [round(t, 3) for t in c.times_us],
                "error": c.error or None,
                "note": c.note or None,
            }
            for c in sorted(contestants, key=lambda c: c.time_us)
        ],
        "wrong": [f"{c.config}: {c.error}" for c in ours if c.error],
    }


def short(config: dict[str, Any] | None) -> str:
    """W8 R1 P4 E: warps, rows or vectors, programs per unit, evict first."""
    if config is None:
        return "?"
    parts = [f"W{config['num_warps']}"]
    parts += [f"R{config['ROWS']}"] if "ROWS" in config else []
    parts += [f"V{config['VECTORS']}"] if "VECTORS" in config else []
    programs = config.get("PROGRAMS_PER_UNIT")
    parts += [f"P{programs}"] if programs else []
    parts += ["E"] if config.get("EVICT_FIRST") else []
    return " ".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case, times in microseconds; * marks a loss of more than 3 %."""
    widths = (26, 14, 8, 9, 8, 8, 8, 7, 5)
    header = (
        "case",
        "best",
        "us",
        "default",
        "vllm",
        "compile",
        "copy",
        "GB/s",
        "roof",
    )
    lines = [header]
    for row in rows:
        times = row["times_us"]
        rival = min(times.get(n, math.inf) for n in ("vllm", "compile"))
        best_us = row["best_us"] or math.inf

        def shown(name: str, times: dict[str, float] = times) -> str:
            time_us = times.get(name, math.inf)
            return f"{time_us:.2f}" if math.isfinite(time_us) else "-"

        lost = "*" if times.get("default", math.inf) > 1.03 * rival else ""
        best_lost = "*" if best_us > 1.03 * rival else ""
        roof = times.get("copy", math.nan) / best_us
        lines.append(
            (
                row["case"],
                short(row["best"]),
                f"{best_us:.2f}{best_lost}",
                shown("default") + lost,
                shown("vllm"),
                shown("compile"),
                shown("copy"),
                f"{row['best_gbps']:.0f}",
                f"{roof:.0%}" if math.isfinite(roof) else "-",
            )
        )
    return "\n".join(
        " ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    tokens = args.tokens or ((1, 5) if args.smoke else TOKENS)
    hidden = args.hidden or ((576,) if args.smoke else HIDDEN)
    shapes = KV_SHAPES[-1:] if args.smoke else KV_SHAPES
    found: list[Case] = []
    for name in args.only:
        if name == "write":
            found += [KvCase(n, *shape) for shape in shapes for n in tokens]
        else:
            found += [NormCase(n, h, name == "fused") for h in hidden for n in tokens]
    return found


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def sweep(
    cases: list[Case], compilations: Compilations, args: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    begin = time.perf_counter()
    if not args.smoke:
        # The rivals compile in this process, beside the pool.
        # Most tokens first: what is compiled then serves the others.
        for case in sorted(cases, key=lambda c: c.tokens, reverse=True):
            call = case.rivals(args.compile).get("compile")
            try:
                if call is not None:
                    call(case.inputs(torch.device("cuda"), 1)[0])  # type: ignore[arg-type]
            except Exception as error:  # whatever a compiler raises
                print(f"without torch.compile: {error!r}"[:500], file=sys.stderr)
                args.compile = "off"
        compilations.wait(args.budget_s - (time.perf_counter() - begin))
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        print(f"compiled {len(compilations.jobs)}, {spent:.0f} s", file=sys.stderr)
    for i, case in enumerate(cases):
        if time.perf_counter() - begin > args.budget_s:
            print(f"out of time: {len(cases) - i} cases left out", file=sys.stderr)
            return
        row = run_case(case, compilations, args)
        print(f"{row['case']}: {row['best_us'] or math.inf:.2f} us", file=sys.stderr)
        yield row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("norm", "fused", "write")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--hidden", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument(
        "--compile", choices=("dynamic", "static", "off"), default="dynamic"
    )
    parser.add_argument("--budget-s", type=float, default=90)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny, in the interpreter")
    args = parser.parse_args(argv)
    if args.smoke and not interpreting():
        parser.error("--smoke needs TRITON_INTERPRET=1")
    cases = cases_of(args)
    if not args.smoke and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --smoke tries it without one")
    device = DeviceInfo.detect("cpu" if args.smoke else "cuda")
    compilations = Compilations(cases, device, args.workers)
    rows = []
    for row in sweep(cases, compilations, args):
        rows.append(row)
        if args.json:
            result = {"versions": versions(), "rows": rows}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [f"{row['case']} {text}" for row in rows for text in row["wrong"]]
    for text in wrong:
        print("WRONG", text)
    print(table(rows))
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
