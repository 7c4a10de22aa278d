"""The clock of ``bench``: candidates take turns, each on data past the cache (``benchmarks/protocol.md``)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .compare import undisturbed

Calls = Sequence[Callable[[], Any]]
"""One call for each set of data; a candidate goes round over them."""

Sampler = Callable[[], "tuple[float, int]"]
"""Takes one sample: (seconds, calls in them)."""

_SAMPLE_S = 3e-4  # a shorter sample would time the clock
_LEAST_ROUNDS = 7
_MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        median_s: over the rounds.
        spread: distance between the quartiles, as a part of the median.
        rounds: samples taken.
    """

    median_s: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        low, median, high = statistics.quantiles(samples, n=4)
        return cls(median, (high - low) / median, len(samples))


def take_turns(candidates: Mapping[str, Sampler], min_time_s: float) -> dict[str, Timing]:
    """Time each candidate for at least ``min_time_s``, alternately, in an order that changes every round."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    with undisturbed():
        for turn in range(_MOST_ROUNDS):
            if turn >= _LEAST_ROUNDS and min(spent.values()) >= min_time_s:
                break
            for name in list(candidates) if turn % 2 == 0 else reversed(list(candidates)):
                seconds, calls = candidates[name]()
                samples[name].append(seconds / calls)
                spent[name] += seconds
    return {name: Timing.of(values) for name, values in samples.items()}


def host_s(call: Callable[[], Any], device: str) -> float:
    """Seconds that the caller is busy with one call; a GPU may still be at work after it."""
    samples = []
    for _ in range(20):
        call()
    with undisturbed():
        for _ in range(15):
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(50):
                call()
            samples.append((time.perf_counter() - start) / 50)
    _synchronize(device)
    return statistics.median(samples)


def cache_bytes(device: str) -> int:
    """Size of the last cache before memory."""
    if device != "cpu":
        return int(torch.get_device_module(device).get_device_properties().L2_cache_size)
    sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 << 20)


def _size(path: Path) -> int:
    text = path.read_text().strip()
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)


def sampler(calls: Calls, device: str) -> Sampler:
    """What times a candidate; everything is warm when it is returned."""
    for call in calls:
        call()
    return _cpu_sampler(calls) if device == "cpu" else _gpu_sampler(calls)


def _cpu_sampler(calls: Calls) -> Sampler:
    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            next(rounds)()
        return time.perf_counter() - start

    rounds = itertools.cycle(calls)
    once = min(run(1) for _ in range(3))
    count = max(1, min(2000, round(_SAMPLE_S / once)))
    return lambda: (run(count), count)


def _gpu_sampler(calls: Calls) -> Sampler:
    """Replays of a graph that holds one call for each set of data: the gaps between launches do not count."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> tuple[float, int]:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, len(calls)

    sample()
    return sample


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
