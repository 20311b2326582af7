# SPDX-License-Identifier: Apache-2.0
"""Folders of tuning records: read-only ones, and the one that is written.

A folder holds `<kernel>/<gpu>.json`, and where it is written `<gpu>.journal` beside it:
records are appended there and moved into the table when it is compacted. Nothing here
raises while an engine serves; a file that cannot be used costs one log line.
"""

import contextlib
import errno
import functools
import itertools
import logging
import operator
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from portable_backend.errors import RecordError
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
PORTFOLIO, DAMAGED = ".portfolio.json", ".damaged"
# Holding a lock takes milliseconds, or as long as a busy disk takes to sync: who waits
# this long waits for a stopped process.
LOCK_TIMEOUT_S = 30.0
MAX_FILE_BYTES = 1 << 28


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
            return _content(path)
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
                _append(path, record.to_line().encode() + b"\n")
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

    def rewrite(
        self,
        kernel: str,
        gpu: str,
        change: Callable[[tuple[TuningRecord, ...]], Iterable[TuningRecord]],
    ) -> None:
        """Replace a file's records by `change(records)`, journal included.

        A damaged table or journal is kept beside, with the suffix ".damaged", or
        ".2.damaged" and so on where another one is.

        Raises:
            OSError: it cannot be written or locked; nothing has changed then.
            NewerSchemaError: a later version wrote the table.
        """
        table, journal = self.path(kernel, gpu), self.path(kernel, gpu, JOURNAL)
        with self._locked(kernel, gpu):
            lines = _content(journal) or b""
            held = self._parse(kernel, gpu, lines, _content(table))
            if held.is_newer:
                raise NewerSchemaError(f"{table}: a later version wrote it")
            merged = merge_records(change(held.records))
            for path, is_damaged in (
                (table, held.has_table_problems),
                (journal, held.has_journal_problems),
            ):
                if is_damaged and path.exists():
                    _set_aside(path)
            _replace(table, format_table(kernel, gpu, merged).encode())
            if held.kept_lines:
                _replace(journal, b"".join(line + b"\n" for line in held.kept_lines))
            else:
                journal.unlink(missing_ok=True)

    def merge_in(self, records: Iterable[TuningRecord]) -> int:
        """Merge records by the conflict rule; returns how many files changed.

        Raises:
            OSError, NewerSchemaError: as `rewrite`.
        """
        by_file: dict[tuple[str, str], list[TuningRecord]] = {}
        for record in records:
            by_file.setdefault((record.key.kernel, record.gpu), []).append(record)
        for (kernel, gpu), group in sorted(by_file.items()):
            self.rewrite(kernel, gpu, functools.partial(operator.add, tuple(group)))
        return len(by_file)

    def write_file(self, kernel: str, gpu: str, suffix: str, data: bytes) -> None:
        """Replace a file other than a table, such as a portfolio."""
        with self._locked(kernel, gpu):
            _replace(self.path(kernel, gpu, suffix), data)

    def delete_table(self, kernel: str, gpu: str) -> None:
        """Delete a table; what its journal holds stays."""
        with self._locked(kernel, gpu):
            self.path(kernel, gpu).unlink(missing_ok=True)

    def _torn_tail(self, kernel: str, gpu: str, journal: bytes) -> bytes:
        """Torn, or still being written? Once the lock is free it is known."""
        tail = super()._torn_tail(kernel, gpu, journal)
        if tail:
            with contextlib.suppress(OSError, NotImplementedError, ImportError):
                with self._locked(kernel, gpu):
                    journal = _content(self.path(kernel, gpu, JOURNAL)) or b""
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


def _content(path: Path) -> bytes | None:
    """A regular file's content, None where there is none; else raises OSError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"above {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _append(path: Path, line: bytes) -> None:
    """Append a whole line or nothing; the caller holds the lock."""
    is_new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = _end_of_lines(handle)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
    if is_new:
        _sync_folder(path.parent)


def _end_of_lines(handle: int) -> int:
    """Where the next line goes; cuts off what a killed process left of its last."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return size
    kept = os.pread(handle, size, 0).rfind(b"\n") + 1
    os.ftruncate(handle, kept)
    return kept


def _set_aside(path: Path) -> None:
    """Keep a copy of a damaged file beside it, and earlier ones; the lock is held."""
    data = path.read_bytes()
    for number in itertools.count(1):
        infix = f".{number}" if number > 1 else ""
        aside = path.with_name(f"{path.name}{infix}{DAMAGED}")
        if not os.path.lexists(aside):
            _replace(aside, data)
            return
        if aside.is_file() and aside.read_bytes() == data:
            return


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new one; the lock is held."""
    # One name per file: what a killed process left is overwritten, never piled up.
    beside = path.with_name(path.name + ".tmp")
    with contextlib.ExitStack() as on_error:
        on_error.callback(beside.unlink, missing_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        on_error.pop_all()
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
