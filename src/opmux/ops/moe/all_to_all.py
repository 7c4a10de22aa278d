"""Tokens that travel to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.numerics import wide
from ...distributed import TensorParallel
from .modular_fused_moe import Prepared


class AllToAll:
    """The first and the last step of experts that are spread over ranks, each of which has tokens of its own.

    A token goes once to every rank that has one of its experts, with all its ids, and comes back as that rank's weighted
    sum in x's dtype; the ranks' sums are added in fp32, in their order, and rounded once. Ranks may have different numbers
    of tokens, also none; all of them must call.

    Args:
        tp: the ranks.
        first_experts: the first expert of each rank, and the number of experts behind them.
    """

    def __init__(self, tp: TensorParallel, first_experts: tuple[int, ...]) -> None:
        self.tp = tp
        self.first_experts = first_experts

    def prepare(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Prepared:
        bounds = torch.tensor(self.first_experts, device=x.device)
        ids = topk_ids.long().unsqueeze(-1)
        goes = ((ids >= bounds[:-1]) & (ids < bounds[1:])).any(1)  # [T, ranks]
        token = goes.t().nonzero()[:, 1]  # in the order of ranks
        counts = goes.sum(0)
        sent: list[int] = counts.tolist()
        received: list[int] = self.tp.all_to_all(counts, [1] * self.tp.size, [1] * self.tp.size).tolist()
        there = [self.tp.all_to_all(t[token], sent, received) for t in (x, topk_weights, topk_ids)]
        return Prepared(*there, state=(x.shape[0], token, sent, received))

    def combine(
        self, outputs: Tensor, topk_weights: Tensor, prepared: Prepared, weigh: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        state: Any = prepared.state
        tokens, token, sent, received = state
        back = self.tp.all_to_all(weigh(outputs, topk_weights), received, sent)
        total = wide(back).new_zeros(tokens, back.shape[1])
        for rows, part in zip(token.split(sent), wide(back).split(sent), strict=True):
            total.index_add_(0, rows, part)  # each token once: no two rows of a part meet
        return total.to(back.dtype)
