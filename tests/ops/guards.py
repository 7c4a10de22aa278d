"""Outputs between guards, and tensors in every memory layout, for tests of the CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SENTINEL = 0x5A
GUARD_BYTES = 256


class Guard:
    """Stands for ``torch`` and ``new_like`` in a kernel module: every output lies between two guards."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def _allocate(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD_BYTES,), SENTINEL, dtype=torch.uint8)
        self.buffers.append((buffer, size))
        return buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).as_strided(shape, strides)

    def new_like(self, x: Tensor, width: int | None = None) -> Tensor:
        shape = x.shape if width is None else (*x.shape[:-1], width)
        return self._allocate(shape, torch.empty(shape, device="meta").stride(), x.dtype)

    def new_rows(self, index: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        shape = (*index.shape, width)
        return self._allocate(shape, torch.empty(shape, device="meta").stride(), dtype)

    def empty_like(self, x: Tensor) -> Tensor:
        return self._allocate(x.shape, torch.empty_like(x, device="meta").stride(), x.dtype)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: str) -> Tensor:
        return self._allocate(shape, torch.empty(shape, device="meta").stride(), dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def check(self) -> None:
        for buffer, size in self.buffers:
            assert (buffer[:GUARD_BYTES] == SENTINEL).all()
            assert (buffer[GUARD_BYTES + size :] == SENTINEL).all()


def offset(x: Tensor) -> Tensor:
    """The same values at an address that is a multiple of the element size only."""
    return torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    """The same values in rows with NaN between them."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    """The same values with a last stride that is not 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def expanded(x: Tensor) -> Tensor:
    """Row 0 for every row, with a row stride of 0."""
    return x[:1].expand(x.shape)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [offset, strided, transposed, expanded]
