"""opmux: one op, every backend.

The public names are imported when they are first used, so that ``import opmux`` loads no kernel and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core import registry as _registry

if TYPE_CHECKING:
    from .apply import apply, unapply
    from .core.config import CompilationConfig, CompilationMode, use_config
    from .core.custom_op import CustomOp
    from .core.explain import explain
    from .core.registry import oot_scope
    from .warmup import warm_up

__version__ = "0.1.0"

_registry.add_catalogue("opmux.ops")

_HOMES = {
    "CompilationConfig": "core.config",
    "CompilationMode": "core.config",
    "CustomOp": "core.custom_op",
    "apply": "apply",
    "explain": "core.explain",
    "oot_scope": "core.registry",
    "unapply": "apply",
    "use_config": "core.config",
    "warm_up": "warmup",
}

__all__ = ["__version__", "current_platform", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "current_platform":  # asked anew each time: OPMUX_PLATFORM may have changed
        return importlib.import_module("opmux.platforms").current().platform
    if name not in _HOMES:
        raise AttributeError(f"module 'opmux' has no attribute {name!r}")
    home = importlib.import_module(f"opmux.{_HOMES[name]}")
    value = home if name == _HOMES[name] else getattr(home, name)  # the package opmux.apply is the function, too
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
