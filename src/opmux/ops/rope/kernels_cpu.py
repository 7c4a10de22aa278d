"""The rotary embedding kernels of the compiled CPU library, for Python.

All return new tensors. Arithmetic is fp32: ``(u, v) -> (u c - v s, v c + u s)`` for the pair (u, v) of a head. Two
flags choose where values are rounded to the heads' dtype: ``round_table`` rounds cos and sin first; ``round_steps``
rounds each product and then the sum, which is what eager PyTorch computes; without them the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import new_like

_NO_KEY: tuple[int | None, int, int, int | None, int] = (None, 0, 0, None, 0)


def _like_query_and_key(
    positions: Tensor, table: Tensor, query: Tensor, key: Tensor | None, *_: object
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (query, key) if t is not None]


@opaque(fake=_like_query_and_key)
def rotary_embedding_cpu(
    positions: Tensor, table: Tensor, query: Tensor, key: Tensor | None, rotary_dim: int, interleaved: bool,
    round_table: bool, round_steps: bool,
) -> list[Tensor]:  # fmt: skip
    """Rotate the first ``rotary_dim`` features of every head by the angles of the token's position.

    Args:
        positions: [T], int64 or int32.
        table: [P, rotary_dim], ``[cos | sin]``; fp32, bf16 or fp16.
        query, key: [T, N, D], any strides; key may be None. Features beyond ``rotary_dim`` are copied bit for bit.
        interleaved: pairs (2i, 2i + 1) (GPT-J) rather than (i, i + rotary_dim / 2) (NeoX).

    Returns: [query] or [query, key], contiguous.
    Raises: IndexError for a position outside the table.
    """
    if not positions.is_contiguous():
        positions = positions.contiguous()
    row, feature = table.stride()
    if feature != 1:
        table = table.contiguous()
        row = rotary_dim
    query, of_query, rotated = _heads(query)
    of_key, out = _NO_KEY, [rotated]
    if key is not None:
        key, of_key, rotated = _heads(key)
        out.append(rotated)
    bad = kernels.rotary_embedding(
        DTYPE_CODE[query.dtype], rotary_dim, query.shape[2], DTYPE_CODE[table.dtype], interleaved, round_table,
        round_steps, positions.data_ptr(), positions.dtype is torch.int32, positions.numel(),
        table.data_ptr(), table.shape[0], row, *of_query, *of_key,
    )  # fmt: skip
    if bad:
        raise IndexError(
            f"rotary_embedding: position {positions[bad - 1].item()} of token {bad - 1} is outside the table of "
            f"{table.shape[0]} positions; build the op with a larger max_position_embeddings"
        )
    return out


def _heads(x: Tensor) -> tuple[Tensor, tuple[int | None, int, int, int | None, int], Tensor]:
    """(the tensor to keep alive, what the kernel takes of it, out) for x [T, N, D]."""
    token, head, feature = x.stride()
    if feature != 1:
        x = x.contiguous()
        token, head, _ = x.stride()
    out = new_like(x)
    return x, (x.data_ptr(), token, head, out.data_ptr(), x.shape[1]), out


@opaque(fake=lambda positions, table, query, key, *_: _new_dual_chunk(query, key))
def dual_chunk_rotary_embedding_cpu(
    positions: Tensor, table: Tensor, query: Tensor, key: Tensor | None, rotary_dim: int, interleaved: bool,
    position_limit: int, chunk: int, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    """Rotate the query by the five angles of dual chunk attention, the key by one; see ``DualChunkRotaryEmbedding``.

    Args:
        positions: [T], int64 or int32, in 0 .. ``position_limit`` - 1.
        table: [chunk + chunk_size, rotary_dim] fp32, ``[cos | sin]``.
        query, key, rotary_dim, interleaved: as of ``rotary_embedding_cpu``.
        chunk: n, the positions of a chunk; ``chunk_size``: c.

    Returns: [query [T, 5, N, D]] or [query, key [T, K, D]], contiguous.
    Raises: IndexError for a position that is not below ``position_limit``.
    """
    if not positions.is_contiguous():
        positions = positions.contiguous()
    if not table.is_contiguous():
        table = table.contiguous()
    out = _new_dual_chunk(query, key)
    of_key: tuple[int | None, int, int, int | None, int] = _NO_KEY
    if query.stride(2) != 1:
        query = query.contiguous()
    if key is not None:
        if key.stride(2) != 1:
            key = key.contiguous()
        of_key = (key.data_ptr(), key.stride(0), key.stride(1), out[1].data_ptr(), key.shape[1])
    bad = kernels.dual_chunk_rotary_embedding(
        DTYPE_CODE[query.dtype], rotary_dim, query.shape[2], DTYPE_CODE[table.dtype], interleaved, False, False,
        positions.data_ptr(), positions.dtype is torch.int32, positions.numel(), position_limit, chunk, chunk_size,
        table.data_ptr(), rotary_dim, query.data_ptr(), query.stride(0), query.stride(1), out[0].data_ptr(),
        query.shape[1], *of_key,
    )  # fmt: skip
    if bad:
        raise IndexError(
            f"dual_chunk_rotary_embedding: position {positions[bad - 1].item()} of token {bad - 1} is outside "
            f"0..{position_limit - 1}; build the op with a larger max_position_embeddings"
        )
    return out


def _new_dual_chunk(query: Tensor, key: Tensor | None) -> list[Tensor]:
    tokens, heads, head_size = query.shape
    out = [query.new_empty((tokens, 5, heads, head_size))]
    return out if key is None else [*out, key.new_empty(key.shape)]


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def apply_rotary_emb_cpu(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, round_table: bool, round_steps: bool
) -> Tensor:
    """Rotate x [B, S, N, R] by cos and sin [S, R / 2] (one dtype: fp32, bf16 or fp16).

    Returns: [B, S, N, R], contiguous.
    """
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    batches, tokens, heads, width = x.shape
    batch, token, head, feature = x.stride()
    out = new_like(x)
    if feature != 1:
        x = x.contiguous()
        batch, token, head, _ = x.stride()
    kernels.rotary_cos_sin(
        DTYPE_CODE[x.dtype], width, width, DTYPE_CODE[cos.dtype], interleaved, round_table, round_steps, batches,
        tokens, cos.data_ptr(), sin.data_ptr(), 0, width // 2, 0,
        x.data_ptr(), batch, token, head, out.data_ptr(), tokens * heads * width, heads * width, width, heads,
        None, 0, 0, 0, None, 0, 0, 0, 0,
    )  # fmt: skip
    return out


def _in_order_of(x: Tensor) -> Tensor:
    return torch.empty_like(x if x.stride(3) == 1 else x.contiguous())


@opaque(fake=lambda query, key, *_: (_in_order_of(query), _in_order_of(key)))
def rotate_query_key_cpu(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, round_steps: bool
) -> tuple[Tensor, Tensor]:
    """transformers' ``apply_rotary_pos_emb``: ``q * cos + rotate_half(q) * sin``, for query and key in one call.

    Args:
        query: [B, N, S, D], key: [B, K, S, D], any strides.
        cos, sin: [B or 1, S, R], R <= D even, any dtype of the three (the same for both). Features beyond R are copied.
        round_steps: bit for bit what the eager body computes when cos and sin have query's dtype.

    Returns: query and key rotated, in new tensors with the memory order of the inputs.
    """
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    table_batches, tokens, rotary_dim = cos.shape
    table_batch = 0 if table_batches == 1 else tokens * rotary_dim
    batches, heads, _, head_dim = query.shape
    batch, head, token, feature = query.stride()
    if feature != 1:
        query = query.contiguous()
        batch, head, token, _ = query.stride()
    key_batch, key_head, key_token, feature = key.stride()
    if feature != 1:
        key = key.contiguous()
        key_batch, key_head, key_token, _ = key.stride()
    rotated_query, rotated_key = torch.empty_like(query), torch.empty_like(key)
    out_batch, out_head, out_token, _ = rotated_query.stride()
    out_key_batch, out_key_head, out_key_token, _ = rotated_key.stride()
    kernels.rotary_cos_sin(
        DTYPE_CODE[query.dtype], rotary_dim, head_dim, DTYPE_CODE[cos.dtype], False, False, round_steps, batches,
        tokens, cos.data_ptr(), sin.data_ptr(), table_batch, rotary_dim, rotary_dim // 2,
        query.data_ptr(), batch, token, head, rotated_query.data_ptr(), out_batch, out_token, out_head, heads,
        key.data_ptr(), key_batch, key_token, key_head, rotated_key.data_ptr(), out_key_batch, out_key_token,
        out_key_head, key.shape[1],
    )  # fmt: skip
    return rotated_query, rotated_key
