"""Which class serves where an op is asked for: the class itself, or its out-of-tree replacement, and why."""

from __future__ import annotations

from . import heritage, registry
from .decide import Lineage


def lineage_of(cls: type, built: int | None = None) -> Lineage:
    """Which class serves where ``cls`` is asked for; ``built`` is the serial of an object that exists already."""
    replacement = registry.replacement_of(cls)
    if replacement is not None and built is None:
        return Lineage(
            cls,
            replacement.cls,
            True,
            f"{registry.origin(replacement.cls)} {replacement.how} in place of {cls.__name__}",
        )
    if replacement is not None and built is not None and built < replacement.serial:
        return Lineage(
            cls, cls, False, f"built before {registry.origin(replacement.cls)} was registered for {cls.__name__}"
        )
    if replacement is not None:
        return Lineage(
            cls,
            cls,
            False,
            f"built or loaded as {cls.__name__}, where {registry.origin(replacement.cls)} did not replace it",
        )
    if registry.is_replacement(cls):
        return Lineage(cls, cls, True, f"{registry.origin(cls)} is an out-of-tree replacement")
    for parent in cls.__mro__[1:]:
        over = registry.replacement_of(parent)
        if over is not None:
            return Lineage(
                cls,
                cls,
                False,
                f"{cls.__qualname__} has no replacement; its parent {parent.__qualname__} has "
                f"{registry.origin(over.cls)}, which serves that class only",
            )
    lost = heritage.note(cls)
    if lost is not None:
        return Lineage(cls, cls, False, lost)
    return Lineage(cls, cls, False, f"{cls.__qualname__} is the in-tree class and has no replacement")
