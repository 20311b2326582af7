# SPDX-License-Identifier: Apache-2.0
"""A timer of single calls by CUDA events, and an L2 cache without their inputs."""

from dataclasses import dataclass

import torch

# Writing it takes longer than a host needs to queue a graph, a quarter of a millisecond
# at 4 TB/s.
_LEAST_FLUSH_BYTES = 1 << 30


@dataclass
class Instant:
    """A point in the device's queue. Two of them subtracted give seconds."""

    event: torch.cuda.Event

    def __sub__(self, earlier: "Instant") -> float:
        self.event.synchronize()
        elapsed_ms: float = earlier.event.elapsed_time(self.event)
        return elapsed_ms / 1e3


def device_timer() -> Instant:
    """A timer for pytest-benchmark: what the device does between two calls counts.

    Nothing is waited for until two are subtracted, so that a call is already in the
    queue when the work before it ends, and what it costs the host does not count.
    """
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Instant(event)


class L2Flush:
    """Fills the L2 cache with something else, and keeps the device busy meanwhile."""

    def __init__(self, device: torch.device) -> None:
        """Take memory for it: four times the cache, at least 1 GiB."""
        cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        size = max(4 * cache_bytes, _LEAST_FLUSH_BYTES)
        self._memory = torch.empty(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._memory.zero_()
