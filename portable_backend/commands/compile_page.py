# SPDX-License-Identifier: Apache-2.0
"""The result of `portable-backend compile` as one page that needs nothing else."""

from collections.abc import Sequence
from html import escape

_STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em; }
table { border-collapse: collapse; margin-bottom: 2em; }
th, td { border: 1px solid #ccc; padding: 2px 8px; text-align: right; }
th { background: #eee; }
td.text, th.text { text-align: left; }
tr.failed td { background: #fdd; }
"""
_TEXTS = ("kernel", "shape", "config", "remark")


def page(
    titles: Sequence[str],
    tables: dict[str, list[tuple[bool, Sequence[str]]]],
    note: str,
) -> str:
    """HTML with a table for each target.

    Args:
        titles: of the columns.
        tables: by target, rows: whether it failed, and its cells.
        note: what columns mean.
    """
    parts = []
    for target, rows in tables.items():
        count = f"{len(rows)} binaries, {sum(f for f, _ in rows)} failed"
        parts.append(f"<h2>{escape(target)}</h2>\n<p>{count}</p>\n<table>")
        parts.append(_row("th", titles, titles, ""))
        for has_failed, row in rows:
            parts.append(_row("td", titles, row, "failed" if has_failed else ""))
        parts.append("</table>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<title>portable-backend compile</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What compiled kernels take</h1>\n<p>{escape(note)}</p>\n{body}\n"
        "</body>\n</html>\n"
    )


def _row(tag: str, titles: Sequence[str], cells: Sequence[str], kind: str) -> str:
    inner = ""
    for title, cell in zip(titles, cells, strict=True):
        text = ' class="text"' if title in _TEXTS else ""
        inner += f"<{tag}{text}>{escape(cell)}</{tag}>"
    return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"
