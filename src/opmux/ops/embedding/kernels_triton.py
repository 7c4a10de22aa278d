"""Triton kernel of the embedding gather: ids of any integer dtype, 64-bit offsets, a new output."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import Launch, kernel, new, next_power_of_2, plan


@kernel(loose=("ids_ptr",), multiples=("table_stride", "width"))
def _embedding_kernel(
    table_ptr, y_ptr, ids_ptr, table_stride: tl.int64, width: tl.int64,
    first: tl.int64, last: tl.int64, added_first: tl.int64, added_last: tl.int64, added_row: tl.int64,
    blocks_per_row: tl.int32,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    token = tl.load(ids_ptr + row).to(tl.int64)
    is_base = (token >= first) & (token < last)
    is_added = (token >= added_first) & (token < added_last)
    source = tl.where(is_base, token - first, token - added_first + added_row)
    readable = tl.where(is_base | is_added, width, 0)
    values = tl.load(table_ptr + source * table_stride + cols, mask=cols < readable, other=0)
    tl.store(y_ptr + row * width + cols, values, mask=mask)


def tile(width: int) -> tuple[int, int]:
    """``(block, warps)`` for rows of ``width`` elements."""
    block = min(2048, next_power_of_2(width))
    return block, max(1, block // 512)


@plan
def _plan(
    n_ids: int,
    width: int,
    table_stride: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    ranges: tuple[int, ...],
    config: tuple[int, int] | None,
) -> Launch:
    block, warps = config or tile(width)
    per_row = -(-width // block)
    scalars = (table_stride, width, *ranges, per_row)
    return _embedding_kernel.prepare((n_ids * per_row, 1, 1), scalars, (block, width % block == 0), warps)


def launch(
    ids: Tensor,
    table: Tensor,
    first: int = 0,
    last: int | None = None,
    added_first: int = 0,
    added_last: int = 0,
    added_row: int = 0,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """``embedding_triton`` with a block and a number of warps other than ``tile``'s."""
    table, n_rows, width, table_stride = as_rows(table)
    y = new((*ids.shape, width), table.dtype, table.device)
    n_ids = ids.numel()
    if n_ids == 0 or width == 0:
        return y
    ranges = (first, first + n_rows if last is None else last, added_first, added_last, added_row)
    ids = ids.contiguous()
    _plan(n_ids, width, table_stride, (table.dtype, ids.dtype), ranges, config)(table, y, ids)
    return y


@opaque(fake=lambda ids, table, *_: torch.empty((*ids.shape, table.shape[-1]), dtype=table.dtype, device=table.device))
def embedding_triton(
    ids: Tensor,
    table: Tensor,
    first: int = 0,
    last: int | None = None,
    added_first: int = 0,
    added_last: int = 0,
    added_row: int = 0,
) -> Tensor:
    """Rows of ``table`` [V, H] for ids of any shape -> [*ids.shape, H]; bit-identical copies.

    Ids in ``first .. last-1`` (``last`` None: as many as the table has rows) name the rows from 0 on, ids in
    ``added_first .. added_last-1`` the rows from ``added_row`` on: the two parts of a shard of a vocabulary. Every
    other id, negative ones too, gives a row of zeros and reads nothing.
    """
    return launch(ids, table, first, last, added_first, added_last, added_row)
