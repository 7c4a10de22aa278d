"""What a process tells its children about its registrations, so that a loss is never silent.

Registrations live in one process. A child started by spawn, forkserver or torchrun begins with the plugins' entry
points only; what a script registered by hand is not there. The parent therefore leaves the names of its replacements
in the environment and in every pickled config, and a child that builds an op whose replacement it lacks says so once.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

VARIABLE = "OPMUX_PARENT_REGISTRATIONS"

_process = uuid.uuid4().hex  # a forked child keeps it, with the registrations
_own: dict[str, str] = {}
_inherited: dict[str, str] = {}
_said: set[str] = set()


class MissingRegistrationWarning(UserWarning):
    """The parent process had an OOT replacement that this process lacks."""


def publish(replacements: Mapping[str, Any]) -> None:
    """Record this process's replacements (and those it inherited knowledge of) for its children."""
    from .registry import origin

    _own.clear()
    _own.update({_spawned(target): origin(r.cls) for target, r in replacements.items()})
    known = {**_inherited, **_own}
    if known:
        os.environ[VARIABLE] = json.dumps(known)
    else:
        os.environ.pop(VARIABLE, None)


def testament() -> dict[str, Any]:
    """What a pickled config takes along, for workers whose environment was cleaned."""
    return {"process": _process, "replacements": {**_inherited, **_own}}


def inherit(record: Mapping[str, Any]) -> None:
    """Take in the ``testament`` of another process."""
    if record["process"] != _process:
        _inherited.update(record["replacements"])


def _spawned(origin: str) -> str:
    """The origin as a spawned child names it: the main script is ``__mp_main__`` there."""
    return "__main__" + origin.removeprefix("__mp_main__") if origin.startswith("__mp_main__.") else origin


def _read() -> None:
    with contextlib.suppress(ValueError, TypeError):  # somebody else's value: nothing to say
        _inherited.update({str(k): str(v) for k, v in dict(json.loads(os.environ.get(VARIABLE, "{}"))).items()})


_read()


def missing(cls: type) -> str | None:
    """A sentence if the parent had a replacement for ``cls`` that this process lacks."""
    from .registry import origin

    had = _inherited.get(_spawned(origin(cls)))
    if had is None:
        return None
    return (
        f"the parent process had the OOT replacement {had} for {cls.__name__}, this process does not: put the "
        "registration into a plugin (entry point 'opmux.general_plugins') so that every process makes it"
    )


def note(cls: type) -> str | None:
    """Like ``missing``, and warns the first time."""
    sentence = missing(cls)
    if sentence is not None and sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence[0].upper() + sentence[1:] + ".", MissingRegistrationWarning, stacklevel=3)
    return sentence
