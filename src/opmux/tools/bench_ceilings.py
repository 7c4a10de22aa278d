"""What this machine can do at the most, measured: how fast it reads and copies memory, how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.cases import Cost
from .bench_timing import cache_bytes
from .compare import undisturbed

_MATRIX = {"cpu": (512, 4096, 4096), "gpu": (8192, 8192, 8192)}


@dataclass
class Ceilings:
    """Rates of this machine, with the threads that the process has.

    Attributes:
        read: threads -> GB/s of the largest element of a buffer far larger than the caches: a loop that only reads.
        copy_gb_s: bytes read plus bytes written.
        matrix_gflop_s: dtype -> rate of a large matrix product by the vendor's library.
    """

    read: dict[int, float] = field(default_factory=dict)
    copy_gb_s: float = 0.0
    matrix_gflop_s: dict[str, float] = field(default_factory=dict)

    @property
    def memory_gb_s(self) -> float:
        """The highest rate at which bytes moved."""
        return max(self.copy_gb_s, *self.read.values())

    def floor_s(self, cost: Cost, dtype: torch.dtype) -> float:
        """Seconds that the work of ``cost`` takes at the least."""
        rate = self.matrix_gflop_s.get(name_of(dtype), 0.0)
        return max(cost.size_bytes / self.memory_gb_s / 1e9, cost.flops / rate / 1e9 if rate else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "read_gb_s_by_threads": {str(threads): round(rate, 2) for threads, rate in self.read.items()},
            "copy_gb_s": round(self.copy_gb_s, 2),
            "matrix_gflop_s": {name: round(rate, 1) for name, rate in self.matrix_gflop_s.items()},
        }


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def measure(device: str, dtypes: Iterable[torch.dtype]) -> Ceilings:
    """Take about a second on a CPU of a few cores."""
    count = max(256 << 20, 8 * cache_bytes(device)) // 4
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    target.fill_(0.0)
    ceilings = Ceilings()
    threads = torch.get_num_threads()
    for n in sorted({1, threads}) if device == "cpu" else [threads]:
        torch.set_num_threads(n)
        try:
            ceilings.read[n] = 4 * count / 1e9 / _seconds(source.amax, device)
        finally:
            torch.set_num_threads(threads)
    ceilings.copy_gb_s = 8 * count / 1e9 / _seconds(lambda: target.copy_(source), device)
    rows, inner, columns = _MATRIX["cpu" if device == "cpu" else "gpu"]
    for dtype in dtypes:
        a = torch.rand(rows, inner, device=device).to(dtype)
        b = torch.rand(inner, columns, device=device).to(dtype)
        seconds = _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        ceilings.matrix_gflop_s[name_of(dtype)] = 2 * rows * inner * columns / 1e9 / seconds
    return ceilings


def _seconds(work: Callable[[], Any], device: str) -> float:
    """The median of a few runs of work that takes milliseconds."""
    work()
    samples = []
    with undisturbed():
        for _ in range(7):
            if device != "cpu":
                torch.accelerator.synchronize()
            start = time.perf_counter()
            work()
            if device != "cpu":
                torch.accelerator.synchronize()
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)
