# SPDX-License-Identifier: Apache-2.0
"""What `warm` compiles is what a stub GPU's launches find: run by test_warm_cli.py.

Not collected by itself, since Triton's interpreter must be off before triton loads.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import triton
from stub_binaries import SMOLLM2, described, nothing_ahead, walk  # noqa: F401
from stub_driver import ARCHS
from triton import knobs

from portable_backend import cli
from portable_backend.device import DeviceInfo
from portable_backend.errors import UnsupportedError
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup import warming
from portable_backend.warmup.binaries import binaries_of
from portable_backend.warmup.binary import Binary, cache_entry, source_of
from portable_backend.warmup.buckets import EngineLimits
from portable_backend.warmup.compile_pool import WORKER, CompileWorker
from portable_backend.warmup.lookup import Choice
from portable_backend.warmup.serving_configs import ServingConfigs
from portable_backend.warmup.triton_cache import shared_bytes

compile_for_real = triton.compiler.compile
LIMITS = EngineLimits(max_num_seqs=2, max_num_batched_tokens=64)
GPU = DeviceInfo.for_arch("sm90", 132)
COMMAND = (sys.executable, "-P", "-m", "portable_backend.cli")
NO_WORKER = (sys.executable, "-c", "raise SystemExit('no compiler')")


@pytest.fixture(autouse=True)
def nothing_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND_CACHE_DIR", str(tmp_path / "records"))
    monkeypatch.delenv("PORTABLE_BACKEND_CACHE_LAYERS", raising=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def some():
    model, traits = described(SMOLLM2)
    return binaries_of(model, traits, LIMITS, GPU)


def arguments(folder):
    """Of the command, with a model in that folder."""
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return [
        "warm", "--model", str(folder), "--target", "sm_90", "--json",
        "--max-num-seqs", str(LIMITS.max_num_seqs),
        "--max-num-batched-tokens", str(LIMITS.max_num_batched_tokens),
    ]  # fmt: skip


def compiled_by_steps(platform, steps=150):
    """What random steps compile anew, through Triton's own launch code."""
    compiled, hits = [], []

    def listen(*, src, cache_hit, **_):
        (hits if cache_hit else compiled).append(src.fn.__name__)

    with mock.patch.object(knobs.compilation, "listener", listen):
        walk(platform, SMOLLM2, LIMITS, steps, compiler=compile_for_real)
    assert len({*hits, *compiled}) > 3
    return compiled


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache filled by the command, and what it printed."""
    folder = tmp_path_factory.mktemp("warmed")
    with mock.patch.dict(os.environ, {"PORTABLE_BACKEND_CACHE_DIR": str(folder)}):
        done = subprocess.run(
            [*COMMAND, *arguments(folder), "--cache-dir", folder / "cache"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return folder / "cache", json.loads(done.stdout), done.stderr


@pytest.mark.vllm
def test_a_warmed_cache_compiles_nothing_here_or_where_it_is_moved(
    warmed, tmp_path, monkeypatch, capsys
):
    (cache, result, err), moved = warmed, tmp_path / "moved"
    (row,) = result["targets"]
    assert row["compiled"] == row["binaries"] > 10
    assert result["bytes"] > 100_000
    assert f"sm90: {row['binaries']} of {row['binaries']} binaries" in err
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert compiled_by_steps("cuda") == []

    shutil.copytree(cache, moved)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    cache.rename(tmp_path / "away")
    try:
        # As it is, Triton would look for the files where they were.
        model, traits = described(SMOLLM2)
        for binary in binaries_of(model, traits, LIMITS, GPU):
            assert shared_bytes(moved, *cache_entry(binary, GPU)) is None
        assert cli.main(["warm", "--relocate", "--cache-dir", str(moved)]) == 0
        assert f"{row['binaries']} entries" in capsys.readouterr().out
        assert compiled_by_steps("cuda") == []
    finally:
        (tmp_path / "away").rename(cache)


def test_a_cache_made_for_another_place_is_found_there(
    warmed, tmp_path, monkeypatch, capsys
):
    made, place = tmp_path / "made", tmp_path / "mounted"
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # put back at the end
    shutil.copytree(warmed[0], made)
    for _ in range(2):  # found also where it was written for elsewhere
        code = cli.main(
            [*arguments(tmp_path), "--cache-dir", str(made), "--mount-at", str(place)]
        )
        result = json.loads(capsys.readouterr().out)
        (row,) = result["targets"]
        assert code == 0 and result["mount_at"] == str(place)
        assert row["present"] == row["binaries"]
    shutil.copytree(made, place)
    shutil.rmtree(made)
    model, traits = described(SMOLLM2)
    for binary in binaries_of(model, traits, LIMITS, GPU):
        assert shared_bytes(place, *cache_entry(binary, GPU)) is not None


@pytest.mark.parametrize("arch", ARCHS.values())
def test_binaries_survive_json(arch):
    model, traits = described(SMOLLM2)
    device = DeviceInfo.for_arch(arch)
    for binary in binaries_of(model, traits, LIMITS, device):
        copy = Binary.from_dict(json.loads(json.dumps(binary.to_dict())))
        assert copy == binary
        assert cache_entry(copy, device) == cache_entry(binary, device)


def test_a_binary_of_other_code_is_refused(some):
    data = some[0].to_dict()
    for module, function in [("os", "system"), (data["module"], "AttentionConfig")]:
        other = Binary.from_dict(data | {"module": module, "function": function})
        with pytest.raises(ValueError, match="of a kernel of this package"):
            source_of(other)


def test_what_does_not_compile_is_told_and_the_rest_goes_on(cache, some):
    some = [x for x in some if x.kernel == "rms_norm"][:2]
    wrong = Binary.from_dict(some[0].to_dict() | {"function": "AttentionConfig"})
    with mock.patch.object(warming, "cache_entry", lambda *_: ("none", "none")):
        warmed = warming.warm_binaries([wrong, *some], GPU, workers=1)
    assert warmed.compiled == len(some)
    ((binary, reason),) = warmed.failures
    assert binary == wrong and "of a kernel of this package" in reason


def test_too_much_shared_memory_is_a_failure_also_when_it_is_there(cache, some):
    (plan, *_) = [x for x in some if x.kernel == "plan"]
    tiny = mock.patch.object(
        warming, "_over_limit", lambda taken, device: "takes too much"
    )
    for _ in range(2):
        with tiny:
            warmed = warming.warm_binaries([plan], GPU, workers=1)
        assert warmed.failures == [(plan, "takes too much")]
    assert warming.warm_binaries([plan], GPU, workers=1).present == 1


def test_workers_that_do_not_start_are_told(cache, some):
    warmed = warming.warm_binaries(some, GPU, workers=2, command=NO_WORKER)
    assert warmed.binaries == len(warmed.failures) == len(some)
    assert "no compiler" in warmed.failures[0][1]


def test_an_interruption_leaves_no_worker(cache, some):
    made = []

    def make(*args, **more):
        made.append(CompileWorker(*args, **more))
        return made[-1]

    def interrupt(warmed, total):
        if warmed.compiled:
            raise KeyboardInterrupt

    with (
        mock.patch.object(warming, "CompileWorker", make),
        pytest.raises(KeyboardInterrupt),
    ):
        warming.warm_binaries(some, GPU, workers=2, on_done=interrupt, command=WORKER)
    assert len(made) == 2
    assert all(x._process is None or x._process.poll() is not None for x in made)
    assert list(cache.iterdir())  # what was compiled stays


def test_ctrl_c_ends_the_command_with_its_code(tmp_path, cache):
    command = [*COMMAND, *arguments(tmp_path), "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(Path(cache).glob("*/__grp__*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err


class Recorded:
    """Gives one config for each kernel, and defaults for the rest."""

    def __init__(self, configs):
        self.configs = configs

    def choose(self, key):
        config = self.configs.get(key.kernel)
        if config is None:
            return Choice(KernelConfig(()), "default")
        return Choice(config, "exact")


def test_configs_of_records_join_the_defaults(some):
    model, traits = described(SMOLLM2)
    default = ServingConfigs(model, LIMITS, GPU).norm(model.norms[0], 8)
    assert list(default) == [None]
    recorded = KernelConfig.of(
        ROWS=1, PROGRAMS_PER_UNIT=0, EVICT_FIRST=False, num_warps=8, launch_pdl=None
    )
    configs = ServingConfigs(model, LIMITS, GPU, Recorded({"rms_norm": recorded}))
    found = binaries_of(model, traits, LIMITS, GPU, configs)
    added = set(found) - set(some)
    assert set(some) < set(found)
    assert {binary.kernel for binary in added} == {"rms_norm"}
    assert {dict(binary.options)["num_warps"] for binary in added} == {8}


def test_the_interpreter_needs_no_binaries():
    model, traits = described(SMOLLM2)
    with pytest.raises(UnsupportedError, match="compiles nothing"):
        binaries_of(model, traits, LIMITS, DeviceInfo.for_arch("interpreter"))
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        pytest.raises(UnsupportedError, match="unset TRITON_INTERPRET"),
    ):
        binaries_of(model, traits, LIMITS, GPU)
