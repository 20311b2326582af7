# SPDX-License-Identifier: Apache-2.0
"""Rows of a sweep that is being recorded, as JSON lines that survive a kill.

The first line says what is recorded, each further one is a row. A line that was cut off
is dropped: its config is measured again.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.sweeps import Row, row_from_dict, row_to_dict
from portable_backend.warmup.trial_log import LogMismatchError

SCHEMA = 1


class RowLog:
    """An open log.

    Args:
        path: created if absent.
        about: what is recorded, as JSON can hold it; rows of anything else are not
            mixed with these.

    Attributes:
        rows: by config, those found in the file and those appended.

    Raises:
        LogMismatchError: the file is about something else, is no such log, or another
            process has it open.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[KernelConfig, Row] = {}
        wanted = json.loads(json.dumps({"schema": SCHEMA} | dict(about)))
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            self._lock()
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                self._read(whole, wanted)
            os.ftruncate(self._file, len(whole))
            if not whole:
                self._write(wanted)
        except BaseException:
            self.close()
            raise

    def append(self, row: Row) -> None:
        """Write a row.

        Raises:
            OSError: the line could not be written whole.
        """
        self._write(row_to_dict(row))
        self.rows[row.config] = row

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # which gives the lock back as well
            self._file = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LogMismatchError(
                f"{self.path} is being written by another process; wait for it, or "
                "record into another folder"
            ) from error

    def _read(self, content: bytes, wanted: Mapping[str, Any]) -> None:
        first, *lines = content.removesuffix(b"\n").split(b"\n")
        try:
            found = json.loads(first)
            rows = [row_from_dict(json.loads(line)) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LogMismatchError(
                f"{self.path} is no log of rows ({error}); record into another folder"
            ) from error
        names = found.keys() | wanted.keys() if isinstance(found, dict) else {"schema"}
        other = sorted(
            name
            for name in names
            if not isinstance(found, dict) or found.get(name) != wanted.get(name)
        )
        if other:
            raise LogMismatchError(
                f"{self.path} is of another recording: {', '.join(other)} differ; "
                "record into another folder"
            )
        self.rows = {row.config: row for row in rows}

    def _write(self, data: Mapping[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(
                f"{self.path}: wrote {written} of {len(line)} bytes; disk full?"
            )
