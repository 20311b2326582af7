# SPDX-License-Identifier: Apache-2.0
"""The store of tuning records: its layers in order, of which the first hit wins."""

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from portable_backend import kernels
from portable_backend.warmup.layers import Layer, WritableLayer
from portable_backend.warmup.portfolio import Portfolio
from portable_backend.warmup.portfolio_files import read_portfolios
from portable_backend.warmup.records import TuningRecord
from portable_backend.warmup.tables import merge_records

logger = logging.getLogger("vllm.portable_backend.records")
PROCESS = "process"
USER_CACHE = "user cache"
SHIPPED = "shipped"


class RecordStore:
    """Records of this process, the user's cache, read-only layers and shipped tables.

    What was read is kept until `refresh()`, so a lookup touches no file twice.

    Args:
        layers: folders in the order in which they are asked. Those that are writable
            get what `put` is given; usually that is the first alone.
    """

    def __init__(self, layers: Sequence[Layer] = ()) -> None:
        self.layers = tuple(layers)
        self._writable = [x for x in self.layers if isinstance(x, WritableLayer)]
        self._process: dict[str, list[TuningRecord]] = {}
        self._read: dict[str, tuple[tuple[str, TuningRecord], ...]] = {}
        self._refuted: dict[str, tuple[tuple[str, TuningRecord], ...]] = {}
        self._portfolios: dict[str, tuple[tuple[str, Portfolio], ...]] = {}
        self._problems: dict[str, tuple[str, ...]] = {}
        self._touched: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        cache_dir: Path | None,
        cache_layers: Iterable[Path] = (),
        *,
        shipped: Path | None = None,
    ) -> "RecordStore":
        """The usual layers.

        Args:
            cache_dir: the writable cache, PORTABLE_BACKEND_CACHE_DIR; None: no such.
            cache_layers: read-only folders, PORTABLE_BACKEND_CACHE_LAYERS.
            shipped: the package's tables unless given.
        """
        layers: list[Layer] = []
        if cache_dir is not None:
            layers.append(WritableLayer(USER_CACHE, cache_dir))
        for number, folder in enumerate(cache_layers, 1):
            layers.append(Layer(f"image layer {number}", folder))
        layers.append(Layer(SHIPPED, shipped or shipped_folder()))
        return cls(layers)

    def put(self, record: TuningRecord) -> bool:
        """Keep a record in this process and write it to the user's cache.

        Returns:
            Whether it was written; where not, this process still has it.
        """
        with self._lock:
            kernel = record.key.kernel
            self._process.setdefault(kernel, []).append(record)
            self._touched.add((kernel, record.gpu))
        return all([layer.append(record) for layer in self._writable])

    def records(self, kernel: str) -> tuple[tuple[str, TuningRecord], ...]:
        """(layer's name, record) of every record for a kernel, layers in order.

        Losers of the conflict rule are among them, after what beat them. What any layer
        says is refuted is not.
        """
        refuted = {record.claim for _, record in self.refuted(kernel)}
        with self._lock:
            own = merge_records(self._process.get(kernel, ())).all
            found = (*((PROCESS, record) for record in own), *self._read[kernel])
        if not refuted:
            return found
        return tuple(pair for pair in found if pair[1].claim not in refuted)

    def refuted(self, kernel: str) -> tuple[tuple[str, TuningRecord], ...]:
        """(layer's name, record) of every refutation for a kernel."""
        with self._lock:
            if kernel not in self._read:
                self._load(kernel)
            return self._refuted[kernel]

    def portfolios(self, kernel: str) -> tuple[tuple[str, Portfolio], ...]:
        """(layer's name, portfolio) for a kernel, layers in order."""
        with self._lock:
            if kernel not in self._read:
                self._load(kernel)
            return self._portfolios[kernel]

    def problems(self, kernel: str) -> tuple[str, ...]:
        """Why files or entries for a kernel were not used."""
        self.records(kernel)
        return self._problems[kernel]

    def kernels(self) -> list[str]:
        """Every kernel of which some layer has records."""
        names = set(self._process)
        return sorted(names.union(*(layer.kernels() for layer in self.layers)))

    def refresh(self) -> None:
        """Read the files again when they are next asked for."""
        with self._lock:
            self._read.clear()
            self._refuted.clear()
            self._portfolios.clear()
            self._problems.clear()

    def compact(self) -> bool:
        """Move what this process appended into the readable tables."""
        with self._lock:
            touched, self._touched = sorted(self._touched), set()
        return all(
            [layer.compact(*file) for layer in self._writable for file in touched]
        )

    def close(self) -> None:
        self.compact()

    def __enter__(self) -> "RecordStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, kernel: str) -> None:
        found: list[tuple[str, TuningRecord]] = []
        refuted: list[tuple[str, TuningRecord]] = []
        portfolios: list[tuple[str, Portfolio]] = []
        problems: list[str] = []
        for layer in self.layers:
            for file in layer.load(kernel):
                for record in file.records:
                    part = found if record.refuted is None else refuted
                    part.append((layer.name, record))
                problems += file.problems
            for held in read_portfolios(layer, kernel):
                if held.portfolio is not None:
                    portfolios.append((layer.name, held.portfolio))
                problems += [] if held.problem is None else [held.problem]
        self._portfolios[kernel] = tuple(portfolios)
        self._refuted[kernel] = tuple(refuted)
        self._read[kernel] = tuple(found)
        self._problems[kernel] = tuple(problems)


def shipped_folder() -> Path:
    """Where the package keeps the tables that come with it."""
    return Path(kernels.__path__[0]) / "configs"
