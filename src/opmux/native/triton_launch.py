"""Launches Triton kernels with little host work.

``kernel[grid](...)`` binds, types and specialises every argument at each call: 14 us for a small kernel, twice what a
C++ op takes in all. Here a launch after the first is a look-up by device, dtypes and constexprs, and one call of
Triton's C launcher. For that to be right the compiled code may depend on nothing else, so each kernel is compiled in
two variants: one that assumes that every vector pointer and every stride is a multiple of 16 (wide loads), one that
assumes nothing.

The direct call uses ``CompiledKernel.run``, ``function`` and ``packed_metadata``, which Triton does not document (alike
in 3.6 and 3.9). Where they are missing, in the interpreter, on ROCm and on XPU, every launch goes through
``kernel[grid]``. Triton's own launch hooks (Proton) see only those launches; profilers that read the driver's records
see all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..core.errors import HardwareMissingError

_DIRECT = ("run", "function", "packed_metadata")
_cuda = torch.version.cuda is not None and hasattr(torch._C, "_cuda_getCurrentRawStream")

if _cuda:
    _current_device = torch._C._cuda_getDevice
    _raw_stream = torch._C._cuda_getCurrentRawStream


class Launcher:
    """One Triton kernel and its compiled variants. ``kernel`` below makes it.

    The kernel's parameters are, in this order: vector pointers, loose pointers (read an element at a time, so their
    alignment does not matter), multiples (row strides and widths), other scalars, constexprs. Every scalar is typed by
    annotation.
    """

    __slots__ = ("_compiled", "_multiples", "_vectors", "aligned", "any_alignment")

    def __init__(self, function: Callable[..., Any], loose: Sequence[str], multiples: Sequence[str]) -> None:
        names = list(inspect.signature(function).parameters)
        pointers = [name for name in names if name.endswith("_ptr")]
        scalars = [name for name in names if name not in pointers and not name.isupper()]
        self._vectors = len(pointers) - len(loose)
        self._multiples = len(multiples)
        if pointers[self._vectors :] != list(loose) or scalars[: len(multiples)] != list(multiples):
            raise TypeError(f"{function.__name__}: the parameters are not in the order that Launcher documents")
        never = [*loose, *scalars[len(multiples) :]]
        self.aligned = triton.jit(do_not_specialize=never, do_not_specialize_on_alignment=never)(function)
        everything = [*pointers, *scalars]
        self.any_alignment = triton.jit(do_not_specialize=everything, do_not_specialize_on_alignment=everything)(
            function
        )
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> None:
        """Launch on the tensors' device and its current stream, whatever the current device is."""
        device = tensors[0].get_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers[: self._vectors]:
            bits |= pointer
        for value in scalars[: self._multiples]:
            bits |= value  # type: ignore[operator]
        aligned = not bits & 15
        key = (device, aligned, num_warps, num_stages, constants, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        if compiled is None:
            self._launch_through_triton(key, grid, tensors, scalars, constants)
        elif device == _current_device():
            run, function, metadata, _ = compiled
            run(*grid, _raw_stream(device), function, metadata, None, None, None, *pointers, *scalars, *constants)
        else:
            with torch.cuda.device(device):
                self(grid, tensors, scalars, constants, num_warps, num_stages)

    def _launch_through_triton(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        _, aligned, num_warps, num_stages = key[:4]
        variant = self.aligned if aligned else self.any_alignment
        where = tensors[0].device
        if where.type == "cpu":
            if isinstance(variant, triton.runtime.JITFunction):
                raise HardwareMissingError(
                    f"The Triton kernel {variant.fn.__name__} was called with CPU tensors. Triton kernels run on CUDA, "
                    "ROCm and XPU devices. Move the tensors there, or call the op itself (it picks a method for its "
                    "tensors' device), or set TRITON_INTERPRET=1 before Triton is imported to interpret it."
                )
            variant[grid](*tensors, *scalars, *constants, num_warps=num_warps, num_stages=num_stages)
            return
        with torch.get_device_module(where).device(where):
            compiled = variant[grid](*tensors, *scalars, *constants, num_warps=num_warps, num_stages=num_stages)
        if _cuda and where.type == "cuda" and all(hasattr(compiled, name) for name in _DIRECT):
            # The kernel object is kept beside its parts: it unloads its code when it is freed.
            self._compiled[key] = (*(getattr(compiled, name) for name in _DIRECT), compiled)


def kernel(*, loose: Sequence[str] = (), multiples: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Launcher]:
    """Make a Triton kernel a ``Launcher``; see there for the order of its parameters.

    Names tell the kinds apart: pointers end in ``_ptr``, constexprs are upper case.
    """
    return lambda function: Launcher(function, loose, multiples)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``, and at least 1."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
