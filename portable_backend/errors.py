# SPDX-License-Identifier: Apache-2.0
"""Exceptions, and the one form in which a bad argument is reported.

PortableBackendError
├── UnsupportedError      the feature, device or version is not supported
└── RecordError           a tuning record, or a file of them, is not as it should be

Bad arguments raise ValueError, made by `bad_argument`.
"""


class PortableBackendError(Exception):
    """Base of the errors that are not a bad argument."""


class UnsupportedError(PortableBackendError):
    """The request is well formed, but this build or device cannot serve it."""


class RecordError(PortableBackendError, ValueError):
    """A tuning record or a file of them is wrong; the message says where and how."""


def bad_argument(name: str, expected: str, got: object, remedy: str) -> ValueError:
    """Return the ValueError for argument `name`: expected, given, remedy."""
    return ValueError(f"{name} must be {expected}, got {got}; {remedy}")
