"""Recording the kernel calls of one run, so that they can be made again without the Python between them.

The same idea as a CUDA graph: a run of fixed shapes is a fixed list of kernel calls on fixed addresses. Memory that the
run allocates is kept, so its addresses stay good. Sums and products that torch makes between the kernels are calls like
the others; anything else that torch computes is not recorded, and the recording says so.
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

# Kernels take numbers; a call of torch's has its operands' shapes, strides and dtypes beside their addresses.
Argument = int | float | None | tuple[Any, ...]

_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
# What torch may compute between kernels, by the function that computes it into given memory.
_COMPUTED: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add.out,
    torch.ops.aten.mul.Tensor: torch.ops.aten.mul.out,
}
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


class TorchCall:
    """A call of torch's into memory that is kept. Its arguments are for comparing calls; it always does the same."""

    def __init__(self, function: Callable[..., Tensor], operands: tuple[Any, ...], out: Tensor) -> None:
        self.function, self.operands, self.out = function, operands, out

    def __call__(self, *arguments: Argument) -> int:
        self.function(*self.operands, out=self.out)
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchCall) and other.function is self.function

    __hash__ = None  # type: ignore[assignment]

    def arguments(self) -> list[Argument]:
        """Addresses and layouts of the operands and of the result."""
        described: list[Argument] = []
        for operand in (*self.operands, self.out):
            if isinstance(operand, Tensor):
                described += [operand.data_ptr(), (tuple(operand.shape), operand.stride(), operand.dtype)]
            else:
                described.append(operand)
        return described


class _Watch(TorchDispatchMode):
    """Records what torch may compute, and notes whether, outside our ops, it does more than that, allocate and view."""

    def __init__(self, made: Recording) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        into = _COMPUTED.get(func)
        if into is not None and not kwargs and isinstance(out, Tensor) and out.is_cpu:
            call = TorchCall(into, args, out)
            self._made.kept.append(out)
            self._made.calls.append((call, call.arguments()))
        elif func.namespace != "opmux" and not func.is_view and func not in _ALLOCATIONS:
            self._made.whole = False
        return out


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
