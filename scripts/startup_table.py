# SPDX-License-Identifier: Apache-2.0
"""Rows of startup_check.py's table: what the findings of a job show, and fail to show.

Everything here works on what a job has saved, however little that is.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Of a start of ours beyond the reference's, at most.
COLD_S, WARM_S = 5.0, 2.0
# Of the budget that tuning may take beyond it.
TOLERANCE = 1.1
# What tuning beside an engine may cost at the 99th percentile, and what it must get
# done in a minute.
MOST_P99 = 1.01
LEAST_TRIALS = 20
Findings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: of the check.
        what: within it.
        passed: None where nothing is claimed.
        result: in words.
    """

    part: str
    what: str
    passed: bool | None
    result: str


def markdown(rows: Iterable[Row]) -> str:
    states = {True: "ok", False: "FAILED", None: ""}
    lines = ["| part | what | | result |", "|---|---|---|---|"]
    for row in rows:
        result = row.result.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.part} | {row.what} | {states[row.passed]} | {result} |")
    return "\n".join(lines)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][-200:]


def _compiled(found: Mapping[str, Any], when: str) -> str:
    """ "ours 0, others 3 (name, name)" before or after readiness."""
    parts = []
    for whose in ("ours", "others"):
        counts = found.get("compilations", {}).get(f"{when}, {whose}", {})
        text = f"{whose} {counts.get('compiled', 0)} compiled"
        text += f" {counts.get('loaded', 0)} loaded"
        if when == "after" and counts:
            text += f" ({', '.join(list(counts['kernels'])[:6])})"
        parts.append(text)
    return ", ".join(parts)


def _of_ours_after(found: Mapping[str, Any]) -> int:
    counts = found.get("compilations", {}).get("after, ours", {})
    return int(counts.get("compiled", 0)) + int(counts.get("loaded", 0))


def _answered(found: Mapping[str, Any]) -> bool:
    """All requests, rightly, by our kernels, and nothing is left behind."""
    launches = found.get("launches", {})
    return (
        "failed" not in found
        and found.get("sent", 0) > 0
        and found["right"] == found["sent"]
        and not found["unsent"]
        and found["checked"] > 0
        and found.get("nan_requests") == 0
        and found.get("still_running") == 0
        and launches.get("decode", 0) > 0
        and launches.get("prefill", 0) > 0
    )


def awkward_rows(servers: Findings) -> list[Row]:
    """One for each server, and one for the requests of each mode.

    Servers are named "<mode>, <what it is>".
    """
    rows = []
    right: dict[str, int] = {}
    for name, found in servers.items():
        text = f"{found.get('right', 0)} of {found.get('sent', 0)} requests right"
        text += f" ({found.get('left', 0)} left early,"
        text += f" {found.get('checked', 0)} log-probs finite)"
        if found.get("unsent"):
            text += f", {found['unsent']} unsent"
        if found.get("prefix_hits"):
            text += f"; {found['prefix_hits']:.0f} tokens from the prefix cache"
        if found.get("drafts") is not None:
            text += f"; {found['drafts_accepted']:.0f} of {found['drafts']:.0f} drafts"
        text += f"; after readiness: {_compiled(found, 'after')}"
        text += f"; before: {_compiled(found, 'before')}"
        silent = not found.get("jit_lines")
        if not silent:
            text += f"; monitor: {_last_line(found['jit_lines'][0])}"
        for sample in found.get("samples", [])[:1]:
            text += f"; first failure: {sample}"
        if "failed" in found:
            text += f"; {_last_line(found['failed'])}"
        passed = _answered(found)
        if found["monitor"] == "error":
            passed = passed and silent and _of_ours_after(found) == 0
            mode = name.split(",")[0]
            right[mode] = right.get(mode, 0) + int(found.get("right", 0))
        rows.append(Row("awkward", name, passed, text))
    for mode, count in right.items():
        text = f"{count} right ones under --jit-monitor-mode error"
        rows.append(Row("awkward", f"{mode}, requests", None, text))
    return rows


def start_rows(rounds: Iterable[Findings]) -> list[Row]:
    """Seconds of each kind of start, and what ours takes beyond the reference's.

    Differences are taken within a round, hence on one GPU.
    """
    seconds: dict[str, list[float]] = {}
    beyond: dict[str, list[float]] = {}
    lines: dict[str, str] = {}
    failed: list[Row] = []
    for starts in rounds:
        for label, found in starts.items():
            if "start_s" not in found:
                failed.append(
                    Row("start", label, False, _last_line(found.get("failed", "")))
                )
                continue
            seconds.setdefault(label, []).append(found["start_s"])
            logged = [
                f"{name.removesuffix('_s')} {found[name]:g}"
                for name in ("load_s", "compile_s", "graphs_s", "engine_s")
                if name in found
            ]
            lines[label] = ", ".join(logged)
            if "report_line" in found:
                lines[label] += f"; {found['report_line']}"
            base = starts.get(f"{label.split(', ')[0]}, reference", {}).get("start_s")
            if base is not None and not label.endswith("reference"):
                beyond.setdefault(label, []).append(found["start_s"] - base)
    rows = []
    for label, taken in seconds.items():
        text = (
            f"{statistics.median(taken):.1f} s ({', '.join(f'{s:g}' for s in taken)})"
        )
        passed = None
        if label in beyond:
            more = statistics.median(beyond[label])
            most = COLD_S if label.startswith("cold") else WARM_S
            passed = more <= most
            text += f", {more:+.1f} s to the reference's, at most {most:+g}"
        rows.append(Row("start", label, passed, f"{text}; vLLM: {lines[label]}"))
    return [*rows, *failed]


def tuning_rows(starts: Findings, budget_s: float) -> list[Row]:
    """Budget, memory, and the records that the next start finds."""
    rows = []
    load, tuned = starts.get("load", {}), starts.get("startup", {})
    again = starts.get("load again", {})
    for name, found in starts.items():
        text = f"{found.get('right', 0)} of {found.get('sent', 0)} requests right"
        text += f", start {found.get('start_s', '?')} s"
        if "failed" in found:
            text += f"; {_last_line(found['failed'])}"
        rows.append(Row("startup_tuning", f"serves, {name}", _answered(found), text))
    if tuned:
        taken = tuned.get("report", {}).get("tune_s")
        most = TOLERANCE * budget_s
        text = f"{taken} s of {budget_s:g}, at most {most:g}"
        text += f"; {tuned.get('tuned_line', 'no line about tuning')}"
        passed = taken is not None and 0 < taken <= most
        rows.append(Row("startup_tuning", "budget", passed, text))
        blocks = [found.get("blocks") for found in (load, tuned, again)]
        text = f"{blocks[0]} and {blocks[2]} blocks loading, {blocks[1]} after tuning"
        for name in ("allocated", "reserved", "used_on_gpu"):
            memory = [
                found.get("at_start", {}).get("memory", {}).get(name, 0) / 2**20
                for found in (load, tuned)
            ]
            text += f"; {name} {memory[0]:.0f} and {memory[1]:.0f} MiB"
        text += f"; nvidia-smi {load.get('used_mib')} and {tuned.get('used_mib')}"
        # Loading, the first start compiles the model and the last one does not.
        same = blocks[1] is not None and blocks[1] in (blocks[0], blocks[2])
        rows.append(Row("startup_tuning", "memory", same, text))
    if again:
        grades = again.get("report", {}).get("grades", {})
        exact = sum(counts.get("exact", 0) for counts in grades.values())
        text = again.get("records_line", "no line about records")
        rows.append(Row("startup_tuning", "records found", exact > 0, text))
    return rows


def carried_rows(found: Findings) -> list[Row]:
    """The cache that `warm` filled, and what a start added to it."""
    warm, start = found.get("warm", {}), found.get("start", {})
    if "targets" not in warm:
        return [Row("carried", "warm", False, _last_line(warm.get("failed", "")))]
    text = "; ".join(
        f"{row['target']}: {row['binaries']} binaries in {row['seconds']} s"
        for row in warm["targets"]
    )
    rows = [Row("carried", "warm", True, f"{text}, {warm['bytes'] / 1e6:.1f} MB")]
    if start:
        report = start.get("report", {})
        before = start.get("compilations", {}).get("before, ours", {})
        compiled = report.get("compiled")
        text = f"compiled {compiled} by the report, {before.get('compiled', 0)} in the "
        text += f"engine; after readiness: {_compiled(start, 'after')}; new entries of "
        text += f"ours: {start.get('new_of_ours')}; {start.get('report_line', '')}"
        if "failed" in start:
            text += f"; {_last_line(start['failed'])}"
        none = (
            compiled == 0
            and not before.get("compiled", 0)
            and _of_ours_after(start) == 0
            and start.get("new_of_ours") == {}
        )
        rows.append(Row("carried", "start", none and _answered(start), text))
    return rows


def background_rows(found: Mapping[str, Any]) -> list[Row]:
    """Time between tokens beside a tuner, its trials, and what the next start finds."""
    part = "background"
    rows = []
    for name in ("p50_ms", "p99_ms"):
        pairs = []
        for number in range(len(found)):
            turns = [found.get(f"turn {number}, {x}") for x in (part, "load")]
            if all(turn and name in turn for turn in turns):
                pairs.append([turn[name] for turn in turns if turn])
        if not pairs:
            continue
        ratios = [tuned / loaded for tuned, loaded in pairs]
        ratio = statistics.median(ratios)
        text = f"{ratio:.4f} of `load` in the median of {len(pairs)} pairs of turns ("
        text += ", ".join(f"{tuned:.2f} to {loaded:.2f}" for tuned, loaded in pairs)
        passed = None
        if name == "p99_ms":
            passed = ratio <= MOST_P99
            text += f"), at most {MOST_P99}"
        else:
            text += ")"
        rows.append(Row(part, f"between tokens, {name.split('_')[0]}", passed, text))
    turns = [turn for name, turn in found.items() if name.startswith("turn ")]
    if turns:
        sent, failed = (
            sum(turn[name] for turn in turns) for name in ("sent", "failed")
        )
        trials = sum(turn["trials"] for turn in turns)
        text = f"{sent - failed} of {sent}; {trials} trials meanwhile"
        rows.append(Row(part, "requests answered", not failed, text))
    if idle := found.get("idle"):
        least = LEAST_TRIALS * idle["seconds"] / 60
        text = f"{idle['trials']} in {idle['seconds']} s, {least:.0f} at least; "
        text += f"nvidia-smi {idle.get('used_mib')} MiB"
        rows.append(Row(part, "trials, idle", idle["trials"] >= least, text))
    if following := found.get("next start"):
        before = found.get("before the next start", {})
        exact = [_exact(x) for x in (found.get("at start", {}), before, following)]
        done = before.get("background", {}).get("done", 0)
        text = (
            f"{done} keys tuned; exact {exact[0]} at start, {exact[1]} when it ended, "
        )
        text += f"{exact[2]} at the next start"
        # A running engine keeps its configs; whose choices differ, or do not, is told.
        same = found.get("at start", {}).get("choices") == before.get("choices")
        passed = done > 0 and exact[0] == exact[1] and exact[2] >= exact[0] + done
        rows.append(Row(part, "misses become exact", passed and same, text))
    if "failed" in found:
        rows.append(Row(part, "run", False, _last_line(found["failed"])))
    return rows


def _exact(choices: Mapping[str, Any]) -> int:
    grades = choices.get("grades", {})
    return sum(counts.get("exact", 0) for counts in grades.values())
