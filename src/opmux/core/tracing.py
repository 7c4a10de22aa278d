"""What a ``CustomOp`` asks while ``torch.compile`` traces it: functions of constants, evaluated once and not traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import platforms
from .decide import NATIVE, Decision, Verdict, decide
from .lineage import lineage_of

Function = TypeVar("Function", bound=Callable[..., Any])

# The compiler takes strings for constants, not classes.
classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def constant(function: Function) -> Function:
    """Have the compiler call ``function`` instead of tracing it: ``torch.compiler.assume_constant_result``.

    That one imports the compiler and Triton, seconds of work that eager code does not need.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def decision(class_key: str, enabled: bool, device_type: str, dtype: torch.dtype) -> Decision:
    """The decision for traced code. Takes constants only, as the compiler demands."""
    facts = platforms.facts_for(torch.device(device_type), dtype, None)
    verdict = Verdict(enabled, "as decided at construction", "constructor")
    return decide(lineage_of(classes[class_key], built=0), facts, verdict)


@constant
def methods_to_try(
    class_key: str, enabled: bool, device_type: str, dtype: torch.dtype
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """The first kernel that refuses, and why; the platform methods to try. Constants in, constants out."""
    made = decision(class_key, enabled, device_type, dtype)
    refused = (made.refused[0].candidate, made.refused[0].why) if made.refused else None
    return refused, tuple(m for m in (made.method, *made.fallbacks) if m not in (None, NATIVE))
