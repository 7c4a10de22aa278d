"""Patch embeddings: convolutions whose stride is their kernel's size, which are products of patches with the weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.conv.conv2d import Conv2dLayer
from ..ops.conv.conv3d import Conv3dLayer
from ..ops.conv.conv_layer import ConvLayer
from .binding import Binding, share_parameters

_OPS: dict[type, type[ConvLayer]] = {nn.Conv2d: Conv2dLayer, nn.Conv3d: Conv3dLayer}


class ConvBinding(Binding):
    """Runs an ``nn.Conv2d`` or ``nn.Conv3d`` by its op on the module's own parameters."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.op = conv_op(module)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, "patches that touch"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]) or args[0].dim() != self.op.rank + 2:
            return self.original(*args, **kwargs)
        return self.op(args[0])


def conv_op(module: Any) -> ConvLayer:
    """The op of a convolution, on its parameters."""
    with torch.device("meta"):
        op = _OPS[type(module)](
            module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
            module.dilation, module.groups, module.bias is not None, module.padding_mode,
        )  # fmt: skip
    share_parameters(op, module)
    return op


def looks_like_conv(module: Any) -> bool:
    """A convolution over images or videos."""
    return isinstance(module, (nn.Conv2d, nn.Conv3d))


def find_conv(module: Any) -> ConvBinding | str:
    """The binding for a convolution, or why there is none."""
    if type(module) not in _OPS:
        return f"is a {type(module).__qualname__}, not a plain nn.Conv2d or nn.Conv3d"
    weight = module._parameters.get("weight")
    if weight is None or type(weight.data) is not Tensor or weight.is_meta or not weight.is_floating_point():
        return "its weight is no plain tensor (quantised, sharded or offloaded)"
    why = conv_op(module).why_no_matrix
    return ConvBinding(module) if why is None else f"apply replaces patch embeddings, and the kernel {why}"


def op_name(module: Any) -> str:
    """The op under which the report names a convolution that was left as it is."""
    return "conv2d" if isinstance(module, nn.Conv2d) else "conv3d"
