"""Attention on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import new_like

_NO_MASK, _BOOL, _ADDED = 0, 1, 2


@opaque(fake=lambda query, key, value, *_: query.new_empty((*query.shape[:3], value.shape[-1])))
def attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float, causal: bool,
    sliding_window: int, soft_cap: float, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(cap(scale * q k^T) + mask) v`` for heads in groups: query head h reads key head ``h * K // N``.

    The queries are the last S of a sequence's keys. Scores, softmax and sums are fp32; in bf16 the softmax's weights
    are rounded to bf16 before the product with the values, as in torch's kernel. Rows that see no key are zero.

    Args:
        query: [B, S, N, D]; key: [B, L, K, D]; value: [B, L, K, Dv], one dtype of fp32, bf16, fp16. Views with a dense
            last dimension, such as a cache's, are read where they are.
        attn_mask: broadcasts to [B, N, S, L or more]; bool (True means attend) or floating (added). Or None.
        causal: a query sees the keys up to its own position.
        sliding_window: keys that a query sees, itself included; 0 means all.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 means not.
        lengths: [B] int64, the keys of each sequence, the rest of L being unused; None means L.

    Returns: [B, S, N, Dv] in query's dtype, contiguous.
    """
    batch, queries, heads, size = query.shape
    _, keys, key_heads, value_size = value.shape
    dtype = query.dtype
    if key.dtype is not dtype or value.dtype is not dtype or key.shape != (batch, keys, key_heads, size) or (
        value.shape[0] != batch or heads % (key_heads or 1)
    ):  # fmt: skip
        raise ValueError(
            "attention_cpu takes q [B, S, N, D], k [B, L, K, D], v [B, L, K, Dv] of one dtype, N a multiple of K; it "
            f"got {tuple(query.shape)} {dtype}, {tuple(key.shape)} {key.dtype}, {tuple(value.shape)} {value.dtype}."
        )
    (q_batch, q_token, q_head, q_dense), (k_batch, k_token, k_head, k_dense) = query.stride(), key.stride()
    v_batch, v_token, v_head, v_dense = value.stride()
    if q_dense != 1 or k_dense != 1 or v_dense != 1:
        query, key, value = (_dense(t) for t in (query, key, value))
        q_batch, q_token, q_head, _ = query.stride()
        k_batch, k_token, k_head, _ = key.stride()
        v_batch, v_token, v_head, _ = value.stride()
    mask_kind, mask = _NO_MASK, None
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = _BOOL if attn_mask.dtype is torch.bool else _ADDED
        mask = attn_mask if mask_kind == _BOOL or attn_mask.dtype is dtype else attn_mask.to(dtype)
        mask = mask[..., :keys].expand(batch, heads, queries, keys)
        mask_strides = mask.stride()
    if lengths is not None:
        lengths = lengths.to(torch.int64).contiguous()
    out = new_like(query, value_size)
    kernels.attention(
        out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
        None if lengths is None else lengths.data_ptr(),
        batch, queries, keys, heads, key_heads, size, value_size,
        q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, *mask_strides,
        float(scale), float(soft_cap), causal, sliding_window, mask_kind, DTYPE_CODE[dtype],
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format)
