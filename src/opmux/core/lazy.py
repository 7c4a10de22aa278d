"""A module that is imported when it is first used, so that importing an op's file imports no kernel."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module; the first attribute read imports it and copies its namespace in."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        # Later reads find the names in the instance dictionary, at the cost of a plain module attribute.
        self.__dict__.update(vars(module))
        try:
            return vars(module)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def lazy_module(name: str) -> Any:
    """The module ``name``, imported on first use."""
    return LazyModule(name)
