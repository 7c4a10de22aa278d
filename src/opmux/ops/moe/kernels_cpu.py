"""The MoE kernels of the compiled CPU library, for Python."""

from __future__ import annotations

import torch
from torch import Tensor

from opmux.core.torch_library import opaque
from opmux.native import DTYPE_CODE, kernels
from opmux.native.layout import as_rows, new_like

from .routing import SCORES

KINDS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")  # Kind in kernels_cpu.cpp


def _chosen(logits: Tensor, bias: Tensor | None, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@opaque(fake=_chosen)
def grouped_topk_cpu(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalize: bool, num_expert_group: int, topk_group: int,
    scoring_func: str, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E] of any strides, bias [E] -> weights [T, k] fp32, ids [T, k] int32. See ``GroupedTopk``."""
    weights, ids = _chosen(logits, bias, top_k)
    logits, rows, experts, stride = as_rows(logits)
    bias = None if bias is None else bias.float().contiguous()
    kernels.grouped_topk(
        weights.data_ptr(), ids.data_ptr(), logits.data_ptr(), stride, DTYPE_CODE[logits.dtype],
        None if bias is None else bias.data_ptr(), rows, experts, top_k, num_expert_group, topk_group, renormalize,
        SCORES.index(scoring_func), routed_scaling_factor,
    )  # fmt: skip
    return weights, ids


@opaque(fake=lambda x, *_: x.new_empty(x.shape))
def fused_experts_cpu(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, b13: Tensor | None, b2: Tensor | None,
    expert_map: Tensor | None, kind: str, gated: bool, interleaved: bool, alpha: float, limit: float,
    weight_on_input: bool,
) -> Tensor:  # fmt: skip
    """Experts and their weighted sum.

    Args:
        x: [T, H], fp32, bf16 or fp16, any strides.
        w13, w2, b13, b2, expert_map: as of ``experts.Weights``; weights whose rows are not contiguous are copied.
        topk_weights, topk_ids: [T, k].
        kind, gated, interleaved, alpha, limit: as of ``experts.Activation``.
        weight_on_input: multiply x by the weight, not the output.

    Returns: [T, H] in x's dtype, contiguous.
    """
    ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    expert_map = None if expert_map is None else expert_map.to(torch.int32).contiguous()
    out = new_like(x)
    outputs = x.new_empty((*ids.shape, x.shape[1]))  # rows of slots without an expert stay unwritten, and unread
    _experts(outputs, x, w13, w2, weights if weight_on_input else None, ids, b13, b2, expert_map, kind, gated,
             interleaved, alpha, limit, False)  # fmt: skip
    kernels.moe_combine(
        out.data_ptr(), outputs.data_ptr(), None if weight_on_input else weights.data_ptr(), *_ids(ids, expert_map),
        w13.shape[0], *outputs.shape, DTYPE_CODE[x.dtype],
    )  # fmt: skip
    return out


def _outputs(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: object) -> Tensor:
    return x.new_empty((*topk_ids.shape, x.shape[1]))


@opaque(fake=_outputs)
def expert_outputs_cpu(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, b13: Tensor | None, b2: Tensor | None,
    expert_map: Tensor | None, kind: str, gated: bool, interleaved: bool, alpha: float, limit: float,
    weight_on_input: bool,
) -> Tensor:  # fmt: skip
    """What each chosen expert makes of its token: [T, k, H], zeros where there is none. As ``fused_experts_cpu``."""
    ids = topk_ids.contiguous()
    weights = topk_weights.float().contiguous() if weight_on_input else None
    expert_map = None if expert_map is None else expert_map.to(torch.int32).contiguous()
    outputs = _outputs(x, w13, w2, topk_weights, ids)
    _experts(outputs, x, w13, w2, weights, ids, b13, b2, expert_map, kind, gated, interleaved, alpha, limit, True)
    return outputs


@opaque(fake=lambda outputs, weights: outputs.new_empty((outputs.shape[0], outputs.shape[2])))
def combine_experts_cpu(outputs: Tensor, topk_weights: Tensor) -> Tensor:
    """``sum_j w_j y_j`` of outputs [T, k, H] and weights [T, k]: fp32, in the order of j, rounded once -> [T, H]."""
    outputs, weights = outputs.contiguous(), topk_weights.float().contiguous()
    out = outputs.new_empty((outputs.shape[0], outputs.shape[2]))
    kernels.moe_combine(
        out.data_ptr(), outputs.data_ptr(), weights.data_ptr(), None, False, None, 0, 0, *outputs.shape,
        DTYPE_CODE[outputs.dtype],
    )  # fmt: skip
    return out


def _experts(
    outputs: Tensor, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor | None, ids: Tensor, b13: Tensor | None,
    b2: Tensor | None, expert_map: Tensor | None, kind: str, gated: bool, interleaved: bool, alpha: float, limit: float,
    zero: bool,
) -> None:  # fmt: skip
    x, tokens, hidden, stride = as_rows(x)
    w13, w2 = (w if w.stride(2) == 1 else w.contiguous() for w in (w13, w2))
    b13, b2 = (None if b is None else b.contiguous() for b in (b13, b2))
    kernels.moe_experts(
        outputs.data_ptr(), x.data_ptr(), stride, None if weights is None else weights.data_ptr(),
        *_ids(ids, expert_map), tokens, ids.shape[1], hidden, w2.shape[2], w13.shape[0],
        w13.data_ptr(), w13.stride(0), w13.stride(1), None if b13 is None else b13.data_ptr(),
        w2.data_ptr(), w2.stride(0), w2.stride(1), None if b2 is None else b2.data_ptr(),
        KINDS.index(kind), gated, interleaved, alpha, limit, zero, DTYPE_CODE[x.dtype],
    )  # fmt: skip


def _ids(ids: Tensor, expert_map: Tensor | None) -> tuple[int, bool, int | None, int]:
    """Ids as kernels take them: address, whether they are int64, the map and its length."""
    mapped = (None, 0) if expert_map is None else (expert_map.data_ptr(), expert_map.shape[0])
    return ids.data_ptr(), ids.dtype is torch.int64, *mapped
