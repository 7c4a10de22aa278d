"""What a kernel needs, declared as data on the platform method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .errors import RegistrationError

if TYPE_CHECKING:
    from .decide import Facts

Method = TypeVar("Method", bound=Callable[..., Any])
Predicate = Callable[..., "str | None"]

_ATTRIBUTE = "__opmux_requires__"


@dataclass(frozen=True)
class Requirements:
    """Needs of one platform method. Everything but ``when`` is judged once per (device, dtype), off the hot path."""

    dtypes: tuple[torch.dtype, ...] | None = None
    native_library: bool = False
    isa: str | None = None
    triton: bool = False
    pallas: bool = False
    capability: tuple[int, int] | None = None
    when: Predicate | None = None
    differentiable: bool = False

    def refusal(self, facts: Facts) -> str | None:
        """The sentence that refuses these facts, or None. A fact that is not known refuses nothing."""
        if self.dtypes is not None and facts.dtype is not None and facts.dtype not in self.dtypes:
            names = ", ".join(_dtype_name(d) for d in self.dtypes)
            return f"takes {names}; the input is {_dtype_name(facts.dtype)}"
        if self.native_library and facts.native_library is not None:
            return f"needs the compiled CPU library: {facts.native_library}"
        if self.isa is not None and facts.isa is not None:
            wanted = [name.strip() for name in self.isa.split("|")]
            if not facts.isa.intersection(wanted):
                return (
                    f"needs {' or '.join(wanted)}; this processor has {', '.join(sorted(facts.isa)) or 'none of them'}"
                )
        if self.triton and facts.triton is not None:
            return f"needs Triton: {facts.triton}"
        if self.pallas and facts.pallas is not None:
            return f"needs JAX with Pallas: {facts.pallas}"
        if self.capability is not None and facts.capability is not None and facts.capability < self.capability:
            have, want = ".".join(map(str, facts.capability)), ".".join(map(str, self.capability))
            return f"needs compute capability {want}; the device has {have}"
        return None


NOTHING = Requirements()


def requires(
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    native_library: bool = False,
    isa: str | None = None,
    triton: bool = False,
    pallas: bool = False,
    capability: tuple[int, int] | None = None,
    when: Predicate | None = None,
    differentiable: bool = False,
) -> Callable[[Method], Method]:
    """Declare what a platform method needs. The dispatcher checks it, so the method's body may assume it.

    Args:
        dtypes: dtypes allowed for the op's lead tensor.
        native_library: the compiled CPU library must be loaded.
        isa: instruction sets of which one must be present, as ``"avx2 | neon"``.
        triton, pallas: the compiler must be importable.
        capability: the least compute capability ``(major, minor)``.
        when: called with the method's own arguments at every eager call; returns a sentence that refuses the call,
            or None. Keep it cheap.
        differentiable: the kernel declares a backward, so calls that need a gradient may use it.
    """
    if dtypes is not None and not (isinstance(dtypes, tuple) and all(isinstance(d, torch.dtype) for d in dtypes)):
        raise RegistrationError(f"@requires got dtypes={dtypes!r}; it takes a tuple of dtypes, as (torch.float32,).")
    if capability is not None and not (isinstance(capability, tuple) and len(capability) == 2):
        raise RegistrationError(f"@requires got capability={capability!r}; it takes (major, minor), as (8, 0).")
    if when is not None and not callable(when):
        raise RegistrationError(f"@requires got when={when!r}; it takes a function of the method's own arguments.")
    needs = Requirements(dtypes, native_library, isa, triton, pallas, capability, when, differentiable)

    def mark(method: Method) -> Method:
        setattr(method, _ATTRIBUTE, needs)
        return method

    return mark


def requirements_of(method: Callable[..., Any]) -> Requirements:
    """What ``method`` declared, or no requirements."""
    found: Requirements = getattr(method, _ATTRIBUTE, NOTHING)
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
