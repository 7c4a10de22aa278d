"""Plugins found by entry points, loaded once a process before the first decision."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from . import registry
from .errors import PluginError, did_you_mean

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
_general_started = False
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
    global _general_started, _general_done
    if _general_done:
        return
    with _lock:  # other threads wait here until the registrations are made
        if _general_started:  # a plugin that registers an op looks names up, which comes back here
            return
        _general_started = True
        try:
            _warn_of_unknown_names()
            for _ in load_group(GENERAL_GROUP):
                pass
        except BaseException:
            _general_started = False
            raise
        _general_done = True


def load_group(group: str, check: Callable[[Any], None] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, what the entry point's callable returned)`` for each allowed plugin of a group.

    A plugin that raises, or whose result ``check`` raises for, is reported and skipped; under strict that is fatal.
    """
    points = {(p.name, p.value): p for p in entry_points(group=group)}  # a distribution may be found on two paths
    for point in sorted(points.values(), key=lambda p: p.name):
        if not allowed(point.name):
            _record(point, "not allowed", f"{ALLOW_VARIABLE}={os.environ.get(ALLOW_VARIABLE)}")
            continue
        try:
            with registry.all_or_nothing():
                result = point.load()()
            if check is not None:
                check(result)
        except Exception as error:
            _fail(point, error)
            continue
        _record(point, "loaded")
        yield point.name, result


def require_loaded() -> None:
    """Raise if a plugin failed to load: what a strict config asks for."""
    for record in _records.values():
        if record.status == "failed":
            raise PluginError(
                f"The opmux plugin {record.name!r} ({record.value}, group {record.group}) failed to load, and "
                f"strict=True is set: {record.detail}. Fix or uninstall it, or name the plugins to load in "
                f"{ALLOW_VARIABLE}."
            )


def _warn_of_unknown_names() -> None:
    asked = {item.strip() for item in os.environ.get(ALLOW_VARIABLE, "").split(",")} - {""}
    known = {p.name for group in (GENERAL_GROUP, PLATFORM_GROUP) for p in entry_points(group=group)}
    for name in sorted(asked - known):
        warnings.warn(
            f"{ALLOW_VARIABLE} names the plugin {name!r}, which is not installed. {did_you_mean(name, known)}",
            PluginWarning,
            stacklevel=4,
        )


def _fail(point: EntryPoint, error: Exception) -> None:
    sentence = f"{type(error).__name__}: {error}"
    _record(point, "failed", sentence)
    message = (
        f"The opmux plugin {point.name!r} ({point.value}, group {point.group}) failed to load and was skipped: "
        f"{sentence}. Fix or uninstall it, or name the plugins to load in {ALLOW_VARIABLE}."
    )
    if os.environ.get(STRICT_VARIABLE, "").lower() in ("1", "true", "yes"):
        raise PluginError(message.replace(" and was skipped", f" ({STRICT_VARIABLE} is set)")) from error
    warnings.warn(message, PluginWarning, stacklevel=2)


def _record(point: EntryPoint, status: str, detail: str = "") -> None:
    _records[(point.group, point.name)] = PluginRecord(point.name, point.group, point.value, status, detail)
