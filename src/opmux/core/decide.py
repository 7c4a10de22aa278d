"""The decision: which class and method serve an op here, and why.

``decide`` is pure: facts in, a ``Decision`` out. Everything that reports a decision or acts on one - the dispatch
itself, ``explain``, ``list``, the report of ``apply``, the counters - reads the record that this function made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .registry import implemented
from .requires import requirements_of

if TYPE_CHECKING:
    import torch

NATIVE = "forward_native"
NO_BACKWARD = "has no backward, and an input needs a gradient"

CHAINS: dict[str, tuple[str, ...]] = {
    "cpu": ("forward_cpu", NATIVE),
    "cuda": ("forward_cuda", NATIVE),
    "rocm": ("forward_hip", "forward_cuda", NATIVE),
    "xpu": ("forward_xpu", NATIVE),
    "tpu": ("forward_tpu", NATIVE),
    "oot": ("forward_oot", NATIVE),
    "meta": (NATIVE,),
    "wrapped": (NATIVE,),  # tensor subclasses without memory of their own
}


@dataclass(frozen=True)
class Facts:
    """What is known of the place where the op would run. ``None`` means not known (or, for the three tools, fine)."""

    platform: str
    kind: str  # key of CHAINS: a vendor's platform is of kind "oot" whatever its name
    device_type: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    isa: frozenset[str] | None = None
    capability: tuple[int, int] | None = None
    native_library: str | None = None  # why the compiled library is missing
    triton: str | None = None  # why Triton is missing
    pallas: str | None = None  # why Pallas is missing


@dataclass(frozen=True)
class Lineage:
    """Which class was asked for, which one serves, and why that one."""

    asked: type
    chosen: type
    replacement: bool
    why: str


@dataclass(frozen=True)
class Verdict:
    """Whether the directives enable an op, the sentence for it, and where the setting came from."""

    enabled: bool
    why: str
    source: str


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, and the sentence that says why."""

    candidate: str
    why: str


@dataclass(frozen=True)
class Decision:
    """The record of one decision. ``method`` is None when nothing implements the op here."""

    op: str
    asked: str
    cls: str
    method: str | None
    defined_by: str | None
    provider: str
    enabled: bool
    why: str
    class_why: str
    directive: str
    directive_source: str
    platform: str
    device_type: str
    dtype: str | None
    rejected: tuple[Rejected, ...]
    fallbacks: tuple[str, ...]
    refused: tuple[Rejected, ...] = ()  # kernels that come earlier, and what they need that is not there
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.platform} ({self.device_type}{', ' + self.dtype if self.dtype else ''})"
        lines = [f"{self.op} on {where}: {self.cls}.{self.method or 'nothing'}", f"  why: {self.why}"]
        lines.append(f"  class: {self.class_why}")
        lines.append(f"  directives: {self.directive} ({self.directive_source})")
        lines.extend(f"  not {r.candidate}: {r.why}" for r in self.rejected)
        lines.extend(f"  note: {n}" for n in self.notes)
        return "\n".join(lines)


def chain_for(lineage: Lineage, kind: str) -> tuple[str, ...]:
    """The methods to try, in order. A replacement's own ``forward_oot`` comes first on every platform."""
    chain = CHAINS[kind]
    if lineage.replacement and implemented(lineage.chosen, "forward_oot") and kind not in ("oot", "meta", "wrapped"):
        return ("forward_oot", *chain)
    return chain


def decide(
    lineage: Lineage,
    facts: Facts,
    verdict: Verdict,
    *,
    enforce_enable: bool = False,
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    needs_grad: bool = False,
    notes: tuple[str, ...] = (),
) -> Decision:
    """Choose the method that serves ``lineage.chosen`` under ``facts`` and ``verdict``.

    Args:
        lineage: the class that was asked for and the one that serves.
        facts: platform, device, dtype and tools.
        verdict: what the directives in force say about the op.
        enforce_enable: the object was built with ``enforce_enable=True``.
        call: bound ``self`` and arguments of one call, for the requirements that look at the call itself.
        needs_grad: the call needs a gradient, which native has, and a kernel only if it declares so.
        notes: further sentences for the record.
    """
    cls = lineage.chosen
    enabled = enforce_enable or verdict.enabled
    directive = "enforce_enable=True at construction, whatever the directives say" if enforce_enable else verdict.why
    chain = chain_for(lineage, facts.kind)
    rejected: list[Rejected] = []
    refused: list[Rejected] = []
    usable: list[str] = []
    for method in chain:
        why_not = _missing(cls, method, enabled, directive)
        if why_not is None and method != NATIVE:
            why_not = _refusal(cls, method, facts, call, needs_grad)
            if why_not is not None and not usable:
                refused.append(Rejected(method, why_not))
        if why_not is None and usable:
            why_not = f"{usable[0]} comes first in the chain and takes the call"
            usable.append(method)
        elif why_not is None:
            usable.append(method)
            continue
        rejected.append(Rejected(method, why_not))
    chosen = usable[0] if usable else None
    return Decision(
        op=getattr(cls, "name", cls.__name__),
        asked=lineage.asked.__qualname__,
        cls=cls.__qualname__,
        method=chosen,
        defined_by=_owner(cls, chosen),
        provider=cls.__module__.partition(".")[0],
        enabled=enabled,
        why=_why(cls, chosen, rejected, facts, enabled, directive),
        class_why=lineage.why,
        directive=directive,
        directive_source="constructor" if enforce_enable else verdict.source,
        platform=facts.platform,
        device_type=facts.device_type,
        dtype=None if facts.dtype is None else str(facts.dtype).removeprefix("torch."),
        rejected=tuple(rejected),
        fallbacks=tuple(usable[1:]),
        refused=tuple(refused),
        notes=notes,
    )


def _missing(cls: type, method: str, enabled: bool, directive: str) -> str | None:
    if not implemented(cls, method):
        return f"{cls.__qualname__} defines no {method}"
    if method != NATIVE and not enabled:
        return f"the op is disabled: {directive}"
    return None


def _refusal(
    cls: type, method: str, facts: Facts, call: tuple[tuple[Any, ...], dict[str, Any]] | None, needs_grad: bool
) -> str | None:
    function: Callable[..., Any] = getattr(cls, method)
    needs = requirements_of(function)
    refusal = needs.refusal(facts)
    if refusal is None and needs_grad and not needs.differentiable:
        refusal = NO_BACKWARD
    if refusal is None and needs.when is not None and call is not None:
        refusal = needs.when(*call[0], **call[1])
    return refusal


def _owner(cls: type, method: str | None) -> str | None:
    if method is None:
        return None
    return next((c.__qualname__ for c in cls.__mro__ if method in c.__dict__), None)


def _why(cls: type, chosen: str | None, rejected: list[Rejected], facts: Facts, enabled: bool, directive: str) -> str:
    if chosen is None:
        return f"no method of its chain can run ({'; '.join(f'{r.candidate}: {r.why}' for r in rejected)})"
    if facts.kind == "wrapped":
        return (
            "a tensor subclass without memory of its own (FakeTensor, DTensor) is given, so the definition runs on it"
        )
    if facts.kind == "meta":
        return "meta tensors hold no data, so the definition gives their shape and dtype"
    if not enabled:
        return f"the op is disabled ({directive}), so its definition runs"
    if chosen == NATIVE:
        return f"no kernel of {cls.__qualname__} can serve {facts.platform} here, so its definition runs"
    if chosen == "forward_oot" and facts.kind != "oot":
        return f"{cls.__qualname__} is an out-of-tree replacement that defines forward_oot, used on every platform"
    return (
        f"the op is enabled ({directive}) and {chosen} is the first method of the {facts.platform} chain that can run"
    )
