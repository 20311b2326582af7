# SPDX-License-Identifier: Apache-2.0
"""Tune a matmul that is none of ours: python -P docs/examples/tune_matmul.py 4096"""

import random
import sys
import time

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.kernels.config import ConfigSpace, Constraint, Parameter


@triton.jit
def _matmul_kernel(a, b, c, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    columns = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, n, K):
        x = tl.load(a + rows * n + k + tl.arange(0, K)[None, :])
        acc = tl.dot(x, tl.load(b + (k + tl.arange(0, K)[:, None]) * n + columns), acc)
    tl.store(c + rows * n + columns, acc.to(tl.float16))


SPACE = ConfigSpace("matmul", (
    *(Parameter(name, (16, 32, 64, 128), "elements of a tile") for name in "MNK"),
    Parameter("num_warps", (2, 4, 8), platforms=("cuda", "hip")),
    Parameter("num_stages", (2, 3, 4), "depth of the pipeline", platforms=("cuda",)),
), (
    Constraint("whole_tiles", "the kernel masks nothing: tiles divide n", (*"MNK",),
        lambda c, n, device: all(n % size == 0 for size in c.values())),
    Constraint("shared_memory", "all stages must fit", ("M", "N", "K", "num_stages"),
        lambda c, n, device: 2 * c["K"] * (c["M"] + c["N"]) * (c["num_stages"] or 2)
        <= device.limits.shared_bytes_per_block),
))  # fmt: skip


def tune(n: int, trials: int = 12) -> str:
    """The fastest of some configs; a wrong one does not count."""
    device = torch.device("cpu" if interpreting() else "cuda")
    info, best = DeviceInfo.detect(device), (float("inf"), "none")
    a, b = torch.randn(2, n, n, device=device).half()
    for config in SPACE.sample(trials, random.Random(0), n, info):
        tile, options = {x: config[x] for x in "MNK"}, config.options(info.platform)
        grid, c, times = (n // tile["M"], n // tile["N"]), torch.zeros_like(a), []
        for _ in range(5):  # the first call compiles
            start = time.perf_counter()
            _matmul_kernel[grid](a, b, c, n, **tile, **options)
            c[0, 0].item()  # waits for the GPU
            times.append((time.perf_counter() - start) * 1e6)
        right = torch.allclose(c.float(), a.float() @ b.float(), rtol=0.01, atol=0.1)
        print(f"{min(times):9.1f} us", "right" if right else "WRONG", dict(config))
        best = min(best, (min(times), str(dict(config)))) if right else best
    return best[1]


print("best:", tune(int(sys.argv[1])))
