# SPDX-License-Identifier: Apache-2.0
"""Configs that misbehave on purpose: the `make` target of measuring processes in tests.

The workload is RMSNorm's own, gate and timing included; only what a config runs is
another function for each value of BEHAVIOUR.
"""

import ctypes
import os
import time
from functools import partial

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from portable_backend.kernels import rms_norm
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.row_workloads import EPS, RMSNormWorkload

ROWS = 20


def make_key(**fields) -> TuningKey:
    usual = {"dtype": "float32", "row_size": 48, "fused_add": 0, "num_rows": ROWS}
    return TuningKey.of("rms_norm", **usual | fields)


def behaving(name: str) -> KernelConfig:
    return KernelConfig.of(BEHAVIOUR=name)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


@triton.jit
def _write_far_away_kernel(out_ptr):
    tl.store(out_ptr + (1 << 40), 1.0)


_seen: set[int] = set()
_results: dict[int, torch.Tensor] = {}


def run(behaviour: str, x, weight, out) -> None:
    if behaviour == "good":
        out.copy_(norm(x, weight))
    elif behaviour == "kernel":
        rms_norm(x, weight, EPS, out=out)
    elif behaviour == "slow":
        time.sleep(0.02)
        out.copy_(norm(x, weight))
    elif behaviour == "noted":  # when it ran, in the file that PLANTED_LOG names
        began = time.monotonic()
        time.sleep(0.002)
        out.copy_(norm(x, weight))
        with open(os.environ["PLANTED_LOG"], "a") as file:
            file.write(f"{began} {time.monotonic()}\n")
    elif behaviour == "long":
        time.sleep(0.1)
        out.copy_(norm(x, weight))
    elif behaviour == "wrong":
        out.copy_(norm(x, weight) * 1.001)
    elif behaviour == "wrong in one element":
        out.copy_(norm(x, weight))
        out[-1, -1] *= 1.01
    elif behaviour == "writes nothing":
        pass
    elif behaviour == "works once":  # where it is timed, and then leaves what is there
        if len(x) != ROWS or x.data_ptr() not in _seen:
            out.copy_(norm(x, weight))
        _seen.add(x.data_ptr())
    elif behaviour == "keeps its first result":
        if not hasattr(run, "first"):
            run.first = norm(x, weight)
        rows = min(len(x), len(run.first))
        out[:rows] = run.first[:rows]
    elif behaviour == "keeps results by shape":
        if len(x) not in _results:
            _results[len(x)] = norm(x, weight)
        out.copy_(_results[len(x)])
    elif behaviour == "timing shape only":
        rows = ROWS if len(x) == ROWS else len(x) // 16 * 16
        out[:rows] = norm(x[:rows], weight)
    elif behaviour == "reads past the row":
        wide = x.as_strided((len(x), x.shape[1] + 1), x.stride())
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        out.copy_(x * scale * weight)
    elif behaviour == "writes past the rows":
        out.copy_(norm(x, weight))
        if out.storage_offset() + (len(out) + 1) * out.stride(0) <= out.numel():
            return  # no memory of its own after the rows: the timing shape
        out.as_strided((1,), (1,), len(out) * out.stride(0)).fill_(0.0)
    elif behaviour == "changes its input":
        out.copy_(norm(x, weight))
        x.mul_(2)
    elif behaviour == "hang":
        while True:
            time.sleep(0.01)
    elif behaviour == "hang in C":  # holding the interpreter's lock
        ctypes.PyDLL(None).sleep(1000)
    elif behaviour == "segfault":
        ctypes.string_at(0)
    elif behaviour == "abort":
        os.abort()
    elif behaviour == "exit":
        os._exit(0)
    elif behaviour == "uncaught":
        raise SystemError("no handler expects this")
    elif behaviour == "host memory hog":
        held = []
        while True:
            held.append(bytearray(b"\1") * (64 << 20))
    elif behaviour == "device memory hog":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
    elif behaviour == "shared memory":
        raise OutOfResources(300_000, 232_448, "shared memory")
    elif behaviour == "illegal access":
        _write_far_away_kernel[(1,)](out)
    else:
        raise RuntimeError(f"no behaviour {behaviour}")


class Planted(RMSNormWorkload):
    def __init__(self, key: TuningKey, device: torch.device) -> None:
        super().__init__(key, device)
        self.default = behaving("good")
        self.roof_us = 3.5

    def _call(self, config, x, residual, out, weight=None):
        weight = self.weight if weight is None else weight
        return partial(run, config["BEHAVIOUR"], x, weight, out)


class PlantedDefault(Planted):
    """The default itself misbehaves, as DEFAULT says."""

    def __init__(self, key: TuningKey, device: torch.device) -> None:
        super().__init__(key, device)
        self.default = behaving(os.environ["PLANTED_DEFAULT"])


def make(key: TuningKey, device: torch.device) -> Planted:
    return Planted(key, device)


def make_bad_default(key: TuningKey, device: torch.device) -> Planted:
    return PlantedDefault(key, device)


def make_nothing(key: TuningKey, device: torch.device) -> Planted:
    raise MemoryError("inputs need 900 GiB")


def make_never(key: TuningKey, device: torch.device) -> Planted:
    while True:
        time.sleep(0.01)
