"""Launches Triton kernels with little host work.

``kernel[grid](...)`` binds, types and specialises every argument at each call: 14 us for a small kernel, twice what a
C++ op takes in all. Here everything that follows from shapes and dtypes is worked out once and kept as a ``Launch``
(the ops' cached ``_plan`` functions); a call then reads addresses and calls Triton's C launcher. For that to be right
the compiled code may depend on nothing else, so each kernel is compiled in two variants: one that assumes that every
vector pointer and every stride is a multiple of 16 (wide loads), one that assumes nothing.

The direct call uses ``CompiledKernel.run``, ``function`` and ``packed_metadata``, which Triton does not document (alike
in 3.6 and 3.9). Where they are missing, in the interpreter, on ROCm and on XPU, every launch goes through
``kernel[grid]``. Triton's own launch hooks (Proton) see only those launches; profilers that read the driver's records
see all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..core.errors import HardwareMissingError

_DIRECT = ("run", "function", "packed_metadata")
_cuda = torch.version.cuda is not None and hasattr(torch._C, "_cuda_getCurrentRawStream")
plan = functools.lru_cache(maxsize=8192)  # of launches, by the shapes, strides and dtypes of a call

if _cuda:
    _current_device = torch._C._cuda_getDevice
    _raw_stream = torch._C._cuda_getCurrentRawStream


class Launcher:
    """One Triton kernel and its compiled variants. ``kernel`` below makes it.

    The kernel's parameters are, in this order: vector pointers, loose pointers (read an element at a time, so their
    alignment does not matter), multiples (row strides and widths), other scalars, constexprs. Every scalar is typed by
    annotation. fp8 tensors come as bytes.
    """

    __slots__ = ("aligned", "any_alignment", "compiled", "multiples", "vectors")

    def __init__(self, function: Callable[..., Any], loose: Sequence[str], multiples: Sequence[str]) -> None:
        names = list(inspect.signature(function).parameters)
        pointers = [name for name in names if name.endswith("_ptr")]
        scalars = [name for name in names if name not in pointers and not name.isupper()]
        self.vectors = len(pointers) - len(loose)
        self.multiples = len(multiples)
        if pointers[self.vectors :] != list(loose) or scalars[: len(multiples)] != list(multiples):
            raise TypeError(f"{function.__name__}: the parameters are not in the order that Launcher documents")
        never = [*loose, *scalars[len(multiples) :]]
        self.aligned = triton.jit(do_not_specialize=never, do_not_specialize_on_alignment=never)(function)
        everything = [*pointers, *scalars]
        self.any_alignment = triton.jit(do_not_specialize=everything, do_not_specialize_on_alignment=everything)(
            function
        )
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def prepare(
        self,
        grid: tuple[int, int, int],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> Launch:
        """A launch of this grid with these scalars. It is for tensors of the dtypes of its first call only."""
        return Launch(self, grid, scalars, constants, num_warps, num_stages)


class Launch:
    """One kernel with everything but its tensors. Call it with them, in the order of the kernel's pointers."""

    __slots__ = ("_bits", "_constants", "_grid", "_launcher", "_options", "_ready", "_scalars", "_tail", "_vectors")

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> None:
        self._launcher, self._grid, self._scalars, self._constants = launcher, grid, scalars, constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._vectors = launcher.vectors
        self._bits = 0
        for value in scalars[: launcher.multiples]:
            self._bits |= value  # type: ignore[operator]
        self._tail = (*scalars, *constants)
        self._ready: dict[tuple[int, bool], tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the tensors' device and its current stream, whatever the current device is."""
        device = tensors[0].get_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = self._bits
        for pointer in pointers[: self._vectors]:
            bits |= pointer
        ready = self._ready.get((device, not bits & 15))
        if ready is None:
            self._first(tensors, device, not bits & 15)
        elif device == _current_device():
            run, grid_x, grid_y, grid_z, function, metadata, _ = ready
            run(
                grid_x, grid_y, grid_z, _raw_stream(device), function, metadata, None, None, None,
                *pointers, *self._tail,
            )  # fmt: skip
        else:
            with torch.cuda.device(device):
                self(*tensors)

    def _first(self, tensors: tuple[Tensor, ...], device: int, aligned: bool) -> None:
        """The first call on a device: take the code that another launch had compiled, or launch through Triton."""
        key = (device, aligned, self._constants, *self._options.values(), *[tensor.dtype for tensor in tensors])
        compiled = self._launcher.compiled.get(key)
        if compiled is None:
            self._launch_through_triton(key, tensors, aligned)
            return
        run, function, metadata, kept = compiled
        self._ready[device, aligned] = (run, *self._grid, function, metadata, kept)
        self(*tensors)

    def _launch_through_triton(self, key: tuple[Any, ...], tensors: tuple[Tensor, ...], aligned: bool) -> None:
        variant = self._launcher.aligned if aligned else self._launcher.any_alignment
        arguments = (*[_without_fp8(tensor) for tensor in tensors], *self._tail)
        where = tensors[0].device
        if where.type == "cpu":
            if isinstance(variant, triton.runtime.JITFunction):
                raise HardwareMissingError(
                    f"The Triton kernel {variant.fn.__name__} was called with CPU tensors. Triton kernels run on CUDA, "
                    "ROCm and XPU devices. Move the tensors there, or call the op itself (it picks a method for its "
                    "tensors' device), or set TRITON_INTERPRET=1 before Triton is imported to interpret it."
                )
            variant[self._grid](*arguments, **self._options)
            return
        with torch.get_device_module(where).device(where):
            compiled = variant[self._grid](*arguments, **self._options)
        if _cuda and where.type == "cuda" and all(hasattr(compiled, name) for name in _DIRECT):
            # The kernel object is kept beside its parts: it unloads its code when it is freed.
            self._launcher.compiled[key] = (*(getattr(compiled, name) for name in _DIRECT), compiled)


def kernel(*, loose: Sequence[str] = (), multiples: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Launcher]:
    """Make a Triton kernel a ``Launcher``; see there for the order of its parameters.

    Names tell the kinds apart: pointers end in ``_ptr``, constexprs are upper case.
    """
    return lambda function: Launcher(function, loose, multiples)


def new_like(x: Tensor) -> Tensor:
    """A new contiguous tensor of x's shape and dtype. ``empty_like`` takes half the time of ``empty``."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new contiguous tensor; as ``torch.empty`` in half the time."""
    return torch.empty_like(_template(shape, dtype, device))


@functools.lru_cache(maxsize=8192)
def _template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape without memory of its own: one element, expanded."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _without_fp8(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``, and at least 1."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
