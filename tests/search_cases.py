# SPDX-License-Identifier: Apache-2.0
"""Small spaces and measurements for the tests of searching."""

import itertools
import math
import random

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.search import Trial
from portable_backend.warmup.sweeps import Row, Sweep

SEARCHERS = ("random", "evolutionary", "bayesian", "halving")


def small_configs():
    """A grid with a corner cut off: 108 configs."""
    grid = itertools.product(
        (16, 32, 64), (1, 2, 4, 8), (2, 3, 4), (True, None), ("pointer", "descriptor")
    )
    return [
        KernelConfig.of(BLOCK_N=n, num_warps=w, num_stages=s, launch_pdl=pdl, LOAD=load)
        for n, w, s, pdl, load in grid
        if n >= 8 * w
    ]


def time_of(config):
    steps = math.log2(config["BLOCK_N"]) - 5, math.log2(config["num_warps"]) - 1
    late = 0.3 * (config["num_stages"] == 2) + 0.1 * (config["launch_pdl"] is None)
    late += 0.05 * (config["LOAD"] == "pointer") + 0.2 * (config["num_stages"] == 4)
    return 10 * (1 + steps[0] ** 2 + steps[1] ** 2 + late)


def small_sweep(device, rounds=9):
    """One in five configs is invalid, the one that would be fastest among them."""
    rng = random.Random(0)
    configs, rows = small_configs(), []
    fastest = min(range(len(configs)), key=lambda i: time_of(configs[i]))
    for i, config in enumerate(configs):
        if i % 5 == fastest % 5:
            rows.append(Row(config, invalid="correctness", reason="NaN", setup_s=1.0))
            continue
        times = [time_of(config) * rng.gauss(1, 0.01) for _ in range(rounds)]
        rows.append(Row(config, tuple(times), setup_s=1.0))
    key = {"num_seqs": 8, "seq_len": 1024, "dtype": "bfloat16"}
    return Sweep("decode", key, device, tuple(rows), {"triton": "3.6.0"}, True)


def measure(proposals):
    for p in proposals:
        yield Trial(p.config, p.rounds, time_of(p.config), seconds=1.0)
