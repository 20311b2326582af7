# SPDX-License-Identifier: Apache-2.0
"""Portfolios as layers hold them, and the rule by which one of two is kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from portable_backend.errors import RecordError
from portable_backend.warmup.layers import (
    PORTFOLIO,
    FileChange,
    Layer,
    Place,
    WritableLayer,
)
from portable_backend.warmup.portfolio import Portfolio, parse_portfolio
from portable_backend.warmup.record_files import aside_of
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.tables import NewerSchemaError


@dataclass(frozen=True)
class PortfolioFile:
    """A file, and either what it holds or why that cannot be used."""

    path: Path
    kernel: str
    gpu: str
    portfolio: Portfolio | None
    problem: str | None = None


def read_portfolios(layer: Layer, kernel: str) -> list[PortfolioFile]:
    """A layer's portfolios for one kernel; logs once per file that cannot be used."""
    found = []
    for path, data in layer.portfolios(kernel):
        gpu = unquote(path.name.removesuffix(PORTFOLIO))
        try:
            portfolio = parse_portfolio(data, str(path), kernel, gpu)
            found.append(PortfolioFile(path, kernel, gpu, portfolio))
        except RecordError as error:
            layer.report(path, [str(error)])
            found.append(PortfolioFile(path, kernel, gpu, None, str(error)))
    return found


def merge_all(
    layer: WritableLayer,
    records: Iterable[TuningRecord],
    portfolios: Iterable[Portfolio],
    digests: Mapping[str, str] | None = None,
) -> None:
    """Merge records and portfolios into a layer, all of them or none.

    In whatever order layers and archives are merged, the same portfolio is left for a
    kernel and GPU.

    Args:
        layer: where to.
        records: merge by the conflict rule.
        portfolios: of those for one kernel and GPU, the layer's included, one stays:
            `preferred`.
        digests: of today's kernels; None: unknown.

    Raises:
        OSError, NewerSchemaError: as `WritableLayer.rewrite_all`.
    """
    groups: dict[Place, list[Portfolio]] = {}
    for portfolio in portfolios:
        groups.setdefault((portfolio.kernel, portfolio.gpu), []).append(portfolio)
    changes = {place: _keep_best(group, digests) for place, group in groups.items()}
    layer.merge_in(records, changes)


def preferred(
    portfolios: Iterable[Portfolio], digests: Mapping[str, str] | None = None
) -> Portfolio:
    """The one of today's code, then the latest, the widest and that of least loss."""

    def place(portfolio: Portfolio) -> tuple[bool, str, int, float, str]:
        digest = (digests or {}).get(portfolio.kernel)
        return (
            portfolio.kernel_digest == digest,
            portfolio.measured or "",
            len(portfolio.assignment),
            -(portfolio.loss or float("inf")),
            portfolio.to_text(),
        )

    return max(portfolios, key=place)


def _keep_best(
    given: Sequence[Portfolio], digests: Mapping[str, str] | None
) -> FileChange:
    def change(path: Path, data: bytes | None) -> list[tuple[Path, bytes]]:
        rivals, files = list(given), []
        if data is not None:
            kernel, gpu = given[0].kernel, given[0].gpu
            try:
                rivals.append(parse_portfolio(data, str(path), kernel, gpu))
            except NewerSchemaError:
                raise
            except RecordError:
                copy = aside_of(path, data)
                files += [] if copy is None else [copy]
        text = preferred(rivals, digests).to_text().encode()
        return files if text == data else [*files, (path, text)]

    return change
