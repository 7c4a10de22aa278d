"""``verify``: every method that can run here, on every case of its op, against the definition in float64."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import platforms
from ..core import registry
from ..core.cases import FLOATS, Case
from ..core.decide import NATIVE, chain_for
from ..core.errors import UsageError, did_you_mean
from ..core.lineage import lineage_of
from ..core.requires import requirements_of
from ..platforms.interface import triton_interprets
from ..tools.progress import Progress, silent
from .checks import check
from .checks_once import check_compiled, check_gradients, check_operators
from .sizes import INTERPRETED, QUICK, elements, fitting, typical_case
from .subject import Failure, Outcome, Subject, plain

# The interpreter truncates where hardware rounds to bf16, and multiplies bf16 blocks as integers.
INTERPRETED_DTYPES = (torch.float32, torch.float16)


@dataclass(frozen=True)
class Plan:
    """What is verified.

    Attributes:
        ops: registered or class names; empty means all.
        platform: whose methods; None means this machine's.
        dtypes: of the inputs; None means fp32, fp16 and bf16 (without bf16 in Triton's interpreter).
        cases: part of the cases' names, or the whole name of one; None means all.
        method: one platform method only.
        quick: small cases only.
        seed: of the inputs.
    """

    ops: Sequence[str] = ()
    platform: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    cases: str | None = None
    method: str | None = None
    quick: bool = False
    seed: int = 0


@dataclass
class Errors:
    """The worst errors in ulp of outputs of one dtype, over the cases; ``native`` is the definition's own."""

    tolerance: float
    worst: float = 0.0
    native: float = 0.0

    @property
    def share(self) -> float:
        """The part of the tolerance that is used."""
        return self.worst / self.tolerance if self.tolerance else float("inf") if self.worst else 0.0


@dataclass
class Row:
    """What was found of one method of one op in one input dtype.

    Attributes:
        cases: how many were checked; 0 with a reason in ``why_not``.
        errors: dtype of an output -> its worst errors.
    """

    op: str
    method: str
    dtype: torch.dtype | None = None
    cases: int = 0
    errors: dict[torch.dtype, Errors] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    why_not: str | None = None

    def add(self, outcome: Outcome, subject: Subject) -> None:
        """Count what the checks of one more case found."""
        self.failures += outcome.failures
        if outcome.refusal is not None:
            self.skipped[f"refused: {outcome.refusal}"] += 1
            return
        self.cases += 1
        for dtype, worst in outcome.worst.items():
            errors = self.errors.setdefault(dtype, Errors(subject.cls.tolerance.bound(dtype, subject.dtype)))
            errors.worst = max(errors.worst, worst)
            errors.native = max(errors.native, outcome.native.get(dtype, 0.0))

    @property
    def nearest(self) -> Errors:
        """The errors that come nearest to their bound."""
        return max(self.errors.values(), key=lambda errors: errors.share, default=Errors(0.0))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "op": self.op,
            "method": self.method,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "cases": self.cases,
            "worst_ulp": plain(self.nearest.worst),
            "tolerance_ulp": self.nearest.tolerance,
            "native_worst_ulp": plain(self.nearest.native),
            "passed": not self.failures,
            "skipped": dict(self.skipped),
            "why_not": self.why_not,
            "failures": [f.to_dict() for f in self.failures],
        }


@dataclass
class Report:
    """Every row, where it was found, and how long it took."""

    platform: str
    device: str
    interpreted: bool
    seed: int
    rows: list[Row] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def failures(self) -> list[Failure]:
        return [failure for row in self.rows for failure in row.failures]

    @property
    def checked(self) -> int:
        """Calls that were checked."""
        return sum(row.cases for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "platform": self.platform,
            "device": self.device,
            "interpreted": self.interpreted,
            "seed": self.seed,
            "passed": not self.failures,
            "checked": self.checked,
            "took_s": round(self.took_s, 1),
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Place:
    """Where methods of a platform run in this process."""

    platform: Any
    present: bool

    @classmethod
    def named(cls, name: str | None) -> Place:
        """The platform by name, or this machine's."""
        if name is None:
            here = platforms.current()
            return cls(here.platform, here.present)
        platform = platforms.by_name(name)
        return cls(platform, platform.detect() is not None)

    @property
    def device(self) -> str:
        """Type of the device that holds the tensors: the CPU, where kernels of other hardware are interpreted."""
        return str(self.platform.device_type) if self.present else "cpu"

    @property
    def interpreted(self) -> bool:
        return not self.present and triton_interprets()

    @property
    def options(self) -> str:
        """What a command needs to come here again."""
        return "" if self.platform is platforms.current().platform else f" --platform {self.platform.name}"

    def why_not(self, cls: Any, method: str, dtype: torch.dtype | None = None) -> str | None:
        """The sentence that says why ``method`` cannot run here, or None."""
        needs = requirements_of(getattr(cls, method))
        device = torch.device(self.device) if self.present else None
        refusal = needs.refusal(self.platform.facts(device, dtype, None, self.present))
        if refusal is not None or self.present or (needs.triton and triton_interprets()):
            return refusal
        hint = "; TRITON_INTERPRET=1 runs it in Triton's interpreter" if needs.triton else ""
        return f"this process has no {self.platform.name} hardware{hint}"


def verify(plan: Plan, progress: Progress = silent) -> Report:
    """Check everything that ``plan`` names; what is wrong stands in the report.

    Raises:
        UsageError: nothing matches: no such op, case or method.
    """
    started = time.perf_counter()
    place = Place.named(plan.platform)
    if plan.method is not None and plan.method not in registry.PLATFORM_METHODS:
        raise UsageError(f"There is no method {plan.method!r}. {did_you_mean(plan.method, registry.PLATFORM_METHODS)}")
    classes = selected(plan.ops)
    report = Report(place.platform.name, place.device, place.interpreted, plan.seed)
    for number, cls in enumerate(classes):
        progress(f"Verifying {cls.name}", number / len(classes))
        report.rows += _verify_op(cls, plan, place)
    report.took_s = time.perf_counter() - started
    if plan.cases is not None and not any(row.cases or row.skipped for row in report.rows):
        names = [case.name for cls in classes for case in cls.cases()]
        raise UsageError(f"No case that can run here has {plan.cases!r} in its name. {did_you_mean(plan.cases, names)}")
    return report


def selected(names: Sequence[str]) -> list[Any]:
    """The in-tree classes by these names, or all."""
    registry.load_catalogues()
    if not names:
        return [cls for _, cls in sorted(registry.op_registry.items())]
    return list(dict.fromkeys(registry.find(name) for name in names))


def matching(cls: Any, pattern: str | None) -> list[Case]:
    """The cases with ``pattern`` in their names; the one that is called so, if there is one."""
    cases = list(cls.cases()) if hasattr(cls, "cases") else []
    exact = [case for case in cases if case.name == pattern]
    return exact or [case for case in cases if pattern is None or pattern in case.name]


def methods(cls: Any, place: Place) -> list[str]:
    """The platform methods of the class that serves ``cls`` there, in the order of the chain."""
    lineage = lineage_of(cls)
    chain = chain_for(lineage, place.platform.kind)
    return [m for m in chain if m != NATIVE and registry.implemented(lineage.chosen, m)]


def _verify_op(cls: Any, plan: Plan, place: Place) -> Iterator[Row]:
    chosen = lineage_of(cls).chosen
    if not hasattr(cls, "cases") or not hasattr(cls, "tolerance"):
        yield Row(cls.name, NATIVE, why_not="the op states no cases")
        return
    found = methods(cls, place)
    if not found:
        yield Row(cls.name, NATIVE, why_not=f"no kernel for {place.platform.name}: native runs, and is the definition")
    for method in found:
        if plan.method not in (None, method):
            continue
        why_not = place.why_not(chosen, method)
        if why_not is not None:
            yield Row(cls.name, method, why_not=why_not)
            continue
        rows = {dtype: _verify_method(cls, method, dtype, plan, place) for dtype in _dtypes(plan, place)}
        checked = [dtype for dtype, row in rows.items() if row.cases]
        if checked:
            rows[checked[-1]].failures += _check_once(cls, method, checked[-1], plan, place)
        yield from rows.values()


def _dtypes(plan: Plan, place: Place) -> tuple[torch.dtype, ...]:
    return plan.dtypes or (INTERPRETED_DTYPES if place.interpreted else FLOATS)


def _verify_method(cls: Any, method: str, dtype: torch.dtype, plan: Plan, place: Place) -> Row:
    row = Row(cls.name, method, dtype)
    row.why_not = place.why_not(lineage_of(cls).chosen, method, dtype)
    if row.why_not is not None:
        return row
    limit, reason = _limit(plan, place)
    for case in matching(cls, plan.cases):
        if elements(cls, case) > limit:
            row.skipped[reason] += 1
            continue
        subject = Subject(cls, method, case, dtype, place.device, plan.seed, place.options)
        try:
            row.add(check(subject), subject)
        except Exception as error:  # the op's own cases or definition
            row.failures.append(_raised(subject, "runs", error))
    return row


def _raised(subject: Subject, check: str, error: Exception) -> Failure:
    return Failure(subject, check, f"it raised {type(error).__name__}: {error}")


def _limit(plan: Plan, place: Place) -> tuple[int, str]:
    """The most elements of a case, and why not more."""
    if place.interpreted:
        return INTERPRETED, "too large for Triton's interpreter"
    if plan.quick:
        return QUICK, "left out by --quick"
    return fitting(place.device), "its reference in float64 does not fit into free memory"


def _check_once(cls: Any, method: str, dtype: torch.dtype, plan: Plan, place: Place) -> list[Failure]:
    """What needs one case only."""
    case = typical_case(cls, INTERPRETED if place.interpreted else QUICK)
    if case is None or case.name not in {c.name for c in matching(cls, plan.cases)}:
        return []
    subject = Subject(cls, method, case, dtype, place.device, plan.seed, place.options)
    failures: list[Failure] = []
    for name, one in (("compiled", check_compiled), ("opcheck", check_operators), ("gradients", check_gradients)):
        try:
            failures += one(subject)
        except Exception as error:  # whatever a kernel raises is a finding
            failures.append(_raised(subject, name, error))
    return failures
