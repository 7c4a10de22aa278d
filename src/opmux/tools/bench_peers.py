"""What ``bench`` times beside an op's own methods: the compiler on the definition, and vLLM's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Peer = Callable[..., Any]
"""Called with the op and its arguments, as the op itself would be."""


def eager(op: Any, *args: Any) -> Any:
    """The definition as it stands."""
    return op.forward_native(*args)


def compiled() -> Peer:
    """The definition under Inductor; made anew for each case, so that it is compiled for these very shapes."""
    torch.compiler.reset()
    return torch.compile(eager, dynamic=False)


def vllm(op: Any) -> Peer | None:
    """vLLM's kernel for ``op`` as it was built, or None if it has none or vLLM is not installed.

    Its kernels write into memory that the caller brings; here it is allocated in the call, as the ops' own outputs are.
    """
    if not vllm_there():
        return None
    make = _VLLM.get(op.name)
    return None if make is None else make(op)


def vllm_there() -> bool:
    """Whether vLLM's compiled kernels can be called in this process."""
    if not hasattr(torch.ops._C, "rms_norm"):
        try:
            importlib.import_module("vllm._C")
        except ImportError:
            return False
    return hasattr(torch.ops._C, "rms_norm")


def _gated(name: str) -> Callable[[Any], Peer]:
    def call(op: Any, x: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        getattr(torch.ops._C, name)(out, x)
        return out

    return lambda op: call


def _elementwise(name: str) -> Callable[[Any], Peer]:
    def call(op: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        getattr(torch.ops._C, name)(out, x)
        return out

    return lambda op: call


def _gelu_and_mul(op: Any) -> Peer:
    return _gated("gelu_tanh_and_mul" if op.approximate == "tanh" else "gelu_and_mul")(op)


def _silu_and_mul(op: Any) -> Peer | None:
    return None if op.round_gate else _gated("silu_and_mul")(op)


def _rms_norm(op: Any) -> Peer | None:
    if op.weight is None or op.variance_size != op.hidden_size:
        return None

    def call(op: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, op.weight, op.eps)
            return out
        out, total = x.clone(), residual.clone()  # it writes both results over its inputs, which are ours to keep
        torch.ops._C.fused_add_rms_norm(out, total, op.weight, op.eps)
        return out, total

    return call


_VLLM: dict[str, Callable[[Any], Peer | None]] = {
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "gelu_new": _elementwise("gelu_new"),
    "gelu_fast": _elementwise("gelu_fast"),
    "quick_gelu": _elementwise("gelu_quick"),
    "rms_norm": _rms_norm,
}
