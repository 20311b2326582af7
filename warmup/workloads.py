# SPDX-License-Identifier: Apache-2.0
"""What is run to measure a config: inputs of a bucket to time it on, and to check it.

Needs the device; nothing that serves imports it.
"""

from typing import Protocol

import torch

from portable_backend.bench.timing import Contestant
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.attention_workload import AttentionWorkload
from portable_backend.warmup.gate import Check
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.row_workloads import KVCacheWorkload, RMSNormWorkload


class Workload(Protocol):
    """One kernel and bucket on one device.

    Attributes:
        key: what is tuned for.
        default: the config that serves the key without tuning.
        roof_us: no config can be faster; None if unknown.
        error_limit: the largest relative error of a right timing output, as
            `Contestant.recheck` returns it.
    """

    key: TuningKey
    default: KernelConfig
    roof_us: float | None
    error_limit: float

    def check(self, config: KernelConfig, seed: int, *, reuse: bool = False) -> Check:
        """Run on fresh inputs drawn from `seed`, and compare with the oracle.

        Args:
            config: to run.
            seed: of what is drawn; above 0 with `reuse`, and another one each time.
            reuse: whether inputs of earlier such checks may be among them, and these
                be kept, where that saves time. Some are fresh all the same.
        """

    def draw_ahead(self) -> None:
        """Draw what the first check that may reuse inputs would, as if its seed were 0.

        While the first config compiles there is time for that.
        """

    def contestant(self, config: KernelConfig) -> Contestant:
        """Calls to time, over enough inputs that the L2 cache is cold."""


def make_workload(key: TuningKey, device: torch.device) -> Workload:
    """The workload of a key.

    Raises:
        ValueError: no kernel has such a key.
        MemoryError: the device cannot hold inputs of that size.
    """
    spec_of(key)
    if key.kernel == "rms_norm":
        return RMSNormWorkload(key, device)
    if key.kernel == "kv_cache":
        return KVCacheWorkload(key, device)
    return AttentionWorkload(key, device)
