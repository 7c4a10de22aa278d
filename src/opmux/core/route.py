"""Where the calls of one object on one device and dtype go, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .decide import Decision
from .requires import requirements_of


class Route:
    """Where calls on one (device, dtype) go: the decision, its bound method, and what happened to the calls."""

    __slots__ = ("_refused_calls", "calls", "decision", "differentiable", "method", "when")

    def __init__(self, decision: Decision, method: Callable[..., Any], differentiable: bool) -> None:
        self.decision = decision
        self.method = method
        self.when = requirements_of(method).when
        self.differentiable = differentiable
        self.calls = 0
        self._refused_calls: Counter[str] = Counter()

    @property
    def refusals(self) -> Counter[str]:
        """Calls that a kernel could not take -> how many, by the sentence that says why."""
        counts = Counter(self._refused_calls)
        for rejected in self.decision.refused:
            counts[f"{rejected.candidate} {rejected.why}"] += self.calls
        return +counts

    def forget(self) -> None:
        """Begin counting anew."""
        self.calls = 0
        self._refused_calls.clear()

    def refuse(self, instead: Callable[..., Any], why: str) -> Callable[..., Any]:
        """Count a call that the kernel cannot take, with the sentence that says why, and pass on what runs instead."""
        self._refused_calls[why] += 1
        return instead
