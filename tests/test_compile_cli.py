# SPDX-License-Identifier: Apache-2.0
"""`portable-backend compile`, on a machine without a GPU."""

import json
from typing import ClassVar

import pytest

from portable_backend.cli import main
from portable_backend.commands.compile import TARGETS
from portable_backend.device import ARCH_LIMITS
from portable_backend.warmup import compile_pool
from portable_backend.warmup.compile_pool import Compiled
from portable_backend.warmup.resources import Readout


@pytest.fixture
def fake_pool(monkeypatch):
    """A pool that answers at once: what it says is in its `answer`."""

    class FakePool:
        seen: ClassVar = []
        made: ClassVar = []

        def __init__(self, device, **options):
            self.device = device
            self.made.append((device.arch, options))

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def submit(self, key, configs):
            self.seen += [(self.device.arch, key, config) for config in configs]

        def wait(self, key, configs):
            return [Compiled(key, c, *self.answer(key, c)) for c in configs]

        @staticmethod
        def answer(key, config):
            return Readout(1024, 64, 0, 4, 0.5, num_warps=4), None

    monkeypatch.setattr(compile_pool, "CompilePool", FakePool)
    return FakePool


def run(capsys, *arguments):
    code = main(["compile", *arguments])
    return code, capsys.readouterr()


@pytest.mark.long
def test_small_kernels_compile_for_both_vendors(fresh_cache_dir, capsys):
    code, said = run(
        capsys, "--target", "sm_80,gfx90a", "--kernel", "kv_cache", "--kernel",
        "rms_norm", "--key", "row_size=576", "--key", "num_rows=100", "--workers", "1",
        "--json",
    )  # fmt: skip
    rows = json.loads(said.out)
    assert code == 0, rows
    assert {row["target"] for row in rows} == {"sm80", "gfx90a"}
    assert [row["kernel"] for row in rows[:4]] == ["kv_cache"] * 2 + ["rms_norm"] * 2
    for row in rows:
        assert row["is_default"]
        assert row["readout"]["registers"] > 0
        assert row["readout"]["spills"] == 0
        assert row["readout"]["programs_per_unit"] > 0
    kernels = {path.stem for path in fresh_cache_dir.glob("triton/*/*.json")}
    assert {"_rms_norm_kernel", "_write_kv_cache_kernel"} <= kernels


def test_by_default_every_kernel_of_every_target_is_compiled(fake_pool, capsys):
    code, said = run(capsys)
    assert code == 0
    assert {arch for arch, _, _ in fake_pool.seen} == set(TARGETS)
    assert set(TARGETS) == set(ARCH_LIMITS) - {"interpreter"}
    for target in TARGETS:
        keys = [key for arch, key, _ in fake_pool.seen if arch == target]
        assert {key.kernel for key in keys} == {
            "prefill", "decode", "rms_norm", "kv_cache"
        }  # fmt: skip
        shapes = [key.to_dict() for key in keys]
        assert {shape.get("block_size") for shape in shapes} == {None, 16, 64}
    header, *lines, summary = said.out.splitlines()
    assert header.split() == [
        "target", "kernel", "shape", "config", "shared", "regs", "spills", "fit", "s"
    ]  # fmt: skip
    assert len(lines) == len(fake_pool.seen)
    assert summary == f"{len(lines)} configs, 0 failed"


def test_a_sample_is_drawn_beside_the_defaults_and_always_the_same(fake_pool, capsys):
    arguments = ("--target", "sm90", "--kernel", "decode", "--sample", "5")
    assert run(capsys, *arguments, "--key", "num_seqs=4")[0] == 0
    first, fake_pool.seen[:] = list(fake_pool.seen), []
    assert run(capsys, *arguments, "--key", "num_seqs=4")[0] == 0
    assert fake_pool.seen == first
    assert 10 <= len(first) <= 12
    assert {key.to_dict()["num_seqs"] for _, key, _ in first} == {4}


@pytest.mark.parametrize(
    ("readout", "failure", "options", "code"),
    [
        (Readout(1024, 64, 8, 4, 0.5), None, (), 0),
        (Readout(1024, 64, 9, 4, 0.5), None, (), 1),
        (Readout(1024, 64, 9, 4, 0.5), None, ("--max-spills", "9"), 0),
        (Readout(1 << 20, 64, 0, 0, 0.5), "wants 1048576 bytes", (), 1),
        (None, "no answer within 60 s", (), 1),
    ],
)
def test_spilling_defaults_and_failures_are_told_by_the_exit_code(
    readout, failure, options, code, fake_pool, capsys
):
    fake_pool.answer = staticmethod(lambda key, config: (readout, failure))
    arguments = ("--target", "gfx942", "--kernel", "kv_cache", *options)
    found, said = run(capsys, *arguments)
    assert found == code
    assert ("FAILED" in said.out) == bool(code)
    if failure:
        assert failure in said.out
    rows = json.loads(run(capsys, *arguments, "--json")[1].out)
    assert all(bool(row["failure"]) == bool(code) for row in rows)


def test_drawn_configs_may_spill(fake_pool, capsys):
    def answer(key, config):
        spills = 0 if config.get("VECTORS") == 128 else 500
        return Readout(1024, 64, spills, 4, 0.5), None

    fake_pool.answer = staticmethod(answer)
    arguments = ("--target", "sm90", "--kernel", "kv_cache", "--key", "num_tokens=64")
    assert run(capsys, *arguments, "--sample", "9")[0] == 0
    assert any(config["VECTORS"] != 128 for _, _, config in fake_pool.seen)


def test_limits_reach_the_pool(fake_pool, capsys):
    arguments = ("--workers", "3", "--limit-s", "7", "--memory-mib", "900")
    run(capsys, "--target", "sm90", *arguments)
    options = {"workers": 3, "limit_s": 7.0, "memory_mib": 900}
    assert fake_pool.made == [("sm90", options)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "sm1"], "--target must be all or some of sm80"),
        (["--key", "head_size"], "--key must be FIELD=VALUE"),
        (["--key", "heads=8"], "--key must name one of block_size"),
        (["--key", "dtype=int8"], "dtype must be one of bfloat16"),
        (["--key", "num_seqs=-1"], "num_seqs must be a size"),
        (["--sample", "-1"], "--sample must be 0 or more"),
        (["--workers", "0"], "workers must be positive"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, said, capsys):
    code, output = run(capsys, "--target", "sm90", *arguments)
    assert code == 2
    assert said in output.err
    assert output.out == ""
