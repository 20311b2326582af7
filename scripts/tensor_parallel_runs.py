# SPDX-License-Identifier: Apache-2.0
"""What tensor_parallel_check starts: engines in waves, and tuning."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.models import GEOMETRIES
from tensor_parallel_engine import prompts

SCRIPTS = Path(__file__).resolve().parent
EXTENSION = "portable_backend.worker_extension.PortableWorkerExtension"
FIRST_READS = "tensor_parallel_worker.FirstReads"
# CPUs that compile nothing while tuning is timed: engines wait beside.
_SPARE_CPUS = 12


@dataclass(frozen=True)
class Run:
    """An engine that answers the prompts once.

    Attributes:
        backend: of attention; "" is --reference.
        gpu: the number of the one GPU that it has; None: it has all.
        records: name of its cache of tuning records.
        tunes: whether its start does.
        compiled_by: the run whose compiled model it finds; itself unless given.
        first_reads: whether that cache can be read by the first rank alone.
    """

    backend: str = "portable"
    gpu: int | None = None
    records: str = "none"
    tunes: bool = False
    compiled_by: str = ""
    first_reads: bool = False


RUNS = {
    "reference": Run(backend=""),
    "cold": Run(),
    "one GPU": Run(gpu=1),
    "startup": Run(records="ranks", tunes=True, compiled_by="cold"),
    "shared 0": Run(gpu=0, records="shared", tunes=True, compiled_by="one GPU"),
    "shared 1": Run(gpu=1, records="shared", tunes=True, compiled_by="one GPU"),
    "warm": Run(records="ranks", compiled_by="cold"),
    "first rank only": Run(records="ranks", compiled_by="cold", first_reads=True),
}
# Those of a wave run beside each other; the later ones need what the earlier ones made.
WAVES = (
    ("reference", "cold", "one GPU"),
    ("startup", "shared 0", "shared 1"),
    ("warm", "first rank only"),
)
STARTS = ("cold", "startup", "warm", "first rank only")
RUNS_OF_PART = {
    "tokens": ("reference", "cold", "one GPU"),
    "ranks": STARTS,
    "shared": ("shared 0", "shared 1"),
}


def spec_of(
    name: str, args: argparse.Namespace, work: Path, cpus: list[int] | None = None
) -> dict[str, Any]:
    """What tensor_parallel_engine.py is given.

    Args:
        name: of the run.
        args: of tensor_parallel_check.py.
        work: folder of the model.
        cpus: that the engine may use; None: all.
    """
    run = RUNS[name]
    ranks = args.tensor_parallel_size if run.gpu is None else 1
    llm: dict[str, Any] = {
        "model": str(work / "model"),
        "attention_backend": run.backend or args.reference,
        "tensor_parallel_size": ranks,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": args.longest + args.max_tokens + 1,
        "max_num_batched_tokens": 512,  # long prompts come in several chunks
        "max_num_seqs": 32,
        "seed": 0,
    }
    if ranks > 1:
        llm["distributed_executor_backend"] = "mp"
    if run.backend == "portable":
        llm["worker_extension_cls"] = EXTENSION
    if run.first_reads:
        llm["worker_cls"] = FIRST_READS
    vocab_size = GEOMETRIES[args.geometry]["vocab_size"]
    return {
        "llm": llm | args.llm_options,
        "prompts": prompts(vocab_size, args.longest),
        "max_tokens": args.max_tokens,
        "cpus": cpus,
    }


def environment_of(name: str, args: argparse.Namespace, work: Path) -> dict[str, str]:
    """What a run's processes get besides this one's environment."""
    run = RUNS[name]
    compiled = (run.compiled_by or name).replace(" ", "_")
    path = filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
    env = {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CACHE_ROOT": str(work / "vllm" / compiled),
        "PORTABLE_BACKEND_CACHE_DIR": str(work / "records" / run.records),
        "PORTABLE_BACKEND_TUNE": "startup" if run.tunes else "load",
        "PORTABLE_BACKEND_TUNE_BUDGET_S": str(args.startup_budget_s),
    }
    if run.gpu is not None and args.gpus:
        env["CUDA_VISIBLE_DEVICES"] = args.gpus[run.gpu % len(args.gpus)]
    return env


def shares_of_cpus(names: Sequence[str]) -> dict[str, list[int]]:
    """CPUs of those runs that tune: each compiles on all that it sees, at once."""
    tuning = [name for name in names if RUNS[name].tunes]
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 4 * len(tuning):
        return {}
    return {name: cpus[n :: len(tuning)] for n, name in enumerate(tuning)}


def write_shapes(path: Path, count: int) -> None:
    """Decodes of Llama-8B's layers, alike but for their sizes."""
    from portable_backend.warmup.records import TuningKey
    from portable_backend.warmup.units import WorkUnit, write_shapes

    sizes = [(n, k) for k in (2048, 4096, 1024) for n in (8, 32, 16, 64)]
    keys = [
        TuningKey.of(
            "decode",
            dtype="bfloat16",
            head_size=128,
            num_kv_heads=8,
            num_queries_per_kv=4,
            block_size=64,
            sliding_window=0,
            num_seqs=num_seqs,
            query_len=1,
            seq_len=seq_len,
        )
        for num_seqs, seq_len in sizes[:count]
    ]
    write_shapes(path, [WorkUnit(key, 1 / len(keys)) for key in keys])


def tune_command(
    args: argparse.Namespace, shapes: Path, gpus: str, cache_dir: Path
) -> list[str]:
    """`portable-backend tune`: so many configs for each key, however long it takes.

    Each GPU has as many processes that compile, so that one and all differ in nothing
    but the number of GPUs.
    """
    cpus = len(os.sched_getaffinity(0))
    workers = max(1, (cpus - _SPARE_CPUS) // max(1, len(args.gpus)))
    trials = args.tune_trials
    command = [sys.executable, "-P", "-m", "portable_backend.cli", "tune"]
    command += ["--shapes", str(shapes), "--gpus", gpus, "--cache-dir", str(cache_dir)]
    command += ["--trials", str(trials), "--patience", str(trials), "--seed", "0"]
    return [*command, "--workers", str(workers), "--json"]
