"""The activation kernels of the compiled CPU library, for Python. All compute in fp32 and return contiguous tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like

GATED = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "fatrelu": 3}
ELEMENTWISE = {"gelu_tanh": 0, "quick_gelu": 1, "relu2": 2, "xielu": 3, "gelu": 4}


def _half(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@opaque(fake=_half)
def act_and_mul_cpu(x: Tensor, kind: str, threshold: float, round_gate: bool, gate_second: bool) -> Tensor:
    """``activation(x[..., :d]) * x[..., d:]``; with ``gate_second`` the activation is on the second half.

    Args:
        x: [..., 2d], fp32, bf16 or fp16, any strides.
        kind: a key of ``GATED``.
        threshold: of fatrelu.
        round_gate: round the activation to x's dtype before the product (eager PyTorch); otherwise round once.

    Returns: [..., d].
    """
    rows, count, width, stride = as_rows(x)
    width //= 2
    out = new_like(x, width)
    first = rows.data_ptr()
    second = first + width * x.itemsize
    if gate_second:
        first, second = second, first
    kernels.gated_activation(
        first,
        stride,
        second,
        stride,
        out.data_ptr(),
        count,
        width,
        DTYPE_CODE[x.dtype],
        GATED[kind],
        threshold,
        round_gate,
    )
    return out


@opaque(fake=lambda gate, *_: gate.new_empty(gate.shape))
def act_mul_cpu(gate: Tensor, up: Tensor, kind: str, threshold: float, round_gate: bool) -> Tensor:
    """``activation(gate) * up``, both [..., d] of one dtype; other arguments as of :func:`act_and_mul_cpu`."""
    gate_rows, count, width, gate_stride = as_rows(gate)
    up_rows, _, _, up_stride = as_rows(up)
    out = new_like(gate)
    kernels.gated_activation(
        gate_rows.data_ptr(), gate_stride, up_rows.data_ptr(), up_stride, out.data_ptr(), count, width,
        DTYPE_CODE[gate.dtype], GATED[kind], threshold, round_gate,
    )  # fmt: skip
    return out


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def activation_cpu(x: Tensor, kind: str, parameters: list[float]) -> Tensor:
    """An element-wise activation of x [...]; ``kind`` is a key of ``ELEMENTWISE``.

    ``parameters`` are (alpha_p, alpha_n, beta, eps) for xielu and empty for the others.
    """
    out = new_like(x)
    if x.is_contiguous():
        rows, stride, count, width = x, 0, 1, x.numel()
    else:
        rows, count, width, stride = as_rows(x)
    alpha_p, alpha_n, beta, eps = parameters or (0.0, 0.0, 0.0, 0.0)
    kernels.activation(
        rows.data_ptr(), stride, out.data_ptr(), count, width, DTYPE_CODE[x.dtype], ELEMENTWISE[kind],
        alpha_p, alpha_n, beta, eps,
    )  # fmt: skip
    return out


@opaque(fake=_half)
def swigluoai_and_mul_cpu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``; they alternate in x.

    x: [..., 2d] -> [..., d].
    """
    rows, count, width, stride = as_rows(x)
    out = new_like(x, width // 2)
    kernels.swigluoai_and_mul(
        rows.data_ptr(), stride, out.data_ptr(), count, width // 2, DTYPE_CODE[x.dtype], alpha, limit
    )
    return out


@opaque(fake=_half)
def gelu_and_mul_sparse_cpu(x: Tensor, multiplier: float, by_tanh: bool) -> Tensor:
    """``gelu(relu(g - cutoff)) * x[..., d:]``, g = x[..., :d], cutoff = mean(g) + multiplier * population deviation(g).

    x: [..., 2d] -> [..., d].
    """
    rows, count, width, stride = as_rows(x)
    width //= 2
    out = new_like(x, width)
    gate = rows.data_ptr()
    kernels.gelu_and_mul_sparse(
        gate, stride, gate + width * x.itemsize, stride, out.data_ptr(), count, width, DTYPE_CODE[x.dtype],
        multiplier, by_tanh,
    )  # fmt: skip
    return out


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def xielu_cpu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU of x [...]; the parameters are scalars in tensors, the slopes stored as inverse softplus."""
    slopes = F.softplus(torch.stack([alpha_p.detach().float().squeeze(), alpha_n.detach().float().squeeze()])).tolist()
    shift, bound = float(beta), float(eps)
    return activation_cpu(x, "xielu", [slopes[0], shift + slopes[1], shift, bound])
