# SPDX-License-Identifier: Apache-2.0
"""What a run yields, as plain data: rows, ratios, geometric means. No torch here."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "portable"
OUR_NAMES = (OURS, "portable_exact")
COPY = "copy"  # shown beside the others, but no rival: it computes nothing
# Largest relative error norm of a right result.
ERROR_LIMITS = {"bf16": 5e-3, "fp16": 1e-3, "fp32": 1e-4}


@dataclass
class Result:
    """One implementation in one row.

    Attributes:
        time_us, p20_us, p80_us: median and percentiles of one call; None: not timed.
        calls: calls in one timed span.
        error: norm of the difference to the reference, over the reference's norm; inf
            where a value is not finite; None: not checked.
        wrong: the error is over the limit. A wrong result has no time.
        reason: why there is neither error nor time.
    """

    time_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    calls: int = 0
    error: float | None = None
    wrong: bool = False
    reason: str | None = None

    def judge(self, error: float | None, limit: float) -> None:
        """Take `error` in; the worst of several counts. NaN is worse than any."""
        if error is None:
            return
        error = math.inf if math.isnan(error) else error
        self.error = error if self.error is None else max(self.error, error)
        self.wrong = self.error > limit
        if self.wrong:
            self.forget_times()

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.forget_times()

    def forget_times(self) -> None:
        self.time_us = self.p20_us = self.p80_us = None
        self.calls = 0


@dataclass
class Row:
    """One shape, and every implementation's result for it.

    Attributes:
        suite, name: what is measured, for example attention, "decode 8x8192".
        group: rows whose ratios are averaged together.
        fields: the rest of the shape, in the order of the columns.
        flops, num_bytes: work of one call; None where that says nothing.
        baseline: `name` of the row of this suite that this one is compared with.
        reference: what the outputs were compared with.
        results: by implementation; ours is OURS.
    """

    suite: str
    name: str
    group: str
    fields: dict[str, str | int] = field(default_factory=dict)
    flops: float | None = None
    num_bytes: float | None = None
    baseline: str | None = None
    reference: str | None = None
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return make_label(self.suite, self.name, self.fields)

    @property
    def failures(self) -> dict[str, Result]:
        """Our kernels' results that are wrong or missing; other kernels' may be."""
        return {
            name: result
            for name, result in self.results.items()
            if name in OUR_NAMES and (result.wrong or result.reason is not None)
        }

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def time_us(self, name: str) -> float | None:
        result = self.results.get(name)
        return None if result is None else result.time_us

    def ratio(self, rival: str) -> float | None:
        """Time of `rival` over ours: above 1 ours is faster."""
        ours, other = self.time_us(OURS), self.time_us(rival)
        return other / ours if ours and other else None

    def tflops(self, name: str) -> float | None:
        time_us = self.time_us(name)
        return self.flops / time_us / 1e6 if self.flops and time_us else None

    def gbps(self, name: str) -> float | None:
        time_us = self.time_us(name)
        return self.num_bytes / time_us / 1e3 if self.num_bytes and time_us else None

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for name, result in data["results"].items():
            if result["error"] is not None and not math.isfinite(result["error"]):
                result["error"] = None  # JSON has no infinity; `wrong` says it
            result |= {"tflops": self.tflops(name), "gbps": self.gbps(name)}
        return data | {"label": self.label, "failed": self.failed}


def make_label(suite: str, name: str, fields: dict[str, str | int]) -> str:
    """The text that --rows searches."""
    return " ".join([suite, name, *(f"{key}={value}" for key, value in fields.items())])


@dataclass(frozen=True)
class Job:
    """A row still to be measured."""

    suite: str
    name: str
    fields: dict[str, str | int]
    run: Callable[[], Row]

    @property
    def label(self) -> str:
        return make_label(self.suite, self.name, self.fields)


@dataclass
class Report:
    """A whole run.

    Attributes:
        environment: where and how it ran, in the order of the header.
        absent: implementations that could not take part, and why.
        left_out: labels of rows not measured, and why.
    """

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    @property
    def roofs(self) -> dict[str, float]:
        """Measured copy bandwidth in GB/s and product rate in TFLOP/s, if measured."""
        found: dict[str, float] = {}
        for row in self.rows:
            rate = row.gbps("torch") if row.suite == "copy" else row.tflops("torch")
            if row.suite in ("copy", "matmul") and rate:
                found[row.suite] = max(rate, found.get(row.suite, 0.0))
        return found

    def roof_share(self, row: Row) -> float | None:
        """Our speed as a share of what the measured roofs allow for the row."""
        time_us, roofs = row.time_us(OURS), self.roofs
        if not time_us or "copy" not in roofs or "matmul" not in roofs:
            return None
        least_us = max(
            (row.flops or 0) / roofs["matmul"] / 1e6,
            (row.num_bytes or 0) / roofs["copy"] / 1e3,
        )
        return least_us / time_us or None

    def to_dict(self) -> dict[str, Any]:
        rows = [
            row.to_dict() | {"roof_share": self.roof_share(row)} for row in self.rows
        ]
        return {
            "schema": 1,
            "environment": self.environment,
            "roofs": self.roofs,
            "absent": self.absent,
            "left_out": self.left_out,
            "rows": rows,
        }


def rivals_of(rows: Iterable[Row]) -> list[str]:
    """Every implementation but ours, in the order of appearance."""
    return list(dict.fromkeys(n for row in rows for n in row.results if n != OURS))


def geometric_means(rows: Iterable[Row]) -> dict[str, dict[str, tuple[float, int]]]:
    """Group -> rival -> (geometric mean of the ratios, number of rows)."""
    logs: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for rival in row.results:
            ratio = row.ratio(rival) if rival not in (OURS, COPY) else None
            if ratio is not None:
                values = logs.setdefault(f"{row.suite}: {row.group}", {})
                values.setdefault(rival, []).append(math.log(ratio))
    return {
        group: {
            rival: (math.exp(sum(values) / len(values)), len(values))
            for rival, values in by_rival.items()
        }
        for group, by_rival in logs.items()
    }


def losses(rows: Iterable[Row]) -> list[tuple[Row, str, float]]:
    """(row, rival, ratio) wherever ours is the slower one, worst first."""
    found = []
    for row in rows:
        for rival in row.results:
            ratio = row.ratio(rival) if rival not in (OURS, COPY) else None
            if ratio is not None and ratio < 1:
                found.append((row, rival, ratio))
    return sorted(found, key=lambda item: item[2])
