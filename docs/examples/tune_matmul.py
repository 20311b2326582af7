# SPDX-License-Identifier: Apache-2.0
"""Tune a matmul that is none of ours: python -P docs/examples/tune_matmul.py 4096"""

import sys
import time

import torch
import triton
import triton.language as tl

from portable_backend.device import DeviceInfo, interpreting
from portable_backend.kernels import config as of
from portable_backend.warmup import bound_space, search, strategies


@triton.jit
def _matmul_kernel(a, b, c, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    columns = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, n, K):
        i, j = k + tl.arange(0, K)[None, :], k + tl.arange(0, K)[:, None]
        x = tl.load(a + rows * n + i, (rows < n) & (i < n), 0)
        acc = tl.dot(x, tl.load(b + j * n + columns, (j < n) & (columns < n), 0), acc)
    tl.store(c + rows * n + columns, acc.to(tl.float16), (rows < n) & (columns < n))


SPACE = of.ConfigSpace("matmul", (
    *(of.Parameter(name, (16, 32, 64, 128, 256), "of a tile") for name in "MNK"),
    of.Parameter("num_warps", (2, 4, 8), platforms=("cuda", "hip")),
    of.Parameter("num_stages", (2, 3, 4), "depth of the pipeline", ("cuda",)),
), (
    of.Constraint("fit", "into n", (*"MNK",), lambda c, n, _: max(c.values()) < n + 16),
    of.Constraint("shared_memory", "all stages fit", ("M", "N", "K", "num_stages"),
        lambda c, n, device: 2 * c["K"] * (c["M"] + c["N"]) * (c["num_stages"] or 2)
        <= device.limits.shared_bytes_per_block),
))  # fmt: skip
BY_HAND = of.KernelConfig.of(M=128, N=128, K=64, num_warps=8, num_stages=3)
given = " ".join(sys.argv[1:])
if not given.isdecimal() or not 1 <= int(given) <= 32768:
    sys.exit(f"n must be 1 to 32768, got {given or 'nothing'}; give rows and columns")
n, device = int(given), torch.device("cpu" if interpreting() else "cuda")
a, b = torch.randn(2, n, n, device=device).half()
info, wanted = DeviceInfo.detect(device), a.float() @ b.float()
space = bound_space.BoundSpace(SPACE, n, info)
first = None if space.why_not(BY_HAND) else BY_HAND
found = strategies.make_strategy("evolutionary", space, rounds=5, incumbent=first)
for config in (p.config for _ in range(32) for p in found.ask(1)):
    tile, options = {x: config[x] for x in "MNK"}, config.options(info.platform)
    grid, c, times = tuple(-(-n // tile[x]) for x in "MN"), torch.zeros_like(a), []
    for _ in range(6):  # the first call compiles
        start = time.perf_counter()
        _matmul_kernel[grid](a, b, c, n, **tile, **options)
        c[0, 0].item()  # waits for the GPU
        times.append((time.perf_counter() - start) * 1e6)
    wrong = None if torch.allclose(c.float(), wanted, 0.01, 0.1) else "correctness"
    print(f"{min(times):9.1f} us", "WRONG" if wrong else "right", dict(config))
    found.tell(search.Trial(config, 5, None if wrong else min(times), wrong))
print("best:", dict(found.best().config))
