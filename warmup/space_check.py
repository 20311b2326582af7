# SPDX-License-Identifier: Apache-2.0
"""Whether today's config spaces hold a stored config; for `Lookup` and `explain`."""

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.lookup import SpaceCheck
from portable_backend.warmup.records import TuningKey


def space_check(device: DeviceInfo) -> SpaceCheck:
    """Why a key's space on `device` does not hold a config, as a function of both.

    A key of a kernel or with fields that are not known here is not judged: there is no
    space to ask.
    """

    def check(key: TuningKey, config: KernelConfig) -> str | None:
        try:
            spec = spec_of(key)
            reasons = spec.bound(key, device).why_not(config)
        except (ValueError, TypeError, ArithmeticError):
            # The key comes from a file or from a user.
            return None
        return "; ".join(reasons) or None

    return check
