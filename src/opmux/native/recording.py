"""Recording the kernel calls of one run, so that they can be made again without the Python between them.

The same idea as a CUDA graph: a run of fixed shapes is a fixed list of kernel calls on fixed addresses. Memory that the
run allocates is kept, so its addresses stay good.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .loader import kernels

Argument = int | float | None

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_patching = threading.RLock()  # what a recording wraps belongs to the process, so recordings take turns


@dataclass
class Recording:
    """Kernel calls in order, and the memory that was allocated between them.

    Attributes:
        whole: whether the calls are all that happened. False where torch computed or copied something in between.
    """

    calls: list[tuple[Callable[..., int], list[Argument]]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    whole: bool = True

    def relative(self) -> list[list[Any]]:
        """The calls' arguments, with addresses inside kept memory as (number of the tensor, offset)."""
        spans = sorted((t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes(), n) for n, t in enumerate(self.kept))
        return [[_within(spans, a) for a in arguments] for _, arguments in self.calls]


def _within(spans: list[tuple[int, int, int]], argument: Argument) -> Any:
    if type(argument) is not int or argument < 4096:  # sizes and codes
        return argument
    for begin, end, number in spans:
        if begin <= argument < end:
            return number, argument - begin
    return argument


class _Watch(TorchDispatchMode):
    """Notes whether torch, outside our ops, does anything but allocate and view."""

    def __init__(self, made: Recording) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "opmux" and not func.is_view and func not in _ALLOCATIONS:
            self._made.whole = False
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record this thread's kernel calls and keep what it allocates by ``torch.empty`` and ``torch.empty_like``."""
    made = Recording()
    thread = threading.get_ident()

    def recorded(kernel: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Argument) -> int:
            if threading.get_ident() == thread:
                made.calls.append((kernel, list(arguments)))
            return kernel(*arguments)

        return call

    def keeping(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if threading.get_ident() == thread:
                made.kept.append(tensor)
            return tensor

        return call

    with _patching:
        bound = {name: kernel for name, kernel in vars(kernels).items() if not name.startswith("_")}
        allocators: dict[str, Any] = {"empty": torch.empty, "empty_like": torch.empty_like}
        try:
            vars(kernels).update({name: recorded(kernel) for name, kernel in bound.items()})
            for name, allocate in allocators.items():
                setattr(torch, name, keeping(allocate))
            with _Watch(made):
                yield made
        finally:
            vars(kernels).update(bound)
            for name, allocate in allocators.items():
                setattr(torch, name, allocate)
