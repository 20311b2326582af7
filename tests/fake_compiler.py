# SPDX-License-Identifier: Apache-2.0
"""Stands in for a compile worker: what it does is in the candidate's BLOCK_N.

It appends a line for each candidate to the file that it is given.
"""

import json
import os
import signal
import subprocess
import sys
import time

GOOD, ABORTS, HANGS, GREEDY, REFUSED, BABBLES, LARGE = 16, 32, 64, 128, 256, 512, 1024


def say(answer):
    print(json.dumps(answer), flush=True)


def readout(shared_bytes):
    return {
        "readout": {
            "shared_bytes": shared_bytes, "registers": 64, "spills": 0,
            "programs_per_unit": 2, "seconds": 0.1, "num_warps": 4,
        }
    }  # fmt: skip


def main():
    log = open(sys.argv[1], "a")  # noqa: SIM115
    log.write(f"pid {os.getpid()}\n")
    json.loads(sys.stdin.readline())
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "device" in request:
            log.write(f"for {request['device']['arch']}\n")
            log.flush()
            say({"ready": True})
            continue
        kind = request["config"]["BLOCK_N"]
        log.write(f"{kind}\n")
        log.flush()
        if kind == ABORTS:
            print("LLVM ERROR: out of luck", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        elif kind == HANGS:
            # As ptxas would, in a process of its own.
            tool = subprocess.Popen(["sleep", "600"])
            log.write(f"pid {tool.pid}\n")
            log.flush()
            time.sleep(600)
        elif kind == GREEDY:
            hoard = bytearray(300 << 20)
            for i in range(0, len(hoard), 4096):
                hoard[i] = 1
            time.sleep(600)
        elif kind == REFUSED:
            say({"failure": "CompilationError: no such tile"})
        elif kind == BABBLES:
            print("warning: not JSON", flush=True)
        else:
            time.sleep(0.05)
            say(readout(1 << 20 if kind == LARGE else 4096))


if __name__ == "__main__":
    main()
