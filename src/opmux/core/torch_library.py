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

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_bodies: dict[str, Callable[..., Any]] = {}
_fakes: dict[str, Callable[..., Any]] = {}
_definitions: dict[str, tuple[str, str, str]] = {}  # name -> (function and file, schema, place for messages)


def opaque(*, fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Make a kernel function one opaque op while torch traces or watches, and a plain call otherwise.

    The function takes tensors and scalars, is fully annotated, mutates nothing but the arguments that ``mutates`` names
    (states kept between calls), and returns new tensors; ``fake`` takes the same arguments and returns empty tensors of
    the right shape, dtype and strides. Going through the dispatcher costs 3-5 us a call, so eager code does not.
    """

    def wrap(function: Function) -> Function:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates, op_name=name)
        _define(name, schema, function, fake)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        compiling = torch.compiler.is_compiling
        watchers = torch._C._len_torch_dispatch_stack  # make_fx, FakeTensorMode, FlopCounterMode: they must see the op

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if compiling() or watchers():
                return op(*args)
            return function(*args)

        return call  # type: ignore[return-value]

    return wrap


def defined() -> dict[str, str]:
    """Every op that was defined -> its schema."""
    return {name: schema for name, (_, schema, _) in _definitions.items()}


def _define(name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    code = body.__code__
    # The file, not the module: a file that is imported under two names defines the same kernels twice.
    identity = (f"{body.__qualname__} in {code.co_filename}", schema)
    known = _definitions.get(name)
    if known is not None and known[:2] != identity:
        raise RegistrationError(
            f"The kernel name {NAMESPACE}::{name} is taken by {known[2]} ({known[1]}); {_place(body)} ({schema}) needs "
            "another function name."
        )
    _bodies[name], _fakes[name] = body, fake
    _definitions[name] = (*identity, _place(body))
    if known is None:
        _library.define(schema)  # type: ignore[no-untyped-call]
        implementation = "CompositeExplicitAutograd"
        _library.impl(name, lambda *args: _bodies[name](*args), implementation)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: _fakes[name](*args), lib=_library)


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__} (line {function.__code__.co_firstlineno})"
