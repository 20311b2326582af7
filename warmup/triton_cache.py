# SPDX-License-Identifier: Apache-2.0
"""Triton's cache of compiled kernels as a folder that can be carried elsewhere.

An entry is a folder named by a hash of everything that matters: source, types, options,
target, compiler. Beside its files lies a list of them, with the absolute path of each
(Triton 3.6 to 3.9). So a copy elsewhere is not found until its lists are written anew.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from portable_backend.errors import bad_argument

_LIST = "__grp__"
_PATHS = "child_paths"


def relocate(folder: Path, place: Path | None = None) -> int:
    """Make a cache's lists of files fit the place where it lies, or will lie.

    Idempotent; what Triton would find there already stays as it is.

    Args:
        folder: the cache.
        place: where it will be when it is used; None: where it is.

    Returns:
        How many entries had named another place.

    Raises:
        ValueError: folder is no folder.
        OSError: a list cannot be written.
    """
    if not folder.is_dir():
        raise bad_argument("cache", "a folder", folder, "correct the path")
    place = (place or folder).absolute()
    changed = 0
    for path in sorted(folder.glob(f"*/{_LIST}*.json")):
        held = _read(path)
        if held is None:
            continue
        here = place / path.parent.name
        paths = {name: str(here / Path(old).name) for name, old in held.items()}
        if paths != held:
            _write(path, json.dumps({_PATHS: paths}))
            changed += 1
    return changed


def shared_bytes(folder: Path, entry: str, list_name: str) -> int | None:
    """Shared memory that an entry's kernel takes; None where Triton would not find it.

    All of the entry's files must be there.
    """
    held = _read(folder / entry / list_name)
    if not held or not all(os.path.exists(path) for path in held.values()):
        return None
    try:
        metadata = json.loads(Path(held[list_name.removeprefix(_LIST)]).read_text())
        return int(metadata["shared"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def size_bytes(folder: Path) -> int:
    """Of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _read(path: Path) -> dict[str, str] | None:
    """Path by name; None where there is no list that can be used."""
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    paths = held.get(_PATHS) if isinstance(held, dict) else None
    is_list = isinstance(paths, dict) and all(
        isinstance(x, str) for x in paths.values()
    )
    return paths if is_list else None


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
