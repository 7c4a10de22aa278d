"""Triton kernel of the rotary embeddings: queries and keys in one launch, out of place, any strides, fp32 inside.

One program turns some heads of one token. The same kernel serves a table that positions index (``rotary_embedding``)
and cosines and sines that come with the tokens (``apply_rotary_emb``, and transformers' [B, N, S, D] layout).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.triton_launch import kernel, next_power_of_2


@triton.jit
def _load_pairs(x_ptr, head, stride, N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, NEOX: tl.constexpr):
    x_head = x_ptr + head.to(tl.int64) * stride
    if NEOX:
        pair = tl.arange(0, BLOCK)[None, :]
        mask = (head < N) & (pair < R // 2)
        u = tl.load(x_head + pair, mask=mask, other=0.0)
        v = tl.load(x_head + R // 2 + pair, mask=mask, other=0.0)
    else:
        feature = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(x_head + feature, mask=(head < N) & (feature < R), other=0.0)
        u, v = tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))
    return u.to(tl.float32), v.to(tl.float32)


@triton.jit
def _store_pairs(y_ptr, head, stride, u, v, N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, NEOX: tl.constexpr):
    y_head = y_ptr + head.to(tl.int64) * stride
    if NEOX:
        pair = tl.arange(0, BLOCK)[None, :]
        mask = (head < N) & (pair < R // 2)
        tl.store(y_head + pair, u.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_head + R // 2 + pair, v.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        feature = tl.arange(0, 2 * BLOCK)[None, :]
        y = tl.reshape(tl.join(u, v), (u.shape[0], 2 * BLOCK)).to(y_ptr.dtype.element_ty)
        tl.store(y_head + feature, y, mask=(head < N) & (feature < R))


@triton.jit
def _copy_tail(
    x_ptr, y_ptr, head, x_stride, y_stride, bad, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr,
    FROM_TABLE: tl.constexpr,
):  # fmt: skip
    feature = R + tl.arange(0, TAIL)[None, :]
    mask = (head < N) & (feature < D)
    x = tl.load(x_ptr + head.to(tl.int64) * x_stride + feature, mask=mask, other=0.0)
    if FROM_TABLE:
        x = tl.where(bad, tl.full(x.shape, float("nan"), x.dtype), x)
    tl.store(y_ptr + head.to(tl.int64) * y_stride + feature, x, mask=mask)


@kernel(
    loose=("positions_ptr",),
    multiples=(
        "q_batch", "q_token", "q_head", "q_out_batch", "q_out_token", "q_out_head",
        "k_batch", "k_token", "k_head", "k_out_batch", "k_out_token", "k_out_head", "row_batch", "row_token",
    ),
)  # fmt: skip
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    q_out_batch: tl.int64, q_out_token: tl.int64, q_out_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    k_out_batch: tl.int64, k_out_token: tl.int64, k_out_head: tl.int64,
    row_batch: tl.int64, row_token: tl.int64, n_positions: tl.int64, seq_len: tl.int32,
    NQ: tl.constexpr, NK: tl.constexpr, GROUPS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    NEOX: tl.constexpr, FROM_TABLE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    batch = (token // seq_len).to(tl.int64)
    place = (token % seq_len).to(tl.int64)
    q_ptr += batch * q_batch + place * q_token
    k_ptr += batch * k_batch + place * k_token
    q_out_ptr += batch * q_out_batch + place * q_out_token
    k_out_ptr += batch * k_out_batch + place * k_out_token
    q_heads = group * Q_HEADS + tl.arange(0, Q_HEADS)[:, None]
    k_heads = group * K_HEADS + tl.arange(0, K_HEADS)[:, None]
    # The heads are asked for first: the way to the cosines is two loads long where positions are read.
    if R > 0:
        q_u, q_v = _load_pairs(q_ptr, q_heads, q_head, NQ, R, BLOCK, NEOX)
        if NK > 0:
            k_u, k_v = _load_pairs(k_ptr, k_heads, k_head, NK, R, BLOCK, NEOX)
    bad = False
    if FROM_TABLE:
        position = tl.load(positions_ptr + token.to(tl.int64)).to(tl.int64)
        bad = (position < 0) | (position >= n_positions)
        row = tl.where(bad, 0, position) * row_token
        sin_row = row + R // 2
    else:
        row = batch * row_batch + place * row_token
        sin_row = row
    if R > 0:
        pair = tl.arange(0, BLOCK)[None, :]
        mask = pair < R // 2
        # FULL rows have two entries a pair: one half after the other (NeoX), or side by side (GPT-J).
        lo = 2 * pair if FULL and not NEOX else pair
        cos_u = tl.load(cos_ptr + row + lo, mask=mask, other=0.0).to(tl.float32)
        sin_u = tl.load(sin_ptr + sin_row + lo, mask=mask, other=0.0).to(tl.float32)
        if FROM_TABLE:
            cos_u = tl.where(bad, float("nan"), cos_u)
        cos_v = cos_u
        sin_v = sin_u
        if FULL:
            hi = lo + (R // 2 if NEOX else 1)
            cos_v = tl.load(cos_ptr + row + hi, mask=mask, other=0.0).to(tl.float32)
            sin_v = tl.load(sin_ptr + sin_row + hi, mask=mask, other=0.0).to(tl.float32)
        q_y, q_z = q_u * cos_u - q_v * sin_u, q_v * cos_v + q_u * sin_v
        _store_pairs(q_out_ptr, q_heads, q_out_head, q_y, q_z, NQ, R, BLOCK, NEOX)
        if NK > 0:
            k_y, k_z = k_u * cos_u - k_v * sin_u, k_v * cos_v + k_u * sin_v
            _store_pairs(k_out_ptr, k_heads, k_out_head, k_y, k_z, NK, R, BLOCK, NEOX)
    if R < D:
        _copy_tail(q_ptr, q_out_ptr, q_heads, q_head, q_out_head, bad, NQ, D, R, TAIL, FROM_TABLE)
        if NK > 0:
            _copy_tail(k_ptr, k_out_ptr, k_heads, k_head, k_out_head, bad, NK, D, R, TAIL, FROM_TABLE)


def tile(n_tokens: int, q_heads: int, k_heads: int, head_size: int) -> tuple[int, int]:
    """``(programs per token, warps)``."""
    elements = (q_heads + k_heads) * head_size
    groups = max(1, min(next_power_of_2(q_heads), elements // 1024)) if n_tokens <= 256 else 1
    return groups, 1 if elements // groups <= 1024 else 4


def launch(
    q: Tensor,
    k: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary: int,
    is_neox: bool,
    config: tuple[int, int] | None = None,
) -> None:
    """Turn q and k, [B, S, N, D] views of any strides with contiguous heads. ``config`` overrides ``tile``.

    With ``positions`` (flat, one a token) cos and sin are both the table [P, R]; without, they have a row a token: [B,
    S, C] with C = R/2 (one entry a pair) or R.
    """
    batch, seq_len, q_heads, head_size = q.shape
    k_heads = 0 if k is None else k.shape[2]
    n_tokens = batch * seq_len
    if k is None or k_out is None:
        k, k_out = q, q_out
    groups, warps = config or tile(n_tokens, q_heads, k_heads, head_size)
    from_table = positions is not None
    rows = (0, cos.stride(0)) if from_table else cos.stride()[:2]
    scalars = (*q.stride()[:3], *q_out.stride()[:3], *k.stride()[:3], *k_out.stride()[:3], *rows, cos.shape[0], seq_len)
    constants = (
        q_heads, k_heads, groups, next_power_of_2(-(-q_heads // groups)), next_power_of_2(-(-k_heads // groups)),
        head_size, rotary, next_power_of_2(rotary // 2), next_power_of_2(head_size - rotary),
        is_neox, from_table, not from_table and cos.shape[-1] == rotary,
    )  # fmt: skip
    tensors = (q, k, q_out, k_out, cos, sin, cos if positions is None else positions)
    _rotary_kernel((n_tokens * groups, 1, 1), tensors, scalars, constants, warps)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, table: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key by the table's rows at ``positions``; see ``rotary_embedding_triton``."""
    if key is None:
        return rotary_embedding_query_triton(positions, query, head_size, table, is_neox), None
    return rotary_embedding_triton(positions, query, key, head_size, table, is_neox)


@opaque(fake=lambda positions, query, key, *_: (query.new_empty(query.shape), key.new_empty(key.shape)))
def rotary_embedding_triton(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, table: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotate the first R features of each head of query and key by the table's rows at ``positions``.

    Shapes:  positions, any shape of T entries of any integer dtype; query, key [T, N*D] or [T, N, D], any strides;
             table [P, R], cosines then sines -> the shapes of query and key, contiguous.
    Casts:   fp32 inside, whatever the table's dtype; rounded once. Features past R are copied bit for bit.
    Errors:  none. A position outside 0 .. P-1 reads nothing outside the table and makes its token's outputs NaN:
             checking it on the host would wait for the device. (Eager CPU raises IndexError.)
    Mutates: nothing.
    """
    q_out, k_out = query.new_empty(query.shape), key.new_empty(key.shape)
    _from_table(positions, query, key, q_out, k_out, head_size, table, is_neox)
    return q_out, k_out


@opaque(fake=lambda positions, query, *_: query.new_empty(query.shape))
def rotary_embedding_query_triton(
    positions: Tensor, query: Tensor, head_size: int, table: Tensor, is_neox: bool
) -> Tensor:
    """``rotary_embedding_triton`` without a key."""
    out = query.new_empty(query.shape)
    _from_table(positions, query, None, out, None, head_size, table, is_neox)
    return out


def _from_table(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    head_size: int,
    table: Tensor,
    is_neox: bool,
    config: tuple[int, int] | None = None,
) -> None:
    n_tokens = positions.numel()
    if q_out.numel() == 0 and (k_out is None or k_out.numel() == 0):
        return
    views = [None if x is None else _heads(x, n_tokens, head_size) for x in (query, key, q_out, k_out)]
    q, k, q_out_view, k_out_view = views
    if table.stride(-1) != 1:
        table = table.contiguous()
    assert q is not None
    assert q_out_view is not None
    launch(q, k, q_out_view, k_out_view, table, table, positions.reshape(-1), table.shape[1], is_neox, config)


def _heads(x: Tensor, n_tokens: int, head_size: int) -> Tensor:
    """x as [1, T, N, D] with contiguous heads."""
    x = x.reshape(1, n_tokens, -1, head_size)
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.preserve_format)


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def apply_rotary_emb_triton(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate x's heads by the cosines and sines that come with its tokens.

    Shapes:  x [S, N, D] or [B, S, N, D]; cos, sin [S, C] or [B, S, C] with C = R/2 (one entry a pair) or R <= D -> x's
             shape, contiguous.
    Casts:   fp32 inside, rounded once; features past R are copied bit for bit.
    Mutates: nothing.
    """
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    x4 = x if x.dim() == 4 else x.unsqueeze(0)
    x4 = x4 if x4.stride(-1) == 1 else x4.contiguous()
    _from_rows(x4, None, out.view(x4.shape), None, cos, sin, min(2 * cos.shape[-1], x.shape[-1]), is_neox)
    return out


@opaque(fake=lambda q, k, *_: (_fake_like(q), _fake_like(k)))
def rotate_query_key_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """transformers' ``apply_rotary_pos_emb`` in one launch, fp32 inside and rounded once.

    Shapes:  q [B, N, S, D], k [B, K, S, D], any strides with contiguous heads; cos, sin [B or 1, S, R], R <= D -> q's
             and k's shapes, with their order of dimensions in memory. Features past R are copied bit for bit.
    Mutates: nothing.
    """
    q_out, k_out = _fake_like(q), _fake_like(k)
    if q.numel() == 0:
        return q_out, k_out
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    _from_rows(
        q.transpose(1, 2),
        k.transpose(1, 2),
        q_out.transpose(1, 2),
        k_out.transpose(1, 2),
        cos,
        sin,
        cos.shape[-1],
        is_neox,
    )
    return q_out, k_out


def _from_rows(
    q: Tensor,
    k: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rotary: int,
    is_neox: bool,
) -> None:
    shape = (q.shape[0], q.shape[1], cos.shape[-1])
    cos, sin = cos.expand(shape), sin.expand(shape)
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    launch(q, k, q_out, k_out, cos, sin, None, rotary, is_neox)
