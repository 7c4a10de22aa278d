"""The state of multi-head latent attention between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LatentCache"]


@dataclass
class LatentCache:
    """Where the latents of earlier tokens lie. It holds tensors and counts; the op reads and writes the tensors.

    ::

        cache = LatentCache.dense(batch, 4096, op.latent_width, torch.bfloat16)
        out = op(positions, hidden_states, **cache.arguments())
        cache.advance(hidden_states.shape[1])

    Attributes:
        kv_cache: rows ``[latent (L) | rotated key (R)]``: dense [B, room, L + R], or pages [pages, tokens of a page, L + R].
        lengths: [B] int32, tokens of each sequence that are there.
        block_table: [B, pages of a sequence] int32, the page of each sequence's tokens 0..page-1, page..2 page-1, ...;
            None for a dense cache.
    """

    kv_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None = None

    @classmethod
    def dense(
        cls, batch: int, room: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> LatentCache:
        """Room for ``room`` tokens of each of ``batch`` sequences."""
        kv_cache = torch.empty(batch, room, width, dtype=dtype, device=device)
        return cls(kv_cache, torch.zeros(batch, dtype=torch.int32, device=device))

    @classmethod
    def paged(cls, kv_cache: Tensor, block_table: Tensor) -> LatentCache:
        """Empty sequences in pages that the caller gives out: ``block_table`` may grow and change between calls."""
        lengths = torch.zeros(block_table.shape[0], dtype=torch.int32, device=kv_cache.device)
        return cls(kv_cache, lengths, block_table)

    def arguments(self) -> dict[str, Tensor | None]:
        """The op's state arguments for the next call."""
        return {"kv_cache": self.kv_cache, "block_table": self.block_table, "context_lens": self.lengths}

    def advance(self, tokens: int | Tensor) -> None:
        """Count the tokens that a call has added: one number for all sequences, or [B]."""
        self.lengths = self.lengths + tokens
