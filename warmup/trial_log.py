# SPDX-License-Identifier: Apache-2.0
"""The trials of one search as JSON lines that survive a kill at any byte.

The first line says what was searched, each further line is a trial, written at once.
A file that ends within a line was cut off there: that line is dropped and its trial
measured again. A complete line that does not parse is skipped with a warning.

Lines are handed to the operating system, not forced to disk: a killed process loses
nothing, a power failure may lose the last trials.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from portable_backend.errors import PortableBackendError, bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import Trial

SCHEMA = 1
logger = logging.getLogger(__name__)


class LogMismatchError(PortableBackendError):
    """The log at hand is of another search, or in use by one."""


@dataclass(frozen=True)
class LogHeader:
    """What a search was about; only a search of the same may go on from its log.

    Attributes:
        kernel: "decode", ...
        key: what the config is tuned for.
        gpu: canonical name of the device.
        space: digest of the configs, from `space_digest`.
        strategy: name in the registry.
        seed: of the strategy.
        rounds: of a trial of full fidelity.
    """

    kernel: str
    key: Mapping[str, Any]
    gpu: str
    space: str
    strategy: str
    seed: int
    rounds: int


def space_digest(configs: Iterable[KernelConfig]) -> str:
    """Return a digest of a list of configs, order included: strategies depend on it."""
    digest = hashlib.sha256()
    for config in configs:
        digest.update(json.dumps(config.to_dict(), sort_keys=True).encode() + b"\n")
    return f"sha256:{digest.hexdigest()[:16]}"


def log_name(
    header: LogHeader, kernel_digest: str, toolchain: Mapping[str, str | None]
) -> str:
    """A log's file name, without its end.

    Trials of other code or another toolchain are those of another search.
    """
    about: dict[str, Any] = asdict(header) | {"digest": kernel_digest}
    about["toolchain"] = dict(toolchain)
    text = json.dumps(about, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class TrialLog:
    """An open log; a context manager that closes it.

    Args:
        path: created with its folders if absent or cut off within the first line.
        header: what is searched.

    Attributes:
        trials: those found in the file, then those appended.

    Raises:
        LogMismatchError: the file is of another search or no trial log, or another
            process has it open. Nothing in it is changed.
    """

    def __init__(self, path: Path, header: LogHeader) -> None:
        self.path, self.header = path, header
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            self._lock()
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            self.trials: list[Trial] = []
            if whole:
                found, self.trials = _parse(path, whole)
                _check(path, found, header)
            os.ftruncate(self._file, len(whole))
            if not whole:
                self._write({"schema": SCHEMA} | asdict(header))
        except BaseException:
            self.close()
            raise

    def append(self, trial: Trial) -> None:
        """Write a trial.

        Raises:
            OSError: the line could not be written whole.
        """
        self._write(_trial_to_dict(trial))
        self.trials.append(trial)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # which gives the lock back as well
            self._file = -1

    def __enter__(self) -> "TrialLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LogMismatchError(
                f"trial log {self.path} is being written by another process; wait for "
                "it, or log elsewhere"
            ) from error

    def _write(self, data: Mapping[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(
                f"{self.path}: wrote {written} of {len(line)} bytes; disk full?"
            )


def read_trials(path: Path) -> tuple[LogHeader, list[Trial]]:
    """Read a log without opening it for writing, to reuse its trials.

    A log of a neighbouring key is a warm start: pass `ranking_from(trials)`.

    Raises:
        LogMismatchError: the file is no trial log of this schema.
    """
    content = path.read_bytes()
    return _parse(path, content[: content.rfind(b"\n") + 1])


def ranking_from(trials: Iterable[Trial]) -> list[KernelConfig]:
    """Return the valid configs, fastest first, to start another search with.

    Of a config's trials the one of most rounds counts.
    """
    last: dict[KernelConfig, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.rounds):
        last[trial.config] = trial
    timed = [(t.time_us, c) for c, t in last.items() if t.time_us is not None]
    return [config for _, config in sorted(timed, key=lambda pair: pair[0])]


def _parse(path: Path, content: bytes) -> tuple[LogHeader, list[Trial]]:
    first, *lines = content.removesuffix(b"\n").split(b"\n")
    try:
        data = json.loads(first)
        schema = data.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema} instead of {SCHEMA}")
        header = LogHeader(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LogMismatchError(
            f"{path} is not a trial log of schema {SCHEMA} ({error}); log elsewhere"
        ) from error
    trials, broken = [], []
    for number, line in enumerate(lines, start=2):
        try:
            trials.append(_trial_from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            broken.append(number)
    if broken:
        logger.warning("%s: skipped lines that are not trials: %s", path, broken)
    return header, trials


def _check(path: Path, found: LogHeader, wanted: LogHeader) -> None:
    was, now = asdict(found), json.loads(json.dumps(asdict(wanted)))
    differences = [f"{n} {was[n]} instead of {now[n]}" for n in now if was[n] != now[n]]
    if differences:
        raise LogMismatchError(
            f"trial log {path} is of another search: {'; '.join(differences)}; log "
            "elsewhere, and reuse its trials with ranking_from(read_trials(path)[1])"
        )


def _trial_to_dict(trial: Trial) -> dict[str, Any]:
    data: dict[str, Any] = {"config": trial.config.to_dict(), "rounds": trial.rounds}
    if trial.invalid is None:
        data["time_us"] = trial.time_us
    else:
        data |= {"invalid": trial.invalid, "reason": trial.reason}
    return data | {"seconds": trial.seconds}


def _trial_from_dict(data: Mapping[str, Any]) -> Trial:
    time_us, rounds, seconds = data.get("time_us"), data["rounds"], data["seconds"]
    for value in (rounds, seconds) if time_us is None else (rounds, seconds, time_us):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_argument("number", "an int or float", value, "skip the line")
    return Trial(
        config=KernelConfig.from_dict(data["config"]),
        rounds=rounds,
        time_us=time_us,
        invalid=data.get("invalid"),
        reason=data.get("reason", ""),
        seconds=seconds,
    )
