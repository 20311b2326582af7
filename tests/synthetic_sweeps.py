# SPDX-License-Identifier: Apache-2.0
"""Sweeps that nobody measured: landscapes made up to test search strategies.

    python -P tests/synthetic_sweeps.py FOLDER

The configs are those of the real spaces (sm90, geometry of Llama-3.1-8B); the times
are drawn. The logarithm of a time is a sum of the effects of each parameter, effects
of pairs of them, what occupancy and spilled registers cost, and a little that belongs
to the config alone; 1.5 % of noise come on top in each round, with rare outliers.
Effects drift with the key, so that neighbouring buckets resemble each other. They are
marked as synthetic: nothing found on them says anything about a GPU.
"""

import argparse
import itertools
import math
import random
from functools import cache
from pathlib import Path

from portable_backend.device import ARCH_LIMITS, DeviceInfo
from portable_backend.kernels import decode, prefill
from portable_backend.kernels.attention_space import (
    AttentionProblem,
    decode_configs,
    prefill_configs,
)
from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.sweeps import Row, Sweep, write_sweep

ROUNDS = 9
NOISE = 0.015
# Of the worlds 0 to 6 the first where a fifth of both kernels' configs is invalid.
WORLD = 5
DEVICE = DeviceInfo("synthetic_sm90", "sm90", 132, ARCH_LIMITS["sm90"])
PROBLEM = AttentionProblem(4, 128, 2, 16, DEVICE)
GEOMETRY = {"head_size": 128, "num_queries_per_kv": 4, "num_kv_heads": 8}
KEYS = {
    "decode": [
        {"num_seqs": n, "seq_len": length} | GEOMETRY
        for n, length in ((1, 2048), (8, 2048), (8, 8192), (64, 2048), (64, 8192))
    ],
    "prefill": [
        {"num_seqs": n, "seq_len": length} | GEOMETRY
        for n, length in ((1, 1024), (1, 4096), (4, 1024), (4, 4096), (1, 16384))
    ],
}
# Parameters whose effects are large; the others move a time by a few percent.
SCALES = {"BLOCK_M": 0.20, "BLOCK_N": 0.15, "num_warps": 0.15, "num_stages": 0.10}
SCALES |= {"CTAS_PER_UNIT": 0.15, "LOAD": 0.08, "MERGE": 0.05, "QUERY": 0.05}


def configs_of(kernel: str, small: bool) -> list[KernelConfig]:
    """The real space with early launches; `small` fixes one more parameter."""
    if kernel == "decode":
        found = [c for c in decode_configs(PROBLEM) if c["launch_pdl"]]
        return [c for c in found if c["MERGE"] == "last"] if small else found
    found = [c for c in prefill_configs(PROBLEM) if c["launch_pdl"]]
    return [c for c in found if c["REFERENCE"] == "running"] if small else found


@cache
def synthetic_sweep(
    kernel: str, bucket: int, small: bool = True, world: int = WORLD
) -> Sweep:
    """Make up the sweep of one key; the same for the same arguments.

    Sweeps of one `world` resemble each other, those of two have nothing in common.
    """
    key = KEYS[kernel][bucket]
    landscape = Landscape(kernel, key, world)
    rows = [landscape.row(config) for config in configs_of(kernel, small)]
    toolchain = {"triton": None, "torch": None}
    return Sweep(kernel, key, DEVICE, tuple(rows), toolchain, synthetic=True)


def synthetic_sweeps(small: bool = True, world: int = WORLD) -> list[Sweep]:
    return [
        synthetic_sweep(kernel, bucket, small, world)
        for kernel, keys in KEYS.items()
        for bucket in range(len(keys))
    ]


def draw(*what: object) -> float:
    """A standard normal that belongs to `what`."""
    return random.Random(repr(what)).gauss(0, 1)


def uniform(*what: object) -> float:
    return random.Random(repr(what)).random()


class Landscape:
    """Times of one kernel for one key."""

    def __init__(self, kernel: str, key: dict[str, int], world: int) -> None:
        self.kernel, self.key, self.world = kernel, key, world
        self.work = math.log2(key["num_seqs"] * key["seq_len"])
        # Where the key lies among its like; effects are linear in both.
        self.drift = (math.log2(key["num_seqs"]) / 6, math.log2(key["seq_len"]) / 6)
        self._draws: dict[tuple[object, ...], float] = {}

    def row(self, config: KernelConfig) -> Row:
        name = repr(config.items_)
        setup_s = 1.5 + 2 * uniform("setup", self.kernel, name)
        invalid = self.invalid(config, name)
        if invalid:
            reason = "synthetic"
            return Row(config, invalid=invalid, reason=reason, setup_s=setup_s)
        time_us = 2 ** (self.work / 2) * math.exp(self.log_time(config))
        rng = random.Random(repr((self.world, self.kernel, self.key, name)))
        times = [
            time_us * math.exp(rng.gauss(0, NOISE) + 0.1 * (rng.random() < 0.02))
            for _ in range(ROUNDS)
        ]
        return Row(config, tuple(round(t, 3) for t in times), setup_s=setup_s)

    def log_time(self, config: KernelConfig) -> float:
        params = [(n, v) for n, v in config.items() if n != "matrix_instr_nonkdim"]
        total = sum(self.effect(SCALES.get(n, 0.02), n, v) for n, v in params)
        for (n, v), (m, w) in itertools.combinations(params, 2):
            scale = math.sqrt(SCALES.get(n, 0.02) * SCALES.get(m, 0.02))
            total += self.effect(0.3 * scale, n, v, m, w)
        total += self.occupancy(config)
        return total + 0.005 * draw(
            "own", self.world, self.kernel, self.key, config.items_
        )

    def effect(self, scale: float, *what: object) -> float:
        if what not in self._draws:
            drifts = (
                d * draw(self.world, self.kernel, axis, *what)
                for axis, d in enumerate(self.drift)
            )
            level = draw(self.world, self.kernel, *what)
            self._draws[what] = level + 0.4 * sum(drifts)
        return scale * self._draws[what]

    def occupancy(self, config: KernelConfig) -> float:
        """Too few warps on a unit leave latency uncovered; spills cost at once."""
        lanes = config["num_warps"] * 32
        rows = config.get("BLOCK_M") or 16
        registers = rows * (128 + config["BLOCK_N"]) / lanes + 48
        capped = min(registers, config.get("maxnreg") or 255)
        spills = max(0.0, registers - capped) / 255
        programs = min(
            DEVICE.limits.shared_bytes_per_unit // self.shared_bytes(config),
            int(65536 / (capped * lanes)),
            64 // config["num_warps"],
        )
        if self.kernel == "decode":
            programs = min(programs, config["CTAS_PER_UNIT"])
        warps = max(1, programs) * config["num_warps"]
        return 0.15 * max(0.0, math.log2(12 / warps)) + 0.8 * spills

    def shared_bytes(self, config: KernelConfig) -> int:
        block_n, stages = config["BLOCK_N"], config["num_stages"]
        if self.kernel == "decode":
            return 2 * decode.shared_elements(block_n, 128, stages)
        block_m = config["BLOCK_M"]
        return 2 * prefill.shared_elements(block_m, block_n, 128, stages, DEVICE)

    def invalid(self, config: KernelConfig, name: str) -> str | None:
        """Whole corners fail, whatever the key, and a few configs here and there."""
        if self.shared_bytes(config) > 0.75 * DEVICE.limits.shared_bytes_per_block:
            return "resources"
        corner = [config.get(n) for n in ("LOAD", "num_warps", "num_stages")]
        if uniform("corner", self.world, self.kernel, corner) < 0.20:
            return "compile"
        rare = uniform("rare", self.world, self.kernel, name)
        reasons = ("correctness", "runtime", "timeout", "over-limit")
        return reasons[int(rare * 200)] if rare < 0.02 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the sweeps")
    parser.add_argument(
        "--small", action="store_true", help="the tests' smaller spaces"
    )
    parser.add_argument(
        "--world", type=int, default=WORLD, help="seed of the landscape"
    )
    args = parser.parse_args()
    for sweep in synthetic_sweeps(args.small, args.world):
        write_sweep(sweep, args.folder)


if __name__ == "__main__":
    main()
