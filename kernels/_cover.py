# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: few configs that have every combination of values between them."""

import itertools
import random
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from portable_backend.kernels._space import Value

Combination = tuple[tuple[str, Value], ...]
C = TypeVar("C", bound=Mapping[str, Value])


def combinations(
    configs: Iterable[Mapping[str, Value]], strength: int, ignore: Collection[str] = ()
) -> set[Combination]:
    """Every combination of `strength` parameters' values that a config has.

    Parameters with one value throughout are left out: they double what the others say.
    Where fewer than `strength` vary, all of those are combined.

    Args:
        configs: with the same names.
        strength: 2: pairs.
        ignore: names of further parameters to leave out.
    """
    listed = list(configs)
    names = _varying(listed, ignore)
    return {
        combination
        for config in listed
        for combination in itertools.combinations(
            [(name, config[name]) for name in names], min(strength, len(names))
        )
    }


def covering(
    configs: Iterable[C], strength: int, rng: random.Random, ignore: Collection[str]
) -> list[C]:
    """Some of the configs, with all combinations that the configs have.

    Greedy: the one with the most new combinations, again and again; in the end those go
    whose combinations the others have. Combinations are numbered, and a set of them is
    an integer with their bits.
    """
    listed = list(configs)
    names = _varying(listed, ignore)
    together = list(
        itertools.combinations(range(len(names)), min(strength, len(names)))
    )
    rng.shuffle(listed)
    seen: set[tuple[Value, ...]] = set()
    numbers: dict[tuple[tuple[int, ...], tuple[Value, ...]], int] = {}
    left: dict[int, int] = {}  # of each config that may be of use, what it has
    for place, config in enumerate(listed):
        values = tuple([config[name] for name in names])
        if values in seen:
            continue
        seen.add(values)
        bits = 0
        for indices in together:
            key = indices, tuple([values[i] for i in indices])
            bits |= 1 << numbers.setdefault(key, len(numbers))
        left[place] = bits
    chosen: dict[int, int] = {}
    missing = (1 << len(numbers)) - 1
    while missing:
        best = max(left, key=lambda place: (left[place] & missing).bit_count())
        chosen[best] = left.pop(best)
        missing &= ~chosen[best]
    for place in list(chosen):
        others = 0
        for other, bits in chosen.items():
            others |= bits if other != place else 0
        if others == others | chosen[place]:
            del chosen[place]
    return [listed[place] for place in chosen]


def _varying(configs: list[C], ignore: Collection[str]) -> list[str]:
    values: dict[str, set[Value]] = {}
    for config in configs:
        for name, value in config.items():
            values.setdefault(name, set()).add(value)
    return [n for n, found in values.items() if len(found) > 1 and n not in ignore]
