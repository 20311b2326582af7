# SPDX-License-Identifier: Apache-2.0
"""Values on the command line, checked before anything starts."""

import argparse
import math
from collections.abc import Iterable


def names_in(text: str, known: Iterable[str], what: str) -> list[str]:
    """Split a list whose members may hold commas themselves.

    Raises:
        SystemExit: a name is unknown or comes twice, or there is none.
    """
    known = list(known)
    left, found = text, []
    while left:
        name = max((k for k in known if left.startswith(k)), key=len, default=None)
        if name is None or left[len(name) :][:1] not in ("", ","):
            raise SystemExit(
                f"{what}: expected some of {'; '.join(known)}, got {left!r}; "
                "separate them by commas"
            )
        if name in found:
            raise SystemExit(f"{what}: {name} is there twice; name each once")
        found.append(name)
        left = left[len(name) + 1 :]
    if not found:
        raise SystemExit(f"{what}: expected some of {'; '.join(known)}, got none")
    return found


def count(text: str) -> int:
    """argparse type: 1, 2, ..."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """argparse type: a finite time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, got {text}")
    return value
