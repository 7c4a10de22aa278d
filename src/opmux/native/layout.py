"""Tensors as kernels see them: rows of contiguous elements, any distance apart."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """``x`` [..., D] as rows: (tensor, rows, D, row stride in elements).

    The tensor is ``x`` itself, a view, or, where the strides allow neither, a contiguous copy. It must stay referenced
    while a kernel works on its address.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // width if width else 0, width, width
    if x.dim() == 1:
        return x.contiguous(), 1, width, width
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.size(0) if width else 0, width, rows.stride(0)
