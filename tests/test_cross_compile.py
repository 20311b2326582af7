# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every target at its default config, without a GPU.

In processes of their own: with TRITON_INTERPRET set, Triton compiles nothing.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from portable_backend.device import ARCH_LIMITS

SCRIPT = Path(__file__).parents[1] / "scripts" / "cross_compile.py"
KERNELS = Path(__file__).parents[1] / "kernels"
TARGETS = (
    "sm80",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
)
NAMES = {"two": {"d128 page16", "d256"}}
NAMES["few"] = NAMES["two"] | {"d128 page64", "d64 fp32"}


def python(*arguments, **kwargs):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        **kwargs,
    )


# vllm#48723, aiter#5035, #4329: 65 792 B of LDS wanted where 65 536 exist.
@pytest.mark.parametrize(
    ("target", "shapes", "others"),
    [
        # Steps of several kinds at once; each kind alone on every target is
        # test_compiled_defaults.py's.
        ("sm90", "few", ""),
        ("gfx90a", "two", ""),
        *(
            pytest.param(target, "few", "", marks=pytest.mark.long)
            for target in TARGETS
            if target != "sm90"
        ),
        # A config of each kernel drawn from its space as well, for each vendor; or
        # some with every value.
        pytest.param("sm90", "few", "--draw 1", marks=pytest.mark.long),
        pytest.param("gfx90a", "few", "--draw 1", marks=pytest.mark.long),
        pytest.param("sm90", "two", "--cover 1", marks=pytest.mark.long),
        pytest.param("gfx90a", "two", "--cover 1", marks=pytest.mark.long),
    ],
)
def test_every_kernel_compiles_within_the_targets_limits(
    target, shapes, others, tmp_path
):
    result = tmp_path / "rows.json"
    options = ("--targets", target, "--shapes", shapes, *others.split())
    options += ("--json", result, "--workers", 1)
    done = python(SCRIPT, *options)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr[-2000:]}"
    rows = json.loads(result.read_text())
    rows = [row for row in rows if "cover" not in row]
    defined = {
        name
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^def _(\w+)_kernel\(", path.read_text(), re.M)
    }
    assert {row["kernel"] for row in rows} == defined
    for row in rows:
        limit = ARCH_LIMITS[target].shared_bytes_per_block
        assert 0 <= row["shared_bytes"] <= limit, row
        # None where the toolchain lacks the tool that reads them.
        assert row["registers"] is None or 0 < row["registers"] <= 512, row
    # An attention kernel without shared memory would be one that does nothing.
    for kernel in ("decode", "prefill"):
        assert {r["shape"] for r in rows if r["kernel"] == kernel} == NAMES[shapes]
        assert all(r["shared_bytes"] > 0 for r in rows if r["kernel"] == kernel)
    if target == "sm90":
        # Steps of several kinds, each with a config of its own.
        prefills = [r["shape"] for r in rows if r["kernel"] == "prefill"]
        assert prefills.count("d128 page64") >= 3
        assert prefills.count("d128 page16") >= 2


def test_an_unknown_target_lists_the_known_ones():
    done = python(SCRIPT, "--targets", "sm1")
    assert done.returncode == 2
    assert "--targets: no sm1; known: " in done.stderr
    assert "interpreter" not in done.stderr
    assert "gfx942" in done.stderr


def test_a_compiler_that_hangs_fails_the_run():
    done = python(SCRIPT, "--targets", "sm90", "--limit-s", 0.01)
    assert done.returncode == 1
    assert "no answer within" in done.stdout


FAKE_CHILD = """
import json, os, sys
skip = int(sys.argv[sys.argv.index("--skip") + 1])
if skip == 0:
    print(json.dumps({"arch": "sm90", "cover": {"configs": 2}}), flush=True)
for i in range(skip, 4):
    starts = {"kernel": f"k{i}", "shape": "s", "config": {"k": {"N": i}}}
    print(json.dumps({"starts": starts}), flush=True)
    if i == 1:
        os.abort()
    print(json.dumps({"arch": "sm90", "kernel": f"k{i}", "shape": "s"}), flush=True)
"""

AFTER_AN_ABORT = """
import json, runpy, sys, threading
script = runpy.run_path(sys.argv[1])
script["compile_target"].__globals__["__file__"] = sys.argv[2]
asked, stopped = script["Asked"]("few"), threading.Event()
rows = list(script["compile_target"]("sm90", asked, 60, stopped))
cover = rows.pop(0)["cover"]
failed = [row["config"] for row in rows if "error" in row]
print(json.dumps([[row["kernel"], "error" in row] for row in rows] + [failed, cover]))
"""


def test_a_compiler_that_aborts_costs_one_kernel_only(tmp_path):
    fake = tmp_path / "child.py"
    fake.write_text(FAKE_CHILD)
    done = python("-c", AFTER_AN_ABORT, SCRIPT, fake)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["k0", False],
        ["k1", True],
        ["k2", False],
        ["k3", False],
        [{"k": {"N": 1}}],
        {"configs": 2},
    ]


OVER_LIMIT = """
import json, runpy, sys
over = runpy.run_path(sys.argv[1])["over_limit"]
row = dict(arch="gfx942", shared_bytes=65536, num_warps=16, tmem_columns=0)
print(json.dumps([
    over(row),
    over(row | {"shared_bytes": 65792}),
    over(row | {"num_warps": 32}),
    over(row | {"arch": "sm100", "tmem_columns": 576}),
    over(row | {"spills": 9, "spills_allowed": 8}),
    over(row | {"spills": 9, "spills_allowed": 9}),
    over(row | {"spills": 9, "spills_allowed": None}),
]))
"""


COVERS = """
import json, runpy, sys
script = runpy.run_path(sys.argv[1])
from compiling.calls import Call
from compiling.covers import HOST_ONLY, _attend
from portable_backend.kernels.attention_space import DECODE_SPACE
from portable_backend.warmup.compilation import identity_of

(shape,) = script["SHAPES"]["llama"]
found = {}
for arch in ("sm90", "gfx90a"):
    info = script["DeviceInfo"].for_arch(arch)
    asked = []
    for cover in script["covers_for"]([shape], 1, info):
        own = {"kv_cache": "write_kv_cache"}.get(cover.kernel, cover.kernel)
        for call in cover.calls():
            jobs = script["launched"](shape, [call], info)
            arguments = [j.launch.arguments for j in jobs if j.launch.kernel == own]
            asked.append([cover.kernel, call.config[cover.kernel].to_dict(), [
                {k: v for k, v in a.items() if isinstance(v, int | str)}
                for a in arguments
            ]])

    def binaries(config):
        call = Call(lambda: _attend(shape, info, "decode", config))
        jobs = script["launched"](shape, [call], info)
        return {identity_of(job.launch, info) for job in jobs}

    problem = shape.problem
    member = next(DECODE_SPACE.configs(problem, info))
    by_value = {}
    for parameter in DECODE_SPACE.parameters:
        values = parameter.values_for(problem, info)
        others = [member.replace(**{parameter.name: value}) for value in values]
        by_value[parameter.name] = [
            sorted(binaries(other))
            for other in others if DECODE_SPACE.contains(other, problem, info)
        ]
    found[arch] = [asked, by_value, HOST_ONLY["decode"]]
print(json.dumps(found))
"""


def test_covers_launch_what_they_say_and_leave_out_nothing_else():
    done = python("-c", COVERS, SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    for arch, (asked, by_value, host_only) in json.loads(done.stdout).items():
        compared = set()
        for kernel, config, launches in asked:
            assert launches, (arch, kernel, config)
            for given in launches:
                for name in config.keys() & given.keys():
                    # DELAY_PV says how, too.
                    same = bool if name == "DELAY_PV" else lambda value: value
                    assert same(given[name]) == config[name], (arch, kernel, config)
                    compared.add((kernel, name))
                if kernel == "decode":
                    assert given["BLOCK_M"] == (16 if config["QUERY_LEN"] == 1 else 32)
        assert {("prefill", "PACK"), ("decode", "MERGE"), ("rms_norm", "ROWS")} <= (
            compared
        )
        for name, binaries in by_value.items():
            if len(binaries) > 1:
                alike = len({tuple(found) for found in binaries}) == 1
                assert alike == (name in host_only), (arch, name)
        kernel, last, captured = by_value["MERGE"]
        assert set(captured) == {*kernel, *last}


TABLES = SCRIPT.parent / "compiling" / "tables.py"


def test_summaries_of_covers_tell_failures_from_limits():
    tables = runpy.run_path(str(TABLES))
    config = {"decode": {"BLOCK_N": 64, "launch_pdl": None, "MERGE": "last"}}
    good = {"arch": "sm90", "kernel": "decode", "shape": "s", "compile_s": 1.6}
    rows = [
        {"arch": "sm90", "cover": {"configs": 20, "combinations": 300}},
        {"arch": "sm90", "cover": {"configs": 15, "combinations": 31}},
        good | {"spills": 0},
        good | {"spills": 7},
        good | {"spills": None},
        good | {"spills": 2, "error": "wants too much", "over_limit": True},
        {"arch": "sm90", "kernel": "decode", "error": "PassManager", "config": config},
    ]
    header, line = tables["cover_table"](rows, ["sm90"]).splitlines()
    assert header.split()[:3] == ["target", "configs", "combinations"]
    # Binaries, failures, over limits, spilling, the most, seconds.
    assert line.split() == ["sm90", "35", "331", *"511276"]
    assert "FAILED: PassManager [decode BLOCK_N=64 MERGE=last]" in tables["table"](
        rows[-1:]
    )


# ROCm/flash-attention#1534: 32 warps of 64 lanes.
def test_kernels_over_a_limit_are_found():
    done = python("-c", OVER_LIMIT, SCRIPT)
    assert done.returncode == 0, done.stderr
    fits, shared, warps, tmem, spills, few, drawn = json.loads(done.stdout)
    assert fits is few is drawn is None
    assert spills == "the default spills 9 registers, 8 are expected"
    assert "65792" in shared
    assert "65536" in shared
    assert "32 warps of 64 lanes" in warps
    assert "576" in tmem


def test_ctrl_c_ends_it_with_what_is_compiled(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = tmp_path / "rows.json"
    script = [sys.executable, "-P", SCRIPT, "--targets", "sm90", "--json", found]
    with subprocess.Popen(
        [*script, "--workers", "1"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs have it ignored, and so would their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 120
        while not any((tmp_path / "cache").glob("*/*.cubin")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted: what is not listed was not compiled" in err
    assert "was never launched" not in out
    assert len(json.loads(found.read_text())) < 20


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "soon"])
def test_limits_that_are_no_times_are_refused(limit):
    done = python(SCRIPT, "--targets", "sm90", "--limit-s", limit)
    assert done.returncode == 2
    assert f"must be seconds above 0, got {limit}" in done.stderr
