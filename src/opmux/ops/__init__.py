"""The catalogue. Every op class can be imported from here: ``from opmux.ops import RMSNorm``.

There is no list of ops: an op is a class registered in a module of a family folder, and ``load_all`` imports them all.
Op modules are light; kernels are imported when a call needs them.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

_exported: dict[str, Any] = {}
_loaded = False


def load_all() -> None:
    """Import every op module of every family."""
    global _loaded
    if _loaded:
        return
    for family in pkgutil.iter_modules(__path__):
        if not family.ispkg:
            continue
        package = importlib.import_module(f"{__name__}.{family.name}")
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith(("_", "kernels_")):
                _export(importlib.import_module(f"{package.__name__}.{module.name}"))
    _loaded = True


def _export(module: ModuleType) -> None:
    for name in getattr(module, "__all__", ()):
        _exported[name] = getattr(module, name)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    load_all()
    try:
        return _exported[name]
    except KeyError:
        raise AttributeError(f"opmux.ops has no {name!r}; it has {', '.join(sorted(_exported))}") from None


def __dir__() -> list[str]:
    load_all()
    return sorted(_exported)
