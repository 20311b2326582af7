# SPDX-License-Identifier: Apache-2.0
"""What is measured so far, in a file that the same command goes on from."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Variables of the servers that a result depends on, and what is nobody's business.
_TELLING = ("PORTABLE_BACKEND_", "VLLM_", "TRITON_", "TORCH", "OMP_", "CUDA_", "HIP_")
_TELLING += ("ROCR_", "NCCL_", "PYTORCH_")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
SCHEMA = 1


class StudyError(RuntimeError):
    """A file that cannot be gone on from."""


@dataclass(frozen=True)
class Part:
    """What a back end does in one turn.

    Attributes:
        workload: name of a workload.
        rate: requests per second, "inf" for all at once; None: the workload has none.
    """

    workload: str
    rate: str | None = None

    @property
    def label(self) -> str:
        return self.workload if self.rate is None else f"{self.workload} @ {self.rate}"


@dataclass
class Check:
    """A back end's first tokens in one workload.

    Attributes:
        tokens: of each request, ids.
        gaps: how far each token's log-prob is ahead of the second best's.
        other_contexts: the first token of some requests, the first ones, with all but
            the last token of their prompts in reverse order.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]
    other_contexts: list[int] = field(default_factory=list)

    @property
    def share_without_context(self) -> float | None:
        """How many first tokens are the same whatever is attended to; None: unknown."""
        if not self.other_contexts:
            return None
        pairs = zip(self.tokens, self.other_contexts, strict=False)
        same = [tokens[0] == other for tokens, other in pairs]
        return sum(same) / len(same)


@dataclass
class Study:
    """A run, from its first start to its last.

    Attributes:
        options: what must stay the same, and names the parts.
        environment: GPU, versions and commit, as text; the same goes for them, but for
            the date.
        left_out: back ends that do not exist here, and why.
        rates: of workloads with rates, in requests per second.
        starts: of each back end, seconds of each start of its server.
        checks: of each back end and workload.
        done: (back end, part's label, round) -> metrics, or {"failed": reason}.
    """

    options: dict[str, Any]
    environment: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    rates: dict[str, list[str]] = field(default_factory=dict)
    starts: dict[str, list[float]] = field(default_factory=dict)
    checks: dict[str, dict[str, Check]] = field(default_factory=dict)
    done: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def backends(self) -> list[str]:
        """Those that take part, in order."""
        return [name for name in self.options["backends"] if name not in self.left_out]

    def parts(self, workloads: list[str]) -> list[Part]:
        """Every part of `workloads`, at the rates that are known."""
        parts: list[Part] = []
        for name in workloads:
            rates = self.rates.get(name)
            parts += [Part(name, rate) for rate in rates] if rates else [Part(name)]
        return parts

    def is_measured(self, backend: str, part: Part, round_number: int) -> bool:
        """Whether it has a result; what failed has none, and is tried again."""
        result = self.done.get((backend, part.label, round_number))
        return result is not None and "failed" not in result

    def rounds_of(self, backend: str, part: Part) -> dict[int, dict[str, float]]:
        """Round -> metrics, of the rounds that were measured."""
        return {
            number: result
            for (name, label, number), result in self.done.items()
            if (name, label) == (backend, part.label) and "failed" not in result
        }

    def failures(self) -> Iterator[tuple[str, str, int, str]]:
        """(back end, part, round, reason)."""
        for (backend, label, number), result in self.done.items():
            if "failed" in result:
                yield backend, label, number, result["failed"]

    def save(self, file: Path) -> None:
        """Write everything; whoever stops us leaves the old file or the new one."""
        data = {"schema": SCHEMA} | asdict(self)
        data["done"] = [
            {"backend": backend, "part": label, "round": number, **result}
            for (backend, label, number), result in sorted(self.done.items())
        ]
        beside = file.with_name(file.name + ".new")
        beside.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(beside, file)


def load(file: Path) -> Study:
    """Read what `Study.save` wrote.

    Raises:
        StudyError: it is no such file.
    """
    try:
        data = json.loads(file.read_text())
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        done = {
            (row.pop("backend"), row.pop("part"), row.pop("round")): row
            for row in data.pop("done")
        }
        checks = {
            backend: {name: Check(**check) for name, check in by_workload.items()}
            for backend, by_workload in data.pop("checks").items()
        }
        return Study(**data, checks=checks, done=done)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StudyError(
            f"{file} is not a file of this script ({type(error).__name__}: {error}); "
            "give another --out, or --fresh to overwrite it"
        ) from None


def variables(environ: Mapping[str, str]) -> str:
    """What servers get from outside, as far as it may change their speed."""
    told = (
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(_TELLING) and not _SECRET.search(name)
    )
    return " ".join(told) or "none"


def resume(file: Path, new: Study) -> Study:
    """Go on from `file` if it is there and was measured in the same way.

    Raises:
        StudyError: another option or environment, each named.
    """
    if not file.exists():
        return new
    old = load(file)
    differing = []
    for what, was, now in (
        ("options", old.options, new.options),
        ("environment", old.environment, new.environment),
    ):
        for name in dict.fromkeys([*was, *now]):
            if was.get(name) != now.get(name) and name != "date":
                differing.append(
                    f"  {what}, {name}: expected {was.get(name)!r} as before, "
                    f"got {now.get(name)!r}"
                )
    if differing:
        raise StudyError(
            f"{file} was measured otherwise:\n" + "\n".join(differing) + "\n"
            "Give another --out to keep it, or --fresh to start anew in its place"
        )
    return old
