"""What ``apply`` did, module by module: the record that people read and programs parse."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from ..core.custom_op import CustomOp
from . import shards

_COLUMNS = ("module", "op", "class", "method", "reason")


class Report:
    """The result of ``apply``.

    Attributes:
        entries: one dict per module and op: ``path``, ``op``, ``class``, ``method``, ``status`` (``applied`` or
            ``skipped``), ``reason``.
        sources: for each field of the config, where its value came from.
        whole: paths of layers and stacks that run as one loop over ops.
        unused: directives for ops that the model does not contain.
        compile: how the model was compiled, in words.
    """

    def __init__(self, directives: str, sources: dict[str, str]) -> None:
        self.directives = directives
        self.sources = sources
        self.entries: list[dict[str, Any]] = []
        self.whole: list[str] = []
        self.unused: list[str] = []
        self.compile = ""
        self._ops: list[tuple[str, CustomOp]] = []
        self._left: dict[tuple[str, str], dict[str, Any]] = {}

    def applied(self, path: str, op: CustomOp, note: str, sample: tuple[Any, ...]) -> None:
        """Record an op in place; method and reason come from the op's own decision.

        Args:
            sample: arguments of a call such as will come; none where the op's own parameters say device and dtype.
        """
        decision = op.decision(*sample)
        reason = "; ".join(part for part in (note, shards.note(op), decision.why) if part)
        self.entries.append(
            {
                "path": path,
                "op": decision.op,
                "class": decision.cls,
                "method": decision.method,
                "status": "applied",
                "reason": reason,
            }
        )
        self._ops.append((path, op))

    def skipped(self, path: str, op: str, cls: str, reason: str) -> None:
        """Record a module that was left as it is; two reasons for one op of one module are one entry."""
        before = self._left.get((path, op))
        if before is not None:
            before["reason"] = f"{before['reason']}; {reason}"
            return
        self.entries.append(
            {"path": path, "op": op, "class": cls, "method": None, "status": "skipped", "reason": reason}
        )
        self._left[path, op] = self.entries[-1]

    def counts(self) -> dict[str, int]:
        """Ops in place, by registered name."""
        return dict(Counter(e["op"] for e in self.entries if e["status"] == "applied"))

    def start_counting(self) -> None:
        """Forget the calls that were made to compare."""
        for _, op in self._ops:
            for route in op.routes:
                route.forget()

    def counters(self) -> dict[str, dict[str, Any]]:
        """Calls so far, by op: per method, and refused calls with the sentence that refused them."""
        totals: dict[str, dict[str, Any]] = {}
        for _, op in self._ops:
            for route in op.routes:
                if not route.calls and not route.refusals:
                    continue
                entry = totals.setdefault(route.decision.op, {"calls": Counter(), "refusals": Counter()})
                entry["calls"][route.decision.method] += route.calls
                entry["refusals"].update(route.refusals)
        return {op: {"calls": dict(t["calls"]), "refusals": dict(t["refusals"])} for op, t in totals.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "directives": self.directives,
            "sources": dict(self.sources),
            "counts": self.counts(),
            "whole": list(self.whole),
            "unused_directives": list(self.unused),
            "compile": self.compile,
            "entries": [dict(e) for e in self.entries],
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        rows = [(e["path"], e["op"], e["class"], e["method"] or "-", e["reason"]) for e in self._folded("applied")]
        left = [(e["path"], e["op"], e["class"], "skipped", e["reason"]) for e in self._folded("skipped")]
        lines = _table([_COLUMNS, *rows, *left]) if rows or left else ["opmux found nothing to replace."]
        if self.whole:
            lines.append(f"run whole: {', '.join(_counted(self.whole))}")
        lines.append(f"directives: {self.directives} (from: {self.sources.get('custom_ops', 'default')})")
        lines.extend(f"directive without effect: {directive}" for directive in self.unused)
        lines.append(f"compile: {self.compile}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        applied = sum(e["status"] == "applied" for e in self.entries)
        return f"Report({applied} applied, {len(self.entries) - applied} skipped)"

    def _folded(self, status: str) -> list[dict[str, Any]]:
        """Entries that differ by numbers in their path only, as one with a count."""
        groups: dict[Any, list[dict[str, Any]]] = {}
        for e in self.entries:
            if e["status"] == status:
                groups.setdefault((numbered(e["path"]), e["op"], e["class"], e["method"], e["reason"]), []).append(e)
        return [
            {**members[0], "path": members[0]["path"] if len(members) == 1 else f"{key[0]} x{len(members)}"}
            for key, members in groups.items()
        ]


def numbered(path: str) -> str:
    """The path with stars for its numbers, so that layers alike read alike."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _counted(paths: list[str]) -> list[str]:
    counts = Counter(map(numbered, paths))
    return [pattern if count == 1 else f"{pattern} x{count}" for pattern, count in counts.items()]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
    line = "  ".join(["{:<%d}" % w for w in widths] + ["{}"])  # noqa: UP031  # a format of formats
    return [line.format(*row) for row in rows]
