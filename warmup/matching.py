# SPDX-License-Identifier: Apache-2.0
"""What is wanted against what a record holds, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from portable_backend.warmup.records import SIZE_FIELDS, TuningKey, TuningRecord

# A prediction counts waves of programs: it stands for GPUs of about as many units.
UNITS_MARGIN = 1.1


@dataclass(frozen=True)
class Environment:
    """Where configs will run.

    Attributes:
        gpu: canonical device name.
        arch: its architecture.
        digests: digest of each kernel's code as installed; None leaves it unchecked.
        toolchain: versions; empty leaves them unchecked.
        num_units: of the GPU; None: unknown, and predictions serve by its name alone.
    """

    gpu: str
    arch: str
    digests: Mapping[str, str] | None = None
    toolchain: Mapping[str, str | None] = field(default_factory=dict)
    num_units: int | None = None


@dataclass(frozen=True)
class Difference:
    """One field in which a record is not what was wanted.

    Attributes:
        field: `kernel_digest`, `verified`, `unmeasured`, `refuted`, `gpu`, `arch`, a
            key's field, `toolchain.<package>` or `config`.
        wanted: what an exact hit holds.
        stored: what the record holds.
        blocks: whether it keeps the record from being an exact hit. Another toolchain
            does not: a config stays right, only perhaps slow.
    """

    field: str
    wanted: Any
    stored: Any
    blocks: bool = True

    def __str__(self) -> str:
        text = f"{self.field}: wanted {self.wanted}, stored {self.stored}"
        return text if self.blocks else f"{text} (used all the same)"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def current_toolchain() -> dict[str, str | None]:
    """What a record's `toolchain` holds here; empty where there is no torch."""
    try:
        import torch
        import triton
    except ImportError:
        return {}
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def code_differences(
    record: TuningRecord, environment: Environment, require_verified: bool
) -> Iterator[Difference]:
    """What forbids a record's config wherever it comes from."""
    if environment.digests is not None:
        wanted = environment.digests.get(record.key.kernel, "none: unknown kernel")
        if record.kernel_digest != wanted:
            yield Difference("kernel_digest", wanted, record.kernel_digest)
    if record.refuted is not None:
        yield Difference("refuted", None, record.refuted)
    elif record.unmeasured is not None:
        yield Difference("unmeasured", "measured", dict(record.unmeasured))
    elif require_verified and not record.verified:
        yield Difference("verified", True, False)


def why_no_stand_in(record: TuningRecord, environment: Environment) -> str | None:
    """Why a prediction is not for this environment, or None where it is.

    Its code and GPU must fit. A GPU that the model was fitted on is never served: its
    defaults were chosen by measurements.
    """
    told = record.unmeasured
    if told is None:
        return "it was measured"
    wanted = (environment.digests or {}).get(record.key.kernel, record.kernel_digest)
    if record.arch != environment.arch:
        return f"it is for {record.arch}"
    if record.kernel_digest != wanted:
        return f"kernel_digest: wanted {wanted}, stored {record.kernel_digest}"
    if environment.gpu in told["fitted_on"]:
        return f"its model was fitted on {environment.gpu}"
    units, predicted = environment.num_units, told["num_units"]
    if record.gpu != environment.gpu:
        if units is None:
            return f"it is for {predicted} units, here their number is not known"
        if not 1 / UNITS_MARGIN <= units / predicted <= UNITS_MARGIN:
            return f"it is for {predicted} units, here are {units}"
    return None


def toolchain_differences(
    stored: Mapping[str, str | None], environment: Environment
) -> list[Difference]:
    wanted = environment.toolchain
    if not wanted:
        return []
    return [
        Difference(f"toolchain.{name}", wanted.get(name), stored.get(name), False)
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]


def differences(
    key: TuningKey,
    environment: Environment,
    record: TuningRecord,
    *,
    require_verified: bool = True,
    space_reason: str | None = None,
) -> tuple[Difference, ...]:
    """Every field in which `record` differs from an exact hit for `key`.

    Args:
        key: what is looked up, of the record's kernel.
        environment: where it will run.
        record: what is stored.
        require_verified: as `Lookup` has it.
        space_reason: why today's space rejects the config, if it does.
    """
    found = list(code_differences(record, environment, require_verified))
    for name in ("gpu", "arch"):
        wanted, stored = getattr(environment, name), getattr(record, name)
        if wanted != stored:
            found.append(Difference(name, wanted, stored))
    wanted_fields, stored_fields = key.to_dict(), record.key.to_dict()
    names = sorted(wanted_fields.keys() | stored_fields.keys())
    for name in sorted(names, key=lambda name: name in SIZE_FIELDS):
        if wanted_fields.get(name) != stored_fields.get(name):
            found.append(
                Difference(name, wanted_fields.get(name), stored_fields.get(name))
            )
    if space_reason is not None:
        wanted = f"within today's space ({space_reason})"
        found.append(Difference("config", wanted, record.config.to_dict()))
    if record.unmeasured is not None:  # no time depends on a toolchain
        return tuple(found)
    return (*found, *toolchain_differences(record.toolchain, environment))
