# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of folders: layers of records, Triton's cache, what is tuned."""

import functools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from portable_backend.commands.doctor_probes import (
    OK,
    PROBLEM,
    WARNING,
    Examination,
    Finding,
)
from portable_backend.device import DeviceInfo, interpreting
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.digest import current_digests
from portable_backend.warmup.layers import (
    JOURNAL,
    TABLE,
    Layer,
    WritableLayer,
    why_no_folder,
)
from portable_backend.warmup.lookup import GRADES, Lookup
from portable_backend.warmup.matching import (
    Environment,
    current_toolchain,
    why_no_stand_in,
)
from portable_backend.warmup.store import SHIPPED, RecordStore
from portable_backend.warmup.tables import merge_records

# Compiled kernels of a model take a few hundred megabytes.
ENOUGH_BYTES = 1 << 30
# Grades that stand for no measurement.
UNTUNED = ("unmeasured", "default")


def caches(ex: Examination) -> Iterator[Finding]:
    """Layers of records: there, readable, writable, intact, of today's code."""
    try:
        digests: Mapping[str, str] | None = _digests()
    except Exception as error:
        # No torch, no Triton, or a broken one, which raises anything.
        digests = None
        text = f"whether records are of today's kernels is not known: {error}"
        yield Finding("caches", WARNING, text, "install what is missing")
    for layer in _store(ex).layers:
        yield from _layer(layer, digests)


def triton_cache(ex: Examination) -> Iterator[Finding]:
    folder = _triton_folder()
    data = {"path": str(folder)}
    problem = why_not_writable(folder)
    if problem is None:
        yield Finding("triton cache", OK, f"{folder} can be written", data=data)
        yield from _space("triton cache", folder)
        return
    yield Finding(
        "triton cache",
        WARNING if interpreting() else PROBLEM,
        f"{folder} cannot be written: {problem}"
        + (", which the interpreter does not need" if interpreting() else ""),
        "let TRITON_CACHE_DIR name a folder that can be written",
        data,
    )


def tuned(ex: Examination) -> Iterator[Finding]:
    """Records for this GPU, and how much of a model's work they serve."""
    units = None
    if ex.model is not None:
        from portable_backend.warmup.model_shapes import read_model
        from portable_backend.warmup.units import EngineLimits, units_of

        try:
            shape = read_model(ex.model, tensor_parallel_size=ex.tensor_parallel_size)
        except (ValueError, UnsupportedError) as error:
            yield Finding("tuned", PROBLEM, str(error), "correct --model")
            return
        if shape.head_size % 8 or not 32 <= shape.head_size <= 256:
            text = f"head size {shape.head_size} is not a multiple of 8 from 32 to 256"
            yield Finding("tuned", PROBLEM, text, "use another attention back end")
        units = units_of(shape, EngineLimits())
    if ex.gpu is None:
        count = f"; {ex.model} has {len(units)} units to tune" if units else ""
        yield Finding("tuned", OK, f"without a GPU nothing is looked up{count}")
        return
    info, store = ex.gpu.info, _store(ex)
    if units is None:
        yield _records_of(store, info)
        return
    from portable_backend.warmup.space_check import space_check

    environment = Environment(
        info.name, info.arch, _digests(), current_toolchain(), info.num_units
    )
    lookup = Lookup(
        store, environment, lambda key: KernelConfig(()), space_check=space_check(info)
    )
    grades = {unit.key: lookup.choose(unit.key).grade for unit in units}
    share = sum(u.weight for u in units if grades[u.key] not in UNTUNED)
    parts = []
    for name, counts in lookup.grade_counts().items():
        shown = [f"{counts[grade]} {grade}" for grade in GRADES if grade in counts]
        parts.append(f"{name} {', '.join(shown)}")
    is_all = all(grade == "exact" for grade in grades.values())
    yield Finding(
        "tuned",
        OK if is_all else WARNING,
        f"{share:.0%} of {ex.model}'s expected time on {info.name}: {'; '.join(parts)}",
        None if is_all else f"portable-backend tune --model {ex.model}",
        {"share": share, "grades": lookup.grade_counts()},
    )


def _records_of(store: RecordStore, info: DeviceInfo) -> Finding:
    gpu = info.name
    counts: Counter[str] = Counter()
    for kernel in store.kernels():
        records = [
            r
            for _, r in store.records(kernel)
            if r.gpu == gpu and r.time_us is not None
        ]
        counts[kernel] = len({record.key for record in records})
    shown = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    if not shown:
        text = f"nothing is tuned for {gpu}: default configs serve"
        text += _predicted(store, info)
        remedy = "portable-backend tune --model MODEL"
        return Finding("tuned", WARNING, text, remedy, {"records": {}})
    text = f"keys with a record for {gpu}: {shown}"
    return Finding("tuned", OK, text, data={"records": dict(counts)})


def _predicted(store: RecordStore, info: DeviceInfo) -> str:
    """How many predictions may serve this GPU in the defaults' place."""
    environment = Environment(info.name, info.arch, _digests(), {}, info.num_units)
    count = sum(
        why_no_stand_in(record, environment) is None
        and bool((record.unmeasured or {})["serves"])
        for kernel in store.kernels()
        for _, record in store.records(kernel)
        if record.unmeasured is not None
    )
    return f", but for {count} keys near which a prediction does" if count else ""


def _layer(layer: Layer, digests: Mapping[str, str] | None) -> Iterator[Finding]:
    name, root = layer.name, layer.root
    is_writable = isinstance(layer, WritableLayer)
    is_given = not is_writable and name != SHIPPED
    if is_given and (problem := why_no_folder(root)):
        remedy = "correct PORTABLE_BACKEND_CACHE_LAYERS, or mount the folder"
        yield Finding("caches", WARNING, f"{name}: {root} {problem}", remedy)
        return
    count, unmeasured, stale, problems = _contents(layer, digests)
    data = {"layer": name, "path": str(root), "records": count, "stale": stale}
    data["unmeasured"] = unmeasured
    held = f"{count} records, but " if count else ""
    unwritable = why_not_writable(root) if is_writable else None
    if unwritable:
        yield Finding(
            "caches",
            WARNING,
            f"{name}: {held}{root} cannot be written: {unwritable}; "
            "what is tuned is lost",
            "let PORTABLE_BACKEND_CACHE_DIR name a folder that can be written",
            data,
        )
    hidden = _unreadable(root)
    if hidden:
        more = f" (and {len(hidden) - 1} more)" if len(hidden) > 1 else ""
        text = f"{name}: {held}cannot be read: {hidden[0]}{more}"
        yield Finding("caches", WARNING, text, "correct the permissions", data)
    if not (unwritable or hidden):
        told = f", {unmeasured} of them unmeasured," if unmeasured else ""
        text = f"{name}: {count} records{told} in {root}"
        yield Finding("caches", OK, text, data=data)
    problems = [problem for problem in problems if problem not in hidden]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield Finding(
            "caches",
            WARNING,
            f"{name}: {problems[0]}{more}",
            "`portable-backend cache list` names the files; delete or restore them",
            {"problems": problems},
        )
    if stale:
        yield Finding(
            "caches",
            WARNING,
            f"{name}: {stale} of {count} records are of other kernel code and not used",
            "tune again, then `portable-backend cache prune --stale`",
        )
    if is_writable:
        yield from _space("caches", root)


def _contents(
    layer: Layer, digests: Mapping[str, str] | None
) -> tuple[int, int, int, list[str]]:
    """Records that are served, those of them that nobody has measured, those of other
    code, and what could not be read."""
    count = unmeasured = stale = 0
    problems: list[str] = []
    for kernel in layer.kernels():
        for held in layer.load(kernel):
            served = merge_records(held.records).served
            count += len(served)
            unmeasured += sum(record.unmeasured is not None for record in served)
            if digests is not None:
                wanted = digests.get(kernel)
                stale += sum(record.kernel_digest != wanted for record in served)
            problems += held.problems
    return count, unmeasured, stale, problems


def _unreadable(root: Path) -> list[str]:
    """Folders and files of records that cannot be read, and why."""
    failures: list[OSError] = []
    for folder, _, names in os.walk(root, onerror=failures.append):
        for path in (Path(folder, name) for name in names):
            # Opening anything but a file could wait.
            if path.suffix in (TABLE, JOURNAL) and path.is_file():
                try:
                    path.open("rb").close()
                except OSError as error:
                    failures.append(error)
    absent = (FileNotFoundError, NotADirectoryError)
    return [
        f"{failure.filename}: {failure.strerror}"
        for failure in failures
        if not isinstance(failure, absent)
    ]


def _space(check: str, folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if free < ENOUGH_BYTES:
        text = f"{folder} has {free / (1 << 20):.0f} MiB left"
        yield Finding(check, WARNING, text, "free at least 1 GiB", {"free_bytes": free})


def why_not_writable(folder: Path) -> str | None:
    """Why files cannot be made in a folder, or in the one it would be made in."""
    existing = _nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing}: {error.strerror or error}"


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)


def _triton_folder() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given)
    home = os.environ.get("TRITON_HOME")
    return (Path(home) if home else Path("~").expanduser()) / ".triton" / "cache"


def _store(ex: Examination) -> RecordStore:
    return RecordStore.open(ex.settings.cache_dir, ex.settings.cache_layers)


@functools.cache
def _digests() -> dict[str, Any]:
    return current_digests()
