"""The default weight method of an MoE layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu
from .experts import FusedMoEConfig, Weights, experts_cost, experts_native, random_weights, shapes

__all__ = ["FusedMoEConfig", "UnquantizedFusedMoEMethod"]


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(CustomOp):
    """Experts with weights in the activations' dtype: ``out = sum_j w_j * W2[e_j] act(W13[e_j] x)``.

    The method owns no weights. :meth:`create_weights` puts them into a layer, and a call reads them from there:
    ``layer.w13_weight``, ``layer.w2_weight`` and, if present, ``w13_bias``, ``w2_bias`` and ``expert_map``. Biases are
    added before the activation and before the weight.

    An id of -1, an id beyond the experts, and an expert that is not local contribute nothing, whatever its weight.

    Shapes:  x [T, H]; topk_weights, topk_ids [T, k] -> [T, H]. w13_weight [E, 2 I, H], gate rows first (swigluoai:
             alternating; an activation without a gate: [E, I, H]); w2_weight [E, H, I]; expert_map [E of all ranks].
    Dtypes:  fp32, fp16, bf16, the same for x and weights; topk_weights any, topk_ids int32 or int64. Products
             accumulate in fp32, the bias is added there, and each is rounded to x's dtype; the activation is fp32,
             rounded once; the weighted sum is fp32, in the order of j, rounded once. With
             ``apply_router_weight_on_input`` x is multiplied by the weight in fp32 and rounded first.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for shapes that do not belong together; TypeError for other dtypes.
    Source:  Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088; gpt-oss, arXiv 2508.10925.

    Args:
        moe: the layer's settings.
    """

    # Up to six roundings lie on the way to a result, and two sums in which large terms cancel.
    tolerance = Tolerance(ulp=8.0, fp32=64.0, scale=1.0)
    lead = 1

    def __init__(self, moe: FusedMoEConfig, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.moe = moe
        self.activation = moe.function()

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype | None = None,
        **extra: Any,
    ) -> None:
        """Register the parameters of ``num_experts`` local experts on ``layer``. Weights are not initialised."""
        rows = self.activation.halves * intermediate_size_per_partition
        shapes = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            layer.register_parameter(name, frozen(torch.empty(shape, dtype=params_dtype)))
        if self.moe.has_bias:
            layer.register_parameter("w13_bias", frozen(torch.zeros(num_experts, rows, dtype=params_dtype)))
            layer.register_parameter("w2_bias", frozen(torch.zeros(num_experts, hidden_size, dtype=params_dtype)))

    def apply(self, layer: Any, *call: Tensor) -> Any:
        """``apply(layer, x, topk_weights, topk_ids)``, vLLM's name for calling the op.

        With a function alone it is ``nn.Module.apply``, which walks a model through its children.
        """
        return self(layer, *call) if call else super().apply(layer)

    def forward_native(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        weights = self._weights(layer, x, topk_weights, topk_ids)
        return experts_native(x, weights, topk_weights, topk_ids, self.activation, self._on_input)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        weights = self._weights(layer, x, topk_weights, topk_ids)
        return kernels_cpu.fused_experts_cpu(
            x, *weights.with_routing(topk_weights, topk_ids), *self.activation.rules(), self._on_input
        )

    @property
    def _on_input(self) -> bool:
        return self.moe.apply_router_weight_on_input

    def _weights(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Weights:
        found = Weights.of(layer)
        found.check(x, topk_weights, topk_ids, self.activation)
        return found

    def extra_repr(self) -> str:
        return f"{self.moe.num_experts} experts, {self.moe.activation}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for shape, real in shapes():
            on_input = shape.top_k == 1 and not real
            config = shape.config(apply_router_weight_on_input=on_input)
            yield Case(
                name=f"{shape.name}{', weight on input' if on_input else ''}",
                init={"moe": config},
                args=lambda i, s=shape, c=config: (sample_layer(c, i), i.randn(s.tokens, s.hidden), *s.routing(i)),
                dims=shape.dims(),
                bench=real,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return experts_cost(case, dtype)


def sample_layer(config: FusedMoEConfig, inputs: Inputs) -> nn.Module:
    """A layer that holds random weights for ``config``."""
    layer = nn.Module()
    with torch.device("meta"):
        UnquantizedFusedMoEMethod(config).create_weights(
            layer, config.local_experts, config.hidden_dim, config.intermediate_size_per_partition, inputs.dtype
        )
    random_weights(layer, inputs)
    return layer
