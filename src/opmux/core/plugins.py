"""Plugins found by entry points, loaded once a process before the first decision (contract P2)."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import PluginError

GENERAL_GROUP = "opmux.general_plugins"
PLATFORM_GROUP = "opmux.platform_plugins"
ALLOW_VARIABLE = "OPMUX_PLUGINS"
STRICT_VARIABLE = "OPMUX_STRICT_PLUGINS"


class PluginWarning(UserWarning):
    """A plugin failed to load and was skipped."""


@dataclass(frozen=True)
class PluginRecord:
    """What became of one entry point in this process."""

    name: str
    group: str
    value: str
    status: str  # "loaded", "failed" or "not allowed"
    detail: str = ""


_lock = threading.RLock()
_records: dict[tuple[str, str], PluginRecord] = {}
_general_done = False


def records() -> list[PluginRecord]:
    """Every entry point seen so far and what became of it."""
    return list(_records.values())


def allowed(name: str) -> bool:
    """Whether ``OPMUX_PLUGINS`` (a comma-joined list; unset allows all, empty allows none) admits a plugin."""
    value = os.environ.get(ALLOW_VARIABLE)
    return value is None or name in [item.strip() for item in value.split(",")]


def load_general_plugins() -> None:
    """Call every allowed plugin of the group ``opmux.general_plugins``. Later calls do nothing."""
    global _general_done
    if _general_done:
        return
    with _lock:
        if _general_done:
            return
        # Set first: a plugin that registers an op looks names up, which comes back here.
        _general_done = True
        for _ in load_group(GENERAL_GROUP):
            pass


def load_group(group: str) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, what the entry point's callable returned)`` for each allowed plugin of a group."""
    for point in sorted(entry_points(group=group), key=lambda p: p.name):
        if not allowed(point.name):
            _record(point, "not allowed", f"{ALLOW_VARIABLE}={os.environ.get(ALLOW_VARIABLE)}")
            continue
        try:
            result = point.load()()
        except Exception as error:
            _fail(point, error)
            continue
        _record(point, "loaded")
        yield point.name, result


def _fail(point: EntryPoint, error: Exception) -> None:
    sentence = f"{type(error).__name__}: {error}"
    _record(point, "failed", sentence)
    message = (
        f"The opmux plugin {point.name!r} ({point.value}, group {point.group}) failed to load and was skipped: {sentence}. "
        f"Fix or uninstall it, or name the plugins to load in {ALLOW_VARIABLE}."
    )
    if os.environ.get(STRICT_VARIABLE, "").lower() in ("1", "true", "yes"):
        raise PluginError(message.replace(" and was skipped", f" ({STRICT_VARIABLE} is set)")) from error
    warnings.warn(message, PluginWarning, stacklevel=2)


def _record(point: EntryPoint, status: str, detail: str = "") -> None:
    _records[(point.group, point.name)] = PluginRecord(point.name, point.group, point.value, status, detail)
