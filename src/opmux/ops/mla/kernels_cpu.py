"""Multi-head latent attention on the CPU: two ways to the same result, and the write to the latent cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels

from ..linear.kernels_cpu import linear_cpu
from .definition import merge, no_such_slot

_NO_MASK, _BOOL, _ADDED = 0, 1, 2


@opaque(fake=lambda *_: None, mutates=("kv_cache",))
def latent_store_cpu(kv_cache: Tensor, latent: Tensor, rope_key: Tensor, slots: Tensor) -> None:
    """``definition.store``; one dtype for all, dense last dimensions."""
    pages, page, _ = kv_cache.shape
    latent, rope_key, slots = _rows(latent), _rows(rope_key), slots.long().contiguous()
    wrong = kernels.latent_store(
        kv_cache.data_ptr(), latent.data_ptr(), rope_key.data_ptr(), slots.data_ptr(), slots.numel(), latent.shape[1],
        rope_key.shape[1], pages, page, kv_cache.stride(0), kv_cache.stride(1), latent.stride(0), rope_key.stride(0),
        kv_cache.itemsize,
    )  # fmt: skip
    if wrong:
        raise no_such_slot(kv_cache, slots)


def absorbs(queries: int, keys: int, latent: int, head: int) -> bool:
    """Whether attention in the latents' space takes fewer products than expanding the context.

    Args:
        queries, keys: of one sequence; the queries are the last of the keys.
        latent, head: L, and P + V of one head.
    """
    context = keys - queries
    return queries * (2 * latent - head) * (context + queries / 2) < context * latent * head


@opaque(fake=lambda q, latents, rope_keys, weight, value_size, *_: q.new_empty((*q.shape[:2], value_size)))
def latent_attention_cpu(
    q: Tensor, latents: Tensor, rope_keys: Tensor, weight: Tensor, value_size: int, block_table: Tensor | None,
    cu_seqlens: Tensor | None, context_lens: Tensor | None, attn_mask: Tensor | None, batch: int, scale: float,
    path: str = "", workspace: int = 4096,
) -> Tensor:  # fmt: skip
    """``definition.attention`` in the storage dtype with fp32 sums.

    Few queries behind a long context are taken into the latents' space, where the cache is read once for all heads; many
    queries are compared with expanded keys. Queries, sums of latents and expanded keys are rounded to the storage dtype.

    Args:
        path: "absorbed" or "expanded"; empty: what takes fewer products.
        workspace: latents that are expanded at a time; the parts are merged by their log-sum-exp.
        others: as of ``definition.attention``; one dtype for all but the mask, dense last dimensions.
    """
    call = _Call(q, latents, rope_keys, weight, block_table, attn_mask, value_size, scale)
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0 or value_size == 0:
        return q.new_empty((tokens, heads, value_size))
    covered = tokens if cu_seqlens is None else int(cu_seqlens[-1]) if batch else 0
    new: Callable[..., Tensor] = q.new_zeros if covered < tokens else q.new_empty
    out = new((tokens, heads, value_size))
    room = latents.shape[1] * (1 if block_table is None else block_table.shape[1])
    for run in _runs(tokens, batch, call, cu_seqlens, context_lens):
        if not run.packed and max(run.lengths) > room:
            raise IndexError(f"A sequence has {max(run.lengths)} keys; its part of the latent cache has room for {room}.")
        absorbed = path == "absorbed"
        if not path:
            head = weight.shape[0] // heads
            absorbed = absorbs(run.queries, max(run.lengths), latents.shape[-1], head)
        if absorbed:
            call.absorbed(run, out)
        else:
            call.expanded(run, out, workspace)
    return out


class _Run(NamedTuple):
    """Sequences with the same number of queries, one behind the other.

    ``first``: the first one's number; ``token``: its first query; ``lengths``: keys of each sequence, the new ones
    included; ``packed``: the keys lie with the queries.
    """

    first: int
    token: int
    queries: int
    lengths: list[int]
    packed: bool


def _runs(
    tokens: int, batch: int, call: _Call, cu_seqlens: Tensor | None, context_lens: Tensor | None
) -> Iterator[_Run]:
    contexts = None if context_lens is None else context_lens.tolist()
    if cu_seqlens is None:
        queries = tokens // batch
        keys = call.latents.shape[1] if contexts is None else 0
        lengths = [keys] * batch if contexts is None else [context + queries for context in contexts]
        yield _Run(0, 0, queries, lengths, False)
        return
    bounds = cu_seqlens.tolist()
    counts = [end - begin for begin, end in pairwise(bounds)]
    first = 0
    for queries, same in groupby(counts):
        size = len(list(same))
        if queries:
            known = [0] * size if contexts is None else contexts[first : first + size]
            lengths = [context + queries for context in known]
            yield _Run(first, bounds[first], queries, lengths, contexts is None)
        first += size


class _Call(NamedTuple):
    """The tensors of one call; see ``definition.attention``."""

    q: Tensor
    latents: Tensor
    rope_keys: Tensor
    weight: Tensor
    block_table: Tensor | None
    attn_mask: Tensor | None
    value_size: int
    scale: float

    def absorbed(self, run: _Run, out: Tensor) -> None:
        """Fill the run's rows of ``out`` in the latents' space."""
        q, latents, rope_keys, table = self.q, self.latents, self.rope_keys, None
        (_, heads, width), size = q.shape, len(run.lengths)
        rope = rope_keys.shape[-1]
        most, page = max(run.lengths), 0
        steps: tuple[int, ...]
        if run.packed:
            latents, rope_keys = latents[0, run.token :], rope_keys[0, run.token :]
            steps = run.queries * latents.stride(0), latents.stride(0), run.queries * rope_keys.stride(0), rope_keys.stride(0)
        elif self.block_table is None:
            latents, rope_keys = latents[run.first :], rope_keys[run.first :]
            steps = *latents.stride()[:2], *rope_keys.stride()[:2]
        else:
            table = self.block_table[run.first : run.first + size].long().contiguous()
            page = latents.shape[1]
            steps = *latents.stride()[:2], *rope_keys.stride()[:2]
        lengths = torch.tensor(run.lengths)
        mask, strides, kind = self._mask(size, run.queries, 0, most)
        missing = kernels.latent_absorbed(
            out.data_ptr() + run.token * out.stride(0) * out.itemsize,
            q.data_ptr() + run.token * q.stride(0) * q.itemsize,
            latents.data_ptr(), rope_keys.data_ptr(), self.weight.data_ptr(), None if mask is None else mask.data_ptr(),
            lengths.data_ptr(), None if table is None else table.data_ptr(),
            size, run.queries, most, heads, latents.shape[-1], rope, width - rope, self.value_size,
            q.stride(0), q.stride(1), *steps, self.weight.stride(0), 0 if table is None else table.shape[1], *strides,
            page, self.latents.shape[0], self.scale, mask is None, kind, DTYPE_CODE[q.dtype],
        )  # fmt: skip
        if missing:
            raise self._no_such_page()

    def expanded(self, run: _Run, out: Tensor, workspace: int) -> None:
        """Fill the run's rows of ``out`` by keys and values of all heads."""
        if len(set(run.lengths)) == 1 and self.block_table is None:
            self._expanded(run, 0, len(run.lengths), out, workspace)
        else:
            for b in range(len(run.lengths)):
                self._expanded(run, b, b + 1, out, workspace)

    def _expanded(self, run: _Run, begin: int, end: int, out: Tensor, workspace: int) -> None:
        """The sequences begin .. end-1 of the run, which have the same number of keys."""
        count, queries, keys = end - begin, run.queries, run.lengths[begin]
        first = run.token + begin * queries
        rows = slice(first, first + count * queries)
        q, into = self.q[rows].unflatten(0, (count, queries)), out[rows].unflatten(0, (count, queries))
        context = keys - queries
        bounds = [*range(0, context, workspace), context, keys] if keys > workspace else [0, keys]
        total = None
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            latents, rope_keys = self._keys(run, begin, end, start, stop)
            causal = self.attn_mask is None and stop == keys
            mask = self._mask(count, queries, start, stop, begin)
            if len(bounds) == 2:
                self._attend(into, q, latents, rope_keys, mask, causal)
                return
            part, lse = torch.empty_like(into), into.new_empty(into.shape[:3], dtype=torch.float32)
            self._attend(part, q, latents, rope_keys, mask, causal, lse)
            total = (part.float(), lse) if total is None else merge(*total, part, lse)
        if total is not None:
            into.copy_(total[0])

    def _keys(self, run: _Run, begin: int, end: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The latents and rope keys start .. stop-1 of these sequences of a run, [B, stop - start, ...]."""
        if run.packed:
            rows = slice(run.token + begin * run.queries, run.token + end * run.queries)
            both = (t[0, rows].unflatten(0, (end - begin, run.queries)) for t in (self.latents, self.rope_keys))
            latents, rope_keys = (t[:, start:stop] for t in both)
        elif self.block_table is None:
            at = slice(run.first + begin, run.first + end)
            latents, rope_keys = self.latents[at, start:stop], self.rope_keys[at, start:stop]
        else:
            page = self.latents.shape[1]
            needed = self.block_table[run.first + begin, start // page : -(-stop // page)].long()
            if not _within(needed, self.latents.shape[0]):
                raise self._no_such_page()
            shift = start // page * page
            at = slice(start - shift, stop - shift)
            latents, rope_keys = (t[needed].flatten(0, 1)[at].unsqueeze(0) for t in (self.latents, self.rope_keys))
        return latents, rope_keys

    def _attend(
        self, out: Tensor, q: Tensor, latents: Tensor, rope_keys: Tensor, mask: tuple[Tensor | None, tuple[int, ...], int],
        causal: bool, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        count, queries, heads, width = q.shape
        rope, keys = rope_keys.shape[-1], latents.shape[1]
        expanded = linear_cpu(latents, self.weight, None).unflatten(-1, (heads, -1))
        k, v = expanded[..., : width - rope], expanded[..., width - rope :]
        bits, strides, kind = mask
        kernels.latent_expanded(
            out.data_ptr(), None if lse is None else lse.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(),
            rope_keys.data_ptr(), None if bits is None else bits.data_ptr(), count, queries, keys, heads, width - rope,
            rope, self.value_size, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *rope_keys.stride()[:2], *strides,
            self.scale, causal, kind, DTYPE_CODE[q.dtype],
        )  # fmt: skip

    def _mask(
        self, batch: int, queries: int, start: int, stop: int, first: int = 0
    ) -> tuple[Tensor | None, tuple[int, ...], int]:
        """(the mask of the keys start .. stop-1, its strides, its kind)."""
        mask = self.attn_mask
        if mask is None:
            return None, (0, 0, 0, 0), _NO_MASK
        kind = _BOOL if mask.dtype is torch.bool else _ADDED
        mask = mask if kind == _BOOL else mask.to(self.q.dtype)
        mask = mask if mask.shape[0] == 1 else mask[first : first + batch]
        mask = mask[..., start:stop].expand(batch, 1, queries, stop - start)
        return mask, (mask.stride(0), 0, *mask.stride()[2:]), kind

    def _no_such_page(self) -> IndexError:
        return IndexError(
            f"block_table names a page that is not one of the latent cache's {self.latents.shape[0]}."
        )


def _within(pages: Tensor, count: int) -> bool:
    return pages.numel() == 0 or (int(pages.min()) >= 0 and int(pages.max()) < count)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
