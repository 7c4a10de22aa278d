"""The reports of opmux as tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ..core.config import CompilationConfig
    from .output import Output

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


def plain(*columns: str, title: str | None = None) -> Table:
    """A table with the look of all opmux tables."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def ran(entries: Iterable[Mapping[str, Any]]) -> Table:
    """What ran: the entries of an ``apply`` report, one row for all layers that say the same."""
    groups: dict[tuple[str, ...], int] = {}
    for entry in entries:
        path = _NUMBERS.sub("*", entry["path"])
        row = (entry["status"], str(entry["op"] or ""), path, _method(entry), str(entry["reason"]))
        groups[row] = groups.get(row, 0) + 1
    table = plain("op", "in the model", "n", "runs", "why")
    for (status, op, path, method, reason), count in sorted(groups.items()):
        style = "" if status == "applied" else "dim"
        runs = method if status == "applied" else status
        table.add_row(escape(op), escape(path), str(count), escape(runs), escape(reason), style=style)
    return table


def _method(entry: Mapping[str, Any]) -> str:
    parts = [entry.get("class"), entry.get("method")]
    return ".".join(str(part) for part in parts if part)


def print_settings(output: Output, config: CompilationConfig) -> None:
    """Which ops are on by which rule, and where each setting came from."""
    base, why = config.base_mode()
    compiled = f" The model is compiled with backend {config.backend!r}." if config.compiles else ""
    output.print(f"Ops are {'on' if base == 'all' else 'off'} unless named: {escape(why)}.{escape(compiled)}")
    sources = [f"{field} from {source}" for field, source in config.sources.items() if source != "default"]
    output.print(f"[dim]Settings: {escape(', '.join(sources)) or 'all defaults'}.[/dim]")
