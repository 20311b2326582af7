# SPDX-License-Identifier: Apache-2.0
"""Every PORTABLE_BACKEND_* variable: parsed, typed and documented in one place.

A wrong value stops start-up with the list of valid ones, but only for those who select
the portable back end: the plug-in is loaded in every vLLM process on the machine.
"""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
PREFIX = "PORTABLE_BACKEND_"
TUNE_MODES = ("off", "load", "startup", "background")
RMS_NORM_MODES = ("auto", "on", "off")
SWITCH = ("on", "off")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        tune: PORTABLE_BACKEND_TUNE: off (defaults only), load (stored records, the
            default), startup (tune what is missing first), background (as load, and
            tune what is missing while nothing is served, for the next start).
        tune_budget_s: PORTABLE_BACKEND_TUNE_BUDGET_S, seconds that tuning at start-up
            may take; below 1 nothing is tuned. None of it is for background.
        cache_dir: PORTABLE_BACKEND_CACHE_DIR, the writable cache of tuning records.
        cache_layers: PORTABLE_BACKEND_CACHE_LAYERS, read-only caches, first hit wins.
        rms_norm: PORTABLE_BACKEND_RMS_NORM: on, off or auto (where it is known to be
            right; everywhere at present).
        compile_ahead: PORTABLE_BACKEND_COMPILE_AHEAD: on (the default) compiles and
            loads all kernels while an engine starts; off leaves that to their first
            launch, which makes requests wait.
        log_level: PORTABLE_BACKEND_LOG_LEVEL; None follows vLLM's own level.
    """

    tune: str
    tune_budget_s: float
    cache_dir: Path
    cache_layers: tuple[Path, ...]
    rms_norm: str
    compile_ahead: str
    log_level: str | None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Parse `environ` (os.environ by default); empty values count as unset.

        Raises:
            ValueError: names every variable that does not parse, what it may be, and
                what it is.
        """
        environ = os.environ if environ is None else environ
        problems: list[str] = []

        def read(name: str, parse: Callable[[str], _T], default: _T) -> _T:
            text = environ.get(PREFIX + name, "").strip()
            if not text:
                return default
            try:
                return parse(text)
            except ValueError as error:
                problems.append(f"{PREFIX}{name} must be {error}, got {text!r}")
                return default

        settings = cls(
            tune=read("TUNE", _choice(TUNE_MODES), "load"),
            tune_budget_s=read("TUNE_BUDGET_S", _seconds, 60.0),
            cache_dir=read("CACHE_DIR", _path, _default_cache_dir(environ)),
            cache_layers=read("CACHE_LAYERS", _paths, ()),
            rms_norm=read("RMS_NORM", _choice(RMS_NORM_MODES), "auto"),
            compile_ahead=read("COMPILE_AHEAD", _choice(SWITCH), "on"),
            log_level=read("LOG_LEVEL", _log_level, None),
        )
        if problems:
            raise ValueError("; ".join(problems) + "; correct or unset it")
        return settings


@functools.cache
def get_settings() -> Settings:
    """This process's settings, read from the environment on the first call."""
    return Settings.from_env()


def _choice(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text.lower()

    return parse


def _log_level(text: str) -> str | None:
    if text.upper() not in LOG_LEVELS:
        raise ValueError(f"one of {', '.join(LOG_LEVELS)}")
    return text.upper()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("a number of seconds, 0 or more")
    return value


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"a folder ({error})") from error


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser()
    except RuntimeError:  # no home folder, as for a user that only a container knows
        folder = Path(tempfile.gettempdir())
    return folder / "portable_backend"
