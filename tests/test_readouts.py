# SPDX-License-Identifier: Apache-2.0
"""Read-outs kept in a file, and the command that makes tables from them."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.errors import UnsupportedError
from portable_backend.warmup.compile_pool import binary_of
from portable_backend.warmup.kernel_specs import spec_of
from portable_backend.warmup.predicted_tables import common_keys
from portable_backend.warmup.readouts import Readouts, usual_key
from portable_backend.warmup.records import TuningKey

ROOT = Path(__file__).resolve().parents[1]
DEVICE = DeviceInfo.for_arch("sm80")
KEY = next(common_keys("decode"))
CONFIG = spec_of(KEY).default(KEY, DEVICE)
DIGESTS = {"decode": "sha256:aa"}
HELD = {"shared_bytes": 4096, "registers": 96, "spills": 0, "programs_per_unit": 5}


def held(tmp_path, **changes):
    """A file with one read-out, as compiling leaves it."""
    path = tmp_path / "readouts.json.gz"
    readouts = Readouts(path, DIGESTS, "3.6.0")
    readouts._part("decode")["readouts"][_name()] = HELD | changes
    assert readouts.get(KEY, CONFIG, DEVICE) is not None or "failure" in changes
    readouts.write(path)
    return path


def _name():
    from portable_backend.warmup import readouts

    return readouts._name(KEY, CONFIG, DEVICE)


def test_what_was_compiled_is_found_again(tmp_path):
    path = held(tmp_path)
    readouts = Readouts(path, DIGESTS, "3.6.0")
    found = readouts.get(KEY, CONFIG, DEVICE)
    assert (found.registers, found.programs_per_unit) == (96, 5)
    assert readouts.missing([(KEY, CONFIG, DEVICE)]) == []
    readouts.compile([(KEY, CONFIG, DEVICE)], workers=1)  # nothing to do
    assert readouts.why_not(KEY, CONFIG, DEVICE) is None


@pytest.mark.parametrize(
    "today", [({"decode": "sha256:bb"}, "3.6.0"), (DIGESTS, "3.7.0")]
)
def test_other_code_or_another_triton_is_compiled_anew(tmp_path, today):
    readouts = Readouts(held(tmp_path), *today)
    assert readouts.get(KEY, CONFIG, DEVICE) is None
    (job,) = readouts.missing([(KEY, CONFIG, DEVICE), (KEY, CONFIG, DEVICE)])
    assert job == (usual_key(KEY, CONFIG, DEVICE), CONFIG, DEVICE)
    if interpreting():
        with pytest.raises(UnsupportedError, match="unset TRITON_INTERPRET"):
            readouts.compile([(KEY, CONFIG, DEVICE)], workers=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spills": 3}, "spills 3 registers"),
        ({"shared_bytes": 1 << 20}, "bytes of shared memory"),
        ({"programs_per_unit": 0}, "wants 96 registers"),
        ({"failure": "CompilationError: no"}, "CompilationError: no"),
    ],
)
def test_what_fails_spills_or_exceeds_a_limit_says_so(tmp_path, changes, reason):
    readouts = Readouts(held(tmp_path, **changes))
    assert reason in readouts.why_not(KEY, CONFIG, DEVICE)


def test_keys_that_differ_in_traffic_or_heads_alone_share_a_binary():
    wide = KEY.to_dict() | {"num_seqs": 64, "num_kv_heads": 1, "num_queries_per_kv": 8}
    usual = usual_key(KEY, CONFIG, DEVICE)
    assert usual_key(TuningKey.from_dict("decode", wide), CONFIG, DEVICE) == usual
    small = TuningKey.from_dict("decode", KEY.to_dict() | {"head_size": 64})
    assert usual_key(small, CONFIG, DEVICE) != usual


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("head_size", [32, 256])
def test_on_amd_read_outs_are_of_caches_as_large_as_engines(kernel, head_size):
    """More than 2 GiB: offsets of 64 bits take registers that a small cache spares."""
    key = list(common_keys(kernel))[-1]
    key = TuningKey.from_dict(kernel, key.to_dict() | {"head_size": head_size})
    for arch, is_far in (("sm80", False), ("gfx942", True)):
        device = DeviceInfo.for_arch(arch)
        config = spec_of(key).default(key, device)
        _, _, sizes, *_ = binary_of(usual_key(key, config, device), config)
        assert sizes[-1] == (is_far and not key.to_dict().get("no_context"))


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b'{"schema": 9}')],
    ids=["empty", "no gzip", "another schema"],
)
def test_a_file_of_anything_else_is_refused_by_name(tmp_path, content):
    path = tmp_path / "readouts.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^path must be read-outs of schema 1, got "):
        Readouts(path)


@pytest.fixture
def predict(monkeypatch, capsys):
    """scripts/predict_tables.py: exit code, stdout and stderr."""
    path = ROOT / "scripts" / "predict_tables.py"
    main = runpy.run_path(str(path))["main"]

    def predict(*arguments):
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        code = main()
        return code, *capsys.readouterr()

    return predict


def test_the_command_evaluates_or_writes_and_says_so(tmp_path, predict):
    code, out, err = predict(tmp_path, "--evaluate", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert "one of --out and --evaluate" in err


def test_the_command_refuses_a_folder_without_sweeps(tmp_path, predict):
    code, out, err = predict(tmp_path, "--evaluate")
    assert (code, out) == (2, "")
    assert "folder must be one with *.sweep.json.gz files" in err


def test_the_command_refuses_times_that_nobody_measured(tmp_path, predict):
    source = next((ROOT / "tests" / "sweeps").glob("*.sweep.json.gz"))
    data = json.loads(gzip.decompress(source.read_bytes())) | {"synthetic": True}
    (tmp_path / source.name).write_bytes(gzip.compress(json.dumps(data).encode()))
    code, out, err = predict(tmp_path, "--evaluate")
    assert (code, out) == (2, "")
    assert "nobody measured decode-nvidia_h200" in err
