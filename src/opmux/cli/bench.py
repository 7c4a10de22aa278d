"""Time every op against the other forms of its definition, side by side, and against what the machine can do.

An implementation that is wrong gets no time. benchmarks/protocol.md says how times are taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ..core.errors import UsageError
from . import arguments, tables

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from ..tools.bench import Report, Row
    from .output import Output


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``opmux bench``."""
    parser.add_argument("op", nargs="*", type=str, help="Names of ops, such as rms_norm. Left out: all.")
    parser.add_argument(
        "--cases", metavar="TEXT", help="Cases with this in their names, or the one called so. Left out: all real shapes."
    )
    parser.add_argument("--dtype", choices=arguments.DTYPES, default="bfloat16", help="Of the inputs.")
    parser.add_argument(
        "--against",
        metavar="NAMES",
        default="eager,compile,vllm",
        help="Comma-joined: eager (the definition), compile (the definition under torch.compile), vllm (its kernels, "
        "where vLLM is installed).",
    )
    parser.add_argument(
        "--min-time-s", type=float, default=0.2, metavar="S", help="For each implementation of each case."
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads. Left out: torch's default.")
    parser.add_argument("--html", metavar="FILE", help="Write a page with the tables and roofline plots.")


def run(args: Namespace, output: Output) -> int:
    """Measure, print, write the page."""
    from ..tools import bench_html
    from ..tools.bench import Plan, bench
    from ..tools.compare import machine

    if not args.min_time_s > 0:
        raise UsageError(f"--min-time-s {args.min_time_s}: it takes seconds above 0.")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: it takes a number from 1 up.")
    if args.html is not None:
        bench_html.require()  # both before minutes of work
        if not Path(args.html).absolute().parent.is_dir():
            raise UsageError(f"--html {args.html}: its folder does not exist. Make it first, or name another file.")
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    plan = Plan(
        ops=args.op or (),
        cases=args.cases,
        dtype=arguments.dtype_named(args.dtype),
        against=tuple(name.strip() for name in args.against.split(",") if name.strip()),
        min_time_s=args.min_time_s,
    )
    with output.progress() as progress:
        report = bench(plan, progress)
    here = machine()
    output.json({**report.to_dict(), "machine": here})
    _print(report, output)
    tables.print_load(output, here)
    if args.html is not None:
        Path(args.html).write_text(bench_html.page(report, here), encoding="utf-8")
        output.note(f"The page is in {args.html}.")
    wrong = any("opmux" in row.refused for row in report.rows)
    return 1 if wrong else 0


def _print(report: Report, output: Output) -> None:
    ceilings = report.ceilings
    read = ", ".join(f"{rate:.1f} GB/s on {n} thread{'s' * (n > 1)}" for n, rate in ceilings.read.items())
    matrix = ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in ceilings.matrix_gflop_s.items())
    output.print(f"Measured in this run: read {read}; copy {ceilings.copy_gb_s:.1f} GB/s; matrix product {matrix}.")
    names = report.implementations
    table = tables.plain("op", "case", *(f"{n}, µs" for n in names), "noise", "floor", "of ceiling", "enabling pays")
    last = ""
    for row in report.rows:
        cells = [_time(row, name) for name in names]
        share = "in cache" if not row.in_memory else "" if row.share is None else f"{100 * row.share:.0f} %"
        op = row.op if row.op != last else ""
        last = row.op
        table.add_row(
            op, escape(row.case), *cells, f"{100 * row.noise:.0f} %", f"{row.floor_s * 1e6:.1f}", share, _pays(row)
        )
    output.print(table)
    for row in report.rows:
        for name, why in row.refused.items():
            output.print(f"[red]{escape(name)} has no time[/red] for {escape(row.op)}, {escape(row.case)}: {escape(why)}")
    for name, why in report.skipped.items():
        output.print(f"[dim]{escape(name)} was left out: {escape(why)}[/dim]")
    _print_summary(report, output)


def _print_summary(report: Report, output: Output) -> None:
    hosts = {host.op: host for host in report.hosts}
    table = tables.plain("op", "gain over the best form of its definition", "enabling pays on", "a call costs, µs", "eager")
    for op, found in report.summary().items():
        gain = "" if found["gain"] is None else f"{found['gain']:.2f} x"
        host = hosts.get(op)
        costs = ("", "") if host is None else (f"{host.opmux_s * 1e6:.1f}", f"{host.eager_s * 1e6:.1f}")
        table.add_row(op, gain, f"{found['yes']} of {found['cases']} cases", *costs)
    output.print(table)
    output.print(
        "[dim]Medians of turns taken in one process, outputs allocated in every call. Noise: opmux timed twice. Floor: bytes "
        "at the fastest rate measured, or operations at the matrix rate, whichever takes longer. A call's cost: the op's "
        f"smallest case. {report.took_s:.0f} s.[/dim]"
    )


def _time(row: Row, name: str) -> str:
    if name not in row.times:
        return "[dim]-[/dim]"
    return f"{row.times[name].median_s * 1e6:.1f}"


def _pays(row: Row) -> str:
    if row.gain is None:
        return "[dim]unknown[/dim]"
    style = {"yes": "green", "no": "red", "same": "dim"}[row.pays]
    return f"[{style}]{row.pays}, {row.gain:.2f} x[/{style}]"
