# SPDX-License-Identifier: Apache-2.0
"""What `portable-backend cache list` says of each file of each layer."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from portable_backend.warmup.layers import Layer
from portable_backend.warmup.portfolio_files import PortfolioFile, read_portfolios
from portable_backend.warmup.tables import merge_records

Wanted = Callable[[str, str], bool]


def list_rows(layers: Iterable[Layer], wanted: Wanted) -> list[dict[str, Any]]:
    """A row for each kernel and GPU, and for each folder that cannot be read.

    Args:
        layers: in their order.
        wanted: whether a kernel and a GPU are asked for.
    """
    rows: list[dict[str, Any]] = []
    for layer in layers:
        for kernel, gpu, told in _listed(layer, wanted):
            held = layer.load_file(kernel, gpu)
            problem = told.problem if told is not None else None
            merged = merge_records(held.records)
            rows.append(
                {
                    "layer": layer.name,
                    "kernel": kernel,
                    "gpu": gpu,
                    "records": len(merged.served),
                    "verified": sum(record.verified for record in merged.served),
                    "unmeasured": sum(r.unmeasured is not None for r in merged.served),
                    "history": len(merged.history),
                    "refuted": len(merged.refuted),
                    "digests": sorted({r.kernel_digest for r in merged.served}),
                    "portfolio": _portfolio_row(told),
                    "problems": [*held.problems, *([problem] if problem else [])],
                    "path": str(layer.path(kernel, gpu)),
                }
            )
        named = {problem for row in rows for problem in row["problems"]}
        for path, problem in layer.unreadable.items():
            if problem not in named:  # a folder, of which nobody knows what it holds
                rows.append(_unread_row(layer, path, problem))
    return rows


def _unread_row(layer: Layer, path: Path, problem: str) -> dict[str, Any]:
    counts = ("records", "verified", "unmeasured", "history", "refuted")
    row: dict[str, Any] = {"layer": layer.name, "kernel": None, "gpu": None}
    row |= dict.fromkeys(counts, 0)
    row |= {"digests": [], "portfolio": None}
    return row | {"problems": [problem], "path": str(path)}


def _portfolio_row(file: PortfolioFile | None) -> dict[str, Any] | None:
    if file is None or file.portfolio is None:
        return None
    held = file.portfolio
    return {
        "configs": [config.to_dict() for config in held.configs],
        "buckets": len(held.assignment),
        "loss": held.loss,
        "worst_key": held.worst_key.to_dict() if held.worst_key else None,
        "worst_loss": held.worst_loss,
        "digest": held.kernel_digest,
        "measured": held.measured,
        "path": str(file.path),
        "text": str(held),
    }


def _listed(
    layer: Layer, wanted: Wanted
) -> Iterable[tuple[str, str, PortfolioFile | None]]:
    """(kernel, GPU, portfolio) of which a layer has records, a portfolio or both."""
    for kernel in layer.kernels():
        files = {file.gpu: file for file in read_portfolios(layer, kernel)}
        for gpu in sorted({*layer.gpus(kernel), *files}):
            if wanted(kernel, gpu):
                yield kernel, gpu, files.get(gpu)


def list_line(row: dict[str, Any]) -> str:
    wrong = "".join(f"\n  not used: {problem}" for problem in row["problems"])
    if row["kernel"] is None:
        return f"{row['layer']}  {row['path']}{wrong}"
    if row["portfolio"] is not None:
        wrong = f"\n  {row['portfolio']['text']}{wrong}"
    return (
        f"{row['layer']}  {row['kernel']}  {row['gpu']}: {row['records']} records, "
        f"{row['verified']} verified, {_count(row, 'unmeasured')}"
        f"{_count(row, 'refuted')}{row['history']} in history  ({row['path']}){wrong}"
    )


def _count(row: dict[str, Any], name: str) -> str:
    return f"{row[name]} {name}, " if row[name] else ""
