"""``bench``: each op against the other forms of its definition, side by side, and against what the machine can do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import platforms
from ..core.cases import Case, Inputs
from ..core.decide import NATIVE
from ..core.errors import UsageError
from ..testing.checks import check, compare
from ..testing.sizes import elements, free_bytes, has_elements, small_cases
from ..testing.subject import Subject
from ..testing.tensors import tensors
from ..testing.verify import matching, selected
from . import bench_peers
from .bench_ceilings import Ceilings, measure, name_of
from .bench_timing import Timing, cache_bytes, host_s, sampler, take_turns
from .progress import Progress, silent

OPMUX, AGAIN = "opmux", "opmux again"
PEERS = ("eager", "compile", "vllm")
NATIVE_FORMS = ("eager", "compile")  # what runs where the op is off
_MOST_SETS = 256
_TIE = 0.03


@dataclass(frozen=True)
class Plan:
    """What is timed.

    Attributes:
        ops: registered or class names; empty means all.
        cases: part of the cases' names, or the whole name of one; None means all that are real shapes.
        dtype: of the inputs.
        against: of ``PEERS``.
        min_time_s: for each implementation of each case.
    """

    ops: Sequence[str] = ()
    cases: str | None = None
    dtype: torch.dtype = torch.bfloat16
    against: Sequence[str] = PEERS
    min_time_s: float = 0.2


@dataclass
class Row:
    """One case: the time of everyone, and what the machine needs at the least.

    Attributes:
        times: by name of the implementation; "opmux again" is opmux once more, and shows the noise.
        refused: implementation -> why it has no time.
        sets: sets of data that the calls went round over; ``in_memory`` if they do not fit into the last cache.
    """

    op: str
    case: str
    method: str
    size_bytes: int
    flops: int
    floor_s: float
    sets: int = 1
    in_memory: bool = False
    times: dict[str, Timing] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str) -> float | None:
        """How often opmux fits into the time of ``name``; above 1 opmux is faster."""
        if name not in self.times or OPMUX not in self.times:
            return None
        return self.times[name].median_s / self.times[OPMUX].median_s

    @property
    def noise(self) -> float:
        """How far two timings of the same thing lie apart, as a part of one."""
        again = self.ratio(AGAIN)
        return 0.0 if again is None else abs(again - 1.0)

    @property
    def gain(self) -> float | None:
        """``ratio`` to the fastest form of the definition, which is what runs if the op is off."""
        ratios = [r for name in NATIVE_FORMS if (r := self.ratio(name)) is not None]
        return min(ratios, default=None)

    @property
    def pays(self) -> str:
        """Whether enabling the op pays here: yes, no, same, or unknown where one side has no time."""
        gain = self.gain
        if gain is None or self.method == NATIVE:
            return "unknown" if gain is None else "same"
        margin = max(self.noise, _TIE)
        return "yes" if gain > 1 + margin else "no" if gain < 1 - margin else "same"

    @property
    def share(self) -> float | None:
        """The part of the ceiling that opmux reaches; None where the data stays in the cache, which has no ceiling here."""
        return self.floor_s / self.times[OPMUX].median_s if self.in_memory and OPMUX in self.times else None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "op": self.op,
            "case": self.case,
            "method": self.method,
            "size_bytes": self.size_bytes,
            "flops": self.flops,
            "floor_us": self.floor_s * 1e6,
            "sets": self.sets,
            "in_memory": self.in_memory,
            "times": {
                name: {"median_us": t.median_s * 1e6, "spread": t.spread, "rounds": t.rounds}
                for name, t in self.times.items()
            },
            "refused": self.refused,
            "percent_of_ceiling": None if self.share is None else 100 * self.share,
            "gain": self.gain,
            "noise": self.noise,
            "pays": self.pays,
        }


@dataclass
class Host:
    """What one call costs the caller, on an op's smallest case."""

    op: str
    case: str
    opmux_s: float
    eager_s: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {"op": self.op, "case": self.case, "opmux_us": self.opmux_s * 1e6, "eager_us": self.eager_s * 1e6}


@dataclass
class Report:
    """Ceilings, rows, and what a call costs."""

    platform: str
    device: str
    dtype: torch.dtype
    cache_bytes: int
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def implementations(self) -> list[str]:
        """Names with at least one time, opmux first."""
        return [n for n in (OPMUX, *PEERS) if any(n in row.times for row in self.rows)]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Op -> the geometric mean of its gains, and on how many of its cases enabling it pays."""
        found: dict[str, dict[str, Any]] = {}
        for op in dict.fromkeys(row.op for row in self.rows):
            rows = [row for row in self.rows if row.op == op]
            gains = [row.gain for row in rows if row.gain]
            mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None
            verdicts = {v: sum(row.pays == v for row in rows) for v in ("yes", "same", "no", "unknown")}
            found[op] = {"gain": mean, "cases": len(rows), **verdicts}
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "platform": self.platform,
            "device": self.device,
            "dtype": name_of(self.dtype),
            "cache_bytes": self.cache_bytes,
            "ceilings": self.ceilings.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "host": [host.to_dict() for host in self.hosts],
            "summary": self.summary(),
            "skipped": self.skipped,
            "took_s": round(self.took_s, 1),
        }


def bench(plan: Plan, progress: Progress = silent) -> Report:
    """Time everything that ``plan`` names.

    Raises:
        UsageError: nothing matches, or a peer is asked for by a name that is none.
    """
    started = time.perf_counter()
    for name in plan.against:
        if name not in PEERS:
            raise UsageError(f"There is no implementation {name!r} to compare with; there are {', '.join(PEERS)}.")
    work = [(cls, case) for cls in selected(plan.ops) for case in _timed_cases(cls, plan.cases)]
    if not work:
        raise UsageError(
            f"No case that is timed has {plan.cases!r} in its name; docs/ops has the cases of every op."
            if plan.cases is not None
            else "None of these ops has cases that are timed."
        )
    here = platforms.current()
    device = here.platform.device_type if here.present else "cpu"
    progress("Measuring what the machine can do", None)
    report = Report(here.platform.name, device, plan.dtype, cache_bytes(device), measure(device, [plan.dtype]))
    for number, (cls, case) in enumerate(work):
        progress(f"Timing {cls.name}, {case.name}", number / len(work))
        needed = 8 * plan.dtype.itemsize * elements_moved(cls, case)
        if needed > free_bytes(device):
            report.skipped[f"{cls.name}, {case.name}"] = f"needs {needed >> 20} MB, more than is free"
            continue
        report.rows.append(_time_case(_Bench(cls, case, plan, device), report))
    for cls in dict.fromkeys(cls for cls, _ in work):
        report.hosts += _host_cost(cls, plan, device)
    report.took_s = time.perf_counter() - started
    return report


def elements_moved(cls: Any, case: Case) -> int:
    """Elements of a case's tensors, parameters included."""
    with torch.device("meta"):
        op = cls(**case.init)
    return max(cls.cost(case, torch.float32).size_bytes // 4, sum(p.numel() for p in op.parameters()))


def _timed_cases(cls: Any, pattern: str | None) -> list[Case]:
    """Real shapes; an edge only if it is called by its whole name."""
    return [case for case in matching(cls, pattern) if case.bench or case.name == pattern]


@dataclass
class _Bench:
    """What the timing of one case needs to know."""

    cls: Any
    case: Case
    plan: Plan
    device: str

    def subject(self, case: Case, method: str) -> Subject:
        return Subject(self.cls, method, case, self.plan.dtype, self.device)

    def sibling(self) -> Case | None:
        """The largest small case that is built most alike."""
        alike = [c for c in small_cases(self.cls) if has_elements(c)]
        shared = [len(self.case.init.items() & c.init.items()) if _hashable(c.init) else 0 for c in alike]
        best = max(zip(shared, (elements(self.cls, c) for c in alike), range(len(alike)), strict=True), default=None)
        return None if best is None else alike[best[2]]


def _hashable(init: dict[str, Any]) -> bool:
    try:
        hash(tuple(init.values()))
    except TypeError:
        return False
    return True


def _time_case(one: _Bench, report: Report) -> Row:
    cost = one.cls.cost(one.case, one.plan.dtype)
    size = one.plan.dtype.itemsize * elements_moved(one.cls, one.case)
    sets = max(1, min(_MOST_SETS, -(-2 * report.cache_bytes // max(1, size)), free_bytes(one.device) // (4 * max(1, size))))
    data = []
    for seed in range(sets):
        inputs = Inputs(one.plan.dtype, one.device, seed)
        data.append((one.case.build(one.cls, inputs), tuple(one.case.args(inputs))))
    method = data[0][0].decision(*data[0][1]).method or NATIVE
    row = Row(
        one.cls.name, one.case.name, method, cost.size_bytes, cost.flops, report.ceilings.floor_s(cost, one.plan.dtype)
    )
    row.sets, row.in_memory = sets, sets * size >= 2 * report.cache_bytes
    candidates = _candidates(one, row, data[0][0])
    with torch.no_grad():
        samplers = {}
        for name, function in candidates.items():
            calls = [_bound(function, op, args) for op, args in data]
            try:
                _warm(calls, name)
                samplers[name] = sampler(calls, one.device)
            except Exception as error:  # a peer may fail in any way; the others are timed all the same
                row.refused[name] = _raised(error)
        if OPMUX in samplers:
            samplers[AGAIN] = samplers[OPMUX]
        if samplers:
            row.times = take_turns(samplers, one.plan.min_time_s)
    return row


def _raised(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"it raised {type(error).__name__}: {lines[0] if lines else ''}"


def _bound(function: Callable[..., Any], op: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(op, *args)


def _warm(calls: Sequence[Callable[[], Any]], name: str) -> None:
    """A first call of each; what was compiled for the first set of data must serve them all."""
    calls[0]()
    if name != "compile":
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        for call in calls:
            call()


def _candidates(one: _Bench, row: Row, op: Any) -> dict[str, Callable[..., Any]]:
    """Every implementation that is there and right on the case's small sibling; the others go to ``row.refused``."""
    found: dict[str, Callable[..., Any]] = {OPMUX: lambda op, *args: op(*args)}
    if "eager" in one.plan.against:
        found["eager"] = bench_peers.eager
    if "vllm" in one.plan.against:
        peer = bench_peers.vllm(op)
        if peer is not None:
            found["vllm"] = peer
    if "compile" in one.plan.against:
        found["compile"] = bench_peers.compiled()
    sibling = one.sibling()
    for name, function in list(found.items()):
        wrong = None if sibling is None else _wrong(one, sibling, name, function, row.method)
        if wrong is not None:
            row.refused[name] = wrong
            del found[name]
    if "compile" in found:
        found["compile"] = bench_peers.compiled()  # for this case's shapes alone
    return found


def _wrong(one: _Bench, sibling: Case, name: str, function: Callable[..., Any], method: str) -> str | None:
    """Why an implementation is not right on ``sibling``, or None."""
    subject = one.subject(sibling, method)
    if name == OPMUX and method != NATIVE:
        failures = check(subject).failures
    else:
        op, args = subject.build()
        try:
            with torch.no_grad():
                native, out = tensors(op.forward_native(*args)), tensors(function(op, *args))
        except Exception as error:  # a peer may fail in any way
            return f"on {sibling.name} {_raised(error)}"
        failures = compare(subject, name, out, subject.reference(), native)
    return None if not failures else f"wrong on {sibling.name}: {failures[0].what}"


def _host_cost(cls: Any, plan: Plan, device: str) -> list[Host]:
    cases = sorted((c for c in small_cases(cls) if has_elements(c)), key=lambda c: elements(cls, c))
    if not cases:
        return []
    inputs = Inputs(plan.dtype, device)
    op, args = cases[0].build(cls, inputs), tuple(cases[0].args(inputs))
    with torch.no_grad():
        ours = host_s(lambda: op(*args), device)
        eager = host_s(lambda: op.forward_native(*args), device)
    return [Host(cls.name, cases[0].name, ours, eager)]
