# SPDX-License-Identifier: Apache-2.0
"""PORTABLE_BACKEND_* variables: what they may be, and what a wrong one says."""

import os
from pathlib import Path

import pytest

from portable_backend.settings import Settings, get_settings


def test_an_empty_environment_gives_the_documented_defaults():
    settings = Settings.from_env({"XDG_CACHE_HOME": "/var/cache"})
    assert settings == Settings(
        tune="load",
        tune_budget_s=60.0,
        cache_dir=Path("/var/cache/portable_backend"),
        cache_layers=(),
        rms_norm="auto",
        compile_ahead="on",
        log_level=None,
    )


def test_without_xdg_the_cache_is_in_the_home_folder():
    expected = Path.home() / ".cache" / "portable_backend"
    assert Settings.from_env({}).cache_dir == expected


def test_every_variable_is_read():
    settings = Settings.from_env(
        {
            "PORTABLE_BACKEND_TUNE": "Startup",
            "PORTABLE_BACKEND_TUNE_BUDGET_S": "2.5",
            "PORTABLE_BACKEND_CACHE_DIR": "~/tuned",
            "PORTABLE_BACKEND_CACHE_LAYERS": os.pathsep.join(["/image/a", "", "/b"]),
            "PORTABLE_BACKEND_RMS_NORM": "off",
            "PORTABLE_BACKEND_COMPILE_AHEAD": "off",
            "PORTABLE_BACKEND_LOG_LEVEL": "debug",
        }
    )
    assert settings == Settings(
        tune="startup",
        tune_budget_s=2.5,
        cache_dir=Path.home() / "tuned",
        cache_layers=(Path("/image/a"), Path("/b")),
        rms_norm="off",
        compile_ahead="off",
        log_level="DEBUG",
    )


def test_an_empty_value_counts_as_unset():
    environ = {"PORTABLE_BACKEND_TUNE": "", "PORTABLE_BACKEND_RMS_NORM": "  "}
    assert Settings.from_env(environ) == Settings.from_env({})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TUNE", "always", "one of off, load, startup, background"),
        ("TUNE_BUDGET_S", "1min", "a number of seconds, 0 or more"),
        ("TUNE_BUDGET_S", "-1", "a number of seconds, 0 or more"),
        ("TUNE_BUDGET_S", "inf", "a number of seconds, 0 or more"),
        ("RMS_NORM", "1", "one of auto, on, off"),
        ("LOG_LEVEL", "loud", "one of DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_a_wrong_value_lists_the_valid_ones(name, value, expected):
    variable = f"PORTABLE_BACKEND_{name}"
    with pytest.raises(ValueError) as caught:
        Settings.from_env({variable: value})
    assert f"{variable} must be {expected}, got {value!r}" in str(caught.value)


def test_all_wrong_values_are_reported_at_once():
    environ = {"PORTABLE_BACKEND_TUNE": "x", "PORTABLE_BACKEND_RMS_NORM": "y"}
    with pytest.raises(ValueError) as caught:
        Settings.from_env(environ)
    assert "_TUNE must" in str(caught.value)
    assert "_RMS_NORM must" in str(caught.value)


def test_the_environment_is_read_once(monkeypatch):
    get_settings.cache_clear()
    try:
        monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "off")
        first = get_settings()
        monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "load")
        assert first.tune == "off"
        assert get_settings() is first
    finally:
        get_settings.cache_clear()
