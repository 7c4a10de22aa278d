"""The choice of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.requires import requires
from . import kernels_cpu
from .routing import check_route, route

__all__ = ["GroupedTopk"]


@CustomOp.register("grouped_topk")
class GroupedTopk(CustomOp):
    """The ``topk`` experts of each token and their weights, from the router's logits.

    ``s = score(logits)``; the choice is by ``s + bias``: first the ``topk_group`` best groups of experts (a group is
    worth its best expert or, with a bias, the sum of its two best), then the ``topk`` best experts in them. Weights
    are the unbiased ``s`` of the chosen, divided by their sum with ``renormalize``, times ``routed_scaling_factor``.

    Experts come in falling order of what decided; equals in rising order of id, groups too. A NaN counts as the lowest
    logit and an infinity as the largest finite one, so every row has distinct, valid ids and weights that are numbers:
    a row of NaN or -inf alone routes as a row of equal logits. Where all chosen scores are 0, weights are 0.

    Shapes:  hidden_states [T, ...], read for T only; gating_output [T, E]; e_score_correction_bias [E]
             -> weights [T, topk], ids [T, topk].
    Dtypes:  logits fp32, fp16, bf16; bias any. Everything is fp32; without a bias the logits themselves are ranked,
             which scores that round alike cannot mislead. weights fp32, ids int32.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for an unknown ``scoring_func``, groups that do not divide E, ``topk_group`` beyond the groups,
             ``topk`` beyond the experts of the kept groups, shapes that do not belong together, or fused shared experts.
    Source:  DeepSeek-V3, arXiv 2412.19437; Mixtral, arXiv 2401.04088.

    Args:
        topk, renormalize, routed_scaling_factor: see above.
        num_expert_group, topk_group: 0 means one group, that is no groups.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus".
        num_fused_shared_experts: 0; shared experts are FusedMoE's.
    """

    tolerance = Tolerance(ulp=2.0, fp32=64.0)
    lead = 1

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if num_fused_shared_experts:
            raise ValueError("grouped_topk routes to routed experts only; give FusedMoE its shared_experts instead.")
        self.topk = topk
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group or 1
        self.topk_group = topk_group or self.num_expert_group
        self.scoring_func = scoring_func
        self.routed_scaling_factor = float(routed_scaling_factor)
        # With as many experts as a legal choice needs at the least; the call checks against the real number.
        check_route("grouped_topk", topk * self.num_expert_group, topk, self.num_expert_group, self.topk_group,
                    scoring_func)  # fmt: skip

    def forward_native(
        self, hidden_states: Tensor, gating_output: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(hidden_states, gating_output, e_score_correction_bias)
        return route(gating_output, e_score_correction_bias, *self._rules())

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, hidden_states: Tensor, gating_output: Tensor, e_score_correction_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(hidden_states, gating_output, e_score_correction_bias)
        return kernels_cpu.grouped_topk_cpu(gating_output, e_score_correction_bias, *self._rules())

    def _rules(self) -> tuple[int, bool, int, int, str, float]:
        return (
            self.topk, self.renormalize, self.num_expert_group, self.topk_group, self.scoring_func,
            self.routed_scaling_factor,
        )  # fmt: skip

    def _check(self, hidden_states: Tensor, logits: Tensor, bias: Tensor | None) -> None:
        if logits.dim() != 2 or hidden_states.shape[0] != logits.shape[0]:
            raise ValueError(
                f"grouped_topk takes logits [T, E] of the T rows of hidden_states; it got {tuple(logits.shape)} and "
                f"{tuple(hidden_states.shape)}."
            )
        experts = logits.shape[1]
        if bias is not None and bias.shape != (experts,):
            raise ValueError(f"e_score_correction_bias has shape {tuple(bias.shape)}; it must be ({experts},).")
        check_route("grouped_topk", experts, self.topk, self.num_expert_group, self.topk_group, self.scoring_func)

    def extra_repr(self) -> str:
        groups = f", {self.topk_group} of {self.num_expert_group} groups" if self.num_expert_group > 1 else ""
        return f"{self.topk}{groups}, {self.scoring_func}, renormalize={self.renormalize}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        deepseek = {"num_expert_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
        for tokens in (1, 64, 4096):
            yield _case(tokens, 256, 8, True, True, bench=True, **deepseek)
            yield _case(tokens, 128, 8, False, True, bench=True)
        yield _case(0, 64, 4, False, True)
        yield _case(3, 1, 1, False, True)
        yield _case(5, 6, 6, False, False)
        yield _case(7, 60, 4, False, False, routed_scaling_factor=0.5)
        yield _case(7, 24, 5, True, True, num_expert_group=6, topk_group=2)
        yield _case(7, 24, 3, False, True, num_expert_group=4, topk_group=1, scoring_func="sigmoid")
        yield _case(7, 8, 2, True, True, num_expert_group=8, topk_group=3, scoring_func="sqrtsoftplus")
        yield _case(33, 300, 10, True, False, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        t, e, k = case.dims["T"], case.dims["E"], case.dims["k"]
        return Cost(size_bytes=t * e * dtype.itemsize + t * k * 8 + 4 * e)


def _case(tokens: int, experts: int, top_k: int, bias: bool, renormalize: bool, *, bench: bool = False,
          **rules: object) -> Case:  # fmt: skip
    def args(inputs: Inputs) -> tuple[Tensor, ...]:
        # On a coarse grid there are ties, and no two biased scores that rounding could tell apart either way.
        logits = inputs.randn(tokens, experts, scale=8.0).round() / 8
        hidden = logits[:, :1]
        if not bias:
            return hidden, logits
        return hidden, logits, (inputs.randn(experts, scale=4.0).round() / 8).float()

    what = f"{rules.get('scoring_func', 'softmax')}{'+bias' if bias else ''}"
    if "num_expert_group" in rules:
        what += f", {rules['topk_group']} of {rules['num_expert_group']} groups"
    return Case(
        name=f"T={tokens} E={experts} k={top_k} {what}",
        init={"topk": top_k, "renormalize": renormalize, **rules},
        args=args,
        dims={"T": tokens, "E": experts, "k": top_k},
        bench=bench,
    )
