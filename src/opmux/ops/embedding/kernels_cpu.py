"""The row gather of the compiled CPU library, for Python."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import kernels
from opmux.native.layout import new_rows


def _rows(ids: Tensor, table: Tensor, *_: object) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


@opaque(fake=_rows)
def embedding_cpu(ids: Tensor, table: Tensor, first_id: int, zero_missing: bool) -> Tensor:
    """``table[ids - first_id]``: the table holds the ids ``first_id`` ... ``first_id + rows - 1``.

    Args:
        ids: any shape, int64 or int32.
        table: [rows, H], any dtype.
        zero_missing: an id without a row gives zeros; otherwise it raises.

    Returns: [*ids.shape, H] in the table's dtype.
    Raises: IndexError naming the id, unless ``zero_missing``.
    """
    if not ids.is_contiguous():
        ids = ids.contiguous()
    rows, width = table.shape
    stride, feature = table.stride()
    if feature != 1:
        table = table.contiguous()
        stride = width
    out = new_rows(ids, width, table.dtype)
    size = table.itemsize
    bad = kernels.gather_rows(
        ids.data_ptr(), ids.dtype is torch.int32, ids.numel(), table.data_ptr(), stride * size, first_id, rows,
        out.data_ptr(), width * size, zero_missing,
    )  # fmt: skip
    if bad:
        raise IndexError(
            f"embedding: id {ids.flatten()[bad - 1].item()} is outside the table, which holds the ids "
            f"{first_id} to {first_id + rows - 1}"
        )
    return out
