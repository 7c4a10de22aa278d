"""What the linear ops share: the weight, the product on each platform, and the cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import TensorParallel, tensor_parallel
from . import kernels_cpu

kernels_triton = lazy_module("opmux.ops.linear.kernels_triton")

Result = Tensor | tuple[Tensor, Tensor | None]


class Product(CustomOp):
    """``x @ weight.T + bias`` with this rank's part of the weight.

    A subclass says which part, and what joins the results.

    Attributes:
        tp: the ranks that share the weight.
        local_input_size, local_output_size: the shape of this rank's weight.
    """

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)

    def __init__(
        self,
        local_input_size: int,
        local_output_size: int,
        tp: TensorParallel,
        *,
        bias: bool,
        bias_size: int,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        return_bias: bool,
        enforce_enable: bool,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.tp = tp
        self.local_input_size = local_input_size
        self.local_output_size = local_output_size
        self.skip_bias_add = skip_bias_add
        self.return_bias = return_bias
        self.weight = frozen(torch.empty(local_output_size, local_input_size, dtype=params_dtype))
        self.bias = frozen(torch.zeros(bias_size, dtype=params_dtype)) if bias else None

    def forward_native(self, x: Tensor) -> Result:
        x = self._local_input(x)
        return self._joined(F.linear(x, self.weight, self._added_bias()))

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor) -> Result:
        x = self._local_input(x)
        return self._joined(kernels_cpu.linear_cpu(x, self.weight, self._added_bias()))

    def _more_than_one_row(self, x: Tensor) -> str | None:
        if x.numel() == x.shape[-1]:
            return None
        return "leaves more than one row to native, which calls the vendor's library: that is faster there"

    @requires(dtypes=FLOATS, triton=True, when=_more_than_one_row)
    def forward_cuda(self, x: Tensor) -> Result:
        x = self._local_input(x)
        return self._joined(kernels_triton.linear_one_row_triton(x, self.weight, self._added_bias()))

    forward_hip = forward_xpu = forward_cuda

    def _local_input(self, x: Tensor) -> Tensor:
        """The part of x that this rank's weight multiplies, checked."""
        if x.shape[-1] != self.local_input_size:
            raise ValueError(
                f"{self.name} multiplies inputs of {self.local_input_size} features; x has shape {tuple(x.shape)}."
            )
        return x

    def _joined(self, y: Tensor) -> Result:
        """The result of all ranks from this rank's product."""
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    def _added_bias(self) -> Tensor | None:
        return None if self.skip_bias_add else self.bias

    # nn.Linear's names, of this rank's weight: a sharded model's own code reads them.
    @property
    def in_features(self) -> int:
        return self.local_input_size

    @property
    def out_features(self) -> int:
        return self.local_output_size

    def extra_repr(self) -> str:
        return (
            f"{self.local_input_size}, {self.local_output_size}, bias={self.bias is not None}"
            f"{f', rank {self.tp.rank} of {self.tp.size}' if self.tp.size > 1 else ''}"
        )

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
                prepare=random_parameters,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        t, i, o = case.dims["T"], case.dims["in"], case.dims["out"]
        return Cost(size_bytes=dtype.itemsize * (t * i + i * o + t * o), flops=2 * t * i * o)


def ranks(disable_tp: bool) -> TensorParallel:
    """The ranks that a layer built now shards over."""
    return TensorParallel() if disable_tp else tensor_parallel()


def random_parameters(op: CustomOp, inputs: Inputs) -> None:
    """Weights of the size that keeps the products near one."""
    for parameter in op.parameters():
        parameter.data = inputs.randn(*parameter.shape, scale=parameter.shape[-1] ** -0.5)
