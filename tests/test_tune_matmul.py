# SPDX-License-Identifier: Apache-2.0
"""The example in docs/ tunes a kernel, and a wrong config never wins."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "tune_matmul.py"


@pytest.fixture
def run_example(tmp_path):
    """Lines that the example prints for matrices, after edits of its source."""

    def run(*edits: tuple[str, str], size: int = 32) -> list[str]:
        source = EXAMPLE.read_text()
        for old, new in edits:
            assert old in source
            source = source.replace(old, new)
        script = tmp_path / "example.py"
        script.write_text(source)
        done = subprocess.run(
            [sys.executable, "-P", script, str(size)],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_the_example_prints_the_fastest_config(run_example):
    *rows, last = run_example()
    assert len(rows) == 8  # tiles of 16 and 32 in three directions
    times_us = {}
    for row in rows:
        time_us, unit, verdict, config = row.split(maxsplit=3)
        assert (unit, verdict) == ("us", "right")
        times_us[config] = float(time_us)
    best = last.removeprefix("best: ")
    assert times_us[best] == min(times_us.values())
    assert set(ast.literal_eval(best)) == set("MNK")


def test_a_config_that_computes_nonsense_does_not_win(run_example):
    """Tiles of 32 in K read a row too far."""
    *rows, last = run_example(("tl.load(a + rows", "tl.load(a + K // 32 + rows"))
    for row in rows:
        assert ("WRONG" in row) == ("'K': 32" in row)
    assert "'K': 16" in last


@pytest.mark.parametrize("size", [1, 7, 33])
def test_sizes_that_no_tile_divides_are_right(run_example, size):
    *rows, last = run_example(size=size)
    assert rows and all(" us right {" in row for row in rows)
    assert last.startswith("best: {'K': ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "n must be 1 to 32768, got nothing; give rows and columns"),
        (["x"], "n must be 1 to 32768, got x"),
        (["1.5"], "n must be 1 to 32768, got 1.5"),
        (["4", "4"], "n must be 1 to 32768, got 4 4"),
        (["0"], "n must be 1 to 32768, got 0"),
        (["-7"], "n must be 1 to 32768, got -7"),
        (["99999"], "n must be 1 to 32768, got 99999"),
    ],
)
def test_a_size_that_cannot_be_is_refused_in_words(arguments, expected):
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLE, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and expected in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_the_example_stays_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60
