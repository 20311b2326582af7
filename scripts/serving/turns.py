# SPDX-License-Identifier: Apache-2.0
"""Who is measured when, and whether they agree."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

Part = TypeVar("Part")


def turns_of_round(
    number: int, names: Sequence[str], parts: Sequence[Part], *, by_name: bool = False
) -> Iterator[tuple[str, Part]]:
    """One round: all take turns in every part, each round another one first.

    Args:
        number: of the round.
        names: who takes turns.
        parts: what each has to do.
        by_name: each does all its parts in one go, where changing over is expensive.
    """
    first = number % len(names)
    rotated = [*names[first:], *names[:first]]
    if by_name:
        yield from ((name, part) for name in rotated for part in parts)
    else:
        yield from ((name, part) for part in parts for name in rotated)


def same_shares(tokens: Mapping[str, Sequence[int] | None]) -> dict[str, float]:
    """Share of the tokens equal to those of the first; {} where that has none."""
    reference = next(iter(tokens.values()), None)
    if not reference:
        return {}
    return {
        name: statistics.fmean(a == b for a, b in zip(own, reference, strict=True))
        for name, own in tokens.items()
        if own is not None
    }
