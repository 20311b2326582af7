# SPDX-License-Identifier: Apache-2.0
"""Recorded sweeps: every config of a space, timed for one kernel and one key.

A sweep is a gzip file of one JSON object:

    {"schema": 1, "kernel": "decode", "key": {"num_seqs": 8, ...},
     "gpu": "nvidia_h200", "arch": "sm90", "num_units": 132,
     "toolchain": {"triton": "3.6.0", ...}, "synthetic": false,
     "selection": {"members": 6048, "of": "all"}, "kernel_digest": "sha256:...",
     "rows": [{"config": {...}, "times_us": [41.2, 41.5, ...], "setup_s": 1.9},
              {"config": {...}, "invalid": "resources", "reason": "...", ...}]}

`times_us` has a time for each round, `setup_s` is what compiling and checking took.
`selection` says which members of the space the rows are. `synthetic` marks times that
nobody measured: good for tests, never a result.
"""

import gzip
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import INVALID_REASONS

SCHEMA = 1
SUFFIX = ".sweep.json.gz"
Key = Mapping[str, int | float | str | bool | None]


@dataclass(frozen=True)
class Row:
    """One config of a sweep: its times, or why it has none."""

    config: KernelConfig
    times_us: tuple[float, ...] = ()
    invalid: str | None = None
    reason: str = ""
    setup_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.invalid is None) != bool(self.times_us):
            raise bad_argument(
                "row",
                "either timed or invalid",
                f"times_us {self.times_us}, invalid {self.invalid}",
                "leave one of them out",
            )
        if self.invalid is not None and self.invalid not in INVALID_REASONS:
            raise bad_argument(
                "invalid",
                f"one of {', '.join(INVALID_REASONS)}",
                self.invalid,
                "choose the nearest and say more in reason",
            )

    @property
    def time_us(self) -> float | None:
        """Median of all rounds; None for an invalid config."""
        return statistics.median(self.times_us) if self.times_us else None


@dataclass(frozen=True)
class Sweep:
    """The configs of one space, timed on one device for one key.

    Attributes:
        kernel, key, device, toolchain: what was timed.
        rows: a config each.
        synthetic: nobody measured these times.
        selection: which configs of the space these are; empty: unknown.
        kernel_digest: of the code that was measured; empty: unknown.
    """

    kernel: str
    key: Key
    device: DeviceInfo
    rows: tuple[Row, ...]
    toolchain: Mapping[str, str | None] = field(default_factory=dict)
    synthetic: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    kernel_digest: str = ""

    @property
    def configs(self) -> list[KernelConfig]:
        return [row.config for row in self.rows]

    @property
    def rounds(self) -> int:
        """Rounds that every valid config was timed for."""
        return min((len(r.times_us) for r in self.rows if r.times_us), default=0)

    @property
    def best_us(self) -> float:
        """The optimum.

        Raises:
            ValueError: no config is valid.
        """
        times = [row.time_us for row in self.rows if row.time_us is not None]
        if not times:
            raise bad_argument(
                "sweep", "one with a valid config", self.name, "record it again"
            )
        return min(times)

    @property
    def name(self) -> str:
        """Kernel, device and key, fit for a file name."""
        fields = [f"{name}={self.key[name]}" for name in sorted(self.key)]
        return "-".join([self.kernel, self.device.name, *fields])


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write a sweep into `folder`, in one step; returns the file's path."""
    data = {
        "schema": SCHEMA,
        "kernel": sweep.kernel,
        "key": dict(sweep.key),
        "gpu": sweep.device.name,
        "arch": sweep.device.arch,
        "num_units": sweep.device.num_units,
        "toolchain": dict(sweep.toolchain),
        "synthetic": sweep.synthetic,
        "selection": dict(sweep.selection),
        "kernel_digest": sweep.kernel_digest,
        "rows": [row_to_dict(row) for row in sweep.rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sweep.name}{SUFFIX}"
    text = json.dumps(data, separators=(",", ":"))
    # No timestamp, so that equal sweeps are equal files.
    content = gzip.compress(text.encode(), mtime=0)
    handle, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read_sweep(path: Path) -> Sweep:
    """Read one sweep.

    Raises:
        ValueError: the file is not a sweep of this schema; the message names it.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} instead of {SCHEMA}")
        arch = data["arch"]
        if arch not in ARCH_LIMITS:
            raise ValueError(f"unknown arch {arch}")
        device = DeviceInfo(data["gpu"], arch, data["num_units"], ARCH_LIMITS[arch])
        return Sweep(
            kernel=data["kernel"],
            key=data["key"],
            device=device,
            rows=tuple(row_from_dict(row) for row in data["rows"]),
            toolchain=data["toolchain"],
            synthetic=data["synthetic"],
            selection=data.get("selection", {}),
            kernel_digest=data.get("kernel_digest", ""),
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise bad_argument(
            "path",
            f"a sweep of schema {SCHEMA}",
            f"{path} ({type(error).__name__}: {error})",
            "record the sweep again",
        ) from error


def read_sweeps(folder: Path) -> list[Sweep]:
    """Read every sweep of a folder, ordered by file name.

    Raises:
        ValueError: the folder has none, or one of them cannot be read.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise bad_argument(
            "folder", f"one with *{SUFFIX} files", folder, "record sweeps into it first"
        )
    return [read_sweep(path) for path in paths]


def row_to_dict(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {"config": row.config.to_dict(), "setup_s": row.setup_s}
    if row.invalid is None:
        return data | {"times_us": list(row.times_us)}
    return data | {"invalid": row.invalid, "reason": row.reason}


def row_from_dict(data: Mapping[str, Any]) -> Row:
    return Row(
        config=KernelConfig.from_dict(data["config"]),
        times_us=tuple(data.get("times_us", ())),
        invalid=data.get("invalid"),
        reason=data.get("reason", ""),
        setup_s=data.get("setup_s", 0.0),
    )
