# SPDX-License-Identifier: Apache-2.0
"""Launch parameters as plain data, and the spaces they are chosen from.

A `KernelConfig` says how one kernel is compiled and tiled. It never changes what is
computed, only how fast, so any config may serve any input its limits allow. Which
configs are worth trying, and why no others, a `ConfigSpace` says.
"""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels._cover import combinations, covering
from portable_backend.kernels._space import (
    Constraint,
    Derived,
    Grid,
    P,
    Parameter,
    Value,
)

__all__ = [
    "PLATFORM_OPTIONS",
    "AttentionConfig",
    "ConfigSpace",
    "Constraint",
    "Derived",
    "KernelConfig",
    "Parameter",
    "Value",
    "combinations",
]

# Options that only one platform's compiler knows; the other drops them.
PLATFORM_OPTIONS = {
    "cuda": frozenset({"maxnreg", "launch_pdl"}),
    "hip": frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"}),
    "interpreter": frozenset(),
}
_COMMON_OPTIONS = frozenset({"num_warps", "num_stages"})


@dataclass(frozen=True)
class KernelConfig(Mapping[str, Value]):
    """Immutable mapping of launch parameters, hashable, in fixed order.

    Upper-case names are compile-time constants of the kernel (`BLOCK_N`); lower-case
    names are compiler options (`num_warps`).
    """

    items_: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, **params: Value) -> "KernelConfig":
        return cls.from_dict(params)

    @classmethod
    def from_dict(cls, params: Mapping[str, Value]) -> "KernelConfig":
        """Build from a flat mapping, as a tuning record stores it.

        Raises:
            ValueError: a name is neither upper case nor a known compiler option, or
                a value is not a plain number, string or bool.
        """
        known = _COMMON_OPTIONS.union(*PLATFORM_OPTIONS.values())
        for name, value in params.items():
            if not name.isupper() and name not in known:
                raise ValueError(
                    f"config parameter {name} is neither a kernel constant (upper "
                    f"case) nor one of the compiler options {', '.join(sorted(known))}"
                )
            if not isinstance(value, int | bool | str | None):
                raise ValueError(
                    f"config parameter {name} must be an int, bool, str or None, "
                    f"got {value!r}"
                )
        return cls(tuple(sorted(params.items())))

    def to_dict(self) -> dict[str, Value]:
        return dict(self.items_)

    def replace(self, **params: Value) -> "KernelConfig":
        return self.from_dict(self.to_dict() | params)

    def options(self, platform: str) -> dict[str, Any]:
        """Compiler options that `platform` ("cuda", "hip", "interpreter") knows."""
        if platform == "interpreter":
            return {}
        allowed = _COMMON_OPTIONS | PLATFORM_OPTIONS[platform]
        return {k: v for k, v in self.items_ if k in allowed and v is not None}

    def __getitem__(self, name: str) -> Any:
        for key, value in self.items_:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (k for k, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)


@dataclass(frozen=True)
class AttentionConfig:
    """One config for each kernel that `paged_attention` can launch."""

    prefill: KernelConfig
    decode: KernelConfig
    merge: KernelConfig

    def to_dict(self) -> dict[str, dict[str, Value]]:
        return {
            "prefill": self.prefill.to_dict(),
            "decode": self.decode.to_dict(),
            "merge": self.merge.to_dict(),
        }

    @classmethod
    def from_dict(cls, params: Mapping[str, Mapping[str, Value]]) -> "AttentionConfig":
        return cls(*(KernelConfig.from_dict(params[k]) for k in cls.__annotations__))


# Spaces with a larger product are sampled without listing them; smaller ones, too,
# where listing a hundred points for each config asked for would not reach the end.
_LISTED = 50_000
# So many draws in vain, one after the other, and members are too rare for drawing.
_VAIN_DRAWS = 2_000
# Most members that are listed for a cover, which takes some seconds.
_COVERED = 200_000


@dataclass(frozen=True)
class ConfigSpace(Generic[P]):
    """The configs a kernel may run with, as data: no GPU is asked and nothing runs.

    Members have a value for each parameter of the device's platform, and keep every
    constraint. `problem` is whatever the parameters' and constraints' functions expect.
    Spaces, whose functions have a name of their own in a module, can be pickled.

    Attributes:
        name: of the kernel.
        parameters: those chosen freely, in the order of listing.
        constraints: what members must keep.
        derived: parameters that follow from others.
    """

    name: str
    parameters: tuple[Parameter[P], ...]
    constraints: tuple[Constraint[P], ...] = ()
    derived: tuple[Derived[P], ...] = ()

    def __post_init__(self) -> None:
        for field in ("parameters", "constraints", "derived"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        names = [p.name for p in self.parameters] + [d.name for d in self.derived]
        KernelConfig.from_dict(dict.fromkeys(names))  # raises for a bad name
        for kind, given in (
            ("parameters", names),
            ("constraints", [c.name for c in self.constraints]),
        ):
            if len(set(given)) < len(given):
                raise bad_argument(
                    f"{kind} of space {self.name}",
                    "different in name",
                    ", ".join(given),
                    "rename or remove one",
                )
        known = [p.name for p in self.parameters]
        for derived in self.derived:
            self._check_reads(derived.name, derived.reads, known)
            known.append(derived.name)
        for constraint in self.constraints:
            self._check_reads(constraint.name, constraint.reads, known)

    def configs(self, problem: P, device: DeviceInfo) -> Iterator[KernelConfig]:
        """Every member in fixed order, the last parameter changing fastest."""
        return map(KernelConfig.from_dict, self._grid(problem, device).walk())

    def count(self, problem: P, device: DeviceInfo) -> int:
        """How many members there are.

        Lists only the parameters that constraints read; the others multiply.
        """
        return self._grid(problem, device).count()

    def sample(
        self, n: int, rng: random.Random, problem: P, device: DeviceInfo
    ) -> list[KernelConfig]:
        """`n` different members in random order; all of them if there are fewer.

        Each member is as likely, except where a large space has few members: those that
        drawing at random does not find are looked up from a random start.

        Args:
            n: how many.
            rng: makes the choice; the same seed gives the same sample.
            problem, device: what the configs are for.

        Raises:
            ValueError: n is negative.
        """
        if n < 0:
            raise bad_argument("n", "0 or more", n, "pass how many configs to draw")
        grid = self._grid(problem, device)
        few = grid.size <= min(_LISTED, 100 * n)
        found: dict[KernelConfig, None] = {}
        in_vain = 0
        while not few and len(found) < n and in_vain < _VAIN_DRAWS:
            before = len(found)
            drawn = grid.draw(rng)
            if drawn is not None:
                found[KernelConfig.from_dict(drawn)] = None
            in_vain = 0 if len(found) > before else in_vain + 1
        missing = n - len(found)
        if missing and grid.size <= _LISTED:
            rest = [c for c in self.configs(problem, device) if c not in found]
            found |= dict.fromkeys(rng.sample(rest, min(missing, len(rest))))
        elif missing:
            for member in grid.walk(rng=rng):
                found[KernelConfig.from_dict(member)] = None
                if len(found) == n:
                    break
        return list(found)

    def cover(
        self,
        strength: int,
        rng: random.Random,
        problem: P,
        device: DeviceInfo,
        *,
        ignore: Collection[str] = (),
    ) -> list[KernelConfig]:
        """A few members that have every combination of values that any member has.

        With strength 2, a covering array: for each pair of parameters, all pairs of
        values that occur together in the space do so in the cover. It is small, not the
        smallest. `combinations` lists what is covered.

        Args:
            strength: parameters to a combination, 1 to 3.
            rng: picks among equals; the same seed gives the same cover.
            problem, device: what the configs are for.
            ignore: parameters whose values need no cover, such as those that no binary
                depends on. The configs have some value for them.

        Raises:
            ValueError: strength is out of range, ignore names no parameter, or the
                space has more than 200 000 members, all of which are listed.
        """
        if strength not in (1, 2, 3):
            raise bad_argument("strength", "1, 2 or 3", strength, "2 covers pairs")
        grid = self._grid(problem, device)
        known = [p.name for p in self.parameters] + [d.name for d in self.derived]
        for name in ignore:
            if name not in known:
                raise bad_argument(
                    "ignore", f"among {', '.join(known)}", name, "correct the name"
                )
        members = list(itertools.islice(grid.walk(), _COVERED + 1))
        if len(members) > _COVERED:
            raise bad_argument(
                f"space {self.name}",
                f"of at most {_COVERED} members",
                "more",
                "bound it, or use sample()",
            )
        found = covering(members, strength, rng, ignore)
        return [KernelConfig.from_dict(member) for member in found]

    def neighbours(
        self, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> list[KernelConfig]:
        """Members that differ in one free parameter, and in what follows from it.

        A number moves to the one before or after it in its list, anything else to any
        other value.

        Raises:
            ValueError: config is not in the space.
        """
        self._require("config", config, problem, device)
        grid = self._grid(problem, device)
        found = []
        for name, values in grid.values.items():
            for value in _adjacent(config[name], values):
                member = grid.member({**config, name: value})
                if member is not None:
                    found.append(KernelConfig.from_dict(member))
        return found

    def mutate(
        self,
        config: Mapping[str, Value],
        rng: random.Random,
        problem: P,
        device: DeviceInfo,
    ) -> KernelConfig:
        """A member near `config`: one parameter, picked at random, has another value.

        Where no single change leads to a member, any other member; the config itself if
        there is none.

        Raises:
            ValueError: config is not in the space.
        """
        self._require("config", config, problem, device)
        grid = self._grid(problem, device)
        for name in rng.sample(list(grid.values), len(grid.values)):
            others = [v for v in grid.values[name] if v != config[name]]
            for value in rng.sample(others, len(others)):
                member = grid.member({**config, name: value})
                if member is not None:
                    return KernelConfig.from_dict(member)
        given = KernelConfig.from_dict(config)
        drawn = self.sample(2, rng, problem, device)
        return next((other for other in drawn if other != given), given)

    def crossover(
        self,
        a: Mapping[str, Value],
        b: Mapping[str, Value],
        rng: random.Random,
        problem: P,
        device: DeviceInfo,
    ) -> KernelConfig:
        """A member each of whose free parameters is as in `a` or as in `b`.

        Raises:
            ValueError: a or b is not in the space.
        """
        self._require("a", a, problem, device)
        self._require("b", b, problem, device)
        grid = self._grid(problem, device)
        either = {name: tuple({a[name]: 0, b[name]: 0}) for name in grid.values}
        return KernelConfig.from_dict(next(grid.walk(either, rng)))

    def contains(
        self, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> bool:
        """Whether config is a member."""
        return not self.why_not(config, problem, device)

    def why_not(
        self, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> list[str]:
        """All reasons why config is no member; empty if it is one.

        Constraints that read a parameter with a reason of its own are left out.
        """
        grid = self._grid(problem, device)
        reasons, wrong = [], set()
        names = {**grid.values, **{d.name: () for d in grid.derived}}
        for name in config:
            if name not in names:
                reasons.append(self._unknown(name, list(names), device.platform))
        given = {name: config[name] for name in config if name in names}
        for parameter in self.parameters:
            name = parameter.name
            if name not in grid.values:
                continue
            listed = f"one of {_listed(grid.values[name])}"
            if name not in given:
                reasons.append(f"{name} is missing: {listed}")
                wrong.add(name)
            elif given[name] not in grid.values[name]:
                statement = f"{name} is {given[name]!r}, not {listed}"
                reasons.append(_because(statement, parameter.about))
                wrong.add(name)
        for derived in grid.derived:
            name = derived.name
            if wrong & set(derived.reads):
                wrong.add(name)
                continue
            due = derived.value_for(given, problem, device)
            if name not in given or given[name] != due:
                found = repr(given[name]) if name in given else "missing"
                statement = f"{name} is {found}, not {due!r}"
                reasons.append(_because(statement, derived.reason))
                wrong.add(name)
        for constraint in self.constraints:
            if wrong & set(constraint.reads):
                continue
            if not constraint.check(given, problem, device):
                reasons.append(f"{constraint.name}: {constraint.reason}")
        return reasons

    def _check_reads(self, name: str, reads: tuple[str, ...], known: list[str]) -> None:
        for read in reads:
            if read not in known:
                raise bad_argument(
                    f"reads of {name}",
                    f"among {', '.join(known)}",
                    read,
                    "correct the name, or list what it reads first",
                )

    def _unknown(self, name: str, names: list[str], platform: str) -> str:
        elsewhere = {p.name: p.platforms for p in self.parameters}
        elsewhere |= {d.name: d.platforms for d in self.derived}
        if name in elsewhere:
            places = " and ".join(elsewhere[name])
            return f"{name} exists on {places} only, not on {platform}"
        return f"{name} is no parameter of {self.name}: it has {', '.join(names)}"

    def _require(
        self, name: str, config: Mapping[str, Value], problem: P, device: DeviceInfo
    ) -> None:
        reasons = self.why_not(config, problem, device)
        if reasons:
            raise bad_argument(
                name,
                f"in the space of {self.name}",
                f"{dict(config)} ({'; '.join(reasons)})",
                "start from a member, as sample() gives",
            )

    def _grid(self, problem: P, device: DeviceInfo) -> Grid[P]:
        return Grid(self.parameters, self.derived, self.constraints, problem, device)


def _adjacent(value: Value, values: tuple[Value, ...]) -> list[Value]:
    ordered = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if not ordered:
        return [v for v in values if v != value]
    at = values.index(value)
    return [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]


def _listed(values: tuple[Value, ...]) -> str:
    return ", ".join(map(repr, values)) or "no values at all"


def _because(statement: str, reason: str) -> str:
    return f"{statement}: {reason}" if reason else statement
