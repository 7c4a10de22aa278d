"""Attention on the CPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels

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
    template, sizes, code = _plan(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype)
    mask_kind, mask = _NO_MASK, None
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        batch, queries, keys, heads = sizes[:4]
        mask_kind = _BOOL if attn_mask.dtype is torch.bool else _ADDED
        mask = attn_mask if mask_kind == _BOOL else attn_mask.to(query.dtype)
        mask = mask[..., :keys].expand(batch, heads, queries, keys)
        mask_strides = mask.stride()
    if lengths is not None:
        lengths = lengths.to(torch.int64).contiguous()
    out = torch.empty_like(template)
    refused = kernels.attention(
        out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(),
        None if lengths is None else lengths.data_ptr(), *sizes, *query.stride(), *key.stride(), *value.stride(),
        *mask_strides, float(scale), float(soft_cap), causal, sliding_window, mask_kind, code,
    )  # fmt: skip
    if refused:
        query, key, value = (t.clone(memory_format=torch.contiguous_format) for t in (query, key, value))
        return attention_cpu(query, key, value, attn_mask, scale, causal, sliding_window, soft_cap, lengths)
    return out


@lru_cache(maxsize=4096)
def _plan(
    query: torch.Size, key: torch.Size, value: torch.Size, dtype: torch.dtype, *others: torch.dtype
) -> tuple[Tensor, tuple[int, ...], int]:
    """The result's shape as a tensor without memory of its own, the sizes B, S, L, N, K, D, Dv, and the dtype code."""
    if len(query) == len(key) == len(value) == 4 and set(others) == {dtype} and dtype in DTYPE_CODE:
        (batch, queries, heads, size), (_, keys, key_heads, value_size) = query, value
        if key == (batch, keys, key_heads, size) and value[0] == batch and key_heads and heads % key_heads == 0:
            template = torch.empty((), dtype=dtype, device="cpu").expand(batch, queries, heads, value_size)
            return template, (batch, queries, keys, heads, key_heads, size, value_size), DTYPE_CODE[dtype]
    raise ValueError(
        "attention_cpu takes q [B, S, N, D], k [B, L, K, D], v [B, L, K, Dv] of one dtype, N a multiple of K; it got "
        f"{tuple(query)}, {tuple(key)}, {tuple(value)} of {dtype}, {', '.join(map(str, others))}."
    )
