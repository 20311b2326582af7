# SPDX-License-Identifier: Apache-2.0
"""Start of a container: fill the writable Triton cache from the image's, run a command.

The image's cache cannot be written and Triton knows one cache only, so what the image
holds is copied to TRITON_CACHE_DIR first. An entry appears whole or not at all, so
containers may share the volume. Where it cannot be written, a folder in the temporary
directory takes its place; failing that, the image's cache serves as it is.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

BAKED = Path("/opt/portable-backend/triton")


def seed(baked: Path, cache: Path) -> int:
    """Copy the entries that cache lacks; return how many.

    Raises:
        OSError: cache cannot be written, or is full.
    """
    cache.mkdir(parents=True, exist_ok=True)
    entries = sorted(entry for entry in baked.iterdir() if entry.is_dir())
    num_copied = 0
    # Also where all is there already: Triton itself will have to write.
    with tempfile.TemporaryDirectory(dir=cache, prefix=".seed-") as scratch:
        for entry in entries:
            target = cache / entry.name
            if target.exists():
                continue
            copy = shutil.copytree(entry, Path(scratch, entry.name))
            point_to(copy, target)
            try:
                copy.rename(target)
            except OSError:
                if not target.exists():  # else another container was faster
                    raise
            num_copied += 1
    return num_copied


def point_to(entry: Path, target: Path) -> None:
    """Let Triton's lists of an entry's files, which hold full paths, name target's."""
    for listing in entry.glob("__grp__*.json"):
        listed = json.loads(listing.read_text())
        listed["child_paths"] = {
            name: str(target / name) for name in listed["child_paths"]
        }
        listing.write_text(json.dumps(listed))


def prepare(baked: Path, cache: Path) -> Path:
    """Seed cache, or what has to take its place; return which folder it was."""
    choices = [cache, Path(tempfile.gettempdir(), f"triton-{os.getuid()}")]
    for choice in choices:
        try:
            num_copied = seed(baked, choice)
        except OSError as error:
            say(f"{choice} cannot hold Triton's cache: {error}")
        else:
            say(f"{choice}: {num_copied} compiled kernels copied from the image")
            return choice
    say(f"{baked} serves as it is; what it lacks cannot be compiled")
    return baked


def say(message: str) -> None:
    print(f"entrypoint: {message}", file=sys.stderr, flush=True)


def main(command: list[str]) -> None:
    if not command:
        sys.exit("entrypoint: no command; try: vllm serve MODEL")
    if BAKED.is_dir():
        cache = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
        with contextlib.suppress(FileNotFoundError):  # no usable temporary directory
            folder = prepare(BAKED, Path(cache).expanduser())
            os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"entrypoint: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
