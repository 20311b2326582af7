# SPDX-License-Identifier: Apache-2.0
"""`portable-backend cache`: results on stdout, the rest on stderr, and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from record_fakes import (
    GPU,
    make_key,
    make_portfolio,
    make_record,
    permissions_bind,
)

from portable_backend import cli
from portable_backend.commands import cache
from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.errors import RecordError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.layers import PORTFOLIO, WritableLayer
from portable_backend.warmup.records import TuningKey
from portable_backend.warmup.upkeep import Measurement

DIGESTS = {"decode": "sha256:aa", "kv_cache": "sha256:aa"}
KEY = ["block_size=16", "dtype=bfloat16", "head_size=128", "num_seqs=32"]
PLACE = ["--gpu", GPU, "--arch", "sm90"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's cache, with one record; kernels and toolchain as it names them.

    Nothing is shipped.
    """
    folder = tmp_path / "cache"
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(folder))
    monkeypatch.delenv("PORTABLE_BACKEND_CACHE_LAYERS", raising=False)
    monkeypatch.setattr(
        "portable_backend.warmup.store.shipped_folder", lambda: tmp_path / "none"
    )
    monkeypatch.setattr(cache, "current_digests", lambda: DIGESTS)
    monkeypatch.setattr(
        cache, "current_toolchain", lambda: dict(make_record().toolchain)
    )
    WritableLayer("", folder).merge_in([make_record()])
    return folder


@pytest.fixture
def run(capsys):
    def run(*arguments):
        """Exit code, stdout (parsed if it is JSON) and stderr."""
        try:
            code = cli.main(["cache", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in arguments else out, err

    return run


def test_list_names_files_and_counts(run):
    code, (row,), err = run("list", "--json")
    assert (code, err) == (0, "")
    assert (row["layer"], row["kernel"], row["gpu"]) == ("user cache", "decode", GPU)
    assert (row["records"], row["verified"], row["problems"]) == (1, 1, [])
    code, out, _ = run("list")
    assert code == 0 and f"decode  {GPU}: 1 records, 1 verified" in out
    assert run("list", "--gpu", "other")[1] == "no records in any layer\n"


def test_list_fails_where_a_file_is_damaged(run, folder):
    (folder / "decode" / "broken.json").write_text("{")
    code, rows, _ = run("list", "--json")
    assert code == 1
    assert [bool(row["problems"]) for row in rows] == [True, False]


def _write_portfolio(folder, **fields):
    portfolio = make_portfolio(**fields)
    layer = WritableLayer("", folder)
    layer.write_file("decode", portfolio.gpu, PORTFOLIO, portfolio.to_text().encode())
    return layer.path("decode", portfolio.gpu, PORTFOLIO)


def test_list_shows_portfolios_and_what_is_wrong_with_them(run, folder):
    path = _write_portfolio(folder)
    _write_portfolio(folder, gpu="nvidia_h100")  # which has no records
    code, (other, row), _ = run("list", "--json")
    assert (code, other["gpu"], other["records"]) == (0, "nvidia_h100", 0)
    told = row["portfolio"]
    assert (told["buckets"], len(told["configs"]), told["path"]) == (3, 2, str(path))
    assert told["loss"] == 1.0 and told["worst_loss"] >= 1
    assert "portfolio of 2 configs for 3 keys loses 0.00%" in run("list")[1]
    path.write_text("{")
    code, (_, row), _ = run("list", "--json")
    assert code == 1 and row["portfolio"] is None
    assert row["problems"][0].startswith(f"{path}: not JSON")


def test_merge_brings_portfolios_along(run, tmp_path, folder):
    other = tmp_path / "other"
    path = _write_portfolio(other)
    code, result, _ = run("merge", other, "--json")
    assert (code, result["portfolios"]) == (0, 1)
    assert (folder / "decode" / path.name).read_text() == path.read_text()
    path.write_text("{")
    code, result, _ = run("merge", other, "--json")
    assert (code, len(result["problems"])) == (1, 1)


def test_prune_removes_stale_portfolios(run, folder, monkeypatch):
    path = _write_portfolio(folder)
    run("prune", "--stale")
    assert path.exists()
    monkeypatch.setattr(cache, "current_digests", lambda: {"decode": "sha256:new"})
    _, result, _ = run("prune", "--stale", "--dry-run", "--json")
    assert result["tables"] == [str(path)] and path.exists()
    assert "removed 1 records and 1 files" in run("prune", "--stale")[1]
    assert not path.exists()


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _folder(path):
    path.unlink()
    path.mkdir()


def _lock(path):
    path.chmod(0)


def _lock_folder(path):
    path.parent.chmod(0)


@pytest.mark.parametrize("suffix", [".json", ".journal"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_fifo, "not a regular file"),
        (_folder, "not a regular file"),
        (_lock, "Permission denied"),
        (_lock_folder, "Permission denied"),
    ],
)
def test_list_fails_where_a_file_cannot_be_read(run, folder, spoil, problem, suffix):
    path = folder / "decode" / f"{GPU}{suffix}"
    path.touch()
    spoil(path)
    with permissions_bind():
        code, rows, _ = run("list", "--json")
        assert code == 1 and run("list")[0] == 1
        assert f"not used: {folder}" in run("list")[1]
    (told,) = [text for row in rows for text in row["problems"]]
    place = path.parent if spoil is _lock_folder else path
    assert told == f"{place}: {problem}"
    path.parent.chmod(0o755)


def test_merge_fails_where_a_folder_cannot_be_read(run, tmp_path):
    other = tmp_path / "other"
    WritableLayer("", other).merge_in([make_record(make_key(1))])
    (other / "decode").chmod(0)
    with permissions_bind():
        code, result, _ = run("merge", other, "--json")
    (other / "decode").chmod(0o755)
    assert code == 1 and result["records"] == 0
    assert result["problems"] == [f"{other}/decode: Permission denied"]


def test_show_gives_records_for_people_and_for_machines(run):
    code, out, _ = run("show")
    assert code == 0
    assert "seq_len=4096" in out and "41.5 us, default 47.9 us, verified" in out
    _, (row,), _ = run("show", "--json")
    assert row["config"] == {"BLOCK_N": 64, "num_warps": 4} and row["gpu"] == GPU


def test_read_only_layers_are_shown_too(run, tmp_path, monkeypatch):
    WritableLayer("", tmp_path / "image").merge_in([make_record(make_key(1))])
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_LAYERS", str(tmp_path / "image"))
    _, rows, _ = run("show", "--json")
    assert [row["layer"] for row in rows] == ["user cache", "image layer 1"]


def test_explain_says_what_differs(run):
    code, found, _ = run("explain", "decode", *KEY, "seq_len=8192", *PLACE, "--json")
    assert (code, found["grade"]) == (0, "nearest")
    (difference,) = found["candidates"][0]["differences"]
    assert difference == {
        "field": "seq_len",
        "wanted": 8192,
        "stored": 4096,
        "blocks": True,
    }
    _, out, _ = run("explain", "decode", *KEY, "seq_len=8192", *PLACE)
    assert "seq_len: wanted 8192, stored 4096" in out
    _, out, _ = run("explain", "decode", *KEY, "seq_len=4096", *PLACE)
    assert "exact from user cache" in out


def test_explain_goes_on_where_kernels_cannot_be_imported(run, monkeypatch):
    def fail():
        raise RecordError("no triton")

    monkeypatch.setattr(cache, "current_digests", fail)
    code, out, err = run("explain", "decode", *KEY, "seq_len=4096", *PLACE)
    assert code == 0 and "exact" in out and "not compared: no triton" in err


def test_explain_names_what_todays_space_refuses(run, monkeypatch):
    monkeypatch.setattr(cache, "SPACE_CHECK", lambda key, config: "too large")
    _, found, _ = run("explain", "decode", *KEY, "seq_len=4096", *PLACE, "--json")
    assert (found["grade"], found["config"]) == ("default", None)
    assert found["candidates"][0]["differences"][0]["field"] == "config"


def test_explain_asks_the_kernels_own_space(run, folder):
    fields = {"dtype": "bfloat16", "head_size": 128, "num_kv_heads": 8}
    key = TuningKey.of("kv_cache", num_tokens=256, **fields)
    config = KernelConfig.of(VECTORS=128, num_warps=3)
    WritableLayer("", folder).merge_in(
        [make_record(key, config=config, kernel_digest="sha256:aa")]
    )
    explain = ["explain", "kv_cache", *(f"{n}={v}" for n, v in key.fields)]
    _, found, _ = run(*explain, *PLACE, "--json")
    (text,) = [reason for reason in found["reasons"] if "refused" in reason]
    assert found["grade"] == "default" and "num_warps is 3, not one of" in text
    unknown = ["--gpu", GPU, "--arch", "sm999"]
    _, _, err = run(*explain, *unknown, "--json")
    assert "arch is not known" in err


def test_explain_takes_the_gpu_at_hand_and_asks_where_there_is_none(run, monkeypatch):
    device = DeviceInfo(GPU, "sm90", 132, ARCH_LIMITS["sm90"])
    monkeypatch.setattr(DeviceInfo, "detect", lambda name: device)
    assert "exact from" in run("explain", "decode", *KEY, "seq_len=4096")[1]

    def fail(name):
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(DeviceInfo, "detect", fail)
    code, out, err = run("explain", "decode", *KEY, "seq_len=4096")
    assert (code, out) == (2, "") and "no NVIDIA driver" in err and "--gpu" in err


def test_what_was_exported_can_be_imported_elsewhere(run, tmp_path):
    file, other = tmp_path / "records.zip", tmp_path / "other"
    code, result, _ = run("export", file, "--json")
    assert code == 0 and result["records"] == 1
    assert run("import", file, "--cache-dir", other)[0] == 0
    explain = ["explain", "decode", *KEY, "seq_len=4096", *PLACE]
    _, found, _ = run(*explain, "--cache-dir", other, "--json")
    assert found["grade"] == "exact"


def test_export_can_add_read_only_layers(run, tmp_path, monkeypatch):
    WritableLayer("", tmp_path / "image").merge_in([make_record(make_key(1))])
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_LAYERS", str(tmp_path / "image"))
    assert run("export", tmp_path / "a", "--json")[1]["records"] == 1
    assert run("export", tmp_path / "a", "--layers", "--json")[1]["records"] == 2


def test_export_of_nothing_and_import_of_anything_else_fail(run, tmp_path):
    file = tmp_path / "records.zip"
    code, out, err = run("export", file, "--gpu", "other")
    assert (code, out) == (1, "") and "at least one record" in err
    file.write_text("hello")
    code, out, err = run("import", file)
    assert (code, out) == (1, "") and "not an archive of records" in err
    assert run("import", tmp_path / "absent")[0] == 1


def test_merge_brings_other_folders_in(run, tmp_path):
    for n in (1, 2):
        WritableLayer("", tmp_path / str(n)).merge_in([make_record(make_key(n))])
    (tmp_path / "1" / "decode" / "broken.json").write_text("{")
    code, result, _ = run("merge", tmp_path / "1", tmp_path / "2", "--json")
    assert code == 1 and len(result["problems"]) == 1
    assert len(run("show", "--json")[1]) == 3
    assert run("merge", tmp_path / "absent")[0] == 2


def test_verify_without_a_gpu_fails_and_drops_nothing(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    before = run("show", "--json")[1]
    code, out, err = run("verify")
    assert (code, out) == (1, "") and "cuda:0" in err
    assert run("show", "--json")[1] == before != []


def test_verify_reports_what_it_dropped(run, monkeypatch):
    monkeypatch.setattr(cache, "MEASURER", lambda record: Measurement(time_us=40))
    code, out, err = run("verify")
    assert code == 0 and "1 records verified" in out and "verified" in err
    wrong = Measurement(problem="differs from the oracle")
    monkeypatch.setattr(cache, "MEASURER", lambda record: wrong)
    code, result, _ = run("verify", "--json")
    assert code == 1
    assert result["dropped"][0]["problem"] == "differs from the oracle"
    assert run("show", "--json")[1] == []
    assert "0 verified, 1 refuted, 0 in history" in run("list")[1]
    # What verifies nothing is no success: it may be the wrong machine or volume.
    code, out, _ = run("verify")
    assert code == 1 and "nothing to verify" in out
    assert "removed 1 records" in run("prune", "--refuted")[1]
    assert "refuted" not in run("list")[1]


def test_prune_removes_stale_records(run, monkeypatch):
    assert run("prune", "--stale")[0] == 0
    assert len(run("show", "--json")[1]) == 1
    monkeypatch.setattr(cache, "current_digests", lambda: {"decode": "sha256:new"})
    code, result, _ = run("prune", "--stale", "--dry-run", "--json")
    assert code == 0 and len(result["records"]) == 1
    assert len(run("show", "--json")[1]) == 1
    assert "removed 1 records" in run("prune", "--stale")[1]
    assert run("show", "--json")[1] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["prune"],
        ["prune", "--min-schema", "2"],
        ["prune", "--min-schema", "0"],
        ["prune", "--min-schema", "-1"],
        ["explain", "decode"],
        ["explain", "decode", "seq_len", *PLACE],
        ["explain", "decode", "seq_len=x", *PLACE],
        ["explain", "decode", "seq_len=1", "--gpu", GPU],
        ["list", "--unknown"],
        ["explain", "no_such", "seq_len=1", *PLACE],
        ["show", "--kernel", "no_such"],
        ["list", "--kernel", "no_such"],
        ["export", "file", "--kernel", "no_such"],
        ["verify", "--kernel", "no_such"],
    ],
    ids=str,
)
def test_wrong_usage_exits_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err


def test_a_kernel_that_nobody_knows_is_refused_with_those_there_are(run, folder):
    wanted = "kernel must be one of decode, kv_cache, prefill, rms_norm, got no_such"
    assert wanted in run("show", "--kernel", "no_such")[2]
    assert run("show", "--kernel", "prefill")[0] == 0
    # One that is not ours has records.
    WritableLayer("", folder).merge_in([make_record(TuningKey.of("matmul", n=64))])
    code, rows, _ = run("show", "--kernel", "matmul", "--json")
    assert (code, len(rows)) == (0, 1)


def test_a_damaged_archive_is_refused_with_what_to_do(run, tmp_path):
    file = tmp_path / "records.zip"
    for data in (b"\xff\xfe", b"[", b"[]"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("manifest.json", data)
        code, out, err = run("import", file)
        assert (code, out) == (1, "") and "copy or export it again" in err
        assert f"{file}, manifest.json: " in err and "must be" in err


def test_a_wrong_setting_exits_2_and_names_it(run, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND_TUNE", "maybe")
    code, _, err = run("list")
    assert code == 2 and "PORTABLE_BACKEND_TUNE" in err


def test_a_user_cache_that_cannot_be_written_fails_an_import(run, tmp_path, folder):
    file, place = tmp_path / "records.zip", tmp_path / "a file"
    run("export", file)
    place.write_text("")
    code, _, err = run("import", file, "--cache-dir", place / "cache")
    assert code == 1 and str(place) in err


COMMANDS = [
    ["list"],
    ["show"],
    ["explain", "decode", *KEY, "seq_len=4096", *PLACE],
    ["export", "records.zip"],
    ["verify"],
    ["prune", "--stale"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_cache_that_is_no_folder_is_refused(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "MEASURER", lambda record: Measurement(time_us=40))
    file, absent = tmp_path / "file", tmp_path / "absent"
    file.touch()
    for folder, problem in [(file, "is no folder"), (absent, "does not exist")]:
        code, out, err = run(*command, "--cache-dir", folder)
        assert (code, out) == (2, "") and f"{folder} {problem}" in err
        assert "--cache-dir must be a folder of records" in err
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(file))
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert "PORTABLE_BACKEND_CACHE_DIR must be a folder of records" in err
    # Before anything is tuned there is none.
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(absent))
    assert run(*command)[0] == (1 if command[0] in ("export", "verify") else 0)


def test_nothing_is_brought_into_a_file(run, tmp_path, folder):
    records, file = tmp_path / "records.zip", tmp_path / "file"
    run("export", records)
    file.touch()
    for command in (["import", records], ["merge", folder]):
        code, out, err = run(*command, "--cache-dir", file)
        assert (code, out) == (2, "") and f"{file} is no folder" in err


def test_ctrl_c_exits_130_without_a_traceback(folder):
    # A job in the background starts with the signal ignored, as do its children.
    code = "import signal, sys, time; from portable_backend import cli; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from portable_backend.commands import cache; "
    code += (
        "cache.merge_records = lambda *a: [print('up', flush=True), time.sleep(60)]; "
    )
    code += "sys.exit(cli.main(['cache', 'show']))"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout.readline() == b"up\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert (child.returncode, err) == (130, b"interrupted\n")


# One fits stdout's buffer and is written at the end, the other does not.
@pytest.mark.parametrize("count", [1, 1000])
def test_a_reader_that_stops_early_gets_no_traceback(folder, count):
    layer = WritableLayer("", folder)
    layer.merge_in(make_record(make_key(n)) for n in range(count))
    code = "import sys; from portable_backend import cli; "
    code += "sys.exit(cli.main(['cache', 'show']))"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("PYTHONUNBUFFERED", None)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    child.stdout.close()
    _, err = child.communicate()
    assert (child.returncode, err) == (1, b"")
