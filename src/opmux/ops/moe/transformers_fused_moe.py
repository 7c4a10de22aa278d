"""The experts of a transformers model, which does its own routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu
from .experts import FusedMoEConfig, Weights, experts_cost, experts_native, random_weights, shapes

__all__ = ["TransformersFusedMoE"]


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(CustomOp):
    """Experts by transformers' names and argument order, with the routing given: ``sum_j w_j * W2[e_j] act(W1[e_j] x)``.

    An id of -1 or beyond the experts contributes nothing, whatever its weight.

    Shapes:  hidden_states [T, H]; topk_ids, topk_weights [T, k] -> [T, H]. gate_up_proj [E, 2 I, H] (an activation
             without a gate: up_proj [E, I, H]); down_proj [E, H, I]; with ``is_transposed`` their last two dimensions
             are exchanged. gate_up_proj_bias [E, 2 I]; down_proj_bias [E, H].
    Dtypes:  as of ``unquantized_fused_moe``; topk_weights of any floating dtype are read as fp32.
    Mutates: nothing.      Grad: native only.
    Errors:  as of ``unquantized_fused_moe``. Keyword arguments that it does not know are ignored.
    Source:  as of ``unquantized_fused_moe``.

    Args:
        moe: the experts' settings.
        is_transposed: how the weights' dimensions are ordered. Kernels are fast where the memory order is that of
            ``is_transposed=False``, of which such weights are then transposed views.
        params_dtype: of the weights; None means torch's default.
    """

    tolerance = Tolerance(ulp=8.0, fp32=64.0, scale=1.0)

    def __init__(
        self,
        moe: FusedMoEConfig,
        is_transposed: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.moe = moe
        self.activation = moe.function()
        self.is_transposed = is_transposed
        self.first_name = "gate_up_proj" if self.activation.gated else "up_proj"
        experts, hidden, inner = moe.local_experts, moe.hidden_dim, moe.intermediate_size_per_partition
        rows = self.activation.halves * inner
        for name, shape in ((self.first_name, (rows, hidden)), ("down_proj", (hidden, inner))):
            weight = torch.empty(experts, *shape, dtype=params_dtype)
            self.register_parameter(name, frozen(weight.transpose(1, 2) if is_transposed else weight))
            if moe.has_bias:
                self.register_parameter(f"{name}_bias", frozen(torch.zeros(experts, shape[0], dtype=params_dtype)))

    def forward_native(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **_: Any) -> Tensor:
        weights = self._weights(hidden_states, topk_ids, topk_weights)
        return experts_native(hidden_states, weights, topk_weights, topk_ids, self.activation, self._on_input)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **_: Any) -> Tensor:
        weights = self._weights(hidden_states, topk_ids, topk_weights)
        return kernels_cpu.fused_experts_cpu(
            hidden_states, *weights.with_routing(topk_weights, topk_ids), *self.activation.rules(), self._on_input
        )

    @property
    def _on_input(self) -> bool:
        return self.moe.apply_router_weight_on_input

    def _weights(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Weights:
        own: Any = self._parameters  # which may be those of a transformers module
        first, second = own[self.first_name], own["down_proj"]
        if self.is_transposed:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        found = Weights(first, second, own.get(f"{self.first_name}_bias"), own.get("down_proj_bias"))
        found.check(x, topk_weights, topk_ids, self.activation)
        return found

    def extra_repr(self) -> str:
        return f"{self.moe.num_experts} experts, {self.moe.activation}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for shape, real in shapes():
            for transposed in (False, True) if shape.bias else (False,):
                yield Case(
                    name=f"{shape.name}{', transposed' if transposed else ''}",
                    init={"moe": shape.config(), "is_transposed": transposed},
                    args=lambda i, s=shape: (i.randn(s.tokens, s.hidden), *reversed(s.routing(i))),
                    dims=shape.dims(),
                    bench=real,
                    prepare=_fill,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return experts_cost(case, dtype)


def _fill(op: TransformersFusedMoE, inputs: Inputs) -> None:
    random_weights(op, inputs)
    if op.is_transposed:
        for name in (op.first_name, "down_proj"):
            weight = getattr(op, name)
            weight.data = weight.transpose(1, 2).contiguous().transpose(1, 2)
