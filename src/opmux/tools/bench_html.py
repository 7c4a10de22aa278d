"""A report of ``bench`` as one self-contained page: roofline plots, tables, and the machine it was measured on."""

from __future__ import annotations

import io
from html import escape
from importlib.util import find_spec
from typing import Any

from ..core.errors import UsageError
from .bench import OPMUX, Report, Row

_COLOURS = {"opmux": "#0b6e4f", "eager": "#b0b0b0", "compile": "#5b7db1", "vllm": "#d98324"}
_MARKERS = {"opmux": "o", "eager": "s", "compile": "^", "vllm": "D"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; font-size: 14px; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } th { color: #555; font-weight: 600; }
.yes { color: #0b6e4f; font-weight: 600; } .no { color: #b3261e; } .same, .unknown, .note { color: #777; }
.best { font-weight: 600; } .plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
"""


def require() -> None:
    """Raise if plots cannot be drawn here."""
    if find_spec("matplotlib") is None:
        raise UsageError("--html draws its plots with matplotlib, which is not installed: `pip install 'opmux[bench]'`.")


def page(report: Report, machine: dict[str, Any]) -> str:
    """The whole page."""
    ops = list(dict.fromkeys(row.op for row in report.rows))
    sections = [_op_section(report, op) for op in ops]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>opmux bench</title><style>{_STYLE}</style></head><body>
<h1>opmux bench: {escape(report.to_dict()["dtype"])} on {escape(report.platform)}</h1>
{_summary(report)}
<h2>The machine</h2>{_facts(report, machine)}
{"".join(sections)}
<p class="note">Medians of turns taken in one process; every implementation allocates its outputs in the call, and was compared with
the definition in float64 before it was timed. Noise: opmux timed twice. The floor is the time that the bytes need at the fastest
rate measured, or the operations at the matrix rate, whichever is longer.</p>
</body></html>
"""


def _summary(report: Report) -> str:
    rows = []
    hosts = {host.op: host for host in report.hosts}
    for op, found in report.summary().items():
        gain = "" if found["gain"] is None else f"{found['gain']:.2f} ×"
        host = hosts.get(op)
        cost = "" if host is None else f"{host.opmux_s * 1e6:.1f}"
        eager = "" if host is None else f"{host.eager_s * 1e6:.1f}"
        rows.append([f'<a href="#{escape(op)}">{escape(op)}</a>', gain, f"{found['yes']} of {found['cases']}", cost, eager])
    head = ["op", "gain over the best form of its definition", "pays on", "a call costs, µs", "eager's, µs"]
    return _table(head, rows)


def _facts(report: Report, machine: dict[str, Any]) -> str:
    ceilings = report.ceilings
    facts = {name: value for name, value in machine.items() if value is not None and name != "versions"}
    facts |= {f"{name} version": version for name, version in machine["versions"].items() if version}
    facts["last cache"] = f"{report.cache_bytes / 2**20:.0f} MB"
    facts |= {f"read, {n} thread{'s' * (n > 1)}": f"{rate:.1f} GB/s" for n, rate in ceilings.read.items()}
    facts["copy"] = f"{ceilings.copy_gb_s:.1f} GB/s"
    facts |= {f"matrix product, {name}": f"{rate:.0f} GFLOP/s" for name, rate in ceilings.matrix_gflop_s.items()}
    return _table(["", ""], [[escape(str(name)), escape(str(value))] for name, value in facts.items()])


def _op_section(report: Report, op: str) -> str:
    rows = [row for row in report.rows if row.op == op]
    names = report.implementations
    body = []
    for row in rows:
        best = min((t.median_s for n, t in row.times.items() if n in names), default=None)
        cells = [escape(row.case)]
        for name in names:
            timing = row.times.get(name)
            mark = ' class="best"' if timing is not None and timing.median_s == best else ""
            cells.append("" if timing is None else f"<span{mark}>{timing.median_s * 1e6:.1f}</span>")
        share = "" if row.share is None else f"{100 * row.share:.0f} %"
        gain = "" if row.gain is None else f", {row.gain:.2f} ×"
        cells += [f"{100 * row.noise:.0f} %", f"{row.floor_s * 1e6:.1f}", share or "in cache"]
        body.append([*cells, f'<span class="{row.pays}">{row.pays}{gain}</span>'])
    refused = "".join(
        f'<p class="note">{escape(name)} has no time for {escape(row.case)}: {escape(why)}</p>'
        for row in rows
        for name, why in row.refused.items()
    )
    head = ["case", *(f"{name}, µs" for name in names), "noise", "floor, µs", "of ceiling", "enabling pays"]
    return f'<h2 id="{escape(op)}">{escape(op)}</h2>{_plot(report, rows)}{_table(head, body)}{refused}'


def _table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{line(head, 'th') if any(head) else ''}{''.join(line(row, 'td') for row in rows)}</table>"


# -- the plots -------------------------------------------------------------------------------------------------------


def _plot(report: Report, rows: list[Row]) -> str:
    """The roofline of one op, as SVG: flops against intensity where it has flops, else bytes/s against bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    if any(row.flops for row in rows):
        _draw_flops(axes, report, [row for row in rows if row.flops])
    else:
        _draw_bytes(axes, report, rows)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return f'<div class="plots">{svg[svg.index("<svg") :]}</div>'


def _draw_bytes(axes: Any, report: Report, rows: list[Row]) -> None:
    """Rate at which the least bytes moved; data that stays in the cache may pass the memory's rate."""
    for name in report.implementations:
        seen = [row for row in rows if name in row.times]
        for in_memory, face in ((True, _COLOURS[name]), (False, "white")):
            part = [row for row in seen if row.in_memory is in_memory]
            axes.scatter(
                [row.size_bytes / 2**20 for row in part],
                [row.size_bytes / row.times[name].median_s / 1e9 for row in part],
                label=name if in_memory is any(row.in_memory for row in seen) else None,
                marker=_MARKERS[name],
                facecolors=face,
                edgecolors=_COLOURS[name],
                zorder=3 if name == OPMUX else 2,
            )
    rate = report.ceilings.memory_gb_s
    axes.axhline(rate, color="#b3261e", linewidth=1, label=f"memory: {rate:.0f} GB/s measured")
    axes.set_xlabel("bytes that the call must move, MB (hollow: data in the cache)")
    axes.set_ylabel("GB/s")


def _draw_flops(axes: Any, report: Report, rows: list[Row]) -> None:
    """The classic roofline."""
    for name in report.implementations:
        part = [row for row in rows if name in row.times]
        axes.scatter(
            [row.flops / row.size_bytes for row in part],
            [row.flops / row.times[name].median_s / 1e9 for row in part],
            label=name,
            marker=_MARKERS[name],
            facecolors=_COLOURS[name],
            zorder=3 if name == OPMUX else 2,
        )
    memory = report.ceilings.memory_gb_s
    matrix = max(report.ceilings.matrix_gflop_s.values(), default=0.0)
    intensities = [row.flops / row.size_bytes for row in rows]
    ridge = matrix / memory
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axes.plot([low, ridge, high], [low * memory, matrix, matrix], color="#b3261e", linewidth=1,
              label=f"{memory:.0f} GB/s, {matrix:.0f} GFLOP/s measured")  # fmt: skip
    axes.set_xlabel("operations for each byte that the call must move")
    axes.set_ylabel("GFLOP/s")
