"""What dispatch costs an eager call: the op against an ``nn.Module`` whose forward is the same method.

    python benchmarks/dispatch_overhead.py [--json FILE]

Each figure is the least of many short rounds, the contenders taking turns, so that other work on the machine does not
count. Tensors are tiny: what is timed is Python, not the kernel. The limit is 500 ns above the module.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import opmux
from opmux.ops import RMSNorm

LIMIT_NS = 500


class Nothing(opmux.CustomOp):
    """An op whose method does nothing: the dispatch alone."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x


class Calling(nn.Module):
    """A module that calls one method, as if it had been chosen by hand."""

    def __init__(self, op: opmux.CustomOp, method: str) -> None:
        super().__init__()
        self.forward = getattr(op, method)


def least_ns(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """Nanoseconds a call of each contender: the least over ``rounds`` rounds of ``repeats`` calls."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            least[name] = min(least[name], (time.perf_counter_ns() - start) / repeats)
    return least


def measure(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """One record an op and a way of calling it."""
    x = torch.ones(1, 64)
    ops = {"no-op": Nothing(), "rms_norm": RMSNorm(64)}
    rows = []
    for name, op in ops.items():
        method = op.decision(x).method
        assert method is not None
        module = Calling(op, method)
        for arguments, args, kwargs in (
            ("x", (x,), {}),
            ("x, r", (x, x), {}),
            ("x, residual=r", (x,), {"residual": x}),
        ):
            contenders = {
                "method_ns": lambda f=module.forward, a=args, k=kwargs: f(*a, **k),
                "module_ns": lambda f=module, a=args, k=kwargs: f(*a, **k),
                "op_ns": lambda f=op, a=args, k=kwargs: f(*a, **k),
            }
            least = least_ns(contenders, rounds, repeats)
            difference = least["op_ns"] - least["module_ns"]
            rows.append({"op": name, "method": method, "arguments": arguments, **least, "difference_ns": difference})
    return rows


def main() -> None:
    """Print the table, and write it with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    with torch.inference_mode():
        rows = measure(options.rounds, options.repeats)
    print(f"{'op':10} {'arguments':14} {'method':>9} {'module':>9} {'op':>9} {'difference':>11}   ns a call")
    for row in rows:
        figures = f"{row['method_ns']:9.0f} {row['module_ns']:9.0f} {row['op_ns']:9.0f} {row['difference_ns']:11.0f}"
        print(f"{row['op']:10} {row['arguments']:14} {figures}")
    if options.json:
        record = {
            "what": "eager dispatch overhead, least of short rounds",
            "limit_ns": LIMIT_NS,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "opmux": opmux.__version__,
            "machine": platform.processor() or platform.machine(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
