# SPDX-License-Identifier: Apache-2.0
"""What defaults compile to, on every target, and some of each space beside them.

compiled_defaults.json is the baseline. Where more is meant to be taken, or with another
Triton, run this file as a script, with Triton's interpreter off.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import triton

from portable_backend.cli import main
from portable_backend.commands.compile_keys import TARGETS

BASELINE = Path(__file__).with_name("compiled_defaults.json")
KERNELS = Path(__file__).parents[1] / "kernels"
# A process compiles one group; the first ones take longest.
GROUPS = (
    ("sm90",),
    ("sm100", "sm120"),
    ("gfx90a", "gfx942", "gfx950"),
    ("gfx1100", "gfx1201"),
    ("sm80", "sm86", "sm89"),
)
ATTENTION = ("--kernel", "prefill", "--kernel", "decode")
WIDE = (*ATTENTION, "--key", "head_size=256", "--key", "block_size=64")
# Keys beside Llama's.
RUNS = {
    "llama": (),
    "head size 256": (*WIDE, "--key", "num_queries_per_kv=2"),
}
DRAWN = 2  # of each target


def options(targets, keys):
    return ("compile", "--target", ",".join(targets), "--workers", "1", *keys)


@pytest.mark.parametrize("targets", GROUPS, ids=" ".join)
@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_defaults_and_a_sample_keep_every_limit(targets, keys, capsys):
    """No spills but expected ones, wide loads, matrix instructions, no growth."""
    drawn = () if keys else ("--draw", str(DRAWN * len(targets)))
    given = (*options(targets, keys), *drawn, "--baseline", str(BASELINE), "--json")
    code = main([*given])
    said = capsys.readouterr()
    rows = json.loads(said.out)["configs"]
    failed = [row for row in rows if row["failure"]]
    assert code == 0, "\n".join(map(str, failed))
    assert "not in the baseline" not in said.err
    for target in targets:
        own = [row for row in rows if row["target"] == target]
        assert {row["kernel"] for row in own} >= {"prefill", "decode", "plan", "merge"}
        assert all(row["readout"]["programs_per_unit"] > 0 for row in own)
        if not keys:
            defined = {
                name
                for path in KERNELS.glob("*.py")
                for name in re.findall(r"^def _(\w+)_kernel\(", path.read_text(), re.M)
            }
            named = {"kv_cache": "write_kv_cache"}
            found = {named.get(row["kernel"], row["kernel"]) for row in own}
            assert found == defined
            assert sum(not row["is_default"] for row in own) >= DRAWN


def test_no_target_is_left_out():
    assert sorted(target for group in GROUPS for target in group) == sorted(TARGETS)


def test_the_baseline_is_of_this_triton():
    stored = json.loads(BASELINE.read_text())["toolchain"]["triton"]
    if stored != triton.__version__:
        pytest.skip(f"it is of Triton {stored}: nothing was compared; see above")


def rewrite():
    BASELINE.unlink(missing_ok=True)
    return max(
        main([*options(TARGETS, keys), "--write-baseline", str(BASELINE)])
        for keys in RUNS.values()
    )


if __name__ == "__main__":
    sys.exit(rewrite())
