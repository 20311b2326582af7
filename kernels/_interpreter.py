# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the work that it repeats: about twice as fast.

Without a GPU our kernels run in it, and so does the quick start's model.
"""

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def quicken() -> None:
    """Take the shortcuts that this version of Triton has a place for; never raises.

    - Integer overflow is looked for only under TRITON_DEBUG=1, as on a GPU.
    - The NumPy dtype of a Triton dtype is looked up once, not by building a table of
      all of them at each operation.
    - Functions of the standard library do not patch the language that their caller has
      just patched.
    """
    try:
        import triton
        from triton.language import core
        from triton.runtime import interpreter

        module: Any = interpreter
        builder = module.interpreter_builder
        function = module.InterpretedFunction
        dtype_of = module._get_np_dtype
        call = function.__call__
        debug = triton.knobs.runtime.debug
        is_builtin, _ = core.is_builtin, core.full
    except (ImportError, AttributeError) as error:
        logger.debug("The interpreter stays as it is: %s", error)
        return
    if getattr(call, "quick", False):
        return
    if not debug and hasattr(builder.options, "sanitize_overflow"):
        builder.options = type(builder.options)(sanitize_overflow=False)
    known: dict[str, Any] = {}

    def quick_dtype_of(dtype: Any) -> Any:
        if type(dtype) is core.block_type:
            dtype = dtype.element_ty
        if type(dtype) is not core.dtype:
            return dtype_of(dtype)
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = dtype_of(dtype)
        return found

    module._get_np_dtype = quick_dtype_of

    @functools.wraps(call)
    def quick_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_builtin(core.full):  # not patched yet
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    quick_call.quick = True  # type: ignore[attr-defined]
    function.__call__ = quick_call
