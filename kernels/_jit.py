# SPDX-License-Identifier: Apache-2.0
"""Decorator for device functions: what kernels call, as opposed to what is launched."""

from collections.abc import Callable
from typing import Any

import triton

from portable_backend.kernels._interpreter import quicken

if triton.knobs.runtime.interpret:
    quicken()


def device_function(fn: Callable[..., Any]) -> Any:
    """`triton.jit` for a function that only kernels call.

    The interpreter patches the whole language again at each such call, about 1 ms,
    though the kernel has just done so. There the function is called directly.
    """
    jitted = triton.jit(fn)
    rewrite = getattr(jitted, "rewrite", None)
    if rewrite is None:
        return jitted

    def call(*args: Any, **kwargs: Any) -> Any:
        return rewrite()(*args, **kwargs)

    call.fn = fn  # type: ignore[attr-defined]  # as a jit function has it
    return call
