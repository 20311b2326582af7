# SPDX-License-Identifier: Apache-2.0
"""Records to store and look up, and the log lines that doing so gives."""

import contextlib
import ctypes
import logging
import os
import resource

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.matching import Environment
from portable_backend.warmup.portfolio import Portfolio, cover_buckets
from portable_backend.warmup.records import TuningKey, TuningRecord

GPU, ARCH, DIGEST = "nvidia_h200", "sm90", "sha256:aa"
TOOLCHAIN = {"hip": None, "torch": "2.11.0", "triton": "3.6.0"}
ENVIRONMENT = Environment(GPU, ARCH, {"decode": DIGEST}, TOOLCHAIN)
DEFAULT = KernelConfig.of(BLOCK_N=16, num_warps=1)


def make_key(seq_len: int = 4096, **fields) -> TuningKey:
    shape = {"block_size": 16, "dtype": "bfloat16", "head_size": 128, "num_seqs": 32}
    return TuningKey.of("decode", **shape | {"seq_len": seq_len} | fields)


def make_config(block_n: int = 64, **params) -> KernelConfig:
    return KernelConfig.of(BLOCK_N=block_n, num_warps=4, **params)


def make_record(key: TuningKey | None = None, **fields) -> TuningRecord:
    usual = {
        "config": make_config(),
        "gpu": GPU,
        "arch": ARCH,
        "time_us": 41.5,
        "default_us": 47.9,
        "error_ratio": 1.1,
        "kernel_digest": DIGEST,
        "toolchain": TOOLCHAIN,
        "verified": True,
        "measured": "2026-11-30",
        "trials": 12,
    }
    return TuningRecord(key=key or make_key(), **usual | fields)


def make_portfolio(**fields) -> Portfolio:
    """Two configs for three lengths of a sequence: BLOCK_N of 16, and 32 for 1328."""
    small, large = make_config(16), make_config(32)
    times = {make_key(n): {small: n, large: 100.0} for n in (1, 54, 1328)}
    usual = {"gpu": GPU, "arch": ARCH, "kernel_digest": DIGEST, "toolchain": TOOLCHAIN}
    return Portfolio.of(cover_buckets(times, 2), **usual | fields)


@contextlib.contextmanager
def log_lines(level: int = logging.WARNING):
    """What is logged meanwhile; caplog sees nothing once vLLM has set its logger up."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.portable_backend.records")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def without_root():
    """Permissions bind only those who are not root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def permissions_bind(children=False):
    """Also for root: here, and perhaps in processes that are started from now on."""
    if os.geteuid() != 0:
        yield
        return
    libc, dac = ctypes.CDLL(None, use_errno=True), (1, 2)  # override, read and search
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, before) == 0
    for capability in dac * children:
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    less = (ctypes.c_uint32 * 6)(*before)
    for index in (0, 2):
        less[index] &= ~sum(1 << capability for capability in dac)
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@contextlib.contextmanager
def full_disk():
    """No file can grow, in this process and those that it starts."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
