# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of RMSNorm: the default, and what is worth timing against it.

ROWS: rows of a tile. PROGRAMS_PER_UNIT: programs that go from tile to tile; 0 gives
each tile a program. EVICT_FIRST: the input's place in the cache may be reused at once.
launch_pdl: the launch begins before the one ahead of it has ended, and waits.
"""

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from portable_backend.device import DeviceInfo
from portable_backend.kernels.config import (
    ConfigSpace,
    Constraint,
    Derived,
    KernelConfig,
    Parameter,
)

# A row must fit the registers of one program.
MAX_ROW_SIZE = 65536
# The default config follows a call's number of rows through these steps only, so that
# default_configs() lists all that a model's calls compile: rows up to the first, up to
# the second, and more.
ROW_BUCKETS = (512, 4096)
BUCKET_SIZES = (*ROW_BUCKETS, ROW_BUCKETS[-1] + 1)
# Beyond this much data (of x, as stored) nothing of it is left in an L2 cache.
_STREAMED_BYTES = 32 << 20
# Lanes of a unit that programs which go from tile to tile keep resident.
_RESIDENT_LANES = (512, 1024, 1536)


@dataclass(frozen=True)
class RMSNormProblem:
    """What bounds a config, beside the device.

    Attributes:
        row_size: elements of the normalised axis.
        num_rows: of the call.
        element_size: bytes per element of x.
    """

    row_size: int
    num_rows: int
    element_size: int

    @property
    def padded(self) -> int:
        """Elements that a row takes in a tile."""
        size: int = triton.next_power_of_2(self.row_size)
        return size

    def per_warp(self, device: DeviceInfo) -> int:
        """Elements that a warp moves at once, 16 bytes a lane."""
        return 16 // self.element_size * device.limits.warp_size

    def num_tiles(self, rows: int) -> int:
        return -(-self.num_rows // rows)


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
    problem = RMSNormProblem(row_size, num_rows, dtype.itemsize)
    rows, num_warps = _default_tile(problem, device)
    chosen = {"ROWS": rows, "PROGRAMS_PER_UNIT": 0, "num_warps": num_warps}
    early = _launch_pdl(chosen, problem, device)
    return KernelConfig.of(**chosen, EVICT_FIRST=False, launch_pdl=early)


def _default_tile(problem: RMSNormProblem, device: DeviceInfo) -> tuple[int, int]:
    """Rows and warps."""
    padded = problem.padded
    if device.platform == "interpreter":
        return max(1, 65536 // padded), 1
    bucket = row_bucket(problem.num_rows)
    per_warp = problem.per_warp(device)
    vectors = (1, 2, 4)[bucket]
    if padded <= per_warp:
        return vectors * vectors * per_warp // padded, vectors
    if bucket and padded <= 4 * per_warp:
        # Two rows at a time, up to six vectors: half as many programs.
        held = triton.cdiv(problem.row_size, per_warp)
        return (2 if held <= 3 else 1), 1
    num_warps = max(1, padded // (per_warp * vectors))
    return 1, min(num_warps, 512 // device.limits.warp_size)


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
    """Configs worth timing: those of SPACE, the default first.

    In the interpreter, those of an ordinary GPU.
    """
    if device.platform == "interpreter":
        device = DeviceInfo.for_arch("sm80")
    problem = RMSNormProblem(row_size, num_rows, dtype.itemsize)
    default = default_config(
        row_size=row_size, num_rows=num_rows, dtype=dtype, device=device
    )
    return list(dict.fromkeys([default, *SPACE.configs(problem, device)]))


Config = Mapping[str, Any]
Bound = Callable[[Config, RMSNormProblem, DeviceInfo], bool]


def _vectors(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> int:
    """16-byte vectors of a tile that each lane holds."""
    in_warps: int = problem.per_warp(device) * c["num_warps"]
    return int(c["ROWS"]) * problem.padded // in_warps


def _max_warps(device: DeviceInfo) -> int:
    return 1024 // device.limits.warp_size


# The tile: ROWS and num_warps


def _few_rows(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    return bool(c["ROWS"] <= 64)


def _lanes_are_busy(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    no_better = c["ROWS"] == c["num_warps"] == 1
    return no_better or _vectors(c, problem, device) >= 1


def _fits_registers(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    no_better = c["ROWS"] == 1 and c["num_warps"] == _max_warps(device)
    return no_better or _vectors(c, problem, device) <= 8


def _short_rows_fit(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    several_short = c["ROWS"] > 1 and problem.padded <= problem.per_warp(device)
    return not several_short or _vectors(c, problem, device) <= 4


def _rows_lie_in_warps(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    in_one = problem.padded <= problem.per_warp(device) or c["num_warps"] == 1
    return c["ROWS"] == 1 or in_one


def _warps_are_few(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    return c["ROWS"] == 1 or bool(c["num_warps"] <= 4)


def _programs_remain(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    enough = problem.num_tiles(c["ROWS"]) >= 2 * device.num_units
    return c["ROWS"] == 1 or enough


_TILE = ("num_warps", "ROWS")
_TILE_BOUNDS: tuple[Constraint[RMSNormProblem], ...] = (
    Constraint(
        "few_rows", "more than 64 rows are left to the default", _TILE, _few_rows
    ),
    Constraint(
        "lanes_are_busy",
        "with less than 16 bytes of a tile to a lane, lanes idle; the shortest rows, "
        "one to a warp, have no better choice",
        _TILE,
        _lanes_are_busy,
    ),
    Constraint(
        "registers",
        "with more than 8 vectors of 16 bytes to a lane, registers leave too few warps "
        "resident to keep memory busy; the longest rows have no better choice",
        _TILE,
        _fits_registers,
    ),
    Constraint(
        "short_rows_fit",
        "several short rows keep memory busy with 4 vectors to a lane",
        _TILE,
        _short_rows_fit,
    ),
    Constraint(
        "rows_lie_in_warps",
        "several rows only where each lies in one warp: sums across warps wait for all "
        "rows of the tile",
        _TILE,
        _rows_lie_in_warps,
    ),
    Constraint(
        "warps_are_few",
        "more than four warps with rows of their own share nothing",
        _TILE,
        _warps_are_few,
    ),
    Constraint(
        "programs_remain",
        "several rows to a tile only where two programs per unit remain",
        _TILE,
        _programs_remain,
    ),
)


@dataclass(frozen=True)
class _UnlessDefault:
    """Whether a bound is kept, as the default's tile need not: it is always tried."""

    bound: Bound

    def __call__(self, c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
        tile = c["ROWS"], c["num_warps"]
        default = _default_tile(problem, device)
        return tile == default or self.bound(c, problem, device)


def _ordinary(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    plain = not c["PROGRAMS_PER_UNIT"] and not c["EVICT_FIRST"]
    return plain or all(b.check(c, problem, device) for b in _TILE_BOUNDS)


# Programs that go from tile to tile


def _programs(lanes: int, num_warps: int, device: DeviceInfo) -> int:
    return lanes // (device.limits.warp_size * num_warps)


def _lanes_resident(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    per_unit, num_warps = c["PROGRAMS_PER_UNIT"], c["num_warps"]
    kept = (_programs(lanes, num_warps, device) for lanes in _RESIDENT_LANES)
    return per_unit == 0 or per_unit in kept


def _next_tile_fits(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    return c["PROGRAMS_PER_UNIT"] == 0 or _vectors(c, problem, device) <= 4


def _tiles_suffice(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    programs: int = c["PROGRAMS_PER_UNIT"] * device.num_units
    return problem.num_tiles(c["ROWS"]) >= 2 * programs


def _x_is_streamed(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool:
    size = problem.num_rows * problem.row_size * problem.element_size
    return not c["EVICT_FIRST"] or size >= _STREAMED_BYTES


def _launch_pdl(c: Config, problem: RMSNormProblem, device: DeviceInfo) -> bool | None:
    crowded = c["num_warps"] == c["ROWS"] == 1 and not c["PROGRAMS_PER_UNIT"]
    crowded = crowded and row_bucket(problem.num_rows) > 0
    return (device.limits.has_early_launch and not crowded) or None


def _warp_values(problem: RMSNormProblem, device: DeviceInfo) -> list[int]:
    return _powers_of_2(_max_warps(device))


def _row_values(problem: RMSNormProblem, device: DeviceInfo) -> list[int]:
    return sorted({*_powers_of_2(64), _default_tile(problem, device)[0]})


def _program_values(problem: RMSNormProblem, device: DeviceInfo) -> list[int]:
    return sorted(
        {0}
        | {
            _programs(lanes, num_warps, device)
            for lanes in _RESIDENT_LANES
            for num_warps in _warp_values(problem, device)
        }
    )


def _powers_of_2(last: int) -> list[int]:
    return [1 << n for n in range(last.bit_length())]


SPACE: ConfigSpace[RMSNormProblem] = ConfigSpace(
    "rms_norm",
    (
        Parameter("num_warps", _warp_values, "up to the 1024 lanes of a program"),
        Parameter("ROWS", _row_values, "rows of a tile, the default's among them"),
        Parameter(
            "PROGRAMS_PER_UNIT",
            _program_values,
            "programs that go from tile to tile; 0: a program to each tile",
        ),
        Parameter("EVICT_FIRST", (False, True), "x may leave the cache at once"),
    ),
    (
        *(replace(b, holds=_UnlessDefault(b.holds)) for b in _TILE_BOUNDS),
        Constraint(
            "lanes_resident",
            "512, 1024 or 1536 lanes of a unit are kept resident: 2048 fit, by their "
            "registers up to 1600",
            ("num_warps", "PROGRAMS_PER_UNIT"),
            _lanes_resident,
        ),
        Constraint(
            "next_tile_fits",
            "programs fetch their next tile ahead: with more than 4 vectors to a lane, "
            "registers do not hold both",
            ("num_warps", "ROWS", "PROGRAMS_PER_UNIT"),
            _next_tile_fits,
        ),
        Constraint(
            "tiles_suffice",
            "programs that go on to further tiles need two each at least",
            ("ROWS", "PROGRAMS_PER_UNIT"),
            _tiles_suffice,
        ),
        Constraint(
            "x_is_streamed",
            "where x has less than 32 MiB, the rest of it is found in the cache",
            ("EVICT_FIRST",),
            _x_is_streamed,
        ),
        Constraint(
            "ordinary",
            "a default tile outside the bounds of tiles is tried as it is, only",
            ("num_warps", "ROWS", "PROGRAMS_PER_UNIT", "EVICT_FIRST"),
            _ordinary,
        ),
    ),
    (
        Derived(
            "launch_pdl",
            _launch_pdl,
            "a launch begins early where it can, except for thousands of programs of "
            "one warp and row, which are slower where the next launch waits among them "
            "(4096 rows of 576: 5.3 us instead of 3.8)",
            ("num_warps", "ROWS", "PROGRAMS_PER_UNIT"),
        ),
    ),
)
