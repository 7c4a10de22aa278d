"""How long work says where it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, "float | None"], None]
"""Called with what is being done and, where it is known, the fraction that is done (0 to 1)."""


def silent(doing: str, fraction: float | None = None) -> None:
    """Nobody listens."""
