# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own /metrics shows of us: grades, and trials beside the engine.

Kernels run in other processes than /metrics. Between them there is one way that is not
ours to build: prometheus_client's multiprocess mode, on where PROMETHEUS_MULTIPROC_DIR
is set. Launches are not shown: their counters are in the GPU's memory, and reading them
waits for it.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("vllm.portable_backend.tuned")
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
NAME = "portable_backend_tuning_keys"
TRIALS = "portable_backend_background_trials"


def publish_grades(grades: Mapping[str, Mapping[str, int]]) -> None:
    """Set the gauge `portable_backend_tuning_keys`, if it can be seen; never raises.

    Args:
        grades: by kernel, how many of the keys looked up got which grade.
    """
    if not os.environ.get(VARIABLE):
        return
    try:
        gauge = _gauge()
        for kernel, counts in grades.items():
            for grade, count in counts.items():
                gauge.labels(kernel, grade).set(count)
    except Exception as error:  # no client, or a folder that cannot be written
        logger.warning("grades are not on /metrics: %r; see %s", error, VARIABLE)


def publish_trials(count: int) -> None:
    """Count configs that were tried beside the engine, if it can be seen; never raises.

    Args:
        count: since the last call.
    """
    if not os.environ.get(VARIABLE):
        return
    try:
        _counter().inc(count)
    except Exception as error:  # no client, or a folder that cannot be written
        logger.debug("trials are not on /metrics: %r; see %s", error, VARIABLE)


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter  # vLLM needs it itself

    return Counter(TRIALS, "Configs that were tried beside engines that serve.")


@functools.cache
def _gauge() -> Any:
    from prometheus_client import Gauge  # vLLM needs it itself

    return Gauge(
        NAME,
        "Keys of tuning records that this engine looked up, by kernel and grade.",
        ["kernel", "grade"],
        multiprocess_mode="max",  # all ranks say the same
    )
