"""Sizes of a padded vocabulary, and where an id's row stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Layout of a table: ``[base | base padding | added | added padding]``.

    Attributes:
        base: tokens of the base vocabulary.
        size: base and added tokens; valid ids are ``0..size - 1``.
        base_padded: rows before the added tokens.
        total_padded: all rows.
    """

    base: int
    size: int
    base_padded: int
    total_padded: int

    @classmethod
    def of(cls, num_embeddings: int, org_num_embeddings: int | None, padding_size: int) -> Vocabulary:
        base = num_embeddings if org_num_embeddings is None else org_num_embeddings
        if padding_size < 1 or not 0 <= base <= num_embeddings:
            raise ValueError(
                f"A vocabulary of {num_embeddings} with a base of {base} and padding_size {padding_size} contradicts "
                "itself: 0 <= org_num_embeddings <= num_embeddings and padding_size >= 1."
            )
        base_padded = _round_up(base, padding_size)
        return cls(base, num_embeddings, base_padded, _round_up(base_padded + num_embeddings - base, padding_size))

    @property
    def contiguous(self) -> bool:
        """Whether id and row number are the same for every valid id."""
        return self.size == self.base or self.base == self.base_padded

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each id (0 where the id is outside the vocabulary), and which ids are inside."""
        ids = ids.long()
        valid = (ids >= 0) & (ids < self.size)
        rows = torch.where(ids < self.base, ids, ids + (self.base_padded - self.base))
        return torch.where(valid, rows, 0), valid

    def columns(self) -> Tensor:
        """Row of every valid id in order: picks the real columns out of padded logits."""
        return self.rows(torch.arange(self.size))[0]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
