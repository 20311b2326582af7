# SPDX-License-Identifier: Apache-2.0
"""Random steps ask for no binary that is not listed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUB_TESTS = Path(__file__).with_name("stub_binaries.py")


@pytest.mark.vllm
@pytest.mark.long
def test_steps_against_the_list_of_binaries():
    """With Triton's interpreter off, which is decided when it is first imported."""
    pytest.importorskip("vllm", reason="needs the back end, and so vLLM")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", STUB_TESTS]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=STUB_TESTS.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
