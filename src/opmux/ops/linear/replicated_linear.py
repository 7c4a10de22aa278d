"""The matrix product with the whole weight on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.custom_op import CustomOp
from ...core.parameters import copy_checked
from ...distributed import ALONE
from .product import Product

__all__ = ["ReplicatedLinear"]


@CustomOp.register("replicated_linear")
class ReplicatedLinear(Product):
    """``y = x @ weight.T + bias``.

    Shapes:  x [..., in] -> [..., out]; weight [out, in]; bias [out].
    Dtypes:  fp32, fp16, bf16, one for all; fp32 accumulation, rounded once to x's dtype with the bias added before.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError if the last dimension is not ``input_size``.
    Returns: ``(y, bias)`` where ``bias`` is the parameter when ``skip_bias_add`` and None otherwise; with
             ``return_bias=False`` only ``y``.

    Args:
        input_size: in.
        output_size: out.
        bias: whether there is one.
        skip_bias_add: leave the addition to the caller, who gets the bias.
        params_dtype: of the parameters; None means torch's default.
        return_bias: see Returns.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        return_bias: bool = True,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            input_size, output_size, ALONE, bias=bias, bias_size=output_size, skip_bias_add=skip_bias_add,
            params_dtype=params_dtype, return_bias=return_bias, enforce_enable=enforce_enable,
        )  # fmt: skip
        self.input_size = input_size
        self.output_size = output_size

    def load_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy a checkpoint's weight [out, in] and bias [out]."""
        copy_checked(self.weight, weight, "The weight")
        if self.bias is not None and bias is not None:
            copy_checked(self.bias, bias, "The bias")
