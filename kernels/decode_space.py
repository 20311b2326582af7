# SPDX-License-Identifier: Apache-2.0
"""The configs that decode and merge may run with, and the reason for each bound."""

from portable_backend.device import DeviceInfo
from portable_backend.kernels import decode
from portable_backend.kernels._attention_bounds import (
    EARLY_LAUNCH,
    EARLY_LAUNCH_EXISTS,
    LOAD_CONSTRAINTS,
    SMALL_MATRICES,
    AttentionShape,
    Config,
    lanes,
    on_gpu,
    stages,
)
from portable_backend.kernels.config import ConfigSpace, Constraint, Parameter

# Where products of 64 rows read keys and values from shared memory while the next ones
# arrive, so that all stages are held there; probabilities are not.
_WIDE_PRODUCTS = ("sm90", "sm100")
_BARRIER_BYTES = 1088


def _keys_for_warps(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not on_gpu(device) or bool(c["BLOCK_N"] >= 4 * c["num_warps"])


def _few_fp32_keys(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not (c["BLOCK_N"] > 32 and shape.element_size == 4 and on_gpu(device))


def _decode_fits_shared(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    rows = decode.block_m_for(shape.longest_decode * shape.num_queries_per_kv)
    size = shape.element_size * _shared_elements(c, shape, device, rows)
    if rows > 32 and device.arch in _WIDE_PRODUCTS:
        size += _BARRIER_BYTES
    return size <= device.limits.shared_bytes_per_block


def _shared_elements(
    c: Config, shape: AttentionShape, device: DeviceInfo, rows: int
) -> int:
    """As compilers were seen to take them, of which 32 rows are told from more."""
    block_n, num_stages = int(c["BLOCK_N"]), int(c["num_stages"])
    padded = shape.padded
    tiles = 2 * block_n * max(1, num_stages - 1)
    if device.platform == "hip":  # queries and tiles take turns there
        if rows <= 32:
            return padded * max(32, tiles) + 32 * block_n
        return max(padded * rows, padded * tiles + rows * block_n)
    if rows <= 32:
        return decode.shared_elements(block_n, padded, num_stages)
    if device.arch in _WIDE_PRODUCTS and shape.element_size == 2:
        return padded * (rows + 2 * num_stages * block_n)
    probabilities = rows * block_n if num_stages > 1 else 0
    return padded * (rows + tiles) + probabilities


def _decode_fits_registers(
    c: Config, shape: AttentionShape, device: DeviceInfo
) -> bool:
    tile = 16 * (shape.padded + c["BLOCK_N"])
    return not on_gpu(device) or bool(tile / lanes(c, device) <= 160)


def _decode_warps(shape: AttentionShape, device: DeviceInfo) -> tuple[int, ...]:
    return (1, 2, 4, 8) if on_gpu(device) else (1,)


def _decode_stages(shape: AttentionShape, device: DeviceInfo) -> tuple[int, ...]:
    deeper = (5,) if device.platform == "cuda" else ()
    return (*stages(shape, device), *deeper)


def _mergers(shape: AttentionShape, device: DeviceInfo) -> tuple[str, ...]:
    return ("kernel", "last", "captured") if on_gpu(device) else ("kernel", "last")


DECODE_SPACE: ConfigSpace[AttentionShape] = ConfigSpace(
    "decode",
    (
        Parameter("BLOCK_N", (16, 32, 64, 128), "keys of a tile"),
        Parameter("num_warps", _decode_warps, "the interpreter has one"),
        Parameter(
            "num_stages",
            _decode_stages,
            "AMD's compiler gains nothing from more than two; on NVIDIA little but a "
            "deep pipeline hides latency where programs are few",
        ),
        Parameter(
            "CTAS_PER_UNIT",
            (1, 2, 3, 4, 6, 8),
            "fewer programs leave units empty, more cut requests into pieces that "
            "cost more than they balance",
        ),
        Parameter("MIN_CHUNK", (1, 2, 4), "tiles of keys in a piece, at least"),
        EARLY_LAUNCH,
        Parameter("LOAD", ("pointer", "descriptor"), "how keys are read"),
        Parameter(
            "MERGE",
            _mergers,
            "a request's parts are put together by a kernel of its own, by the program "
            "that is last, or by that kernel only in a captured graph, where its "
            "launch costs the host nothing; the interpreter captures none",
        ),
    ),
    (
        Constraint(
            "keys_per_warp",
            "16 rows of queries fill a matrix instruction, so warps share the keys: "
            "each needs 4 of a tile at least",
            ("BLOCK_N", "num_warps"),
            _keys_for_warps,
        ),
        Constraint(
            "small_fp32_tile",
            "products of 4-byte elements run unrolled on plain ALUs, and compile for "
            "minutes where tiles have more than 32 keys",
            ("BLOCK_N",),
            _few_fp32_keys,
        ),
        Constraint(
            "shared_memory",
            "queries, probabilities and all stages' keys and values but one's must fit "
            "a block's shared memory, with as many rows of queries as the longest "
            "decode has; all stages' where 64 rows go through Hopper's or Blackwell's "
            "wide products",
            ("BLOCK_N", "num_stages"),
            _decode_fits_shared,
        ),
        Constraint(
            "registers",
            "accumulators and scores are held in registers: of 16 query rows, they may "
            "take 160 of a lane's at most",
            ("BLOCK_N", "num_warps"),
            _decode_fits_registers,
        ),
        *LOAD_CONSTRAINTS,
        EARLY_LAUNCH_EXISTS,
    ),
    (SMALL_MATRICES,),
)


def _merge_warps(shape: AttentionShape, device: DeviceInfo) -> tuple[int, ...]:
    return (1, 2, 4) if on_gpu(device) else (1,)


MERGE_SPACE: ConfigSpace[AttentionShape] = ConfigSpace(
    "merge",
    (
        Parameter("BLOCK_SPLITS", (2, 4, 8, 16, 32), "parts that are read together"),
        Parameter("num_warps", _merge_warps, "what holds these parts in registers"),
        EARLY_LAUNCH,
    ),
    (EARLY_LAUNCH_EXISTS,),
)
