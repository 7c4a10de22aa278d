"""Sizes of a padded vocabulary, and where an id's row stands, on one rank or on many."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed import ALONE, TensorParallel


@dataclass(frozen=True)
class Vocabulary:
    """Layout of a rank's table: ``[base shard | added shard]``, each with its padding at the end of the whole.

    Attributes:
        base: tokens of the base vocabulary.
        size: base and added tokens; valid ids are ``0..size - 1``.
        base_padded: rows of the base, of all ranks together.
        total_padded: all rows of all ranks.
        ranks, rank: who shares the table.
    """

    base: int
    size: int
    base_padded: int
    total_padded: int
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(
        cls, num_embeddings: int, org_num_embeddings: int | None, padding_size: int, tp: TensorParallel = ALONE
    ) -> Vocabulary:
        base = num_embeddings if org_num_embeddings is None else org_num_embeddings
        if padding_size < 1 or not 0 <= base <= num_embeddings:
            raise ValueError(
                f"A vocabulary of {num_embeddings} with a base of {base} and padding_size {padding_size} contradicts "
                "itself: 0 <= org_num_embeddings <= num_embeddings and padding_size >= 1."
            )
        # Rounded up to whole shards too, so that every number of ranks can share it.
        multiple = padding_size * tp.size // math.gcd(padding_size, tp.size)
        base_padded = _round_up(base, multiple)
        total = _round_up(base_padded + num_embeddings - base, multiple)
        return cls(base, num_embeddings, base_padded, total, tp.size, tp.rank)

    @property
    def local_rows(self) -> int:
        """Rows of this rank's table."""
        return self.total_padded // self.ranks

    @property
    def base_shard(self) -> tuple[int, int]:
        """Ids ``[first, end)`` of the base vocabulary that this rank holds, from row 0 on."""
        rows = self.base_padded // self.ranks
        return min(self.rank * rows, self.base), min((self.rank + 1) * rows, self.base)

    @property
    def added_shard(self) -> tuple[int, int, int]:
        """Added ids ``[first, end)`` that this rank holds, and the row of the first."""
        rows = (self.total_padded - self.base_padded) // self.ranks
        first = min(self.base + self.rank * rows, self.size)
        return first, min(first + rows, self.size), self.base_padded // self.ranks

    @property
    def contiguous(self) -> bool:
        """Whether this rank's ids, base and added, stand in consecutive rows."""
        first, end, row = self.added_shard
        begin, base_end = self.base_shard
        return first == end or (base_end == first and row == base_end - begin)

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's row of each id (0 where it has none), and which ids have one here."""
        ids = ids.long()
        begin, end = self.base_shard
        first, last, row = self.added_shard
        in_base = (ids >= begin) & (ids < end)
        in_added = (ids >= first) & (ids < last)
        rows = torch.where(in_base, ids - begin, ids - (first - row))
        return torch.where(in_base | in_added, rows, 0), in_base | in_added

    def columns(self) -> Tensor:
        """Where each valid id's logit stands when the ranks' logits are side by side."""
        ids = torch.arange(self.size)
        base_rows = self.base_padded // self.ranks
        added_rows = max((self.total_padded - self.base_padded) // self.ranks, 1)
        added = ids - self.base
        of_base = ids // base_rows * self.local_rows + ids % base_rows if base_rows else ids
        of_added = added // added_rows * self.local_rows + base_rows + added % added_rows
        return torch.where(ids < self.base, of_base, of_added)

    @property
    def columns_in_order(self) -> bool:
        """Whether the ids' logits are simply the first columns."""
        only_base = self.total_padded == self.base_padded
        return only_base or (self.ranks == 1 and (self.base == self.base_padded or self.base == self.size))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
