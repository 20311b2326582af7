# SPDX-License-Identifier: Apache-2.0
"""What a start came to: grades, buckets, seconds and binaries, in a line and as JSON.

The file lies beside the records, one for each GPU model: the last start's.
"""

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from portable_backend.errors import RecordError
from portable_backend.warmup.layers import file_stem
from portable_backend.warmup.lookup import GRADES

logger = logging.getLogger("vllm.portable_backend.records")
SCHEMA = 1
PREFIX = "last-start."
_PHASES = ("load_s", "tune_s", "compile_s")


@dataclass(frozen=True)
class StartupReport:
    """One engine's start.

    Attributes:
        gpu, arch: what it runs on.
        mode: PORTABLE_BACKEND_TUNE.
        buckets: keys that the engine's steps can fall into.
        grades: by kernel, how many of them got which grade.
        binaries: compiled kernels that serving can launch, those that are ready.
        compiled: those of them that no cache had.
        load_s, tune_s, compile_s: seconds that the start took for each.
        started: ISO time.
        notes: what was let pass or went wrong, a line each.
        extra: fields that this version does not know, kept as they are.
    """

    gpu: str
    arch: str
    mode: str
    buckets: int
    grades: Mapping[str, Mapping[str, int]]
    binaries: int
    compiled: int
    load_s: float
    tune_s: float
    compile_s: float
    started: str | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """For the log at start."""
        parts = []
        for kernel, counts in sorted(self.grades.items()):
            shown = [f"{counts[grade]} {grade}" for grade in GRADES if grade in counts]
            parts.append(f"{kernel} {', '.join(shown)}")
        grades = "; ".join(parts) or "nothing looked up"
        seconds = sum(getattr(self, name) for name in _PHASES)
        present = max(0, self.binaries - self.compiled)
        choices = (
            f", choices {self.extra['choices']}" if "choices" in self.extra else ""
        )
        return (
            f"{self.binaries} kernels ready: {self.compiled} compiled, {present} were "
            f"there, in {seconds:.1f} s; grades of {self.buckets} keys: {grades}; "
            f"{self.gpu} ({self.arch}), tune={self.mode}{choices}"
        )

    def to_dict(self) -> dict[str, Any]:
        data = {"schema": SCHEMA, **asdict(self)}
        return {**data.pop("extra"), **data}


def report_path(cache_dir: Path, gpu: str) -> Path:
    """Where the report of the last start on such a GPU lies."""
    return cache_dir / f"{PREFIX}{file_stem(gpu)}.json"


def write_report(report: StartupReport, cache_dir: Path) -> Path | None:
    """Write the report; readers see the old one or the new one.

    Returns:
        Its path; None where it cannot be written, which is logged and no more.
    """
    path = report_path(cache_dir, report.gpu)
    try:
        write_json(path, report.to_dict())
    except OSError as error:
        logger.warning("%s: the start's report is not written: %s", path, error)
        return None
    return path


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file; readers see the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Engines of one host write at will: each has a file of its own to begin with.
    handle, name = tempfile.mkstemp(".tmp", path.name, path.parent)
    with contextlib.ExitStack() as on_error:
        on_error.callback(Path(name).unlink, missing_ok=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        on_error.pop_all()


def read_report(path: Path) -> StartupReport | None:
    """Read a report; None where there is none.

    Raises:
        RecordError: the file holds something else; the message names it.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        schema = held.get("schema") if isinstance(held, dict) else None
        raise RecordError(f"{path}: schema must be {SCHEMA}, got {schema!r}")
    known = {item.name for item in fields(StartupReport)} - {"extra"}
    for name, (is_right, expected) in _CHECKS.items():
        if not is_right(held.get(name)):
            found = repr(held.get(name, "nothing"))[:80]
            raise RecordError(f"{path}: {name} must be {expected}, got {found}")
    given = {name: held[name] for name in known & held.keys()}
    given["notes"] = tuple(held.get("notes") or ())
    extra = {n: v for n, v in held.items() if n not in known and n != "schema"}
    return StartupReport(**given, extra=extra)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _is_grades(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(counts, dict) and all(_is_count(n) for n in counts.values())
        for counts in value.values()
    )


def _is_notes(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(x, str) for x in value)
    )


_CHECKS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("gpu", "arch", "mode"), (lambda x: isinstance(x, str) and x, "a name")
    ),
    **dict.fromkeys(("buckets", "binaries", "compiled"), (_is_count, "a count")),
    **dict.fromkeys(_PHASES, (_is_seconds, "seconds, 0 or more")),
    "grades": (_is_grades, "counts of grades by kernel"),
    "started": (lambda x: x is None or isinstance(x, str), "an ISO time or null"),
    "notes": (_is_notes, "a list of lines"),
}
