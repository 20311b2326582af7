# SPDX-License-Identifier: Apache-2.0
"""What workers compile is what launches look for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUB_TESTS = Path(__file__).with_name("stub_compilation.py")


@pytest.mark.long
def test_compilation_ahead_of_launches():
    """With Triton's interpreter off, which is decided when it is first imported."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", STUB_TESTS]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=STUB_TESTS.parent.parent,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
