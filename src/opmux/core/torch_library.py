"""Kernels as opaque functional ops for ``torch.compile``; plain Python calls in eager code.

One library object lives as long as the process, so that no op disappears with the scope that defined it. The
registered implementation looks the body up by name at each call, so that a reloaded module takes effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .errors import RegistrationError

NAMESPACE = "opmux"

Function = TypeVar("Function", bound=Callable[..., Any])

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_bodies: dict[str, Callable[..., Any]] = {}
_fakes: dict[str, Callable[..., Any]] = {}
_definitions: dict[str, tuple[str, str]] = {}  # name -> (origin, schema)


def opaque(*, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a kernel function one opaque op while ``torch.compile`` traces, and a plain call otherwise.

    The function takes tensors and scalars, is fully annotated, mutates nothing and returns new tensors; ``fake`` takes
    the same arguments and returns empty tensors of the right shape, dtype and strides. Going through the dispatcher
    costs 3-5 us a call, so eager code does not.
    """

    def wrap(function: Function) -> Function:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=(), op_name=name)
        _define(name, schema, f"{function.__module__}.{function.__qualname__}", function, fake)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        compiling = torch.compiler.is_compiling

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if compiling():
                return op(*args)
            return function(*args)

        return call  # type: ignore[return-value]

    return wrap


def defined() -> dict[str, str]:
    """Every op that was defined -> its schema."""
    return {name: schema for name, (_, schema) in _definitions.items()}


def _define(name: str, schema: str, origin: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    known = _definitions.get(name)
    if known is not None and known != (origin, schema):
        raise RegistrationError(
            f"The kernel name {NAMESPACE}::{name} is taken by {known[0]} ({known[1]}); {origin} ({schema}) needs "
            "another function name."
        )
    _bodies[name], _fakes[name] = body, fake
    if known is not None:
        return
    _definitions[name] = (origin, schema)
    _library.define(schema)
    _library.impl(name, lambda *args: _bodies[name](*args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: _fakes[name](*args), lib=_library)
