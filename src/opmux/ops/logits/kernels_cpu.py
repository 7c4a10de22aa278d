"""The logits kernel of the compiled CPU library, for Python."""

from __future__ import annotations

from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def cap_and_scale_cpu(x: Tensor, soft_cap: float, scale: float) -> Tensor:
    """``soft_cap * tanh(x / soft_cap) * scale`` in fp32, rounded once; ``soft_cap`` 0 means none.

    x: [..., V], fp32, bf16 or fp16, any strides -> [..., V], contiguous.
    """
    rows, count, width, stride = as_rows(x)
    out = new_like(x)
    kernels.cap_and_scale(rows.data_ptr(), stride, out.data_ptr(), count, width, DTYPE_CODE[x.dtype], soft_cap, scale)
    return out
