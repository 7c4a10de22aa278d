"""The reports of opmux as tables for people."""

from __future__ import annotations

import re
from collections import Counter
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


def print_report(output: Output, entries: Iterable[Mapping[str, Any]]) -> None:
    """What ran: the entries of an ``apply`` report, one row for all layers that say the same."""
    groups = Counter(
        (e["status"], str(e["op"] or ""), _NUMBERS.sub("*", e["path"]), _method(e), str(e["reason"])) for e in entries
    )
    # Nearly every op gives the same sentence last, the one of its decision. Said once, it leaves the table readable.
    last = Counter(group[-1].rpartition("; ")[2] for group in groups if group[0] == "applied")
    common = next((sentence for sentence, count in last.most_common(1) if count > 1), None)
    table = plain("op", "in the model", "n", "runs", "why")
    for (status, op, path, method, reason), count in sorted(groups.items()):
        rest, _, sentence = reason.rpartition("; ")
        why = f"{rest} *".strip() if status == "applied" and sentence == common else reason
        runs, style = (method, "") if status == "applied" else (status, "dim")
        table.add_row(escape(op), escape(path), str(count), escape(runs), escape(why), style=style)
    output.print(table)
    if common is not None:
        output.print(f"[dim]* {escape(common)}[/dim]")


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


def print_load(output: Output, machine: Mapping[str, Any]) -> None:
    """A warning below measurements if others used the machine, too."""
    load = machine["load_average"]
    if load is not None and load > machine["cores"] + 1:
        output.print(
            f"[yellow]The machine was busy (load {load} on {machine['cores']} cores): trust the ratios more than the "
            "speeds.[/yellow]"
        )
