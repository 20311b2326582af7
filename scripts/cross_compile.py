#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for GPUs that are not at hand, and check what they may use.

    python -P scripts/cross_compile.py                     # all targets
    python -P scripts/cross_compile.py --targets sm90 gfx942 --shapes all --json FILE
    python -P scripts/cross_compile.py --draw 10           # configs from the spaces

The public functions are called on tensors without storage while launches are recorded
instead of run, so each kernel is compiled with the arguments it is launched with. One
child process per target compiles, within a time limit: a compiler that aborts or hangs
fails its kernel, not the run. Exit code 1: something did not compile, or would not fit
its target.
"""

import argparse
import json
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving.options import count

from portable_backend import kernels
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels import (
    AttentionOptions,
    PagedBatch,
    paged_attention,
    rms_norm,
    write_kv_cache,
)
from portable_backend.kernels.attention_space import (
    AttentionProblem,
    decode_configs,
    merge_configs,
    prefill_configs,
)
from portable_backend.kernels.config import AttentionConfig
from portable_backend.kernels.plan import default_config
from portable_backend.warmup import resources
from portable_backend.warmup.compilation import (
    KernelLaunch,
    compile_launch,
    distinct,
    in_graph,
    new_tensor,
    recording,
)

TARGETS = (
    "sm80",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
)


@dataclass(frozen=True)
class Shape:
    """Model geometry that kernels are compiled for."""

    name: str
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    features: bool = False  # window, softcap, ALiBi and sinks, all at once
    hidden_size: int = 4096
    every_step: bool = True  # or two steps that launch every kernel


# (decodes, prefills, whether anything is cached): a step of each kind that gets a
# default config of its own somewhere.
STEPS = (
    (1, 0, True),
    (32, 0, True),
    (256, 0, True),
    (0, 2, True),
    (0, 2, False),
    (4, 2, True),
    (4, 2, False),
)
TWO_STEPS = ((1, 0, True), (4, 2, True))
SPACES = {
    "prefill": prefill_configs,
    "decode": decode_configs,
    "merge": merge_configs,
}
LLAMA = Shape("d128 page16")
BRIEF = replace(LLAMA, every_step=False)
SHAPES = {
    "two": (LLAMA, replace(BRIEF, name="d256", heads=(16, 8), head_size=256)),
}
SHAPES["few"] = (
    *SHAPES["two"],
    replace(LLAMA, name="d128 page64", block_size=64),
    replace(BRIEF, name="d64 fp32", head_size=64, dtype=torch.float32),
)
SHAPES["all"] = (
    *SHAPES["few"],
    replace(LLAMA, name="d256 all steps", heads=(16, 8), head_size=256),
    replace(LLAMA, name="d128 features", features=True),
    replace(LLAMA, name="d256 page64", heads=(16, 8), head_size=256, block_size=64),
    replace(LLAMA, name="d64 fp16 9:3", heads=(9, 3), head_size=64, hidden_size=576),
    replace(LLAMA, name="d80 page64", head_size=80, block_size=64, hidden_size=5120),
    replace(LLAMA, name="d128 48:1", heads=(48, 1)),
    replace(LLAMA, name="d128 fp32", dtype=torch.float32),
    replace(LLAMA, name="d256 fp32", head_size=256, dtype=torch.float32),
)


def call_everything(shape: Shape, draw: int = 0) -> None:
    """Call each public function, on tensors of `shape` without storage.

    Args:
        shape: model geometry.
        draw: configs of each attention kernel to take from its space, too.
    """
    num_tokens = 2048
    # More than 2 GB, as caches are: AMD's compiler then assumes no shorter reach.
    num_blocks = 1 << 20
    num_heads, num_kv_heads = shape.heads

    def new(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return new_tensor(*size, dtype=dtype)

    pairs = new(num_blocks, 2, shape.block_size, num_kv_heads, shape.head_size)
    key_cache, value_cache = pairs.unbind(1)
    options = AttentionOptions(scale=shape.head_size**-0.5)
    if shape.features:
        options = replace(
            options,
            sliding_window=1024,
            softcap=30.0,
            alibi_slopes=new(num_heads, dtype=torch.float32),
            sinks=new(num_heads),
        )

    def attend(
        num_decodes: int,
        num_prefills: int,
        cached: bool,
        config: AttentionConfig | None = None,
    ) -> None:
        query_lens = [1] * num_decodes + [1000] * num_prefills
        num_seqs = len(query_lens)
        batch = PagedBatch(
            query_start_loc=new(num_seqs + 1, dtype=torch.int32),
            seq_lens=new(num_seqs, dtype=torch.int32),
            block_table=new(num_seqs, 64, dtype=torch.int32),
            max_query_len=max(query_lens),
            max_seq_len=num_tokens,
            query_start_loc_cpu=torch.tensor([0, *query_lens]).cumsum(0).int(),
            no_context=not cached,
        )
        query = new(sum(query_lens), num_heads, shape.head_size)
        key = new(sum(query_lens), num_kv_heads, shape.head_size)
        for captured in (False, True):
            with in_graph(captured):
                paged_attention(
                    query, key_cache, value_cache, batch, options,
                    out=torch.empty_like(query), key=key, value=key, config=config,
                )  # fmt: skip

    for step in STEPS if shape.every_step else TWO_STEPS:
        attend(*step)
    for config in draw_configs(shape, draw):
        attend(4, 2, config.prefill["LOAD"] != "new", config)
    # The other sizes compile what short and long calls use by default.
    for n in (num_tokens, 16, 8192) if shape == LLAMA else (num_tokens,):
        key = new(n, num_kv_heads, shape.head_size)
        slots = new(n, dtype=torch.int64)
        write_kv_cache(key, key, key_cache, value_cache, slots)
        x, weight = new(n, shape.hidden_size), new(shape.hidden_size)
        rms_norm(x, weight, 1e-6)
        rms_norm(x, weight, 1e-6, residual=torch.empty_like(x))
        query = new(n, num_heads, shape.head_size)
        rms_norm(query, new(shape.head_size), 1e-6)  # q-norm


def draw_configs(shape: Shape, count: int) -> Iterator[AttentionConfig]:
    """`count` configs for each kernel, others at their defaults; always the same."""
    info = DeviceInfo.detect(torch.device("meta"))
    geometry: dict[str, Any] = {
        "num_queries_per_kv": shape.heads[0] // shape.heads[1],
        "head_size": shape.head_size,
        "block_size": shape.block_size,
        "device": info,
    }
    base = default_config(dtype=shape.dtype, **geometry)
    problem = AttentionProblem(element_size=shape.dtype.itemsize, **geometry)
    for name, space_of in SPACES.items():
        space = list(space_of(problem))
        picked = random.Random(f"{info.arch} {shape.name}").sample(
            space, min(count, len(space))
        )
        for config in picked:
            yield replace(base, **{name: config})


def launched_kernels(arch: str, shape: Shape, draw: int) -> list[KernelLaunch]:
    """Each launch that `shape` needs on `arch`."""
    with recording(DeviceInfo.for_arch(arch)) as launches:
        call_everything(shape, draw)
    return launches


def all_kernels() -> set[str]:
    """Names of the kernels that the package's source defines."""
    pattern = re.compile(r"^def (_\w+_kernel)\(", re.M)
    sources = Path(kernels.__file__).parent.glob("*.py")
    return {name for path in sources for name in pattern.findall(path.read_text())}


def jobs_for(
    arch: str, shapes: tuple[Shape, ...], draw: int
) -> list[tuple[str, KernelLaunch]]:
    """Distinct compilations of a target: shape and launch."""
    names: dict[KernelLaunch, str] = {}
    for shape in shapes:
        names |= dict.fromkeys(launched_kernels(arch, shape, draw), shape.name)
    info = DeviceInfo.for_arch(arch)
    return [(names[launch], launch) for launch in distinct(names, info)]


def compile_job(arch: str, shape: str, launch: KernelLaunch) -> dict[str, Any]:
    """Compile and read what the binary uses."""
    readout = compile_launch(launch, DeviceInfo.for_arch(arch))
    parameters = {p.name for p in launch.function.params}
    return {
        "arch": arch,
        "kernel": launch.kernel,
        "shape": shape,
        "options": {k: v for k, v in launch.kwargs.items() if k not in parameters},
        "shared_bytes": readout.shared_bytes,
        "num_warps": readout.num_warps,
        "tmem_columns": readout.tensor_columns,
        "compile_s": round(readout.seconds, 2),
        "registers": readout.registers,
        "spills": readout.spills,
    }


def over_limit(row: dict[str, Any]) -> str | None:
    """Why the kernel could not be launched on its target, or None."""
    readout = resources.Readout(
        shared_bytes=row["shared_bytes"],
        registers=row.get("registers"),
        spills=row.get("spills"),
        programs_per_unit=None,
        seconds=0,
        num_warps=row["num_warps"],
        tensor_columns=row["tmem_columns"],
    )
    return resources.over_limit(readout, DeviceInfo.for_arch(row["arch"]))


def work(arch: str, shapes: tuple[Shape, ...], draw: int, skip: int) -> None:
    """Child process: compile the jobs from number `skip` on, one JSON line each."""
    for shape, launch in jobs_for(arch, shapes, draw)[skip:]:
        label = {"kernel": launch.kernel, "shape": shape}
        print(json.dumps({"starts": label}), flush=True)
        try:
            row = compile_job(arch, shape, launch)
        except Exception as error:  # whatever a compiler raises
            row = {"arch": arch, "error": f"{type(error).__name__}: {error}"[:500]}
            row |= label
        print(json.dumps(row), flush=True)


def compile_target(
    arch: str, shapes: str, limit_s: float, draw: int = 0
) -> Iterator[dict[str, Any]]:
    """Run children until each job has a row; an abort or a hang is a row too."""
    done = 0
    while True:
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__]
        command += ["--child", arch, "--skip", str(done), "--shapes", shapes]
        command += ["--draw", str(draw)]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        pump = threading.Thread(target=_pump, args=(child, lines), daemon=True)
        pump.start()
        running: dict[str, str] | None = {"kernel": "?", "shape": "?"}
        reason = None
        while True:
            try:
                line = lines.get(timeout=limit_s)
            except queue.Empty:
                reason = f"no answer within {limit_s:.0f} s"
                child.kill()
                break
            if line is None:
                break
            row = json.loads(line)
            if "starts" in row:
                running = row["starts"]
                continue
            running = None
            done += 1
            yield row
        _, errors = child.communicate()
        if child.returncode == 0 and reason is None:
            return
        tail = errors.strip().splitlines()[-1:] or [""]
        reason = reason or f"exit code {child.returncode}: {tail[0]}"
        yield {"arch": arch, "error": reason} | (running or {"kernel": "?"})
        if running is None or running["kernel"] == "?":
            return  # it never got to a kernel, and would not the next time
        done += 1


def _pump(child: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def compile_all(
    targets: list[str], shapes: str, limit_s: float, num_workers: int, draw: int = 0
) -> list[dict[str, Any]]:
    """Rows of all targets, `num_workers` targets at a time."""
    rows: list[dict[str, Any]] = []
    waiting = list(reversed(targets))

    def worker() -> None:
        while True:
            try:
                arch = waiting.pop()
            except IndexError:
                return
            for row in compile_target(arch, shapes, limit_s, draw):
                if "error" not in row and (reason := over_limit(row)):
                    row["error"] = reason
                rows.append(row)

    threads = [threading.Thread(target=worker) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(rows, key=lambda row: targets.index(row["arch"]))


def table(rows: list[dict[str, Any]]) -> str:
    header = ("target", "kernel", "shape", "shared", "regs", "spills", "warps", "s")
    lines = [header]
    for row in rows:
        cells = [row["arch"], row["kernel"], row.get("shape", "")]
        if "error" in row:
            lines.append((*cells, f"FAILED: {row['error']}"))
            continue
        names = ("shared_bytes", "registers", "spills", "num_warps", "compile_s")
        lines.append((*cells, *(str(row[name]) for name in names)))
    widths = (8, 14, 14, 8, 5, 7, 6, 5)
    return "\n".join(
        " ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip()
        for line in lines
    )


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), metavar="ARCH")
    parser.add_argument("--shapes", choices=list(SHAPES), default="few")
    parser.add_argument(
        "--draw",
        type=_number,
        default=0,
        metavar="N",
        help="also N configs of each attention kernel, drawn from its space",
    )
    parser.add_argument("--limit-s", type=float, default=60, help="for one kernel")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work(args.child, SHAPES[args.shapes], args.draw, args.skip)
        return 0
    targets = [target.replace("sm_", "sm") for target in args.targets]
    known = [arch for arch in ARCH_LIMITS if arch != "interpreter"]
    for target in targets:
        if target not in known:
            parser.error(f"--targets: no {target}; known: {', '.join(known)}")
    if args.json and not args.json.absolute().parent.is_dir():
        folder = args.json.absolute().parent
        parser.error(f"--json: {folder} is no folder; make it first")
    start = time.perf_counter()
    rows = compile_all(targets, args.shapes, args.limit_s, args.workers, args.draw)
    missing = {
        (target, name)
        for target in targets
        for name in all_kernels()
        if not any(
            row["arch"] == target and f"_{row['kernel']}_kernel" == name for row in rows
        )
    }
    rows += [
        {"arch": arch, "kernel": name, "error": "was never launched"}
        for arch, name in sorted(missing)
    ]
    print(table(rows))
    failed = sum("error" in row for row in rows)
    seconds = time.perf_counter() - start
    print(f"{len(rows)} compilations, {failed} failed, {seconds:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
