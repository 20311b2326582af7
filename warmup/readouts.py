# SPDX-License-Identifier: Apache-2.0
"""Read-outs of compiled configs, kept in a file: compiled once, without any GPU.

The file is gzip JSON, next to the sweeps: by kernel a digest of its code, the Triton
that compiled it, and read-outs by architecture and binary. What another digest or
Triton gave is compiled anew.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.errors import UnsupportedError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.compile_pool import binary_of
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.resources import Readout, over_limit

FILE = "readouts.json.gz"
SCHEMA = 1
Job = tuple[TuningKey, KernelConfig, DeviceInfo]
# Few enough for one tile of decode; heads do not shape its code otherwise.
_USUAL_GROUP = 4
_FAR = 1 << 20  # tokens of two requests: more than 2 GiB from head size 32 on


def usual_key(key: TuningKey, config: KernelConfig, device: DeviceInfo) -> TuningKey:
    """The key whose binary stands for this key's: what code takes depends on little.

    Registers and shared memory follow head size, block size, dtype, window and config,
    not how many heads, requests or tokens there are. But AMD's compiler takes more
    registers for caches of more than 2 GiB, as engines have: this key's are so large.
    """
    fields: dict[str, Any] = key.to_dict()
    usual: dict[str, Any] = {}
    if "num_queries_per_kv" in fields:
        usual = {"num_kv_heads": 8, "num_seqs": 2}
        pack: Any = config.get("PACK", 1)
        if fields["num_queries_per_kv"] <= 8 and _USUAL_GROUP % pack == 0:
            usual["num_queries_per_kv"] = _USUAL_GROUP
    cached = _FAR if device.platform == "hip" else 4096
    if key.kernel == "decode":
        usual |= {"seq_len": cached}
    elif key.kernel == "prefill":
        usual |= {"query_len": 2048}
        usual |= {"context_len": 0 if fields["no_context"] else cached}
    return TuningKey.from_dict(key.kernel, fields | usual)


class Readouts:
    """Read-outs by (key, config, device), from a file and from compilers.

    Args:
        path: the file; it need not exist.
        digests: of today's kernels; None takes whatever the file holds.
        triton: today's version; None takes any.

    Raises:
        ValueError: the file is not one of read-outs.
    """

    def __init__(
        self,
        path: Path | None,
        digests: Mapping[str, str] | None = None,
        triton: str | None = None,
    ) -> None:
        self._digests, self._triton = digests, triton
        self._held: dict[str, dict[str, Any]] = {}
        self._used: set[tuple[str, str]] = set()
        if path is not None and path.exists():
            for kernel, part in _read(path).items():
                is_known = digests is None or part["digest"] == digests.get(kernel)
                if is_known and triton in (None, part["triton"]):
                    self._held[kernel] = part

    def get(
        self, key: TuningKey, config: KernelConfig, device: DeviceInfo
    ) -> Readout | None:
        """None where it was not compiled, or does not compile."""
        found = self._found(key, config, device)
        if found is None or "failure" in found:
            return None
        return Readout(**found, seconds=0.0)

    def why_not(
        self, key: TuningKey, config: KernelConfig, device: DeviceInfo
    ) -> str | None:
        """Why a compiled config must not serve: it fails, exceeds a limit or spills."""
        found = self._found(key, config, device)
        if found is None:
            return "not compiled"
        if "failure" in found:
            return str(found["failure"])
        readout = Readout(**found, seconds=0.0)
        if readout.spills:
            return f"spills {readout.spills} registers"
        return over_limit(readout, device)

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """One job for each binary that the file lacks."""
        lacking: dict[tuple[str, str], Job] = {}
        for key, config, device in jobs:
            if self._found(key, config, device) is None:
                place = key.kernel, _name(key, config, device)
                lacking[place] = (usual_key(key, config, device), config, device)
        return list(lacking.values())

    def compile(
        self,
        jobs: Iterable[Job],
        workers: int,
        on_done: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Compile what is missing; needs the digests and Triton's version.

        Raises:
            UnsupportedError: in the interpreter, which compiles nothing.
            concurrent.futures.BrokenExecutor: a compiler has crashed.
        """
        assert self._digests is not None and self._triton is not None
        wanted = self.missing(jobs)
        if not wanted:
            return
        if interpreting():
            raise UnsupportedError(
                "the interpreter compiles nothing: unset TRITON_INTERPRET"
            )
        # Not a fork: torch has threads.
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            found = pool.map(_compile, wanted, chunksize=4)
            for done, (job, held) in enumerate(zip(wanted, found, strict=True), 1):
                self._part(job[0].kernel)["readouts"][_name(*job)] = held
                on_done(done, len(wanted))

    def write(self, path: Path) -> None:
        """Write what was asked for since this was made; the rest is forgotten."""
        kept = {
            kernel: part
            | {
                "readouts": {
                    name: held
                    for name, held in sorted(part["readouts"].items())
                    if (kernel, name) in self._used
                }
            }
            for kernel, part in sorted(self._held.items())
        }
        text = json.dumps({"schema": SCHEMA, "kernels": kept}, separators=(",", ":"))
        beside = path.with_name(path.name + ".tmp")
        beside.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.replace(beside, path)

    def _part(self, kernel: str) -> dict[str, Any]:
        assert self._digests is not None
        empty = {"digest": self._digests[kernel], "triton": self._triton}
        return self._held.setdefault(kernel, empty | {"readouts": {}})

    def _found(
        self, key: TuningKey, config: KernelConfig, device: DeviceInfo
    ) -> dict[str, Any] | None:
        name = _name(key, config, device)
        self._used.add((key.kernel, name))
        held: dict[str, Any] | None = (
            self._held.get(key.kernel, {}).get("readouts", {}).get(name)
        )
        return held


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} instead of {SCHEMA}")
        return {
            kernel: {name: part[name] for name in ("digest", "triton", "readouts")}
            for kernel, part in data["kernels"].items()
        }
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise bad_argument(
            "path",
            f"read-outs of schema {SCHEMA}",
            f"{path} ({type(error).__name__}: {error})",
            "delete the file: it is made anew",
        ) from error


def _name(key: TuningKey, config: KernelConfig, device: DeviceInfo) -> str:
    if "MIN_CHUNK" in config:  # of the plan alone
        config = config.replace(MIN_CHUNK=1)
    binary: Any = binary_of(usual_key(key, config, device), config)
    _, structure, sizes, *parameters = binary
    fields = " ".join(f"{name}={value}" for name, value in structure)
    return f"{device.arch} {fields} {list(sizes)} {dict(parameters)}"


def _compile(job: Job) -> dict[str, Any]:
    from portable_backend.warmup.compilation import compile_launch, launches_of

    key, config, device = job
    try:
        own, *_ = launches_of(key, config, device)
        held = asdict(compile_launch(own, device))
    except Exception as error:  # compilers raise anything
        return {"failure": f"{type(error).__name__}: {str(error).strip()[:120]}"}
    del held["seconds"]
    return {name: value for name, value in held.items() if value is not None} | {
        name: held[name] for name in ("registers", "spills", "programs_per_unit")
    }
