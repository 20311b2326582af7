#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the kernel benchmarks: faster, slower, or the same within noise.

    python -P scripts/compare_benchmarks.py BEFORE.json AFTER.json

Files of `pytest benchmarks --benchmark-json FILE`. A kernel is slower or faster where
its median time changed by more than the noise, the largest of
- --threshold percent,
- the 95 % interval of both medians, from the quartiles of the rounds,
- what nine in ten of the other providers' times changed by, where both runs have the
  same versions: nobody has touched those, so that is what two runs differ by.

Exit code 1: one of our kernels is slower, or is missing in AFTER, as a wrong or failing
one is; 2: the runs cannot be compared, since they have nothing in common, too few
rounds, or others' times that changed by more than a quarter.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Fewer rounds say nothing of their spread.
_FEWEST_ROUNDS = 5
# Fewer benchmarks of others say nothing of what two runs differ by.
_FEWEST_OTHERS = 8
# With more noise, "same" would say nothing.
_MOST_NOISE = 0.25


class NotComparableError(Exception):
    """Why two files cannot be compared."""


@dataclass(frozen=True)
class Time:
    """One benchmark in one run.

    Attributes:
        median_us: of the rounds.
        noise: half the 95 % interval of the median, as a share of it; inf: too few
            rounds to tell.
        ours: whether it is one of our kernels.
    """

    median_us: float
    noise: float
    ours: bool


@dataclass(frozen=True)
class Verdict:
    """One benchmark in both runs.

    Attributes:
        ratio: time after over time before.
        noise: changes up to this share are none.
        word: faster, slower, same, or unclear where there are too few rounds.
    """

    name: str
    before: Time
    after: Time
    noise: float

    @property
    def ratio(self) -> float:
        return self.after.median_us / self.before.median_us

    @property
    def word(self) -> str:
        if math.isinf(self.noise):
            return "unclear"
        change = math.log(self.ratio)
        if abs(change) <= math.log1p(self.noise):
            return "same"
        return "slower" if change > 0 else "faster"


def read(file: Path) -> tuple[dict[str, Time], dict[str, Any]]:
    """Times by name, and the header that benchmarks/conftest.py adds.

    Raises:
        NotComparableError: it is no file of those benchmarks.
    """
    try:
        data = json.loads(file.read_text())
        header: dict[str, Any] = data["machine_info"]["portable"]
        times = {}
        for row in data["benchmarks"]:
            stats = row["stats"]
            if not 0 < stats["median"] < math.inf:
                raise ValueError(f"a median of {stats['median']} s, {row['fullname']}")
            noise = math.inf
            if stats["rounds"] >= _FEWEST_ROUNDS:
                # As notches of a box plot (McGill, Tukey, Larsen 1978).
                noise = 1.57 * stats["iqr"] / stats["rounds"] ** 0.5 / stats["median"]
            ours = row["extra_info"]["ours"]
            times[row["fullname"]] = Time(stats["median"] * 1e6, noise, ours)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NotComparableError(
            f"{file}: expected a file of `pytest benchmarks --benchmark-json FILE`, "
            f"got {type(error).__name__}: {error}"
        ) from None
    return times, header


def compare(
    before: dict[str, Time], after: dict[str, Time], floor: float
) -> list[Verdict]:
    """A verdict for each benchmark that both have; `floor` is the least noise."""
    return [
        Verdict(
            name,
            time,
            after[name],
            max(floor, math.hypot(time.noise, after[name].noise)),
        )
        for name, time in before.items()
        if name in after
    ]


def others_noise(before: dict[str, Time], after: dict[str, Time]) -> float | None:
    """What nine in ten of the others changed by, as a share; None: too few of them."""
    changes = [
        abs(math.log(after[name].median_us / time.median_us))
        for name, time in before.items()
        if name in after and not time.ours
    ]
    if len(changes) < _FEWEST_OTHERS:
        return None
    return math.expm1(statistics.quantiles(changes, n=10, method="inclusive")[-1])


def _header(before: dict[str, Any], after: dict[str, Any], any_machine: bool) -> bool:
    """Print what differs; whether versions are the same."""
    if before.get("gpu") != after.get("gpu") and not any_machine:
        raise NotComparableError(
            f"expected two runs on one kind of GPU, got {before.get('gpu')} and "
            f"{after.get('gpu')}; --any-machine compares them all the same"
        )
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            print(f"{name:10} {before.get(name, '-')} -> {after.get(name, '-')}")
    same: bool = before.get("versions") == after.get("versions")
    return same


def _why_not(verdicts: list[Verdict], noise: float | None) -> str | None:
    """Why nothing can be said; None: something can."""
    if not verdicts:
        return "expected benchmarks that both files have, got none"
    if noise is not None and noise > _MOST_NOISE:
        return (
            f"expected other providers' times to change by {_MOST_NOISE:.0%} at most, "
            f"got {noise:.0%}; measure again, on a machine that nobody else uses"
        )
    ours = [verdict for verdict in verdicts if verdict.before.ours]
    if ours and all(verdict.word == "unclear" for verdict in ours):
        return (
            f"expected {_FEWEST_ROUNDS} rounds or more of our kernels in both files, "
            "got fewer; see --timed-calls"
        )
    return None


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a percentage from 0 on, got {text}")
    return value / 100


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--threshold",
        type=_percent,
        default=_percent("2"),
        help="percent below which a change is none (default: 2)",
    )
    parser.add_argument(
        "--any-machine", action="store_true", help="also where the GPUs differ"
    )
    parser.add_argument("--all", action="store_true", help="show what is the same, too")
    args = parser.parse_args(argv)
    try:
        (before, header), (after, header_after) = read(args.before), read(args.after)
        has_same_versions = _header(header, header_after, args.any_machine)
    except NotComparableError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    floor = args.threshold
    noise = others_noise(before, after) if has_same_versions else None
    if noise is not None:
        print(f"{'others':10} nine in ten changed by at most {noise:.1%}")
        floor = max(floor, noise)
    verdicts = compare(before, after, floor)
    missing = [name for name in before if name not in after]
    lost = any(before[name].ours for name in missing)
    if not lost and (problem := _why_not(verdicts, noise)):
        print(f"{Path(__file__).name}: {problem}", file=sys.stderr)
        return 2
    for verdict in sorted(verdicts, key=lambda verdict: -verdict.ratio):
        if args.all or verdict.word in ("slower", "faster"):
            print(
                f"{verdict.word:10} {verdict.ratio:.3f} (noise {verdict.noise:.1%}) "
                f"{verdict.before.median_us:.1f} -> {verdict.after.median_us:.1f} us  "
                f"{verdict.name}"
            )
    for name in missing:
        print(f"{'missing':10} {name}")
    words = [verdict.word for verdict in verdicts]
    counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    new = len(after) - len(verdicts)
    print(", ".join([*counts, f"{len(missing)} missing", f"{new} new"]))
    is_worse = any(v.word == "slower" and v.before.ours for v in verdicts)
    return 1 if is_worse or lost else 0


if __name__ == "__main__":
    sys.exit(main())
