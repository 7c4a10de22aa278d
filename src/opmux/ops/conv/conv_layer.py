"""What the convolutions share: their parameters, how their edges are padded, and where they are a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Sizes = int | Sequence[int]


class ConvLayer(CustomOp):
    """A convolution over ``rank`` dimensions; the registered classes say what it computes."""

    tolerance = Tolerance(ulp=1.0, fp32=64.0, scale=1.0)
    rank: ClassVar[int]
    convolve: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | Literal["same", "valid"] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{self.name}: groups is {groups}; it must divide in_channels, {in_channels}, and out_channels, "
                f"{out_channels}."
            )
        if padding_mode not in ("zeros", "reflect", "replicate", "circular"):
            raise ValueError(
                f"{self.name}: padding_mode is {padding_mode!r}; there are 'zeros', 'reflect', 'replicate', 'circular'."
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = self._sizes("kernel_size", kernel_size, 1)
        self.stride = self._sizes("stride", stride, 1)
        self.dilation = self._sizes("dilation", dilation, 1)
        self.groups = groups
        self.padding = padding if isinstance(padding, str) else self._sizes("padding", padding, 0)
        self.padding_mode = padding_mode
        self.margins = self._margins()
        self.weight = frozen(torch.empty(out_channels, in_channels // groups, *self.kernel_size, dtype=params_dtype))
        self.bias = frozen(torch.zeros(out_channels, dtype=params_dtype)) if bias else None
        self.why_no_matrix = self._why_no_matrix()

    def forward_native(self, x: Tensor) -> Tensor:
        self._check(x)
        padding: tuple[int, ...] | str = self.padding
        if self.padding_mode != "zeros" and any(map(any, self.margins)):
            # F.pad takes the last dimension first.
            x = F.pad(x, [n for margin in reversed(self.margins) for n in margin], mode=self.padding_mode)
            padding = (0,) * self.rank
        return type(self).convolve(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _matrix_only(self, x: Tensor) -> str | None:
        return self.why_no_matrix

    @requires(dtypes=FLOATS, native_library=True, when=_matrix_only)
    def forward_cpu(self, x: Tensor) -> Tensor:
        self._check(x)
        return kernels_cpu.patch_conv_cpu(x, self.weight, self.bias)

    def _sizes(self, what: str, value: Sizes, least: int) -> tuple[int, ...]:
        sizes = (value,) * self.rank if isinstance(value, int) else tuple(value)
        if len(sizes) != self.rank or min(sizes) < least:
            raise ValueError(
                f"{self.name}: {what} is {value}; it must be a number, or {self.rank} of them, not below {least}."
            )
        return sizes

    def _margins(self) -> tuple[tuple[int, int], ...]:
        """What padding adds before and after, in each dimension."""
        if isinstance(self.padding, tuple):
            return tuple((p, p) for p in self.padding)
        if self.padding == "valid":
            return ((0, 0),) * self.rank
        if self.padding != "same":
            raise ValueError(f"{self.name}: padding is {self.padding!r}; in words there are 'same' and 'valid'.")
        if any(s != 1 for s in self.stride):
            raise ValueError(f"{self.name}: padding 'same' needs stride 1; stride is {self.stride}.")
        totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)

    def _why_no_matrix(self) -> str | None:
        """Why this convolution is not a product of touching patches with the weight; None if it is."""
        if self.stride != self.kernel_size:
            return f"is for patches that touch; kernel_size is {self.kernel_size}, stride {self.stride}"
        if any(map(any, self.margins)):
            return f"takes no padding; padding is {self.padding}"
        if any(d != 1 and k != 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)):
            return f"takes no dilation; dilation is {self.dilation}"
        return None if self.groups == 1 else f"takes no groups; groups is {self.groups}"

    def _check(self, x: Tensor) -> None:
        if x.dim() != self.rank + 2 or x.shape[1] != self.in_channels:
            sizes = ", ".join(("T", "H", "W")[-self.rank :])
            raise ValueError(
                f"{self.name} takes [B, {self.in_channels} channels, {sizes}]; x has shape {tuple(x.shape)}."
            )
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if any(n + sum(m) < r for n, m, r in zip(x.shape[2:], self.margins, reach, strict=True)):
            raise ValueError(
                f"{self.name}: x has shape {tuple(x.shape)}; with its padding it is smaller than the kernel, {reach}."
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        """Of the product, whatever overlaps."""
        patches, features, out = case.dims["T"], case.dims["in"], case.dims["out"]
        size = patches * features + features * out + patches * out
        return Cost(size_bytes=dtype.itemsize * size, flops=2 * patches * features * out)


def conv_case(shape: Sequence[int], out: int, kernel: Sizes, *, bench: bool = False, **init: Any) -> Case:
    """A case of input ``shape`` [B, C, ...]; without other arguments the stride is the kernel."""
    rank = len(shape) - 2
    sizes = (kernel,) * rank if isinstance(kernel, int) else tuple(kernel)
    init = init or {"stride": sizes}
    patches, features = shape[0], shape[1]
    for n, k, s in zip(shape[2:], sizes, init.get("stride", (1,) * rank), strict=True):
        patches *= max((n - k) // s + 1, 0)
        features *= k
    extra = " ".join(f"{k}={v}" for k, v in init.items() if k != "stride" or v != sizes)
    return Case(
        name=f"{'x'.join(map(str, shape))} -> {out}, kernel {'x'.join(map(str, sizes))} {extra}".rstrip(),
        init={
            "in_channels": shape[1],
            "out_channels": out,
            "kernel_size": sizes,
            "bias": out % 2 == 1 or bench,
            **init,
        },
        args=lambda inputs: (inputs.randn(*shape),),
        dims={"T": patches, "in": features, "out": out},
        bench=bench,
        prepare=_random_weight,
    )


def edge_cases(rank: int) -> Iterator[Case]:
    """Patches with a rest, none at all, one pixel, and every argument that makes it no matrix product."""
    yield conv_case((2, 3, *(9, 11, 8)[-rank:]), 5, (2, 3, 4)[-rank:])
    yield conv_case((0, 3, *(4,) * rank), 4, 2)
    yield conv_case((2, 3, *(5,) * rank), 7, 1)
    yield conv_case((3, 4, *(2, 14, 14)[-rank:]), 33, (2, 14, 14)[-rank:])
    yield conv_case((1, 4, *(7,) * rank), 6, 3, stride=(2,) * rank, padding=1)
    yield conv_case((1, 4, *(7,) * rank), 6, 2, stride=(2,) * rank, dilation=2)
    yield conv_case((2, 4, *(6,) * rank), 6, 2, stride=(2,) * rank, groups=2)
    for mode in ("zeros", "reflect", "replicate", "circular"):
        yield conv_case((1, 2, *(6,) * rank), 3, 4, padding="same", padding_mode=mode)


def _random_weight(op: ConvLayer, inputs: Inputs) -> None:
    features = op.weight[0].numel()
    op.weight.data = inputs.randn(*op.weight.shape, scale=features**-0.5)
    if op.bias is not None:
        op.bias.data = inputs.randn(op.out_channels)
