"""An MoE layer: router, experts, shared experts, scaling, reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import tensor_parallel
from .all_to_all import AllToAll
from .expert_weights import Placement, load_expert, load_fused
from .experts import FusedMoEConfig, Shape, experts_cost, random_weights
from .grouped_topk import GroupedTopk
from .modular_fused_moe import FusedMoEModularMethod, ModularKernel
from .unquantized_fused_moe import UnquantizedFusedMoEMethod

__all__ = ["FusedMoE"]

Routing = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]


@CustomOp.register("fused_moe")
class FusedMoE(CustomOp):
    """A mixture of experts: ``sum_j w_j * expert_j(x)`` over each token's ``top_k`` experts, plus shared experts.

    Router and experts are ops of their own (``grouped_topk``; ``unquantized_fused_moe``, or ``modular_fused_moe`` where
    tokens travel), each with its own directives. ``routed_scaling_factor`` multiplies the routing weights or, with
    ``apply_routed_scale_to_output``, the routed sum; shared experts are added unscaled, times the sigmoid of
    ``shared_expert_gate`` if there is one.

    Over tensor-parallel ranks each expert's inner features are split; with ``expert_parallel`` each rank holds whole
    experts: "same_tokens" where every rank has all tokens, and the ranks' sums are added; "own_tokens" where each rank has
    tokens of its own, which travel to their experts and back (all-to-all, any number of tokens on each rank).

    Shapes:  hidden_states [T, H]; router_logits [T, E], not read where the layer has its own ``gate`` -> [T, H].
    Dtypes:  as of ``grouped_topk`` and ``unquantized_fused_moe``. Scaling the routed sum, adding ranks and adding shared
             experts each round once to the dtype of hidden_states.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for settings without an answer (groups, top_k, activation), and for logits that are missing;
             TensorParallelError for inner features that do not divide by the ranks.
    Source:  Mixtral, arXiv 2401.04088; DeepSeek-V3, arXiv 2412.19437.

    Args:
        num_experts, top_k, hidden_size, intermediate_size: E, k, H, I of the whole layer.
        params_dtype: of the weights; None means torch's default.
        reduce_results: add over the ranks; without it each rank returns its own summand.
        renormalize, num_expert_group, topk_group, scoring_func, routed_scaling_factor: as of ``grouped_topk``; groups
            count with ``use_grouped_topk`` only.
        custom_routing_function: ``(hidden_states, logits, top_k, renormalize) -> (weights, ids)`` in place of all these.
        e_score_correction_bias: [E], added to the scores for the choice only.
        apply_router_weight_on_input: multiply an expert's input by its weight, not its output; needs top_k = 1.
        activation, has_bias, swiglu_alpha, swiglu_limit: as of ``FusedMoEConfig``.
        gate: makes the logits from hidden_states.
        shared_experts, shared_expert_gate: modules of hidden_states whose results are complete on every rank.
        expert_parallel: see above; the ranks are those of ``opmux.distributed``.
    """

    tolerance = Tolerance(ulp=8.0, fp32=64.0, scale=1.0)

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        custom_routing_function: Routing | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
        *,
        gate: nn.Module | None = None,
        shared_experts: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
        apply_routed_scale_to_output: bool = False,
        swiglu_alpha: float | None = None,
        swiglu_limit: float | None = None,
        expert_parallel: Literal["same_tokens", "own_tokens"] | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.tp = tensor_parallel()
        self.reduce_results = reduce_results and expert_parallel != "own_tokens"
        self.placement = Placement.of(self.tp, num_experts, intermediate_size, expert_parallel)
        self.moe = FusedMoEConfig(
            num_experts, top_k, hidden_size, self.placement.inner, self.placement.local_experts, activation, has_bias,
            apply_router_weight_on_input, swiglu_alpha, swiglu_limit,
        )  # fmt: skip
        self.renormalize = renormalize
        self.custom_routing_function = custom_routing_function
        self.output_scale = routed_scaling_factor if apply_routed_scale_to_output else 1.0
        groups = (num_expert_group or 0, topk_group or 0) if use_grouped_topk else (0, 0)
        factor = 1.0 if apply_routed_scale_to_output else routed_scaling_factor
        self.router = GroupedTopk(top_k, renormalize, *groups, scoring_func, factor)
        self.e_score_correction_bias = None if e_score_correction_bias is None else frozen(e_score_correction_bias)
        self.quant_method: CustomOp = UnquantizedFusedMoEMethod(self.moe)
        self.quant_method.create_weights(self, self.moe.local_experts, hidden_size, self.placement.inner, params_dtype)
        if expert_parallel == "own_tokens" and self.tp.size > 1:
            travel = AllToAll(self.tp, self.placement.first_experts)
            kernel = ModularKernel(prepare=travel.prepare, combine=travel.combine)
            self.quant_method = FusedMoEModularMethod(self.quant_method, kernel)
        self.register_buffer("expert_map", self.placement.expert_map(), persistent=False)
        self.gate = gate
        self.shared_experts = shared_experts
        self.shared_expert_gate = shared_expert_gate

    def forward_native(self, hidden_states: Tensor, router_logits: Tensor | None = None) -> Tensor:
        return self._layer(hidden_states, router_logits, self.router.forward_native, self.quant_method.forward_native)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, hidden_states: Tensor, router_logits: Tensor | None = None) -> Tensor:
        return self._layer(hidden_states, router_logits, self.router, self.quant_method)

    def _layer(self, x: Tensor, logits: Tensor | None, route: Any, experts: Any) -> Tensor:
        if self.gate is not None:
            made = self.gate(x)
            logits = made[0] if isinstance(made, tuple) else made
        if logits is None:
            raise ValueError("fused_moe needs router_logits: this layer was built without a gate of its own.")
        if self.custom_routing_function is not None:
            weights, ids = self.custom_routing_function(x, logits, self.moe.experts_per_token, self.renormalize)
            weights, ids = weights.float(), ids.to(torch.int32)
        else:
            weights, ids = route(x, logits, self.e_score_correction_bias)
        out: Tensor = experts(self, x, weights, ids)
        if self.output_scale != 1.0:
            out = out * self.output_scale
        if self.reduce_results:
            out = self.tp.all_reduce(out)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return out + shared

    def load_expert(self, expert: int, shard: str, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Copy one matrix of one expert of a checkpoint: shard "w1" (gate [I, H]), "w3" (up [I, H]) or "w2" (down [H, I]).

        Returns whether the expert is here; ValueError for another shard or shape.
        """
        return load_expert(self, self.placement, expert, shard, weight, bias)

    def load_fused(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> None:
        """Copy all experts of a checkpoint that holds them as [E, 2 I, H] and [E, H, I], in the order of this layer."""
        load_fused(self, self.placement, gate_up, down, gate_up_bias, down_bias)

    def extra_repr(self) -> str:
        return f"{self.moe.num_experts} experts, {self.moe.hidden_dim}, {self.placement}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        deepseek: dict[str, Any] = {
            "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
        }  # fmt: skip
        for tokens in (1, 64, 1024):
            yield _case(Shape(tokens, 60, 2048, 1408, 4), bench=True, shared=5632, gated=True)  # Qwen1.5-MoE
            yield _case(Shape(tokens, 64, 2048, 1024, 8), bench=True, renormalize=False)  # OLMoE
        yield _case(Shape(0, 4, 32, 16, 2))
        yield _case(Shape(5, 6, 33, 17, 6))
        yield _case(Shape(7, 16, 64, 24, 3), shared=40, bias=True, **deepseek)
        yield _case(Shape(7, 16, 64, 24, 3), apply_routed_scale_to_output=True, **deepseek)
        yield _case(Shape(6, 5, 40, 24, 1), apply_router_weight_on_input=True, scoring_func="sigmoid", own_gate=False)
        yield _case(Shape(9, 8, 48, 24, 2, "swigluoai", True), own_gate=False)
        yield _case(Shape(3, 7, 40, 20, 3, "gelu_tanh"), shared=24, gated=True, scoring_func="sqrtsoftplus")

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        experts, d = experts_cost(case, dtype), case.dims
        shared = 3 * d["H"] * d["shared"]
        return Cost(experts.size_bytes + shared * dtype.itemsize, experts.flops + 2 * d["T"] * shared)


class _Shared(nn.Module):
    """A gated MLP, for cases."""

    def __init__(self, hidden: int, inner: int, inputs: Inputs) -> None:
        super().__init__()
        self.up = _linear(hidden, 2 * inner, inputs)
        self.down = _linear(inner, hidden, inputs)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


def _linear(width: int, rows: int, inputs: Inputs) -> nn.Linear:
    linear = nn.Linear(width, rows, bias=False, device="meta")
    linear.weight = frozen(inputs.randn(rows, width, scale=width**-0.5))
    return linear


def _case(shape: Shape, *, bench: bool = False, shared: int = 0, gated: bool = False, bias: bool = False,
          own_gate: bool = True, **rules: Any) -> Case:  # fmt: skip
    def prepare(op: FusedMoE, inputs: Inputs) -> None:
        random_weights(op, inputs)
        if bias:
            op.e_score_correction_bias = frozen((inputs.randn(shape.experts, scale=4.0).round() / 8).float())
        # Whole numbers, so that logits are exact in every dtype: what the router decides must not hang on rounding.
        op.gate = _linear(shape.hidden, shape.experts, inputs) if own_gate else None
        if op.gate is not None:
            op.gate.weight.data = inputs.randn(shape.experts, shape.hidden, scale=0.7).round()
        if shared:
            op.shared_experts = _Shared(shape.hidden, shared, inputs)
            op.shared_expert_gate = _linear(shape.hidden, 1, inputs) if gated else None

    def args(inputs: Inputs) -> tuple[Tensor, ...]:
        x = (inputs.randn(shape.tokens, shape.hidden, scale=2.0)).round() / 4
        return (x,) if own_gate else (x, inputs.randn(shape.tokens, shape.experts, scale=8.0).round() / 8)

    parts = [shape.name, *(f"{k}={v}" for k, v in rules.items()), *(["shared experts"] if shared else [])]
    return Case(
        name=", ".join(parts),
        init={
            "num_experts": shape.experts, "top_k": shape.top_k, "hidden_size": shape.hidden,
            "intermediate_size": shape.inner, "activation": shape.activation, "has_bias": shape.bias, **rules,
        },
        args=args,
        dims={**shape.dims(), "shared": shared},
        bench=bench,
        prepare=prepare,
    )  # fmt: skip
