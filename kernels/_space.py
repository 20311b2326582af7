# SPDX-License-Identifier: Apache-2.0
"""What a config space is made of, and the walk through it, parameter by parameter."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument

Value = int | bool | str | None
PLATFORMS = ("cuda", "hip", "interpreter")
P = TypeVar("P")  # what a kernel is tuned for: its problem


@dataclass(frozen=True)
class Parameter(Generic[P]):
    """A launch parameter that is chosen freely.

    Attributes:
        name: as in the config: upper case, or a compiler option.
        values: without repeats, or a function of (problem, device) that gives them.
            Numbers count as ordered the way they are listed: only neighbours in the
            list are adjacent.
        about: what it stands for, and why it has no other values, for people.
        platforms: where configs have it.
    """

    name: str
    values: Sequence[Value] | Callable[[P, DeviceInfo], Sequence[Value]]
    about: str = ""
    platforms: tuple[str, ...] = PLATFORMS

    def __post_init__(self) -> None:
        _check_platforms(self.name, self.platforms)
        if not callable(self.values):
            object.__setattr__(self, "values", _distinct(self.name, self.values))

    def values_for(self, problem: P, device: DeviceInfo) -> tuple[Value, ...]:
        """The values for one problem and device; none where it does not exist."""
        if callable(self.values):
            return _distinct(self.name, self.values(problem, device))
        return tuple(self.values)


@dataclass(frozen=True)
class Derived(Generic[P]):
    """A launch parameter that follows from others.

    Attributes:
        name: as in the config.
        value: a constant, or a function of (config, problem, device).
        reason: why that value.
        reads: names of the parameters that the function looks at; of derived ones only
            those that come earlier.
        platforms: where configs have it.
    """

    name: str
    value: Value | Callable[[Mapping[str, Any], P, DeviceInfo], Value]
    reason: str = ""
    reads: tuple[str, ...] = ()
    platforms: tuple[str, ...] = PLATFORMS

    def __post_init__(self) -> None:
        _check_platforms(self.name, self.platforms)
        _check_names(f"reads of {self.name}", self.reads)

    def value_for(
        self, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> Value:
        if callable(self.value):
            seen = _Seen.of(config, self.reads, self.name)
            return self.value(seen, problem, device)
        return self.value


@dataclass(frozen=True)
class Constraint(Generic[P]):
    """What a config must keep.

    Attributes:
        name: short, unique within the space.
        reason: why a config that breaks it is left out, for people.
        reads: names of the parameters that `holds` looks at. It is called as soon as
            these are chosen, so a broken one spares all choices of the others.
        holds: predicate over (config, problem, device). A parameter that does not exist
            on the platform reads as None.
    """

    name: str
    reason: str
    reads: tuple[str, ...]
    holds: Callable[[Mapping[str, Any], P, DeviceInfo], bool]

    def __post_init__(self) -> None:
        _check_names(f"reads of {self.name}", self.reads)
        if not self.reason.strip():
            raise bad_argument(
                f"reason of {self.name}", "a sentence", repr(self.reason), "write it"
            )

    def check(
        self, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> bool:
        return bool(
            self.holds(_Seen.of(config, self.reads, self.name), problem, device)
        )


class _Seen(dict[str, Any]):
    """The part of a config that a function declared to read."""

    owner = ""

    @classmethod
    def of(
        cls, config: Mapping[str, Value], reads: tuple[str, ...], owner: str
    ) -> "_Seen":
        seen = cls((name, config.get(name)) for name in reads)
        seen.owner = owner
        return seen

    def __missing__(self, name: str) -> Any:
        raise bad_argument(
            f"reads of {self.owner}",
            "all parameters that it looks at",
            tuple(self),
            f"add {name!r}",
        )


class Grid(Generic[P]):
    """A space for one problem and device: values, and what follows each choice.

    Step 0 comes before any choice, step n after the n-th parameter got its value.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter[P]],
        derived: Sequence[Derived[P]],
        constraints: Sequence[Constraint[P]],
        problem: P,
        device: DeviceInfo,
    ) -> None:
        self.problem, self.device = problem, device
        here = device.platform
        self.values = {
            p.name: p.values_for(problem, device)
            for p in parameters
            if here in p.platforms
        }
        self.derived = [d for d in derived if here in d.platforms]
        self.constraints = constraints
        self.size = math.prod(len(values) for values in self.values.values())
        step = {name: i for i, name in enumerate(self.values, 1)}

        def step_after(reads: tuple[str, ...]) -> int:
            return max((step.get(name, 0) for name in reads), default=0)

        self._derived: list[list[Derived[P]]] = [[] for _ in range(len(step) + 1)]
        self._constraints: list[list[Constraint[P]]] = [[] for _ in self._derived]
        for parameter in self.derived:
            step[parameter.name] = step_after(parameter.reads)
            self._derived[step[parameter.name]].append(parameter)
        for constraint in constraints:
            self._constraints[step_after(constraint.reads)].append(constraint)

    def walk(
        self,
        values: Mapping[str, Sequence[Value]] | None = None,
        rng: random.Random | None = None,
    ) -> Iterator[dict[str, Value]]:
        """Members, the last parameter changing fastest.

        Args:
            values: in place of all, keyed alike.
            rng: shuffles each parameter's values, at every turn anew.
        """
        chosen = self.values if values is None else values
        names = list(chosen)
        config: dict[str, Value] = {}

        def extend(step: int) -> Iterator[dict[str, Value]]:
            if not self._accepts(config, step):
                return
            if step == len(names):
                yield dict(config)
                return
            name = names[step]
            turns = chosen[name]
            for value in rng.sample(turns, len(turns)) if rng else turns:
                config[name] = value
                yield from extend(step + 1)

        return extend(0)

    def draw(self, rng: random.Random) -> dict[str, Value] | None:
        """One point of the product, each as likely; None if it is no member."""
        config: dict[str, Value] = {}
        if not self._accepts(config, 0):
            return None
        for step, (name, values) in enumerate(self.values.items(), 1):
            if not values:
                return None
            config[name] = rng.choice(values)
            if not self._accepts(config, step):
                return None
        return config

    def member(self, config: Mapping[str, Value]) -> dict[str, Value] | None:
        """The member with these values of the free parameters, if it is one."""
        fixed = {name: (config[name],) for name in self.values}
        return next(self.walk(fixed), None)

    def count(self) -> int:
        """How many members there are: parameters that no constraint reads multiply."""
        read = {name for c in self.constraints for name in c.reads}
        for parameter in reversed(self.derived):
            if parameter.name in read:
                read.update(parameter.reads)
        free = {name: v for name, v in self.values.items() if name not in read}
        if not all(free.values()):
            return 0
        one_each = {name: values[:1] for name, values in free.items()}
        others = sum(1 for _ in self.walk(self.values | one_each))
        return others * math.prod(len(values) for values in free.values())

    def _accepts(self, config: dict[str, Value], step: int) -> bool:
        """Fill in what follows from the step's choice, and check it."""
        for parameter in self._derived[step]:
            config[parameter.name] = parameter.value_for(
                config, self.problem, self.device
            )
        return all(
            c.check(config, self.problem, self.device) for c in self._constraints[step]
        )


def _distinct(name: str, values: object) -> tuple[Value, ...]:
    expected = "a sequence of different numbers, strings, bools or None"
    remedy = "list each value once, or pass a function of (problem, device)"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise bad_argument(f"values of {name}", expected, repr(values), remedy)
    found = tuple(values)
    plain = all(isinstance(value, Value) for value in found)
    if not plain or len(set(found)) < len(found):
        raise bad_argument(f"values of {name}", expected, found, remedy)
    return found


def _check_platforms(name: str, platforms: object) -> None:
    known = ", ".join(PLATFORMS)
    if not isinstance(platforms, tuple) or not set(platforms) <= set(PLATFORMS):
        raise bad_argument(
            f"platforms of {name}", f"a tuple of {known}", repr(platforms), "correct it"
        )


def _check_names(name: str, names: object) -> None:
    if not isinstance(names, tuple):
        raise bad_argument(
            name, "a tuple of parameter names", repr(names), "add a comma: ('NAME',)"
        )
