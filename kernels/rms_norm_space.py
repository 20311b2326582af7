# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of RMSNorm: the default, and what is worth timing against it.

ROWS: rows of a tile. PROGRAMS_PER_UNIT: programs that go from tile to tile; 0 gives
each tile a program. EVICT_FIRST: the input's place in the cache may be reused at once.
launch_pdl: the launch begins before the one ahead of it has ended, and waits.
"""

import bisect
from collections.abc import Iterator

import torch
import triton

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import KernelConfig

# A row must fit the registers of one program.
MAX_ROW_SIZE = 65536
# The default config follows a call's number of rows through these steps only, so that
# default_configs() lists all that a model's calls compile: rows up to the first, up to
# the second, and more.
ROW_BUCKETS = (512, 4096)
BUCKET_SIZES = (*ROW_BUCKETS, ROW_BUCKETS[-1] + 1)
# Beyond this much data (of x, as stored) nothing of it is left in an L2 cache.
_STREAMED_BYTES = 32 << 20


def default_config(
    *, row_size: int, num_rows: int, dtype: torch.dtype, device: DeviceInfo
) -> KernelConfig:
    """Rows per program and warps: more lanes per row the fewer rows there are.

    A lane has one 16-byte vector of a row where rows are few, two or four where they
    are many. Rows that one warp can hold are then given to one, which sums without the
    others.

    Args:
        row_size: elements of the normalised axis.
        num_rows: counts as its bucket only.
        dtype: of x.
        device: what the kernel will run on.
    """
    padded = triton.next_power_of_2(row_size)
    if device.platform == "interpreter":
        return _config(device, 0, max(1, 65536 // padded), 1)
    bucket = row_bucket(num_rows)
    per_warp = _per_warp(dtype, device)
    vectors = (1, 2, 4)[bucket]
    if padded <= per_warp:
        num_warps = vectors
        rows = num_warps * vectors * per_warp // padded
        return _config(device, bucket, rows, num_warps)
    if bucket and padded <= 4 * per_warp:
        # Two rows at a time, up to six vectors: half as many programs.
        held = triton.cdiv(row_size, per_warp)
        return _config(device, bucket, 2 if held <= 3 else 1, 1)
    num_warps = max(1, padded // (per_warp * vectors))
    return _config(device, bucket, 1, min(num_warps, 512 // device.limits.warp_size))


def row_bucket(num_rows: int) -> int:
    return bisect.bisect_left(ROW_BUCKETS, num_rows)


def default_configs(
    *, row_size: int, dtype: torch.dtype, device: DeviceInfo
) -> list[KernelConfig]:
    """Each config that default_config() can return for such rows, without repeats."""
    return list(
        dict.fromkeys(
            default_config(row_size=row_size, num_rows=n, dtype=dtype, device=device)
            for n in BUCKET_SIZES
        )
    )


def candidate_configs(
    *, row_size: int, num_rows: int, dtype: torch.dtype, device: DeviceInfo
) -> list[KernelConfig]:
    """Configs worth timing, the default first.

    ROWS, num_warps: a lane holds 1 to 8 vectors of 16 bytes, of several short rows 4.
    With less, lanes idle; with more, registers leave too few warps resident to keep
    memory busy. Several rows only where each lies in one warp, since sums across warps
    wait for all rows, in at most four warps, as more share nothing, and where two
    programs per unit remain.
    PROGRAMS_PER_UNIT: 0, or 512 to 1536 resident lanes per unit (2048 fit, by their
    registers up to 1600), each with two tiles at least; at most four vectors, as
    twice the data is in registers.
    EVICT_FIRST: where x exceeds any L2 cache; of smaller ones the rest is found there.
    """
    if device.platform == "interpreter":
        device = DeviceInfo.for_arch("sm80")
    warp_size = device.limits.warp_size
    found = [
        default_config(row_size=row_size, num_rows=num_rows, dtype=dtype, device=device)
    ]
    bucket = row_bucket(num_rows)
    streamed = num_rows * row_size * dtype.itemsize >= _STREAMED_BYTES
    for rows, num_warps, vectors in _tiles(row_size, num_rows, dtype, device):
        tiles = triton.cdiv(num_rows, rows)
        for lanes in (0, 512, 1024, 1536):
            programs = lanes // (warp_size * num_warps)
            if lanes and (
                programs == 0 or vectors > 4 or tiles < 2 * programs * device.num_units
            ):
                continue
            for evict_first in (False, True) if streamed else (False,):
                found.append(
                    _config(device, bucket, rows, num_warps, programs, evict_first)
                )
    return list(dict.fromkeys(found))


def _tiles(
    row_size: int, num_rows: int, dtype: torch.dtype, device: DeviceInfo
) -> Iterator[tuple[int, int, int]]:
    """(rows, warps, vectors per lane) of candidate tiles."""
    padded = triton.next_power_of_2(row_size)
    per_warp = _per_warp(dtype, device)
    max_warps = 1024 // device.limits.warp_size
    for num_warps in _powers_of_2(max_warps):
        for rows in _powers_of_2(64):
            vectors = rows * padded // (per_warp * num_warps)
            fits = 1 <= vectors <= 8
            if rows == 1:
                # The shortest and the longest rows have no better choice.
                fits |= vectors < 1 == num_warps or (
                    vectors > 8 and num_warps == max_warps
                )
            else:
                if padded <= per_warp:
                    fits &= num_warps <= 4 and vectors <= 4
                else:
                    fits &= num_warps == 1
                fits &= triton.cdiv(num_rows, rows) >= 2 * device.num_units
            if fits:
                yield rows, num_warps, vectors


def _powers_of_2(last: int) -> list[int]:
    return [1 << n for n in range(last.bit_length())]


def _per_warp(dtype: torch.dtype, device: DeviceInfo) -> int:
    """Elements that a warp moves at once, 16 bytes a lane."""
    return 16 // dtype.itemsize * device.limits.warp_size


def _config(
    device: DeviceInfo,
    bucket: int,
    rows: int,
    num_warps: int,
    programs: int = 0,
    evict_first: bool = False,
) -> KernelConfig:
    # Thousands of programs of one warp and row are slower where the next launch waits
    # among them (4096 rows of 576: 5.3 us instead of 3.8); others gain by it.
    crowded = bucket > 0 and num_warps == rows == 1 and not programs
    return KernelConfig.of(
        ROWS=rows,
        PROGRAMS_PER_UNIT=programs,
        EVICT_FIRST=evict_first,
        num_warps=num_warps,
        launch_pdl=(device.limits.has_early_launch and not crowded) or None,
    )
