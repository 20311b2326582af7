# SPDX-License-Identifier: Apache-2.0
"""What a config takes of a GPU, and a rough time from that, before anything is timed.

`estimate_us` is a roofline: bytes over bandwidth, operations over rate, the device kept
as busy as waves of programs and bytes in flight let it. Its numbers come from data
sheets and are good for a ranking only. `prune` drops what cannot win even if the model
errs by a factor, and says why.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from portable_backend.device import DeviceInfo
from portable_backend.errors import bad_argument
from portable_backend.kernels.config import KernelConfig
from portable_backend.kernels.decode import block_m_for
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.records import TuningKey

MAX_LANES = 1024  # of one program, on every GPU that we know
MAX_TENSOR_COLUMNS = 512
# Above this a lane's spilled registers cost more than any tile gains.
MAX_SPILLS = 64


@dataclass(frozen=True)
class Readout:
    """What compiled code takes; None where the target's tools do not tell.

    Attributes:
        shared_bytes: shared memory (LDS) of a program.
        registers: of a lane; on AMD vector registers, accumulators included.
        spills: registers of a lane, 4 bytes each, that live in memory.
        programs_per_unit: that a streaming multiprocessor or compute unit holds at
            once; 0 if it holds none.
        seconds: compilation took.
        num_warps: of a program.
        tensor_columns: of Blackwell's tensor memory.
        scalar_registers, accumulator_registers: of a wave and of a lane, AMD only.
        code_bytes: of its instructions.
        matrix_instructions: places in the code, not how often they run.
        load_bytes: of the widest load from global memory, of a lane; 0: there is none.
    """

    shared_bytes: int
    registers: int | None
    spills: int | None
    programs_per_unit: int | None
    seconds: float
    num_warps: int = 1
    tensor_columns: int = 0
    scalar_registers: int | None = None
    accumulator_registers: int | None = None
    code_bytes: int | None = None
    matrix_instructions: int | None = None
    load_bytes: int | None = None


@dataclass(frozen=True)
class UnitLimits:
    """One unit (SM, CU; on gfx11 and gfx12 a pair of CUs), from vendors' guides.

    Attributes:
        warps: resident at once, of all programs.
        programs: resident at once.
        quarters: parts with registers of their own, among which warps are dealt.
        registers: of a lane position in one part, shared by the part's warps.
        granule: registers are handed out in multiples of it.
        matrix_flops: of 16-bit products, per clock.
        clock_ghz: a sustained clock.
        bytes_per_us: of device memory, per unit.
        reserved_bytes: of shared memory that each program costs beside its own.
    """

    warps: int
    programs: int
    quarters: int
    registers: int
    granule: int
    matrix_flops: int
    clock_ghz: float
    bytes_per_us: float
    reserved_bytes: int = 0


def _sm(
    warps: int, programs: int, flops: int, clock_ghz: float, bytes_per_us: float
) -> UnitLimits:
    return UnitLimits(
        warps, programs, 4, 512, 8, flops, clock_ghz, bytes_per_us, reserved_bytes=1024
    )


def _cdna(flops: int, clock_ghz: float, bytes_per_us: float) -> UnitLimits:
    return UnitLimits(32, 32, 4, 512, 8, flops, clock_ghz, bytes_per_us)


def _rdna(flops: int, clock_ghz: float, bytes_per_us: float) -> UnitLimits:
    return UnitLimits(64, 32, 4, 1536, 24, flops, clock_ghz, bytes_per_us)


UNIT_LIMITS: dict[str, UnitLimits] = {
    "sm80": _sm(64, 32, 2048, 1.4, 17e3),
    "sm86": _sm(48, 16, 1024, 1.7, 9e3),
    "sm89": _sm(48, 24, 1024, 2.2, 8e3),
    "sm90": _sm(64, 32, 4096, 1.7, 32e3),
    "sm100": _sm(64, 32, 8192, 1.8, 50e3),
    "sm120": _sm(48, 24, 1024, 2.4, 10e3),
    "gfx90a": _cdna(1024, 1.6, 15e3),
    "gfx942": _cdna(2048, 1.9, 17e3),
    "gfx950": _cdna(4096, 2.2, 30e3),
    "gfx1100": _rdna(1024, 2.3, 18e3),
    "gfx1201": _rdna(2048, 2.6, 18e3),
}
# As in DeviceInfo: an architecture that is not listed counts as a small one.
_FALLBACK = {"cuda": "sm86", "hip": "gfx1100", "interpreter": "sm80"}
LATENCY_US = 0.8  # of a trip to device memory
_LAUNCH_US = 2.0
_MODEL_US = 5.0  # what the model may err by on launches that take no time


def unit_limits(device: DeviceInfo) -> UnitLimits:
    """The unit of a device's architecture, or of the smallest of its vendor."""
    return UNIT_LIMITS.get(device.arch, UNIT_LIMITS[_FALLBACK[device.platform]])


def programs_per_unit(
    device: DeviceInfo,
    *,
    num_warps: int,
    shared_bytes: int = 0,
    registers: int | None = None,
    tensor_columns: int = 0,
) -> int:
    """How many programs a unit holds at once; 0 if not even one.

    Args:
        device: what they run on.
        num_warps, shared_bytes, tensor_columns: of a program.
        registers: of a lane; None counts as few.
    """
    unit = unit_limits(device)
    if num_warps * device.limits.warp_size > MAX_LANES:
        return 0
    if shared_bytes > device.limits.shared_bytes_per_block:
        return 0
    per_part = unit.warps // unit.quarters
    if registers:
        taken = -(-registers // unit.granule) * unit.granule
        per_part = min(per_part, unit.registers // taken)
    held = min(unit.programs, per_part * unit.quarters // num_warps)
    if shared_bytes:
        each = shared_bytes + unit.reserved_bytes
        held = min(held, device.limits.shared_bytes_per_unit // each)
    if tensor_columns:
        held = min(held, MAX_TENSOR_COLUMNS // tensor_columns)
    return held


def over_limit(readout: Readout, device: DeviceInfo) -> str | None:
    """Why the compiled kernel could not be launched on `device`, or None."""
    limits = device.limits
    if readout.shared_bytes > limits.shared_bytes_per_block:
        return (
            f"wants {readout.shared_bytes} bytes of shared memory, "
            f"a block has {limits.shared_bytes_per_block}"
        )
    if readout.num_warps * limits.warp_size > MAX_LANES:
        return f"wants {readout.num_warps} warps of {limits.warp_size} lanes"
    if readout.tensor_columns > MAX_TENSOR_COLUMNS:
        return f"wants {readout.tensor_columns} columns of tensor memory"
    if readout.programs_per_unit == 0:
        return f"wants {readout.registers} registers for {readout.num_warps} warps"
    return None


@dataclass(frozen=True)
class Work:
    """What one launch has to do, as the model sees it.

    Attributes:
        programs: of the grid, those that return at once left out.
        flops: of matrix products, padding included.
        read_bytes: from device memory, each byte once.
        tile_bytes: that programs ask for, from memory or a cache.
        steps: trips to memory that a program makes one after the other.
        flight_bytes: that a program has on the way at once.
        shared_bytes, registers: of a program and of a lane, estimated.
        extra_us: launches beside it, instructions that do nothing for the result.
    """

    programs: float
    flops: float
    read_bytes: float
    tile_bytes: float
    steps: float
    flight_bytes: float
    shared_bytes: int
    registers: int
    extra_us: float = 0.0


def estimate_us(
    key: TuningKey,
    config: KernelConfig,
    device: DeviceInfo,
    readout: Readout | None = None,
) -> float:
    """A time for ranking configs of one key, in microseconds; not one to promise.

    Args:
        key: what the config is for.
        config: a member of the key's space.
        device: what it would run on.
        readout: of the compiled config; None estimates registers and shared memory.

    Returns:
        A positive time, infinite for what no unit can hold.

    Raises:
        ValueError: the key is no kernel's.
    """
    work = work_of(key, config, device)
    num_warps = config["num_warps"]
    held: int | None = None
    spills = 0
    if readout is not None:
        held, spills = readout.programs_per_unit, readout.spills or 0
    if held is None:
        held = programs_per_unit(
            device,
            num_warps=num_warps,
            shared_bytes=readout.shared_bytes if readout else work.shared_bytes,
            registers=work.registers,
        )
    if held < 1:
        return math.inf
    dtype = str(key.to_dict()["dtype"])
    return _time_us(work, held, num_warps, spills, dtype, device)


def _time_us(
    work: Work, held: int, num_warps: int, spills: int, dtype: str, device: DeviceInfo
) -> float:
    unit = unit_limits(device)
    # Programs of the fullest unit, and of those the ones it works on at a time.
    in_unit = max(1.0, work.programs / device.num_units)
    if in_unit < 8 * held:
        in_unit = float(math.ceil(in_unit))
    resident = min(held, in_unit)
    share = in_unit / max(work.programs, 1.0)  # of all the work
    rate = unit.matrix_flops * unit.clock_ghz * 1e3  # per us and unit
    if dtype == "float32":
        rate /= 16
    busy = min(1.0, resident * num_warps / 8)  # warps that take turns
    compute = work.flops * share / (rate * (0.3 + 0.5 * busy))
    # One unit alone gets up to four times its part of the memory's bandwidth.
    bandwidth = device.num_units * unit.bytes_per_us
    in_flight = resident * work.flight_bytes / LATENCY_US
    own = min(4 * unit.bytes_per_us, in_flight)
    memory = max(
        work.read_bytes / bandwidth,
        work.tile_bytes * share / own,
        work.tile_bytes / (4 * bandwidth),
    )
    rounds = math.ceil(in_unit / held)
    chain = (2 + work.steps) * LATENCY_US
    latency = chain * (1 + (rounds - 1) / max(1, min(4, resident)))  # others hide it
    slow = 1 + spills / 128
    spread = max(compute, memory) + 0.2 * min(compute, memory)
    return _LAUNCH_US + work.extra_us + slow * (spread + 0.5 * latency)


def _heads(fields: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """(KV heads, query heads of each, padded head size, bytes per element)."""
    padded = max(16, 1 << (fields["head_size"] - 1).bit_length())
    size = DTYPES[fields["dtype"]].itemsize
    return fields["num_kv_heads"], fields["num_queries_per_kv"], padded, size


def _seen(fields: Mapping[str, Any], keys: float) -> float:
    window = fields["sliding_window"]
    return min(keys, window) if window else keys


def _prefill_work(
    fields: Mapping[str, Any], config: KernelConfig, device: DeviceInfo
) -> Work:
    kv_heads, group, padded, size = _heads(fields)
    block_m, block_n, pack = config["BLOCK_M"], config["BLOCK_N"], config["PACK"]
    num_seqs, query_len = fields["num_seqs"], fields["query_len"]
    context_len = fields["context_len"]
    tokens = max(1, block_m // pack)
    tiles = -(-query_len // tokens)
    programs = num_seqs * tiles * kv_heads * group // pack
    # Of a tile in the middle of the queries, up to whole tiles of keys.
    mean = _seen(fields, context_len + (query_len + tokens) / 2)
    steps = mean / block_n + 1
    flops = programs * 4 * block_m * padded * steps * block_n
    kv_bytes = 2 * padded * size
    length = _seen(fields, context_len + query_len)
    queries = 2 * num_seqs * query_len * kv_heads * group * padded * size
    stages = config["num_stages"]
    lanes = config["num_warps"] * device.limits.warp_size
    held = block_m * (padded + block_n) // lanes
    cap = config.get("maxnreg")
    registers = min(255, 40 + held + held // 4)
    shared = padded * size * (block_m + 2 * block_n * stages)
    if device.platform == "hip":
        shared = padded * size * max(block_m, 2 * block_n * stages)
    if config.get("LOAD") == "pointer":
        flops *= 1.05  # addresses
    if config.get("REFERENCE") == "running":
        flops *= 1.1
    if config.get("DELAY_PV"):
        flops *= 0.9  # exponentials beside products
    return Work(
        programs=programs,
        flops=flops,
        read_bytes=num_seqs * length * kv_heads * kv_bytes + queries,
        tile_bytes=programs * steps * block_n * kv_bytes + queries,
        # A pipeline hides all but a part of each trip.
        steps=steps / max(1, 4 * (stages - 1)),
        flight_bytes=block_n * kv_bytes * max(0.5, stages - 1),
        shared_bytes=shared,
        registers=min(registers, cap) if cap else registers,
    )


def _decode_work(
    fields: Mapping[str, Any], config: KernelConfig, device: DeviceInfo
) -> Work:
    kv_heads, group, padded, size = _heads(fields)
    block_n, stages = config["BLOCK_N"], config["num_stages"]
    num_seqs, query_len = fields["num_seqs"], fields["query_len"]
    block_m = block_m_for(query_len * group)
    row_blocks = -(-query_len * group // block_m)
    keys = _seen(fields, fields["seq_len"])
    # As the plan cuts: all items together fill the device once.
    units = device.num_units * config["CTAS_PER_UNIT"]
    target = max(1, units // (kv_heads * row_blocks))
    chunk = max(num_seqs * keys / target, config["MIN_CHUNK"] * block_n)
    pieces = max(1, math.ceil(keys / chunk)) if units else 1
    programs = num_seqs * kv_heads * row_blocks * pieces
    tiles = math.ceil(keys / pieces / block_n)
    kv_bytes = 2 * padded * size
    wanted = num_seqs * kv_heads * keys * kv_bytes
    partial = 8 * programs * block_m * padded if pieces > 1 else 0
    lanes = config["num_warps"] * device.limits.warp_size
    held = block_m * (padded + block_n) // lanes
    buffers = max(1, stages - 1)
    shared = size * (padded * (block_m + 2 * block_n * buffers) + block_m * block_n)
    if device.platform == "hip":
        shared = size * padded * max(block_m, 2 * block_n * buffers)
    return Work(
        programs=programs,
        flops=programs * 4 * block_m * padded * tiles * block_n,
        read_bytes=wanted + partial,
        tile_bytes=programs * tiles * block_n * kv_bytes + partial,
        steps=tiles / max(1, 4 * (stages - 1)),
        flight_bytes=block_n * kv_bytes * max(0.5, stages - 1),
        shared_bytes=shared,
        registers=min(255, 40 + held + held // 4),
        extra_us=1.0 if pieces > 1 else 0.0,
    )


def _rms_norm_work(
    fields: Mapping[str, Any], config: KernelConfig, device: DeviceInfo
) -> Work:
    num_rows, row_size = fields["num_rows"], fields["row_size"]
    size = DTYPES[fields["dtype"]].itemsize
    streams = 2 if fields["fused_add"] else 1
    rows = config["ROWS"]
    tiles = -(-num_rows // rows)
    per_unit = config.get("PROGRAMS_PER_UNIT") or 0
    programs = min(tiles, per_unit * device.num_units) if per_unit else tiles
    tile = rows * (1 << (row_size - 1).bit_length())
    lanes = config["num_warps"] * device.limits.warp_size
    moved = 2 * streams * num_rows * row_size * size
    each = tile / lanes * streams * size / 4 * (2 if per_unit else 1)
    return Work(
        programs=programs,
        flops=0.0,
        read_bytes=moved,
        tile_bytes=moved,
        steps=tiles / programs - 1,
        flight_bytes=streams * rows * row_size * size * (2 if per_unit else 1),
        shared_bytes=0,
        registers=min(255, 24 + int(1.5 * each)),
    )


def _kv_cache_work(
    fields: Mapping[str, Any], config: KernelConfig, device: DeviceInfo
) -> Work:
    size = DTYPES[fields["dtype"]].itemsize
    elements = fields["num_tokens"] * fields["num_kv_heads"] * fields["head_size"]
    vector = math.gcd(fields["head_size"], 16 // size)
    vectors = config["VECTORS"]
    programs = -(-elements // (vector * vectors))
    lanes = config["num_warps"] * device.limits.warp_size
    return Work(
        programs=programs,
        flops=0.0,
        read_bytes=4 * elements * size,
        tile_bytes=4 * elements * size,
        steps=1,
        flight_bytes=2 * min(vectors * vector, elements) * size,
        shared_bytes=0,
        registers=min(255, 24 + 16 * max(1, vectors // lanes)),
    )


_WORK: dict[str, Callable[[Mapping[str, Any], KernelConfig, DeviceInfo], Work]] = {
    "prefill": _prefill_work,
    "decode": _decode_work,
    "rms_norm": _rms_norm_work,
    "kv_cache": _kv_cache_work,
}


def work_of(key: TuningKey, config: KernelConfig, device: DeviceInfo) -> Work:
    """What one launch of a config has to do, by formulas.

    Raises:
        ValueError: the key is no kernel's.
    """
    spec_of(key)
    return _WORK[key.kernel](key.to_dict(), config, device)


# What the estimate reads of a config; few of them differ in that.
READS: dict[str, tuple[str, ...]] = {
    "prefill": (
        *("BLOCK_M", "BLOCK_N", "PACK", "LOAD", "REFERENCE", "DELAY_PV"),
        *("maxnreg", "num_stages", "num_warps"),
    ),
    "decode": ("BLOCK_N", "CTAS_PER_UNIT", "MIN_CHUNK", "num_stages", "num_warps"),
    "rms_norm": ("PROGRAMS_PER_UNIT", "ROWS", "num_warps"),
    "kv_cache": ("VECTORS", "num_warps"),
}


def estimates_us(
    key: TuningKey,
    configs: Iterable[KernelConfig],
    device: DeviceInfo,
    readouts: Mapping[KernelConfig, Readout] | None = None,
) -> list[float]:
    """`estimate_us` of each config, but quicker where they are many."""
    spec_of(key)
    reads, known = READS[key.kernel], {}
    times: list[float] = []
    for config in configs:
        readout = readouts.get(config) if readouts else None
        if readout is not None:
            times.append(estimate_us(key, config, device, readout))
            continue
        values = dict(config.items_)
        place = tuple([values.get(name) for name in reads])
        if place not in known:
            known[place] = estimate_us(key, config, device)
        times.append(known[place])
    return times


@dataclass(frozen=True)
class Pruned:
    """A config that is not worth timing, and why."""

    config: KernelConfig
    reason: str


def prune(
    key: TuningKey,
    configs: Iterable[KernelConfig],
    device: DeviceInfo,
    *,
    keep: int,
    slack: float = 4.0,
    readouts: Mapping[KernelConfig, Readout] | None = None,
) -> tuple[list[KernelConfig], list[Pruned]]:
    """Rank configs by `estimate_us`, and drop those that cannot win.

    Args:
        key: what they are for.
        configs: members of the key's space.
        device: what they would run on.
        keep: so many of the best stay, whatever is estimated of them. What could not be
            launched at all never stays, nor what another config does as well.
        slack: dropped is what is estimated at more than so many times the best, and
            some microseconds above that.
        readouts: of configs that are compiled; the others' are estimated.

    Returns:
        (kept, best first; dropped, in the order given).

    Raises:
        ValueError: keep is negative, or slack below 1.
    """
    if keep < 0:
        raise bad_argument("keep", "0 or more", keep, "pass how many stay anyway")
    if not slack >= 1:
        raise bad_argument("slack", "at least 1", slack, "1 keeps the best only")
    readouts = readouts or {}
    given = list(dict.fromkeys(configs))
    times = estimates_us(key, given, device, readouts)
    members = frozenset(given)
    reasons: dict[int, str] = {}  # by number: hashing configs takes most of the time
    for number, config in enumerate(given):
        readout = readouts.get(config) if readouts else None
        reason = over_limit(readout, device) if readout else None
        if reason is None and times[number] == math.inf:
            reason = "no unit can hold a program of it"
        if reason is None:
            load = _load_in_use(config, key)
            if load != config.get("LOAD") and config.replace(LOAD=load) in members:
                reason = f"runs as LOAD={load} here"
        if reason is not None:
            reasons[number] = reason
    numbers = [number for number in range(len(given)) if number not in reasons]
    ranked = sorted(numbers, key=times.__getitem__)
    best = times[ranked[0]] if ranked else math.inf
    most = max((r.programs_per_unit or 0 for r in readouts.values()), default=0)
    for number in ranked[keep:]:
        readout = readouts.get(given[number]) if readouts else None
        spills = readout.spills if readout else None
        if spills and spills > MAX_SPILLS:
            reasons[number] = f"spills {spills} registers"
        elif times[number] > slack * best + _MODEL_US:
            reasons[number] = f"estimated {times[number] / best:.1f}x of the best" + (
                _few_programs(readout, most)
            )
    kept = [given[number] for number in ranked if number not in reasons]
    return kept, [Pruned(given[n], reason) for n, reason in sorted(reasons.items())]


def _load_in_use(config: KernelConfig, key: TuningKey) -> Any:
    """What the kernels do for a config's LOAD where they cannot do as it says."""
    load, fields = config.get("LOAD"), key.to_dict()
    if load == "new" and not fields.get("no_context"):
        within_block = fields["block_size"] % config["BLOCK_N"] == 0
        return "descriptor" if within_block else "pointer"
    if load == "descriptor" and key.kernel == "decode" and fields["sliding_window"]:
        return "pointer"  # prefill clears what lies before a window, decode does not
    return load


def _few_programs(readout: Readout | None, most: int) -> str:
    held = readout.programs_per_unit if readout else None
    if held is None or 2 * held > most:
        return ""
    return f": {held} programs fit a unit where others have {most}"
