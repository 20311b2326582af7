# SPDX-License-Identifier: Apache-2.0
"""Suites against a stub GPU: run with Triton's interpreter off, so in a child."""

import os
import subprocess
import sys
from pathlib import Path


def check_suite(name: str, limit_s: float = 400) -> None:
    """Fail unless every test of tests/NAME.py passes.

    Triton's interpreter is on or off from Triton's first import on.
    """
    suite = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", str(suite)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=suite.parent.parent,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
