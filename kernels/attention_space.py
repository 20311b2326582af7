# SPDX-License-Identifier: Apache-2.0
"""The configs that attention's kernels may run with, and the reason for each bound.

A config never changes what is computed beyond the last bits, so every member of these
spaces is right for every input; they differ in speed alone.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import triton

from portable_backend.device import DeviceInfo
from portable_backend.kernels import decode, prefill
from portable_backend.kernels.config import KernelConfig


@dataclass(frozen=True)
class AttentionProblem:
    """What bounds a config.

    Attributes:
        num_queries_per_kv: query heads that share a KV head.
        head_size: elements per head.
        element_size: bytes per element of query and cache.
        block_size: tokens per KV block.
        device: what the kernels run on.
    """

    num_queries_per_kv: int
    head_size: int
    element_size: int
    block_size: int
    device: DeviceInfo

    @property
    def padded(self) -> int:
        """Elements that a head takes in a tile."""
        size: int = triton.next_power_of_2(self.head_size)
        return max(16, size)

    def loads(self, block_n: int) -> list[str]:
        """How a tile of the cache can be read: by descriptor only within a block."""
        loads = ["pointer"]
        within = self.block_size % block_n == 0
        if self.device.limits.has_tensor_descriptors and within:
            loads.append("descriptor")
        return loads

    def fits_shared(self, elements: int) -> bool:
        """Whether a program may ask for that much shared memory."""
        limit = self.device.limits.shared_bytes_per_block
        return elements * self.element_size <= limit

    def stages(self) -> tuple[int, ...]:
        """Pipeline depths. AMD's compiler gains nothing from more than two."""
        if self.device.platform == "interpreter":
            return (1,)
        return (1, 2, 3, 4) if self.device.platform == "cuda" else (1, 2)


def prefill_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every prefill config that fits the problem.

    Bounds: tiles of 16 rows a warp at least, since a matrix instruction has as many;
    tiles in shared memory; accumulators and scores in registers, with room for a third
    of them to spill; a cap of 128 registers, so that two programs of 8 warps or four
    of 4 share a unit, only where accumulators and scores take three quarters of it at
    most; queries in registers where they take at most 32 of them. With 4 bytes an
    element only tiles of at most 32 rows, 4 a warp at least: such products run unrolled
    on plain ALUs, and compile for minutes otherwise.
    """
    device, padded = problem.device, problem.padded
    on_gpu = device.platform != "interpreter"
    packs = [p for p in (1, 2, 4, 8) if problem.num_queries_per_kv % p == 0]
    warps = (2, 4, 8) if on_gpu else (1,)
    # Only Hopper's matrix instructions take the left side from either place.
    chooses = device.arch in ("sm90", "interpreter")
    for block_m, block_n, num_warps, num_stages, pack in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128), warps, problem.stages(), packs
    ):
        rows = 4 if problem.element_size == 4 else 16
        if on_gpu and (block_m < rows * num_warps or pack > block_m):
            continue
        if problem.element_size == 4 and on_gpu and max(block_m, block_n) > 32:
            continue
        shared = prefill.shared_elements(block_m, block_n, padded, num_stages, device)
        if not problem.fits_shared(shared):
            continue
        lanes = num_warps * device.limits.warp_size
        if on_gpu and block_m * (padded + block_n) / lanes > 340:
            continue
        loads = problem.loads(block_n)
        if device.limits.has_tensor_descriptors:
            loads = [*loads, "new"]
        for load in loads:
            caps: list[int | None] = [None]
            small = block_m * (padded + block_n) / lanes <= 96
            if device.platform == "cuda" and num_warps in (4, 8) and small:
                caps.append(128)
            references = ["running"]
            if device.arch != "sm100":  # Triton 3.6 fails on the partial sums there
                references.append("diagonal")
            queries = ["shared"]
            if chooses and block_m * padded <= 64 * lanes:
                queries.append("registers")
            hip: list[dict[str, int]] = [{}]
            if device.platform == "hip":
                waves = (0, 2) if device.arch == "gfx1100" else (0,)
                hip = [{"waves_per_eu": n} for n in waves]
            early = (None, True) if device.limits.has_early_launch else (None,)
            for maxnreg, reference, query, pdl, more in itertools.product(
                caps, references, queries, early, hip
            ):
                yield KernelConfig.of(
                    BLOCK_M=block_m,
                    BLOCK_N=block_n,
                    PACK=pack,
                    LOAD=load,
                    REFERENCE=reference,
                    QUERY=query,
                    num_warps=num_warps,
                    num_stages=num_stages,
                    maxnreg=maxnreg,
                    matrix_instr_nonkdim=16,
                    launch_pdl=pdl,
                    **more,
                )


def decode_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every decode config that fits the problem.

    Bounds: at least 16 rows of queries fill a matrix instruction, so warps share the
    keys: no more than one warp to 4 of them; tiles in shared memory; accumulators of 64
    rows in registers. Between one and eight programs a unit are planned for: fewer
    leave units empty, more cut requests into pieces that cost more than they balance.

    MERGE says who puts a request's parts together: a "kernel" of its own, whichever
    program is "last", or that kernel only in a "captured" graph, where its launch costs
    the host nothing.
    """
    device, padded = problem.device, problem.padded
    on_gpu = device.platform != "interpreter"
    early = (None, True) if device.limits.has_early_launch else (None,)
    mergers = ("kernel", "last", "captured") if on_gpu else ("kernel", "last")
    for block_n, num_warps, num_stages, ctas, min_chunk, pdl in itertools.product(
        (16, 32, 64, 128),
        (1, 2, 4, 8) if on_gpu else (1,),
        (*problem.stages(), 5) if device.platform == "cuda" else problem.stages(),
        (1, 2, 3, 4, 6, 8),
        (1, 2, 4),
        early,
    ):
        if on_gpu and block_n < 4 * num_warps:
            continue
        if problem.element_size == 4 and on_gpu and block_n > 32:
            continue
        shared = decode.shared_elements(block_n, padded, num_stages)
        if device.platform == "hip":  # queries and tiles take turns there
            tiles = 2 * block_n * max(1, num_stages - 1)
            shared = padded * max(32, tiles) + 32 * block_n
        if not problem.fits_shared(shared):
            continue
        lanes = num_warps * device.limits.warp_size
        if on_gpu and 16 * (padded + block_n) / lanes > 160:
            continue
        for load, merge in itertools.product(problem.loads(block_n), mergers):
            yield KernelConfig.of(
                BLOCK_N=block_n,
                LOAD=load,
                MERGE=merge,
                CTAS_PER_UNIT=ctas,
                MIN_CHUNK=min_chunk,
                num_warps=num_warps,
                num_stages=num_stages,
                matrix_instr_nonkdim=16,
                launch_pdl=pdl,
            )


def merge_configs(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """Every merge config: partial results read together, and warps to hold them."""
    device = problem.device
    warps = (1, 2, 4) if device.platform != "interpreter" else (1,)
    early = (None, True) if device.limits.has_early_launch else (None,)
    for splits, num_warps, pdl in itertools.product((2, 4, 8, 16, 32), warps, early):
        yield KernelConfig.of(BLOCK_SPLITS=splits, num_warps=num_warps, launch_pdl=pdl)
