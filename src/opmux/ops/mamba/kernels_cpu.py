"""The mamba kernels of the compiled CPU library, for Python. States are written in place, everything else is new."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like

_F32 = DTYPE_CODE[torch.float32]


@opaque(fake=lambda x, *_: x.new_empty(x.shape), mutates=("conv_state",))
def causal_conv1d_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor | None, cu_seqlens: Tensor | None,
    state_indices: Tensor | None, has_initial_state: Tensor | None, num_accepted_tokens: Tensor | None, silu: bool,
) -> Tensor:  # fmt: skip
    """``act(bias + sum_j weight[:, j] * x[t - (K - 1) + j])`` of every request, and its last inputs in its slot.

    Args:
        x: [S, D], [B, S, D], or packed [T, D], fp32, bf16 or fp16, any strides.
        weight: [D, K] or [D, 1, K]; bias: [D] or None; any of these dtypes.
        conv_state: [slots, >= K - 1, D] of any of these dtypes and any strides, or None.
        cu_seqlens, state_indices, has_initial_state, num_accepted_tokens: int32, dense, or None; see ``CausalConv1d``.

    Returns: x's shape and dtype, contiguous.
    """
    out = new_like(x)
    rows, count, width, stride = as_rows(x)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    kernels.causal_conv1d(
        out.data_ptr(), rows.data_ptr(), DTYPE_CODE[x.dtype], stride, width, weight.shape[-1],
        weight.data_ptr(), DTYPE_CODE[weight.dtype], *_address(bias), silu,
        *_address(conv_state), *((0, 0, 0) if conv_state is None else conv_state.stride()),
        0 if conv_state is None else conv_state.shape[1],
        *_requests(x.shape[:-1], count, conv_state, cu_seqlens, state_indices, has_initial_state, num_accepted_tokens),
    )  # fmt: skip
    return out


@opaque(fake=lambda x, *_: x.new_empty(x.shape), mutates=("ssm_state",))
def selective_scan_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, ssm_state: Tensor | None, cu_seqlens: Tensor | None, state_indices: Tensor | None,
    has_initial_state: Tensor | None, num_accepted_tokens: Tensor | None,
) -> Tensor:  # fmt: skip
    """The recurrence of ``SelectiveScan`` in fp32, rounded once.

    Args:
        x, dt, z: [S, I], [B, S, I], or packed [T, I], fp32, bf16 or fp16, any strides; z or None.
        A: [I, n]; B, C: x's, with n for I; D, dt_bias: [I] or None; any dtypes.
        ssm_state: [slots, I, n] of any of these dtypes, or None.
        cu_seqlens, ...: as of :func:`causal_conv1d_cpu`.

    Returns: x's shape and dtype, contiguous.
    """
    out = new_like(x)
    rows, count, width, stride = as_rows(x)
    step, _, _, step_stride = as_rows(dt)
    gate, _, _, gate_stride = (None, 0, 0, 0) if z is None else as_rows(z)
    a, b, c, d, bias = (None if t is None else t.float().contiguous() for t in (A, B, C, D, dt_bias))
    state = _dense(ssm_state)
    kernels.selective_scan(
        out.data_ptr(), *_address(rows), *_address(step), *_address(gate), stride, step_stride, gate_stride,
        *(_pointer(t) for t in (a, b, c, d, bias)), *_address(state), 0 if state is None else state.stride(0),
        width, A.shape[1],
        *_requests(x.shape[:-1], count, state, cu_seqlens, state_indices, has_initial_state, num_accepted_tokens),
    )  # fmt: skip
    if state is not ssm_state:
        ssm_state.copy_(state)  # type: ignore[union-attr, arg-type]
    return out


@opaque(fake=lambda x, *_: x.new_empty(x.shape), mutates=("ssm_state",))
def ssd_scan_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    ssm_state: Tensor | None, cu_seqlens: Tensor | None, state_indices: Tensor | None,
    has_initial_state: Tensor | None, num_accepted_tokens: Tensor | None, least: float, most: float,
) -> Tensor:  # fmt: skip
    """The recurrence of ``SSDScan`` in fp32, rounded once; four tokens of a head in one pass over its state.

    Args:
        x: [S, N, P], [B, S, N, P], or packed [T, N, P]; dt: [..., N]; fp32, bf16 or fp16, any strides.
        A, D, dt_bias: [N], the last two or None; B, C: [..., G, n]; any dtypes.
        ssm_state: [slots, N, P, n] of any of these dtypes, or None.
        cu_seqlens, ...: as of :func:`causal_conv1d_cpu`.
        least, most: the limits of dt.

    Returns: x's shape and dtype, contiguous.
    """
    out = new_like(x)
    heads, size = x.shape[-2:]
    rows, count, _, stride = as_rows(x.flatten(-2) if x.stride(-2) == size or heads == 1 else x.contiguous().flatten(-2))
    step, _, _, step_stride = as_rows(dt)
    a, b, c, d, bias = (None if t is None else t.float().contiguous() for t in (A, B, C, D, dt_bias))
    state = _dense(ssm_state)
    kernels.ssd_scan(
        out.data_ptr(), *_address(rows), *_address(step), stride, step_stride,
        *(_pointer(t) for t in (a, b, c, d, bias)), *_address(state), 0 if state is None else state.stride(0),
        heads, size, *B.shape[-2:], least, most,
        *_requests(x.shape[:-2], count, state, cu_seqlens, state_indices, has_initial_state, num_accepted_tokens),
    )  # fmt: skip
    if state is not ssm_state:
        ssm_state.copy_(state)  # type: ignore[union-attr, arg-type]
    return out


def _norm_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)


@opaque(fake=lambda x, gate, weight, *_: x.new_empty(x.shape, dtype=_norm_dtype(x, weight)))
def mixer2_gated_norm_cpu(x: Tensor, gate: Tensor, weight: Tensor | None, group_size: int, eps: float) -> Tensor:
    """``norm(x * silu(gate))`` over groups of neighbours, rounded to x's dtype, times weight; without weight no norm.

    Args:
        x, gate: [..., H], fp32, bf16 or fp16, any strides.
        weight: [H] of any of these dtypes, or None.

    Returns: [..., H] in x's dtype, or the wider one of x's and the weight's, contiguous.
    """
    dtype = _norm_dtype(x, weight)
    out = new_like(x) if dtype is x.dtype else torch.empty(x.shape, dtype=dtype, device="cpu")
    rows, count, width, stride = as_rows(x)
    gates, _, _, gate_stride = as_rows(gate)
    weight = None if weight is None else weight.contiguous()
    kernels.mixer2_gated_norm(
        out.data_ptr(), *_address(rows), *_address(gates), stride, gate_stride, *_address(weight), DTYPE_CODE[dtype],
        count, width, group_size, eps,
    )  # fmt: skip
    return out


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _address(t: Tensor | None) -> tuple[int | None, int]:
    """Address and dtype code."""
    return (None, _F32) if t is None else (t.data_ptr(), DTYPE_CODE[t.dtype])


def _dense(state: Tensor | None) -> Tensor | None:
    """The state itself where each slot is dense, else a copy."""
    return state if state is None or state.shape[0] == 0 or state[0].is_contiguous() else state.contiguous()


def _requests(
    lead: torch.Size, tokens: int, state: Tensor | None, cu_seqlens: Tensor | None, state_indices: Tensor | None,
    has_initial_state: Tensor | None, num_accepted_tokens: Tensor | None,
) -> tuple[int | None, ...]:  # fmt: skip
    """The arguments of ``read_requests``."""
    count = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 1 if len(lead) == 1 else lead[0]
    window = 1 if state_indices is None or state_indices.dim() == 1 else state_indices.shape[1]
    given = (cu_seqlens, state_indices, has_initial_state, num_accepted_tokens)
    return count, lead[-1], tokens, 0 if state is None else state.shape[0], window, *map(_pointer, given)
