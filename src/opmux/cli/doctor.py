"""Check this installation: versions, platform, kernels, plugins, folders; each problem with its remedy.

The exit code is 1 if a problem was found that makes opmux slower or do less than it was installed for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from . import tables

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .output import Output


def add_arguments(parser: ArgumentParser) -> None:
    """``opmux doctor`` has no options of its own."""


def run(args: Namespace, output: Output) -> int:
    """Examine, print."""
    with output.progress() as progress:
        progress("Looking at the installation", None)
        from ..tools.health import examine

        health = examine()
    output.json({**health.to_dict(), "config": args.compilation_config.to_dict()})
    table = tables.plain("", "", "")
    table.show_header = False
    for section, facts in health.facts.items():
        for index, (name, value) in enumerate(facts.items()):
            table.add_row(f"[bold]{section}[/bold]" if index == 0 else "", escape(name), escape(value))
    output.print(table)
    for problem in health.problems:
        mark = "[bold red]problem[/bold red]" if problem.serious else "[yellow]note[/yellow]"
        output.print(f"{mark}: {escape(problem.what)}.\n  [bold]remedy:[/bold] {escape(problem.remedy)}")
    if health.sound:
        output.print("[green]No serious problem was found.[/green]")
    return 0 if health.sound else 1
