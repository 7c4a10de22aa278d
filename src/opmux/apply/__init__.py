"""Putting opmux's ops into transformers models.

``opmux.apply`` is this package and the function at once: ``opmux.apply(model)`` calls it, ``from opmux.apply import
apply`` imports it. Python binds a submodule over an attribute of the same name when it imports it, so a plain function
called ``opmux.apply`` would be lost as soon as anybody imports ``opmux.apply.report``; a package that can be called
cannot be.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .report import Report
from .sharding import Sharding, shard
from .walk import NotAppliedError, NothingAppliedWarning, apply, unapply

__all__ = ["NotAppliedError", "NothingAppliedWarning", "Report", "Sharding", "apply", "shard", "unapply"]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return apply(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
