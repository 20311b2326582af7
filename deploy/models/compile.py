# SPDX-License-Identifier: Apache-2.0
"""Compile what the models beside this file need: compile.py ARCH,... CACHE_DIR."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = ("portable-backend",)


def main(archs: str, cache_dir: str) -> None:
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    options = ["--target", archs, "--cache-dir", cache_dir]
    if subprocess.run([*PROGRAM, "warm", "--help"], capture_output=True).returncode:
        # Without the command `warm`: the default configs of every kernel.
        environment = {**os.environ, "TRITON_CACHE_DIR": cache_dir}
        command = [*PROGRAM, "compile", "--target", archs]
        subprocess.run(command, check=True, env=environment)
        return
    for config in sorted(Path(__file__).parent.glob("*/config.json")):
        command = [*PROGRAM, "warm", "--model", str(config.parent)]
        print(*command, *options, flush=True)
        subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
