"""What is verified: one method of one op on one case, in one dtype, from one seed."""

from __future__ import annotations

import inspect
import math
import shlex
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.cases import Case, Inputs
from .tensors import in_float64, tensors


@dataclass(frozen=True)
class Subject:
    """One method of one op on one case.

    Attributes:
        cls: the in-tree class, whose ``forward_native`` is the definition, also of an out-of-tree replacement.
        method: the platform method under test.
        options: words that the replaying command needs besides these, such as ``--platform cuda``.
    """

    cls: Any
    method: str
    case: Case
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    options: str = ""

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.dtype, self.device, self.seed)

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        """The op and the arguments of one call, made anew: bit for bit the same each time."""
        return self.case.build(self.cls, self.inputs), tuple(self.case.args(self.inputs))

    def reference(self) -> list[Tensor]:
        """The definition in float64 on the same inputs."""
        op, args = self.build()
        args = in_float64(args)
        with torch.no_grad():
            return self.results(self.cls.forward_native(op.double(), *args), args)

    def results(self, out: Any, args: tuple[Any, ...]) -> list[Tensor]:
        """What a call gave: its outputs, then the arguments that the op states it writes."""
        return [*tensors(out), *self.written(args)]

    def written(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Those of the arguments that the op states it writes."""
        names = list(inspect.signature(self.cls.forward_native).parameters)[1:]
        return [t for name, arg in zip(names, args, strict=False) if name in self.cls.mutates for t in tensors(arg)]

    def replay(self) -> str:
        """The command that verifies this subject alone."""
        name, dtype = shlex.quote(self.case.name), str(self.dtype).removeprefix("torch.")
        return (
            f"opmux verify {self.cls.name} --cases {name} --dtype {dtype} --seed {self.seed} --method {self.method}"
            f"{self.options}"
        )


def plain(value: Any) -> Any:
    """``value``, or its name where JSON has no such number (NaN, infinity)."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Element:
    """The first element that is wrong."""

    output: int
    index: tuple[int, ...]
    got: float
    want: float
    ulp: float

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"output {self.output}[{at}] is {self.got:.9g}, should be {self.want:.9g}: {self.ulp:.3g} ulp"


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong, and how to see it again."""

    subject: Subject
    check: str
    what: str
    element: Element | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        element = None if self.element is None else {k: plain(v) for k, v in vars(self.element).items()}
        return {
            "op": self.subject.cls.name,
            "method": self.subject.method,
            "case": self.subject.case.name,
            "dtype": str(self.subject.dtype).removeprefix("torch."),
            "seed": self.subject.seed,
            "check": self.check,
            "what": self.what,
            "element": element,
            "replay": self.subject.replay(),
        }


@dataclass
class Outcome:
    """What the checks of one subject found.

    Attributes:
        worst: the kernel's worst error in ulp, by the dtype of the output; ``native`` is the definition's own.
        refusal: the sentence with which the method refuses this call; then nothing else was checked.
    """

    worst: dict[torch.dtype, float] = field(default_factory=dict)
    native: dict[torch.dtype, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    refusal: str | None = None
