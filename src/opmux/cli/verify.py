"""Check every kernel that can run here against its op's definition in float64, on the op's own cases.

Besides numbers: outputs in poisoned memory between guards, repeat runs, inputs left alone, strided and offset inputs, compilation,
gradients, and the kernels as operators of torch. The exit code is 1 if something is wrong.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from rich.markup import escape

from . import arguments, tables

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from ..testing import Failure, Report, Row
    from .output import Output

SHOWN = 20  # failures that are printed one by one; --json has them all


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``opmux verify``."""
    parser.add_argument("op", nargs="*", type=str, help="Names of ops, such as rms_norm. Left out: all.")
    parser.add_argument(
        "--plugin", metavar="NAME", help="The ops that this plugin (the name of its entry point) replaces or adds."
    )
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="Whose methods. Left out: this machine's. GPU methods run without a GPU in Triton's interpreter, on small "
        "cases, if TRITON_INTERPRET=1 is set.",
    )
    parser.add_argument("--dtype", nargs="+", choices=arguments.DTYPES, help="Of the inputs. Left out: all three.")
    parser.add_argument("--cases", metavar="TEXT", help="Cases with this in their names, or the one called so.")
    parser.add_argument("--method", metavar="NAME", help="One platform method, such as forward_cpu.")
    parser.add_argument("--quick", action="store_true", help="Small cases only: seconds instead of minutes.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the random inputs.")


def run(args: Namespace, output: Output) -> int:
    """Verify, print."""
    from ..core.errors import UsageError
    from ..core.plugins import registered_by
    from ..testing import Plan, verify
    from ..tools.compare import machine

    ops = args.op or ()
    if args.plugin is not None:
        if ops:
            raise UsageError("Give ops or --plugin, not both: --plugin NAME verifies every op of that plugin.")
        ops = [getattr(cls, "name", cls.__name__) for cls in registered_by(args.plugin)]
    plan = Plan(
        ops=ops,
        platform=arguments.platform_named(args.platform),
        dtypes=tuple(arguments.dtype_named(name) for name in args.dtype) if args.dtype else None,
        cases=args.cases,
        method=args.method,
        quick=args.quick,
        seed=args.seed,
    )
    with output.progress() as progress:
        report = verify(plan, progress)
    output.json({**report.to_dict(), "machine": machine()})
    _print(report, output)
    return 1 if report.failures else 0


def _print(report: Report, output: Output) -> None:
    table = tables.plain("op", "method", "input", "cases", "worst ulp", "allowed", "native's worst", "verdict")
    last = None
    for row in report.rows:
        name = (row.op, row.method)
        op, method = name if name != last else ("", "")
        last = name
        dtype = "" if row.dtype is None else str(row.dtype).removeprefix("torch.")
        found = row.nearest
        figures = (f"{found.worst:.3g}", f"{found.tolerance:.4g}", f"{found.native:.3g}") if row.errors else ("", "", "")
        skipped = sum(row.skipped.values())
        cases = f"{row.cases} of {row.cases + skipped}" if skipped else str(row.cases or "")
        table.add_row(op, method, dtype, cases, *figures, _verdict(row))
    output.print(table)
    reasons = sum((row.skipped for row in report.rows), Counter[str]())
    for why, count in reasons.items():
        output.print(f"[dim]{count} cases not checked: {escape(why)}[/dim]")
    for failure in report.failures[:SHOWN]:
        _print_failure(failure, output)
    more = len(report.failures) - SHOWN
    if more > 0:
        output.print(f"... and {more} more; --json has them all.")
    where = f"{report.platform}, in Triton's interpreter" if report.interpreted else report.platform
    result = f"[bold red]{len(report.failures)} failures[/bold red]" if report.failures else "[green]all right[/green]"
    output.print(f"{report.checked} calls checked on {where} in {report.took_s:.0f} s, seed {report.seed}: {result}.")


def _verdict(row: Row) -> str:
    if row.failures:
        return f"[bold red]{len(row.failures)} failed[/bold red]"
    if row.why_not is not None:
        return f"[dim]{escape(row.why_not)}[/dim]"
    return "[green]right[/green]" if row.cases else "[dim]not checked[/dim]"


def _print_failure(failure: Failure, output: Output) -> None:
    subject = failure.subject
    at = f"{subject.cls.name}.{subject.method}, {subject.case.name}, {str(subject.dtype).removeprefix('torch.')}"
    output.print(f"[bold red]{escape(at)}[/bold red], seed {subject.seed}: {escape(failure.check)}")
    output.print(f"  {escape(failure.what)}")
    if failure.element is not None:
        output.print(f"  {escape(str(failure.element))}")
    environment = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
    output.write(f"  again: {environment}{subject.replay()}\n\n")  # unwrapped, to be copied

