"""Where the experts of a layer are among the ranks, and how a checkpoint's parts come there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.parameters import copy_checked
from ...distributed import TensorParallel

SHARDS = ("w1", "w2", "w3")
MODES = ("same_tokens", "own_tokens")


@dataclass(frozen=True)
class Placement:
    """What this rank holds of E experts with I inner features.

    Attributes:
        rank: of this process.
        num_experts: E.
        first_experts: the first expert of each rank, and E behind them; (0, E) where every rank has them all.
        inner: inner features of an expert here, from ``first_inner`` of the whole expert.
    """

    rank: int
    num_experts: int
    first_experts: tuple[int, ...]
    inner: int
    first_inner: int = 0

    @classmethod
    def of(cls, tp: TensorParallel, num_experts: int, inner: int, expert_parallel: str | None) -> Placement:
        if expert_parallel is None:
            mine = tp.share(inner, "intermediate_size")
            return cls(tp.rank, num_experts, (0, num_experts), mine, mine * tp.rank)
        if expert_parallel not in MODES:
            raise ValueError(f"expert_parallel is {expert_parallel!r}; there are None, {', '.join(map(repr, MODES))}.")
        each, more = divmod(num_experts, tp.size)  # the first ranks take one more where it does not divide
        return cls(tp.rank, num_experts, tuple(r * each + min(r, more) for r in range(tp.size + 1)), inner)

    @property
    def split(self) -> bool:
        """Whether whole experts are spread over the ranks."""
        return len(self.first_experts) > 2

    @property
    def experts(self) -> range:
        """The experts here."""
        rank = self.rank if self.split else 0
        return range(self.first_experts[rank], self.first_experts[rank + 1])

    @property
    def local_experts(self) -> int:
        return len(self.experts)

    @property
    def features(self) -> slice:
        return slice(self.first_inner, self.first_inner + self.inner)

    def expert_map(self) -> Tensor | None:
        """int32 [E]: the expert here, or -1; None where all are."""
        if not self.split:
            return None
        known = torch.full((self.num_experts,), -1, dtype=torch.int32)
        known[self.experts.start : self.experts.stop] = torch.arange(self.local_experts, dtype=torch.int32)
        return known

    def __str__(self) -> str:
        if self.split:
            return f"experts {self.experts.start}..{self.experts.stop - 1} here"
        return f"{self.inner} inner features"


def load_expert(layer: Any, at: Placement, expert: int, shard: str, weight: Tensor, bias: Tensor | None) -> bool:
    """See ``FusedMoE.load_expert``."""
    if shard not in SHARDS or (shard == "w3" and not layer.moe.function().gated):
        raise ValueError(f"There is no shard {shard!r} of an expert; there are {', '.join(SHARDS)} (w3: with a gate).")
    if not 0 <= expert < at.num_experts:
        raise ValueError(f"There is no expert {expert}; this layer has {at.num_experts}.")
    if expert not in at.experts:
        return False
    here = expert - at.experts.start
    what = f"{shard} of expert {expert}"
    if shard == "w2":
        copy_checked(layer.w2_weight[here], weight[:, at.features], what)
    else:
        copy_checked(layer.w13_weight[here][_rows(layer, at, shard)], weight[at.features], what)
    if bias is None:
        return True
    if shard != "w2":
        copy_checked(layer.w13_bias[here][_rows(layer, at, shard)], bias[at.features], f"the bias of {what}")
    elif at.first_inner:  # one rank adds it
        layer.w2_bias[here].zero_()
    else:
        copy_checked(layer.w2_bias[here], bias, f"the bias of {what}")
    return True


def load_fused(
    layer: Any, at: Placement, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> None:
    """See ``FusedMoE.load_fused``."""
    halves = ("w1", "w3") if layer.moe.function().gated else ("w1",)
    for e in at.experts:
        for half, shard in enumerate(halves):
            rows = _half(layer, gate_up.shape[1] // len(halves), half)
            load_expert(layer, at, e, shard, gate_up[e][rows], None if gate_up_bias is None else gate_up_bias[e][rows])
        load_expert(layer, at, e, "w2", down[e], None if down_bias is None else down_bias[e])


def _rows(layer: Any, at: Placement, shard: str) -> slice:
    return _half(layer, at.inner, int(shard == "w3"))


def _half(layer: Any, inner: int, half: int) -> slice:
    """The rows of gates (0) or ups (1) among those of both."""
    if layer.moe.function().interleaved:
        return slice(half, 2 * inner, 2)
    return slice(half * inner, (half + 1) * inner)
