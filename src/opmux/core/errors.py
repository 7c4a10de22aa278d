"""Every exception opmux raises. A message says what was asked, what exists, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OpmuxError(Exception):
    """Base of all opmux errors."""


class RegistrationError(OpmuxError, ValueError):
    """A class may not be registered as asked: duplicate name, wrong base, unknown target, narrower signature."""


class DirectiveError(OpmuxError, ValueError):
    """An entry of ``custom_ops`` is malformed, contradicts another one, or names an op that does not exist."""


class ConfigError(OpmuxError, ValueError):
    """A configuration value is not of the form that the field takes."""


class DeviceMismatchError(OpmuxError, ValueError):
    """The tensors of one call lie on two devices."""


class KernelRefusedError(OpmuxError, RuntimeError):
    """Under ``strict`` the kernel that was decided on cannot take this call."""


class HardwareMissingError(OpmuxError, RuntimeError):
    """A kernel was to run on hardware (or with a compiler) that this process does not have."""


class PlatformError(OpmuxError, RuntimeError):
    """The platform is unknown, or several plugins claim this machine."""


class PluginError(OpmuxError, RuntimeError):
    """A plugin could not be loaded and ``strict`` was asked for."""


class ModelError(OpmuxError, ValueError):
    """What was named as a model is none, is damaged, or cannot take the prompt."""


class CacheError(OpmuxError, RuntimeError):
    """The cache folder cannot be written."""


class UsageError(OpmuxError, ValueError):
    """A command was called with an option or a value that it does not take."""


def nearest(name: object, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that ``name`` was probably meant to be, best first."""
    by_key = {k.lower().replace("-", "_"): k for k in known}
    keys = difflib.get_close_matches(str(name).lower().replace("-", "_"), by_key, n=limit, cutoff=0.6)
    return [by_key[k] for k in keys]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence with the nearest known names, or with all of them when nothing is near and they are few."""
    known = list(known)
    near = nearest(name, known)
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    if len(known) <= 12:
        return f"Known: {', '.join(sorted(known)) or 'none'}."
    return "`opmux list` shows every name."
