# SPDX-License-Identifier: Apache-2.0
"""Upkeep of the writable layer: what is stale goes, what is doubtful is measured."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date

from portable_backend.errors import RecordError, UnsupportedError, bad_argument
from portable_backend.warmup.layers import PORTFOLIO, TABLE, WritableLayer
from portable_backend.warmup.portfolio_files import read_portfolios
from portable_backend.warmup.records import SCHEMA, TuningRecord


@dataclass(frozen=True)
class Measurement:
    """What running a record's config once more gave.

    Attributes:
        time_us: median time of one launch; None where it did not run.
        error_ratio: our error over torch's.
        default_us: the default config's time, measured beside it.
        problem: why it must not be used: the oracle disagrees, it does not launch.
    """

    time_us: float | None = None
    error_ratio: float | None = None
    default_us: float | None = None
    problem: str | None = None


Measurer = Callable[[TuningRecord], Measurement]


@dataclass(frozen=True)
class Verdict:
    """A record and what became of it: `after` is None where it was dropped."""

    record: TuningRecord
    after: TuningRecord | None
    problem: str | None = None


def prune(
    layer: WritableLayer,
    *,
    digests: Mapping[str, str] | None = None,
    min_schema: int | None = None,
    refuted: bool = False,
    dry_run: bool = False,
) -> tuple[list[TuningRecord], list[str]]:
    """Remove what can no longer be used.

    Args:
        layer: the folder to prune.
        digests: of today's kernels; records and portfolios of these kernels with
            another one go.
        min_schema: tables of a schema below go as a whole.
        refuted: whether refutations go, so that what they are about may serve again.
        dry_run: report only.

    Returns:
        The records that go, and the paths of the tables and portfolios that go.

    Raises:
        ValueError: `min_schema` is none that this version or an earlier one writes.
        OSError: a file cannot be written.
    """
    if min_schema is not None and not 1 <= min_schema <= SCHEMA:
        raise bad_argument(
            "min_schema", f"1 to {SCHEMA}", min_schema, "name the earliest to keep"
        )
    removed: list[TuningRecord] = []
    tables: list[str] = []
    for kernel in layer.kernels():
        for gpu in layer.gpus(kernel):
            if min_schema is not None and _schema(layer, kernel, gpu) < min_schema:
                tables.append(str(layer.path(kernel, gpu)))
                if not dry_run:
                    layer.delete_file(kernel, gpu)
            wanted = (digests or {}).get(kernel)
            held = layer.load_file(kernel, gpu).records
            stale = {
                r
                for r in held
                if (wanted is not None and r.kernel_digest != wanted)
                or (refuted and r.refuted is not None)
            }
            removed += sorted(stale, key=lambda record: record.content)
            if stale and not dry_run:
                layer.rewrite(kernel, gpu, _without(stale))
        for file in read_portfolios(layer, kernel):
            portfolio, wanted = file.portfolio, (digests or {}).get(kernel)
            if wanted is None or portfolio is None or portfolio.kernel_digest == wanted:
                continue
            tables.append(str(file.path))
            if not dry_run:
                layer.delete_file(kernel, file.gpu, PORTFOLIO)
    return removed, tables


def verify(
    layer: WritableLayer,
    records: Iterable[TuningRecord],
    measurer: Measurer | None,
    *,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Measure records again and keep what that gives in their place.

    A record that fails is dropped from the layer, as is all that its history holds of
    the same claim, and a refutation stays: no config that the oracle refutes may be
    served, and none comes back by a merge or an import. Each verdict is written before
    the next record is measured. What keeps `measurer` from measuring at all, such as
    another GPU, it must raise.

    Raises:
        UnsupportedError: there is no measurer, so nothing can be said.
        OSError: the layer cannot be written.
    """
    if measurer is None:
        raise UnsupportedError(
            "records cannot be verified here: measuring needs the GPU they are for "
            "and a build that can run the kernels on it; none has been provided"
        )
    verdicts = []
    for record in records:
        verdict = _judge(record, measurer)
        change = _without([record], verdict.after)
        if verdict.after is None:
            change = _refuted(record, verdict.problem or "it failed")
        layer.rewrite(record.key.kernel, record.gpu, change)
        verdicts.append(verdict)
        on_verdict(verdict)
    return verdicts


def _judge(record: TuningRecord, measurer: Measurer) -> Verdict:
    result = measurer(record)
    if result.problem is not None or result.time_us is None:
        return Verdict(record, None, result.problem or "it gave no time")
    try:
        after = replace(
            record,
            time_us=result.time_us,
            error_ratio=result.error_ratio,
            default_us=result.default_us or record.default_us,
            unmeasured=None,
            verified=True,
            measured=date.today().isoformat(),
        )
    except RecordError as error:
        return Verdict(record, None, str(error))
    return Verdict(record, after)


def _refuted(
    record: TuningRecord, problem: str
) -> Callable[[tuple[TuningRecord, ...]], list[TuningRecord]]:
    """The change that puts a refutation in the place of all that claim the same."""
    today = date.today().isoformat()
    told = replace(record, verified=False, measured=today, refuted=problem)

    def change(held: tuple[TuningRecord, ...]) -> list[TuningRecord]:
        return [*(r for r in held if r.claim != record.claim), told]

    return change


def _without(
    gone: Collection[TuningRecord], instead: TuningRecord | None = None
) -> Callable[[tuple[TuningRecord, ...]], list[TuningRecord]]:
    """The change that removes records and may add one."""

    def change(held: tuple[TuningRecord, ...]) -> list[TuningRecord]:
        kept = [record for record in held if record not in gone]
        return kept if instead is None else [*kept, instead]

    return change


def _schema(layer: WritableLayer, kernel: str, gpu: str) -> float:
    """The schema a table states; infinite for what is no table, which stays."""
    path = layer.path(kernel, gpu, TABLE)
    try:
        schema = json.loads(path.read_bytes())["schema"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return float("inf")
    is_number = isinstance(schema, int) and not isinstance(schema, bool)
    return schema if is_number else float("inf")
