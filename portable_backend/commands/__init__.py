# SPDX-License-Identifier: Apache-2.0
"""The groups of `portable-backend`, a module each, loaded when the parser is built.

A module offers `add_parser(groups)`, which adds its parser and sets `func` on it: a
function from parsed arguments to the exit code. Heavy imports belong into `func`.
"""

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The arguments parse, but make no sense here; exit code 2."""
