# SPDX-License-Identifier: Apache-2.0
"""Files of records: read whole, appended to by whole lines, replaced all or none.

Whoever writes holds the lock of each file's kernel and GPU.
"""

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger("vllm.portable_backend.records")
DAMAGED = ".damaged"
MAX_FILE_BYTES = 1 << 28


def content(path: Path) -> bytes | None:
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


def append_line(path: Path, line: bytes) -> None:
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


def aside_of(path: Path, data: bytes) -> tuple[Path, bytes] | None:
    """Where a copy of a damaged file goes; None where there is one already.

    Copies of others that were damaged before stay.
    """
    for number in itertools.count(1):
        infix = f".{number}" if number > 1 else ""
        aside = path.with_name(f"{path.name}{infix}{DAMAGED}")
        if not os.path.lexists(aside):
            return aside, data
        if aside.is_file() and aside.read_bytes() == data:
            break
    return None


def write_all(files: Sequence[tuple[Path, bytes | None]]) -> None:
    """Replace files, or delete those that shall hold None: all of them or none.

    Readers see each file as it was or as it is to be. A process that is killed while
    they are put in place, one after the other, leaves those that come later as they
    were.

    Raises:
        OSError: one cannot be written; all are as before.
    """
    with contextlib.ExitStack() as on_error:
        for path, data in files:
            if data is not None:
                on_error.callback(_beside(path).unlink, missing_ok=True)
                _write_synced(_beside(path), data)
        for path, data in files:
            before = content(path)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(_beside(path), path)
            on_error.callback(_put_back, path, before)
        for folder in {path.parent for path, _ in files}:
            _sync_folder(folder)
        on_error.pop_all()


def _put_back(path: Path, data: bytes | None) -> None:
    try:
        if data is None:
            path.unlink(missing_ok=True)
        else:
            _write_synced(_beside(path), data)
            os.replace(_beside(path), path)
    except OSError as error:
        logger.warning("%s: could not be put back as it was: %s", path, error)


def _beside(path: Path) -> Path:
    # One name per file: what a killed process left is overwritten, never piled up.
    return path.with_name(path.name + ".tmp")


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
