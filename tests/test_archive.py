# SPDX-License-Identifier: Apache-2.0
"""Archives of records: the same bytes for the same records, and no trust in others'."""

import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import zipfile

import pytest
from record_fakes import (
    DEFAULT,
    ENVIRONMENT,
    make_config,
    make_key,
    make_portfolio,
    make_record,
)

from portable_backend.errors import RecordError
from portable_backend.warmup.archive import archive_of, read_archive
from portable_backend.warmup.layers import PORTFOLIO, WritableLayer
from portable_backend.warmup.lookup import Lookup
from portable_backend.warmup.portfolio_files import read_portfolios
from portable_backend.warmup.store import RecordStore

RECORDS = [make_record(make_key(n), time_us=n) for n in (1, 54, 1328)]
RECORDS += [make_record(make_key(1), time_us=9), make_record(gpu="nvidia_h100")]
MEMBER = "decode/nvidia_h200.json"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "records.zip"
    path.write_bytes(archive_of(RECORDS, [make_portfolio()]).to_bytes())
    return path


def _rebuild(path, change):
    """Write the archive anew after `change` to its files, with a manifest that fits."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files.pop("manifest.json"))
    change(files)
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for name, data in files.items()
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, data in files.items():
            archive.writestr(name, data)


def test_an_imported_archive_gives_exact_hits(path, tmp_path):
    folder = tmp_path / "cache"
    read_archive(path).merge_into(WritableLayer("", folder))
    store = RecordStore.open(folder, shipped=tmp_path / "none")
    lookup = Lookup(store, ENVIRONMENT, lambda key: DEFAULT)
    for record in RECORDS[:3]:
        choice = lookup.choose(record.key)
        assert (choice.grade, choice.record) == ("exact", record)
    assert lookup.choose(make_key(54, head_size=64)).grade == "portfolio"


def test_the_same_records_give_the_same_bytes(path):
    again = archive_of(RECORDS[::-1], [make_portfolio()])
    assert again.to_bytes() == path.read_bytes()
    assert read_archive(path).to_bytes() == path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert {info.date_time[0] for info in archive.infolist()} == {1980}


def test_an_import_merges_by_the_conflict_rule(path, tmp_path):
    layer = WritableLayer("", tmp_path / "cache")
    better = make_record(make_key(54), time_us=2, config=make_config(32))
    worse = make_record(make_key(1), time_us=5)
    layer.merge_in([better, worse])
    for _ in range(2):
        read_archive(path).merge_into(layer)
    (file,) = [f for f in layer.load("decode") if f.gpu == "nvidia_h200"]
    assert set(file.records) == {*RECORDS[:4], better, worse}


def _portfolios():
    """Of other code, of today's, wider, of less loss, later: each beats the last."""
    small = dataclasses.replace(make_portfolio(), assignment={make_key(1): 0})
    return [
        make_portfolio(kernel_digest="sha256:old", measured="2026-12-01"),
        small,
        make_portfolio(),
        dataclasses.replace(make_portfolio(), loss=1.0),
        dataclasses.replace(small, measured="2026-11-30"),
    ]


def test_the_order_of_imports_does_not_matter_for_portfolios(tmp_path):
    offered = _portfolios()
    for number, order in enumerate(itertools.permutations(offered)):
        layer = WritableLayer("", tmp_path / str(number))
        for portfolio in order:
            archive_of([], [portfolio]).merge_into(layer, ENVIRONMENT.digests)
        (held,) = read_portfolios(layer, "decode")
        assert held.portfolio == offered[-1]


def test_a_damaged_portfolio_gives_way_and_a_copy_is_kept(tmp_path):
    layer = WritableLayer("", tmp_path)
    layer.write_file("decode", "nvidia_h200", PORTFOLIO, b"[]")
    archive_of([], [make_portfolio()]).merge_into(layer)
    (held,) = read_portfolios(layer, "decode")
    assert held.portfolio == make_portfolio()
    assert held.path.with_name(held.path.name + ".damaged").read_bytes() == b"[]"


def test_a_portfolio_of_a_later_schema_is_not_overwritten(tmp_path):
    layer = WritableLayer("", tmp_path)
    later = make_portfolio().to_text().replace('"schema": 1', '"schema": 2').encode()
    layer.write_file("decode", "nvidia_h200", PORTFOLIO, later)
    with pytest.raises(RecordError, match="later version"):
        archive_of(RECORDS, [make_portfolio()]).merge_into(layer)
    assert layer.path("decode", "nvidia_h200", PORTFOLIO).read_bytes() == later
    assert layer.gpus("decode") == []


def _files(folder):
    """What a layer holds; locks are left where something was tried."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".lock"]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def _newer(layer):
    path = layer.path("decode", "nvidia_h200")
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2', 1))


def _folder_for_portfolio(layer):
    layer.path("decode", "nvidia_h200", PORTFOLIO).mkdir()


def _folder_for_copy(layer):
    layer.path("decode", "nvidia_h100", ".json.tmp").mkdir()


@pytest.mark.parametrize("spoil", [_newer, _folder_for_portfolio, _folder_for_copy])
def test_what_cannot_all_be_imported_changes_nothing(path, tmp_path, spoil):
    """The first files of the archive could be."""
    layer = WritableLayer("", tmp_path / "cache")
    layer.merge_in([make_record(make_key(7)), make_record(gpu="nvidia_h100")])
    layer.append(make_record(make_key(8)))
    spoil(layer)
    before = _files(layer.root)
    with pytest.raises((OSError, RecordError)):
        read_archive(path).merge_into(layer)
    assert _files(layer.root) == before


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_import_that_fails_half_way_is_undone(path, tmp_path, monkeypatch, failing):
    layer = WritableLayer("", tmp_path / "cache")
    layer.merge_in([make_record(make_key(7))])
    layer.append(make_record(make_key(8)))
    before, calls, replace = _files(layer.root), [], os.replace

    def fail(*paths):
        calls.append(paths)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_archive(path).merge_into(layer)
    assert _files(layer.root) == before
    monkeypatch.undo()
    read_archive(path).merge_into(layer)
    assert {file.gpu for file in layer.load("decode")} == {"nvidia_h100", "nvidia_h200"}


def test_an_archive_cut_at_any_byte_is_refused(path):
    data = path.read_bytes()
    for size in range(0, len(data), 11):
        path.write_bytes(data[:size])
        with pytest.raises(RecordError):
            read_archive(path)


def test_an_archive_with_any_changed_byte_reads_the_same_or_is_refused(path):
    data, whole = path.read_bytes(), read_archive(path)
    refused = 0
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        try:
            assert read_archive(path) == whole
        except RecordError:
            refused += 1
    assert refused > len(data) / 7 / 2


@pytest.mark.parametrize(
    "name",
    [
        "../decode/a.json",
        "/decode/a.json",
        "decode/../../a.json",
        "decode/..json",
        "..",
        "a.json",
        "decode/a/b.json",
        "decode/a.py",
        "decode\\a.json",
        "decode/",
        "%2e%2e/a.json",
        "decode/%2e%2e.json",
        "./decode/a.json",
        "decode/a.journal",
    ],
)
def test_members_that_are_not_records_or_leave_the_folder_are_refused(path, name):
    _rebuild(path, lambda files: files.update({name: files[MEMBER]}))
    with pytest.raises(RecordError):
        read_archive(path)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"time_us": 54', b'"time_us": -54', "time_us must be"),
        (b'"schema": 1', b'"schema": 2', "schema must be 1, got 2"),
        (b'"gpu": "nvidia_h200"', b'"gpu": "nvidia_b200"', "gpu must be"),
        (b"{", b"[", "not JSON"),
    ],
)
def test_content_is_checked_although_its_checksum_fits(path, old, new, reason):
    def change(files):
        assert old in files[MEMBER]
        files[MEMBER] = files[MEMBER].replace(old, new, 1)

    _rebuild(path, change)
    with pytest.raises(RecordError, match=reason):
        read_archive(path)


def test_a_checksum_that_does_not_fit_is_named(path):
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files[MEMBER] += b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(RecordError, match=f"{MEMBER}: bytes must be"):
        read_archive(path)


@pytest.mark.parametrize("field", ["bytes", "sha256"])
@pytest.mark.parametrize("told", [1, None, "\ud800"])
def test_what_the_manifest_says_of_a_file_must_fit(path, field, told):
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files["manifest.json"])
    manifest["files"][MEMBER][field] = told
    files["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(RecordError, match=f"{MEMBER}: {field} must be"):
        read_archive(path)


@pytest.mark.parametrize("change", [dict.clear, lambda files: files.update(b={})])
def test_a_manifest_that_names_other_files_is_refused(path, change):
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files["manifest.json"])
    change(manifest["files"])
    files["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(RecordError, match="files must name every member"):
        read_archive(path)


def test_a_foreign_zip_is_refused(path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "hello")
    path.write_bytes(buffer.getvalue())
    with pytest.raises(RecordError, match=r"must hold manifest\.json"):
        read_archive(path)


def test_an_archive_that_unpacks_to_too_much_is_refused(path, monkeypatch):
    from portable_backend.warmup import archive

    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 100)
    with pytest.raises(RecordError, match="at most 100"):
        read_archive(path)


def test_nothing_to_share_is_refused():
    with pytest.raises(RecordError, match="at least one record"):
        archive_of([]).to_bytes()
