"""Tensors as kernels see them: rows of contiguous elements, any distance apart."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """``x`` [..., D] as rows: (tensor, rows, D, row stride in elements).

    The tensor is ``x`` itself, a view, or, where the strides allow neither, a contiguous copy. It must stay referenced
    while a kernel works on its address.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // (width or 1), width, width
    if x.dim() == 1:
        return x.contiguous(), 1, width, width
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.shape[0] if width else 0, width, rows.stride(0)


def new_like(x: Tensor, width: int | None = None) -> Tensor:
    """A new contiguous CPU tensor with x's dtype and x's shape, the last dimension replaced by ``width`` if given.

    ``empty_like`` of a prepared tensor is a microsecond faster than handing a shape to torch.
    """
    if width is None and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(_template(x.shape if width is None else x.shape[:-1], x.dtype, width))


def new_rows(index: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """A new contiguous CPU tensor with a row of ``width`` elements for every element of ``index``."""
    return torch.empty_like(_template(index.shape, dtype, width))


@lru_cache(maxsize=4096)
def _template(shape: torch.Size, dtype: torch.dtype, width: int | None) -> Tensor:
    """A tensor of that shape, and a last dimension, without memory of its own: one element, expanded."""
    wanted = shape if width is None else (*shape, width)
    if 0 in wanted:
        return torch.empty(wanted, dtype=dtype, device="cpu")
    return torch.empty((), dtype=dtype, device="cpu").expand(wanted)
