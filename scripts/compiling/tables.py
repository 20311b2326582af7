# SPDX-License-Identifier: Apache-2.0
"""Rows of compilations as text."""

from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    header = ("target", "kernel", "shape", "shared", "regs", "spills", "warps", "s")
    lines = [header]
    for row in rows:
        cells = [row["arch"], row["kernel"], row.get("shape", "")]
        if "error" in row:
            failure = f"FAILED: {row['error']}"
            if config := row.get("config"):
                failure += f" [{config_text(config)}]"
            lines.append((*cells, failure))
            continue
        names = ("shared_bytes", "registers", "spills", "num_warps", "compile_s")
        lines.append((*cells, *(str(row[name]) for name in names)))
    return _aligned(lines, (8, 14, 14, 8, 5, 7, 6, 5))


def config_text(config: dict[str, dict[str, Any]]) -> str:
    """Kernels and their parameters; what is None is left out."""
    return "; ".join(
        " ".join([name, *(f"{k}={v}" for k, v in values.items() if v is not None)])
        for name, values in config.items()
    )


def cover_table(rows: list[dict[str, Any]], targets: list[str]) -> str:
    """What covers hold, and what became of them, by target."""
    header = ("target", "configs", "combinations", "binaries", "failed", "over limits")
    lines = [(*header, "spilling", "most spills", "s")]
    for target in targets:
        own = [row for row in rows if row["arch"] == target]
        covers = [row["cover"] for row in own if "cover" in row]
        compiled = [row for row in own if "cover" not in row]
        over = sum("over_limit" in row for row in compiled)
        spills = [row.get("spills") or 0 for row in compiled]
        cells = (
            sum(cover["configs"] for cover in covers),
            sum(cover["combinations"] for cover in covers),
            len(compiled),
            sum("error" in row for row in compiled) - over,
            over,
            sum(n > 0 for n in spills),
            max(spills, default=0),
            round(sum(row.get("compile_s", 0) for row in compiled)),
        )
        lines.append((target, *map(str, cells)))
    return _aligned(lines, (8, 8, 13, 9, 7, 12, 9, 12, 5))


def _aligned(lines: list[tuple[str, ...]], widths: tuple[int, ...]) -> str:
    return "\n".join(
        " ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip()
        for line in lines
    )
