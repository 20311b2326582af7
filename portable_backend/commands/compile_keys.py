# SPDX-License-Identifier: Apache-2.0
"""What `portable-backend compile` compiles: targets, keys, and configs of each."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable_backend.commands import UsageError
from portable_backend.device import ARCH_LIMITS, DeviceInfo

if TYPE_CHECKING:
    from portable_backend.kernels.config import KernelConfig
    from portable_backend.warmup.records import TuningKey

TARGETS = tuple(arch for arch in ARCH_LIMITS if arch != "interpreter")
KERNELS = ("prefill", "decode", "rms_norm", "kv_cache")
LLAMA: dict[str, int | str] = {
    "dtype": "bfloat16",
    "head_size": 128,
    "num_kv_heads": 8,
    "num_queries_per_kv": 4,
    "sliding_window": 0,
    "row_size": 4096,
}
# Sizes of the default keys: each names a step whose default config differs somewhere,
# or a cache on the other side of 2 GiB, beyond which AMD's compiler must not take
# offsets of 32 bits.
_STEPS: dict[str, tuple[dict[str, int], ...]] = {
    "prefill": (
        {"num_seqs": 2, "query_len": 2048, "context_len": 0, "no_context": 1},
        {"num_seqs": 2, "query_len": 2048, "context_len": 4096, "no_context": 0},
        {"num_seqs": 2, "query_len": 2048, "context_len": 1 << 20, "no_context": 0},
    ),
    "decode": tuple(
        {"num_seqs": n, "query_len": 1, "seq_len": 4096} for n in (1, 32, 256)
    ),
    "rms_norm": tuple(
        {"fused_add": fused, "num_rows": rows}
        for fused in (0, 1)
        for rows in (16, 2048, 8192)
    ),
    "kv_cache": ({"num_tokens": 256}, {"num_tokens": 8192}),
}
_BLOCK_SIZES = (16, 64)
_MAX_DRAWS = 20  # for each config that is to be another one than those before


@dataclass(frozen=True)
class Candidate:
    """A config to compile, and for what."""

    target: str
    key: "TuningKey"
    config: "KernelConfig"
    is_default: bool


@dataclass(frozen=True)
class Asked:
    """Which configs beside the defaults.

    Attributes:
        each: so many of each key's space.
        total: so many of all keys and targets together.
    """

    each: int = 0
    total: int = 0

    def of_target(self, targets: Sequence[str], target: str) -> "Asked":
        """The total's share of one target."""
        share, rest = divmod(self.total, len(targets))
        return Asked(self.each, share + (targets.index(target) < rest))


def targets_of(text: str) -> list[str]:
    """Targets as a user names them.

    Raises:
        UsageError: there is no such target, or kernels do not run on it.
    """
    if text == "all":
        return list(TARGETS)
    # Vendors write sm_90.
    names = [name.strip().replace("sm_", "sm") for name in text.split(",")]
    for name in names:
        if re.fullmatch(r"sm[5-7]\d", name):
            raise UsageError(
                f"--target {name} is refused: kernels need compute capability 8.0 or "
                "later, for bf16 and asynchronous copies"
            )
        if name not in TARGETS:
            raise UsageError(
                f"--target must be all or some of {', '.join(TARGETS)}, got {name}"
            )
    return list(dict.fromkeys(names))


def fields_of(texts: Sequence[str]) -> dict[str, int | str]:
    """Fields of keys as a user gives them.

    Raises:
        UsageError: one is not FIELD=VALUE.
    """
    fields: dict[str, int | str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--key must be FIELD=VALUE, got {text}")
        is_number = value.removeprefix("-").isdecimal()
        fields[name] = int(value) if is_number else value
    return fields


def candidates(
    device: DeviceInfo,
    kernels: Sequence[str],
    given: dict[str, int | str],
    asked: Asked,
) -> "Iterator[Candidate]":
    """Each key's default first, then what is drawn: always the same configs.

    Raises:
        UsageError: no kernel has such a field, or it takes no such value.
    """
    from portable_backend.warmup.kernel_specs import spec_of

    keys = list(_keys(kernels, given))
    found: dict[tuple[TuningKey, KernelConfig], bool] = {}
    for key in keys:
        spec = spec_of(key)
        try:
            default = spec.default(key, device)
            rng = random.Random(f"{device.arch} {key}")
            drawn = spec.bound(key, device).sample(asked.each, rng)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--key: {error}") from None
        for config in [default, *drawn]:
            found.setdefault((key, config), config == default)
    rng = random.Random(f"{device.arch} {sorted(given.items())}")
    most = len(found) + asked.total
    for _ in range(_MAX_DRAWS * asked.total):
        if len(found) < most:
            key = rng.choice(keys)
            for config in spec_of(key).bound(key, device).sample(1, rng):
                found.setdefault((key, config), False)
    for (key, config), is_default in found.items():
        yield Candidate(device.arch, key, config, is_default)


def _keys(kernels: Sequence[str], given: dict[str, int | str]) -> "Iterator[TuningKey]":
    """The keys of each kernel: Llama's, with what is given in place of it."""
    from portable_backend.warmup.kernel_specs import KERNEL_SPECS, spec_of
    from portable_backend.warmup.records import TuningKey
    from portable_backend.warmup.units import check_fields

    known = {name for kernel in kernels for name in KERNEL_SPECS[kernel].fields}
    if unknown := sorted(given.keys() - known):
        raise UsageError(
            f"--key must name one of {', '.join(sorted(known))}, got {unknown[0]}"
        )
    for kernel in kernels:
        names = KERNEL_SPECS[kernel].fields
        found: dict[TuningKey, None] = {}
        for block_size in _BLOCK_SIZES:
            for sizes in _STEPS[kernel]:
                fields = LLAMA | {"block_size": block_size} | sizes | given
                if kernel == "prefill" and "no_context" not in given:
                    fields["no_context"] = int(fields["context_len"] == 0)
                try:
                    key = TuningKey.of(kernel, **{name: fields[name] for name in names})
                    spec_of(key)
                    check_fields(key, f"{kernel} key")
                except ValueError as error:
                    raise UsageError(f"--key: {error}") from None
                found[key] = None
        yield from found
