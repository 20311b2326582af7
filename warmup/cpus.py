# SPDX-License-Identifier: Apache-2.0
"""How many CPUs this process may use: its affinity, and what its container allows."""

import contextlib
import os
from pathlib import Path

# A container sees its own group here; without one there is no such file at the root.
_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """At least 1; a quota such as docker's --cpus counts, rounded down.

    Args:
        cgroup: where the kernel shows the group's limits; version 2, else version 1.
    """
    cpus = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return _within(cpus, quota, period)
    with contextlib.suppress(OSError, ValueError):
        quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
        return _within(cpus, quota, (cgroup / "cpu/cpu.cfs_period_us").read_text())
    return cpus


def _within(cpus: int, quota: str, period: str) -> int:
    """Raises ValueError where there is no quota: "max", or -1."""
    if int(quota) < 0 or int(period) <= 0:
        raise ValueError(f"{quota} of {period}")
    return max(1, min(cpus, int(quota) // int(period)))
