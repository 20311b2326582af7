# SPDX-License-Identifier: Apache-2.0
"""A study as plots and as one HTML page; plots need matplotlib (extra `study`)."""

import base64
import html
import importlib.util
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.study import Part, Study
from serving.summary import METRICS, Summary
from serving.workloads import Workload

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border-bottom: 1px solid #ccc; padding: .2em .8em .2em 0; text-align: left;
  vertical-align: top; white-space: pre-line }
img { max-width: 100% }
"""
_PANELS = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(study: Study, workloads: Mapping[str, Workload], folder: Path) -> list[Path]:
    """Draw what was measured.

    Returns:
        PNG files in `folder`: throughput.png, and latency_NAME.png for each workload
        with rates; those that there is something to draw for.
    """
    import matplotlib

    matplotlib.use("Agg")
    drawn = [_plot_throughput(study, workloads, folder)]
    drawn += [
        _plot_rates(study, name, folder)
        for name, kind in workloads.items()
        if kind.at_rates
    ]
    return [file for file in drawn if file]


def _values(study: Study, name: str, part: Part, metric: str) -> list[float]:
    return [
        result[metric]
        for result in study.rounds_of(name, part).values()
        if metric in result
    ]


def _plot_throughput(
    study: Study, workloads: Mapping[str, Workload], folder: Path
) -> Path | None:
    """Bars of medians, whiskers from the least to the most."""
    names = [
        name
        for name, kind in workloads.items()
        if not kind.streamed
        and any(study.rounds_of(backend, Part(name)) for backend in study.backends)
    ]
    if not names:
        return None
    figure, axes = _panels(1, len(names))
    for axis, name in zip(axes, names, strict=True):
        for i, backend in enumerate(study.backends):
            values = _values(study, backend, Part(name), "tokens_per_s")
            if values:
                middle = statistics.median(values)
                reach = [[middle - min(values)], [max(values) - middle]]
                axis.bar(i, middle, yerr=reach, capsize=4, color=f"C{i}")
        axis.set_xticks(range(len(study.backends)), study.backends, rotation=30)
        axis.set_title(name)
        axis.set_ylabel("output tokens/s" if name == "long" else "tokens/s")
    return _save(figure, folder / "throughput.png")


def _plot_rates(study: Study, workload: str, folder: Path) -> Path | None:
    """Latencies over the rate that was reached; a wall shows saturation.

    Axes are logarithmic, since beyond the wall they are hundreds of times those before.
    """
    figure, axes = _panels(2, 2)
    is_empty = True
    for axis, metric in zip(axes, _PANELS, strict=True):
        for i, backend in enumerate(study.backends):
            points = []
            for part in study.parts([workload]):
                reached = _values(study, backend, part, "requests_per_s")
                latency = _values(study, backend, part, metric)
                if reached and latency:
                    middle = statistics.median(latency)
                    points.append(
                        (
                            statistics.median(reached),
                            middle,
                            middle - min(latency),
                            max(latency) - middle,
                        )
                    )
            if points:
                is_empty = False
                x, y, below, above = zip(*points, strict=True)
                axis.errorbar(
                    x, y, yerr=[below, above], marker="o", capsize=3, label=backend,
                    color=f"C{i}",
                )  # fmt: skip
        axis.set_xlabel("requests/s answered")
        axis.set_ylabel(METRICS[metric][0])
        if any(value > 0 for line in axis.lines for value in line.get_ydata()):
            _make_logarithmic(axis)
    if is_empty:
        return None
    axes[0].legend()
    figure.suptitle(workload)
    return _save(figure, folder / f"latency_{workload}.png")


def _make_logarithmic(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(which="major", alpha=0.3)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.set_major_formatter(StrMethodFormatter("{x:g}"))
        one.set_minor_formatter(NullFormatter())


def _panels(rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * columns, 3.5 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _save(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=120)
    return file


def to_html(summary: Summary, plots: list[Path]) -> str:
    """One page that needs no other file."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        "<title>Throughput of whole servers</title>",
        f"<style>{_STYLE}</style>",
        "<h1>Throughput of whole servers</h1>",
    ]
    for file in plots:
        data = base64.b64encode(file.read_bytes()).decode()
        source = f"data:image/png;base64,{data}"
        parts.append(f'<p><img alt="{html.escape(file.stem)}" src="{source}"></p>')
    if not plots:
        parts.append("<p>No plots: matplotlib is missing, or nothing was measured.</p>")
    for table in summary.tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        if table.note:
            parts.append(f"<p>{_cell(table.note)}</p>")
        parts.append("<table>")
        parts += [_row("th", table.columns), *(_row("td", row) for row in table.rows)]
        parts.append("</table>")
    return "\n".join([*parts, "</html>", ""])


def _row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_cell(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cell(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
