# SPDX-License-Identifier: Apache-2.0
"""What compiled defaults must keep, the exceptions, and what they took before."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_backend.commands import UsageError

if TYPE_CHECKING:
    from portable_backend.warmup.resources import Readout


@dataclass(frozen=True)
class ExpectedSpills:
    """A default that spills, since nothing better is known.

    Attributes:
        target, kernel: of the default.
        head_sizes: from, and up to.
        most: registers.
        reason: why they stay, for people.
        is_fp32: of fp32, or of 16-bit elements.
    """

    target: str
    kernel: str
    head_sizes: tuple[int, int]
    most: int
    reason: str
    is_fp32: bool = False


_TWICE = (
    "gfx11 holds the operands of matrix instructions twice, so 16 rows of queries take "
    "128 of a lane's 256 registers"
)
_ONCE = "stored once ahead of the loops and read once between or behind them"
EXPECTED_SPILLS = (
    ExpectedSpills(
        "sm90",
        "prefill",
        (65, 128),
        8,
        "a cap on registers lets four programs share a unit, the fastest in sweeps on "
        "an H200",
    ),
    ExpectedSpills("sm90", "prefill", (129, 256), 8, _ONCE),
    ExpectedSpills(
        "sm120",
        "prefill",
        (129, 256),
        8,
        "read for the masked tiles at the edges, not in the loop of whole tiles",
    ),
    ExpectedSpills(
        "gfx1100",
        "prefill",
        (65, 128),
        24,
        f"{_ONCE}; twice as many warps spill none and multiply half as much again",
    ),
    ExpectedSpills(
        "gfx1100",
        "prefill",
        (129, 256),
        152,
        f"{_TWICE}; 3 of those spilled are read in the loop of masked tiles, none in "
        "that of whole ones",
    ),
    ExpectedSpills(
        "gfx1100", "decode", (129, 256), 96, f"{_TWICE}; 22 are read for each tile"
    ),
    ExpectedSpills("gfx1201", "prefill", (129, 256), 8, _ONCE),
    ExpectedSpills(
        "sm90",
        "prefill",
        (32, 64),
        64,
        "fp32 products run unrolled on plain ALUs: right, but not meant to be fast",
        is_fp32=True,
    ),
)


def expected_spills(
    target: str, kernel: str, fields: Mapping[str, Any]
) -> ExpectedSpills | None:
    """The exception that holds for such a default, if there is one."""
    for expected in EXPECTED_SPILLS:
        if (expected.target, expected.kernel) != (target, kernel):
            continue
        lowest, highest = expected.head_sizes
        is_fp32 = fields["dtype"] == "float32"
        if lowest <= fields["head_size"] <= highest and is_fp32 == expected.is_fp32:
            return expected
    return None


def weakness(
    target: str,
    kernel: str,
    fields: Mapping[str, Any],
    readout: "Readout",
    max_spills: int,
) -> str | None:
    """What no default may lack, where its code was read.

    Args:
        target, kernel: the binary's; the kernel may be a part, such as "merge".
        fields: of the key that it is launched for.
        readout: of the binary.
        max_spills: that need no exception.
    """
    spills = readout.spills or 0
    expected = expected_spills(target, kernel, fields)
    most = max(max_spills, expected.most if expected else 0)
    if spills > most:
        allowed = f", {most} are expected" if expected else ""
        return f"the default spills {spills} registers{allowed}"
    width = readout.load_bytes
    if width == 0:
        return "the default loads nothing"
    if kernel in ("plan", "merge"):
        return None  # numbers of 4 bytes
    if kernel in ("prefill", "decode") and fields["dtype"] != "float32":
        if readout.matrix_instructions == 0:
            return "the default has no matrix instructions"
    elif "head_size" in fields and fields["dtype"] == "float32":
        return None
    row = fields.get("head_size") or fields["row_size"]
    if width is not None and width < 16 and row % 64 == 0:
        return f"the default loads {width} bytes at once at most, 16 are expected"
    return None


# What a baseline holds of a read-out, and by how much that may grow beside an eighth.
_HELD = {"registers": 8, "spills": 2, "shared_bytes": 1024}
SCHEMA = 1


@dataclass
class Baseline:
    """What defaults took when the file was written.

    Attributes:
        triton: its version then.
        ptxas: by target.
        held: registers, spills and bytes of shared memory by target and name.
    """

    triton: str
    ptxas: dict[str, str | None] = field(default_factory=dict)
    held: dict[str, dict[str, list[int | None]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """
        Raises:
            UsageError: the file is not there, or is no baseline.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']} instead of {SCHEMA}")
            toolchain = data["toolchain"]
            held = {
                target: {name: [*map(_number, values)] for name, values in rows.items()}
                for target, rows in data["targets"].items()
            }
            return cls(str(toolchain["triton"]), dict(toolchain["ptxas"]), held)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--baseline: {path} is none ({type(error).__name__}: {error}); "
                "--write-baseline makes one"
            ) from None

    def other_tools(self, toolchain: Mapping[str, Any], target: str) -> str | None:
        """Why read-outs of a target cannot be compared, or None."""
        if self.triton != toolchain["triton"]:
            return f"it is of Triton {self.triton}, this is {toolchain['triton']}"
        then, now = self.ptxas.get(target), toolchain["ptxas"].get(target)
        if target in self.held and then != now:
            return f"{target}: it is of ptxas {then}, this is {now}"
        return None

    def growth(self, target: str, name: str, readout: "Readout") -> str | None:
        """What has grown by more than an eighth and a few, in one line."""
        held = self.held.get(target, {}).get(name, ())
        for (what, few), then in zip(_HELD.items(), held, strict=False):
            now = getattr(readout, what)
            if then is not None and now is not None and now > then + then // 8 + few:
                return f"{what} grew from {then} to {now} since the baseline"
        return None

    def knows(self, target: str, name: str) -> bool:
        return name in self.held.get(target, {})

    def write(self, path: Path) -> None:
        """A line for each binary, so that differences can be read."""
        lines = []
        for target, rows in sorted(self.held.items()):
            own = [f"   {json.dumps(n)}: {json.dumps(v)}" for n, v in rows.items()]
            lines.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(own) + "\n  }")
        toolchain = {"triton": self.triton, "ptxas": dict(sorted(self.ptxas.items()))}
        path.write_text(
            f'{{\n "schema": {SCHEMA},\n "toolchain": {json.dumps(toolchain)},\n'
            ' "targets": {\n' + ",\n".join(lines) + "\n }\n}\n",
            encoding="utf-8",
        )


def held_of(readout: "Readout") -> list[int | None]:
    """What a baseline holds of a read-out."""
    return [getattr(readout, what) for what in _HELD]


def _number(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r} is no number")
    return value
