"""Out-of-tree replacements of one model, or of a part of it: the argument ``oot`` of ``apply``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core import registry
from ..core.errors import RegistrationError, UsageError, did_you_mean

Choice = type | None
Oot = Mapping[str | type, Choice | Mapping[str, Choice]]


class Replacements:
    """Which class stands for an op in which part of a model.

    Args:
        oot: op (registered name, class name or class) -> its replacement, None for the op's own class, or a mapping from
            prefixes of module paths to either. The longest prefix decides; what no prefix covers is as registered.
        paths: of the model's modules.

    Attributes:
        places: in-tree class -> prefix -> what is built there.
    """

    def __init__(self, oot: Oot | None, paths: Iterable[str]) -> None:
        self.places: dict[type, dict[str, Choice]] = {}
        paths = set(paths)
        for target, choice in (oot or {}).items():
            in_tree = target if isinstance(target, type) else registry.find(target)
            places = dict(choice) if isinstance(choice, Mapping) else {"": choice}
            self.places[in_tree] = {_checked(prefix, paths): _class(in_tree, cls) for prefix, cls in places.items()}
        for in_tree, places in self.places.items():
            for cls in places.values():
                with registry.replacing({in_tree: cls}):  # refuses what does not fit, before anything is replaced
                    pass

    def at(self, path: str) -> dict[type, Choice]:
        """In-tree class -> what is built for it in the module at ``path``, where ``oot`` says anything about it."""
        found = {}
        for in_tree, places in self.places.items():
            covering = [prefix for prefix in places if prefix == "" or f"{path}.".startswith(f"{prefix}.")]
            if covering:
                found[in_tree] = places[max(covering, key=len)]
        return found


def _class(in_tree: type, choice: Any) -> Choice:
    if choice is None or isinstance(choice, type):
        return choice
    raise RegistrationError(
        f"oot got {choice!r} for {in_tree.__name__}; it takes a class, None for the op's own class, or a mapping from "
        "prefixes of module paths to these: oot={'RMSNorm': {'model.layers': VendorNorm}}."
    )


def _checked(prefix: str, paths: set[str]) -> str:
    if prefix not in paths:
        raise UsageError(f"oot names the module {prefix!r}, which this model does not have. {did_you_mean(prefix, paths)}")
    return prefix
