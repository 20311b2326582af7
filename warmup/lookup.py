# SPDX-License-Identifier: Apache-2.0
"""Which config serves a key: graded, repeatable, and without measuring anything.

Grades, best first: `exact`; `nearest`, the same GPU and a neighbouring size; `family`,
another GPU of the architecture; `portfolio`, the few configs that cover most keys;
`unmeasured`, what a model predicts for a GPU like this one; `default`. Within a grade
the nearest size comes first, then the layers in their order.
"""

import copy
import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portable_backend.kernels.config import KernelConfig
from portable_backend.warmup.matching import (
    Difference,
    Environment,
    code_differences,
    differences,
    toolchain_differences,
    why_no_stand_in,
)
from portable_backend.warmup.records import TuningKey, TuningRecord
from portable_backend.warmup.store import RecordStore

logger = logging.getLogger("vllm.portable_backend.records")
GRADES = ("exact", "nearest", "family", "portfolio", "unmeasured", "default")
# A neighbour this many factors of two away still runs in the same regime.
MAX_DISTANCE = 2.0
SpaceCheck = Callable[[TuningKey, KernelConfig], str | None]


@dataclass(frozen=True)
class Choice:
    """A config and where it comes from.

    Attributes:
        config: what to launch with.
        grade: one of `GRADES`.
        layer: name of the layer that had it; None for the default.
        record: the record it was taken from, where it was one.
        reasons: why no better grade was found, and what was let pass.
    """

    config: KernelConfig
    grade: str
    layer: str | None = None
    record: TuningRecord | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A record that came close to a key, and in what it differs."""

    layer: str
    record: TuningRecord
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "key": self.record.key.to_dict(),
            "gpu": self.record.gpu,
            "config": self.record.config.to_dict(),
            "time_us": self.record.time_us,
            "unmeasured": self.record.unmeasured,
            "differences": [item.to_dict() for item in self.differences],
        }


@dataclass(frozen=True)
class Explanation:
    """Why a lookup gave what it gave.

    Attributes:
        key: what was looked up.
        choice: what it gave.
        candidates: the records closest to an exact hit, the closest first.
        problems: files and entries that could not be used.
    """

    key: TuningKey
    choice: Choice
    candidates: tuple[Candidate, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.key.kernel,
            "key": self.key.to_dict(),
            "grade": self.choice.grade,
            "layer": self.choice.layer,
            "config": self.choice.config.to_dict() or None,
            "reasons": list(self.choice.reasons),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        choice = self.choice
        origin = f" from {choice.layer}" if choice.layer else ""
        lines = [f"{self.key}: {choice.grade}{origin}"]
        lines += [f"  {reason}" for reason in choice.reasons]
        for candidate in self.candidates:
            lines.append(f"  {candidate.layer}, {candidate.record.key}:")
            lines += [f"    {item}" for item in candidate.differences]
            if not candidate.differences:
                lines.append("    nothing differs")
        if not self.candidates:
            lines.append(f"  no layer has a record for kernel {self.key.kernel}")
        return "\n".join(lines + [f"  not used: {text}" for text in self.problems])


@dataclass(frozen=True)
class _Row:
    order: int  # of its layer
    layer: str
    record: TuningRecord
    mismatch: tuple[Difference, ...]  # of the toolchain

    @functools.cached_property
    def rank(self) -> tuple[Any, ...]:
        return self.order, bool(self.mismatch), self.record.gpu, self.record.rank


class _Index:
    """Records of one kernel, by how they can be found."""

    def __init__(
        self, store: RecordStore, kernel: str, environment: Environment, verified: bool
    ) -> None:
        self.exact: dict[TuningKey, list[_Row]] = {}
        self.near: dict[Any, list[_Row]] = {}
        self.family: dict[Any, list[_Row]] = {}
        self.unmeasured: dict[Any, list[_Row]] = {}
        self.refused: dict[TuningKey, list[str]] = {}
        # Why a config must not serve a key here, or in a portfolio any key.
        self.refuted: dict[tuple[TuningKey | None, KernelConfig], str] = {}
        for layer, record in store.refuted(kernel):
            wanted = (environment.digests or {}).get(kernel, record.kernel_digest)
            if record.gpu == environment.gpu and record.kernel_digest == wanted:
                text = f"{layer}: refuted for {record.key}: {record.refuted}"
                self.refuted[record.key, record.config] = text
                self.refuted[None, record.config] = text
        layers: dict[str, int] = {}
        for layer, record in store.records(kernel):
            order = layers.setdefault(layer, len(layers))
            if record.arch != environment.arch:
                continue
            if record.unmeasured is not None:
                row = _Row(order, layer, record, ())
                self.unmeasured.setdefault(record.key.structure, []).append(row)
                continue
            is_ours = record.gpu == environment.gpu
            refusals = list(code_differences(record, environment, verified))
            if refusals:
                if is_ours:
                    texts = [f"{layer}: {refusal}" for refusal in refusals]
                    self.refused.setdefault(record.key, []).extend(texts)
                continue
            mismatch = tuple(toolchain_differences(record.toolchain, environment))
            row = _Row(order, layer, record, mismatch)
            if is_ours:
                self.exact.setdefault(record.key, []).append(row)
                self.near.setdefault(record.key.structure, []).append(row)
            else:
                self.family.setdefault(record.key.structure, []).append(row)


class Lookup:
    """Chooses configs for one environment and remembers what it chose.

    A choice holds until `refresh()`, whatever is stored meanwhile: the binaries of an
    engine that serves were compiled for it.

    Args:
        store: where records are.
        environment: where the configs will run.
        default: the safe config for a key.
        space_check: why today's space does not hold a config, or None where it does.
        max_distance: how far, in factors of two over all sizes, a neighbour may be.
        require_verified: whether records that no oracle has confirmed are passed over.
    """

    def __init__(
        self,
        store: RecordStore,
        environment: Environment,
        default: Callable[[TuningKey], KernelConfig],
        *,
        space_check: SpaceCheck | None = None,
        max_distance: float = MAX_DISTANCE,
        require_verified: bool = True,
    ) -> None:
        self.store = store
        self.environment = environment
        self._default = default
        self._space_check = space_check or (lambda key, config: None)
        self._max_distance = max_distance
        self._require_verified = require_verified
        self._memo: dict[TuningKey, Choice] = {}
        self._indices: dict[str, _Index] = {}
        self._warned: set[str] = set()

    def choose(self, key: TuningKey) -> Choice:
        """The config for `key`; reads files only for the first key of a kernel."""
        choice = self._memo.get(key)
        if choice is None:
            choice = self._memo.setdefault(key, self._choose(key))
        return choice

    def grade_counts(self) -> dict[str, dict[str, int]]:
        """For each kernel, how many of the keys looked up got which grade."""
        counts = Counter((key.kernel, c.grade) for key, c in list(self._memo.items()))
        kernels = sorted({kernel for kernel, _ in counts})
        return {
            kernel: {g: counts[kernel, g] for g in GRADES if (kernel, g) in counts}
            for kernel in kernels
        }

    def anew(self) -> "Lookup":
        """Another one over the same records, with no choices made."""
        other = copy.copy(self)
        other._memo = {}
        return other

    def refresh(self) -> None:
        """Forget every choice and read the files again."""
        self.store.refresh()
        self._memo.clear()
        self._indices.clear()

    def explain(self, key: TuningKey, limit: int = 3) -> Explanation:
        """Why `key` gets what it gets: the records closest to it, field by field."""
        ranked = []
        held = self.store.records(key.kernel), self.store.refuted(key.kernel)
        for order, (layer, record) in enumerate(itertools.chain(*held)):
            found = differences(
                key,
                self.environment,
                record,
                require_verified=self._require_verified,
                space_reason=self._space_check(key, record.config),
            )
            blocking = sum(item.blocks for item in found)
            distance = min(key.distance(record.key), 1e9)
            place = (blocking, distance, len(found), order)
            ranked.append((place, Candidate(layer, record, found)))
        ranked.sort(key=lambda pair: pair[0])
        closest = tuple(candidate for _, candidate in ranked[:limit])
        problems = self.store.problems(key.kernel)
        return Explanation(key, self.choose(key), closest, problems)

    def _index(self, kernel: str) -> _Index:
        if kernel not in self._indices:
            self._indices[kernel] = _Index(
                self.store, kernel, self.environment, self._require_verified
            )
        return self._indices[kernel]

    def _choose(self, key: TuningKey) -> Choice:
        index = self._index(key.kernel)
        reasons = list(dict.fromkeys(index.refused.get(key, ())))
        reasons += [why for (about, _), why in index.refuted.items() if about == key]
        for grade, row in self._candidates(index, key):
            refusal = index.refuted.get((key, row.record.config))
            refusal = refusal or self._space_check(key, row.record.config)
            if refusal is not None:
                config = row.record.config.to_dict()
                reasons.append(f"{row.layer}: config {config} refused: {refusal}")
                continue
            self._note_mismatch(key.kernel, row.layer, row.mismatch, reasons)
            record = row.record
            return Choice(record.config, grade, row.layer, record, tuple(reasons))
        return self._fall_back(key, reasons)

    def _candidates(self, index: _Index, key: TuningKey) -> Iterator[tuple[str, _Row]]:
        for row in sorted(index.exact.get(key, ()), key=lambda row: row.rank):
            yield "exact", row
        for row in self._near(index.near, key):
            if row.record.key != key:
                yield "nearest", row
        yield from (("family", row) for row in self._near(index.family, key))

    def _near(self, rows: Mapping[Any, list[_Row]], key: TuningKey) -> list[_Row]:
        """The rows within reach, the nearest first."""
        reachable = []
        for row in rows.get(key.structure, ()):
            distance = key.distance(row.record.key)
            if distance <= self._max_distance:
                # Of two neighbours as near, the larger: work is rounded up.
                size = -sum(math.log2(n + 1) for _, n in row.record.key.sizes)
                reachable.append(((distance, size, row.rank), row))
        reachable.sort(key=lambda pair: pair[0])
        return [row for _, row in reachable]

    def _fall_back(self, key: TuningKey, reasons: list[str]) -> Choice:
        ours, refuted = self.environment, self._index(key.kernel).refuted
        portfolios = self.store.portfolios(key.kernel)
        for layer, portfolio in sorted(portfolios, key=lambda p: p[1].gpu != ours.gpu):
            if portfolio.arch != ours.arch:
                continue
            digests = ours.digests
            if digests is not None and portfolio.kernel_digest != digests.get(
                key.kernel
            ):
                reasons.append(f"{layer}: portfolio for another kernel_digest")
                continue
            mismatch = toolchain_differences(portfolio.toolchain, ours)
            for config in portfolio.configs_for(key):
                refusal = refuted.get((None, config)) or self._space_check(key, config)
                if refusal is None:
                    self._note_mismatch(key.kernel, layer, mismatch, reasons)
                    return Choice(config, "portfolio", layer, None, tuple(reasons))
                reasons.append(f"{layer}: config {config.to_dict()} refused: {refusal}")
        choice = self._predicted(key, reasons)
        if choice is not None:
            return choice
        if not reasons:
            reasons.append(f"no record near {key} for {self.environment.gpu}")
        logger.debug("%s: default config: %s", key, "; ".join(reasons))
        return Choice(self._default(key), "default", None, None, tuple(reasons))

    def _predicted(self, key: TuningKey, reasons: list[str]) -> Choice | None:
        """What nobody has measured, where it may stand in for the default.

        The nearest prediction decides: where its evidence does not do, the default
        stays, whatever is predicted for other sizes.
        """
        index = self._index(key.kernel)
        for row in self._near(index.unmeasured, key):
            record, told = row.record, row.record.unmeasured or {}
            refusal = why_no_stand_in(record, self.environment)
            refusal = refusal or index.refuted.get((key, record.config))
            refusal = refusal or self._space_check(key, record.config)
            if refusal is not None:
                reasons.append(f"{row.layer}: predicted for {record.gpu}: {refusal}")
                continue
            if not told["serves"]:
                why = told.get("reason") or "the evidence does not do"
                reasons.append(f"{row.layer}: predicted, but the default stays: {why}")
                return None
            reasons.append(f"{row.layer}: predicted from {told['basis']}, not measured")
            return Choice(
                record.config, "unmeasured", row.layer, record, tuple(reasons)
            )
        return None

    def _note_mismatch(
        self,
        kernel: str,
        layer: str,
        mismatch: Sequence[Difference],
        reasons: list[str],
    ) -> None:
        reasons += [f"{layer}: {item}" for item in mismatch]
        if mismatch and kernel not in self._warned:
            self._warned.add(kernel)
            logger.warning(
                "%s: records were measured with another toolchain and may be slow: %s",
                kernel,
                "; ".join(map(str, mismatch)),
            )
