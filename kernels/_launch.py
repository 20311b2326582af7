# SPDX-License-Identifier: Apache-2.0
"""Launch counters kept on the device, so that CUDA graph replays count too."""

import functools

import torch
import triton.language as tl

from portable_backend.kernels._jit import device_function

COUNTED = (
    "plan",
    "decode",
    "merge",
    "prefill",
    "kv_cache_write",
    "rms_norm",
    "fused_add_rms_norm",
)
COUNT_PLAN = tl.constexpr(0)
COUNT_DECODE = tl.constexpr(1)
COUNT_MERGE = tl.constexpr(2)
COUNT_PREFILL = tl.constexpr(3)
COUNT_KV_CACHE_WRITE = tl.constexpr(4)
COUNT_RMS_NORM = tl.constexpr(5)
COUNT_FUSED_ADD_RMS_NORM = tl.constexpr(6)


@device_function
def count_launch(counts_ptr, KERNEL: tl.constexpr):
    """The first program of a launch adds one; every kernel calls this once."""
    first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
    if first:
        tl.atomic_add(counts_ptr + KERNEL, 1, sem="relaxed")


@device_function
def wait_for_earlier(EARLY_START: tl.constexpr):
    """Comes first where a launch may begin before the one ahead of it has ended.

    What earlier launches wrote is there afterwards, and the next one may begin: it
    comes to lie behind this wait whatever it does, so order is kept from launch to
    launch.
    """
    if EARLY_START:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(len(COUNTED), dtype=torch.int64, device=device)


def counters(device: torch.device) -> torch.Tensor:
    """This device's counters, [len(COUNTED)] int64, never freed: graphs hold them."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _counters(device)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def launch_counts(device: torch.device | str | None = None) -> dict[str, int]:
    """Launches of each kernel on `device` in this process; waits for the device.

    Graph replays count, since the kernels themselves do the counting.
    """
    device = _default_device() if device is None else torch.device(device)
    return dict(zip(COUNTED, counters(device).tolist(), strict=True))


def reset_launch_counts(device: torch.device | str | None = None) -> None:
    """Set every counter of `device` to zero."""
    device = _default_device() if device is None else torch.device(device)
    counters(device).zero_()
