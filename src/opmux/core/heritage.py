"""What a process tells its children about its registrations, so that a loss is never silent (contract P4).

Registrations live in one process. A child started by spawn, forkserver or torchrun begins with the plugins' entry
points only; what a script registered by hand is not there. The parent therefore leaves the names of its replacements
in the environment, and a child that builds an op whose replacement it lacks says so once.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

VARIABLE = "OPMUX_PARENT_REGISTRATIONS"

_inherited: dict[str, str] = {}
_said: set[str] = set()


class MissingRegistrationWarning(UserWarning):
    """The parent process had an OOT replacement that this process lacks."""


def _read() -> dict[str, str]:
    try:
        record = json.loads(os.environ.get(VARIABLE, "{}"))
        return dict(record["replacements"]) if record.get("pid") != os.getpid() else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


_inherited.update(_read())


def publish(replacements: Mapping[str, Any]) -> None:
    """Record this process's replacements (and those it inherited knowledge of) for its children."""
    from .registry import origin

    record = {**_inherited, **{r.target: origin(r.cls) for r in replacements.values()}}
    if record:
        os.environ[VARIABLE] = json.dumps({"pid": os.getpid(), "replacements": record})
    else:
        os.environ.pop(VARIABLE, None)


def missing(class_name: str) -> str | None:
    """A sentence if the parent had a replacement for ``class_name`` that this process lacks."""
    had = _inherited.get(class_name)
    if had is None:
        return None
    return (
        f"the parent process had the OOT replacement {had} for {class_name}, this process does not: put the "
        "registration into a plugin (entry point 'opmux.general_plugins') so that every process makes it"
    )


def note(class_name: str) -> str | None:
    """Like ``missing``, and warns the first time."""
    sentence = missing(class_name)
    if sentence is not None and class_name not in _said:
        _said.add(class_name)
        warnings.warn(sentence[0].upper() + sentence[1:] + ".", MissingRegistrationWarning, stacklevel=4)
    return sentence
