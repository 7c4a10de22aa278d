"""The matrix product of every rank's whole weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.lazy import lazy_module
from ...core.requires import requires
from . import kernels_cpu

__all__ = ["ReplicatedLinear"]

kernels_triton = lazy_module("opmux.ops.linear.kernels_triton")


@CustomOp.register("replicated_linear")
class ReplicatedLinear(CustomOp):
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

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

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
        super().__init__(enforce_enable=enforce_enable)
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.weight = frozen(torch.empty(output_size, input_size, dtype=params_dtype))
        self.bias = frozen(torch.zeros(output_size, dtype=params_dtype)) if bias else None

    def forward_native(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        self._check(x)
        return self._returned(F.linear(x, self.weight, self._added_bias()))

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if x.shape[-1] != self.input_size:
            self._check(x)
        y = kernels_cpu.linear_cpu(x, self.weight, None if self.skip_bias_add else self.bias)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    def _more_than_one_row(self, x: Tensor) -> str | None:
        if x.numel() == self.input_size:
            return None
        return "leaves more than one row to native, which calls the vendor's library: that is faster there"

    @requires(dtypes=FLOATS, triton=True, when=_more_than_one_row)
    def forward_cuda(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        self._check(x)
        return self._returned(kernels_triton.linear_one_row_triton(x, self.weight, self._added_bias()))

    forward_hip = forward_xpu = forward_cuda

    def _added_bias(self) -> Tensor | None:
        return None if self.skip_bias_add else self.bias

    def _returned(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"replicated_linear was built for input_size {self.input_size}; x has shape {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [
            (t, i, o)
            for i, o in ((576, 960), (576, 3072), (1536, 576), (576, 49152), (4096, 4096))
            for t in (1, 4, 512)
        ]
        edges = [(0, 64, 8), (1, 1, 1), (3, 7, 5), (5, 65, 3), (2, 769, 33)]
        for t, i, o in [*sizes, *edges]:
            yield Case(
                name=f"T={t} {i}->{o}",
                init={"input_size": i, "output_size": o, "bias": o % 2 == 1, "return_bias": False},
                args=lambda inputs, t=t, i=i: (inputs.randn(t, i),),
                dims={"T": t, "in": i, "out": o},
                bench=(t, i, o) in sizes,
                prepare=_random_weight,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        t, i, o = case.dims["T"], case.dims["in"], case.dims["out"]
        return Cost(size_bytes=dtype.itemsize * (t * i + i * o + t * o), flops=2 * t * i * o)


def _random_weight(op: nn.Module, inputs: Inputs) -> None:
    for parameter in op.parameters():
        parameter.data = inputs.randn(*parameter.shape, scale=parameter.shape[-1] ** -0.5)
