"""Experts in three steps that can be replaced one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Tolerance
from ...core.custom_op import CustomOp
from ...core.requires import requires
from . import kernels_cpu
from .experts import Weights, combine_native, outputs_native
from .unquantized_fused_moe import UnquantizedFusedMoEMethod

__all__ = ["FusedMoEModularMethod", "ModularKernel", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """The tokens that the experts here work on, and what the last step needs to know of how they came.

    Attributes:
        x: [T', H].
        topk_weights, topk_ids: [T', k].
        state: anything; the way back.
    """

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    state: Any = None


def stay(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Prepared:
    """The first step where tokens and experts are in one place."""
    return Prepared(x, topk_weights, topk_ids)


def weigh_here(outputs: Tensor, topk_weights: Tensor, prepared: Prepared, weigh: Callable[..., Tensor]) -> Tensor:
    """The last step where tokens and experts are in one place."""
    return weigh(outputs, topk_weights)


@dataclass(frozen=True)
class ModularKernel:
    """The steps.

    Attributes:
        prepare: ``(x, topk_weights, topk_ids) -> Prepared``: quantise, or bring tokens to the ranks of their experts.
        experts: ``(layer, x, topk_weights, topk_ids) -> [T', k, H]``, zeros where an id has no expert here; None means
            the platform's. It applies weights on the input itself; those on the output are not its business.
        combine: ``(outputs, topk_weights, prepared, weigh) -> [T, H]``; ``weigh(outputs, topk_weights)`` is the
            platform's weighted sum over k. Weights are 0 where an id has no expert here.
    """

    prepare: Callable[[Tensor, Tensor, Tensor], Prepared] = stay
    experts: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None
    combine: Callable[[Tensor, Tensor, Prepared, Callable[..., Tensor]], Tensor] = weigh_here


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(CustomOp):
    """Experts as prepare, experts, combine, each of which can be replaced: ``sum_j w_j * W2[e_j] act(W13[e_j] x)``.

    With the steps as they are it computes what ``unquantized_fused_moe`` does. Weights are read from the layer, as there.

    Shapes:  x [T, H]; topk_weights, topk_ids [T, k] -> [T, H].
    Dtypes:  as of ``unquantized_fused_moe``.
    Mutates: nothing.      Grad: native only.
    Errors:  as of ``unquantized_fused_moe``; NotImplementedError for ``create_weights``: the weights exist.
    Source:  Lepikhin et al. 2020 (GShard: dispatch and combine), arXiv 2006.16668.

    Args:
        old_quant_method: the method whose weights and settings these are.
        moe_kernel: the steps; None means tokens and experts in one place.
    """

    tolerance = Tolerance(ulp=8.0, fp32=64.0, scale=1.0)
    lead = 1

    def __init__(
        self,
        old_quant_method: UnquantizedFusedMoEMethod,
        moe_kernel: ModularKernel | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.moe = old_quant_method.moe
        self.activation = old_quant_method.activation
        self.moe_kernel = moe_kernel or ModularKernel()

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "modular_fused_moe works on weights that exist; create them by the method that it was built from."
        )

    def apply(self, layer: Any, *call: Tensor) -> Any:
        """``apply(layer, x, topk_weights, topk_ids)``, vLLM's name for calling the op; else ``nn.Module.apply``."""
        return self(layer, *call) if call else super().apply(layer)

    def forward_native(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        def experts(layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            return outputs_native(x, Weights.of(layer), topk_weights, topk_ids, self.activation, self._on_input)

        return self._steps(layer, x, topk_weights, topk_ids, experts, combine_native)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        def experts(layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            return kernels_cpu.expert_outputs_cpu(
                x, *Weights.of(layer).with_routing(topk_weights, topk_ids), *self.activation.rules(), self._on_input
            )

        return self._steps(layer, x, topk_weights, topk_ids, experts, kernels_cpu.combine_experts_cpu)

    @property
    def _on_input(self) -> bool:
        return self.moe.apply_router_weight_on_input

    def _steps(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: Any, weigh: Any
    ) -> Tensor:
        kernel, weights = self.moe_kernel, Weights.of(layer)
        weights.check(x, topk_weights, topk_ids, self.activation)
        at = kernel.prepare(x, topk_weights, topk_ids)
        outputs = (kernel.experts or experts)(layer, at.x, at.topk_weights, at.topk_ids)
        scale = torch.ones_like(at.topk_weights) if self._on_input else at.topk_weights
        # A weight of NaN or infinity beside an id that is no expert contributes nothing, either.
        scale = torch.where(weights.local(at.topk_ids) >= 0, scale, 0.0)
        return kernel.combine(outputs, scale, at, weigh)

    def extra_repr(self) -> str:
        return f"{self.moe.num_experts} experts, {self.moe.activation}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for case in UnquantizedFusedMoEMethod.cases():
            method = UnquantizedFusedMoEMethod(case.init["moe"])
            yield Case(case.name, {"old_quant_method": method}, case.args, case.dims, case.bench)

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return UnquantizedFusedMoEMethod.cost(case, dtype)
