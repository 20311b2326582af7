# SPDX-License-Identifier: Apache-2.0
"""Layers of records, and what becomes of files that are not as they should be."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from record_fakes import (
    GPU,
    log_lines,
    make_config,
    make_key,
    make_record,
    without_root,
)

from portable_backend.warmup import layers
from portable_backend.warmup.layers import JOURNAL, Layer, WritableLayer
from portable_backend.warmup.record_files import DAMAGED
from portable_backend.warmup.store import PROCESS, USER_CACHE, RecordStore
from portable_backend.warmup.tables import NewerSchemaError

TABLE_PATH, JOURNAL_PATH = f"decode/{GPU}.json", f"decode/{GPU}{JOURNAL}"


def _open(folder, *more) -> RecordStore:
    return RecordStore.open(folder, more, shipped=Path(folder) / "none")


def _held(folder) -> set:
    return {record for _, record in _open(folder).records("decode")}


def _fill(folder, *records):
    with _open(folder) as store:
        for record in records:
            assert store.put(record)


def test_layers_are_asked_in_order(tmp_path):
    image, shipped = tmp_path / "image", tmp_path / "shipped"
    _fill(image, make_record(time_us=2))
    _fill(shipped, make_record(time_us=3))
    store = RecordStore.open(tmp_path / "user", [image], shipped=shipped)
    WritableLayer("", tmp_path / "user").append(make_record(time_us=1))
    store.put(make_record(time_us=4))
    names = [(layer, record.time_us) for layer, record in store.records("decode")]
    assert names == [
        (PROCESS, 4),
        (USER_CACHE, 1),
        (USER_CACHE, 4),
        ("image layer 1", 2),
        ("shipped", 3),
    ]


def test_what_was_put_is_in_the_journal_at_once_and_in_the_table_after_close(tmp_path):
    record = make_record()
    store = _open(tmp_path)
    store.put(record)
    assert (tmp_path / JOURNAL_PATH).exists() and not (tmp_path / TABLE_PATH).exists()
    assert _held(tmp_path) == {record}
    store.close()
    assert not (tmp_path / JOURNAL_PATH).exists()
    assert json.loads((tmp_path / TABLE_PATH).read_text())["records"]
    assert _held(tmp_path) == {record}


def test_the_folder_holds_no_leftovers_after_close(tmp_path):
    _fill(tmp_path, make_record())
    _fill(tmp_path, make_record(time_us=1))
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert files == {TABLE_PATH, f"decode/{GPU}.lock"}


def test_losers_are_kept_in_the_tables_history(tmp_path):
    slow, fast = make_record(time_us=9), make_record(time_us=1, config=make_config(32))
    _fill(tmp_path, slow)
    _fill(tmp_path, fast)
    table = json.loads((tmp_path / TABLE_PATH).read_text())
    assert [entry["time_us"] for entry in table["records"]] == [1]
    assert [entry["time_us"] for entry in table["history"]] == [9]


def test_files_are_read_once_until_refresh(tmp_path):
    store = _open(tmp_path)
    assert not store.records("decode")
    _fill(tmp_path, make_record())
    assert not store.records("decode")
    store.refresh()
    assert len(store.records("decode")) == 1


def test_names_of_gpus_that_are_no_file_names_are_kept(tmp_path):
    records = {make_record(gpu=name) for name in ("a/b", "a%2Fb", "a.json", "ü x")}
    _fill(tmp_path, *records)
    assert _held(tmp_path) == records
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / "decode"}


def test_a_table_under_another_gpus_name_is_not_used(tmp_path):
    _fill(tmp_path, make_record())
    (tmp_path / TABLE_PATH).rename(tmp_path / "decode" / "nvidia_h100.json")
    with log_lines() as lines:
        assert not _held(tmp_path)
    assert len(lines) == 1 and "gpu must be 'nvidia_h100'" in lines[0]


def test_absent_layers_are_no_news(tmp_path):
    with log_lines() as lines:
        assert not _held(tmp_path / "absent")
    assert not lines and not (tmp_path / "absent").exists()


@pytest.mark.parametrize("path", [TABLE_PATH, JOURNAL_PATH])
@pytest.mark.parametrize("is_writable", [True, False])
def test_a_file_cut_at_any_byte_is_at_worst_a_miss_with_one_warning(
    tmp_path, path, is_writable
):
    records = [make_record(make_key(n)) for n in (1, 2)]
    store = _open(tmp_path)
    for record in records:
        store.put(record)
    if path == TABLE_PATH:
        store.close()
    whole = (tmp_path / path).read_bytes()
    make_layer = WritableLayer if is_writable else Layer
    for size in range(len(whole) + 1):
        (tmp_path / path).write_bytes(whole[:size])
        layer = make_layer("cut", tmp_path)
        with log_lines() as lines:
            for _ in range(2):
                found = layer.load("decode")[0].records
        is_whole_lines = path == JOURNAL_PATH and whole[:size].endswith(b"\n")
        if path == JOURNAL_PATH:
            assert len(found) == whole[:size].count(b"\n")
            assert len(lines) == (0 if is_whole_lines or size == 0 else 1)
        else:
            is_whole = size >= len(whole) - 1  # all but the final line break
            assert len(found) == (2 if is_whole else 0)
            assert len(lines) == (0 if is_whole else 1)


GARBAGE = {
    "empty": b"",
    "binary": bytes(range(256)),
    "html": b"<html></html>",
    "list": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "long number": b'{"schema": 1' + b"0" * 5000 + b"}",
    "surrogate": b'{"schema": 1, "gpu": "\\ud800"}',
    "utf-16": '{"schema": 1}'.encode("utf-16"),
    "foreign": b'{"16": {"BLOCK_SIZE_M": 16}}',
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("path", [TABLE_PATH, JOURNAL_PATH])
def test_garbage_costs_one_warning_and_is_set_aside_by_the_next_write(
    tmp_path, path, data
):
    if path == JOURNAL_PATH:
        data += b"\n"
    (tmp_path / "decode").mkdir()
    (tmp_path / path).write_bytes(data)
    record = make_record()
    store = _open(tmp_path)
    with log_lines() as lines:
        assert not store.records("decode")
    assert len(lines) == 1 and path in lines[0]
    _fill(tmp_path, record)
    with log_lines() as lines:
        assert _held(tmp_path) == {record}
    assert not lines
    assert (tmp_path / (path + DAMAGED)).read_bytes()[: len(data)] == data


@pytest.mark.parametrize("path", [TABLE_PATH, JOURNAL_PATH])
def test_a_second_damaged_file_leaves_the_first_ones_copy(tmp_path, path):
    for data in (b"one\n", b"two\n", b"two\n", b"three\n"):
        (tmp_path / "decode").mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
        _fill(tmp_path, make_record())
    found = {p.name: p.read_bytes() for p in tmp_path.rglob(f"*{DAMAGED}")}
    name = (tmp_path / path).name
    wanted = {f"{name}{DAMAGED}": b"one", f"{name}.2{DAMAGED}": b"two"}
    wanted[f"{name}.3{DAMAGED}"] = b"three"
    # What was appended to a journal comes after it.
    assert {n: data.split(b"\n")[0] for n, data in found.items()} == wanted


def test_a_hand_edited_entry_alone_is_lost_and_a_copy_is_kept(tmp_path):
    _fill(tmp_path, *(make_record(make_key(n), time_us=n) for n in (1, 2, 3)))
    path = tmp_path / TABLE_PATH
    edited = path.read_text().replace('"time_us": 2', '"time_us": "two"')
    path.write_text(edited)
    with log_lines() as lines:
        assert {record.time_us for record in _held(tmp_path)} == {1, 3}
    assert len(lines) == 1
    assert "records entry 2: time_us must be" in lines[0] and "'two'" in lines[0]
    _fill(tmp_path, make_record(make_key(4), time_us=4))
    assert {record.time_us for record in _held(tmp_path)} == {1, 3, 4}
    assert path.with_name(path.name + DAMAGED).read_text() == edited


def test_a_later_schema_is_warned_of_once_and_never_overwritten(tmp_path):
    _fill(tmp_path, make_record())
    path = tmp_path / TABLE_PATH
    later = path.read_text().replace('"schema": 1', '"schema": 2')
    path.write_text(later)
    record = make_record(time_us=1)
    with log_lines() as lines, _open(tmp_path) as store:
        assert not store.records("decode")
        store.refresh()
        assert not store.records("decode")
        store.put(record)
    assert len(lines) == 1 and "a later version" in lines[0]
    assert path.read_text() == later
    assert _held(tmp_path) == {record}  # from the journal
    with pytest.raises(NewerSchemaError):
        WritableLayer("", tmp_path).merge_in([record])


def test_journal_lines_of_a_later_schema_survive_compaction(tmp_path):
    layer = WritableLayer("", tmp_path)
    layer.append(make_record())
    path = tmp_path / JOURNAL_PATH
    later = path.read_text().replace('"schema": 1', '"schema": 2')
    path.write_text(path.read_text() + later)
    assert layer.compact("decode", GPU)
    assert path.read_text() == later and _held(tmp_path) == {make_record()}


def test_a_torn_line_is_cut_off_before_the_next_is_written(tmp_path):
    layer = WritableLayer("", tmp_path)
    records = [make_record(make_key(n)) for n in (1, 2)]
    layer.append(records[0])
    with open(tmp_path / JOURNAL_PATH, "ab") as file:
        file.write(b'{"schema": 1, "ker')
    layer.append(records[1])
    with log_lines() as lines:
        assert _held(tmp_path) == set(records)
    assert not lines


def test_a_compaction_between_a_readers_two_reads_hides_nothing(tmp_path, monkeypatch):
    record = make_record()
    WritableLayer("", tmp_path).append(record)
    reader = Layer("", tmp_path)
    read = reader._read

    def read_and_compact(path):
        data = read(path)
        assert WritableLayer("", tmp_path).compact("decode", GPU)
        return data

    monkeypatch.setattr(reader, "_read", read_and_compact)
    assert reader.load_file("decode", GPU).records == (record,)


def test_a_line_that_is_still_being_written_is_not_called_torn(tmp_path):
    layer = WritableLayer("", tmp_path)
    layer.append(make_record())
    line = make_record(make_key(1)).to_line().encode() + b"\n"
    is_half_written = threading.Event()

    def write_slowly():
        with layer._locked("decode", GPU), open(tmp_path / JOURNAL_PATH, "ab") as file:
            file.write(line[:50])
            file.flush()
            is_half_written.set()
            time.sleep(0.1)
            file.write(line[50:])

    writer = threading.Thread(target=write_slowly)
    writer.start()
    is_half_written.wait()
    with log_lines() as lines:
        (held,) = WritableLayer("", tmp_path).load("decode")
    writer.join()
    assert not lines and not held.problems and held.records == (make_record(),)


def test_a_folder_that_cannot_be_written_leaves_this_process_its_records():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fill(folder, make_record(make_key(1)))
        for path in [*folder.rglob("*"), folder]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        with without_root(), log_lines() as lines, _open(folder) as store:
            for n in (2, 3):
                assert not store.put(make_record(make_key(n)))
            assert len(store.records("decode")) == 3
        folder.chmod(0o755)
        (folder / "decode").chmod(0o755)
    assert len(lines) == 1 and "in this process only" in lines[0]


def test_a_folder_that_cannot_be_read_costs_one_warning():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fill(folder, make_record())
        (folder / "decode").chmod(0)
        folder.chmod(0o555)
        with without_root(), log_lines() as lines:
            assert not _open(folder).records("decode")
        folder.chmod(0o755)
        (folder / "decode").chmod(0o755)
    assert len(lines) == 1 and "Permission denied" in lines[0]


def test_a_file_in_the_folders_place_costs_one_warning(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with log_lines() as lines, _open(tmp_path / "cache") as store:
        assert not store.put(make_record())
        assert len(store.records("decode")) == 1
    assert len(lines) == 1


def test_a_full_disk_loses_no_earlier_record(tmp_path, monkeypatch):
    layer = WritableLayer("", tmp_path)
    assert layer.append(make_record(make_key(1)))
    write = os.write

    def fill_up(handle, data):
        return write(handle, data[:20])

    monkeypatch.setattr(layers.os, "write", fill_up)
    with log_lines() as lines:
        assert not layer.append(make_record(make_key(2)))
        assert not layer.append(make_record(make_key(3)))
    monkeypatch.undo()
    assert len(lines) == 1 and os.strerror(errno.ENOSPC) in lines[0]
    with log_lines() as lines:
        assert _held(tmp_path) == {make_record(make_key(1))}
    assert not lines


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_compaction_that_fails_changes_nothing(tmp_path, monkeypatch, call):
    layer = WritableLayer("", tmp_path)
    layer.append(make_record(make_key(1)))
    layer.compact("decode", GPU)
    layer.append(make_record(make_key(2)))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(layers.os, call, fail)
    with log_lines() as lines:
        assert not layer.compact("decode", GPU)
    assert len(lines) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_pipe_or_a_folder_in_a_files_place_does_not_block(tmp_path):
    (tmp_path / "decode").mkdir()
    os.mkfifo(tmp_path / TABLE_PATH)
    (tmp_path / "decode" / "nvidia_h100.json").mkdir()
    with log_lines() as lines:
        assert not _held(tmp_path)
    assert len(lines) == 2


def test_threads_of_one_process_may_write_at_once(tmp_path):
    layer = WritableLayer("", tmp_path)

    def write(thread):
        for n in range(20):
            assert layer.append(make_record(make_key(n, num_seqs=thread)))

    threads = [threading.Thread(target=write, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_held(tmp_path)) == 80


LOCK_HOLDER = """
import sys, time
from portable_backend.warmup.layers import WritableLayer
with WritableLayer("", sys.argv[1])._locked("decode", sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_of_a_dead_process_does_not_block_and_of_a_stopped_one_not_long(
    tmp_path, monkeypatch
):
    run = [sys.executable, "-P", "-c", LOCK_HOLDER, str(tmp_path), GPU]
    holder = subprocess.Popen(run, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    monkeypatch.setattr(layers, "LOCK_TIMEOUT_S", 0.2)
    layer = WritableLayer("", tmp_path)
    with log_lines() as lines:
        assert not layer.append(make_record())
    assert len(lines) == 1
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert layer.append(make_record())
