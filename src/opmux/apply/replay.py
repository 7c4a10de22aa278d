"""Decode steps on the CPU as a recorded list of kernel calls.

At one token the Python around a layer's op calls takes a third as long as its arithmetic. From one step to the next
only the place in the cache moves, so two recorded steps say how every kernel argument depends on the step. A third,
real step proves it: the same list of calls, and, replayed, the same bits. From then on a step is the list alone.

Whatever does not fit (another cache, batch or dtype, new cache memory, weights that lie elsewhere, ops decided anew) is
a real step, and recording begins again. Where the list proves not to be the step (torch computes something between the
calls, or the calls of one step differ from those of the next), real steps follow, and recording begins again after some
of them: ever more of them, since a model that always fails should not pay for recordings.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.custom_op import CustomOp
from ..core.route import Route
from ..native.recording import Recording, TorchCall, recording
from .cache import GrowingLayer

Run = Callable[[Tensor, Tensor, Tensor], Tensor]

_FEWEST_REAL_STEPS = 16  # after a first failure; twice as many after each further one
_MOST_DOUBLINGS = 10
_address = Tensor.data_ptr
_routes_of = operator.attrgetter("_routes")


class Replay:
    """The recorded decode step of one decoder stack.

    Args:
        ops: every op of the stack.

    Attributes:
        enabled: without it every step is a real one.
        failures: how often, one after the other, the recorded list was not the step.
    """

    def __init__(self, ops: Iterable[CustomOp] = ()) -> None:
        self.ops = list(ops)
        self.enabled = True
        self.failures = 0
        self._real_steps = 0  # to go until recording begins again
        self._lock = threading.Lock()
        self._slots: tuple[list[Any], list[str]] = ([], [])
        self._forget()

    def _forget(self) -> None:
        held = [(op._parameters, name) for op in self.ops for name, p in op._parameters.items() if p is not None]
        self._slots = [holder for holder, _ in held], [name for _, name in held]
        self._key: Any = None
        self._warm = False
        self._inputs: tuple[Tensor, ...] = ()
        self._first: tuple[int, Recording, Tensor] | None = None
        self._plan: _Plan | None = None
        self._proven = False

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, layers: list[Any], run: Run) -> Tensor:
        """The stack's result for one token a sequence.

        Args:
            hidden: [B, 1, H]; cos, sin: one row a sequence, or one for all.
            layers: the cache's layers, which the step takes one token further.
            run: makes the step from (hidden, cos, sin), for real.
        """
        if not (self.enabled and hidden.is_cpu and self._lock.acquire(blocking=False)):
            return run(hidden, cos, sin)
        try:
            return self._step((hidden, cos, sin), layers, run)
        finally:
            self._lock.release()

    def _step(self, inputs: tuple[Tensor, ...], layers: list[Any], run: Run) -> Tensor:
        if self._real_steps:
            self._real_steps -= 1
            return run(*inputs)
        key = self._key_of(inputs, layers)
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
        return self._learn(start, inputs, run)

    def _learn(self, start: int, inputs: tuple[Tensor, ...], run: Run) -> Tensor:
        if not self._warm:  # kernels are bound and shapes planned by a step that nobody watches
            self._warm = True
            return run(*inputs)
        if not self._inputs:
            self._inputs = tuple(t.clone() for t in inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        routes = [(op, op._routes, route, route.calls) for op in self.ops for route in op.routes]
        with recording() as made:
            out = run(*self._inputs)
        if self._plan is not None and not self._proven:
            self._proven = self._plan.predicts(start, made) and torch.equal(self._plan.replay(start), out)
            self._judge(self._proven)
        elif self._first is not None and self._first[0] == start - 1:
            taken = [(op, known, route, route.calls - calls) for op, known, route, calls in routes]
            self._plan = _Plan.of(self._first, (start, made), taken)
            if self._plan is None:
                self._judge(False)
        else:
            self._first = start, made, out
            self._plan, self._proven = None, False
        return out.clone()

    def _judge(self, good: bool) -> None:
        if good:
            self.failures = 0
            return
        self._real_steps = _FEWEST_REAL_STEPS << min(self.failures, _MOST_DOUBLINGS)
        self.failures += 1
        self._forget()

    def _key_of(self, inputs: tuple[Tensor, ...], layers: list[Any]) -> Any:
        """What a recording holds for: shapes, dtypes, the memory of cache and weights. None where nothing can be recorded."""
        batch, places = inputs[0].shape[0], []
        for layer in layers:
            if type(layer) is not GrowingLayer or not layer.has_room(batch, 1):
                return None
            places.append(layer.address)
        shapes = tuple((t.shape, t.dtype) for t in inputs)
        # Every step asks for hundreds of addresses: by C alone that takes half as long as by a comprehension.
        weights = list(map(_address, map(operator.getitem, *self._slots)))
        return shapes, places, weights, torch.is_inference_mode_enabled()

    # A copy of a model records for itself.
    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        return Replay(copy.deepcopy(self.ops, memo))

    def __reduce__(self) -> tuple[type[Replay], tuple[list[CustomOp]]]:
        return Replay, (self.ops,)


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
        self._taken = [(route, calls) for _, _, route, calls in taken if calls]
        known = {id(op): (op, routes) for op, routes, _, _ in taken}.values()
        self._ops, self._known = [op for op, _ in known], [routes for _, routes in known]

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
                if type(a) is not int or type(b) is not int or isinstance(kernels[call], TorchCall):
                    return None
                moves.append((call, place, b - a))
        return cls(start, made, out, moves, taken)

    def holds(self) -> bool:
        """Whether every op still goes where it went."""
        return all(map(operator.is_, map(_routes_of, self._ops), self._known))

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
        for route, calls in self._taken:
            route.calls += calls

    def _move(self, start: int) -> None:
        steps = start - self._start
        for arguments, place, base, by in self._moves:
            arguments[place] = base + steps * by  # type: ignore[operator]
