"""The checks of one method on one case: its numbers, its memory, its repeat, its inputs, their layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.requires import requirements_of
from .guards import Guarded
from .subject import Element, Failure, Outcome, Subject
from .tensors import LAYOUTS, all_tensors, first_difference, mapped, same_bits, tensors, unravelled

LAYOUT_LIMIT = 400_000  # elements; layouts are a matter of addresses, which small inputs show


def check(subject: Subject) -> Outcome:
    """Everything that holds for one call, without gradients."""
    outcome = Outcome()
    op, args = subject.build()
    why_not = refusal(op, subject.method, args)
    if why_not is not None:
        outcome.refusal = why_not
        return outcome
    reference = subject.reference()
    method = getattr(op, subject.method)
    with torch.no_grad():
        native = subject.results(subject.cls.forward_native(op, *args), args)
        if subject.cls.mutates:
            op, args = subject.build()
            method = getattr(op, subject.method)
        outcome.native = _worst(subject, native, reference)
        outcome.failures += compare(subject, "native", native, reference, native)
        before = [t.clone() for t in all_tensors([*args, op])]
        out = _guarded(subject, outcome, lambda: subject.results(method(*args), args))
        if out is None:
            return outcome
        outcome.worst = _worst(subject, out, reference)
        wrong = compare(subject, "numbers", out, reference, native)
        outcome.failures += wrong
        _check_inputs(subject, outcome, op, args, before, out)
        _check_repeat(subject, outcome, out, op, args)
        if not wrong and sum(t.numel() for t in tensors(args)) <= LAYOUT_LIMIT:
            _check_layouts(subject, outcome, reference, native)
    return outcome


def refusal(op: Any, method: str, args: tuple[Any, ...]) -> str | None:
    """The sentence with which ``method`` refuses this very call, or None."""
    when = requirements_of(getattr(type(op), method)).when
    return None if when is None else when(op, *args)


def compare(
    subject: Subject, check: str, out: list[Tensor], reference: list[Tensor], native: list[Tensor]
) -> list[Failure]:
    """Number, dtypes and shapes as native's, every element within the op's tolerance of the reference."""
    if len(out) != len(reference):
        return [Failure(subject, check, f"{len(out)} outputs came, the definition gives {len(reference)}")]
    failures = []
    tolerance = subject.cls.tolerance
    for number, (got, want, like) in enumerate(zip(out, reference, native, strict=True)):
        if (got.shape, got.dtype, got.device) != (like.shape, like.dtype, like.device):
            found, wanted = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (got, like))
            failures.append(Failure(subject, check, f"output {number} is {found}, the definition's is {wanted}"))
            continue
        if got.numel() == 0:
            continue
        errors = tolerance.errors(got, want)
        bad = errors > tolerance.bound(got.dtype, subject.dtype)
        if not bool(bad.any()):
            continue
        index = unravelled(int(bad.flatten().nonzero()[0]), got.shape)
        element = Element(number, index, float(got[index]), float(want[index]), float(errors[index]))
        what = (
            f"{int(bad.sum())} of {got.numel()} elements of output {number} are outside the tolerance of "
            f"{tolerance.bound(got.dtype, subject.dtype):.4g} ulp, by up to {float(errors.max()):.3g} ulp"
        )
        failures.append(Failure(subject, check, what, element))
    return failures


def _worst(subject: Subject, out: list[Tensor], reference: list[Tensor]) -> dict[torch.dtype, float]:
    worst: dict[torch.dtype, float] = {}
    for got, want in zip(out, reference, strict=False):
        worst[got.dtype] = max(worst.get(got.dtype, 0.0), subject.cls.tolerance.worst(got, want))
    return worst


def _guarded(subject: Subject, outcome: Outcome, call: Callable[[], Any]) -> list[Tensor] | None:
    """The outputs of ``call`` from poisoned memory between guards; None, and a failure, if it raised."""
    memory = Guarded()
    try:
        with memory:
            out = tensors(call())
    except Exception as error:  # whatever a kernel raises is a finding
        outcome.failures.append(Failure(subject, "runs", f"it raised {type(error).__name__}: {error}"))
        return None
    damage = memory.damage()
    if damage is not None:
        outcome.failures.append(Failure(subject, "guards", damage))
    return out


def _check_inputs(
    subject: Subject, outcome: Outcome, op: Any, args: tuple[Any, ...], before: list[Tensor], out: list[Tensor]
) -> None:
    written = {id(t) for t in subject.written(args)}
    for number, (now, then) in enumerate(zip(all_tensors([*args, op]), before, strict=True)):
        if id(now) not in written and not same_bits(now, then):
            index = first_difference(now, then)
            outcome.failures.append(Failure(subject, "inputs", f"input {number} was written, first at {index}"))
    inputs = {t.untyped_storage().data_ptr() for t in tensors(args) if t.numel()}
    for number, tensor in enumerate(out):
        if id(tensor) not in written and tensor.numel() and tensor.untyped_storage().data_ptr() in inputs:
            outcome.failures.append(Failure(subject, "aliasing", f"output {number} shares an input's memory"))


def _check_repeat(subject: Subject, outcome: Outcome, out: list[Tensor], op: Any, args: tuple[Any, ...]) -> None:
    """Again, in plain memory, through the dispatcher where that is the way to the method: the same bits."""
    if subject.cls.mutates:
        op, args = subject.build()
    dispatched = op.decision(*args).method == subject.method
    again = subject.results(op(*args) if dispatched else getattr(op, subject.method)(*args), args)
    for number, (first, second) in enumerate(zip(out, again, strict=True)):
        if same_bits(first, second):
            continue
        index = first_difference(first, second)
        element = Element(number, index, float(second[index]), float(first[index]), float("nan"))
        outcome.failures.append(Failure(subject, "repeat", "a repeat run gave other bits", element))


def _check_layouts(subject: Subject, outcome: Outcome, reference: list[Tensor], native: list[Tensor]) -> None:
    """The same values strided, transposed and at odd addresses: the answer of the contiguous copy."""
    for name, layout in LAYOUTS.items():
        op, args = subject.build()
        moved = mapped(args, layout)
        if refusal(op, subject.method, moved) is not None:
            continue
        method = getattr(op, subject.method)
        out = _guarded(subject, outcome, lambda m=method, a=moved: subject.results(m(*a), a))  # type: ignore[misc]
        if out is not None:
            outcome.failures += compare(subject, f"{name} inputs", out, reference, native)
