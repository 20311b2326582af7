# SPDX-License-Identifier: Apache-2.0
"""A report as Markdown tables, losses shown as well as wins."""

from collections.abc import Sequence

from portable_backend.bench.results import (
    OURS,
    Report,
    Result,
    Row,
    geometric_means,
    losses,
    rivals_of,
)

NAMES = {
    OURS: "ours",
    "portable_exact": "ours, lengths on the host",
    "fa3": "FA3",
    "fa3_plain": "FA3 without metadata",
    "vllm_triton": "vLLM Triton",
    "vllm": "vLLM CUDA",
    "torch_compile": "torch.compile",
    "copy": "copy",
    "torch": "torch",
}

NOTES = {
    "attention": "Plans are made ahead, once for all layers of a step; what they cost "
    "on the device is in the rows `plan of`.",
    "features": "The last column compares ours with ours on the plain shape. A query "
    "of the chunk with a window sees 4096 keys, one of its plain row 3072 on average.",
    "norm": "A copy moves as many bytes.",
    "host": "Microseconds of the CPU per call, without waiting for the device.",
}


def format_report(report: Report) -> str:
    """The whole document: header, a table per suite, means, losses, what is missing."""
    header = [[name, text] for name, text in report.environment.items()]
    for suite, rate in report.roofs.items():
        unit = "GB/s" if suite == "copy" else "TFLOP/s"
        header.append([f"measured {suite}", f"{rate:.0f} {unit}"])
    parts = [
        "# Kernels side by side",
        markdown_table(["", ""], header),
        "Times are medians. Ratio: the other's time divided by ours; above 1 ours is "
        "faster, **bold** is below 1.",
    ]
    for suite in dict.fromkeys(row.suite for row in report.rows):
        rows = [row for row in report.rows if row.suite == suite]
        parts += [f"## {suite}", *filter(None, [NOTES.get(suite)])]
        parts.append(_suite_table(report, rows))
    parts += _summary(report)
    for title, entries in (
        ("Could not take part", report.absent),
        ("Left out", report.left_out),
    ):
        if entries:
            listed = [f"- {name}: {why}" for name, why in entries.items()]
            parts += [f"## {title}", "\n".join(listed)]
    return "\n\n".join(parts) + "\n"


def _suite_table(report: Report, rows: Sequence[Row]) -> str:
    rivals = rivals_of(rows)
    fields = list(dict.fromkeys(name for row in rows for name in row.fields))
    providers = [
        name for name in (OURS, *rivals) if any(name in row.results for row in rows)
    ]
    has_ours = OURS in providers
    columns = ["work", *(name.replace("_", " ") for name in fields)]
    columns += [f"{NAMES.get(name, name)}, us" for name in providers]
    if has_ours:
        columns += [f"{NAMES.get(name, name)} / ours" for name in rivals]
        columns.append("error")
    with_rate = any(row.flops or row.num_bytes for row in rows)
    if with_rate:
        columns.append("rate")
    with_roof = any(report.roof_share(row) for row in rows)
    if with_roof:
        columns.append("of roof")
    with_baseline = any(row.baseline for row in rows)
    if with_baseline:
        columns.append("ours / plain")
    table = []
    for row in rows:
        cells = [row.name, *(str(row.fields.get(name, "")) for name in fields)]
        cells += [_time(row.results.get(name)) for name in providers]
        if has_ours:
            cells += [_ratio(row.ratio(name)) for name in rivals]
            cells.append(_error(row.results.get(OURS)))
        if with_rate:
            cells.append(rate(row, OURS if has_ours else providers[0]))
        if with_roof:
            share = report.roof_share(row)
            cells.append(f"{share:.0%}" if share else "")
        if with_baseline:
            cells.append(_to_baseline(row, rows))
        table.append(cells)
    return markdown_table(columns, table)


def _summary(report: Report) -> list[str]:
    parts = []
    means = geometric_means(report.rows)
    if means:
        rivals = rivals_of(report.rows)
        rivals = [name for name in rivals if any(name in m for m in means.values())]
        columns = ["rows", "number", *(f"{NAMES.get(n, n)} / ours" for n in rivals)]
        table = []
        for group, by_rival in means.items():
            number = max(count for _, count in by_rival.values())
            ratios = [
                _ratio(by_rival[name][0]) if name in by_rival else "" for name in rivals
            ]
            table.append([group, str(number), *ratios])
        parts += ["## Geometric means", markdown_table(columns, table)]
    slower = losses(report.rows)
    if slower:
        lines = [
            f"- {ratio:.2f} to {NAMES.get(rival, rival)}: {row.label}"
            for row, rival, ratio in slower
        ]
        parts += [f"## Where ours is slower ({len(lines)})", "\n".join(lines)]
    lines = [
        f"- {NAMES[name]}, {row.label}: {verdict(result)}"
        for row in report.rows
        for name, result in row.failures.items()
    ]
    if lines:
        parts += [f"## FAILED ({len(lines)})", "\n".join(lines)]
    return parts


def verdict(result: Result) -> str:
    """What to say of a result without a time."""
    if result.wrong:
        return f"WRONG, error {result.error:.1e}"
    return result.reason or ("not timed" if result.error is None else "right")


def rate(row: Row, name: str) -> str:
    """TFLOP/s where the row counts operations and they bound it, else GB/s."""
    tflops, gbps = row.tflops(name), row.gbps(name)
    # More than about 100 operations per byte: arithmetic is the limit.
    if tflops and (not row.num_bytes or (row.flops or 0) > 100 * row.num_bytes):
        return f"{tflops:.0f} TF/s"
    return f"{gbps:.0f} GB/s" if gbps else ""


def _to_baseline(row: Row, rows: Sequence[Row]) -> str:
    ours = row.time_us(OURS)
    for other in rows:
        plain = other.time_us(OURS)
        if other.name == row.baseline and ours and plain:
            return f"{ours / plain:.2f}"
    return ""


def _time(result: Result | None) -> str:
    if result is None:
        return ""
    if result.time_us is None:
        return verdict(result)
    return f"{result.time_us:.1f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"**{value:.2f}**" if value < 1 else f"{value:.2f}"


def _error(result: Result | None) -> str:
    return "" if result is None or result.error is None else f"{result.error:.0e}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
