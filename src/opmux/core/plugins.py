"""Plugins found by entry points, loaded once a process before the first decision."""

from __future__ import annotations

import importlib
import os
import threading
import time
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

API_VERSION = 1  # goes up when a plugin written for the one before would no longer work
API_ATTRIBUTE = "OPMUX_API"


class PluginWarning(UserWarning):
    """A plugin failed to load and was skipped."""


@dataclass(frozen=True)
class PluginRecord:
    """What became of one entry point in this process.

    Attributes:
        status: "loaded", "failed" or "not allowed".
        api: the version of the interface that its module declares as ``OPMUX_API``.
        registered: the classes that it registered, in the tree or out of it.
        took_s: to import and call it.
    """

    name: str
    group: str
    value: str
    status: str
    detail: str = ""
    distribution: str = ""
    api: int | None = None
    registered: tuple[type, ...] = ()
    took_s: float = 0.0


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
        started = time.perf_counter()
        try:
            with registry.all_or_nothing(), registry.watching() as registered:
                function, api = _import(point)
                result = function()
            if check is not None:
                check(result)
        except Exception as error:
            _fail(point, error)
            continue
        took_s = time.perf_counter() - started
        # A plugin that imports from opmux.ops may be the first to do so; the catalogue is not its own.
        own = tuple(cls for cls in dict.fromkeys(registered) if not cls.__module__.startswith("opmux."))
        _record(point, "loaded", api=api, registered=own, took_s=took_s)
        yield point.name, result


def _import(point: EntryPoint) -> tuple[Callable[[], Any], int | None]:
    """The callable that an entry point names, and the version that its module declares.

    Raises:
        PluginError: the module was written for another version of the interface.
    """
    package = point.module.partition(".")[0]
    # The package first: it may say which version it is for although the module itself no longer imports.
    api = None
    for name in dict.fromkeys((package, point.module)):
        api = getattr(importlib.import_module(name), API_ATTRIBUTE, api)
        if api not in (None, API_VERSION):
            what = "a newer opmux" if isinstance(api, int) and api > API_VERSION else "a newer version of the plugin"
            raise PluginError(
                f"{name} declares {API_ATTRIBUTE} = {api!r}, and this opmux has version {API_VERSION} of the plugin "
                f"interface. Install {what}, or the pair of versions that its maker names"
            )
    return point.load(), api


def registered_by(name: str) -> list[type]:
    """The classes that the plugin ``name`` registered in this process.

    Raises:
        PluginError: it is not installed, was not loaded, or registered nothing.
    """
    load_general_plugins()
    known = {record.name: record for record in _records.values() if record.group == GENERAL_GROUP}
    if name not in known:
        raise PluginError(
            f"There is no plugin {name!r} in the group {GENERAL_GROUP}. {did_you_mean(name, known)} The name is that of "
            "the entry point, which is there once its package is installed."
        )
    record = known[name]
    if record.status != "loaded":
        raise PluginError(f"The plugin {name!r} ({record.value}) is {record.status}: {record.detail}")
    if not record.registered:
        raise PluginError(f"The plugin {name!r} ({record.value}) was loaded and registered no op.")
    return list(record.registered)


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
    asks = _asks_for(point)
    if asks and not isinstance(error, PluginError):
        sentence += f" ({asks})"
    _record(point, "failed", sentence)
    message = (
        f"The opmux plugin {point.name!r} ({point.value}, group {point.group}) failed to load and was skipped: "
        f"{sentence}. Fix or uninstall it, or name the plugins to load in {ALLOW_VARIABLE}."
    )
    if os.environ.get(STRICT_VARIABLE, "").lower() in ("1", "true", "yes"):
        raise PluginError(message.replace(" and was skipped", f" ({STRICT_VARIABLE} is set)")) from error
    warnings.warn(message, PluginWarning, stacklevel=2)


def _asks_for(point: EntryPoint) -> str:
    """Which opmux the plugin's package wants, by its metadata: what breaks at import is often of another version."""
    from .. import __version__

    if point.dist is None:
        return ""
    wanted = [r for r in point.dist.requires or () if r.partition(";")[0].strip().startswith("opmux")]
    return f"{_described(point)} asks for {wanted[0]}; this is opmux {__version__}" if wanted else ""


def _described(point: EntryPoint) -> str:
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _record(point: EntryPoint, status: str, detail: str = "", **more: Any) -> None:
    record = PluginRecord(point.name, point.group, point.value, status, detail, _described(point), **more)
    _records[(point.group, point.name)] = record
