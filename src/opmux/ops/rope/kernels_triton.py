"""Triton kernel of the rotary embeddings: queries and keys in one launch, out of place, any strides, fp32 inside.

One program turns some heads of one token, and before that may take their RMS norm. The same kernel serves a table that
positions index (``rotary_embedding``) and cosines and sines that come with the tokens (``apply_rotary_emb``, and
transformers' [B, N, S, D] layout).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.triton_launch import Launch, kernel, new_like, next_power_of_2, plan


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
def _scale_of(x_ptr, head, stride, u, v, eps, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr):
    """1 / (root mean square) of each head, [heads, 1]."""
    squares = tl.sum(u * u + v * v, axis=1, keep_dims=True)
    if R < D:
        feature = R + tl.arange(0, TAIL)[None, :]
        tail = tl.load(x_ptr + head.to(tl.int64) * stride + feature, mask=(head < N) & (feature < D), other=0.0)
        squares += tl.sum(tail.to(tl.float32) * tail.to(tl.float32), axis=1, keep_dims=True)
    return tl.rsqrt(squares / D + eps)


@triton.jit
def _weighted(x, scale, w, x_ptr, w_ptr):
    """The norm of x, rounded to the weight's dtype, times the weight there, rounded to x's dtype."""
    y = ((x * scale).to(w_ptr.dtype.element_ty).to(tl.float32) * w).to(w_ptr.dtype.element_ty)
    return y.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(
    x_ptr, w_ptr, head, stride, u, v, eps, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    scale = _scale_of(x_ptr, head, stride, u, v, eps, N, D, R, TAIL)
    w_u, w_v = _load_pairs(w_ptr, tl.zeros([1, 1], tl.int32), 0, 1, R, BLOCK, NEOX)
    return _weighted(u, scale, w_u, x_ptr, w_ptr), _weighted(v, scale, w_v, x_ptr, w_ptr), scale


@triton.jit
def _copy_tail(
    x_ptr, w_ptr, y_ptr, head, x_stride, y_stride, scale, bad, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    TAIL: tl.constexpr, FROM_TABLE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    feature = R + tl.arange(0, TAIL)[None, :]
    mask = (head < N) & (feature < D)
    x = tl.load(x_ptr + head.to(tl.int64) * x_stride + feature, mask=mask, other=0.0)
    if NORM:
        w = tl.load(w_ptr + feature, mask=feature < D, other=0.0).to(tl.float32)
        x = _weighted(x.to(tl.float32), scale, w, x_ptr, w_ptr).to(x.dtype)
    if FROM_TABLE:
        x = tl.where(bad, tl.full(x.shape, float("nan"), x.dtype), x)
    tl.store(y_ptr + head.to(tl.int64) * y_stride + feature, x, mask=mask)


@triton.jit
def _row_of_turn(j, turn, CHUNK: tl.constexpr, CHUNK_SIZE: tl.constexpr):
    """The table's row by which the query of dual chunk attention takes its turn 0 .. 4; ``j`` is the place in the chunk."""
    clamped = turn < 3
    j = tl.where(turn == 2, CHUNK - 1, j)
    further = j + tl.where(turn == 4, CHUNK_SIZE, CHUNK)
    further = tl.where(clamped, tl.minimum(further, CHUNK_SIZE), further)
    return tl.where(turn == 0, j, further)


@kernel(
    loose=("positions_ptr",),
    multiples=(
        "q_batch", "q_token", "q_head", "q_out_batch", "q_out_token", "q_out_head",
        "k_batch", "k_token", "k_head", "k_out_batch", "k_out_token", "k_out_head", "row_batch", "row_token",
    ),
)  # fmt: skip
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, positions_ptr,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    q_out_batch: tl.int64, q_out_token: tl.int64, q_out_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    k_out_batch: tl.int64, k_out_token: tl.int64, k_out_head: tl.int64,
    row_batch: tl.int64, row_token: tl.int64, n_positions: tl.int64, seq_len: tl.int32, eps: tl.float32,
    NQ: tl.constexpr, NK: tl.constexpr, GROUPS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    NEOX: tl.constexpr, FROM_TABLE: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, CHUNK_SIZE: tl.constexpr,
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
    if CHUNK > 0:
        # A token is a batch of the query's five turns; the first takes the key along.
        k_heads = tl.where(place == 0, k_heads, NK)
    # The heads are asked for first: the way to the cosines is two loads long where positions are read.
    if R > 0:
        q_u, q_v = _load_pairs(q_ptr, q_heads, q_head, NQ, R, BLOCK, NEOX)
        if NK > 0:
            k_u, k_v = _load_pairs(k_ptr, k_heads, k_head, NK, R, BLOCK, NEOX)
    bad = False
    if FROM_TABLE:
        position = tl.load(positions_ptr + (batch if CHUNK > 0 else token.to(tl.int64))).to(tl.int64)
        bad = (position < 0) | (position >= n_positions)
        position = tl.where(bad, 0, position)
        if CHUNK > 0:
            position = _row_of_turn(position % CHUNK, place, CHUNK, CHUNK_SIZE)
        row = position * row_token
        sin_row = row + R // 2
    else:
        row = batch * row_batch + place * row_token
        sin_row = row
    q_scale = 1.0
    k_scale = 1.0
    if NORM:
        q_u, q_v, q_scale = _normed(
            q_ptr, q_weight_ptr, q_heads, q_head, q_u, q_v, eps, NQ, D, R, BLOCK, TAIL, NEOX
        )  # fmt: skip
        k_u, k_v, k_scale = _normed(
            k_ptr, k_weight_ptr, k_heads, k_head, k_u, k_v, eps, NK, D, R, BLOCK, TAIL, NEOX
        )  # fmt: skip
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
        _copy_tail(
            q_ptr, q_weight_ptr, q_out_ptr, q_heads, q_head, q_out_head, q_scale, bad, NQ, D, R, TAIL, FROM_TABLE, NORM
        )  # fmt: skip
        if NK > 0:
            _copy_tail(
                k_ptr, k_weight_ptr, k_out_ptr, k_heads, k_head, k_out_head, k_scale, bad, NK, D, R, TAIL, FROM_TABLE,
                NORM,
            )  # fmt: skip


def tile(n_tokens: int, q_heads: int, k_heads: int, head_size: int, norms: bool = False) -> tuple[int, int]:
    """``(programs per token, warps)``.

    32+8 heads of 128 in bf16, microseconds on an H200: 1 token (4, 4) 1.5, (8, 1) 1.7; 64 tokens (4, 4) 2.7, (8, 1) 3.1;
    16384 tokens (1, 4) 86.8, (4, 1) 88.1, but with the norms (4, 1) 89.5, (1, 4) 100.4.
    """
    elements = (q_heads + k_heads) * head_size
    if elements <= 1024:
        return 1, 1
    groups = min(next_power_of_2(q_heads), 1 << ((elements // 1024).bit_length() - 1))  # about 1024 elements each
    if n_tokens <= 256:
        return groups, 4
    return (groups, 1) if norms else (1, 4)


@plan
def _plan(
    sizes: tuple[int, int, int, int, int],
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    rows: tuple[int, int, int],
    rotary: int,
    is_neox: bool,
    from_table: bool,
    full: bool,
    eps: float | None,
    config: tuple[int, int] | None,
    chunk: tuple[int, int] = (0, 0),
) -> Launch:
    """``sizes``: B, S, N, K, D. ``strides``: batch, token and head, of q, its output, k and its output. ``rows``: the
    strides of cosines and sines and their number. ``eps``: None without a norm. ``chunk``: n and c of dual chunks."""
    batch, seq_len, q_heads, k_heads, head_size = sizes
    n_tokens = batch * seq_len
    groups, warps = config or tile(n_tokens, q_heads, k_heads, head_size, eps is not None)
    constants = (
        q_heads, k_heads, groups, next_power_of_2(-(-q_heads // groups)), next_power_of_2(-(-k_heads // groups)),
        head_size, rotary, next_power_of_2(rotary // 2), next_power_of_2(head_size - rotary),
        is_neox, from_table, full, eps is not None, *chunk,
    )  # fmt: skip
    return _rotary_kernel.prepare((n_tokens * groups, 1, 1), (*strides, *rows, seq_len, eps or 0.0), constants, warps)


@plan
def _table_plan(
    n_tokens: int,
    query: tuple[torch.Size, tuple[int, ...]],
    key: tuple[torch.Size, tuple[int, ...]] | None,
    table: tuple[torch.Size, tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    head_size: int,
    is_neox: bool,
    eps: float | None,
    config: tuple[int, int] | None,
) -> Launch | None:
    """From shapes and strides; None where the heads of a token are not evenly apart."""
    layouts = [_heads(*layout, n_tokens, head_size) for layout in (query, query if key is None else key)]
    if None in layouts:
        return None
    (q_heads, q_token, q_head), (k_heads, k_token, k_head) = layouts  # type: ignore[misc]
    strides = (
        0, q_token, q_head, 0, q_heads * head_size, head_size,
        0, k_token, k_head, 0, k_heads * head_size, head_size,
    )  # fmt: skip
    (n_positions, rotary), (row, _) = table
    sizes = (1, n_tokens, q_heads, 0 if key is None else k_heads, head_size)
    return _plan(sizes, strides, dtypes, (0, row, n_positions), rotary, is_neox, True, False, eps, config)


def _heads(shape: torch.Size, stride: tuple[int, ...], n_tokens: int, head_size: int) -> tuple[int, int, int] | None:
    """(heads, token stride, head stride) of a tensor seen as [T, N, D], or None where no view is so."""
    heads = shape.numel() // (n_tokens * head_size)
    try:
        view = torch.empty_strided(shape, stride, device="meta").view(n_tokens, heads, head_size)
    except RuntimeError:
        return None
    return (heads, view.stride(0), view.stride(1)) if view.stride(2) == 1 else None


def launch(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    table: Tensor,
    is_neox: bool,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float | None = None,
    config: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``rotary_embedding_triton``, or with weights ``qk_norm_rope_triton``. ``config`` overrides ``tile``."""
    q_out, k_out = new_like(query), None if key is None else new_like(key)
    n_tokens = positions.numel()
    if n_tokens == 0:
        return q_out, k_out
    positions = positions.contiguous()
    if table.stride(1) != 1:
        table = table.contiguous()
    q_weight, k_weight = (table, table) if weights is None else (weights[0].contiguous(), weights[1].contiguous())
    dtypes = (query.dtype, table.dtype, positions.dtype, q_weight.dtype)
    while True:
        prepared = _table_plan(
            n_tokens, (query.shape, query.stride()), None if key is None else (key.shape, key.stride()),
            (table.shape, table.stride()), dtypes, head_size, is_neox, eps, config,
        )  # fmt: skip
        if prepared is not None:
            break
        query, key = query.contiguous(), None if key is None else key.contiguous()
    k, k_to = (query, q_out) if key is None or k_out is None else (key, k_out)
    prepared(query, k, q_out, k_to, table, table, q_weight, k_weight, positions)
    return q_out, k_out


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
    return launch(positions, query, key, head_size, table, is_neox)  # type: ignore[return-value]


@opaque(fake=lambda positions, query, *_: query.new_empty(query.shape))
def rotary_embedding_query_triton(
    positions: Tensor, query: Tensor, head_size: int, table: Tensor, is_neox: bool
) -> Tensor:
    """``rotary_embedding_triton`` without a key."""
    return launch(positions, query, None, head_size, table, is_neox)[0]


@opaque(fake=lambda positions, query, key, *_: (query.new_empty(query.shape), key.new_empty(key.shape)))
def qk_norm_rope_triton(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_size: int,
    table: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """The RMS norm of every head of query and key, then ``rotary_embedding_triton``, in one pass.

    Shapes:  as there; q_weight, k_weight [D], of one dtype.
    Casts:   the normalised value is rounded to the weight's dtype, multiplied there and rounded to query's dtype, as a
             separate norm would; then fp32, rounded once.
    Mutates: nothing.
    """
    return launch(positions, query, key, head_size, table, is_neox, (q_weight, k_weight), eps)  # type: ignore[return-value]


@opaque(fake=lambda positions, table, query, key, *_: _new_dual_chunk(query, key))
def dual_chunk_rotary_embedding_triton(
    positions: Tensor,
    table: Tensor,
    query: Tensor,
    key: Tensor | None,
    is_neox: bool,
    position_limit: int,
    chunk: int,
    chunk_size: int,
) -> list[Tensor]:
    """The query turned by the five angles of dual chunk attention, the key by one; see ``DualChunkRotaryEmbedding``.

    Shapes:  positions [T] of any integer dtype; table [chunk + chunk_size, R]; query [T, N, D], key [T, K, D], any
             strides -> [query [T, 5, N, D]], or with the key's rotation [T, K, D] behind it, contiguous.
    Errors:  none. A position outside 0 .. ``position_limit`` - 1 makes its token's outputs NaN.
    Mutates: nothing.
    """
    out = _new_dual_chunk(query, key)
    tokens, heads, head_size = query.shape
    if tokens == 0:
        return out
    positions, table = positions.contiguous(), table if table.stride(1) == 1 else table.contiguous()
    query = query if query.stride(2) == 1 else query.contiguous()
    k, k_out = (query, out[0]) if key is None else (key if key.stride(2) == 1 else key.contiguous(), out[1])
    strides = (
        query.stride(0), 0, query.stride(1), 5 * heads * head_size, heads * head_size, head_size,
        k.stride(0), 0, k.stride(1), k.shape[1] * head_size, 0, head_size,
    )  # fmt: skip
    _plan(
        (tokens, 5, heads, 0 if key is None else k.shape[1], head_size), strides,
        (query.dtype, table.dtype, positions.dtype, table.dtype), (0, table.stride(0), position_limit), table.shape[1],
        is_neox, True, False, None, None, (chunk, chunk_size),
    )(query, k, out[0], k_out, table, table, table, table, positions)  # fmt: skip
    return out


def _new_dual_chunk(query: Tensor, key: Tensor | None) -> list[Tensor]:
    tokens, heads, head_size = query.shape
    out = [query.new_empty((tokens, 5, heads, head_size))]
    return out if key is None else [*out, key.new_empty(key.shape)]


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
    """Turn q and k, [B, S, N, D] views with contiguous heads, by rows [B or 1, S, C] (or [S, C]) of cos and sin."""
    batch, seq_len, q_heads, head_size = q.shape
    shape = (batch, seq_len, cos.shape[-1])
    cos, sin = cos.expand(shape), sin.expand(shape)
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    k_heads = 0 if k is None else k.shape[2]
    if k is None or k_out is None:
        k, k_out = q, q_out
    strides = (*q.stride()[:3], *q_out.stride()[:3], *k.stride()[:3], *k_out.stride()[:3])
    _plan(
        (batch, seq_len, q_heads, k_heads, head_size), strides, (q.dtype, k.dtype, cos.dtype, sin.dtype),
        (*cos.stride()[:2], 0), rotary, is_neox, False, shape[2] == rotary, None, None,
    )(q, k, q_out, k_out, cos, sin, cos, cos, cos)  # fmt: skip
