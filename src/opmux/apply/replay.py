"""Decode steps on the CPU as a recorded list of kernel calls.

At one token the Python around a layer's op calls takes a third as long as its arithmetic. From one step to the next
only the place in the cache moves, so two recorded steps say how every kernel argument depends on the step. A third,
real step proves it: the same list of calls, and, replayed, the same bits. From then on a step is the list alone. Where
torch computes something between the calls (a copy into the cache, say), the list is not the step, and nothing is
replayed.

Whatever does not fit (another cache, batch or dtype, new cache memory, weights that lie elsewhere, ops decided anew) is
a real step, and recording begins again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.custom_op import CustomOp
from ..core.route import Route
from ..native.recording import Recording, recording
from .cache import GrowingLayer

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Replay:
    """The recorded decode step of one decoder stack."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        self._useless = False

    def _forget(self) -> None:
        self._key: Any = None
        self._warm = False
        self._inputs: tuple[Tensor, ...] = ()
        self._first: tuple[int, Recording, Tensor] | None = None
        self._plan: _Plan | None = None
        self._proven = False

    def step(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, layers: list[Any], ops: Iterable[CustomOp], run: Run
    ) -> Tensor:
        """The stack's result for one token a sequence.

        Args:
            hidden: [B, 1, H]; cos, sin: one row a sequence, or one for all.
            layers: the cache's layers, which the step takes one token further.
            ops: every op of the stack.
            run: makes the step from (hidden, cos, sin), for real.
        """
        if self._useless or not hidden.is_cpu or not self._lock.acquire(blocking=False):
            return run(hidden, cos, sin)
        try:
            return self._step((hidden, cos, sin), layers, ops, run)
        finally:
            self._lock.release()

    def _step(self, inputs: tuple[Tensor, ...], layers: list[Any], ops: Iterable[CustomOp], run: Run) -> Tensor:
        key = _key(inputs, layers, ops)
        if key is None:
            self._forget()
            return run(*inputs)
        start = layers[0].get_seq_length()
        if key != self._key:
            self._forget()
            self._key = key
        if self._plan is not None and self._proven and self._plan.holds():
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
            for layer in layers:
                layer.take(1)
            self._plan.count()
            return self._plan.replay(start).clone()
        return self._learn(start, inputs, ops, run)

    def _learn(self, start: int, inputs: tuple[Tensor, ...], ops: Iterable[CustomOp], run: Run) -> Tensor:
        if not self._warm:  # kernels are bound and shapes planned by a step that nobody watches
            self._warm = True
            return run(*inputs)
        if not self._inputs:
            self._inputs = tuple(t.clone() for t in inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        routes = [(op, op._routes, route, route.calls) for op in ops for route in op.routes]
        with recording() as made:
            out = run(*self._inputs)
        if self._plan is not None and not self._proven:
            self._proven = self._plan.predicts(start, made) and torch.equal(self._plan.replay(start), out)
            self._useless = not self._proven
        elif self._first is not None and self._first[0] == start - 1:
            taken = [(op, known, route, route.calls - calls) for op, known, route, calls in routes]
            self._plan = _Plan.of(self._first, (start, made), taken)
            self._useless = self._plan is None
        else:
            self._first = start, made, out
            self._plan, self._proven = None, False
        return out.clone()

    # A copy of a model records for itself.
    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        return Replay()

    def __reduce__(self) -> tuple[type[Replay], tuple[()]]:
        return Replay, ()


class _Plan:
    """The calls of a step, and which arguments move by how much from step to step."""

    def __init__(
        self, start: int, made: Recording, out: Tensor, moves: list[tuple[int, int, int]],
        taken: list[tuple[CustomOp, Any, Route, int]],
    ) -> None:  # fmt: skip
        self._start = start
        self._made = made
        self._out = out
        self._calls = [(kernel, list(arguments)) for kernel, arguments in made.calls]
        self._moves = [(self._calls[call][1], place, made.calls[call][1][place], by) for call, place, by in moves]
        self._taken = taken

    @classmethod
    def of(
        cls, first: tuple[int, Recording, Tensor], second: tuple[int, Recording],
        taken: list[tuple[CustomOp, Any, Route, int]],
    ) -> _Plan | None:  # fmt: skip
        """The plan that two steps in a row suggest; None where they are not the same list of calls."""
        start, made, out = first
        before, after = made.relative(), second[1].relative()
        kernels = [kernel for kernel, _ in made.calls]
        if not (made.whole and second[1].whole) or not kernels or kernels != [kernel for kernel, _ in second[1].calls]:
            return None
        moves = []
        for call, (old, new) in enumerate(zip(before, after, strict=True)):
            if len(old) != len(new):
                return None
            for place, (a, b) in enumerate(zip(old, new, strict=True)):
                if a == b:
                    continue
                if type(a) is not int or type(b) is not int:
                    return None
                moves.append((call, place, b - a))
        return cls(start, made, out, moves, taken)

    def holds(self) -> bool:
        """Whether every op still goes where it went."""
        return all(op._routes is known for op, known, _, _ in self._taken)

    def predicts(self, start: int, made: Recording) -> bool:
        """Whether a real step made exactly these calls."""
        self._move(start)
        mine = Recording(self._calls, self._made.kept).relative()
        same = [kernel for kernel, _ in self._calls] == [kernel for kernel, _ in made.calls]
        return same and made.whole and mine == made.relative()

    def replay(self, start: int) -> Tensor:
        """Make the calls; the result lies in memory that the next replay writes again."""
        self._move(start)
        for kernel, arguments in self._calls:
            kernel(*arguments)
        return self._out

    def count(self) -> None:
        """Count the calls that a replay stands for."""
        for _, _, route, calls in self._taken:
            route.calls += calls

    def _move(self, start: int) -> None:
        steps = start - self._start
        for arguments, place, base, by in self._moves:
            arguments[place] = base + steps * by  # type: ignore[operator]


def _key(inputs: tuple[Tensor, ...], layers: list[Any], ops: Iterable[CustomOp]) -> Any:
    """What a recording holds for: shapes, dtypes, the memory of cache and weights. None where there is nothing to record."""
    hidden = inputs[0]
    batch, places = hidden.shape[0], []
    for layer in layers:
        if type(layer) is not GrowingLayer or not layer.has_room(batch, 1):
            return None
        places.append(layer.address)
    shapes = tuple((t.shape, t.dtype) for t in inputs)
    weights = [None if p is None else p.data_ptr() for op in ops for p in op._parameters.values()]
    return shapes, tuple(places), weights, torch.is_inference_mode_enabled()
