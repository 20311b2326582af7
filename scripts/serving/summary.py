# SPDX-License-Identifier: Apache-2.0
"""A study as tables: medians and spread, ratios, agreement, and what is missing."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from same_tokens import NEAR_TIE, compare
from serving.backends import OURS
from serving.study import Part, Study
from serving.turns import same_shares
from serving.workloads import Workload

from portable_backend.bench.markdown import markdown_table

# Metric -> what the table calls it, digits, and whether more is better.
METRICS = {
    "tokens_per_s": ("tokens/s", 0, True),
    "output_tokens_per_s": ("output tokens/s", 0, True),
    "requests_per_s": ("requests/s", 2, True),
    "ttft_p50_ms": ("time to first token, p50, ms", 1, False),
    "ttft_p99_ms": ("time to first token, p99, ms", 1, False),
    "itl_p50_ms": ("between tokens, p50, ms", 2, False),
    "itl_p99_ms": ("between tokens, p99, ms", 2, False),
}
_STREAMED = tuple(METRICS)[1:]
# Of few requests one near-tie would be a large share.
_FEWEST_FOR_SHARE = 4
_LEAST_SHARE = 0.75


@dataclass
class Table:
    """One section of the report; **cell** is bold."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass
class Summary:
    """What a study says.

    Attributes:
        tables: in the order of the report.
        problems: one line for each thing that is missing or wrong.
    """

    tables: list[Table] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def ratio(study: Study, part: Part, metric: str, rival: str) -> float | None:
    """Median over the rounds of ours against the rival's; above 1 ours is better."""
    ours, theirs = (study.rounds_of(name, part) for name in (OURS, rival))
    better_up = METRICS[metric][2]
    ratios = []
    for number in sorted(set(ours) & set(theirs)):
        mine, its = ours[number].get(metric), theirs[number].get(metric)
        if mine and its:
            ratios.append(mine / its if better_up else its / mine)
    return statistics.median(ratios) if ratios else None


def summarise(study: Study, workloads: Mapping[str, Workload], rounds: int) -> Summary:
    """Every table, and every problem.

    Args:
        study: what was measured.
        workloads: those that were asked for.
        rounds: that were asked for.
    """
    summary = Summary([_header(study), _described(workloads)])
    offline = [name for name, kind in workloads.items() if not kind.streamed]
    streamed = [name for name, kind in workloads.items() if kind.streamed]
    for title, names, metrics in (
        ("Throughput", offline, ("tokens_per_s",)),
        ("Latency and request rates", streamed, _STREAMED),
    ):
        if names:
            parts = study.parts(names)
            summary.tables.append(_measured(study, title, parts, metrics, workloads))
    summary.tables.append(_agreement(study, list(workloads), summary.problems))
    summary.tables.append(_starts(study))
    missing = _missing(study, study.parts(list(workloads)), rounds)
    for title, rows in (
        ("Left out", list(study.left_out.items())),
        ("Not measured", missing),
    ):
        if rows:
            cells = [list(row) for row in rows]
            summary.tables.append(Table(title, ["what", "why"], cells))
    summary.problems += [f"{what}: {why}" for what, why in missing]
    return summary


def _header(study: Study) -> Table:
    options = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in study.options.items()
    }
    options |= {f"rates of {name}": ", ".join(r) for name, r in study.rates.items()}
    rows = [[name, text] for name, text in (study.environment | options).items()]
    return Table("Where and how", ["", ""], rows)


def _described(workloads: Mapping[str, Workload]) -> Table:
    rows = [[name, *kind.described()] for name, kind in workloads.items()]
    columns = ["work", "requests", "tokens of a prompt", "tokens of an answer", "sent"]
    note = "Token ids, and lengths between two bounds, are drawn; the same for all."
    return Table("Workloads", columns, rows, note)


def _measured(
    study: Study,
    title: str,
    parts: list[Part],
    metrics: tuple[str, ...],
    workloads: Mapping[str, Workload],
) -> Table:
    rivals = [name for name in study.backends if name != OURS]
    if OURS not in study.backends:
        rivals = []
    columns = ["work", "", *study.backends, *(f"{OURS} / {name}" for name in rivals)]
    rows = []
    for part in parts:
        for metric in metrics:
            text, digits, _ = METRICS[metric]
            if metric == "tokens_per_s" and workloads[part.workload].counted != "all":
                text = METRICS["output_tokens_per_s"][0]
            cells = [part.label, text]
            cells += [
                _spread(study, name, part, metric, digits) for name in study.backends
            ]
            for rival in rivals:
                value = ratio(study, part, metric, rival)
                cell = "" if value is None else f"{value:.2f}"
                cells.append(f"**{cell}**" if value is not None and value < 1 else cell)
            rows.append(cells)
    note = (
        "Medians, least and most of the rounds. Ratios are medians of each round's; "
        "above 1 PORTABLE is better, **bold** is below 1. Tokens are those of prompts "
        "and answers, output tokens those of answers alone."
    )
    return Table(title, columns, rows, note)


def _spread(study: Study, name: str, part: Part, metric: str, digits: int) -> str:
    values = [
        result[metric]
        for result in study.rounds_of(name, part).values()
        if metric in result
    ]
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _agreement(study: Study, workloads: list[str], problems: list[str]) -> Table:
    rows = []
    for workload in workloads:
        checks = {
            name: study.checks[name][workload]
            for name in study.backends
            if workload in study.checks.get(name, {})
        }
        if len(checks) < 2:
            continue
        # Ours is judged by vLLM's own, where there is one.
        reference = next((name for name in checks if not name.startswith(OURS)), OURS)
        base = checks.pop(reference)
        ahead = statistics.median(gap for gaps in base.gaps for gap in gaps)
        for name, check in checks.items():
            found = compare(_rows(base), _rows(check))
            first = {
                who: [tokens[0] for tokens in it.tokens]
                for who, it in ((reference, base), (name, check))
            }
            share = same_shares(first)[name]
            disagrees = bool(found["bad"]) or (
                len(base.tokens) >= _FEWEST_FOR_SHARE and share < _LEAST_SHARE
            )
            if disagrees:
                problems.append(
                    f"{name} disagrees with {reference} in {workload}: {found['bad']} "
                    f"answers differ, {share:.0%} of the first tokens are the same"
                )
            counts = [str(found[key]) for key in ("same", "near_tie", "bad")]
            if found["bad"]:
                counts[-1] = f"**{counts[-1]}**"
            cell = f"**{share:.0%}**" if disagrees else f"{share:.0%}"
            alike = base.share_without_context
            if alike is not None and alike >= _LEAST_SHARE and ahead < NEAR_TIE:
                cell += ", proves nothing"
            without = "" if alike is None else f"{alike:.0%}"
            rows.append(
                [workload, name, reference, *counts, cell, f"{ahead:.2g}", without]
            )
    columns = ["work", "back end", "compared with", "same answers", "near-ties"]
    columns += ["other answers", "same first tokens", "median lead"]
    columns += ["same in another context"]
    note = (
        "Answers are compared up to the first token that differs; it is a near-tie "
        "where the log-probs of the two best tokens are within 0.15. The median lead "
        "of the best token says how much that means: with random weights most are "
        "near-ties, and the share of the same first tokens counts. The last column: "
        "how many of the reference's first tokens stay the same when all but the last "
        "token of their prompts are reversed. Where most do, as with vLLM's dummy "
        "weights, tokens hardly depend on attention, and agreement proves nothing; "
        "check a real model (--model)."
    )
    return Table("Agreement", columns, rows, note)


def _rows(check: Any) -> list[dict[str, Any]]:
    return [
        {"ids": tokens, "gaps": gaps}
        for tokens, gaps in zip(check.tokens, check.gaps, strict=True)
    ]


def _starts(study: Study) -> Table:
    rows = [
        [name, ", ".join(f"{seconds:.1f}" for seconds in times)]
        for name, times in study.starts.items()
    ]
    return Table("Starts of the servers", ["back end", "seconds"], rows)


def _missing(study: Study, parts: list[Part], rounds: int) -> list[tuple[str, str]]:
    """(what, why), rounds that failed alike in one line."""
    reasons = {row[:3]: row[3] for row in study.failures()}
    grouped: dict[tuple[str, str, str], list[int]] = {}
    for name in study.backends:
        for part in parts:
            for number in range(1, rounds + 1):
                if not study.is_measured(name, part, number):
                    why = reasons.get((name, part.label, number), "not begun")
                    grouped.setdefault((name, part.label, why), []).append(number)
    return [
        (f"{name}, {label}, round {', '.join(map(str, numbers))}", why)
        for (name, label, why), numbers in grouped.items()
    ]


def to_markdown(summary: Summary) -> str:
    """The whole report."""
    parts = ["# Throughput of whole servers"]
    for table in summary.tables:
        parts += [f"## {table.title}", *filter(None, [table.note])]
        rows = [[cell.replace("\n", "<br>") for cell in row] for row in table.rows]
        parts.append(markdown_table(table.columns, rows))
    return "\n\n".join(parts) + "\n"
