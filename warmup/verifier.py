# SPDX-License-Identifier: Apache-2.0
"""Re-measures stored records: what `portable-backend cache verify` runs."""

import math
from types import TracebackType

from portable_backend.errors import UnsupportedError
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.measuring_process import MeasuringProcess
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.upkeep import Measurement


class Verifier:
    """An `upkeep.Measurer` that runs a record's config on the GPU at hand.

    Args:
        process: measures; closed with this.
        seed: of the data that configs are checked on.
    """

    def __init__(self, process: MeasuringProcess, *, seed: int = 0) -> None:
        self._process, self._seed = process, seed

    def __call__(self, record: TuningRecord) -> Measurement:
        """Check and time the config of `record`.

        Raises:
            UnsupportedError: the record is another GPU's.
            MeasuringError: no config can be measured here.
        """
        device = self._process.device_info()
        if record.gpu != device.name:
            raise UnsupportedError(
                f"a record of {record.gpu} cannot be verified on {device.name}; "
                f"run this where that GPU is, or choose with --gpu {device.name}"
            )
        try:
            space = spec_of(record.key).bound(record.key, device)
            reasons = space.why_not(record.config)
        except ValueError as error:
            return Measurement(problem=str(error))
        if reasons:
            return Measurement(problem=f"not in today's space: {'; '.join(reasons)}")
        result = self._process.confirm(record.key, record.config, self._seed)
        if result.wrong is not None:
            return Measurement(problem=result.wrong)
        default_us = result.default_us if math.isfinite(result.default_us) else None
        return Measurement(result.time_us, result.error_ratio, default_us)

    def close(self) -> None:
        self._process.close()

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
