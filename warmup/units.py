# SPDX-License-Identifier: Apache-2.0
"""What to tune, the most valuable first: a model's buckets, or those of a file."""

import functools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_backend.errors import bad_argument
from portable_backend.kernels.rms_norm_space import MAX_ROW_SIZE
from portable_backend.warmup.buckets import (
    EngineLimits,
    Step,
    all_keys,
    bucket_of_step,
    context_len_buckets,
    decode_key,
    kv_cache_key,
    num_seqs_buckets,
    prefill_key,
    prefill_token_buckets,
    rms_norm_key,
    seq_len_buckets,
)
from portable_backend.warmup.kernel_specs import DTYPES, spec_of
from portable_backend.warmup.model_shapes import ModelShape
from portable_backend.warmup.records import FieldValue, TuningKey, short

__all__ = [
    "EngineLimits",
    "Step",
    "WorkUnit",
    "bucket_of_step",
    "decode_key",
    "kv_cache_key",
    "prefill_key",
    "read_shapes",
    "rms_norm_key",
    "units_of",
    "write_shapes",
]


@dataclass(frozen=True)
class WorkUnit:
    """One key to tune.

    Attributes:
        key: the bucket.
        weight: its share of the expected time; all units' sum is 1.
    """

    key: TuningKey
    weight: float


def units_of(model: ModelShape, limits: EngineLimits) -> list[WorkUnit]:
    """Every bucket that a step can fall into, by expected share of time.

    The traffic behind the shares: 7 of 8 steps are decodes only, all buckets of
    requests equally often. The rest are prefills only, all buckets of tokens equally
    often, half of them with a context. Lengths are the representative ones or, half as
    often for each bucket away, others. Times are those of a GPU with 4 TB/s and
    400 TFLOP/s that spends 2 us on a launch: they order the work, no more.
    """
    # A bucket that this traffic never meets is tuned last.
    expected = dict.fromkeys(all_keys(model, limits), 0.0)
    for chance, key, launches in _traffic(model, limits):
        expected[key] += chance * launches * _nominal_us(key)
    total = sum(expected.values())
    units = [WorkUnit(key, time / total) for key, time in expected.items()]
    return sorted(units, key=lambda unit: (-unit.weight, str(unit.key)))


def read_shapes(path: Path) -> list[WorkUnit]:
    """Read a shapes file, most valuable first.

    A JSON list of {"kernel": name, "key": {field: value}, "weight": number}; weight may
    be left out and is 1 then. Weights are scaled to the sum 1.

    Raises:
        ValueError: names the entry and field, what it may be and what it is.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad_argument(
            "shapes", "a JSON file that can be read", path, f"mend it ({error})"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise bad_argument(
            f"{path}", "a list with at least one key", short(entries), "add keys"
        )
    weights: dict[TuningKey, float] = {}
    for number, entry in enumerate(entries, 1):
        key, weight = _entry(entry, f"{path}, entry {number}")
        if key in weights:
            raise bad_argument(
                f"{path}, entry {number}",
                "unlike all others",
                str(key),
                "remove the repeat",
            )
        weights[key] = weight
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise bad_argument(
            f"{path}", "at least one weight above 0, finite in sum", total, "correct it"
        )
    units = [WorkUnit(key, weight / total) for key, weight in weights.items()]
    return sorted(units, key=lambda unit: -unit.weight)


def write_shapes(path: Path, units: Iterable[WorkUnit]) -> None:
    """Write a file that `read_shapes` reads, a key to a line.

    Raises:
        OSError: it cannot be written.
    """
    lines = [
        json.dumps({"kernel": u.key.kernel, "key": u.key.to_dict(), "weight": u.weight})
        for u in units
    ]
    path.write_text("[" + ",\n ".join(lines) + "]\n", encoding="utf-8")


# How often keys are met


def _traffic(
    model: ModelShape, limits: EngineLimits
) -> Iterator[tuple[float, TuningKey, int]]:
    """(share of all steps, key, launches in such a step)."""
    batches, tokens = num_seqs_buckets(limits), prefill_token_buckets(limits)
    model_len = limits.model_len(model)
    for num_seqs in batches:
        chance = 7 / 8 / len(batches)
        yield from _around(model, limits, chance, num_seqs * limits.decode_query_len)
        for window, layers in model.windows:
            decode = functools.partial(
                decode_key, model, limits, num_seqs=num_seqs, sliding_window=window
            )
            lengths = seq_len_buckets(model_len, window)
            for seq_len, share in _shares(lengths, _size(decode(), "seq_len")):
                yield chance * share, decode(seq_len=seq_len), layers
    for num_tokens in tokens:
        chance = 1 / 8 / len(tokens)
        yield from _around(model, limits, chance, num_tokens)
        for window, layers in model.windows:
            prefill = functools.partial(
                prefill_key, model, limits, num_tokens=num_tokens, sliding_window=window
            )
            yield chance / 2, prefill(no_context=True), layers
            lengths = context_len_buckets(model_len, window)
            usual = _size(prefill(no_context=False), "context_len")
            for context_len, share in _shares(lengths, usual):
                key = prefill(no_context=False, context_len=context_len)
                yield chance / 2 * share, key, layers


def _shares(lengths: list[int], usual: int) -> list[tuple[int, float]]:
    """Halved for each bucket away from the usual one; their sum is 1."""
    middle = min(range(len(lengths)), key=lambda n: abs(lengths[n] - usual))
    shares = [0.5 ** abs(n - middle) for n in range(len(lengths))]
    return [(n, share / sum(shares)) for n, share in zip(lengths, shares, strict=True)]


def _around(
    model: ModelShape, limits: EngineLimits, chance: float, num_tokens: int
) -> Iterator[tuple[float, TuningKey, int]]:
    """Norms and cache writes of steps with so many tokens."""
    key = kv_cache_key(model, limits, num_tokens=num_tokens)
    yield chance, key, model.num_layers
    for norm in model.norms:
        rows = num_tokens * norm.rows_per_token
        key = rms_norm_key(model, limits, norm, num_rows=rows)
        yield chance, key, norm.calls


def _size(key: TuningKey, name: str) -> int:
    return dict(key.sizes)[name]


def _nominal_us(key: TuningKey) -> float:
    fields: dict[str, Any] = key.to_dict()
    element = DTYPES[fields["dtype"]].itemsize
    num_bytes, flops = 0, 0
    if key.kernel == "rms_norm":
        num_bytes = fields["num_rows"] * fields["row_size"] * element
        num_bytes *= 4 if fields["fused_add"] else 2
    elif key.kernel == "kv_cache":
        heads = fields["num_kv_heads"] * fields["head_size"]
        num_bytes = 4 * fields["num_tokens"] * heads * element
    else:
        heads = fields["num_kv_heads"] * fields["head_size"]
        query_len = fields["query_len"]
        if key.kernel == "decode":
            keys = fields["seq_len"]
        else:
            keys = fields["context_len"] + -(-query_len // 2)
        if fields["sliding_window"]:
            keys = min(keys, fields["sliding_window"])
        num_bytes = 2 * fields["num_seqs"] * keys * heads * element
        pairs = fields["num_seqs"] * query_len * keys
        flops = 4 * pairs * heads * fields["num_queries_per_kv"]
    return float(2 + max(num_bytes / 4e6, flops / 4e8))


# Shapes files

_POSITIVE = frozenset(
    {
        "head_size",
        "num_kv_heads",
        "num_queries_per_kv",
        "num_seqs",
        "query_len",
        "seq_len",
        "row_size",
        "num_rows",
        "num_tokens",
    }
)
_FLAGS = frozenset({"no_context", "fused_add"})
_LARGEST = {"row_size": MAX_ROW_SIZE}
_INT32_MAX = (1 << 31) - 1  # what kernels count with


def _entry(entry: Any, where: str) -> tuple[TuningKey, float]:
    if not isinstance(entry, dict):
        raise bad_argument(where, "an object", short(entry), "write one")
    unknown = sorted(entry.keys() - {"kernel", "key", "weight"})
    if unknown or not isinstance(entry.get("key"), dict):
        raise bad_argument(
            where,
            "an object of kernel, key (an object) and perhaps weight",
            short(entry),
            "correct it",
        )
    weight = entry.get("weight", 1)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        raise bad_argument(
            f"{where}: weight", "a number, 0 or more", short(weight), "correct it"
        )
    fields: dict[str, FieldValue] = entry["key"]
    try:
        key = TuningKey.from_dict(entry.get("kernel", ""), fields)
        spec_of(key)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    check_fields(key, where)
    return key, float(weight)


def check_fields(key: TuningKey, where: str) -> None:
    """Refuse fields of the right names with values that nothing can have.

    Args:
        where: the key was read, for messages.

    Raises:
        ValueError: names the first one.
    """
    for name, value in key.fields:
        expected = _expected(name, value)
        if expected:
            raise bad_argument(f"{where}: {name}", expected, value, "correct it")
    fields = key.to_dict()
    if "no_context" in fields and bool(fields["no_context"]) == bool(
        fields["context_len"]
    ):
        raise bad_argument(
            f"{where}: no_context",
            "1 where context_len is 0, else 0",
            fields["no_context"],
            "correct it",
        )


def _expected(name: str, value: FieldValue) -> str | None:
    """What a field may be, where this value is something else."""
    if name == "dtype":
        return None
    if not isinstance(value, int):
        return "a whole number"
    if name == "block_size" and (value < 16 or value % 16):
        return "a multiple of 16"
    if name in _FLAGS:
        return None if value in (0, 1) else "0 or 1"
    lowest, most = 1 if name in _POSITIVE else 0, _LARGEST.get(name, _INT32_MAX)
    if value < lowest:
        return f"{lowest} or more"
    return None if value <= most else f"at most {most}"
