"""What a command says: results on standard output, everything about the work on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape

from ..tools.progress import Progress

_LOG_WIDTH = 150


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say_error(text: str) -> None:
    """Why the command failed, on standard error."""
    _stderr().print(f"[bold red]error:[/bold red] {escape(text)}")


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning of Python (``warnings.showwarning``), as one line without the place in the source."""
    _stderr().print(f"[yellow]warning:[/yellow] {escape(str(message))}")


def say_nothing(*_: Any, **__: Any) -> None:
    """In place of ``say_warning`` in all but the first of several processes."""


class Output:
    """The two streams of a command. Under ``--json``, standard output gets one JSON document and nothing else.

    As a context manager it keeps stray prints of libraries off standard output under ``--json``.

    Args:
        speaks: False for all but one of the processes that run a command together: they say nothing.
    """

    def __init__(self, as_json: bool, speaks: bool = True) -> None:
        self.as_json = as_json
        self.speaks = speaks
        self._stdout = sys.stdout
        # In a file or a build log, 80 columns would fold every table.
        self.console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _LOG_WIDTH)
        self._notes = _stderr()
        self._redirect = contextlib.ExitStack()

    def __enter__(self) -> Output:
        if self.as_json or not self.speaks:
            self._redirect.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirect.close()

    def print(self, *renderables: RenderableType) -> None:
        """Show something to a person; nothing under ``--json``."""
        if self.speaks and not self.as_json:
            self.console.print(*renderables)

    def write(self, text: str) -> None:
        """Text of a model as it comes, with no markup and no wrapping; nothing under ``--json``."""
        if self.speaks and not self.as_json:
            self._stdout.write(text)
            self._stdout.flush()

    def json(self, document: Mapping[str, Any]) -> None:
        """The result for programs; nothing without ``--json``."""
        if self.speaks and self.as_json:
            self._stdout.write(json.dumps(document, indent=2, default=str) + "\n")
            self._stdout.flush()

    def note(self, text: str) -> None:
        """A line about the work, on standard error."""
        if self.speaks:
            self._notes.print(f"[dim]{escape(text)}[/dim]")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A ``Progress``: a bar on a terminal; elsewhere one line for each new thing that is being done."""
        if not self.speaks or not self._notes.is_terminal:
            yield self._lines()
            return
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Bars(*columns, console=self._notes, transient=True) as bars:
            task = bars.add_task("", total=None)

            def show(doing: str, fraction: float | None = None) -> None:
                total = None if fraction is None else 1.0
                bars.update(task, description=escape(doing), total=total, completed=fraction or 0.0)

            yield show

    def _lines(self) -> Progress:
        said: list[str] = []

        def show(doing: str, fraction: float | None = None) -> None:
            if said[-1:] != [doing]:
                said.append(doing)
                self.note(f"{doing} ...")

        return show
