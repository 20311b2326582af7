# SPDX-License-Identifier: Apache-2.0
"""The configs that the prefill kernel may run with, and the reason for each bound."""

from portable_backend.device import DeviceInfo
from portable_backend.kernels import prefill
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


def _rows_for_warps(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    rows = 4 if shape.element_size == 4 else 16
    if device.arch == "gfx1100" and shape.padded > 128:
        rows = min(rows, 8)
    return not on_gpu(device) or bool(c["BLOCK_M"] >= rows * c["num_warps"])


def _small_fp32_tile(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    large = max(c["BLOCK_M"], c["BLOCK_N"]) > 32
    return not (large and shape.element_size == 4 and on_gpu(device))


def _prefill_fits_shared(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    elements = prefill.shared_elements(
        c["BLOCK_M"], c["BLOCK_N"], shape.padded, c["num_stages"], device
    )
    limit = device.limits.shared_bytes_per_block
    return elements * shape.element_size <= limit


def _prefill_registers(c: Config, shape: AttentionShape, device: DeviceInfo) -> float:
    """A lane's share of accumulators and scores."""
    tile: int = c["BLOCK_M"] * (shape.padded + c["BLOCK_N"])
    return tile / lanes(c, device)


def _prefill_fits_registers(
    c: Config, shape: AttentionShape, device: DeviceInfo
) -> bool:
    return not on_gpu(device) or _prefill_registers(c, shape, device) <= 340


def _pack_divides(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return bool(shape.num_queries_per_kv % c["PACK"] == 0)


def _cap_exists(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["maxnreg"] is None or device.platform == "cuda"


def _cap_helps(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["maxnreg"] is None or c["num_warps"] in (4, 8)


def _cap_leaves_room(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["maxnreg"] is None or _prefill_registers(c, shape, device) <= 96


def _partial_sums_compile(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["REFERENCE"] == "running" or device.arch != "sm100"


def _queries_may_stay(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return c["QUERY"] == "shared" or device.arch in ("sm90", "interpreter")


def _queries_are_few(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    few = c["BLOCK_M"] * shape.padded <= 64 * lanes(c, device)
    return c["QUERY"] == "shared" or bool(few)


def _delay_has_a_loop(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not c["DELAY_PV"] or c["REFERENCE"] == "diagonal"


def _delay_pays(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    free = c["LOAD"] != "pointer" and shape.element_size == 2
    return not c["DELAY_PV"] or not on_gpu(device) or (device.arch == "sm90" and free)


def _waves_help(c: Config, shape: AttentionShape, device: DeviceInfo) -> bool:
    return not c["waves_per_eu"] or device.arch == "gfx1100"


def _prefill_warps(shape: AttentionShape, device: DeviceInfo) -> tuple[int, ...]:
    return (2, 4, 8) if on_gpu(device) else (1,)


PREFILL_SPACE: ConfigSpace[AttentionShape] = ConfigSpace(
    "prefill",
    (
        Parameter("BLOCK_M", (16, 32, 64, 128), "query rows of a tile"),
        Parameter("BLOCK_N", (16, 32, 64, 128), "keys of a tile"),
        Parameter("num_warps", _prefill_warps, "the interpreter has one"),
        Parameter(
            "num_stages", stages, "AMD's compiler gains nothing from more than two"
        ),
        Parameter("PACK", (1, 2, 4, 8), "query heads of one KV head in a tile"),
        Parameter("LOAD", ("pointer", "descriptor", "new"), "how keys are read"),
        Parameter("maxnreg", (None, 128), "registers that a lane may have; None: any"),
        Parameter("REFERENCE", ("running", "diagonal"), "what exponents refer to"),
        Parameter("QUERY", ("shared", "registers"), "where queries are held"),
        Parameter("DELAY_PV", (False, True), "values multiplied a tile later"),
        EARLY_LAUNCH,
        Parameter(
            "waves_per_eu", (0, 2), "0 leaves the choice to the compiler", ("hip",)
        ),
    ),
    (
        Constraint(
            "rows_per_warp",
            "a matrix instruction has 16 rows for each warp; products of 4-byte "
            "elements run on plain ALUs, where 4 rows a warp are enough, and pairs of "
            "gfx1100's share rows of wide heads, half of the registers each",
            ("BLOCK_M", "num_warps"),
            _rows_for_warps,
        ),
        Constraint(
            "small_fp32_tile",
            "products of 4-byte elements run unrolled on plain ALUs, and compile for "
            "minutes where tiles have more than 32 rows or keys",
            ("BLOCK_M", "BLOCK_N"),
            _small_fp32_tile,
        ),
        Constraint(
            "shared_memory",
            "queries and all stages' keys and values must fit a block's shared memory",
            ("BLOCK_M", "BLOCK_N", "num_stages"),
            _prefill_fits_shared,
        ),
        Constraint(
            "registers",
            "accumulators and scores are held in registers, 255 a lane, with room for "
            "a third of them to spill",
            ("BLOCK_M", "BLOCK_N", "num_warps"),
            _prefill_fits_registers,
        ),
        Constraint(
            "pack_divides",
            "heads of one tile share a KV head: PACK divides their number",
            ("PACK",),
            _pack_divides,
        ),
        *LOAD_CONSTRAINTS,
        Constraint(
            "cap_exists",
            "only NVIDIA's compiler takes a cap on registers",
            ("maxnreg",),
            _cap_exists,
        ),
        Constraint(
            "cap_helps",
            "128 registers let two programs of 8 warps or four of 4 share a unit; "
            "other programs gain nothing",
            ("num_warps", "maxnreg"),
            _cap_helps,
        ),
        Constraint(
            "cap_leaves_room",
            "accumulators and scores may take three quarters of a cap at most",
            ("BLOCK_M", "BLOCK_N", "num_warps", "maxnreg"),
            _cap_leaves_room,
        ),
        Constraint(
            "partial_sums_compile",
            "Triton 3.6 fails on the partial sums of a fixed reference on sm100",
            ("REFERENCE",),
            _partial_sums_compile,
        ),
        Constraint(
            "queries_may_stay",
            "only sm90's matrix instructions take queries from either place",
            ("QUERY",),
            _queries_may_stay,
        ),
        Constraint(
            "queries_are_few",
            "queries in registers may take 32 of a lane's at most",
            ("BLOCK_M", "num_warps", "QUERY"),
            _queries_are_few,
        ),
        Constraint(
            "delay_has_a_loop",
            "with a running maximum the accumulator waits for each tile's rescaling",
            ("REFERENCE", "DELAY_PV"),
            _delay_has_a_loop,
        ),
        Constraint(
            "delay_pays",
            "only sm90's products go on while exponentials are computed, and addresses "
            "or 4-byte probabilities leave no registers for what travels",
            ("LOAD", "DELAY_PV"),
            _delay_pays,
        ),
        EARLY_LAUNCH_EXISTS,
        Constraint(
            "waves_help",
            "the compiler's own choice of waves is as good except on gfx1100",
            ("waves_per_eu",),
            _waves_help,
        ),
    ),
    (SMALL_MATRICES,),
)
