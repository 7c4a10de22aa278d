"""RMS norms and layer norms: any module without children that computes one of our formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.norm.gemma_rms_norm import GemmaRMSNorm
from ..ops.norm.layer_norm import LayerNorm
from ..ops.norm.rms_norm import RMSNorm
from . import probe
from .binding import Binding, parameter_names, share_parameters

Build = dict[str, Any]  # constructor arguments, with the class under "cls"


class NormBinding(Binding):
    """Runs a norm module by its op. ``run`` takes a residual too, for the layers that add before they normalise."""

    def __init__(self, module: Any, op: CustomOp, hint: str) -> None:
        super().__init__(module)
        self.op = op
        self.hint = hint

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, self.hint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.op(args[0])


def looks_like_norm(module: Any) -> bool:
    """A leaf that takes one argument, with a vector of parameters called weight, or none where it says its width."""
    if module._modules or len(parameter_names(module)) != 1 or set(module._parameters) - {"weight", "bias"}:
        return False
    return _width(module) is not None


def find_norm(module: Any) -> NormBinding | str:
    """The binding for a norm, or why there is none."""
    verdict = probe.once(("norm", probe.fingerprint(module)), lambda: _recognise(module))
    if isinstance(verdict, str):
        return verdict
    build, hint = verdict
    return NormBinding(module, _op(build, module), hint)


def op_name(module: Any) -> str:
    """The op under which the report names a norm that was left as it is."""
    return "layer_norm" if isinstance(module, nn.LayerNorm) or "bias" in module._parameters else "rms_norm"


def _width(module: Any) -> int | None:
    """The width of one row, None where the parameters are not those of a norm over rows."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is not None:
        return weight.shape[0] if weight.dim() == 1 and (bias is None or bias.shape == weight.shape) else None
    shape = getattr(module, "normalized_shape", None)
    return shape[0] if bias is None and isinstance(shape, tuple) and len(shape) == 1 else None


def _op(build: Build, module: Any) -> CustomOp:
    arguments = dict(build)
    cls = arguments.pop("cls")
    with torch.device("meta"):
        op: CustomOp = cls(**arguments)
    share_parameters(op, module)
    return op


def _recognise(module: Any) -> tuple[Build, str] | str:
    width = _width(module)
    floats = [v for v in module.__dict__.values() if isinstance(v, float) and 0 <= v < 0.1]
    builds: list[Build] = [
        {"hidden_size": width, "eps": eps, **more} for eps in floats or (1e-6, 1e-5) for more in _candidates(module)
    ]
    with probe.quietly():
        try:
            exact = [b for b in builds if _errors(module, b, torch.float32) <= probe.FP32_TOLERANCE]
            if not exact:
                return "computes none of our norms (compared on random input)"
            # fp32 cannot tell where a narrower type is rounded, and that is what a norm's cast order decides.
            best = min(exact, key=lambda b: _errors(module, b, torch.bfloat16))
            if _errors(module, best, torch.bfloat16) > probe.LOW_TOLERANCE * torch.finfo(torch.bfloat16).eps:
                return "agrees with our norm in fp32 but not in bf16"
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    offset = best["cls"] is GemmaRMSNorm or "weight_offset" in best
    return best, "1 + weight" if offset else best.get("cast_order", "")


def _candidates(module: Any) -> list[Build]:
    weight, bias = (module._parameters.get(name) is not None for name in ("weight", "bias"))
    layer_norm: Build = {"cls": LayerNorm, "elementwise_affine": weight, "bias": bias, "round_sum": True}
    if not weight:
        return [layer_norm]
    if bias:
        return [layer_norm, {**layer_norm, "weight_offset": 1.0}]
    return [
        {"cls": RMSNorm, "cast_order": "cast_first", "round_sum": True},
        {"cls": RMSNorm, "cast_order": "cast_last", "round_sum": True},
        {"cls": GemmaRMSNorm, "round_sum": True},
        layer_norm,
    ]


def _errors(module: Any, build: Build, dtype: torch.dtype) -> float:
    twin = probe.specimen(module, dtype)
    op = _op(build, twin)
    # Small rows show eps; the mean over many values orders candidates that differ by single roundings.
    x = probe.random(twin, 64, build["hidden_size"])
    x = x.to(dtype) * torch.logspace(-3, 1, 64, dtype=dtype, device=x.device).unsqueeze(1)
    ours, theirs = op.forward_native(x), twin(x)
    worst = max(probe.difference(a, b) for a, b in zip(_rows(ours), _rows(theirs), strict=True))
    return worst + float((ours != theirs).float().mean()) * 1e-6


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
