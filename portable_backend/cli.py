# SPDX-License-Identifier: Apache-2.0
"""`portable-backend`: the result goes to stdout, progress and errors to stderr.

Exit codes: 0 done, 1 something failed, 2 usage, 130 interrupted.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from portable_backend import __version__
from portable_backend.commands import (
    FAILED,
    INTERRUPTED,
    USAGE,
    UsageError,
    cache,
    compile,
    doctor,
    tune,
    warm,
)
from portable_backend.errors import PortableBackendError

GROUPS = (cache, compile, doctor, tune, warm)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="portable-backend",
        description="Tune, inspect and ship the configs of the portable back end.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    groups = parser.add_subparsers(required=True, metavar="command")
    for group in GROUPS:
        group.add_parser(groups)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        code: int = args.func(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UsageError as error:
        print(f"portable-backend: {error}", file=sys.stderr)
        return USAGE
    except (PortableBackendError, OSError) as error:
        print(f"portable-backend: {error}", file=sys.stderr)
        return FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
