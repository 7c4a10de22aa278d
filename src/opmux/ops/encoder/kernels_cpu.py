"""Attention of encoders on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels

from .segments import boundaries


@opaque(fake=lambda query, *_: query.new_empty(query.shape))
def encoder_attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, scale: float,
    row_table: Tensor | None = None, column_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(scale * q k^T + bias) v`` of whole sequences; query head h reads key head ``h * K // N``.

    Scores, softmax and sums are fp32; in bf16 the softmax's weights are rounded to bf16 before the product with the
    values. Memory beyond the result does not grow with the number of tokens.

    Args:
        query: [B, S, N, D]; key and value: [B, S, K, D], one dtype of fp32, bf16, fp16, read where they are if their
            last dimension is dense.
        cu_seqlens: [n + 1] integers on any device: tokens [c[i], c[i + 1]) of each row see each other only. None means
            whole rows. ValueError where they do not cover S in order.
        row_table: [2 H - 1, D], column_table: [2 W - 1, D], S = H W: the product of the unscaled query with entry
            ``distance + size - 1`` of each is added to the scaled score. None for both means no bias.

    Returns: [B, S, N, D] in query's dtype, contiguous.
    """
    batch, tokens, heads, size = query.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    bounds = None if cu_seqlens is None else cu_seqlens.to(device="cpu", dtype=torch.int64).contiguous()
    tables = [t.to(query.dtype).contiguous() for t in (row_table, column_table) if t is not None] or (None, None)
    grid = [0 if t is None else t.shape[0] // 2 + 1 for t in tables]
    out = torch.empty((batch, tokens, heads, size), dtype=query.dtype, device="cpu")
    refused = kernels.encoder_attention(
        out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
        None if bounds is None else bounds.data_ptr(), *(None if t is None else t.data_ptr() for t in tables),
        batch, tokens, heads, key.shape[2], size, 1 if bounds is None else bounds.numel() - 1, *grid,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], float(scale), DTYPE_CODE[query.dtype],
    )  # fmt: skip
    if refused and bounds is not None:
        boundaries(bounds, tokens)  # raises
    return out
