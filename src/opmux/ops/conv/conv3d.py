"""Convolution over videos."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from ...core.cases import Case
from ...core.custom_op import CustomOp
from .conv_layer import ConvLayer, conv_case, edge_cases

__all__ = ["Conv3dLayer"]


@CustomOp.register("conv3d")
class Conv3dLayer(ConvLayer):
    """``torch.nn.Conv3d``: cross-correlation with zero or other padding, plus a bias.

    On the CPU a convolution whose stride is its kernel's size, without padding, dilation and groups, is computed as a
    matrix product of its patches. What fills no patch is dropped, as any strided convolution drops it.

    Shapes:  x [B, C, T, H, W] -> [B, out, T', H', W'], contiguous; weight [out, C / groups, *kernel]; bias [out].
    Dtypes:  fp32, fp16, bf16, one for all; fp32 accumulation, the bias added before the one rounding.
    Mutates: nothing.      Grad: native only.
    Errors:  those of ``Conv2dLayer``.
    Source:  patch embedding of Qwen2-VL, arXiv 2409.12191; used by Qwen2.5-VL, Qwen3-VL, GLM-4.1V.

    Args: those of ``Conv2dLayer``, with three sizes.
    """

    rank = 3
    convolve = staticmethod(F.conv3d)

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for patches in (256, 4096):
            yield conv_case((patches, 3, 2, 14, 14), 1280, (2, 14, 14), bench=True, stride=(2, 14, 14))  # Qwen2-VL
        yield conv_case((1, 3, 8, 112, 112), 768, (2, 16, 16), bench=True, stride=(2, 16, 16))
        yield from edge_cases(3)
