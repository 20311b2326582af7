# SPDX-License-Identifier: Apache-2.0
"""One file to share: tables and portfolios in a zip archive with checksums.

The same records give the same bytes. Reading one trusts nothing: names, sizes,
checksums and every entry are checked before anything is merged.
"""

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from portable_backend.errors import RecordError
from portable_backend.warmup.layers import (
    PORTFOLIO,
    TABLE,
    WritableLayer,
    file_stem,
)
from portable_backend.warmup.portfolio import Portfolio, parse_portfolio
from portable_backend.warmup.portfolio_files import merge_all
from portable_backend.warmup.record_files import MAX_FILE_BYTES
from portable_backend.warmup.records import TuningRecord, short
from portable_backend.warmup.tables import (
    check_schema,
    format_table,
    merge_records,
    parse_json,
    parse_table,
)

FORMAT = "portable-backend-records"
MANIFEST = "manifest.json"
_MAX_MEMBERS = 10_000
# What zipfile raises for damaged archives; it does not document all of them.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True)
class Archive:
    """What an archive holds, checked."""

    records: tuple[TuningRecord, ...]
    portfolios: tuple[Portfolio, ...] = ()

    def to_bytes(self) -> bytes:
        """The archive's file; raises RecordError where there is nothing to share."""
        files = {name: data.encode() for name, data in self._texts().items()}
        if not files:
            raise RecordError("an archive must hold at least one record, got none")
        sums = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }
        manifest = {"format": FORMAT, "schema": 1, "files": sums}
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in [(MANIFEST, text.encode()), *sorted(files.items())]:
                # A fixed date and mode: the same records give the same bytes.
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, data)
        return buffer.getvalue()

    def _texts(self) -> dict[str, str]:
        groups: dict[tuple[str, str], list[TuningRecord]] = {}
        for record in self.records:
            groups.setdefault((record.key.kernel, record.gpu), []).append(record)
        texts = {
            _member(kernel, gpu, TABLE): format_table(kernel, gpu, merge_records(group))
            for (kernel, gpu), group in groups.items()
        }
        for item in self.portfolios:
            texts[_member(item.kernel, item.gpu, PORTFOLIO)] = item.to_text()
        return texts

    def merge_into(
        self, layer: WritableLayer, digests: Mapping[str, str] | None = None
    ) -> None:
        """Merge all of it or nothing; arguments and errors are `merge_all`'s."""
        merge_all(layer, self.records, self.portfolios, digests)


def read_archive(path: Path) -> Archive:
    """Read and check an archive.

    Raises:
        OSError: the file cannot be read.
        RecordError: it is no such archive, was changed, or holds anything else.
    """
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = _members(archive, str(path))
    except RecordError:
        raise
    except _ZIP_ERRORS as error:
        raise RecordError(f"{path}: not an archive of records: {error}") from None
    _check_manifest(parse_json(files.pop(MANIFEST), f"{path}, {MANIFEST}"), files, path)
    records: list[TuningRecord] = []
    portfolios = []
    for name, data in sorted(files.items()):
        where = f"{path}, {name}"
        kernel, gpu, suffix = _split(name, where)
        if suffix == PORTFOLIO:
            portfolios.append(parse_portfolio(data, where, kernel, gpu))
            continue
        table = parse_table(data, where, kernel, gpu)
        if table.problems:
            raise RecordError(table.problems[0])
        records += table.records
    return Archive(tuple(records), tuple(portfolios))


def _members(archive: zipfile.ZipFile, where: str) -> dict[str, bytes]:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if MANIFEST not in names:
        raise RecordError(f"{where}: must hold {MANIFEST}, got none")
    if len(set(names)) < len(names) or len(names) > _MAX_MEMBERS:
        raise RecordError(
            f"{where}: must hold at most {_MAX_MEMBERS} members of different names, "
            f"got {len(names)}"
        )
    size = sum(info.file_size for info in infos)
    if size > MAX_FILE_BYTES:
        raise RecordError(f"{where}: must hold at most {MAX_FILE_BYTES}, got {size}")
    return {info.filename: archive.read(info) for info in infos}


def _check_manifest(manifest: object, files: Mapping[str, bytes], path: Path) -> None:
    where = f"{path}, {MANIFEST}"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RecordError(f"{where}: format must be {FORMAT}, got {short(manifest)}")
    check_schema(manifest, where)
    sums = manifest.get("files")
    if not isinstance(sums, dict) or sums.keys() != files.keys():
        raise RecordError(
            f"{where}: files must name every member and no other, got {short(sums)}"
        )
    for name, data in files.items():
        told = sums[name] if isinstance(sums[name], dict) else {}
        given = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for field, value in given.items():
            if told.get(field) != value:
                raise RecordError(
                    f"{path}, {name}: {field} must be {short(told.get(field))} as in "
                    f"the manifest, got {value}"
                )


def _member(kernel: str, gpu: str, suffix: str) -> str:
    return f"{file_stem(kernel)}/{file_stem(gpu)}{suffix}"


def _split(name: str, where: str) -> tuple[str, str, str]:
    """Kernel, GPU and suffix of a member; refuses any name that we would not give."""
    folder, _, file = name.partition("/")
    suffix = PORTFOLIO if file.endswith(PORTFOLIO) else TABLE
    kernel, gpu = unquote(folder), unquote(file.removesuffix(suffix))
    hidden = not kernel or not gpu or kernel.startswith(".") or gpu.startswith(".")
    if hidden or not file.endswith(suffix) or name != _member(kernel, gpu, suffix):
        raise RecordError(
            f"{where}: a member must be called <kernel>/<gpu>.json, got {short(name)}"
        )
    return kernel, gpu, suffix


def archive_of(
    records: Iterable[TuningRecord], portfolios: Iterable[Portfolio] = ()
) -> Archive:
    """An archive of records, merged by the conflict rule."""
    return Archive(merge_records(records).all, tuple(portfolios))
