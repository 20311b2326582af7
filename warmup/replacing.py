# SPDX-License-Identifier: Apache-2.0
"""Parts of Triton and of the kernels that are others for a while.

Only the thread that asked for it notices, where `replaced_here` is used.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Who replaces parts also puts them back, before the next one comes.
REPLACING = threading.RLock()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value for a while."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def replaced_here(
    owner: Any, name: str, stand_in: Callable[..., Any]
) -> Iterator[None]:
    """A function or class method is another one for a while, in this thread alone.

    Whoever keeps a reference has the ordinary one afterwards.
    """
    ordinary = vars(owner)[name]
    of_class = isinstance(ordinary, classmethod)
    function = ordinary.__func__ if of_class else ordinary
    thread: int | None = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = stand_in if threading.get_ident() == thread else function
        return chosen(*args, **kwargs)

    with REPLACING, replaced(owner, name, classmethod(call) if of_class else call):
        try:
            yield
        finally:
            thread = None
