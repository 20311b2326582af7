# SPDX-License-Identifier: Apache-2.0
"""The report of a start: its line, its file, and what may be wrong with that."""

import json
import logging
import multiprocessing

import pytest

from portable_backend.errors import RecordError
from portable_backend.warmup.report import (
    StartupReport,
    read_report,
    report_path,
    write_report,
)

REPORT = StartupReport(
    gpu="nvidia_h200",
    arch="sm90",
    mode="load",
    buckets=66,
    grades={"decode": {"default": 2, "exact": 9}, "rms_norm": {"nearest": 5}},
    binaries=26,
    compiled=3,
    load_s=0.04,
    tune_s=0.0,
    compile_s=1.26,
    started="2026-11-30T06:00:00+00:00",
    notes=("shipped: another toolchain",),
)


def test_the_line_has_grades_best_first():
    assert REPORT.line() == (
        "26 kernels ready: 3 compiled, 23 were there, in 1.3 s; grades of 66 keys: "
        "decode 9 exact, 2 default; rms_norm 5 nearest; nvidia_h200 (sm90), tune=load"
    )


def test_what_is_written_is_read(tmp_path):
    folder = tmp_path / "not" / "there yet"
    path = write_report(REPORT, folder)
    assert path == report_path(folder, "nvidia_h200")
    assert read_report(path) == REPORT
    assert [x.name for x in folder.iterdir()] == ["last-start.nvidia_h200.json"]


def test_fields_of_a_later_version_are_kept(tmp_path):
    path = write_report(REPORT, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "ranks": 4}))
    report = read_report(path)
    assert report.extra == {"ranks": 4}
    assert read_report(write_report(report, tmp_path)) == report


def test_no_report_is_none(tmp_path):
    assert read_report(report_path(tmp_path, "nvidia_h200")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"binaries": -1}, "binaries must be a count, got -1"),
        ({"buckets": True}, "buckets must be a count, got True"),
        ({"load_s": "quick"}, "load_s must be seconds, 0 or more, got 'quick'"),
        ({"grades": {"decode": 3}}, "grades must be counts of grades by kernel"),
        ({"gpu": ""}, "gpu must be a name, got ''"),
        ({"notes": "one"}, "notes must be a list of lines"),
        ({"started": 5}, "started must be an ISO time or null"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, message):
    path = write_report(REPORT, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match=message) as error:
        read_report(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = report_path(tmp_path, "nvidia_h200")
    path.write_text(content)
    with pytest.raises(RecordError):
        read_report(path)


def test_where_it_cannot_be_written_the_start_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert write_report(REPORT, tmp_path / "file") is None
    assert "not written" in caplog.text


def _write(folder):
    for _ in range(40):
        write_report(REPORT, folder)


def test_readers_never_see_a_half(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    path, seen = report_path(tmp_path, "nvidia_h200"), 0
    while any(writer.is_alive() for writer in writers):
        seen += read_report(path) in (None, REPORT)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen
    assert read_report(path) == REPORT
    assert len(list(tmp_path.iterdir())) == 1
