# SPDX-License-Identifier: Apache-2.0
"""The files that records are kept in, as text, and the rule by which they merge.

A table is one JSON object per kernel and GPU: a header, the records that are served, a
history of those that lost, and what was refuted. A journal is one record a line, each
with its header.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from portable_backend.errors import RecordError
from portable_backend.warmup.records import (
    SCHEMA,
    TuningRecord,
    record_from_dict,
    short,
)

logger = logging.getLogger("vllm.portable_backend.records")
# Losers kept per key and environment: enough to see what was tried, and bounded.
HISTORY_LIMIT = 8


class NewerSchemaError(RecordError):
    """The file was written by a later version; it is neither used nor overwritten."""


@dataclass(frozen=True)
class Merged:
    """Outcome of a merge, each part in fixed order.

    Attributes:
        served: the winner for each key and environment.
        history: the losers, at most `HISTORY_LIMIT` for each.
        refuted: one record for each claim that was refuted.
    """

    served: tuple[TuningRecord, ...]
    history: tuple[TuningRecord, ...]
    refuted: tuple[TuningRecord, ...] = ()

    @property
    def all(self) -> tuple[TuningRecord, ...]:
        return self.served + self.history + self.refuted


@dataclass(frozen=True)
class Table:
    """A table as read: what could be used, and why the rest could not."""

    kernel: str
    gpu: str
    records: tuple[TuningRecord, ...]
    problems: tuple[str, ...]


def merge_records(*groups: Iterable[TuningRecord]) -> Merged:
    """Merge records by the conflict rule; a pure function.

    Within a key and an environment verified beats unverified, then the better time
    wins, then a fixed order of the content. This is the union of sets under a total
    order, of which a fixed number is kept, so it does not matter in which order or how
    often records are merged. What is refuted stays in the history, and never serves:
    if it went, others that another order would drop could stay in its place.
    """
    rivals: dict[tuple[Any, ...], set[TuningRecord]] = {}
    refuted: dict[tuple[Any, ...], TuningRecord] = {}
    for group in groups:
        for record in group:
            if record.refuted is None:
                rivals.setdefault((record.key, record.environment), set()).add(record)
                continue
            held = refuted.setdefault(record.claim, record)
            refuted[record.claim] = min(held, record, key=lambda r: r.content)
    served, history = [], []
    for records in rivals.values():
        kept = sorted(records, key=lambda record: record.rank)[: HISTORY_LIMIT + 1]
        best = next((r for r in kept if r.claim not in refuted), None)
        served += [] if best is None else [best]
        history += [record for record in kept if record is not best]
    parts = (served, history, refuted.values())
    return Merged(*(tuple(sorted(part, key=_place)) for part in parts))


def _place(record: TuningRecord) -> tuple[Any, ...]:
    fields = [(name, isinstance(v, str), v) for name, v in record.key.fields]
    return record.gpu, record.key.kernel, fields, record.rank


def parse_json(data: bytes, where: str) -> Any:
    """Read JSON from a file that may hold anything.

    Raises:
        RecordError: it is not UTF-8 or not JSON, or holds NaN or an infinity.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{where}: not JSON: {error}; it must be, in UTF-8, got {short(data[:20])}"
        ) from None


def check_schema(header: Mapping[str, Any], where: str) -> None:
    """Raise RecordError unless this version can read the file's schema."""
    schema = header.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RecordError(f"{where}: schema must be {SCHEMA}, got {short(schema)}")
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"{where}: schema must be {SCHEMA}, got {schema}; "
            "a later version of portable-backend wrote it"
        )
    if schema < SCHEMA:
        raise RecordError(f"{where}: schema must be {SCHEMA}, got {schema}")


def parse_object(data: bytes, where: str, kernel: str, gpu: str) -> dict[str, Any]:
    """The object that a file holds, if it is for this kernel and GPU.

    Raises:
        RecordError: it is something else, or of another place or a newer schema.
    """
    held = parse_json(data, where)
    if not isinstance(held, dict):
        raise RecordError(f"{where}: must hold an object, got {short(held)}")
    check_schema(held, where)
    for name, expected in (("kernel", kernel), ("gpu", gpu)):
        if held.get(name) != expected:
            raise RecordError(
                f"{where}: {name} must be {expected!r}, as its place says, "
                f"got {short(held.get(name))}"
            )
    return held


def parse_table(data: bytes, where: str, kernel: str, gpu: str) -> Table:
    """Read a table.

    Args:
        data: the file's content.
        where: names the file in messages.
        kernel, gpu: what the file's place says it is for.

    Raises:
        RecordError: no record in it can be used. Entries that cannot be used on their
            own are listed in the result's `problems`.
    """
    header = parse_object(data, where, kernel, gpu)
    records, problems = [], []
    for part in ("records", "history", "refuted"):
        entries = header.get(part, None if part == "records" else [])
        if not isinstance(entries, list):
            raise RecordError(f"{where}: {part} must be a list, got {short(entries)}")
        for number, entry in enumerate(entries, 1):
            try:
                place = f"{where}, {part} entry {number}"
                records.append(record_from_dict(entry, header, place))
            except RecordError as error:
                problems.append(str(error))
    _note_extra(records, where)
    return Table(kernel, gpu, tuple(records), tuple(problems))


def parse_line(line: bytes, where: str, kernel: str, gpu: str) -> TuningRecord:
    """Read one line of a journal; raises RecordError."""
    entry = parse_json(line, where)
    if not isinstance(entry, dict):
        raise RecordError(f"{where}: must hold an object, got {short(entry)}")
    check_schema(entry, where)
    for name in ("kernel", "gpu"):
        if name not in entry:
            raise RecordError(f"{where}: {name} must be given, got nothing")
    return record_from_dict(entry, {"kernel": kernel, "gpu": gpu}, where)


def _note_extra(records: Iterable[TuningRecord], where: str) -> None:
    unknown = sorted({name for record in records for name in record.extra})
    if unknown:
        logger.debug("%s: fields kept but not known: %s", where, ", ".join(unknown))


def format_table(kernel: str, gpu: str, merged: Merged) -> str:
    """The table as text: sorted, an entry on few lines, so that diffs read well."""
    everything = merged.all
    # The header's is only a default: an entry of another says so itself.
    arch = min((record.arch for record in everything), default="")
    header = {"schema": SCHEMA, "kernel": kernel, "gpu": gpu, "arch": arch}
    parts = [json.dumps(header)[:-1]]
    named = {"records": merged.served, "history": merged.history}
    if merged.refuted:
        named["refuted"] = merged.refuted
    for name, records in named.items():
        entries = [_format_entry(record, arch) for record in records]
        parts.append(f'"{name}": [\n' + ",\n".join(entries) + "\n]")
    return ",\n ".join(parts) + "}\n"


def _format_entry(record: TuningRecord, arch: str) -> str:
    entry = record.to_dict()
    if record.arch != arch:
        entry["arch"] = record.arch
    lines = [{name: entry.pop(name)} for name in ("key", "config", "kernel_digest")]
    lines += [{"toolchain": entry.pop("toolchain")}, entry]
    texts = [json.dumps(line, sort_keys=True, allow_nan=False) for line in lines]
    return "  {" + ",\n   ".join(text[1:-1] for text in texts) + "}"
