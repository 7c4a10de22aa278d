"""Multi-head latent attention in plain PyTorch: the write to the cache, the attention, the merge of its parts."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def slots_of(
    kv_cache: Tensor, tokens: int, batch: int, block_table: Tensor | None, cu_seqlens: Tensor | None,
    context_lens: Tensor | None,
) -> Tensor:  # fmt: skip
    """The slot of every new token, [T] int64: its sequence's next places. A place that the cache lacks is one past its end.

    Tokens behind the last sequence get -1.
    """
    device, (pages, page, _) = kv_cache.device, kv_cache.shape
    token = torch.arange(tokens, device=device)
    if batch == 0:
        return torch.full_like(token, -1)
    if cu_seqlens is None:
        sequence, offset, outside = token // (tokens // batch), token % (tokens // batch), None
    else:
        bounds = cu_seqlens.to(device, torch.int64)
        sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True).clamp(max=batch - 1)
        offset, outside = token - bounds[sequence], token >= bounds[-1]
    position = offset if context_lens is None else context_lens.to(device, torch.int64)[sequence] + offset
    if block_table is None:
        slot, exists = sequence * page + position, position < page
    else:
        nth = position // page
        number = block_table[sequence, nth.clamp(max=block_table.shape[1] - 1)].to(device, torch.int64)
        slot, exists = number * page + position % page, (nth < block_table.shape[1]) & (number >= 0) & (number < pages)
    slot = torch.where(exists, slot, pages * page)
    return slot if outside is None else torch.where(outside, -1, slot)


def store(kv_cache: Tensor, latent: Tensor, rope_key: Tensor, slots: Tensor) -> None:
    """Write the rows [latent [T, L] | rope key [T, R]] to their slots; a negative slot takes nothing.

    Errors: IndexError for a slot that the cache [pages, tokens of a page, L + R] lacks.
    """
    pages, page, _ = kv_cache.shape
    if slots.numel() and int(slots.max()) >= pages * page:
        raise no_such_slot(kv_cache, slots)
    rows = torch.cat((latent, rope_key), dim=-1).to(kv_cache.dtype)
    wanted = slots >= 0
    slots = slots[wanted].long()
    kv_cache[slots // page, slots % page] = rows[wanted]


def no_such_slot(kv_cache: Tensor, slots: Tensor) -> IndexError:
    """The error of ``store``."""
    pages, page, _ = kv_cache.shape
    wrong = int((slots >= pages * page).sum())
    return IndexError(
        f"{wrong} of {slots.numel()} new tokens have no place in a latent cache of {pages} x {page} slots, or in their "
        "sequence's row of block_table. Make the cache, or the rows, longer."
    )


def attention(
    q: Tensor, latents: Tensor, rope_keys: Tensor, weight: Tensor, value_size: int, block_table: Tensor | None,
    cu_seqlens: Tensor | None, context_lens: Tensor | None, attn_mask: Tensor | None, batch: int, scale: float,
) -> Tensor:  # fmt: skip
    """Expand every latent to the keys and values of all heads; causal softmax attention, in fp32 (fp64 for fp64).

    Args:
        q: [T, N, P + R], rotated.
        latents, rope_keys: of B sequences [B, K, L] and [B, K, R]; of pages, [pages, tokens of a page, ...], with
            ``block_table`` [B, pages of a sequence]; or, with ``cu_seqlens`` but no ``context_lens``, of the packed new
            tokens themselves, [1, T, ...].
        weight: [N (P + V), L], head by head P rows of keys and V rows of values.
        value_size: V.
        cu_seqlens: [B + 1], where each sequence's queries begin and end; None: T / B each.
        context_lens: [B], keys before the new ones; None: the queries are the last of the K keys.
        attn_mask: [B or 1, 1, S, >= K], boolean or added, in place of the causal order; not with ``cu_seqlens``.
        batch: B.

    Returns: [T, N, V] in q's dtype; zeros for queries that see no key and for those behind the last sequence.
    """
    if cu_seqlens is None:
        if batch == 0 or q.shape[0] == 0:
            return q.new_zeros((*q.shape[:2], value_size))
        if block_table is not None:
            pages = block_table.clamp(0, latents.shape[0] - 1).long()
            latents, rope_keys = (t[pages].flatten(1, 2) for t in (latents, rope_keys))
        return _batched(q.unflatten(0, (batch, -1)), latents, rope_keys, weight, context_lens, attn_mask, value_size, scale)
    out = q.new_zeros((*q.shape[:2], value_size))
    bounds = cu_seqlens.tolist()
    mine: tuple[Tensor, Tensor, Tensor | None]
    for b, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        context = None if context_lens is None else context_lens[b : b + 1]
        if context is None:
            mine = latents[:, begin:end], rope_keys[:, begin:end], None
        elif block_table is None:
            mine = latents[b : b + 1], rope_keys[b : b + 1], None
        else:
            mine = latents, rope_keys, block_table[b : b + 1]
        out[begin:end] = attention(
            q[begin:end], *mine[:2], weight, value_size, mine[2], None, context, None, 1, scale
        )  # fmt: skip
    return out


def _batched(
    q: Tensor, latents: Tensor, rope_keys: Tensor, weight: Tensor, context_lens: Tensor | None, attn_mask: Tensor | None,
    value_size: int, scale: float,
) -> Tensor:  # fmt: skip
    """q [B, S, N, P + R], latents [B, K, L], rope_keys [B, K, R] -> [B S, N, V]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (_, queries, heads, _), keys, rope_size = q.shape, latents.shape[1], rope_keys.shape[2]
    key, query = torch.arange(keys, device=q.device), torch.arange(queries, device=q.device)
    if context_lens is None:
        position = (query + keys - queries).view(1, 1, -1, 1)
    else:
        position = (context_lens.to(q.device).view(-1, 1) + query).view(-1, 1, queries, 1)
        # What lies behind a sequence's end is nobody's, and may be NaN.
        unused = (key > position[:, 0, -1]).unsqueeze(-1)
        latents, rope_keys = latents.masked_fill(unused, 0), rope_keys.masked_fill(unused, 0)
    expanded = torch.einsum("bkl,nrl->bknr", latents.to(wide), weight.to(wide).unflatten(0, (heads, -1)))
    k_nope, v = expanded[..., :-value_size], expanded[..., -value_size:]
    q_nope, q_rope = q.to(wide).split((q.shape[-1] - rope_size, rope_size), dim=-1)
    scores = torch.einsum("bsnp,bknp->bnsk", q_nope, k_nope) + torch.einsum("bsnr,bkr->bnsk", q_rope, rope_keys.to(wide))
    scores = scores * scale
    if attn_mask is None:
        scores = scores.masked_fill(key > position, float("-inf"))
    else:
        boolean, shown = attn_mask.dtype == torch.bool, min(attn_mask.shape[-1], keys)  # the room behind it is unused
        mask = scores.new_zeros(()).masked_fill(~attn_mask, float("-inf")) if boolean else attn_mask.to(wide)
        scores = scores + F.pad(mask[..., :shown], (0, keys - shown), value=float("-inf"))
        scores = scores.masked_fill(key > position[..., -1:, :], float("-inf"))
    # A row that sees no key is 0/0 in a plain softmax.
    weights = torch.softmax(scores, dim=-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return torch.einsum("bnsk,bknv->bsnv", weights, v).flatten(0, 1).to(q.dtype)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each: outputs [..., V] and logarithms of sums [...], fp32.

    A part that saw no key (minus infinity) adds nothing; where neither did, the result is zero.
    """
    top = torch.maximum(lse, more_lse)
    base = top.masked_fill(top == float("-inf"), 0.0)
    mine, others = (lse - base).exp(), (more_lse - base).exp()
    total = mine + others
    share = others / total.masked_fill(total == 0.0, 1.0)
    return torch.lerp(out, more.to(out.dtype), share.unsqueeze(-1)), base + total.log()
