# SPDX-License-Identifier: Apache-2.0
"""`portable-backend compile`, on a machine without a GPU."""

import json
from dataclasses import replace
from typing import ClassVar

import pytest

from portable_backend.cli import main
from portable_backend.commands import compile_checks
from portable_backend.commands.compile_keys import TARGETS
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

        def retarget(self, device):
            self.device = device

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


def configs_of(said):
    return json.loads(said.out)["configs"]


@pytest.mark.long
def test_small_kernels_compile_for_both_vendors(fresh_cache_dir, capsys):
    code, said = run(
        capsys, "--target", "sm_80,gfx90a", "--kernel", "kv_cache", "--kernel",
        "rms_norm", "--key", "row_size=576", "--key", "num_rows=100", "--workers", "1",
        "--json",
    )  # fmt: skip
    rows = configs_of(said)
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


# Caches of 4 GiB and more, whose offsets take two registers each.
@pytest.mark.long
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_decode_of_large_caches_spills_nothing_on_gaming_cards(
    head_size, fresh_cache_dir, capsys
):
    sizes = (f"head_size={head_size}", "num_seqs=512", "seq_len=8192")
    keys = [option for size in sizes for option in ("--key", size)]
    options = ("--target", "gfx1100,gfx1201", "--kernel", "decode", "--workers", "2")
    code, said = run(capsys, *options, *keys, "--json")
    rows = [row for row in configs_of(said) if row["kernel"] == "decode"]
    found = {row["target"]: row["readout"]["spills"] for row in rows}
    # Of gfx11's 256 registers 16 queries of 256 elements take 128.
    assert found == {"gfx1100": 91 if head_size == 256 else 0, "gfx1201": 0}
    assert code == 0


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
        "target", "kernel", "shape", "config", "shared", "regs", "spills", "fit",
        "code", "matrix", "load", "s",
    ]  # fmt: skip
    assert len(lines) == len(fake_pool.seen)
    assert summary.startswith(f"{len(lines)} binaries, 0 failed, ")


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
        (Readout(1024, 64, 0, 4, 0.5), None, (), 0),
        (Readout(1024, 64, 1, 4, 0.5), None, (), 1),
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
    rows = configs_of(run(capsys, *arguments, "--json")[1])
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
    options = {"workers": 3, "limit_s": 7.0, "memory_mib": 900, "parts": True}
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
        (["--draw", "-1"], "--draw must be 0 or more"),
        (["--workers", "0"], "workers must be positive"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, said, capsys):
    code, output = run(capsys, "--target", "sm90", *arguments)
    assert code == 2
    assert said in output.err
    assert output.out == ""


@pytest.mark.parametrize("target", ["sm75", "sm_70", "sm61", "sm80,sm_75"])
def test_cards_that_are_too_old_are_told_why(fake_pool, capsys, target):
    code, said = run(capsys, "--target", target)
    assert code == 2
    assert "is refused: kernels need compute capability 8.0" in said.err


@pytest.mark.parametrize(
    ("kernel", "pair", "expected"),
    [
        ("rms_norm", "row_size=0", "row_size must be 1 or more, got 0"),
        ("rms_norm", "row_size=-1", "row_size must be 1 or more, got -1"),
        ("rms_norm", "row_size=abc", "row_size must be a whole number, got abc"),
        ("rms_norm", "fused_add=5", "fused_add must be 0 or 1, got 5"),
        ("decode", "block_size=--5", "block_size must be a whole number, got --5"),
        ("decode", "head_size=abc", "head_size must be a whole number, got abc"),
        ("decode", "num_kv_heads=-8", "num_kv_heads must be 1 or more, got -8"),
        ("prefill", "no_context=7", "no_context must be 0 or 1, got 7"),
    ],
)
def test_values_that_no_key_can_have_are_refused(
    fake_pool, capsys, kernel, pair, expected
):
    code, said = run(capsys, "--target", "sm90", "--kernel", kernel, "--key", pair)
    assert code == 2 and said.out == ""
    assert expected in said.err and "Traceback" not in said.err


def test_options_out_of_range_are_refused(fake_pool, capsys, tmp_path):
    code, said = run(capsys, "--max-spills", "-1")
    assert code == 2 and "--max-spills must be 0 or more, got -1" in said.err
    page = tmp_path / "absent" / "page.html"
    code, said = run(capsys, "--html", str(page))
    assert code == 2 and "is no folder" in said.err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"load_bytes": 0}, "the default loads nothing"),
        ({"load_bytes": 8}, "the default loads 8 bytes at once at most"),
        ({"matrix_instructions": 0}, "the default has no matrix instructions"),
        ({}, None),
    ],
    ids=str,
)
def test_defaults_that_lack_what_makes_them_fast_fail(
    fake_pool, capsys, monkeypatch, changes, expected
):
    good = {"load_bytes": 16, "matrix_instructions": 30, "code_bytes": 9000}
    readout = Readout(1024, 64, 0, 4, 0.5, num_warps=4, **good | changes)
    monkeypatch.setattr(fake_pool, "answer", staticmethod(lambda *_: (readout, None)))
    options = ("--target", "gfx942", "--kernel", "decode")
    code, said = run(capsys, *options)
    assert code == (1 if expected else 0)
    assert expected is None or f"FAILED: {expected}" in said.out
    # An fp32 product has none, and narrow heads no wide loads.
    assert run(capsys, *options, "--key", "dtype=float32")[0] == (
        1 if changes == {"load_bytes": 0} else 0
    )


def test_the_page_has_every_row_and_runs_nothing(fake_pool, capsys, tmp_path):
    failures = {"decode": "<script>alert(1)</script>"}

    def answer(key, config):
        failure = failures.get(key.kernel)
        return (None, failure) if failure else (Readout(1024, 64, 0, 4, 0.5), None)

    fake_pool.answer = staticmethod(answer)
    file = tmp_path / "page.html"
    code, said = run(capsys, "--target", "sm80,gfx942", "--html", str(file), "--json")
    rows = configs_of(said)
    text = file.read_text()
    assert code == 1
    assert text.count("<tr") == len(rows) + 2  # a line of titles for each target
    assert text.count('<tr class="failed">') == sum(bool(r["failure"]) for r in rows)
    assert "<h2>sm80</h2>" in text and "<h2>gfx942</h2>" in text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "http" not in text


def test_a_number_of_configs_is_drawn_from_all_keys_and_targets(fake_pool, capsys):
    arguments = ("--target", "sm90,gfx942", "--kernel", "decode", "--draw", "41")
    assert run(capsys, *arguments)[0] == 0
    first, fake_pool.seen[:] = list(fake_pool.seen), []
    assert run(capsys, *arguments)[0] == 0
    assert fake_pool.seen == first
    assert len(set(first)) == len(first) == 2 * 6 + 41
    assert len({key for _, key, _ in first}) == 6
    by_target = [sum(arch == t for arch, _, _ in first) for t in ("sm90", "gfx942")]
    assert by_target == [6 + 21, 6 + 20]


def test_json_tells_what_compiled(fake_pool, capsys):
    import triton

    said = json.loads(run(capsys, "--target", "sm90,gfx942", "--json")[1].out)
    assert said["targets"] == ["sm90", "gfx942"]
    assert said["toolchain"]["triton"] == triton.__version__
    assert list(said["toolchain"]["ptxas"]) == ["sm90"]
    assert said["seconds"] >= 0
    assert {row["target"] for row in said["configs"]} == {"sm90", "gfx942"}


GOOD = Readout(
    1024, 64, 0, 4, 0.5, code_bytes=9000, matrix_instructions=30, load_bytes=16
)
INTS = replace(GOOD, matrix_instructions=0, load_bytes=4)


def test_plan_and_merge_have_rows_and_each_binary_only_one(
    fake_pool, capsys, monkeypatch
):
    def answer(key, config):
        plan = replace(INTS, registers=40 if key.to_dict()["num_seqs"] == 1 else 50)
        parts = (("decode", GOOD), ("plan", plan), ("merge", replace(GOOD, spills=2)))
        return GOOD, None, parts

    monkeypatch.setattr(fake_pool, "answer", staticmethod(answer))
    code, said = run(capsys, "--target", "sm90", "--kernel", "decode", "--json")
    rows = configs_of(said)
    assert code == 1
    kernels = [row["kernel"] for row in rows]
    # A second binary of decode that takes what the first does is no news.
    assert (kernels.count("decode"), kernels.count("plan")) == (6, 2)
    (merge,) = [row for row in rows if row["kernel"] == "merge"]
    assert merge["failure"] == "the default spills 2 registers"
    assert all(row["failure"] is None for row in rows if row is not merge)


def test_a_part_over_a_limit_fails(fake_pool, capsys, monkeypatch):
    parts = (("plan", replace(INTS, shared_bytes=1 << 20)),)
    answer = staticmethod(lambda *_: (GOOD, None, parts))
    monkeypatch.setattr(fake_pool, "answer", answer)
    code, said = run(capsys, "--target", "gfx942", "--kernel", "decode")
    assert code == 1
    assert "FAILED: wants 1048576 bytes of shared memory" in said.out


@pytest.mark.parametrize(
    ("target", "head_size", "spills", "code"),
    [
        ("gfx1100", 128, 24, 0),
        ("gfx1100", 128, 25, 1),
        ("gfx1100", 64, 1, 1),
        ("gfx942", 128, 1, 1),
    ],
)
def test_exceptions_are_told_with_their_reason(
    fake_pool, capsys, monkeypatch, tmp_path, target, head_size, spills, code
):
    answer = staticmethod(lambda *_: (replace(GOOD, spills=spills), None))
    monkeypatch.setattr(fake_pool, "answer", answer)
    file = tmp_path / "page.html"
    key = ("--key", f"head_size={head_size}", "--html", str(file))
    found, said = run(capsys, "--target", target, "--kernel", "prefill", *key)
    assert found == code
    expected = "stored once ahead of the loops"
    assert (expected in said.out) == (expected in file.read_text()) == (code == 0)
    assert ("registers, 24 are expected" in said.out) == (spills == 25)


def test_every_exception_has_a_reason_and_a_target():
    for expected in compile_checks.EXPECTED_SPILLS:
        assert expected.target in TARGETS and expected.reason and expected.most > 0


def test_growth_beyond_the_baseline_fails(fake_pool, capsys, monkeypatch, tmp_path):
    file = tmp_path / "baseline.json"
    now = [GOOD]
    monkeypatch.setattr(fake_pool, "answer", staticmethod(lambda *_: (now[0], None)))
    options = ("--target", "sm90,gfx942", "--kernel", "kv_cache", "--kernel", "decode")
    assert run(capsys, *options, "--write-baseline", str(file))[0] == 0
    compare = (*options, "--baseline", str(file))
    code, said = run(capsys, *compare)
    assert (code, said.err) == (0, "")
    for grown, failure in (
        ({"registers": 80}, None),
        ({"registers": 81}, "registers grew from 64 to 81 since the baseline"),
        ({"shared_bytes": 4096}, "shared_bytes grew from 1024 to 4096"),
        ({"registers": 20}, None),
        ({"registers": None}, None),
    ):
        now[0] = replace(GOOD, **grown)
        code, said = run(capsys, *compare)
        assert code == (1 if failure else 0)
        assert failure is None or failure in said.out
    # What was never compiled then is told, and no failure.
    now[0] = GOOD
    code, said = run(capsys, *compare, "--key", "head_size=64")
    assert code == 0 and "16 binaries are not in the baseline" in said.err
    # Written again it keeps the rest, and comes to the same.
    before = file.read_text()
    run(capsys, "--target", "sm90", "--kernel", "decode", "--write-baseline", str(file))
    assert file.read_text() == before


def test_a_baseline_of_another_compiler_is_not_compared(
    fake_pool, capsys, monkeypatch, tmp_path
):
    file = tmp_path / "baseline.json"
    answer = staticmethod(lambda *_: (replace(GOOD, registers=999), None))
    options = ("--target", "gfx942", "--kernel", "kv_cache")
    assert run(capsys, *options, "--write-baseline", str(file))[0] == 0
    data = json.loads(file.read_text())
    data["toolchain"]["triton"] = "3.1.0"
    file.write_text(json.dumps(data))
    monkeypatch.setattr(fake_pool, "answer", answer)
    code, said = run(capsys, *options, "--baseline", str(file))
    assert code == 0
    assert "not compared with the baseline: it is of Triton 3.1.0, this is" in said.err


@pytest.mark.parametrize("content", [None, "", "[]", '{"schema": 9}'], ids=str)
def test_a_baseline_that_is_none_is_a_usage_error(fake_pool, capsys, tmp_path, content):
    file = tmp_path / "baseline.json"
    if content is not None:
        file.write_text(content)
    code, said = run(capsys, "--target", "sm90", "--baseline", str(file))
    assert code == 2
    assert f"--baseline: {file} is none" in said.err
    assert "--write-baseline makes one" in said.err
