"""The matrix product with the weight's columns spread over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.custom_op import CustomOp
from ...core.parameters import copy_checked
from .product import Product, Result, ranks

__all__ = ["RowParallelLinear"]


@CustomOp.register("row_parallel_linear")
class RowParallelLinear(Product):
    """``y = x @ weight.T + bias`` where each rank holds ``in / ranks`` of the inputs' columns; the results are summed.

    Shapes:  x [..., in / ranks], or [..., in] with ``input_is_parallel=False`` -> [..., out] on every rank.
    Dtypes:  as of ``ReplicatedLinear``; each rank's sum is rounded to x's dtype before they are added.
    Mutates: nothing.      Grad: native only.
    Errors:  TensorParallelError with both numbers if ``input_size`` does not divide; ValueError for
             ``reduce_results=False`` with a bias that is not skipped.
    Returns: ``(y, bias)`` or ``y``, as of ``ReplicatedLinear``.
    Source:  Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053.

    Args:
        input_size, output_size, bias, skip_bias_add, params_dtype, return_bias: as of ``ReplicatedLinear``; sizes are
            those of the whole weight.
        input_is_parallel: x is this rank's part already.
        reduce_results: sum over the ranks; without it each rank returns its own summand.
        disable_tp: hold the whole weight on every rank.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        if not reduce_results and bias and not skip_bias_add:
            raise ValueError(
                "reduce_results=False leaves the sum to the caller, and so the bias: pass skip_bias_add=True."
            )
        tp = ranks(disable_tp)
        super().__init__(
            tp.share(input_size, "input_size"), output_size, tp, bias=bias, bias_size=output_size,
            skip_bias_add=skip_bias_add, params_dtype=params_dtype, return_bias=return_bias,
            enforce_enable=enforce_enable,
        )  # fmt: skip
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results

    def _local_input(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel and self.tp.size > 1 and x.shape[-1] == self.input_size:
            x = x.chunk(self.tp.size, dim=-1)[self.tp.rank]
        return super()._local_input(x)

    def _added_bias(self) -> Tensor | None:
        # Once, by the first rank, inside the product.
        return None if self.skip_bias_add or self.tp.rank else self.bias

    def _joined(self, y: Tensor) -> Result:
        if self.reduce_results:
            y = self.tp.all_reduce(y)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    def load_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's columns of a checkpoint's whole weight [out, in], and the whole bias [out]."""
        first = self.tp.rank * self.local_input_size
        copy_checked(self.weight, weight[:, first : first + self.local_input_size], "The weight")
        if self.bias is not None and bias is not None:
            copy_checked(self.bias, bias, "The bias")
