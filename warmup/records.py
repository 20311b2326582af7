# SPDX-License-Identifier: Apache-2.0
"""Tuning records: what was measured, for which shapes, with what code, on which GPU.

Records are data. Reading one builds a `KernelConfig` from numbers and strings and
evaluates nothing.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from portable_backend.errors import RecordError
from portable_backend.kernels.config import KernelConfig

SCHEMA = 1
FieldValue = int | str
# What grows with the traffic: a neighbour may stand in. All other fields shape the code
# that is compiled or the data's layout, and must match.
SIZE_FIELDS = frozenset(
    {
        "num_tokens",
        "num_seqs",
        "query_len",
        "context_len",
        "seq_len",
        "num_rows",
    }
)
# Above this a time is a mistake in the unit or a hang: 100 seconds for one launch.
MAX_TIME_US = 1e8


@dataclass(frozen=True, init=False)
class TuningKey:
    """What a config was tuned for: a kernel and the shapes it was given.

    Attributes:
        kernel: name of the kernel.
        fields: (name, value), sorted by name.
    """

    kernel: str
    fields: tuple[tuple[str, FieldValue], ...]
    _hash: int = field(repr=False, compare=False)

    def __init__(self, kernel: str, fields: Iterable[tuple[str, FieldValue]]) -> None:
        pairs = []
        for name, value in sorted(fields):
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"a field's name must be an identifier, got {name!r}")
            if not isinstance(value, int | str):
                raise ValueError(
                    f"key field {name} must be an integer or a string, got {value!r}"
                )
            if name in SIZE_FIELDS and (isinstance(value, str) or value < 0):
                raise ValueError(
                    f"key field {name} must be a size, 0 or more, got {value!r}"
                )
            pairs.append((name, int(value) if isinstance(value, bool) else value))
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a key's fields must differ in name")
        object.__setattr__(self, "kernel", _checked_name("kernel", kernel))
        object.__setattr__(self, "fields", tuple(pairs))
        # Serving looks keys up on every step.
        object.__setattr__(self, "_hash", hash((kernel, self.fields)))

    @classmethod
    def of(cls, kernel: str, /, **fields: FieldValue) -> "TuningKey":
        return cls(kernel, fields.items())

    @classmethod
    def from_dict(cls, kernel: str, fields: Mapping[str, FieldValue]) -> "TuningKey":
        return cls(kernel, fields.items())

    def to_dict(self) -> dict[str, FieldValue]:
        return dict(self.fields)

    @functools.cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The fields for which a neighbour may stand in."""
        return tuple(
            (name, value)
            for name, value in self.fields
            if name in SIZE_FIELDS and isinstance(value, int)
        )

    @functools.cached_property
    def structure(self) -> tuple[tuple[str, FieldValue], ...]:
        """The fields that must match, and the names of those that need not."""
        return tuple((n, "" if n in SIZE_FIELDS else v) for n, v in self.fields)

    def distance(self, other: "TuningKey") -> float:
        """How far sizes are apart, in factors of two; infinite if the rest differs."""
        if self.kernel != other.kernel or self.structure != other.structure:
            return math.inf
        pairs = zip(self.sizes, other.sizes, strict=True)
        return sum(_factors_of_two(own, theirs) for (_, own), (_, theirs) in pairs)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # String hashes differ between processes: the stored one must not travel.
        return TuningKey, (self.kernel, self.fields)

    def __str__(self) -> str:
        shape = " ".join(f"{name}={value}" for name, value in self.fields)
        return f"{self.kernel}[{shape}]"


@dataclass(frozen=True, eq=False)
class TuningRecord:
    """One measured config, with all that is needed to judge whether it applies.

    Attributes:
        key: what it was measured for.
        config: the launch parameters.
        gpu: canonical device name, "nvidia_h200".
        arch: "sm90", "gfx942".
        time_us: median time of one launch; None where nobody has measured it.
        default_us: the default config's, measured beside it; None: unknown.
        error_ratio: our error against the fp32 oracle over torch's; None: unknown.
        kernel_digest: `kernel_digest()` of the code that was measured.
        toolchain: versions, such as {"triton": "3.6.0", "hip": None}.
        verified: the output matched the oracle on the GPU that was measured.
        measured: ISO date.
        trials: configs that were tried for this key.
        unmeasured: why the config is thought good although nobody has measured it;
            None: it was measured. Of `basis`, "sweeps" of other GPUs or "resources"
            alone, `fitted_on`, these GPUs' names, `num_units` of this one, and
            `serves`, whether that is enough to take the default's place.
        refuted: what was wrong when it was verified; None: nothing. Such a record never
            serves, and keeps others of the same `claim` from serving.
        extra: fields that this version does not know, kept as they are.
    """

    key: TuningKey
    config: KernelConfig
    gpu: str
    arch: str
    time_us: float | None
    kernel_digest: str
    toolchain: Mapping[str, str | None] = field(default_factory=dict)
    default_us: float | None = None
    error_ratio: float | None = None
    verified: bool = False
    measured: str | None = None
    trials: int | None = None
    unmeasured: Mapping[str, Any] | None = None
    refuted: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gpu", "arch"):
            _checked_name(name, getattr(self, name))
        for name, check, expected in _CHECKS:
            if not check(getattr(self, name)):
                raise RecordError(
                    f"{name} must be {expected}, got {_given(self, name)}"
                )
        if (self.time_us is None) != (self.unmeasured is not None):
            raise RecordError(
                f"time_us must be {_MICROSECONDS}, or null in an entry that says "
                f"unmeasured, got {_given(self, 'time_us')}"
            )
        if self.unmeasured is not None and self.verified:
            raise RecordError("verified must be false where unmeasured is given")
        if self.refuted is not None and self.verified:
            raise RecordError("verified must be false where refuted is given")

    def to_dict(self) -> dict[str, Any]:
        """The entry as stored: all but kernel, gpu and arch, which the header holds."""
        told = {"unmeasured": self.unmeasured, "refuted": self.refuted}
        return {
            **self.extra,
            **{name: value for name, value in told.items() if value is not None},
            "key": self.key.to_dict(),
            "config": self.config.to_dict(),
            "time_us": self.time_us,
            "default_us": self.default_us,
            "error_ratio": self.error_ratio,
            "verified": self.verified,
            "measured": self.measured,
            "trials": self.trials,
            "kernel_digest": self.kernel_digest,
            "toolchain": dict(sorted(self.toolchain.items())),
        }

    def to_line(self) -> str:
        """The record on one line, header included, as a journal stores it."""
        header = {
            "schema": SCHEMA,
            "kernel": self.key.kernel,
            "gpu": self.gpu,
            "arch": self.arch,
        }
        return json.dumps(header | self.to_dict(), sort_keys=True, allow_nan=False)

    @functools.cached_property
    def content(self) -> str:
        """Canonical text: equal records have equal content, and it orders them."""
        numbers = {
            name: None if value is None else float(value)
            for name in ("time_us", "default_us", "error_ratio")
            for value in [getattr(self, name)]
        }
        place = {"kernel": self.key.kernel, "gpu": self.gpu, "arch": self.arch}
        return json.dumps(self.to_dict() | numbers | place, sort_keys=True)

    @functools.cached_property
    def environment(self) -> tuple[Any, ...]:
        """What the time depends on beside the key; records compete within one."""
        toolchain = tuple(sorted(self.toolchain.items()))
        return self.gpu, self.arch, self.kernel_digest, toolchain

    @functools.cached_property
    def claim(self) -> tuple[Any, ...]:
        """What a refutation is about: this config, in this code, for this key and GPU.

        Another toolchain does not make it right.
        """
        return self.key, self.gpu, self.kernel_digest, self.config

    @functools.cached_property
    def rank(self) -> tuple[bool, float, str]:
        """Total order, best first: verified, then fast, then any fixed order."""
        time_us = math.inf if self.time_us is None else float(self.time_us)
        return not self.verified, time_us, self.content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TuningRecord) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


def record_from_dict(
    entry: Any, defaults: Mapping[str, Any], where: str
) -> TuningRecord:
    """Build a record from a stored entry.

    Args:
        entry: the entry, of any type: it comes from a file.
        defaults: the header; stands in for what the entry lacks.
        where: file and entry, for messages.

    Raises:
        RecordError: names file, entry and field, what it may be and what it is.
    """
    if not isinstance(entry, dict):
        raise RecordError(f"{where}: an entry must be an object, got {short(entry)}")
    both = {name: defaults[name] for name in HEADER_FIELDS if name in defaults} | entry
    for name in ("key", "config"):
        if not isinstance(both.get(name), dict) or not both[name]:
            raise RecordError(
                f"{where}: {name} must be an object with at least one field, "
                f"got {short(both.get(name))}"
            )
    for name in _REQUIRED:
        if name not in both:
            raise RecordError(f"{where}: {name} must be given, got nothing")
    for name in ("kernel", "gpu"):
        if both[name] != defaults.get(name, both[name]):
            raise RecordError(
                f"{where}: {name} must be {short(defaults[name])} as in the header, "
                f"got {short(both[name])}"
            )
    # Tables from before `verified`: an error was measured, and passed, or is unknown.
    both.setdefault("verified", both.get("error_ratio") is not None)
    names = [n for n in TuningRecord.__dataclass_fields__ if n not in ("key", "config")]
    known = {name: both[name] for name in names if name in both and name != "extra"}
    extra = {n: v for n, v in entry.items() if n not in known and n not in _PLACE}
    try:
        key = TuningKey.from_dict(both["kernel"], both["key"])
        config = KernelConfig.from_dict(both["config"])
        return TuningRecord(key=key, config=config, extra=extra, **known)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{where}: {error}") from None


def _factors_of_two(one: int, other: int) -> float:
    # From 0 to 1 counts like a doubling.
    return abs(math.log2(max(one, 0.5)) - math.log2(max(other, 0.5)))


def short(value: object) -> str:
    """`value` for a message; what comes from a file can be of any length."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _given(record: TuningRecord, name: str) -> str:
    return short(getattr(record, name))


def _checked_name(field_name: str, value: Any) -> str:
    # Also the name of a file or folder.
    fits = isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
    if not fits or value.startswith(".") or value.endswith(".portfolio"):
        raise RecordError(
            f"{field_name} must be a name that does not begin with a dot, "
            f"got {short(value)}"
        )
    return str(value)


def _is_number(value: Any, low: float, high: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high


def _is_time(value: Any) -> bool:
    return _is_number(value, math.ulp(0.0), MAX_TIME_US)


def _is_ratio(value: Any) -> bool:
    return value is None or _is_number(value, 0, 1e300)


def is_date(value: Any) -> bool:
    """Whether a stored value is an ISO date, or none is given."""
    if value is None:
        return True
    try:
        return isinstance(value, str) and bool(date.fromisoformat(value))
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_toolchain(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(version, str | None)
        for name, version in value.items()
    )


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value is None or (is_whole and value >= 0)


def _is_unmeasured(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    fitted_on, units = value.get("fitted_on"), value.get("num_units")
    return (
        value.get("basis") in ("sweeps", "resources")
        and isinstance(fitted_on, list | tuple)
        and all(isinstance(name, str) for name in fitted_on)
        and isinstance(units, int)
        and units > 0
        and isinstance(value.get("serves"), bool)
    )


_UNMEASURED = "basis, fitted_on, num_units and serves"
_MICROSECONDS = f"microseconds above 0 and at most {MAX_TIME_US:.0f}"
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("time_us", lambda v: v is None or _is_time(v), _MICROSECONDS),
    ("default_us", lambda v: v is None or _is_time(v), f"null or {_MICROSECONDS}"),
    ("error_ratio", _is_ratio, "null or a number, 0 or more"),
    ("verified", lambda v: isinstance(v, bool), "true or false"),
    ("measured", is_date, "null or an ISO date"),
    ("trials", _is_count, "null or a count"),
    ("unmeasured", _is_unmeasured, f"null or an object of {_UNMEASURED}"),
    ("refuted", lambda v: v is None or _is_text(v), "null or a reason"),
    ("toolchain", _is_toolchain, "an object of version strings"),
    ("kernel_digest", lambda v: isinstance(v, str) and v != "", "a digest"),
)
_PLACE = frozenset({"schema", "kernel", "gpu", "arch", "key", "config"})
HEADER_FIELDS = ("kernel", "gpu", "arch", "kernel_digest", "toolchain")
_REQUIRED = (*HEADER_FIELDS, "time_us")
