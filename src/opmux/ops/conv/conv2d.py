"""Convolution over images."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from ...core.cases import Case
from ...core.custom_op import CustomOp
from .conv_layer import ConvLayer, conv_case, edge_cases

__all__ = ["Conv2dLayer"]


@CustomOp.register("conv2d")
class Conv2dLayer(ConvLayer):
    """``torch.nn.Conv2d``: cross-correlation with zero or other padding, plus a bias.

    On the CPU a convolution whose stride is its kernel's size, without padding, dilation and groups, is computed as a
    matrix product of its patches: the patch embedding of vision towers. Rows and columns that fill no patch are
    dropped, as any strided convolution drops them.

    Shapes:  x [B, C, H, W] -> [B, out, H', W'], contiguous; weight [out, C / groups, *kernel]; bias [out].
    Dtypes:  fp32, fp16, bf16, one for all; fp32 accumulation, the bias added before the one rounding.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for channels that ``groups`` does not divide, an unknown ``padding_mode`` or word for
             ``padding``, "same" with a stride, and an x of another rank, other channels, or smaller than the kernel.
    Source:  patch embedding: Dosovitskiy et al. 2020, arXiv 2010.11929; used by CLIP, SigLIP, InternViT, Pixtral.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as of
            ``torch.nn.Conv2d``; with an even kernel "same" pads one more at the end.
        params_dtype: of the parameters; None means torch's default.
    """

    rank = 2
    convolve = staticmethod(F.conv2d)

    @classmethod
    def cases(cls) -> Iterator[Case]:
        yield conv_case((1, 3, 224, 224), 1024, 14, bench=True, stride=(14, 14))  # CLIP ViT-L/14
        yield conv_case((1, 3, 384, 384), 1152, 14, bench=True, stride=(14, 14))  # SigLIP so400m/14, with a rest
        yield conv_case((8, 3, 224, 224), 768, 16, bench=True, stride=(16, 16))  # ViT-B/16
        yield from edge_cases(2)
