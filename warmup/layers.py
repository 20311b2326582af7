# SPDX-License-Identifier: Apache-2.0
"""Folders of tuning records: read-only ones, and the one that is written.

A folder holds `<kernel>/<gpu>.json`, and where it is written `<gpu>.journal` beside it:
records are appended there and moved into the table when it is compacted. Nothing here
raises while an engine serves; a file that cannot be used costs one log line.
"""

import contextlib
import functools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from portable_backend.errors import RecordError
from portable_backend.warmup.record_files import (
    append_line,
    aside_of,
    content,
    write_all,
)
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.tables import (
    NewerSchemaError,
    format_table,
    merge_records,
    parse_line,
    parse_table,
)

logger = logging.getLogger("vllm.portable_backend.records")
TABLE, JOURNAL, LOCK = ".json", ".journal", ".lock"
PORTFOLIO = ".portfolio.json"
# Holding a lock takes milliseconds, or as long as a busy disk takes to sync: who waits
# this long waits for a stopped process.
LOCK_TIMEOUT_S = 30.0
Place = tuple[str, str]  # a kernel and a GPU
# What a table's records become, and what is written for a portfolio's path and content.
Change = Callable[[tuple[TuningRecord, ...]], Iterable[TuningRecord]]
FileChange = Callable[[Path, bytes | None], Sequence[tuple[Path, bytes]]]


def file_stem(name: str) -> str:
    """A kernel's or GPU's name as a file name; `unquote` undoes it."""
    return quote(name, safe="+")


def why_no_folder(path: Path) -> str | None:
    """What keeps a path from holding records; None where it is a folder."""
    if os.path.isdir(path):
        return None
    return "is no folder" if os.path.exists(path) else "does not exist"


@dataclass(frozen=True)
class LayerFile:
    """What a layer holds for one kernel and GPU, table and journal together.

    Attributes:
        records: all that could be read, served and history alike.
        problems: why the rest could not, each with the file's name.
        has_table_problems: the table itself is damaged, in part or as a whole.
        is_newer: the table is of a later schema.
        kept_lines: journal lines of a later schema.
        has_journal_problems: the journal holds lines that are no records.
    """

    kernel: str
    gpu: str
    records: tuple[TuningRecord, ...]
    problems: tuple[str, ...]
    has_table_problems: bool = False
    is_newer: bool = False
    kept_lines: tuple[bytes, ...] = ()
    has_journal_problems: bool = False


class Layer:
    """A folder of records that is only read.

    Args:
        name: for people: "user cache", "image layer 1", "shipped".
        root: the folder; it need not exist.

    Attributes:
        unreadable: why files and folders could not be read when they were last tried.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = Path(root)
        self.unreadable: dict[Path, str] = {}
        self._reported: set[Path | str] = set()
        # What files held when they were last read: who tunes reads them often.
        self._parsed: dict[tuple[str, str], tuple[tuple[bytes | None, ...], LayerFile]]
        self._parsed = {}

    def kernels(self) -> list[str]:
        return sorted(unquote(p.name) for p in self._listing(self.root) if p.is_dir())

    def gpus(self, kernel: str) -> list[str]:
        stems = set()
        for path in self._listing(self.root / file_stem(kernel)):
            if path.suffix in (TABLE, JOURNAL) and not path.name.endswith(PORTFOLIO):
                stems.add(unquote(path.stem))
        return sorted(stems)

    def load(self, kernel: str) -> list[LayerFile]:
        """Everything for one kernel, a file per GPU; logs once per damaged file."""
        return [self.load_file(kernel, gpu) for gpu in self.gpus(kernel)]

    def load_file(self, kernel: str, gpu: str) -> LayerFile:
        # Journal first: what is compacted meanwhile is then found in the table.
        journal = self._read(self.path(kernel, gpu, JOURNAL)) or b""
        contents = (journal, self._read(self.path(kernel, gpu)))
        before, held = self._parsed.get((kernel, gpu), (None, None))
        if held is None or before != contents:
            held = self._parse(kernel, gpu, *contents)
            self._parsed[kernel, gpu] = contents, held
        if tail := self._torn_tail(kernel, gpu, journal):
            path = self.path(kernel, gpu, JOURNAL)
            problem = f"{path}: the last line is torn after {len(tail)} bytes"
            self.report(path, [problem])
            held = replace(held, problems=(*held.problems, problem))
        paths = (self.path(kernel, gpu, suffix) for suffix in (JOURNAL, TABLE))
        unread = [self.unreadable[path] for path in paths if path in self.unreadable]
        return replace(held, problems=(*held.problems, *unread)) if unread else held

    def portfolios(self, kernel: str) -> list[tuple[Path, bytes]]:
        """The portfolio files for one kernel, not yet parsed."""
        paths = sorted(self._listing(self.root / file_stem(kernel)))
        found = [(p, self._read(p)) for p in paths if p.name.endswith(PORTFOLIO)]
        return [(path, data) for path, data in found if data is not None]

    def path(self, kernel: str, gpu: str, suffix: str = TABLE) -> Path:
        return self.root / file_stem(kernel) / (file_stem(gpu) + suffix)

    def report(self, path: Path, problems: Iterable[str]) -> None:
        """One log line for a file, however often it is read."""
        problems = list(problems)
        if problems and path not in self._reported:
            self._reported.add(path)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            logger.warning("%s: not used: %s%s", self.name, problems[0], more)

    def _torn_tail(self, kernel: str, gpu: str, journal: bytes) -> bytes:
        return journal.rpartition(b"\n")[2]

    def _parse(
        self, kernel: str, gpu: str, journal: bytes, table: bytes | None
    ) -> LayerFile:
        path = self.path(kernel, gpu, JOURNAL)
        records: list[TuningRecord] = []
        kept, line_problems = [], []
        for number, line in enumerate(journal.split(b"\n")[:-1], 1):
            try:
                where = f"{path}, line {number}"
                records.append(parse_line(line, where, kernel, gpu))
            except NewerSchemaError as error:
                kept.append(line)
                line_problems.append(str(error))
            except RecordError as error:
                line_problems.append(str(error))
        self.report(path, line_problems)
        path = self.path(kernel, gpu)
        table_problems: list[str] = []
        is_newer = False
        if table is not None:
            try:
                parsed = parse_table(table, str(path), kernel, gpu)
                records += parsed.records
                table_problems += parsed.problems
            except RecordError as error:
                is_newer = isinstance(error, NewerSchemaError)
                table_problems.append(str(error))
        self.report(path, table_problems)
        return LayerFile(
            kernel,
            gpu,
            merge_records(records).all,
            tuple(line_problems + table_problems),
            bool(table_problems),
            is_newer,
            tuple(kept),
            len(line_problems) > len(kept),
        )

    def _read(self, path: Path) -> bytes | None:
        """A file's content; None, with a log line, where it cannot be read."""
        self.unreadable.pop(path, None)
        try:
            return content(path)
        except OSError as error:
            self._note_unreadable(path, error)
            return None

    def _listing(self, folder: Path) -> list[Path]:
        self.unreadable.pop(folder, None)
        try:
            return sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError) as error:
            logger.debug("%s: %s", self.name, error)
        except OSError as error:
            self._note_unreadable(folder, error)
        return []

    def _note_unreadable(self, path: Path, error: OSError) -> None:
        self.unreadable[path] = f"{path}: {error.strerror or error}"
        self.report(path, [self.unreadable[path]])


class WritableLayer(Layer):
    """A folder of records that many processes may read and write at once.

    A record is appended with one write and synced under a file lock, so a process that
    is killed loses at most the record it was writing. `filelock` locks by flock, which
    ends with its holder; torch depends on it, so where there is something to tune, it
    is there.
    """

    def append(self, record: TuningRecord) -> bool:
        """Write one record; False, with one log line, where that cannot be done."""
        path = self.path(record.key.kernel, record.gpu, JOURNAL)
        try:
            with self._locked(record.key.kernel, record.gpu):
                append_line(path, record.to_line().encode() + b"\n")
        except (OSError, NotImplementedError, ImportError) as error:
            self._report_write(error)
            return False
        return True

    def compact(self, kernel: str, gpu: str) -> bool:
        """Move the journal into the table; False, with one log line, on failure."""
        try:
            if not self.path(kernel, gpu, JOURNAL).exists():
                return True
            self.rewrite(kernel, gpu, lambda records: records)
        except NewerSchemaError:
            return False  # reported when it was read; the journal goes on growing
        except (OSError, NotImplementedError, ImportError) as error:
            self._report_write(error)
            return False
        return True

    def rewrite(self, kernel: str, gpu: str, change: Change) -> None:
        """Replace a file's records; otherwise as `rewrite_all`."""
        self.rewrite_all({(kernel, gpu): change})

    def rewrite_all(
        self,
        tables: Mapping[Place, Change],
        portfolios: Mapping[Place, FileChange] | None = None,
    ) -> None:
        """Change files, all of them or none.

        Args:
            tables: what becomes of the records of table and journal.
            portfolios: what becomes of the file, whose content is None where there is
                none.

        A damaged table or journal is kept beside, with the suffix ".damaged", or
        ".2.damaged" and so on where another one is.

        Raises:
            OSError: one cannot be read, written or locked; nothing has changed then.
            NewerSchemaError: a later version wrote one; likewise.
        """
        portfolios = portfolios or {}
        with contextlib.ExitStack() as locks:
            # In order, so that nobody waits for who waits for him.
            for place in sorted({*tables, *portfolios}):
                locks.enter_context(self._locked(*place))
            files: list[tuple[Path, bytes | None]] = []
            for place, change in tables.items():
                files += self._planned(*place, change)
            for place, file_change in portfolios.items():
                path = self.path(*place, PORTFOLIO)
                files += file_change(path, content(path))
            write_all(files)

    def _planned(
        self, kernel: str, gpu: str, change: Change
    ) -> list[tuple[Path, bytes | None]]:
        """What a table's change writes; the lock is held."""
        table, journal = self.path(kernel, gpu), self.path(kernel, gpu, JOURNAL)
        lines, text = content(journal) or b"", content(table)
        held = self._parse(kernel, gpu, lines, text)
        if held.is_newer:
            raise NewerSchemaError(f"{table}: a later version wrote it")
        merged = merge_records(change(held.records))
        copies = [
            aside_of(path, data)
            for path, data, is_damaged in (
                (table, text, held.has_table_problems),
                (journal, lines, held.has_journal_problems),
            )
            if is_damaged and data is not None
        ]
        kept = b"".join(line + b"\n" for line in held.kept_lines)
        return [
            *(copy for copy in copies if copy is not None),
            (table, format_table(kernel, gpu, merged).encode()),
            (journal, kept or None),  # after the table, which holds what it held
        ]

    def merge_in(
        self,
        records: Iterable[TuningRecord],
        portfolios: Mapping[Place, FileChange] | None = None,
    ) -> int:
        """Merge records by the conflict rule; returns how many tables changed.

        Args:
            records: of any kernels and GPUs.
            portfolios: as for `rewrite_all`.

        Raises:
            OSError, NewerSchemaError: as `rewrite_all`.
        """
        by_file: dict[Place, list[TuningRecord]] = {}
        for record in records:
            by_file.setdefault((record.key.kernel, record.gpu), []).append(record)
        changes = {
            place: functools.partial(operator.add, tuple(group))
            for place, group in sorted(by_file.items())
        }
        self.rewrite_all(changes, portfolios)
        return len(by_file)

    def write_file(self, kernel: str, gpu: str, suffix: str, data: bytes) -> None:
        """Replace a file other than a table, such as a portfolio."""
        with self._locked(kernel, gpu):
            write_all([(self.path(kernel, gpu, suffix), data)])

    def delete_file(self, kernel: str, gpu: str, suffix: str = TABLE) -> None:
        """Delete a table or another file; what the journal holds stays."""
        with self._locked(kernel, gpu):
            self.path(kernel, gpu, suffix).unlink(missing_ok=True)

    def _torn_tail(self, kernel: str, gpu: str, journal: bytes) -> bytes:
        """Torn, or still being written? Once the lock is free it is known."""
        tail = super()._torn_tail(kernel, gpu, journal)
        if tail:
            with contextlib.suppress(OSError, NotImplementedError, ImportError):
                with self._locked(kernel, gpu):
                    journal = content(self.path(kernel, gpu, JOURNAL)) or b""
                return super()._torn_tail(kernel, gpu, journal)
        return tail

    def _report_write(self, error: Exception) -> None:
        if "write" not in self._reported:
            self._reported.add("write")
            logger.warning(
                "%s: records are kept in this process only: %s: %s",
                self.name,
                self.root,
                error,
            )

    @contextlib.contextmanager
    def _locked(self, kernel: str, gpu: str) -> Iterator[None]:
        from filelock import UnixFileLock

        path = self.path(kernel, gpu, LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        with UnixFileLock(path, timeout=LOCK_TIMEOUT_S, poll_interval=0.002):
            yield
