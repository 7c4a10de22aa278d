"""Routing: which experts a token goes to, and with what weights. The definition that every router shares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_LARGEST = torch.finfo(torch.float32).max


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """(weights [T, k], fp32; ids [T, k], int32) of logits [T, E]; see ``GroupedTopk`` for the rules."""
    # Decided in fp32 whatever the dtype, so that a definition in float64 decides alike.
    known = torch.nan_to_num(logits.float(), nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    # Scores rise with the logits. Ranking the logits themselves decides ties that only rounding makes.
    key = known if bias is None else torch.nan_to_num(_scores(known, scoring_func) + bias.float(), nan=-_LARGEST,
                                                      posinf=_LARGEST, neginf=-_LARGEST)  # fmt: skip
    if topk_group < num_expert_group:
        key = key.masked_fill(~_kept(key, num_expert_group, topk_group, 1 if bias is None else 2), float("-inf"))
    # A stable sort, because topk promises nothing about ties: the lowest id comes first.
    ids = key.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    wide = known.to(torch.float64) if logits.dtype == torch.float64 else known
    weights = _scores(wide, scoring_func).gather(1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def _scores(logits: Tensor, scoring_func: str) -> Tensor:
    if scoring_func == "softmax":
        return logits.softmax(-1)
    if scoring_func == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits, threshold=1e9).sqrt()


def _kept(key: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """Whether each expert is in one of the groups whose sum of the ``best`` largest keys is largest."""
    by_group = key.unflatten(-1, (groups, -1))
    worth = by_group.topk(min(best, by_group.shape[-1]), dim=-1).values.sum(-1).clamp(-_LARGEST, _LARGEST)
    chosen = worth.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    mask = torch.zeros_like(worth, dtype=torch.bool).scatter(1, chosen, True)
    return mask.unsqueeze(-1).expand_as(by_group).flatten(-2)


def check_route(
    op: str, num_experts: int, top_k: int, num_expert_group: int, topk_group: int, scoring_func: str
) -> None:
    """Refuse what has no answer, before any kernel sees it."""
    if scoring_func not in SCORES:
        raise ValueError(f"{op}: scoring_func is {scoring_func!r}; there are {', '.join(map(repr, SCORES))}.")
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise ValueError(
            f"{op}: {num_experts} experts do not divide into {num_expert_group} groups; choose num_expert_group so "
            "that they do."
        )
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"{op}: topk_group is {topk_group}; it must lie in 1..{num_expert_group} (num_expert_group).")
    within = num_experts // num_expert_group * topk_group
    if not 1 <= top_k <= within:
        raise ValueError(f"{op}: top_k is {top_k}; it must lie in 1..{within}, the experts of the groups that are kept.")
